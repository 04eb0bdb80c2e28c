"""Stand-ins for what a plan and its kernels compute in the model whose layers are counted.

Adapters and frozen parameters: autograd keeps the input of a layer for the gradient of its weight,
not where that is frozen, but for the factor A of an adapter. Parts of sequences: what would come
from other ranks has its size and nothing else. Kernels of linear attention and state-space layers:
transformers computes them in loops of small torch operators where `fla` or `mamba_ssm` is not
installed, and whoever trains such a model has the kernels; a substitute has their outputs and keeps
what they keep, and its FLOPs are those of the chunked algorithm, at the pace of attention's kernel.
This module imports torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from planc.infer.apply_adapters import is_factor
from planc.model.facts import Facts, Module
from planc.model.recurrent_states import state_updates
from planc.model.roles import attention, block_names, roles
from planc.ops.lora import HALVES, MAGNITUDE, factor_name
from planc.runtime.standalone.context import RUNNING, ContextParallel, register
from planc.runtime.standalone.context_blocks import ContextInBlocks, lists_with
from planc.runtime.standalone.context_exchange import KeyExchange
from planc.runtime.standalone.context_ring import Ring, RingMask, RingPiece
from planc.runtime.standalone.context_states import StateRanks
from planc.runtime.standalone.documents import FUSED, replace_parts, running
from planc.runtime.standalone.lora_experts import add_factors
from planc.tools.estimate.counted import MicroBatch


class KeysAlone(KeyExchange):
    """A rank that has its own keys and values in the place of all others'."""

    def __init__(self, attention: str, size: int, ulysses: int) -> None:
        self.heads = size if attention == "ulysses" else ulysses
        self.others, self.rank, self.among = size // self.heads, 0, 0
        self.ring = RingAlone(self.others) if attention == "ring" else None

    def gather_tokens(self, part: Tensor) -> Tensor:
        return torch.cat([part] * self.others, 2)

    def swap_sharded_dim(self, value: Tensor, source: int, target: int, name: str) -> Tensor:
        parts = value.unflatten(source, (self.heads, -1)).movedim(source, target)
        return parts.contiguous().flatten(target, target + 1)


class StandIn(ContextParallel):
    """
    Args:
        attention: `all_gather`, `ring` or `ulysses`.
        size: how many parts a sequence has.
        ulysses: the number of ranks of a Ulysses all-to-all.
    """

    def __init__(self, model: nn.Module, attention: str, size: int, ulysses: int = 1) -> None:
        self.size, self.keys, self.others = size, KeysAlone(attention, size, ulysses), {}
        self.rank, self.balance, self.tokens = 0, "none", None
        self.prepare(model)

    def mask(self, q_length: int, kv_length: int, arguments: dict[str, Any]) -> Any:
        queries = q_length * self.keys.heads
        if self.keys.ring is not None:
            return Halves(self.mask, queries, self.keys.ring, evenly=False, read=True)
        shape = (arguments["batch_size"], 1, queries, kv_length * self.size)
        eager = self.implementation(arguments["config"]) == "eager"
        return torch.ones(shape, dtype=arguments["dtype"] if eager else torch.bool)

    def gather_rank_by_rank(self, part: Tensor) -> Tensor:
        return torch.cat([part] * self.size, 2)


