"""Recurrent states over ranks that hold sequence shards.

A recurrence updates a state token by token, and a convolution reads some earlier
tokens. So the functions that compute them (`TOKENS` in documents.py) need data of the
ranks that hold earlier tokens: the tokens that a convolution reads, or the state at the
start of a chunk. A chunk of tokens maps a state S to T S + B. Each rank computes T and
B of its chunks, all ranks exchange them, and each rank applies those of the chunks
before its own. If a function has no such rule, each rank computes it for the tokens of
all ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad, silu, softplus

from planc.runtime.standalone.collectives import GatherSequence
from planc.runtime.standalone.context_tokens import ContextError, KeyTokens
from planc.runtime.standalone.documents import (
    FUSED,
    TOKENS,
    Documents,
    full_tensor,
    running,
)


class StateRanks:
    """Computes recurrent states over the tokens of all ranks, in one forward pass.

    Args:
        group: the process group of the context axis.
        tokens: the tokens of all ranks.
        parts: the keys of `TOKENS` that the model has.
        gathers: whether each rank computes all tokens of a row.
        documents: the packed documents of unsharded rows, for which each rank computes
            all tokens; None if each row is one document.
    """

    def __init__(
        self,
        group: Any,
        tokens: KeyTokens,
        parts: Sequence[str],
        gathers: bool,
        documents: Documents | None,
    ) -> None:
        self.group, self.tokens, self.documents = group, tokens, documents
        self.parts = {*parts, *FUSED}
        self.gathers = gathers or documents is not None
        self.asked = self.kept = False
        ranks, rank = group.size(), group.rank()
        self.rows, self.length = tokens.places.shape
        self.mine = slice(rank * tokens.own, (rank + 1) * tokens.own)
        # the runs of this rank by their numbers in a row, and all, by rank
        self.runs = [rank] if tokens.balance == "none" else [rank, 2 * ranks - 1 - rank]
        chunks = [[r, 2 * ranks - 1 - r][: len(self.runs)] for r in range(ranks)]
        self.order = torch.tensor(chunks).flatten().argsort()

    def run_recurrence(
        self, function: Callable[..., Any], part: str, args: Any, kwargs: Any
    ) -> Any:
        """The outputs of a function with a recurrent state, for this rank's tokens."""
        self.kept, dim = True, TOKENS[part]
        exchange = EXCHANGES.get(part)
        if exchange is not None and not self.gathers:
            if any(isinstance(value, DTensor) for value in (*args, *kwargs.values())):
                text = "gets DTensors: use local tensors, or `exchange = gather`"
                raise ContextError(f"{part} {text}")
            with running(None):
                return exchange(self, function, *args, **kwargs)
        named = {name: self.gather_tokens(value, dim) for name, value in kwargs.items()}
        with running(self.documents):
            outputs = function(
                *(self.gather_tokens(value, dim) for value in args), **named
            )
        return self.local_outputs(outputs, dim)

    # whole rows -----------------------------------------------------------------------

    def has(self, value: Any, dim: int) -> bool:
        """Whether a value has this rank's tokens of all rows, on dims 0 and `dim`."""
        if not isinstance(value, Tensor) or value.dim() <= dim:
            return False
        return (len(value), value.shape[dim]) == (self.rows, self.tokens.own)

    def gather_tokens(self, value: Any, dim: int) -> Any:
        """The tokens of all ranks in the order of the row; other values as they are."""
        if not self.has(value, dim):
            return value

        def gather(part: Tensor) -> Tensor:
            gathered = GatherSequence.apply(part.movedim(dim, 1)[None], self.group)[0]
            return in_places(gathered, self.tokens.places.argsort(1)).movedim(1, dim)

        return of_local(gather, value, dim)

    def local_outputs(self, outputs: Any, dim: int) -> Any:
        """This rank's tokens of outputs; None for final states, which have none."""
        if isinstance(outputs, tuple | list):
            return tuple(self.local_outputs(value, dim) for value in outputs)
        if not isinstance(outputs, Tensor) or outputs.dim() <= dim:
            return None
        if len(outputs) != self.rows or outputs.shape[dim] < self.length:
            return None
        places = self.tokens.places[:, self.mine]
        return of_local(
            lambda tokens: in_places(tokens.movedim(dim, 1), places).movedim(1, dim),
            outputs,
            dim,
        )

    # parts of rows --------------------------------------------------------------------

    def in_sequence(self, runs: Tensor) -> Tensor:
        """All-gathers a value for each run of this rank, `[runs, ...]`, into those of
        all runs of a row, in order. All ranks take part in the backward pass, also for
        values that no later run uses.
        """
        gathered = GatherSequence.apply(runs[None, None], self.group)[0, 0]
        return gathered[self.order.to(gathered.device)]

    def seeing_back(
        self,
        function: Callable[..., Any],
        dim: int,
        width: int,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """The outputs of a function of each token and the `width` tokens before it, of
        which the first run has none.
        """
        length = self.tokens.own // len(self.runs)
        before = [min(width, min(width, length) * number) for number in self.runs]
        values = [*args, *kwargs.values()]
        seen = [self.with_before(v, dim, width, before) for v in values]
        outputs_by_run = []
        for given, skipped in zip(zip(*seen, strict=True), before, strict=True):
            named = dict(zip(kwargs, given[len(args) :], strict=True))
            output = function(*given[: len(args)], **named)
            several = output if isinstance(output, tuple) else (output,)
            outputs_by_run.append(
                [tensor.narrow(dim, skipped, length) for tensor in several]
            )
        joined = tuple(
            torch.cat(runs, dim) for runs in zip(*outputs_by_run, strict=True)
        )
        return joined if isinstance(output, tuple) else joined[0]

    def with_before(
        self, value: Any, dim: int, width: int, before: list[int]
    ) -> list[Any]:
        """The tokens of this rank's runs, each with some before it; or a value without,
        for each run.
        """
        if not self.has(value, dim):
            return [value] * len(before)
        runs = value.movedim(dim, 1).chunk(len(before), 1)
        count = min(width, runs[0].shape[1])
        last = torch.stack([run[:, run.shape[1] - count :] for run in runs])
        gathered = self.in_sequence(last).movedim(0, 1).flatten(1, 2)
        ends = [count * number for number in self.runs]
        return [
            torch.cat([gathered[:, end - more : end], run], 1).movedim(1, dim)
            for run, end, more in zip(runs, ends, before, strict=True)
        ]

    def as_rows(self, value: Tensor, dim: int) -> Tensor:
        """This rank's runs as rows of their own."""
        return torch.cat(value.chunk(len(self.runs), dim)) if self.runs[1:] else value

    def as_tokens(self, value: Tensor, dim: int) -> Tensor:
        """Rows as the runs of this rank, again."""
        return torch.cat(value.chunk(len(self.runs)), dim) if self.runs[1:] else value

    def states(
        self, start: Tensor, step: Callable[..., Tensor], *changes: Tensor
    ) -> Tensor:
        """The state that each of this rank's runs begins with.

        Args:
            start: of a row.
            step: from a state, and the changes of one run, to the next state.
            changes: the changes of the state by this rank's runs, as rows.
        """
        flat = torch.cat([value.flatten(1) for value in changes], 1)
        sizes = [value[0].numel() for value in changes]
        state, states = start[: self.rows], [start[: self.rows]]
        for run in self.in_sequence(flat.unflatten(0, (len(self.runs), -1)))[:-1]:
            values = zip(run.split(sizes, 1), changes, strict=True)
            state = step(state, *(v.unflatten(1, m.shape[1:]) for v, m in values))
            states.append(state)
        return torch.stack(states)[self.runs].flatten(0, 1)


def of_local(change: Callable[[Tensor], Tensor], value: Tensor, dim: int) -> Tensor:
    """Applies a function to a tensor whose rows, and tokens on `dim`, are unsharded; or
    to the local tensor of a DTensor.
    """
    if not isinstance(value, DTensor):
        return change(value)
    placements = value.placements
    if any(p.is_shard() and p.dim in (0, dim) for p in placements):
        value = full_tensor(value)
    changed = change(value.to_local())
    mesh, now = value.device_mesh, value.placements
    result = DTensor.from_local(changed, mesh, now, run_check=False)
    return result.redistribute(placements=placements)


def in_places(tokens: Tensor, places: Tensor) -> Tensor:
    """The tokens at these places of each row, of `[rows, tokens, ...]`."""
    return tokens[torch.arange(len(tokens), device=places.device)[:, None], places]


def convolution(
    ranks: StateRanks, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """`causal_conv1d_fn`, whose second argument is a weight `[channels, taps]`."""
    width = [*args, *kwargs.values()][1].shape[-1] - 1
    return ranks.seeing_back(function, 2, width, args, kwargs)


def convolution_module(
    ranks: StateRanks, function: Callable[..., Any], conv: Any, x: Tensor
) -> Any:
    """An `nn.Conv1d` with padding on both sides."""
    return ranks.seeing_back(function, 2, conv.kernel_size[0] - 1, (conv, x), {})


def shift(ranks: StateRanks, function: Callable[..., Any], *args: Any) -> Any:
    """A module that gives each token the one before it."""
    return ranks.seeing_back(function, 1, 1, args, {})


def projection(
    ranks: StateRanks, function: Callable[..., Any], module: Any, *args: Any
) -> Any:
    """Two convolutions, and values of the token before."""
    width = max(module.conv_kernel_size, 1)
    return ranks.seeing_back(function, 1, width, (module, *args), {})


def delta_rule(
    ranks: StateRanks, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """A state `[keys, values]` of each head, whose columns do not see each other: more
    columns, of the identity and no values, become T beside B in the same call, and give
    what the outputs read of a state.

    Args:
        query, key, value: `[rows, tokens, heads, features]`.
        g, beta: `[rows, tokens, heads]`, or g for each feature of the keys.
    """
    given = (*args, kwargs["g"], kwargs["beta"])
    query, key, value, g, beta = (ranks.as_rows(tensor, 1) for tensor in given)
    width, keys = value.shape[-1], key.shape[-1]
    unit = torch.eye(keys, dtype=torch.float32, device=value.device)
    begin = pad(unit.expand(len(value), value.shape[2], -1, -1), (width, 0))
    kwargs |= {"g": g, "beta": beta, "initial_state": begin}
    kwargs |= {"output_final_state": True}
    output, final = function(query, key, pad(value, (0, keys)), **kwargs)
    output, reads = output.split([width, keys], -1)
    added, factor = final.split([width, keys], -1)
    state = ranks.states(
        torch.zeros_like(added), lambda s, t, b: t @ s + b, factor, added
    )
    more = torch.einsum("blhk,bhkv->blhv", reads.to(state.dtype), state)
    return ranks.as_tokens(output + more.to(output.dtype), 1), None


def mamba_2(
    ranks: StateRanks, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Tensor, None] | Tensor:
    """A state `[features, state size]` of each head, which a token multiplies by exp(A
    dt).

    Args:
        x: `[rows, tokens, heads, features]`.
        dt: `[rows, tokens, heads]`.
        A: `[heads]`.
        B, C: `[rows, tokens, groups of heads, state size]`.
    """
    x, dt, A, B, C = args
    x, dt, B, C = (ranks.as_rows(tensor, 1) for tensor in (x, dt, B, C))
    both = kwargs.get("return_final_states")
    kwargs |= {"return_final_states": True, "initial_states": None}
    output, final = function(x, dt, A, B, C, **kwargs)
    if kwargs.get("dt_bias") is not None:
        dt = dt + kwargs["dt_bias"].to(dt.dtype)
    dt = softplus(dt) if kwargs.get("dt_softplus") else dt
    low, high = kwargs.get("dt_limit", (0.0, float("inf")))
    decay = (A.float() * dt.clamp(low, high).float()).cumsum(1).exp()
    factor = decay[:, -1, :, None, None]
    state = ranks.states(
        torch.zeros_like(final), lambda s, t, b: t * s + b, factor, final
    )
    state = state.unflatten(1, (C.shape[2], -1))
    more = torch.einsum("blgn,bghpn->blghp", C.to(state.dtype), state).flatten(2, 3)
    more = more * decay[..., None]
    output = ranks.as_tokens(output + more.to(output.dtype), 1)
    return (output, None) if both else output


def mamba_1(
    ranks: StateRanks, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Tensor, None] | Tensor:
    """A state `[channels, state size]`, which a token multiplies by exp(A dt).

    Args:
        x, dt: `[rows, channels, tokens]`.
        A: `[channels, state size]`.
        B, C: `[rows, state size, tokens]`.
    """
    x, dt, A, B, C = args
    x, dt, B, C = (ranks.as_rows(tensor, 2) for tensor in (x, dt, B, C))
    if kwargs.get("z") is not None:
        kwargs["z"] = ranks.as_rows(kwargs["z"], 2)
    both = kwargs.get("return_last_state")
    output, final = function(x, dt, A, B, C, **{**kwargs, "return_last_state": True})
    if kwargs.get("delta_bias") is not None:
        dt = dt + kwargs["delta_bias"].to(dt.dtype)[..., None]
    dt = softplus(dt) if kwargs.get("delta_softplus") else dt
    decay = (A.float()[:, None] * dt.float().cumsum(-1)[..., None]).exp()
    final = final.to(decay.dtype)
    state = ranks.states(
        torch.zeros_like(final), lambda s, t, b: t * s + b, decay[:, :, -1], final
    )
    more = torch.einsum("bdln,bdn,bnl->bdl", decay, state, C.to(state.dtype))
    if kwargs.get("z") is not None:
        more = more * silu(kwargs["z"])
    output = ranks.as_tokens(output + more.to(output.dtype), 2)
    return (output, None) if both else output


def gated_linear(
    ranks: StateRanks, function: Callable[..., Any], module: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """A state `[channels]`, which a token multiplies by its gate.

    Args:
        hidden_states, recurrent_gate: `[rows, tokens, channels]`.
        reset: `[rows, tokens, 1]`, whether a token forgets the state.
    """
    given = [kwargs.pop(n) for n in ("hidden_states", "recurrent_gate", "reset")]
    hidden, gate, reset = (ranks.as_rows(tensor, 1) for tensor in given)
    kwargs["recurrent_states"] = None
    output, final = function(module, hidden, gate, reset, **kwargs)
    decay = (gate * ~reset).to(final.dtype).cumprod(1)
    state = ranks.states(
        torch.zeros_like(final), lambda s, t, b: t * s + b, decay[:, -1], final
    )
    more = (decay * state[:, None]).to(output.dtype)
    return ranks.as_tokens(output + more, 1), None


def weighted_mean(
    ranks: StateRanks, function: Callable[..., Any], *args: Any, **_: Any
) -> tuple[Tensor, None]:
    """A numerator, a denominator and the largest exponent `[channels]`. The output is
    no linear function of them, so it is computed again with those of the runs before.

    Args:
        key, value: `[rows, tokens, channels]`.
    """
    time_decay, time_first, *given = args
    key, value = (ranks.as_rows(tensor, 1) for tensor in given)
    final = function(time_decay, time_first, key, value, return_state=True)[1]
    sums_by_run = torch.stack([*final], 1)
    decay = -time_decay.exp() * key.shape[1]

    def step(state: Tensor, run: Tensor) -> Tensor:
        *before, top = state.unbind(1)
        *more, highest = run.unbind(1)
        largest = torch.maximum(top + decay, highest)
        old, new = (top + decay - largest).exp(), (highest - largest).exp()
        sums = [old * b + new * m for b, m in zip(before, more, strict=True)]
        return torch.stack([*sums, largest], 1)

    start = torch.zeros_like(sums_by_run)
    start[:, 2] = -1e38
    state = [*ranks.states(start, step, sums_by_run).unbind(1)]
    output = function(time_decay, time_first, key, value, state=state)[0]
    return ranks.as_tokens(output, 1), None


EXCHANGES: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolution,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba_2,
    "mamba_selective_scan": mamba_1,
    "rwkv_linear_attention": weighted_mean,
    "torch_chunk_gated_delta_rule": delta_rule,
    "RecurrentGemmaRecurrentBlock.conv_1d": convolution_module,
    "RecurrentGemmaRglru._rnn_scan": gated_linear,
    "RwkvFeedForward.time_shift": shift,
    "RwkvSelfAttention.time_shift": shift,
    "ZayaCCAProjection.forward": projection,
}
"""The exchanges of ranks, by the keys of `TOKENS`; the others compute all tokens."""
