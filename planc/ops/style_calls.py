"""The call that creates each style: torch's, or a definition that scripts inline.

Arguments at their defaults are left out.
"""

from typing import assert_never

from planc.ops.call import FunctionCall, Items, Keywords, Table, Value, given
from planc.ops.styles import (
    Attributes,
    Bare,
    Colwise,
    Custom,
    Experts,
    Features,
    Input,
    Layout,
    Literal,
    MlaKv,
    Output,
    Parameters,
    Partial,
    Parts,
    Redistribution,
    Replicated,
    Rowwise,
    Sequence,
    Shard,
    Style,
    local_default,
)

_TORCH = "torch.distributed.tensor.parallel:"
_OTHER = "standalone.tensor_styles:"


def style_call(style: Style) -> FunctionCall:
    """A `ParallelStyle`; it holds no state, so modules can share it."""
    match style:
        case Colwise() | Rowwise():
            return _weighted(style)
        case Sequence():
            keywords = given(sequence_dim=style.dim if style.dim != 1 else None, **_local(style))
            return FunctionCall(f"{_TORCH}SequenceParallel", (), keywords)
        case Input():
            return _input(style)
        case Output():
            arrives, wanted = _sides(style.positional)
            keywords = given(output_layouts=arrives, desired_output_layouts=wanted, **_local(style))
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
            return FunctionCall(style.path, (), tuple((n, _literal(v)) for n, v in style.arguments))
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


def _weighted(style: Colwise | Rowwise) -> FunctionCall:
    default = type(style)()
    keywords = given(
        input_layouts=layout_call(style.input) if style.input != default.input else None,
        output_layouts=layout_call(style.output) if style.output != default.output else None,
        **_local(style),
    )
    made = FunctionCall(f"{_TORCH}{type(style).__name__}Parallel", (), keywords)
    parts = 1 if style.interleaved else style.parts  # interleaved parts are not reordered
    if not style.transposed and parts == 1:
        return made
    name = "TransposedParallel" if style.transposed else "PackedParallel"
    sizes = given(parts=_sizes(parts) if parts != 1 else None)
    return FunctionCall(f"{_OTHER}{name}", (made,), sizes)


def _sizes(parts: Parts) -> Value:
    return parts if isinstance(parts, int) else Items(parts)


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
        *given(use_local_output=None if style.local else False),
        *parts,
    )
    return FunctionCall(f"{_OTHER}ExpertsParallel", (layouts,), keywords)


def _input(style: Input) -> FunctionCall:
    arrives, wanted = _sides(style.positional)
    named = tuple(Table(_of(style, side)) if style.named else None for side in ("source", "target"))
    keywords = given(
        input_layouts=arrives,
        desired_input_layouts=wanted,
        input_kwarg_layouts=named[0],
        desired_input_kwarg_layouts=named[1],
        **_local(style),
    )
    return FunctionCall(f"{_TORCH}PrepareModuleInput", (), keywords)


def _of(style: Input, side: str) -> Keywords:
    return tuple((name, layout_call(getattr(change, side))) for name, change in style.named)


def _sides(changes: tuple[Redistribution | None, ...]) -> tuple[Value, Value]:
    """The source layouts and the target layouts; None where there are none."""
    if not changes:
        return None, None
    return (
        tuple(layout_call(c.source) if c else None for c in changes),
        tuple(layout_call(c.target) if c else None for c in changes),
    )


def _literal(value: Literal) -> Value:
    return Items(tuple(map(_literal, value))) if isinstance(value, tuple) else value
