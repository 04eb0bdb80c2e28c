"""Context parallelism: each rank computes a part of every sequence.

Attention is the only part of a model that must see other tokens, so only it
communicates: a function registered with transformers' attention interface gathers keys
and values (or runs a Ulysses all-to-all), then calls the function that the model would
have called. Masks come from transformers' mask interface, over the tokens of all ranks.
"""

import copy
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planc.runtime.standalone.collectives import GatherSequence
from planc.runtime.standalone.context_exchange import (
    KeyExchange,
    SeveralMasks,
    SomeHeads,
)
from planc.runtime.standalone.context_positions import (
    UPDATE,
    PartCache,
    cache_argument,
    cache_readers,
    counting_of,
    names_in,
    position_tables,
)
from planc.runtime.standalone.context_ring import (
    ChosenMask,
    RingMask,
    ring_attention,
)
from planc.runtime.standalone.context_states import StateRanks
from planc.runtime.standalone.context_tokens import (
    NO_TARGET,
    TOKENWISE,
    ContextError,
    KeyTokens,
    of_chosen,
    part_of_batch,
)
from planc.runtime.standalone.documents import (
    CURRENT,
    UNMASKED,
    Documents,
    DocumentsError,
    batch_documents,
    replace_parts,
)

CONTEXT = "context_parallel"
"""The name of the attention, and of what a model keeps its `ContextParallel` under."""
RUNNING = threading.local()
"""The `ContextParallel` of the model whose forward this thread runs."""


