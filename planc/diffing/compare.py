"""The changes between two lowered plans, as data.

Operations are compared by kind and module, in any order. A set of modules is compared with the
sets that it overlaps on the other side, so `layers[0:32]` against `layers[0:16]` is a removal of
`layers[16:32]` and nothing else.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planc.diagnostics.notebook import InNotebooks
from planc.diagnostics.source import Span
from planc.diffing.matching import Pairs, differences, entries, groups, grown, place_of
from planc.model.facts import Modules
from planc.ops import phrases
from planc.ops.base import AxisRole, Entry, Value, Words
from planc.ops.expert_parallel import DispatchExperts
from planc.ops.lowered import Lowered, MeshAxis
from planc.ops.styles import style_text

_BYTES = {"nbytes", "gathered", "parameters"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A difference, named as in the lowered JSON; None where one side has no such value."""

    name: str
    old: Value
    new: Value
    text: str = field(default="", compare=False)


def describe_difference(name: str, old: Value, new: Value, words: Words) -> Difference:
    """A part with its text; the shape of a weight comes without its name."""
    plain = name.removeprefix("weight.").replace(".", " ")
    title, value = words.get(name, (plain, phrases.value))
    if name in _BYTES and isinstance(old, int) and isinstance(new, int):
        texts = phrases.sizes(old, new)
    else:
        texts = value(old), value(new)
    return Difference(
        name=name, old=old, new=new, text=f"{title} {texts[0]} -> {texts[1]}".lstrip()
    )


def summary(parts: Sequence[Difference]) -> str:
    """The text of all parts; those that follow from others are only in the JSON."""
    split = {p.name: p for p in parts}
    telling = [p for p in parts if not _follows(p, split)] or parts
    return ", ".join(p.text for p in telling)


def _follows(part: Difference, parts: dict[str, Difference]) -> bool:
    """Whether a part follows: bytes that round to the same text, or a local shape that is the
    same share of the new shape.
    """
    if part.name in _BYTES:
        return phrases.alike(part.old, part.new)
    whole = parts.get(f"{part.name.removesuffix('.local')}.shape")
    if not part.name.endswith(".local") or whole is None:
        return False
    return _shares(whole.old, part.old) == _shares(whole.new, part.new)


