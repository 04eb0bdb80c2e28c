"""Isolates the recurrent states of packed documents from each other.

Attention isolates the documents of a row where positions restart at 0. A recurrent
state or a convolution does so only in a kernel that is given the document boundaries.
Here the functions with such states run on each document separately: documents become
rows, and their outputs return to their places. Each document gets the outputs that it
has by itself, whatever the function computes.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from planc.runtime.standalone.pipeline import Inactive

RESETS = "_reset_states"
"""The attribute of a model whose recurrent states are reset at each document."""
CURRENT = threading.local()
"""State of the model whose forward this thread runs, or recomputes: its `documents`,
the `ranks` that each have a part of its rows (`StateRanks`), and the `rows` of experts
with a capacity.
"""
REPLACING = threading.Lock()
TOKENS = {
    "causal_conv1d_fn": 2,
    "chunk_kimi_delta_attention": 1,
    "mamba2_chunk_scan": 1,
    "mamba_selective_scan": 2,
    "rwkv_linear_attention": 1,
    "torch_chunk_gated_delta_rule": 1,
    "MiniMaxLightningAttention.forward": 1,
    "RecurrentGemmaRecurrentBlock.conv_1d": 2,
    "RecurrentGemmaRglru._rnn_scan": 1,
    "RwkvFeedForward.time_shift": 1,
    "RwkvSelfAttention.time_shift": 1,
    "ZayaCCAProjection.forward": 1,
    "xLSTMBackend.forward": 2,
}
"""Functions of models' files, and methods and modules of their classes, that update
recurrent states, with the dim of their tokens."""
FUSED = ("mamba_inner_fn", "mamba2_split_conv1d_scan_combined")
"""Functions that return None without a kernel; then the model calls those above."""
UNMASKED = (
    "RecurrentGemmaRglru._rnn_scan",
    "rwkv_linear_attention",
    "xLSTMBackend.forward",
)
"""Functions of models whose recurrent states see padding, despite a mask."""
MASK = "create_recurrent_attention_mask"
"""The function of a model's file that creates the mask of its recurrent states."""
REPLACED: set[Any] = set()
"""The functions that this file has wrapped."""
OF_KERNELS = ("seq_idx", "cu_seqlens")
STATED = (*OF_KERNELS, "cu_seq_lens_q")
"""Arguments that say where documents begin; the last is one of attention too."""
STATEMENTS = ("position_ids", *STATED)


class DocumentsError(ValueError):
    """Documents of a row cannot be kept apart."""


