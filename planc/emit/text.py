"""The lowered plan as text: what a person reads before a run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from planc.emit import words
from planc.ir.style import style_text
from planc.lowering.ops import (
    Checkpoint,
    Compile,
    Configure,
    FullyShard,
    Lowered,
    Parallelize,
    Tie,
)

_WIDTH = 100


def render(lowered: Lowered, *, digest: str) -> str:
    """The text of a lowered plan; the same plan gives the same bytes.

    Args:
        lowered: the plan.
        digest: of it, in hex; its beginning is shown.
    """
    return "\n".join(_lines(lowered, digest)) + "\n"


def _lines(lowered: Lowered, digest: str) -> Iterator[str]:
    layers = f", {lowered.layers} layers" if lowered.layers else ""
    ranks = f"{lowered.world_size:,} rank{'s' if lowered.world_size > 1 else ''}"
    left = f"{lowered.plan} for {lowered.model}{layers}, {ranks}"
    right = f"lowered {digest[:12]}, format 1"
    yield f"{left}{right.rjust(max(len(right) + 2, _WIDTH - len(left)))}"
    yield ""
    sizes = (f"{a.name} {a.size}{' (auto)' if a.inferred else ''}" for a in lowered.axes)
    yield _head("mesh", " | ".join(sizes))
    for op in lowered.ops:
        if isinstance(op, Configure):
            yield _head("configure", f"{op.name} = {str(op.value).lower()}, because {op.reason}")
    yield from _tensor(lowered)
    for op in lowered.ops:
        if isinstance(op, Tie):
            yield _head("tie", f"{op.parameter} = {op.source}, which tensor parallelism parted")
    yield from _wraps(lowered)
    yield from _units(lowered)
    yield _head(
        "per rank",
        f"{words.size(lowered.parameters)} of parameters at rest, "
        f"at most {words.size(lowered.gathered)} gathered by one unit",
    )


def _head(name: str, text: str) -> str:
    return f"{name:<11}{text}".rstrip()


def _tensor(lowered: Lowered) -> Iterator[str]:
    ops = [op for op in lowered.ops if isinstance(op, Parallelize)]
    for axis in dict.fromkeys(op.axis for op in ops):
        yield _head("tensor", f"on {words.axes([axis], lowered)}")
        rows: list[tuple[str, str, str]] = []
        mine = [op for op in ops if op.axis == axis]
        for block, inside in groupby(mine, key=lambda op: words.block(op.modules)):
            if block:
                rows.append((block, "", ""))
            for (style, shapes), group in groupby(inside, key=lambda op: (op.style, op.shapes)):
                names = [words.inside(op.modules) for op in group]
                for path in words.together(names):
                    indented = f"  {path}" if block else path
                    rows.append((indented, style_text(style), words.shapes(shapes)))
        yield from words.table(rows)


def _wraps(lowered: Lowered) -> Iterator[str]:
    for name, kind in (("checkpoint", Checkpoint), ("compile", Compile)):
        ops = [op for op in lowered.ops if isinstance(op, Checkpoint | Compile)]
        own = [op for op in ops if isinstance(op, kind)]
        full = [isinstance(op, Compile) and op.fullgraph for op in own]
        for fullgraph in dict.fromkeys(full):
            chosen = [op for op, f in zip(own, full, strict=True) if f is fullgraph]
            paths = words.together([str(op.modules) for op in chosen])
            note = " as full graphs" if fullgraph else ""
            yield _head(name, f"{paths[0]}{note}")
            yield from (_head("", path) for path in paths[1:])


def _units(lowered: Lowered) -> Iterator[str]:
    ops = [op for op in lowered.ops if isinstance(op, FullyShard)]
    for (shard, replicate), group in groupby(ops, key=lambda op: (op.shard, op.replicate)):
        units = list(group)
        common = words.precision(units[0])
        text = f"on {words.axes(shard, lowered)}"
        if replicate:
            text += f", replicated on {words.axes(replicate, lowered)}"
        yield _head("fsdp", f"{text}, {common}")
        rows = []
        for op in units:
            own = words.precision(op)
            row = [words.unit(op), words.reshard(op.reshard)]
            if op.nbytes:
                row.append(f"{words.size(op.nbytes)} a rank, {words.size(op.gathered)} gathered")
            else:
                row.append("nothing of its own")
            rows.append((*row, own if own != common else ""))
        yield from words.table(rows)