def _shares(whole: Value, local: Value) -> list[float]:
    if not isinstance(whole, tuple) or not isinstance(local, tuple):
        return []
    dims = [(a, b) for a, b in zip(whole, local, strict=False)]
    return [a / b for a, b in dims if isinstance(a, int) and isinstance(b, int) and b]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One line of a diff.

    Args:
        kind: one of `planc.diffing.matching.kinds`.
        over: the axes of a tensor-parallel style.
        label: the subject, where that is not a set of modules.
        modules: the sets with the same change; their paths differ only in the last name.
        subject: the label, or the modules as text: `self_attn.{q,k,v}_proj`.
        parts: the differences, or all statements of an added or removed operation.
        summary: the parts as text, without those that follow from others.
        reason: the axes whose sizes alone cause the change, as `tp 4 -> 8`; else empty.
        old, new: the lines of the `.plan` files; empty where there is none.
    """

    kind: str
    over: tuple[str, ...] = ()
    label: str = ""
    modules: tuple[Modules, ...] = ()
    subject: str = field(default="", compare=False)
    parts: tuple[Difference, ...] = ()
    summary: str = field(default="", compare=False)
    reason: str = ""
    old: str = ""
    new: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta(InNotebooks):
    """All changes.

    Args:
        added, removed, changed: sorted by kind, then by the plan's order.
        parameters: bytes of parameters that one rank holds at rest, before and after.
        gathered: bytes of the largest unit while it is all-gathered, before and after.
    """

    added: tuple[Change, ...] = ()
    removed: tuple[Change, ...] = ()
    changed: tuple[Change, ...] = ()
    parameters: tuple[int, int] = (0, 0)
    gathered: tuple[int, int] = (0, 0)

    @property
    def same(self) -> bool:
        return not (self.added or self.removed or self.changed)


def compare(old: Lowered, new: Lowered) -> Delta:
    """The changes from one lowered plan to another.

    Only what `apply` does and the memory of a rank count: moved lines change nothing.
    """
    common = groups(old) & groups(new)
    pairs = Pairs(tuple(entries(old, common)), tuple(entries(new, common)))
    why = _Reasons(old, new, pairs)
    gone = grown(pairs.removed, new.layers, pairs.old, pairs.new)
    come = grown(pairs.added, old.layers, pairs.new, pairs.old)
    removed = _together(_one(e, why.absent(e), gone=True) for e in gone)
    added = _together(_one(e, why.absent(e), gone=False) for e in come)
    changed = _together(_both(a, b, why) for a, b in pairs.changed)
    totals = {"parameters": (old.parameters, new.parameters)}
    totals["gathered"] = (old.largest_gathered, new.largest_gathered)
    data = _differing("data", {"axes": (old.data, new.data)})
    changed = (*_model(old, new), *_mesh(old, new), *data, *changed)
    if not (added or removed or changed):
        changed = tuple(_differing("model", totals))
    return Delta(added=added, removed=removed, changed=changed, **totals)


# The plan as a whole -----------------------------------------------------------------------------

_WORDS: dict[str, Words] = {
    "model": {"class": ("", phrases.value)},
    "data": {"axes": ("over", lambda axes: phrases.axes(axes) or "no axis")},
    "mesh": {"order": ("order", " | ".join)},
}


def _differing(
    kind: str, sides: Mapping[str, tuple[Value, Value]], **more: Any
) -> Iterator[Change]:
    differing = ((name, old, new) for name, (old, new) in sides.items() if old != new)
    parts = tuple(describe_difference(*each, _WORDS[kind]) for each in differing)
    if parts:
        yield Change(kind=kind, parts=parts, summary=summary(parts), **more)


def _model(old: Lowered, new: Lowered) -> Iterator[Change]:
    sides: dict[str, tuple[Value, Value]] = {"class": (old.model, new.model)}
    sides["family"] = (old.family, new.family)
    return _differing("model", {**sides, "layers": (old.layers, new.layers)})


def _mesh(old: Lowered, new: Lowered) -> Iterator[Change]:
    """The differences of the mesh as one change, because axes rarely change alone."""
    before, after = ({a.name: a for a in _axes(side)} for side in (old, new))
    sizes = [{n: a.size for n, a in side.items()} for side in (before, after)]
    sides: dict[str, tuple[Value, Value]]
    sides = {n: (sizes[0].get(n), sizes[1].get(n)) for n in dict.fromkeys([*before, *after])}
    names = [n for n, (a, b) in sides.items() if a != b]
    if set(before) == set(after):
        sides["order"] = tuple(before), tuple(after)
    ranks = old.world_size, new.world_size
    yield from _differing(
        "mesh",
        sides,
        reason=f"{ranks[0]:,} -> {ranks[1]:,} ranks" if ranks[0] != ranks[1] else "",
        old=_size_lines(before, names),
        new=_size_lines(after, names),
    )


def _axes(lowered: Lowered) -> tuple[MeshAxis, ...]:
    return (*lowered.axes, *([lowered.experts.ranks] if lowered.experts else []))


def _size_lines(axes: dict[str, MeshAxis], names: Iterable[str]) -> str:
    """The lines that set some axes' sizes, without `auto` axes, which follow from the others."""
    changed = (axes[name] for name in names if name in axes)
    return ", ".join(dict.fromkeys(a.place for a in changed if a.place and not a.inferred))


# Reasons -----------------------------------------------------------------------------------------


class _Reasons:
    """Finds the axes whose sizes alone explain a change."""

    def __init__(self, old: Lowered, new: Lowered, pairs: Pairs) -> None:
        names = [a.name for side in (old, new) for a in _axes(side)]
        self.sizes = {n: (old.axis_size(n), new.axis_size(n)) for n in dict.fromkeys(names)}
        axes = (axis for side in (old, new) for axis in side.split_axes(AxisRole.TENSOR))
        self.experts = [s.experts.ranks.name for s in (old, new) if s.experts]
        self.tensor = tuple(dict.fromkeys(axes))
        shapes = (n for a, b in pairs.changed for n, _, _ in differences(a, b))
        self.resized = any(_model(old, new)) or any(n.endswith(".shape") for n in shapes)

    def changed_sizes(self, names: Iterable[str]) -> str:
        """`tp 4 -> 8` for the given axes whose size changed."""
        sizes = ((n, *self.sizes.get(n, (1, 1))) for n in dict.fromkeys(names))
        return ", ".join(f"{n} {a} -> {b}" for n, a, b in sizes if a != b)

    def to_one(self, names: Iterable[str]) -> str:
        """The changed sizes of axes of one rank on a side, where lowering leaves operations out."""
        return self.changed_sizes(n for n in names if 1 in self.sizes.get(n, (1, 1)))

    def absent(self, entry: Entry) -> str:
        """The reason why an operation is added or removed."""
        if entry.kind.startswith("tensor"):
            return self.to_one(entry.over)
        if entry.kind == DispatchExperts.WORD:
            return self.to_one(self.experts)
        return self.to_one(self.tensor) if entry.kind in ("tie", "random") else ""

    def between(self, old: Entry, parts: Sequence[Difference]) -> str:
        """The reason why an operation changes."""
        telling = [p for p in parts if not phrases.alike(p.old, p.new)] or parts
        names = {p.name: p for p in telling}
        if old.kind == "tensor":
            return self.changed_sizes(old.over) if all(n.endswith(".local") for n in names) else ""
        if old.kind != "fsdp" or self.resized or names.keys() - _FOLLOWS:
            return ""
        axes: list[str] = []
        for name in ("shard", "replicate"):
            if name in names:
                turned = _names(names[name].old) ^ _names(names[name].new)
                if not turned or not all(self.to_one([a]) for a in turned):
                    return ""
                axes += sorted(turned)
        if "gathered" in names and not self.changed_sizes(self.tensor):
            return ""
        if "nbytes" in names:
            axes += sorted(old.source.shard)
        return self.changed_sizes([*axes, *self.tensor])


