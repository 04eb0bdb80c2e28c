"""A lowered plan -> the `tp_plan` of transformers, where that can say it.

Source: `ALL_PARALLEL_STYLES` of transformers 5, whose meaning
`planc/elaborate/sections/tensor_styles.py` has.
"""

import json
from collections.abc import Iterable, Iterator

from planc.diagnostics.diagnostic import Sink
from planc.elaborate.settings import SEQUENCE
from planc.model.facts import Modules
from planc.ops import styles as ir
from planc.ops.base import Op
from planc.ops.lowered import Lowered
from planc.ops.tensor_parallel import Parallelize

_FUSED = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
_BESIDE = ("tensor", "tie", "load", "configure", "random", "draws")
"""Operations that do not change what a rank computes of a module."""


def render(lowered: Lowered, sink: Sink) -> str | None:
    """The `tp_plan` as JSON, or None after an error.

    Args:
        lowered: the plan, for one model on one mesh.
        sink: receives PL739: an error for a rule that no style of transformers is, a warning for
            each section that a `tp_plan` has no place for.
    """
    styles = rules(lowered, sink)
    for word, origin in {op.WORD: op.origin for op in lowered.ops}.items():
        if word not in _BESIDE:
            sink.warning("PL739", f"a `tp_plan` does not have `{word}`", origin)
    return None if sink.has_errors else json.dumps(styles, indent=2) + "\n"


def rules(lowered: Lowered, sink: Sink) -> dict[str, str]:
    """The styles of transformers by the names of modules; `sink` receives the errors PL739."""
    style_by_glob: dict[str, str] = {}
    styles = [op for op in lowered.styles if not _sums(op.style)]
    lengths = _list_lengths(styles)
    for op in styles:
        word = "replicated_with_grad_allreduce" if _by_heads(op, styles) else None
        word = word or _word(op.style, op.modules.module.kind)
        if word is None:
            layouts = f"({op.layouts})" if op.layouts else ""
            help = "`planc lower --format python` writes any plan"
            if _sequence(op.style):
                help = f"turn sequence parallelism off: --set {SEQUENCE.word}=false"
            message = f"no style of transformers is `{ir.style_name(op.style)}{layouts}`"
            sink.error("PL739", message, op.origin, help=help)
            continue
        for glob in _globs(op.modules, lengths):
            style_by_glob[glob] = word
            if isinstance(op.style, ir.Experts):
                style_by_glob.update((f"{glob}.{name}", how) for name, how in _FUSED.items())
    return style_by_glob


def _list_lengths(ops: Iterable[Op]) -> dict[tuple[str, ...], int]:
    """The number of entries of each list of modules that the operations name."""
    lengths: dict[tuple[str, ...], int] = {}
    for modules in (modules for op in ops for modules in op.traced_modules):
        if modules.list_at is not None:
            entries = max(modules.entries, default=-1) + 1
            lengths[_list(modules)] = max(entries, lengths.get(_list(modules), 0))
    return lengths


def _sums(style: ir.Style) -> bool:
    """Whether a style only sums gradients of inputs, as each `colwise` of transformers does."""
    both = ir.Redistribution(ir.Replicate(), ir.Replicate())
    return isinstance(style, ir.Input) and {*style.changes} == {both}


def _list(modules: Modules) -> tuple[str, ...]:
    at = modules.list_at or 0
    return tuple(map(str, modules.path[:at]))


def _globs(modules: Modules, lengths: dict[tuple[str, ...], int]) -> Iterator[str]:
    """The names of the modules, with `*` for the index where all blocks of the list are among
    them.
    """
    at = modules.list_at
    if at is None or len(modules.entries) < lengths[_list(modules)]:
        yield from modules.names()
        return
    yield ".".join("*" if i == at else str(part) for i, part in enumerate(modules.path))


def _word(style: ir.Style, kind: str) -> str | None:
    """The style of transformers with the same meaning, or None."""
    replicate, last = ir.Replicate(), ir.Shard(-1)
    match style:
        case ir.Colwise(input=ir.Replicate(), output=output, local=True, parts=1):
            return {last: "colwise", replicate: "colwise_gather_output"}.get(output)
        case ir.Colwise(input=ir.Replicate(), output=ir.Shard(-1), local=True, parts=2):
            return "packed_colwise" if not style.interleaved else None
        case ir.Rowwise(input=given, output=ir.Replicate(), local=True, parts=1):
            if kind == "embedding":
                return "embedding_rowwise"
            return {last: "rowwise", replicate: "rowwise_split_input"}.get(given)
        case ir.Rowwise(input=ir.Shard(-1), output=ir.Replicate(), local=True, parts=2):
            return "packed_rowwise"
        case ir.Replicated():
            return "replicated_with_grad_allreduce" if style.summed else "replicate"
        case ir.MlaKv():
            return "mla_kv_a_proj"
        case ir.Experts(input=ir.Replicate(), output=ir.Replicate(), local=True):
            wanted = {
                "gate_up_proj": ir.ParameterLayout(layout=ir.Shard(1), parts=2),
                "down_proj": ir.ParameterLayout(layout=ir.Shard(2)),
            }
            return "moe_tp_experts" if dict(style.layouts) == wanted else None
        case _:
            return None


def _by_heads(op: Parallelize, rules: list[Parallelize]) -> bool:
    """Whether a norm is one of the elements of each head, and the heads (dim 2) are split.

    Its weight is then shorter than what the linears beside it project; a norm over all heads needs
    the mean of all ranks, which local tensors do not have.
    """
    if not (isinstance(op.style, ir.Sequence) and op.style.dim == 2 and op.style.local):
        return False
    beside = [r for r in rules if r.modules.path[:-1] == op.modules.path[:-1]]
    widths = [r.shapes[0].shape[0] for r in beside if isinstance(r.style, ir.Colwise) and r.shapes]
    numbers = [p.numel for p in op.modules.module.parameters]
    return bool(widths and numbers) and max(numbers) < min(widths)


def _sequence(style: ir.Style) -> bool:
    """Whether a style stems from sequence parallelism."""
    if isinstance(style, ir.Sequence) and style.dim != 1:
        return False
    return isinstance(style, ir.Sequence | ir.Input | ir.Output) or ir.Shard(1) in (
        getattr(style, "input", None),
        getattr(style, "output", None),
    )
