"""What changes from one lowered plan to another, as data.

Operations are compared by kind and module, whatever their order. A set of modules is compared with
what it meets on the other side, so `layers[0:32]` against `layers[0:16]` is a removal of
`layers[16:32]` and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from planc.emit import words
from planc.ir.style import Input, Output, style_text
from planc.lowering.ops import (
    Checkpoint,
    Compile,
    Configure,
    FullyShard,
    Lowered,
    Parallelize,
    Tie,
)
from planc.model.facts import Modules

Parts = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One side's word on a set of modules.

    Args:
        kind: of the operation, with what it is keyed by beside the module.
        modules: None for what is not about modules (a tie, a setting).
        label: what it is about, where that is not a set of modules.
        parts: what it says, as named texts.
        place: the `.plan` line.
        axes: the mesh axes that its numbers depend on.
    """

    kind: str
    modules: Modules | None = None
    label: str = ""
    parts: Parts = ()
    place: str = ""
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A line of a diff.

    Args:
        kind: of the operation.
        subject: the modules, or what else it is about.
        parts: (what, before, after); before or after is empty where there is none.
        reason: the axes whose sizes brought it about, in words, or empty.
        old, new: the `.plan` lines.
    """

    kind: str
    subject: str
    parts: tuple[tuple[str, str, str], ...]
    reason: str = ""
    old: str = ""
    new: str = ""
    modules: Modules | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """All that changes."""

    added: tuple[Change, ...] = ()
    removed: tuple[Change, ...] = ()
    changed: tuple[Change, ...] = ()
    parameters: tuple[int, int] = (0, 0)
    gathered: tuple[int, int] = (0, 0)

    @property
    def same(self) -> bool:
        return not (self.added or self.removed or self.changed)


def compare(old: Lowered, new: Lowered) -> Delta:
    """The changes that lead from one lowered plan to another.

    Only what `apply` does and what a rank holds counts: a plan whose lines moved is the same.
    """
    sizes = {a.name: a.size for a in old.axes}, {a.name: a.size for a in new.axes}
    one, two = list(_entries(old, new)), list(_entries(new, old))
    removed = [_gone(e) for e in _rest(one, two)]
    added = [_come(e) for e in _rest(two, one)]
    changed = [*_models(old, new), *_mesh(old, new)]
    changed += [
        _both(a, b, sizes)
        for a in one
        for b in two
        if _meet(a, b) is not None and a.parts != b.parts
    ]
    return Delta(
        added=tuple(_merged(added)),
        removed=tuple(_merged(removed)),
        changed=tuple(_merged(changed)),
        parameters=(old.parameters, new.parameters),
        gathered=(old.gathered, new.gathered),
    )


def _models(old: Lowered, new: Lowered) -> Iterator[Change]:
    before, after = (f"{x.model}, {x.layers} layers" for x in (old, new))
    if before != after:
        yield Change(kind="model", subject="", parts=(("", before, after),))


def _mesh(old: Lowered, new: Lowered) -> Iterator[Change]:
    """The mesh as one change: an axis seldom changes alone."""
    before = {a.name: a for a in old.axes}
    after = {a.name: a for a in new.axes}
    parts = []
    for name in dict.fromkeys([*before, *after]):
        one, two = before.get(name), after.get(name)
        texts = (str(one.size) if one else "none", str(two.size) if two else "none")
        if texts[0] != texts[1]:
            parts.append((name, *texts))
    if not parts and list(before) != list(after):
        parts.append(("order", " | ".join(before), " | ".join(after)))
    if parts:
        places = [
            [side[p[0]].place for p in parts if p[0] in side and not side[p[0]].inferred]
            for side in (before, after)
        ]
        first, second = (next(iter(p), "") for p in places)
        yield Change(kind="mesh", subject="", parts=tuple(parts), old=first, new=second)


# One side as entries -----------------------------------------------------------------------------


def _entries(lowered: Lowered, other: Lowered) -> Iterator[Entry]:
    groups = {op.members for op in other.ops if isinstance(op, FullyShard) and op.group}
    for op in lowered.ops:
        match op:
            case Configure():
                parts = (("", str(op.value).lower()),)
                yield Entry(kind="configure", label=op.name, parts=parts)
            case Tie():
                yield Entry(kind="tie", label=f"{op.parameter} = {op.source}")
            case Parallelize():
                yield _tensor(op)
            case Checkpoint():
                yield Entry(kind="checkpoint", modules=op.modules, place=op.place)
            case Compile():
                parts = (("", "full graph" if op.fullgraph else "block"),)
                yield Entry(kind="compile", modules=op.modules, parts=parts, place=op.place)
            case FullyShard():
                yield from _unit(op, lowered, whole=op.members in groups)


def _tensor(op: Parallelize) -> Entry:
    aspect = "tensor"
    if isinstance(op.style, Input | Output):
        aspect = f"tensor {'input' if isinstance(op.style, Input) else 'output'}"
    names = ["" if s.name == "weight" else f" {s.name}" for s in op.shapes]
    local = [(f"local{n}", str(list(s.local))) for n, s in zip(names, op.shapes, strict=True)]
    whole = [(f"shape{n}", str(list(s.shape))) for n, s in zip(names, op.shapes, strict=True)]
    return Entry(
        kind=f"{aspect} on {op.axis}",
        modules=op.modules,
        parts=(("style", style_text(op.style)), *whole, *local),
        place=op.place,
        axes=(op.axis,),
    )


def _unit(op: FullyShard, lowered: Lowered, *, whole: bool) -> Iterator[Entry]:
    """A unit; a group that the other side lacks is compared member by member."""
    over = " * ".join(op.shard)
    if op.replicate:
        over += f", replicated on {' * '.join(op.replicate)}"
    parts: Parts = (
        ("over", over),
        ("after forward", words.reshard(op.reshard)),
        ("precision", words.precision(op)),
        ("a rank", words.size(op.nbytes)),
        ("gathered", words.size(op.gathered)),
    )
    tensor = tuple(dict.fromkeys(o.axis for o in lowered.ops if isinstance(o, Parallelize)))
    entry = Entry(
        kind="fsdp", parts=parts, place=op.place, axes=(*op.shard, *op.replicate, *tensor)
    )
    if op.group and whole:
        yield replace(entry, label=words.unit(op))
        return
    for members in op.members:
        own = (("unit", words.unit(op)), *parts) if op.group else parts
        yield replace(entry, modules=members, parts=own)


# Comparing ---------------------------------------------------------------------------------------


def _meet(a: Entry, b: Entry) -> Modules | bool | None:
    """The modules that both speak of; True for entries that are not about modules."""
    if a.kind != b.kind or a.label != b.label:
        return None
    if a.modules is None or b.modules is None:
        return True if a.modules is b.modules else None
    return a.modules.overlap(b.modules)


def _rest(entries: Iterable[Entry], others: list[Entry]) -> Iterator[Entry]:
    """What the others say nothing of."""
    for entry in entries:
        met = [o for o in others if _meet(entry, o) is not None]
        if entry.modules is None:
            if not met:
                yield entry
            continue
        left = [entry.modules]
        for other in met:
            assert other.modules is not None
            left = [rest for m in left for rest in m.minus(other.modules)]
        yield from (replace(entry, modules=m) for m in left)


def _subject(entry: Entry) -> str:
    return entry.label or str(entry.modules)


def _gone(entry: Entry) -> Change:
    parts = tuple((name, text, "") for name, text in entry.parts)
    return Change(
        kind=entry.kind,
        subject=_subject(entry),
        parts=parts,
        old=entry.place,
        modules=entry.modules,
    )


def _come(entry: Entry) -> Change:
    parts = tuple((name, "", text) for name, text in entry.parts)
    return Change(
        kind=entry.kind,
        subject=_subject(entry),
        parts=parts,
        new=entry.place,
        modules=entry.modules,
    )


def _both(a: Entry, b: Entry, sizes: tuple[dict[str, int], dict[str, int]]) -> Change:
    meeting = _meet(a, b)
    before, after = dict(a.parts), dict(b.parts)
    parts = tuple(
        (name, before.get(name, ""), after.get(name, ""))
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    )
    numbers = {"a rank", "gathered"}
    derived = all(name in numbers or name.startswith("local") for name, _, _ in parts)
    moved = [
        f"{axis} {sizes[0].get(axis, 1)} -> {sizes[1].get(axis, 1)}"
        for axis in dict.fromkeys([*a.axes, *b.axes])
        if sizes[0].get(axis, 1) != sizes[1].get(axis, 1)
    ]
    modules = meeting if isinstance(meeting, Modules) else None
    return Change(
        kind=a.kind,
        subject=str(modules) if modules is not None else _subject(a),
        parts=parts,
        reason=", ".join(moved) if derived else "",
        old=a.place,
        new=b.place,
        modules=modules,
    )


def _merged(changes: Iterable[Change]) -> list[Change]:
    """Changes of one kind that say the same of sets which together are one set."""
    result: list[Change] = []
    for change in changes:
        for i, other in enumerate(result):
            union = _union(other, change)
            if union is not None:
                result[i] = replace(other, modules=union, subject=str(union))
                break
        else:
            result.append(change)
    return result


def _union(a: Change, b: Change) -> Modules | None:
    alike = (a.kind, a.parts, a.reason, a.old, a.new) == (b.kind, b.parts, b.reason, b.old, b.new)
    if not alike or a.modules is None or b.modules is None:
        return None
    return a.modules.union(b.modules)