class RingAlone(Ring):
    """A rank that has its own keys and values in the place of all others."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def rotate(self, block: Tensor) -> Iterator[tuple[int, Tensor]]:
        yield from ((rank, block.clone()) for rank in range(self.size))


class Halves(RingMask):
    """Half of the keys of each rank are computed, as where causal attention is balanced."""

    @property
    def full_mask(self) -> Tensor:
        return torch.ones((1, 1, self.own, self.own * self.ring.size), dtype=torch.bool)

    def pieces(self, owner: int, **_: bool) -> Iterator[RingPiece]:
        yield RingPiece(owner, slice(0, self.own), slice(0, -(-self.own // 2)))


class RowsAlone(ContextInBlocks):
    """A rank that has its own tokens in the place of all others'."""

    def __init__(self, model: nn.Module, facts: Facts, size: int) -> None:
        self.size = size
        blocks = lists_with(model, block_names(facts))
        seen = {_of_any(name) for modules in attention(facts) for name in modules.names()}
        heads = [model.get_submodule(n) for modules in roles(facts).head for n in modules.names()]
        seeing = [module for name, module in model.named_modules() if _of_any(name) in seen]
        self.attach(blocks, heads, seeing)

    def gather_tokens(self, part: Tensor) -> Tensor:
        return torch.cat([part] * self.size, 1)

    def local_tokens(self, every: Tensor) -> Tensor:
        return every[:, : every.shape[1] // self.size].clone()


def _of_any(name: str) -> str:
    """The name of a module in any entry of a list."""
    return re.sub(r"\.\d+", ".*", name)


class StatesAlone(StateRanks):
    """A rank that has its own tokens and states in the place of all others'."""

    def __init__(self, job: MicroBatch, parts: Sequence[str]) -> None:
        self.size, self.rows, self.length = job.exchange[1], job.rows, job.tokens * job.exchange[1]
        self.parts, self.gathers = {*parts, *FUSED}, job.states[0] == "gather"
        self.asked = self.kept = False
        self.documents = None
        tokens: Any = TokensAlone(job.tokens)
        self.tokens = tokens
        self.runs = [0, 2 * self.size - 1][: job.states[1]]

    def gather_tokens(self, value: Any, dim: int) -> Any:
        return torch.cat([value] * self.size, dim) if self.has(value, dim) else value

    def local_outputs(self, found: Any, dim: int) -> Any:
        if isinstance(found, tuple | list):
            return tuple(self.local_outputs(value, dim) for value in found)
        if not isinstance(found, Tensor) or found.dim() <= dim or found.shape[dim] < self.length:
            return None
        return found.narrow(dim, 0, self.tokens.own).clone()

    def in_sequence(self, runs: Tensor) -> Tensor:
        return torch.cat([runs] * self.size)


class TokensAlone(NamedTuple):
    """The number of tokens of a rank."""

    own: int


@contextmanager
def exchanging(model: nn.Module, facts: Facts, job: MicroBatch) -> Iterator[None]:
    """Makes a model attend to the parts of other ranks, and go on with their states; nothing where
    a rank has all.
    """
    kind, parts, ulysses = job.exchange
    if kind == "gather":
        RowsAlone(model, facts, parts)
    elif parts > 1:
        RUNNING.context = StandIn(model, kind, parts, ulysses)
        register()
    ranks = None
    with ExitStack() as stack:
        if job.states[0]:
            ranks = StatesAlone(job, state_updates(facts))
            for file in {type(module).__module__ for module in model.modules()}:
                stack.enter_context(mock.patch.dict(vars(sys.modules[file])))
            replace_parts(model, {*state_updates(facts)})
        stack.enter_context(running(None, ranks))
        stack.callback(setattr, RUNNING, "context", None)
        yield


def train_as(facts: Facts, model: nn.Module, named: Mapping[str, tuple[str, ...]]) -> list[Tensor]:
    """Freezes what is frozen, and adds to layers what their adapters compute.

    Args:
        facts: the real model, with the adapters of the plan.
        model: its small one, without them.
        named: for layers of the proxy model, the names of the real layers that they represent.

    Returns:
        The weights of the adapters.
    """
    weights: list[Tensor] = []
    for name, module in model.named_modules():
        try:
            known = facts.module_at(_real(name, named)).module
        except KeyError:  # a buffer's holder, or a list that the facts have no entries of
            continue
        trains = {p.name: p.trainable for p in known.parameters}
        for own, parameter in module.named_parameters(recurse=False):
            parameter.requires_grad_(trains.get(own, True))
            if not trains.get(own, True) and isinstance(module, nn.Embedding):
                module.register_forward_hook(_as_input)
        if factors := _factors(known, module):
            weights += factors
        elif halves := _halves(known, next(module.parameters(recurse=False), None)):
            weights += halves
            module.register_forward_hook(partial(_add, halves))
    return weights


def _real(name: str, named: Mapping[str, tuple[str, ...]]) -> str:
    """The torch name in the real model of a module of the small one."""
    for small, like in named.items():
        if name == small or name.startswith(f"{small}."):
            return like[0] + name[len(small) :]
    return name


def _halves(known: Module, weight: Tensor | None) -> list[Tensor]:
    linear = (*HALVES[:2], MAGNITUDE)
    own = {c.name: c.module.children[0].module for c in known.children if c.name in linear}
    if weight is None or not own:
        return []
    shapes = (own[name].parameters[0].shape for name in linear if name in own)
    return [torch.empty(shape, dtype=weight.dtype, requires_grad=True) for shape in shapes]


def _factors(known: Module, module: nn.Module) -> list[Tensor]:
    """The factors that adapters add to the weights of experts, which compute with them."""
    own = {p.name: p.shape for p in known.parameters if is_factor(p.name)}
    names = [n for n in module._parameters if factor_name(n, "A") in own]
    if names:
        add_factors(module, names, own[factor_name(names[0], "A")][-1], 1.0)
    return [module.get_parameter(name) for name in own if names]


def _as_input(_module: nn.Module, _args: Any, output: Tensor) -> None:
    """The input of the first block has a gradient, as that of the blocks that it stands for."""
    if not output.requires_grad:
        output.requires_grad_()


def _add(halves: list[Tensor], _module: nn.Module, args: Any, output: Tensor) -> Tensor:
    first, second, *magnitudes = halves
    change = functional.linear(functional.linear(args[0], first), second)
    for one in magnitudes:  # of DoRA, whose gradient is of both outputs
        change = (one - 1) * (output + 0) + one * change
    return output + change


class Kernel(NamedTuple):
    """The output and the cost of one kernel call.

    Args:
        shape: of its output.
        heads, tokens, head_dim: of it.
        flops: of one token of one head; 0 for a kernel that memory bounds.
        kept: elements that it keeps beside its inputs.
        state: the shape of what it hands on.
    """

    shape: tuple[int, ...]
    heads: int
    tokens: int
    head_dim: int
    flops: float
    kept: int = 0
    state: tuple[int, ...] = ()


def _delta_rule(_query: Any, key: Any, value: Any, chunk: int = 64) -> Kernel:
    """`chunk_gated_delta_rule` and `chunk_kda` of fla: per chunk the products of keys with keys and
    queries, their triangular system with keys and values, and four with the state.
    """
    rows, tokens, heads, wide = value.shape
    narrow = key.shape[-1]
    flops = 6 * chunk * narrow + 4 * chunk * wide + 6 * narrow * wide
    kept = rows * tokens * heads * chunk
    state = rows, heads, narrow, wide
    return Kernel((rows, tokens, heads, wide), heads, tokens, wide, flops, kept, state)


def _chunk_scan(hidden: Any, _dt: Any, _a: Any, b: Any, _c: Any, chunk: int = 256) -> Kernel:
    """`mamba_chunk_scan_combined` of mamba_ssm."""
    rows, tokens, heads, wide = hidden.shape
    groups, state = b.shape[-2:]
    flops = 2 * chunk * wide + 4 * state * wide + 2 * chunk * state * groups / heads
    shape, last = (rows, tokens, heads, wide), (rows, heads, wide, state)
    return Kernel(shape, heads, tokens, wide, flops, hidden.numel(), last)


def _selective_scan(hidden: Any, _dt: Any, a: Any, *_others: Any, chunk: int = 0) -> Kernel:
    """`selective_scan_fn` of mamba_ssm."""
    rows, channels, tokens = hidden.shape
    last = rows, channels, a.shape[-1]
    return Kernel((rows, channels, tokens), channels, tokens, 1, 0.0, hidden.numel(), last)


_KERNELS: dict[str, tuple[Callable[..., Kernel], int, bool]] = {
    "torch_chunk_gated_delta_rule": (_delta_rule, 3, True),
    "chunk_kimi_delta_attention": (_delta_rule, 3, True),
    "mamba2_chunk_scan": (_chunk_scan, 5, False),
    "mamba_selective_scan": (_selective_scan, 5, False),
}
"""By transformers' function in a modeling file: what it computes, of how many of its first
arguments, and whether it returns the last state too."""

_STATES_ASKED = ("output_final_state", "return_final_states", "return_last_state")
Noted = Callable[[Kernel, int], AbstractContextManager[None]]
"""Notes a kernel and the bytes that it reads; its own operators run in the context."""


@contextmanager
def replace_kernels(model: Any, noted: Noted) -> Iterator[None]:
    """Replaces the functions in the modeling files of a model."""
    files = {type(module).__module__ for module in model.modules()}
    with ExitStack() as stack:
        for name in sorted(files):
            for function, (kernel, count, states) in _KERNELS.items():
                if hasattr(sys.modules[name], function):
                    made = _stand_in(kernel, count, states, noted)
                    stack.enter_context(mock.patch.object(sys.modules[name], function, made))
        yield


def _stand_in(kernel: Callable[..., Kernel], count: int, states: bool, noted: Noted) -> Any:
    class Fused(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, made: Kernel, *inputs: Any) -> Any:
            kept = [inputs[0].new_empty(made.kept)] if made.kept else []
            ctx.save_for_backward(*inputs, *kept)
            last = torch.empty(made.state, dtype=torch.float32, device=inputs[0].device)
            return inputs[0].new_empty(made.shape), last

    def run(*args: Any, **kwargs: Any) -> Any:
        size = kwargs.get("chunk_size")
        made = kernel(*args[:count], **({"chunk": size} if size else {}))
        inputs = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        moved = sum(t.numel() * t.element_size() for t in inputs)
        with noted(made, moved):
            out, last = Fused.apply(made, *inputs)
        asked = any(kwargs.get(name) for name in _STATES_ASKED)
        return (out, last if asked else None) if states or asked else out

    return run
