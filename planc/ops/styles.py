"""Tensor-parallel styles and layouts, named as torch names them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, ClassVar, assert_never

from planc.ops.base import OMIT, Form, Name, Pairs, Plain, Size, Some, key, kind_of, text
from planc.ops.base import Literal as Literal  # noqa: PLC0414 - for users of this module
from planc.ops.phrases import literal


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


def _layout(text: str) -> Replicate | Shard | Partial:
    found = re.fullmatch(r"shard\((.*)\)", text)
    return Shard(int(found[1])) if found else Partial() if text == "partial" else Replicate()


Layout = Annotated[
    Replicate | Shard | Partial,
    replace(
        text("layout", "a layout", r"(replicate|partial|shard\((0|-?[1-9][0-9]?)\))"),
        write=str,
        read=_layout,
    ),
]

Parts = Size | Some[Size]
"""What lies side by side in one dim: a number of equal parts, or the size of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Colwise:
    """A linear split by output features, or an embedding split by its hidden dim.

    torch's `ColwiseParallel`; its defaults are replicate -> shard(-1), local.

    Args:
        parts: of a weight that holds several projections: each is split, and a rank holds its
            slice of every one.
        interleaved: the features of the parts alternate, so a rank's slice is one piece.
        transposed: the weight is [in, out], as in transformers' Conv1D.
    """

    input: Layout = Replicate()
    output: Layout = Shard(-1)
    local: bool = True
    parts: Parts = field(default=1, metadata=OMIT)
    interleaved: bool = field(default=False, metadata=OMIT)
    transposed: bool = field(default=False, metadata=OMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rowwise:
    """A linear split by input features, or an embedding split by its vocabulary.

    torch's `RowwiseParallel`; its defaults are shard(-1) -> replicate, local. For an embedding the
    IR states replicate -> replicate, because the ids that it takes are never split by features.
    `parts`, `interleaved` and `transposed` are as for `Colwise`, of the input features.
    """

    input: Layout = Shard(-1)
    output: Layout = Replicate()
    local: bool = True
    parts: Parts = field(default=1, metadata=OMIT)
    interleaved: bool = field(default=False, metadata=OMIT)
    transposed: bool = field(default=False, metadata=OMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """A whole weight on an activation that is split along `dim`; its gradient is a sum.

    torch's `SequenceParallel`; its defaults are dim 1, not local.
    """

    dim: Annotated[int, Form({"minimum": -16, "maximum": 16})] = 1
    local: bool = False


@dataclass(frozen=True, slots=True)
class Redistribution:
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

    positional: tuple[Redistribution | None, ...] = ()
    named: Pairs[Redistribution] = ()
    local: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """torch's `PrepareModuleOutput`: the outputs in order (None: left alone)."""

    positional: tuple[Redistribution | None, ...]
    local: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """Whole parameters, said in so many words.

    Args:
        summed: the gradient of each rank is a part of a sum over the axis.
    """

    KIND: ClassVar[str] = "replicate"

    summed: Annotated[bool, Form({"const": True})] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaKv:
    """The compressed keys and values of multi-head latent attention, on `kv_a_proj_with_mqa`.

    Args:
        rope: how many of the last features go to the heads of each rank without another
            projection, so that their gradient is a part of a sum.
    """

    rope: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """How a bare parameter is held.

    Args:
        layout: `Shard`, `Replicate` (whole, its gradient a part of a sum), or `Partial` (whole,
            and each rank computes with one part of it in as many as there are ranks: a bias that
            is added to a sum).
        parts, interleaved: of a split dim, as for `Colwise`.
    """

    layout: Layout
    parts: Parts = field(default=1, metadata=OMIT)
    interleaved: bool = field(default=False, metadata=OMIT)

    def __str__(self) -> str:
        if isinstance(self.layout, Shard):
            return f"shard({', '.join([str(self.layout.dim), *_parts(self)])})"
        return str(self.layout)


_SOME = Form({"minProperties": 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Bare parameters that the ranks split; the module's forward sees its rank's own."""

    layouts: Annotated[Pairs[ParameterLayout], _SOME] = field(metadata=key("parameters"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Expert tensors that are split inside of each expert.

    Args:
        layouts: of all parameters of the module.
        input: `Replicate`, and the gradients of all inputs are summed; or a split, as it is.
        output: what the ranks' parts become: `Replicate` their sum, `Shard` a slice of it;
            `Partial` and `Shard(-1)` leave them as they are.
        local: whether a local tensor is handed on, and not a DTensor.
    """

    layouts: Annotated[Pairs[ParameterLayout], _SOME] = field(metadata=key("parameters"))
    input: Layout = Replicate()
    output: Layout = Replicate()
    local: bool = field(default=True, metadata=OMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """An RMS norm over features that are split: its weight is too, its mean is of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """Integer attributes that count what the ranks split, such as heads: each has its part.

    Args:
        names: of the attributes, those of the module itself.
    """

    names: Annotated[Some[Name], Form({"uniqueItems": True})] = field(metadata=key("attributes"))


_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_KEYWORDS = Form({"propertyNames": dict(text("", "a name", _WORD).schema)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """A style of the plan's own: a `ParallelStyle` that nobody here knows.

    Args:
        name: the plan's word for it.
        path: `package.module:Class`; imported only where the user allows code.
        arguments: by name, of the class.
    """

    KIND: ClassVar[str] = "python"

    name: Name = field(metadata=key("style"))
    path: Annotated[str, text("", "package.module:Class", rf"{_WORD}([.]{_WORD})*:{_WORD}")]
    arguments: Annotated[Pairs[Plain], _KEYWORDS] = ()


Bare = Parameters | Experts
Style = Annotated[
    Colwise
    | Rowwise
    | Sequence
    | Input
    | Output
    | Replicated
    | MlaKv
    | Parameters
    | Experts
    | Features
    | Attributes
    | Custom,
    Form(tag="name"),
]


def style_name(style: Style) -> str:
    """The word that a plan uses for it."""
    if isinstance(style, Custom):
        return style.name
    return kind_of(type(style))


def mesh_dims(style: Style) -> int:
    """How many dimensions of a mesh a style takes: one, as all of torch 2.13's `ParallelStyle`s."""
    return 1


def _parts(style: Colwise | Rowwise | ParameterLayout) -> list[str]:
    parts = style.parts if isinstance(style.parts, int) else list(style.parts)
    words = [f"parts = {parts}"] if parts != 1 else []
    return words + ["interleaved = true"] * style.interleaved


def _arrow(style: Colwise | Rowwise | Experts) -> list[str]:
    usual = {f.name: f.default for f in fields(style)}
    source = f"{style.input} " * (style.input != usual["input"])
    return [f"{source}-> {style.output}"] if source or style.output != usual["output"] else []


def _layouts(style: Style) -> list[str]:
    """What is in the style's brackets but for `local`; defaults are left out."""
    match style:
        case Colwise() | Rowwise():
            return [*_arrow(style), *_parts(style)]
        case Sequence():
            return [f"dim = {style.dim}"] if style.dim != 1 else []
        case Input() | Output():
            named = [f"{n} = {c}" for n, c in getattr(style, "named", ())]
            return [str(c) if c else "null" for c in style.positional] + named
        case Replicated():
            return ["gradient = sum"] * style.summed
        case MlaKv():
            return [f"rope = {style.rope}"]
        case Attributes():
            return [f"{name} = split" for name in style.names]
        case Custom():
            return [f"{name} = {literal(value)}" for name, value in style.arguments]
        case Parameters() | Experts():
            arrow = _arrow(style) if isinstance(style, Experts) else []
            return [*(f"{name} = {layout}" for name, layout in style.layouts), *arrow]
        case Features():
            return []
    assert_never(style)


def style_arguments(style: Style, *words: str) -> str:
    """What is in the style's brackets, defaults left out; empty for a bare style.

    Args:
        words: for a local tensor and for a DTensor, which the module hands on by no default.
    """
    local = getattr(style, "local", None)
    yes, no = words or ("local = true", "local = false")
    kept = [] if local in (None, local_default(style)) else [yes if local else no]
    return ", ".join([*_layouts(style), *kept])


def local_default(style: Style) -> bool:
    """What torch hands on if nothing is said: the local tensor, or (False) the DTensor."""
    return not isinstance(style, Sequence | Input)


def style_text(style: Style) -> str:
    """The style as a plan writes it."""
    arguments = style_arguments(style)
    return style_name(style) + (f"({arguments})" if arguments else "")


@dataclass(frozen=True, slots=True)
class Split:
    """Along which dim a style splits a parameter, and what lies side by side in it."""

    dim: int
    parts: Parts = 1
    interleaved: bool = False

    @property
    def packed(self) -> bool:
        """Whether a rank holds several pieces."""
        return self.parts != 1 and not self.interleaved


def weight_split(style: Style, kind: str, parameter: str, ndim: int) -> Split | None:
    """How a style splits a parameter, or None where it stays whole.

    Source: `ColwiseParallel` and `RowwiseParallel` in torch.distributed.tensor.parallel.style. A
    linear's weight is [out, in], a Conv1D's [in, out], an embedding's [vocabulary, hidden].

    Args:
        style: what the plan puts on the module.
        kind: the module's kind, `linear`, `conv1d` or `embedding`.
        parameter: the parameter's name in the module.
        ndim: the number of the parameter's dims.
    """
    dim: int | None = None
    match style:
        case Features():
            return Split(0)
        case Colwise():
            turned = kind == "embedding" or (kind == "conv1d" and ndim == 2)
            dim = 1 if turned else 0
        case Rowwise():
            if kind == "embedding":
                dim = 0
            elif parameter == "weight" and ndim == 2:
                dim = 0 if kind == "conv1d" else 1
        case Parameters() | Experts():
            stated = dict(style.layouts).get(parameter)
            if stated is None or not isinstance(stated.layout, Shard):
                return None
            dim = stated.layout.dim % ndim if -ndim <= stated.layout.dim < ndim else None
            return None if dim is None else Split(dim, stated.parts, stated.interleaved)
    if dim is None or not isinstance(style, Colwise | Rowwise):
        return None
    return Split(dim, style.parts, style.interleaved)


def weight_shard(style: Style, kind: str, parameter: str, ndim: int) -> int | None:
    """The dim along which a style splits a parameter, or None; arguments as `weight_split`."""
    split = weight_split(style, kind, parameter, ndim)
    return None if split is None else split.dim


def part_sizes(split: Split, size: int) -> tuple[int, ...]:
    """The size of each part of a dim."""
    if isinstance(split.parts, tuple):
        return split.parts
    return (size // split.parts,) * split.parts