class Documents:
    """The documents of a batch, as rows of their own. Those of like lengths are
    together, so that rows are padded by at most as many tokens as there are.

    Args:
        begins: `[rows, length]`, whether a token begins a document.
    """

    def __init__(self, begins: Tensor) -> None:
        self.rows, self.length = begins.shape
        self.begins = begins.clone()
        self.begins[:, 0] = True
        self.asked = self.kept = False
        self.parts = {*TOKENS, *FUSED}  # what keeps them apart
        self.raised: Callable[[str], Exception] = DocumentsError
        first, tokens = self.begins.flatten().nonzero()[:, 0], begins.numel()
        self.ends = torch.cat([first[1:], first.new_tensor([tokens])])
        lengths = self.ends - first
        kinds = lengths.double().log2().ceil()
        self.groups: list[Tensor] = []  # [documents, longest]: places of tokens
        for kind in kinds.unique():
            starts, own = first[kinds == kind], lengths[kinds == kind]
            steps = torch.arange(int(own.max()), device=first.device)
            places = starts[:, None] + steps
            self.groups.append(torch.where(steps < own[:, None], places, tokens))
        every = torch.cat([group.flatten() for group in self.groups])
        order = every.new_empty(tokens + 1)
        order[every] = torch.arange(len(every), device=every.device)
        self.order = order[:-1]

    @property
    def numbers(self) -> Tensor:
        """The number of each token's document in its row, as kernels read it."""
        return self.begins.cumsum(1, dtype=torch.int32) - 1

    @property
    def positions(self) -> Tensor:
        """The place of each token in its document."""
        places = torch.arange(self.length, device=self.begins.device)
        places = places.expand_as(self.begins)
        return places - torch.where(self.begins, places, 0).cummax(1).values

    def has(self, value: Any, dim: int) -> bool:
        """Whether a value has all tokens of all rows, on dims 0 and `dim`."""
        if not isinstance(value, Tensor) or value.dim() <= dim:
            return False
        return (len(value), value.shape[dim]) == (self.rows, self.length)

    def run_per_document(
        self, function: Callable[..., Any], dim: int, args: Any, kwargs: Any
    ) -> Any:
        """The outputs of a function for each document alone, where tokens are."""
        outputs = []
        flat = [self.flat(value, dim) for value in (*args, *kwargs.values())]
        for group in self.groups:
            given = [
                take_rows(value, group).movedim(1, dim) if has else value
                for value, has in flat
            ]
            named = dict(zip(kwargs, given[len(args) :], strict=True))
            outputs.append(function(*given[: len(args)], **named))
        return self.join_documents(outputs, dim)

    def flat(self, value: Any, dim: int) -> tuple[Any, bool]:
        """The tokens of all rows and one of zeros, and True; or a value without."""
        if not self.has(value, dim):
            return value, False
        tokens = value.movedim(dim, 1).flatten(0, 1)
        return torch.cat([tokens, tokens.new_zeros(1, *tokens.shape[1:])]), True

    def join_documents(self, outputs: list[Any], dim: int) -> Any:
        """Outputs in the order of tokens; None for final states, which have none."""
        if isinstance(outputs[0], tuple | list):
            parts = zip(*outputs, strict=True)
            return tuple(self.join_documents([*part], dim) for part in parts)
        flat = []
        for value, group in zip(outputs, self.groups, strict=True):
            documents, longest = group.shape
            if not isinstance(value, Tensor) or value.dim() <= dim:
                return None
            if len(value) != documents or value.shape[dim] < longest:
                return None
            tokens = full_tensor(value).movedim(dim, 1)[:, :longest]
            flat.append(tokens.flatten(0, 1))
        joined = self.in_rows(take_rows(torch.cat(flat), self.order), dim)
        if isinstance(joined, DTensor):
            joined = joined.redistribute(placements=outputs[0].placements)
        return joined

    def in_rows(self, tokens: Tensor, dim: int) -> Tensor:
        return tokens.unflatten(0, (self.rows, self.length)).movedim(1, dim)

    def run_packed_kernel(
        self, kernel: Callable[..., Any], dim: int, args: Any, kwargs: Any
    ) -> Any:
        """The outputs of a kernel that takes the lengths of documents in one row."""

        def row(value: Any) -> Any:
            if not self.has(value, dim):
                return value
            return value.movedim(dim, 1).flatten(0, 1)[None].movedim(1, dim)

        def rows(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return tuple(map(rows, value))
            if not isinstance(value, Tensor) or value.dim() <= dim:
                return None
            if value.shape[dim] != len(self.order):
                return None
            return self.in_rows(value.movedim(dim, 1)[0], dim)

        lengths = torch.cat([self.ends.new_zeros(1), self.ends])
        given = {name: row(value) for name, value in kwargs.items()}
        return rows(kernel(*map(row, args), **given, cu_seqlens=lengths))


def full_tensor(value: Tensor) -> Tensor:
    """All elements of a DTensor on each rank; other tensors as they are."""
    if isinstance(value, DTensor):
        return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    return value


def take_rows(value: Tensor, places: Tensor) -> Tensor:
    """The elements at these places of dim 0, of a DTensor too."""
    if isinstance(value, DTensor):
        alike = [Replicate()] * value.device_mesh.ndim
        mesh = value.device_mesh
        places = DTensor.from_local(places, mesh, alike, run_check=False)
    return value[places]


def batch_documents(
    batch: Mapping[str, Any], *, masks: bool = False
) -> Documents | None:
    """The documents of a batch; None where each row is one.

    Args:
        batch: the arguments of a model.
        masks: whether the padding of a mask is apart from the other tokens.

    Raises:
        DocumentsError: attention sees other documents than states.
    """
    tokens = batch.get("input_ids")
    tokens = batch.get("inputs_embeds") if tokens is None else tokens
    stated = {n: v for n in STATEMENTS if isinstance(v := batch.get(n), Tensor)}
    begins_by_name = {n: beginnings(n, v, tokens) for n, v in stated.items()}
    known_begins = {
        name: begins for name, begins in begins_by_name.items() if begins is not None
    }
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:  # where positions say nothing
        wrong = [n for n in STATED if n in known_begins and bool(known_begins[n].any())]
        if wrong:
            text = "with an `attention_mask` attention does not keep documents apart"
            raise DocumentsError(f"{text}, which `{wrong[0]}` states: leave it out")
        mask = mask.bool()
        known = masks and (tokens is None or tokens.shape[:2] == mask.shape)
        known_begins = {"": mask.diff(dim=1, prepend=mask[:, :1])} if known else {}
    first = next(iter(known_begins), None)
    for name, begins in known_begins.items():
        if first is not None and bool((begins != known_begins[first]).any()):
            text = f"`{first}` and `{name}` begin documents at other tokens"
            raise DocumentsError(text)
    if first is None or not known_begins[first].any():
        return None
    begins = known_begins[first]
    return Documents(begins if tokens is None else begins.expand(len(tokens), -1))


def beginnings(name: str, value: Tensor, tokens: Tensor | None) -> Tensor | None:
    """The starts of documents after the first of each row, as an argument states them:
    by numbers that change, positions that restart, or lengths; None if it does not.
    """
    if name == "seq_idx":
        return value.diff(dim=1, prepend=value[:, :1]) != 0
    if name != "position_ids":
        if tokens is None:
            return None
        begins = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=value.device)
        begins.view(-1)[value[:-1].long()] = True
        begins[:, 0] = False
        return begins
    if value.dim() == 3 and len(value) == 4:
        value = value[0]  # those of text, before those of images
    if value.dim() != 2:
        return None
    return value.diff(dim=1, prepend=value[:, :1] - 1) != 1


