"""Tensor-parallel styles and layouts, with torch's names, and the call that creates each style."""

from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar, assert_never

from planc.ops.base import (
    OMIT,
    ClassPath,
    Form,
    Name,
    Pairs,
    PlainKeywords,
    Size,
    Some,
    key,
    kind_of,
)
from planc.ops.base import Literal as Literal  # noqa: PLC0414 - for users of this module
from planc.ops.call import FunctionCall, Keywords, Table, Value, drop_none, plain
from planc.ops.layouts import Layout as Layout  # noqa: PLC0414 - for users of this module
from planc.ops.layouts import Partial as Partial  # noqa: PLC0414
from planc.ops.layouts import Replicate as Replicate  # noqa: PLC0414
from planc.ops.layouts import Shard as Shard  # noqa: PLC0414
from planc.ops.phrases import literal

Parts = Size | Some[Size]
"""The projections packed in one dim: a number of equal parts, or the size of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Colwise:
    """A linear sharded by output features, or an embedding sharded by its hidden dim.

    torch's `ColwiseParallel`; its defaults are replicate -> shard(-1), local.

    Args:
        parts: the projections packed in one weight: each is sharded, and a rank holds its slice of
            every one.
        interleaved: whether the features of the parts alternate, so that a rank's slice is
            contiguous.
        transposed: whether the weight is [in, out], as in transformers' Conv1D.
    """

    input: Layout = Replicate()
    output: Layout = Shard(-1)
    local: bool = True
    parts: Parts = field(default=1, metadata=OMIT)
    interleaved: bool = field(default=False, metadata=OMIT)
    transposed: bool = field(default=False, metadata=OMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rowwise:
    """A linear sharded by input features, or an embedding sharded by its vocabulary.

    torch's `RowwiseParallel`; its defaults are shard(-1) -> replicate, local. For an embedding the
    IR states replicate -> replicate, because its input ids are never sharded by features.
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
    """A replicated weight applied to an activation that is sharded along `dim`; its gradient is
    summed.

    torch's `SequenceParallel`; its defaults are dim 1, not local.
    """

    dim: Annotated[int, Form({"minimum": -16, "maximum": 16})] = 1
    local: bool = False