class ContextParallel:
    """The state of one model.

    Args:
        model: of transformers, whose attention is called through its interface.
        mesh: the ranks that share a sequence.
        attention: `all_gather` of keys and values, `ring`, which passes them around
            the ranks, or `ulysses`, an all-to-all of sequence shards and heads.
        ulysses: with `all_gather` and `ring`, the number of ranks of a Ulysses
            all-to-all before it.
        balance: which tokens a rank has: `none` for a run of them, `head_tail` for one
            of the beginning and one of the end, so that causal attention is as much
            work for each rank; `per_document` for the same in each packed document.
        exchange: how ranks exchange recurrent states: `state` passes them on, `gather`
            all-gathers their inputs.
        states: the keys of `TOKENS` that the model has.

    Raises:
        ContextError: the model's tokens see each other otherwise.
    """

    length = 0
    """The length of the rows of a pass, if the model makes masks of unsharded rows."""
    indexed = False
    """Whether an indexer chooses keys, whose code reads the mask."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        attention: str,
        balance: str,
        *,
        ulysses: int = 1,
        exchange: str = "state",
        states: Sequence[str] = (),
    ) -> None:
        if reason := self.refusal(model, states):
            raise ContextError(reason)
        self.group = mesh.get_group()
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.balance = balance
        self.exchange, self.states, self.replaced = exchange, {*states}, False
        self.keys = KeyExchange(mesh, attention, ulysses)
        self.others: dict[int, KeyExchange] = {}
        self.counting, self.tables = counting_of(model), self.tables_of(model)
        self.signature = inspect.signature(model.forward)
        self.counted = "position_ids" not in self.signature.parameters
        self.tokens: KeyTokens | None = None
        self.positions: Tensor | None = None
        self.packs = False
        self.loss: PartLoss | None = None
        self.prepare(model)
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave, always_call=True)
        for table in self.tables:
            table.register_forward_pre_hook(self._look_up, with_kwargs=True)

    def refusal(self, model: nn.Module, states: Sequence[str]) -> str:
        """Why the ranks cannot have parts of a model's sequences; empty if they can."""
        return without_interface(model, states)

    def tables_of(self, model: nn.Module) -> list[nn.Module]:
        """The modules that count positions, which get those of this rank's tokens."""
        return position_tables(model)

    def prepare(self, model: nn.Module) -> None:
        """Makes the model's layers ask this object."""
        self.plain = own_configs(model)
        for module in model.modules():
            module.__dict__[CONTEXT] = self
        readers = cache_readers(model)
        self.indexed = any(names_in(m, UPDATE) for m in readers)
        for reader in readers:
            reader.register_forward_pre_hook(self._answer, with_kwargs=True)

    def batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a batch that every rank of the mesh has read.

        Positions are stated, and `shift_labels` are the labels of the next tokens.

        Args:
            batch: the arguments of the model: `[rows, length, ...]`, or without dims.

        Raises:
            ContextError: a length does not divide, or an argument is not per token.
        """
        if self.tables and batch.get("position_ids") is not None:
            raise ContextError("the model takes no `position_ids`, and gets some")
        return part_of_batch(
            batch, self.rank, self.size, self.balance, counting=self._model_positions
        )

    def _model_positions(self, batch: Mapping[str, Any]) -> Tensor | None:
        """The positions that the model counts; in documents that a mask tells apart."""
        if self.counting is not None:
            return self.counting(batch)
        documents = self._documents(batch) if self.states else None
        return None if documents is None else documents.positions

    def _documents(self, batch: Mapping[str, Any]) -> Documents | None:
        """The documents of whole rows whose states do not see each other."""
        try:
            return batch_documents(batch, masks=not self.states.isdisjoint(UNMASKED))
        except DocumentsError as error:
            raise ContextError(str(error)) from error

    # a forward pass -------------------------------------------------------------------

    def _enter(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = self._arguments(args, kwargs)
        positions, mask = given.get("position_ids"), given.get("attention_mask")
        names = (n for n in TOKENWISE[:2] if given.get(n) is not None)
        name = next(names, None)
        shape = None if name is None else given[name].shape[:2]
        if shape is None or positions is None or positions.shape != shape:
            text = "the model gets no `position_ids` of each token"
            raise ContextError(f"{text}: pass it `run.batch(batch)`")
        if mask is not None and mask.shape != shape:
            text = f"`attention_mask` has {list(mask.shape)} for {list(shape)} tokens"
            raise ContextError(text)
        if given.get("labels") is not None:
            if given.get("shift_labels") is None:
                text = "the loss of a part of a sequence is not that of the whole"
                raise ContextError(f"labels without `shift_labels`: {text}")
            self.loss = PartLoss(model, self.group, given)
        kwargs = self._begin(
            model, KeyTokens(self.group, self.balance, positions, mask), kwargs
        )
        if self.counted:
            self.positions = kwargs["position_ids"][0]
            kwargs = {n: v for n, v in kwargs.items() if n != "position_ids"}
        return args, kwargs

    def _begin(
        self, model: nn.Module, tokens: KeyTokens, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Makes the model's attention and states ask this object.

        Args:
            model: whose forward begins.
            tokens: of this pass.
            kwargs: its arguments.

        Returns:
            The arguments, without a cache where there are states.
        """
        self.tokens = tokens
        register()
        RUNNING.context = self
        if self.states:
            self._enter_states(model, tokens)
            if "use_cache" in self.signature.parameters:
                return {**kwargs, "use_cache": False}
        return kwargs

    def _enter_states(self, model: nn.Module, tokens: KeyTokens) -> None:
        """Makes recurrent states continue over all ranks, and reset at documents."""
        if not self.replaced:
            self.replaced = True
            replace_parts(model, self.states)
        row = tokens.places.argsort(1)
        whole = {"position_ids": tokens.positions.gather(1, row)}
        if tokens.padding is not None:
            whole["attention_mask"] = tokens.padding.gather(1, row)
        documents, gathers = self._documents(whole), self.exchange == "gather"
        CURRENT.ranks = StateRanks(
            self.group, tokens, [*self.states], gathers, documents
        )

    def _look_up(self, _table: nn.Module, args: Any, kwargs: Any) -> Any:
        """Positions of this rank's tokens, which are those of every row."""
        if self.positions is None:
            raise ContextError("positions are looked up outside of the model's forward")
        return args, {**kwargs, "position_ids": self.positions}

    def _answer(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        return args, {**kwargs, cache_argument(layer): PartCache(self, hidden)}

    def gather_rank_by_rank(self, part: Tensor) -> Tensor:
        """A tensor `[rows, heads, tokens, ...]` of all ranks, rank by rank."""
        gathered: Tensor = GatherSequence.apply(part, self.group)
        return gathered

    def keys_of(self, module: nn.Module) -> KeyExchange:
        """The exchange of keys and values in an attention module."""
        return self.others.get(id(module), self.keys)

    def _arguments(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """The arguments of the model's forward by name."""
        return by_name(self.signature, args, kwargs)

    def _leave(self, model: nn.Module, _args: Any, output: Any) -> Any:
        self.tokens = self.positions = RUNNING.context = None
        ranks, CURRENT.ranks = getattr(CURRENT, "ranks", None), None
        loss, self.loss = self.loss, None
        if ranks is not None and ranks.asked and not ranks.kept:
            text = "a function that is not transformers' updates recurrent states"
            raise ContextError(f"{text}: the ranks cannot exchange them")
        return output if loss is None else loss.leave(model, output)

    def mask(self, q_length: int, kv_length: int, arguments: dict[str, Any]) -> Any:
        """The mask that the model's own attention takes, over the keys of all ranks."""
        tokens = self.tokens
        if tokens is None:
            raise ContextError("a mask is made outside of the model's forward")
        if q_length != tokens.own or kv_length != tokens.own:
            text = f"a mask of {q_length} queries and {kv_length} keys"
            raise ContextError(f"{text}, for {tokens.own} tokens of a rank")
        if arguments.get("use_vmap"):
            raise ContextError(
                "a mask that the model adds to is not known for other tokens"
            )
        packed, self.packs = self.packs, False
        arguments |= {
            "mask_function": tokens.adapt_mask_function(
                arguments["mask_function"], packed=packed
            ),
            "attention_mask": None,
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": False,
        }
        make = functools.partial(self.mask_of, tokens.own, arguments)
        if self.others:
            return SeveralMasks(make, tokens.own, self.size)
        return make(self.keys)

    def mask_of(
        self, local_tokens: int, arguments: dict[str, Any], keys: KeyExchange
    ) -> Any:
        """The mask of attention modules that exchange these keys.

        Args:
            local_tokens: the tokens of a rank.
            arguments: of transformers' mask functions.
            keys: what the ranks exchange.
        """
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        name, several = (
            self.implementation(arguments["config"]),
            local_tokens * keys.heads,
        )
        if keys.ring is not None:
            mask_function = functools.partial(
                ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], **arguments
            )
            evenly, read = name == "eager", self.indexed
            return RingMask(mask_function, several, keys.ring, evenly=evenly, read=read)
        given = arguments | {
            "q_length": several,
            "kv_length": local_tokens * self.size,
            "q_offset": keys.rank * several,
            "kv_offset": 0,
        }
        return ALL_MASK_ATTENTION_FUNCTIONS[name](**given)

    def implementation(self, config: Any) -> str:
        """The attention that a configuration asked for."""
        return self.plain.get(id(config)) or next(iter(self.plain.values()))

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of this rank's queries to the keys of all.

        Args:
            module: calls the attention interface.
            query, key, value: `[rows, heads, tokens, features]`.
            mask: from `self.mask`.

        Returns:
            `[rows, tokens, heads, features]`, and the weights where the model has them.
        """
        name, local_tokens, keys = (
            type(module).__name__,
            query.shape[2],
            self.keys_of(module),
        )
        if isinstance(mask, SeveralMasks):
            mask = mask.mask_for(keys)
        if any(isinstance(t, DTensor) for t in (query, key, value)):
            raise ContextError(f"{name} gets DTensors: local tensors are needed")
        if kwargs.get("position_bias") is not None:
            raise ContextError(f"{name} has a bias for each pair of positions")
        wanted = (local_tokens * keys.heads, local_tokens * self.size)
        if key.shape[2] != local_tokens or mask is None or mask.shape[-2:] != wanted:
            text = "sees other keys than transformers' mask functions say"
            raise ContextError(f"{name} {text}")
        if keys.heads == 1:
            return self._of_heads(module, module, (query, key, value), mask, kwargs)
        both = tuple(keys.swap_sharded_dim(t, 1, 2, name) for t in (query, key, value))
        caller: Any = module
        if kwargs.get("s_aux") is not None:
            kwargs["s_aux"] = keys.heads_of(kwargs["s_aux"])
            caller = SomeHeads(module, kwargs["s_aux"])
        output, _ = self._of_heads(module, caller, both, mask, kwargs)
        output = keys.swap_sharded_dim(output.transpose(1, 2), 2, 1, name)
        return output.transpose(1, 2).contiguous(), None

    def _of_heads(
        self, module: nn.Module, caller: Any, both: Any, mask: Any, given: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the heads that this rank has.

        Args:
            module: whose attention it is.
            caller: the same to code that reads what belongs to heads.
            both: queries, keys and values, `[rows, heads, tokens, features]`.
            mask: of these queries and the keys of all ranks.
            given: the other arguments of the interface.
        """
        keys = self.keys_of(module)
        if (chosen := given.pop("indices", None)) is not None:
            mask = (of_chosen if keys.ring is None else ChosenMask)(mask, chosen)
        if keys.ring is not None:
            return ring_attention(module, both, mask, keys.ring, given), None
        query, key, value = both
        if keys.others > 1:
            gathered = keys.gather_tokens(torch.cat([key, value], -1))
            key, value = gathered.split([key.shape[-1], value.shape[-1]], -1)
        attention = self._own_attention(module)
        output, seen = attention(caller, query, key, value, mask, **given)
        return output, seen

    def _own_attention(self, module: nn.Module) -> Callable[..., Any]:
        """The function that the model would have called."""
        from planc.compat.transformers import ALL_ATTENTION_FUNCTIONS

        name = self.implementation(getattr(module, "config", None))
        if name != "eager":
            attention: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
            return attention
        for kind in type(module).__mro__:  # FSDP puts a class of its own first
            home = sys.modules[kind.__module__]
            if hasattr(home, "eager_attention_forward"):
                eager: Callable[..., Any] = home.eager_attention_forward
                return eager
        raise ContextError(f"{type(module).__name__} has no eager attention of its own")


class PartLoss:
    """The loss of a pass, such that the mean over the ranks is the plain model's: its
    sum is divided by the number of labels that is given, or else of all ranks.

    Args:
        model: whose own `loss_function` is kept until `leave`.
        group: the ranks.
        given: the arguments of the pass, `labels` and `shift_labels` among them.
    """

    def __init__(self, model: Any, group: Any, given: Mapping[str, Any]) -> None:
        self.group, self.given = group, given
        ignored = given.get("ignore_index")
        self.ignored = NO_TARGET if ignored is None else ignored
        self.function, self.called = model.loss_function, False
        model.loss_function = self

    def labels(self, name: str) -> tuple[Tensor, Tensor]:
        """The number of labels that count on this rank, and of all, for each rank."""
        counted = (self.given[name] != self.ignored).sum()
        total = counted.clone()
        distributed.all_reduce(total, group=self.group)
        return counted, total / self.group.size()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.called = True
        if kwargs.get("num_items_in_batch") is None:
            taken = inspect.signature(self.function).parameters
            plain = "labels" in taken and "shift_labels" not in taken
            name = "labels" if plain else "shift_labels"
            kwargs["num_items_in_batch"] = self.labels(name)[1]
        loss: Tensor = self.function(*args, **kwargs)
        return loss

    def leave(self, model: Any, output: Any) -> Any:
        """The output with its loss; a model that calls no `loss_function` has taken the
        mean of this rank's labels.
        """
        model.loss_function = self.function
        if self.called or getattr(output, "loss", None) is None:
            return output
        counted, share = self.labels("labels")
        output["loss"] = torch.where(counted > 0, output.loss * (counted / share), 0.0)
        return output


def by_name(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, those of `**` as the others."""
    given = signature.bind_partial(*args, **kwargs).arguments
    for parameter in signature.parameters.values():
        if parameter.kind == parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
    return given


def register() -> None:
    """Makes transformers call the functions of this file."""
    from planc.compat.transformers import ALL_ATTENTION_FUNCTIONS, masking_utils

    ALL_ATTENTION_FUNCTIONS.register(CONTEXT, context_attention)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(CONTEXT, context_mask)
    plain = masking_utils.find_packed_sequence_indices
    chunked = masking_utils.chunked_causal_mask_function
    if getattr(plain, "running", None) is RUNNING:
        return

    def whole_alone(positions: Tensor) -> Tensor | None:
        """Finds no document in a part of the positions. Mask functions ask by this
        name, where the model gives them positions and no padding. Those of whole rows
        are asked for in front of a language model that gets a part of them.
        """
        context = getattr(RUNNING, "context", None)
        if context is None or positions.shape[1] == context.length:
            found: Tensor | None = plain(positions)
            return found
        context.packs = True
        return None

    def from_the_first(chunk: int, padding: Tensor) -> Callable[..., bool]:
        """Chunks that begin after the padding on the left of the row."""
        context = getattr(RUNNING, "context", None)
        if context is not None and context.tokens is not None:
            padding = context.tokens.left_padding(padding)
        found: Callable[..., bool] = chunked(chunk, padding)
        return found

    whole_alone.running = RUNNING  # type: ignore[attr-defined]
    masking_utils.find_packed_sequence_indices = whole_alone
    masking_utils.chunked_causal_mask_function = from_the_first


def own_configs(model: nn.Module) -> dict[int, str]:
    """Gives the model its own configurations, which ask for the attention of this file.

    Returns:
        What they asked for before, by the configuration's id.
    """
    copies: dict[int, Any] = {}
    configs: list[Any] = []
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            module.config = copy.deepcopy(module.config, copies)
            configs.append(module.config)
    plain = {id(config): config._attn_implementation or "eager" for config in configs}
    for config in configs:
        config._attn_implementation = CONTEXT
    return plain


def without_interface(model: nn.Module, states: Sequence[str] = ()) -> str:
    """The reason, by a model's class, for which tokens may see each other in another
    way than by the attention interface or these recurrent states; empty for none.
    """
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "_attn_implementation"):
        return f"{name} is not a transformers model"
    if getattr(config, "is_encoder_decoder", False):
        return f"{name} is an encoder with a decoder"
    if getattr(model, "_is_stateful", False) and not states:
        return f"{name} has a recurrent state"
    if not model._can_set_attn_implementation() and not states:
        return f"{name} does not call transformers' attention interface"
    taken = "position_ids" in inspect.signature(model.forward).parameters
    if not taken and not states and not position_tables(model):
        return f"{name} takes no `position_ids`"
    if config._attn_implementation not in ("eager", "sdpa", None):
        known = "its masks are known for `sdpa` and `eager`"
        return f"{name} has attention `{config._attn_implementation}`: {known}"
    return ""


def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention of a model with `ContextParallel`."""
    context: ContextParallel = module.__dict__[CONTEXT]
    return context.attend(module, query, key, value, attention_mask, **kwargs)


def context_mask(q_length: int, kv_length: int, **arguments: Any) -> Any:
    """The mask of the model that runs in this thread."""
    context = getattr(RUNNING, "context", None)
    if context is None:
        raise ContextError("a mask is made outside of the model's forward")
    return context.mask(q_length, kv_length, arguments)


def context_parallel(model: nn.Module, mesh: DeviceMesh, **settings: Any) -> None:
    """`ContextParallel` with its other arguments; then
    `model.context_parallel.batch(batch)` is a rank's part of a batch.
    """
    ContextParallel(model, mesh, **settings)


def attend_by(
    modules: Sequence[nn.Module], mesh: DeviceMesh, attention: str, ulysses: int = 1
) -> None:
    """Makes attention modules of a model with `ContextParallel` exchange otherwise.

    Args:
        modules: that call the attention interface, or have such modules inside.
        mesh, attention, ulysses: as of `ContextParallel`.
    """
    keys = KeyExchange(mesh, attention, ulysses)
    for module in modules:
        context: ContextParallel = module.__dict__[CONTEXT]
        context.others |= {id(inner): keys for inner in module.modules()}