def current() -> tuple[Any, Any]:
    """The documents of this thread's forward, and its ranks; None for none."""
    return getattr(CURRENT, "documents", None), getattr(CURRENT, "ranks", None)


@contextmanager
def running(documents: Documents | None, ranks: Any = None) -> Iterator[None]:
    """Keeps these documents apart in this thread, whose tokens these ranks have."""
    before = current()
    CURRENT.documents, CURRENT.ranks = documents, ranks
    try:
        yield
    finally:
        CURRENT.documents, CURRENT.ranks = before


def kept_apart(function: Callable[..., Any], part: str) -> Any:
    """A function that computes each document of the running batch alone, from the
    tokens of all ranks that have some.

    Args:
        part: a key of `TOKENS`, or one of `FUSED`.
    """
    taken, dim = kernel_arguments(function), TOKENS.get(part)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        ranks = current()[1]
        if ranks is not None and part in ranks.parts:
            if dim is None:
                return None
            return ranks.run_recurrence(call_without_ranks, part, args, kwargs)
        return call_without_ranks(*args, **kwargs)

    def call_without_ranks(*args: Any, **kwargs: Any) -> Any:
        documents, _ = current()
        if documents is None or part not in documents.parts:
            return function(*args, **kwargs)
        kwargs = {name: kwargs[name] for name in kwargs if name not in STATED}
        if "seq_idx" in taken:
            documents.kept = True
            return function(*args, **kwargs, seq_idx=documents.numbers)
        if dim is None:
            return None
        if not any(documents.has(value, dim) for value in (*args, *kwargs.values())):
            text = "gets other tokens than the model: where do documents begin?"
            raise documents.raised(f"{function.__name__} {text}")
        documents.kept = True
        way = (
            documents.run_packed_kernel
            if "cu_seqlens" in taken
            else documents.run_per_document
        )
        with running(None):
            return way(function, dim, args, kwargs)

    return call


