"""The modules of a plan as rows: equal layers are one, and layers that the plan parts several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from planc.compiler import Compiled
from planc.diagnostics.diagnostic import Sink
from planc.ir.unit_lists import split_child
from planc.lowering.memory import Tied
from planc.model.facts import Facts, Modules, Segment
from planc.model.indices import Indices
from planc.ops.base import AxisRole, Op
from planc.ops.lowered import Lowered
from planc.ops.registry import units_of
from planc.provenance.answer import Reasons
from planc.provenance.query import why


class ModuleMark(NamedTuple):
    """Says what an operation does to a module, in a word and as a whole, and the line of it."""

    kind: str
    text: str
    about: str
    axes: tuple[str, ...]
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Modules of which the plan says the same.

    Args:
        name: inside the row around it.
        marks: of the modules themselves.
        why: what `planc why` says of the first of them.
        size: bytes of parameters at rest on a rank that holds them, with those of `inside`.
        like: the name of an earlier row with the same inside; empty for none.
    """

    modules: Modules
    name: str
    marks: tuple[ModuleMark, ...]
    why: Reasons
    size: int
    inside: tuple[Row, ...]
    like: str = ""

    @property
    def content(self) -> tuple[object, ...]:
        """The modules inside; equal for layers that are equal."""
        said = (tuple((m.kind, m.text, m.place) for m in row.marks) for row in self.inside)
        each = zip(self.inside, said, strict=True)
        return tuple((r.name, m, r.size // len(r.modules), r.content) for r, m in each)


def tree(compiled: Compiled) -> Row:
    """The row of the model of a plan that has been lowered."""
    lowered, facts = compiled.lowered, compiled.facts
    assert lowered is not None and facts is not None
    facts = compiled.applied[1] if compiled.applied else facts
    return _Tree(compiled, lowered, facts).row(facts.model, facts.name, None)


class _Tree:
    def __init__(self, compiled: Compiled, lowered: Lowered, facts: Facts) -> None:
        self.compiled, self.lowered, pipeline = compiled, lowered, lowered.pipeline
        self.tied = Tied(facts)
        self.ops = [(op, tuple(_modules(op))) for op in lowered.ops]
        self.held = [pipeline.stage_modules(i) for i in range(pipeline.stages)] if pipeline else []
        self.sets = [m for sets in (*(s for _, s in self.ops), *self.held) for m in sets]

    def row(self, at: Modules, name: str, around: int | None) -> Row:
        """`around` is the pipeline's stage that holds the row around this one."""
        first, inside = at.first_name, []
        held = [i for i, modules in enumerate(self.held) if any(map(at.part_inside, modules))]
        stage = held[0] if len(held) == 1 else None
        known: dict[object, str] = {}
        parts = [p for child in at.module.children for p in split_child(at, child, self.sets)]
        for part in sorted(parts, key=lambda part: _first(part.path[-1])):
            last = part.path[-1]
            row = self.row(part, str(last), stage)
            if row.inside and isinstance(last, Indices):
                like = known.setdefault(row.content, row.name)
                row = row if like == row.name else replace(row, inside=(), like=like)
            inside.append(row)
        answer = why(first, self.compiled, Sink())
        assert answer is not None
        direct_bytes = (p.at_rest * self.tied.owners(at, p.name) for p in answer.parameters)
        return Row(
            modules=at,
            name=name,
            marks=tuple(self._marks(first, stage if stage != around else None)),
            why=answer,
            size=sum(direct_bytes) + sum(row.size for row in inside),
            inside=tuple(inside),
        )

    def _marks(self, name: str, stage: int | None) -> Iterator[ModuleMark]:
        if stage is not None and (pipeline := self.lowered.pipeline):
            about = pipeline.headline(self.lowered)
            yield ModuleMark(f"s{stage % 8}", f"stage {stage}", about, (), pipeline.place)
        for op in (op for op, sets in self.ops if _has(sets, name)):
            about, units = op.headline(self.lowered), units_of(op)
            for unit in (u for u in units if _has(u.members, name)):
                about = f"{unit.name}: {unit.headline(self.lowered)}, {unit.resharding}"
                axes, text = unit.shard or unit.replicate, "group" if unit.group else "unit"
                yield ModuleMark(unit.WORD, text, about, axes, unit.place)
            if not units:
                axes = op.split_axes if op.ROLE is AxisRole.TENSOR else ()
                yield ModuleMark(op.WORD, op.short_name, about, axes, op.place)


def _modules(op: Op) -> Iterator[Modules]:
    """The modules that an operation acts on."""
    for about in (*(unit.members for unit in units_of(op)), op.about):
        parts = about if isinstance(about, tuple) else (about,)
        yield from (m for m in parts if isinstance(m, Modules))


def _has(sets: tuple[Modules, ...], name: str) -> bool:
    return any(modules.has(name) for modules in sets)


def _first(segment: Segment) -> int:
    """The index of a row in its list; rows outside of lists stay in order."""
    return segment.first if isinstance(segment, Indices) else 0