@dataclass(frozen=True, slots=True)
class Redistribution:
    """The layout of a tensor before and after it is redistributed."""

    source: Layout
    target: Layout

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """torch's `PrepareModuleInput`: positional arguments in order (None: unchanged), and keyword
    arguments.

    By default the module receives a DTensor, so the gradients of several consumers are summed once.
    """

    positional: tuple[Redistribution | None, ...] = ()
    named: Pairs[Redistribution] = ()
    local: bool = False

    @property
    def changes(self) -> list[Redistribution]:
        """The changes of all arguments."""
        return [c for c in (*self.positional, *(c for _, c in self.named)) if c is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """torch's `PrepareModuleOutput`: the outputs in order (None: unchanged)."""

    positional: tuple[Redistribution | None, ...]
    local: bool = True

    @property
    def changes(self) -> list[Redistribution]:
        """The changes of all outputs."""
        return [c for c in self.positional if c is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """Replicated parameters, stated explicitly.

    Args:
        summed: whether gradients are summed over the axis.
    """

    KIND: ClassVar[str] = "replicate"

    summed: Annotated[bool, Form({"const": True})] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaKv:
    """The compressed keys and values of multi-head latent attention, on `kv_a_proj_with_mqa`.

    Args:
        rope: how many of the last features are used by the heads of each rank without a further
            projection, so that their gradient is partial.
    """

    rope: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """The layout of a bare parameter.

    Args:
        layout: `Shard`; `Replicate`, whose gradient is summed over the ranks; or `Partial`,
            replicated, where each of N ranks computes with 1/N of the values (a bias that is added
            to a sum).
        parts, interleaved: of a sharded dim, as for `Colwise`.
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
    """Bare parameters with layouts; the module's forward uses the local tensors of its rank."""

    layouts: Annotated[Pairs[ParameterLayout], _SOME] = field(metadata=key("parameters"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Expert tensors that are sharded inside each expert.

    Args:
        layouts: of all parameters of the module.
        input: `Replicate`: the gradients of all inputs are summed; `Shard`: left as it is.
        output: what the partial output becomes: `Replicate` all-reduces it, `Shard` reduce-scatters
            it, `Partial` and `Shard(-1)` leave it unchanged.
        local: whether the output is a local tensor and not a DTensor.
    """

    layouts: Annotated[Pairs[ParameterLayout], _SOME] = field(metadata=key("parameters"))
    input: Layout = Replicate()
    output: Layout = Replicate()
    local: bool = field(default=True, metadata=OMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """An RMS norm over sharded features: the weight is sharded, the mean is taken over all
    ranks.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """Integer attributes that count sharded items, such as heads: each rank gets its share.

    Args:
        names: of attributes of the module itself.
    """

    names: Annotated[Some[Name], Form({"uniqueItems": True})] = field(metadata=key("attributes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """A user-defined `ParallelStyle`.

    Args:
        name: in the plan.
        path: `package.module:Class`; imported only where the user allows code.
        arguments: keyword arguments of the class.
    """

    KIND: ClassVar[str] = "python"

    name: Name = field(metadata=key("style"))
    path: ClassPath
    arguments: PlainKeywords = ()


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

SPLITS = (Colwise, Rowwise, Experts, Parameters, Attributes, Features)
"""The styles that say how weights are split."""


def style_name(style: Style) -> str:
    """The style's name in a plan."""
    if isinstance(style, Custom):
        return style.name
    return kind_of(type(style))


def _parts(style: Colwise | Rowwise | ParameterLayout) -> list[str]:
    parts = style.parts if isinstance(style.parts, int) else list(style.parts)
    words = [f"parts = {parts}"] if parts != 1 else []
    return words + ["interleaved = true"] * style.interleaved


def _arrow(style: Colwise | Rowwise | Experts) -> list[str]:
    usual = {f.name: f.default for f in fields(style)}
    source = f"{style.input} " * (style.input != usual["input"])
    return [f"{source}-> {style.output}"] if source or style.output != usual["output"] else []


def _layouts(style: Style) -> list[str]:
    """The style's arguments in a plan except `local`; defaults are left out."""
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
    """The style's arguments in a plan without defaults; `words` for local output and DTensor."""
    local = getattr(style, "local", None)
    yes, no = words or ("local = true", "local = false")
    kept = [] if local in (None, local_default(style)) else [yes if local else no]
    return ", ".join([*_layouts(style), *kept])


def local_default(style: Style) -> bool:
    """Whether torch's default output is the local tensor, not a DTensor."""
    return not isinstance(style, Sequence | Input)


def style_text(style: Style) -> str:
    """The style as a plan writes it."""
    arguments = style_arguments(style)
    return style_name(style) + (f"({arguments})" if arguments else "")


# Calls -------------------------------------------------------------------------------------------

_TORCH = "torch.distributed.tensor.parallel:"
_OTHER = "standalone.tensor_styles:"


def style_call(style: Style) -> FunctionCall:
    """A `ParallelStyle`; it holds no state, so modules can share it."""
    match style:
        case Colwise() | Rowwise():
            return _weight_call(style)
        case Sequence():
            keywords = drop_none(
                sequence_dim=style.dim if style.dim != 1 else None, **_local(style)
            )
            return FunctionCall(f"{_TORCH}SequenceParallel", (), keywords)
        case Input():
            return _input(style)
        case Output():
            arrives, wanted = _sides(style.positional)
            keywords = drop_none(
                output_layouts=arrives, desired_output_layouts=wanted, **_local(style)
            )
            return FunctionCall(f"{_TORCH}PrepareModuleOutput", (), keywords)
        case Replicated():  # `replicate` alone is a no-op and is not lowered
            return FunctionCall(f"{_OTHER}SummedGradient")
        case MlaKv():
            return FunctionCall(f"{_OTHER}RotaryGradient", (style.rope,))
        case Features():
            return FunctionCall(f"{_OTHER}FeaturesParallel")
        case Attributes():
            return FunctionCall(f"{_OTHER}DividedAttributes", style.names)
        case Custom():
            return FunctionCall(style.path, (), tuple((n, plain(v)) for n, v in style.arguments))
        case Parameters() | Experts():
            return _bare(style)
        case _:
            assert_never(style)


def layout_call(layout: Layout) -> FunctionCall:
    """A DTensor placement."""
    arguments = (layout.dim,) if isinstance(layout, Shard) else ()
    return FunctionCall(f"torch.distributed.tensor:{type(layout).__name__}", arguments)


def _local(style: Colwise | Rowwise | Sequence | Input | Output) -> dict[str, Value]:
    return {"use_local_output": style.local if style.local != local_default(style) else None}


def _weight_call(style: Colwise | Rowwise) -> FunctionCall:
    default = type(style)()
    keywords = drop_none(
        input_layouts=layout_call(style.input) if style.input != default.input else None,
        output_layouts=layout_call(style.output) if style.output != default.output else None,
        **_local(style),
    )
    function_call = FunctionCall(f"{_TORCH}{type(style).__name__}Parallel", (), keywords)
    parts = 1 if style.interleaved else style.parts  # interleaved parts are not reordered
    if style.transposed or parts != 1:
        name = "TransposedParallel" if style.transposed else "PackedParallel"
        sizes = drop_none(parts=_sizes(parts) if parts != 1 else None)
        function_call = FunctionCall(f"{_OTHER}{name}", (function_call,), sizes)
    if isinstance(style, Rowwise) and style.input in (Shard(0), Shard(1)):
        return FunctionCall(f"{_OTHER}ContiguousInput", (function_call,))
    return function_call


def _sizes(parts: Parts) -> Value:
    return parts if isinstance(parts, int) else plain(parts)


def _bare(style: Bare) -> FunctionCall:
    layouts = Table(tuple((name, layout_call(p.layout)) for name, p in style.layouts))
    packed = tuple(
        (name, _sizes(p.parts)) for name, p in style.layouts if p.parts != 1 and not p.interleaved
    )
    parts = (("parts", Table(packed)),) if packed else ()
    if isinstance(style, Parameters):
        return FunctionCall(f"{_OTHER}BareParallel", (layouts,), parts)
    left = style.output in (Partial(), Shard(-1))
    keywords: Keywords = (
        ("input_layout", layout_call(style.input)),
        ("output_layout", None if left else layout_call(style.output)),
        *drop_none(use_local_output=None if style.local else False),
        *parts,
    )
    return FunctionCall(f"{_OTHER}ExpertsParallel", (layouts,), keywords)


def _input(style: Input) -> FunctionCall:
    arrives, wanted = _sides(style.positional)
    sources = tuple((name, layout_call(change.source)) for name, change in style.named)
    targets = tuple((name, layout_call(change.target)) for name, change in style.named)
    keywords = drop_none(
        input_layouts=arrives,
        desired_input_layouts=wanted,
        input_kwarg_layouts=Table(sources) if sources else None,
        desired_input_kwarg_layouts=Table(targets) if targets else None,
        **_local(style),
    )
    return FunctionCall(f"{_TORCH}PrepareModuleInput", (), keywords)


def _sides(changes: tuple[Redistribution | None, ...]) -> tuple[Value, Value]:
    """The source layouts and the target layouts; None where there are none."""
    if not changes:
        return None, None
    return (
        tuple(layout_call(c.source) if c else None for c in changes),
        tuple(layout_call(c.target) if c else None for c in changes),
    )


PARAMETERLESS = (Input, Output, MlaKv, Attributes)
"""Styles that change the inputs or outputs of a module, and no weights."""