def kernel_arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """The arguments of a kernel that transformers calls in the place of a function;
    none where it calls the function itself, which refuses to be told of documents.

    Both are variables of its `use_kernel_func_from_hub_with_fallback`.
    """
    if not inspect.isfunction(function):
        return ()
    inside = inspect.getclosurevars(function).nonlocals
    kernel = inside.get("is_new_implementation")
    return tuple(inside["applicable_params"]) if kernel else ()


def restore_in_recomputation(checkpoint: Callable[..., Any]) -> Any:
    """Wraps a checkpoint function to recompute with the documents of its forward."""

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        facts = {**vars(CURRENT)}
        if all(fact is None for fact in facts.values()):
            return checkpoint(function, *args, **kwargs)

        def again(*args: Any, **kwargs: Any) -> Any:
            before = {**vars(CURRENT)}
            vars(CURRENT).update(facts)
            try:
                return function(*args, **kwargs)
            finally:
                vars(CURRENT).update(dict.fromkeys(facts) | before)

        return checkpoint(again, *args, **kwargs)

    return call


def of_all_stages(model: nn.Module) -> Iterator[nn.Module]:
    """All modules of a model, including the rank's other pipeline stages, which are
    replaced by `Inactive` modules while one stage runs.
    """
    stand_ins = [m.module for m in model.modules() if isinstance(m, Inactive)]
    return chain.from_iterable(m.modules() for m in (model, *stand_ins))


def carry_facts(model: nn.Module) -> None:
    """Makes a model's checkpoints recompute with the documents of their forward."""
    for module in of_all_stages(model):
        for name in ("checkpoint_fn", "_gradient_checkpointing_func"):
            if name in module.__dict__:
                replace(module, name, restore_in_recomputation)