_FOLLOWS = {"shard", "replicate", "nbytes", "gathered"}


def _names(value: Value) -> set[str]:
    return {str(v) for v in value} if isinstance(value, tuple) else set()


# Changes -----------------------------------------------------------------------------------------


def _one(entry: Entry, reason: str, *, gone: bool) -> tuple[Change, int]:
    values: list[tuple[str, Value]] = [("style", style_text(entry.style))] if entry.style else []
    values += [(f.name, f.value) for f in entry.facts if f.value is not None and not f.usual]
    over = f" on {phrases.axes(entry.over)}" if entry.over and not reason else ""
    style = style_text(entry.style) + over if entry.style else ""
    parts = tuple(
        Difference(name=n, old=v if gone else None, new=None if gone else v) for n, v in values
    )
    summary = ", ".join(filter(None, (style, entry.brief)))
    place = {"old" if gone else "new": entry.place}
    return _change(entry, parts, summary=summary, reason=reason, **place), entry.at


def _both(old: Entry, new: Entry, why: _Reasons) -> tuple[Change, int]:
    words = old.source.WORDS if old.source else {}
    parts = tuple(describe_difference(*each, words) for each in differences(old, new))
    reason = why.between(old, parts)
    places = {"old": old.place, "new": new.place}
    return _change(old, parts, summary=summary(parts), reason=reason, **places), new.at


def _change(entry: Entry, parts: tuple[Difference, ...], **more: Any) -> Change:
    return Change(
        kind=entry.kind,
        over=entry.over,
        label=entry.label,
        modules=(entry.modules,) if entry.modules is not None else (),
        subject=entry.label,
        parts=parts,
        **more,
    )


def _together(changes: Iterable[tuple[Change, int]]) -> tuple[Change, ...]:
    """Changes with the same content, merged where their modules differ only in the last name."""
    alike: dict[Change, list[tuple[Modules, int]]] = {}
    result: list[Change] = []
    for change, at in changes:
        if change.modules:
            content = replace(change, modules=())
            alike.setdefault(content, []).extend((m, at) for m in change.modules)
        else:
            result.append(change)
    for content, sets in alike.items():
        families: dict[str, dict[str, Modules]] = {}
        for modules in _boxes(sets):
            path = str(modules)
            families.setdefault(phrases.parent(path), {})[path] = modules
        for family in families.values():
            for paths in phrases.chunks(list(family)):
                like = tuple(family[p] for p in sorted(paths))
                result.append(replace(content, modules=like, subject=phrases.merge_paths(paths)))
    return tuple(sorted(result, key=_order))


def _boxes(sets: Iterable[tuple[Modules, int]]) -> list[Modules]:
    """Sets of modules, merged where only one set of indices differs; the first ones first."""
    boxes: list[tuple[Modules, int]] = []
    for modules, at in sets:
        whole, first, i = modules, at, 0
        while i < len(boxes):
            union = boxes[i][0].union(whole)
            if union is None:
                i += 1
                continue
            whole, first = union, min(first, boxes[i][1])
            del boxes[i]
            i = 0
        boxes.append((whole, first))
    return [modules for modules, _ in sorted(boxes, key=lambda b: (b[1], str(b[0])))]


def _order(change: Change) -> tuple[object, ...]:
    at = Span.parse_place(change.new or change.old)
    paths = (len(change.modules), [str(m) for m in change.modules])
    return (place_of(change.kind), at, change.label, paths, repr(change.parts))
