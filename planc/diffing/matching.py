"""The entries of two sides, what operations state about modules, and which belong together."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import cache

from planc.model.facts import Modules
from planc.model.indices import Indices
from planc.ops import codec, registry
from planc.ops.backend import Backend
from planc.ops.base import Entry, Fact, Group, Value
from planc.ops.lowered import Lowered
from planc.ops.styles import style_text


@cache
def kinds() -> tuple[str, ...]:
    """The kinds of changes, in the order of a diff."""
    operations = (kind.WORD for kind in registry.kinds())
    return ("model", "mesh", "data", "layers", *operations, "spread")


def place_of(kind: str) -> int:
    """The place of a kind in a diff; a backend has a word of its own."""
    word = kind.split(maxsplit=1)[0]
    return kinds().index(word if word in kinds() else Backend.WORD)


def groups(lowered: Lowered) -> set[Group]:
    """The groups that are one FSDP unit, as the paths of their members."""
    return {op.paths for op in lowered.fsdp_units if op.group}


def entries(lowered: Lowered, common: Set[Group]) -> Iterator[Entry]:
    """The entries of all operations; groups that only one side has go member by member."""
    for at, entry in enumerate(entry for op in lowered.ops for entry in op.entries(common)):
        source = entry.source
        facts = codec.facts(source, without=source.ABOUT) if source else ()
        yield replace(entry, facts=(*entry.facts, *facts), at=at)


def differences(old: Entry, new: Entry) -> Iterator[tuple[str, Value, Value]]:
    """(name, before, after) of all differences between two entries on the same modules.

    Styles of one kind are compared field by field, others as a whole.
    """
    before, after = (_values(entry.facts) for entry in (old, new))
    if type(old.style) is not type(new.style):
        yield "style", style_text(old.style), style_text(new.style)
    elif old.style != new.style:
        before = _values(codec.facts(old.style)) | before
        after = _values(codec.facts(new.style)) | after
    for name in dict.fromkeys([*before, *after]):
        left, right = before.get(name), after.get(name)
        if (left, type(left)) != (right, type(right)):  # `reshard = 1` is not True
            yield name, left, right


def _values(facts: Iterator[Fact] | tuple[Fact, ...]) -> dict[str, Value]:
    return {fact.name: fact.value for fact in facts}


class Pairs:
    """The entries of two sides, matched.

    Attributes:
        changed: pairs of entries that differ, cut to the modules that both sides have.
        removed, added: entries cut to the modules that the other side lacks.
    """

    def __init__(self, old: Sequence[Entry], new: Sequence[Entry]) -> None:
        self.old, self.new = old, new
        self.changed: list[tuple[Entry, Entry]] = []
        self.removed: list[Entry] = []
        self.added: list[Entry] = []
        old_by_subject, new_by_subject = _by_subject(old), _by_subject(new)
        for subject in dict.fromkeys([*old_by_subject, *new_by_subject]):
            left, right = old_by_subject.get(subject, []), new_by_subject.get(subject, [])
            left, right, _ = _match(left, right, lambda a, b: a.content == b.content)
            left, right, changed = _match(left, right, lambda a, b: True)
            self.changed += changed
            self.removed += left
            self.added += right


def _by_subject(side: Iterable[Entry]) -> dict[tuple[object, ...], list[Entry]]:
    result: dict[tuple[object, ...], list[Entry]] = {}
    for entry in sorted(side, key=Entry.order):
        result.setdefault(entry.subject, []).append(entry)
    return result


def _match(
    left: list[Entry], right: list[Entry], fits: Callable[[Entry, Entry], bool]
) -> tuple[list[Entry], list[Entry], list[tuple[Entry, Entry]]]:
    """The unmatched entries of each side, and the matched pairs.

    An entry is matched once, so two entries on a module need two entries of the other side.
    """
    pairs: list[tuple[Entry, Entry]] = []
    rest: list[Entry] = []
    waiting = list(left)
    while waiting:
        mine = waiting.pop(0)
        for at, theirs in enumerate(right):
            if not fits(mine, theirs):
                continue
            if mine.modules is None or theirs.modules is None:
                pairs.append((mine, theirs))
                right = right[:at] + right[at + 1 :]
                break
            both = mine.modules.overlap(theirs.modules)
            if both is None:
                continue
            pairs.append((replace(mine, modules=both), replace(theirs, modules=both)))
            waiting = [*_without(mine, theirs.modules), *waiting]
            right = [*right[:at], *_without(theirs, mine.modules), *right[at + 1 :]]
            break
        else:
            rest.append(mine)
    return rest, right, pairs


def _without(entry: Entry, modules: Modules) -> list[Entry]:
    assert entry.modules is not None
    return [replace(entry, modules=m) for m in entry.modules.minus(modules)]


def grown(
    side: Iterable[Entry], layers: int, same: Sequence[Entry], other: Sequence[Entry]
) -> Iterator[Entry]:
    """Entries of one side, where those on layers that the other model lacks are merged, if they
    match the rest.

    Args:
        layers: the number of layers of the other model.
        same, other: all entries of both sides; subjects that `other` lacks altogether are not
            merged.
    """
    shared = {entry.subject for entry in other}
    before = {(e.subject, e.content) for e in same if any(not b for _, b in _cut(e, layers))}
    stacks: dict[str, Entry] = {}
    kinds: dict[str, set[str]] = {}
    for entry in side:
        for part, beyond in _cut(entry, layers):
            usual = part.subject in shared and (part.subject, part.content) in before
            if not beyond or not usual or part.kind in ("fsdp", "spread") or part.modules is None:
                yield part
                continue
            at = part.modules.list_at or 0
            stack = Modules(part.modules.path[: at + 1], part.modules.module)
            stacks.setdefault(str(stack), Entry(kind="layers", modules=stack))
            kinds.setdefault(str(stack), set()).add(part.kind.split()[0])
    for name, stack_entry in stacks.items():
        names = tuple(sorted(kinds[name], key=place_of))
        brief = f"as those before: {', '.join(names)}"
        yield replace(stack_entry, facts=(Fact("operations", names),), brief=brief)


def _cut(entry: Entry, layers: int) -> Iterator[tuple[Entry, bool]]:
    """An entry as its part below a number of layers, and (True) its part above."""
    modules = entry.modules
    if modules is None or not modules.entries:
        yield entry, False
        return
    first = Indices.all(layers)
    for part, beyond in ((modules.entries & first, False), (modules.entries - first, True)):
        if part:
            yield replace(entry, modules=modules.with_entries(part)), beyond
