"""Tensor-parallel styles and layouts, named as torch names them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the whole tensor."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True, slots=True)
class Shard:
    """Split over the ranks along `dim`; negative dims count from the end."""

    dim: int

    def __str__(self) -> str:
        return f"shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a summand."""

    def __str__(self) -> str:
        return "partial"


Layout = Replicate | Shard | Partial


@dataclass(frozen=True, slots=True, kw_only=True)
class Colwise:
    """A linear split by output features, or an embedding split by its hidden dim.

    torch's `ColwiseParallel`; its defaults are replicate -> shard(-1), local.
    """

    input: Layout = Replicate()
    output: Layout = Shard(-1)
    local: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rowwise:
    """A linear split by input features, or an embedding split by its vocabulary.

    torch's `RowwiseParallel`; its defaults are shard(-1) -> replicate, local. For an embedding the
    IR states replicate -> replicate, because the ids that it takes are never split by features.
    """

    input: Layout = Shard(-1)
    output: Layout = Replicate()
    local: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """A whole weight on an activation that is split along `dim`; its gradient is a sum.

    torch's `SequenceParallel`; its defaults are dim 1, not local.
    """

    dim: int = 1
    local: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """A layout that arrives and the one that is wanted."""

    source: Layout
    target: Layout

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """torch's `PrepareModuleInput`: positional arguments in order (None: left alone), and named.

    Its default hands on a DTensor, which keeps the gradients of several consumers one sum.
    """

    positional: tuple[Change | None, ...] = ()
    named: tuple[tuple[str, Change], ...] = ()
    local: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """torch's `PrepareModuleOutput`: the outputs in order (None: left alone)."""

    positional: tuple[Change | None, ...]
    local: bool = True


Style = Colwise | Rowwise | Sequence | Input | Output


def style_name(style: Style) -> str:
    """The word that a plan uses for it."""
    return type(style).__name__.lower()


def style_arguments(style: Style) -> str:
    """What stands in the style's brackets, defaults left out; empty for a bare style."""
    local = True
    match style:
        case Colwise() | Rowwise():
            default = type(style)()
            parts = []
            if style.input != default.input:
                parts = [str(Change(style.input, style.output))]
            elif style.output != default.output:
                parts = [f"-> {style.output}"]
        case Sequence():
            local = False
            parts = [f"dim = {style.dim}"] if style.dim != 1 else []
        case Input():
            local = False
            parts = [str(c) if c else "null" for c in style.positional]
            parts += [f"{name} = {change}" for name, change in style.named]
        case Output():
            parts = [str(c) if c else "null" for c in style.positional]
    if style.local != local:
        parts.append(f"local = {str(style.local).lower()}")
    return ", ".join(parts)


def style_text(style: Style) -> str:
    """The style as a plan writes it."""
    arguments = style_arguments(style)
    return style_name(style) + (f"({arguments})" if arguments else "")


def weight_shard(style: Style, kind: str, parameter: str, ndim: int) -> int | None:
    """The dim along which a style splits a parameter, or None where it stays whole.

    Source: `ColwiseParallel` and `RowwiseParallel` in torch.distributed.tensor.parallel.style. A
    linear's weight is [out, in], an embedding's [vocabulary, hidden].

    Args:
        style: what the plan puts on the module.
        kind: the module's kind, `linear` or `embedding`.
        parameter: the parameter's name in the module.
        ndim: the number of the parameter's dims.
    """
    match style:
        case Colwise():
            return 1 if kind == "embedding" else 0
        case Rowwise():
            if kind == "embedding":
                return 0
            return 1 if parameter == "weight" and ndim == 2 else None
        case _:
            return None
