"""Matches entries of two lowered plans that are on the same modules."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from planc.diffing.entries import KINDS
from planc.model.facts import Modules
from planc.model.indices import Indices
from planc.ops.entry import Entry, Fact


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
        one, two = _by_subject(old), _by_subject(new)
        for subject in dict.fromkeys([*one, *two]):
            left, right = one.get(subject, []), two.get(subject, [])
            left, right, _ = _matched(left, right, lambda a, b: a.content == b.content)
            left, right, changed = _matched(left, right, lambda a, b: True)
            self.changed += changed
            self.removed += left
            self.added += right


def _by_subject(side: Iterable[Entry]) -> dict[tuple[object, ...], list[Entry]]:
    result: dict[tuple[object, ...], list[Entry]] = {}
    for entry in sorted(side, key=Entry.order):
        result.setdefault(entry.subject, []).append(entry)
    return result


def _matched(
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
    """Entries, where those on layers that the other model lacks are merged, if they match the rest.

    Args:
        side: added (or removed) entries.
        layers: the number of layers of the other model.
        same: all entries of the side that `side` is from.
        other: all entries of the other side; subjects that it lacks altogether are not merged.
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
        names = tuple(k for k in KINDS if k in kinds[name])
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