class StateResets:
    """Isolates the packed documents of a model's batches from each other.

    The model's functions are wrapped when the first batch with several documents in a
    row arrives.

    Args:
        parts: the keys of `TOKENS` that the model has.
    """

    def __init__(self, model: nn.Module, parts: Iterable[str]) -> None:
        self.parts, self.replaced, self.looked = {*parts}, False, False
        self.before: Documents | None = None  # of a model that runs this one
        self.raised: Callable[[str], Exception] = DocumentsError  # what is raised
        self.masks = not self.parts.isdisjoint(UNMASKED)
        self.taken = tuple(inspect.signature(model.forward).parameters)
        model.__dict__[RESETS] = self
        model.register_forward_pre_hook(self.enter, with_kwargs=True)
        model.register_forward_hook(self.leave, always_call=True)

    def enter(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.looked:
            self.looked = True
            call_changed_modules(model)
        self.before = getattr(CURRENT, "documents", None)
        given = dict(zip(self.taken, args, strict=False)) | kwargs
        masks = self.masks and not given.get("use_cache")
        try:
            CURRENT.documents = documents = batch_documents(given, masks=masks)
        except DocumentsError as error:
            raise self.raised(str(error)) from error
        if documents is None:
            return None
        documents.raised = self.raised
        documents.parts = {*self.parts, *FUSED}
        if not self.replaced:
            self.replaced = True
            replace_parts(model, self.parts)
        kwargs = {name: kwargs[name] for name in kwargs if name not in OF_KERNELS}
        if "position_ids" in self.taken and given.get("position_ids") is None:
            kwargs |= {"position_ids": documents.positions}
        if "use_cache" in self.taken:  # no text goes on after several documents
            kwargs |= {"use_cache": False}
        return args, kwargs

    def leave(self, model: nn.Module, _args: Any, _output: Any) -> None:
        documents, CURRENT.documents = CURRENT.documents, self.before
        if documents is not None and documents.asked and not documents.kept:
            text = "a function that is not transformers' updates recurrent states"
            raise self.raised(f"{text}, and is not told where documents begin")


def replace_parts(model: nn.Module, parts: Set[str]) -> None:
    """Wraps the functions with recurrent states that the modules of a model call."""
    carry_facts(model)
    for module in of_all_stages(model):
        if not parts.isdisjoint(called_names(type(module))):
            module.register_forward_pre_hook(ask)
        for kind in type(module).__mro__:
            if kind.__module__.startswith("transformers.models."):
                replace_of_class(module, kind, parts)


def replace_of_class(module: nn.Module, kind: type, parts: Set[str]) -> None:
    """Replaces what a module calls in the code of one of its classes."""
    home = sys.modules[kind.__module__]
    for part in parts:
        owner, _, name = part.rpartition(".")
        if owner == kind.__name__ and isinstance(
            inner := getattr(module, name), nn.Module
        ):
            replace(inner, "forward", kept_apart, part)
        elif owner == kind.__name__:
            replace(module, name, kept_apart, part)
        elif not owner and hasattr(home, name):
            replace(home, name, kept_apart, part)
    for name in FUSED:
        if hasattr(home, name):
            replace(home, name, kept_apart, name)
    if hasattr(home, MASK):
        replace(home, MASK, keep_mask_length)


def call_changed_modules(model: nn.Module) -> None:
    """Leaves kernels of a whole layer out where a plan has changed one of its modules:
    they read its weights, and would skip its adapters, splits and fp8 matmuls.
    """
    for module in of_all_stages(model):
        for kind in type(module).__mro__:
            if "forward" not in vars(kind):
                continue
            home = sys.modules[kind.__module__]
            names = {*FUSED} & {*called_names(kind)} & {*vars(home)}
            if names and any(map(is_changed, module.children())):
                for name in names:
                    replace(home, name, passed_by)


def is_changed(module: nn.Module) -> bool:
    """Whether a module of a layer does more than torch's class does."""
    library_class = type(module).__module__.partition(".")[0] in (
        "torch",
        "transformers",
    )
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not library_class or bool(hooks) or "forward" in module.__dict__


def passed_by(function: Callable[..., Any]) -> Any:
    """A kernel that is not called: the model goes on by its modules."""

    @functools.wraps(function)
    def call(*_: Any, **__: Any) -> None:
        return None

    return call


def keep_mask_length(function: Callable[..., Any]) -> Any:
    """The mask of states as each of some ranks has its part of it: also where that pads
    nothing, or is one token, so that all ranks call the same collectives.
    """

    @functools.wraps(function)
    def call(
        config: Any, inputs_embeds: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if current()[1] is not None:
            return attention_mask
        return function(config, inputs_embeds, attention_mask, *args, **kwargs)

    return call


def ask(_module: nn.Module, _args: Any) -> None:
    """Notes that a module runs whose class calls what is replaced; a kernel of a whole
    layer calls nothing of it.
    """
    for facts in current():
        if facts is not None:
            facts.asked = True


def replace(place: Any, name: str, wrap: Callable[..., Any], *given: Any) -> None:
    """Puts what is made of a function in its place, once; of a method, as a method, so
    that a copy of the module has its own.
    """
    with REPLACING:
        plain = getattr(place, name)
        method = isinstance(plain, MethodType)
        function = plain.__func__ if method else plain
        if function not in REPLACED:
            REPLACED.add(new := wrap(function, *given))
            setattr(place, name, MethodType(new, plain.__self__) if method else new)


def called_names(kind: Any) -> tuple[str, ...]:
    """The names in the code of a class' forward, which decorators may wrap."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return getattr(code, "co_names", ())


def reset_states(model: nn.Module, *parts: str) -> None:
    """`StateResets`, which hooks of the model keep; nothing for no parts."""
    if parts:
        StateResets(model, parts)
