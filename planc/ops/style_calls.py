"""The call that creates each style: torch's, or a definition that scripts inline.

Arguments at their defaults are left out.
"""

from typing import assert_never

from planc.ops import styles as ir
from planc.ops.call import FunctionCall, Items, Keywords, Table, Value, given

_TORCH = "torch.distributed.tensor.parallel:"
_OTHER = "standalone.tensor_styles:"


def style_call(style: ir.Style) -> FunctionCall:
    """A `ParallelStyle`; it holds no state, so modules can share it."""
    match style:
        case ir.Colwise() | ir.Rowwise():
            return _weighted(style)
        case ir.Sequence():
            keywords = given(sequence_dim=style.dim if style.dim != 1 else None, **_local(style))
            return FunctionCall(f"{_TORCH}SequenceParallel", (), keywords)
        case ir.Input():
            return _input(style)
        case ir.Output():
            arrives, wanted = _sides(style.positional)
            keywords = given(output_layouts=arrives, desired_output_layouts=wanted, **_local(style))
            return FunctionCall(f"{_TORCH}PrepareModuleOutput", (), keywords)
        case ir.Replicated():  # `replicate` alone is a no-op and is not lowered
            return FunctionCall(f"{_OTHER}SummedGradient")
        case ir.MlaKv():
            return FunctionCall(f"{_OTHER}RotaryGradient", (style.rope,))
        case ir.Features():
            return FunctionCall(f"{_OTHER}FeaturesParallel")
        case ir.Attributes():
            return FunctionCall(f"{_OTHER}DividedAttributes", style.names)
        case ir.Custom():
            return FunctionCall(style.path, (), tuple((n, _literal(v)) for n, v in style.arguments))
        case ir.Parameters() | ir.Experts():
            return _bare(style)
        case _:
            assert_never(style)


def layout_call(layout: ir.Layout) -> FunctionCall:
    """A DTensor placement."""
    arguments = (layout.dim,) if isinstance(layout, ir.Shard) else ()
    return FunctionCall(f"torch.distributed.tensor:{type(layout).__name__}", arguments)


def _local(style: ir.Colwise | ir.Rowwise | ir.Sequence | ir.Input | ir.Output) -> dict[str, Value]:
    return {"use_local_output": style.local if style.local != ir.local_default(style) else None}


def _weighted(style: ir.Colwise | ir.Rowwise) -> FunctionCall:
    default = type(style)()
    keywords = given(
        input_layouts=layout_call(style.input) if style.input != default.input else None,
        output_layouts=layout_call(style.output) if style.output != default.output else None,
        **_local(style),
    )
    made = FunctionCall(f"{_TORCH}{type(style).__name__}Parallel", (), keywords)
    parts = 1 if style.interleaved else style.parts  # interleaved parts are not reordered
    if style.transposed or parts != 1:
        name = "TransposedParallel" if style.transposed else "PackedParallel"
        sizes = given(parts=_sizes(parts) if parts != 1 else None)
        made = FunctionCall(f"{_OTHER}{name}", (made,), sizes)
    if isinstance(style, ir.Rowwise) and style.input in (ir.Shard(0), ir.Shard(1)):
        return FunctionCall(f"{_OTHER}ContiguousInput", (made,))
    return made


def _sizes(parts: ir.Parts) -> Value:
    return parts if isinstance(parts, int) else Items(parts)


def _bare(style: ir.Bare) -> FunctionCall:
    layouts = Table(tuple((name, layout_call(p.layout)) for name, p in style.layouts))
    packed = tuple(
        (name, _sizes(p.parts)) for name, p in style.layouts if p.parts != 1 and not p.interleaved
    )
    parts = (("parts", Table(packed)),) if packed else ()
    if isinstance(style, ir.Parameters):
        return FunctionCall(f"{_OTHER}BareParallel", (layouts,), parts)
    left = style.output in (ir.Partial(), ir.Shard(-1))
    keywords: Keywords = (
        ("input_layout", layout_call(style.input)),
        ("output_layout", None if left else layout_call(style.output)),
        *given(use_local_output=None if style.local else False),
        *parts,
    )
    return FunctionCall(f"{_OTHER}ExpertsParallel", (layouts,), keywords)


def _input(style: ir.Input) -> FunctionCall:
    arrives, wanted = _sides(style.positional)
    sources = tuple((name, layout_call(change.source)) for name, change in style.named)
    targets = tuple((name, layout_call(change.target)) for name, change in style.named)
    keywords = given(
        input_layouts=arrives,
        desired_input_layouts=wanted,
        input_kwarg_layouts=Table(sources) if sources else None,
        desired_input_kwarg_layouts=Table(targets) if targets else None,
        **_local(style),
    )
    return FunctionCall(f"{_TORCH}PrepareModuleInput", (), keywords)


def _sides(changes: tuple[ir.Redistribution | None, ...]) -> tuple[Value, Value]:
    """The source layouts and the target layouts; None where there are none."""
    if not changes:
        return None, None
    return (
        tuple(layout_call(c.source) if c else None for c in changes),
        tuple(layout_call(c.target) if c else None for c in changes),
    )


def _literal(value: ir.Literal) -> Value:
    return Items(tuple(map(_literal, value))) if isinstance(value, tuple) else value
