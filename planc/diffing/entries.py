"""One side of a diff: the statements of a lowered plan about each set of modules."""

from collections.abc import Iterator, Set
from dataclasses import replace

from planc.ops import codec, registry
from planc.ops.entry import Entry, Fact, Group, Value
from planc.ops.fsdp import FullyShard
from planc.ops.lowered import Lowered
from planc.ops.styles import style_text

KINDS = ("model", "mesh", "data", "layers", *(k.WORD for k in registry.KINDS), "spread")
"""The kinds of changes, in the order of a diff."""


def groups(lowered: Lowered) -> set[Group]:
    """The groups that are one FSDP unit, as the paths of their members."""
    return {op.paths for op in lowered.ops if isinstance(op, FullyShard) and op.group}


def entries(lowered: Lowered, common: Set[Group]) -> Iterator[Entry]:
    """The entries of all operations.

    Args:
        lowered: one side.
        common: the groups that both sides have; any other group is compared member by member.
    """
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
        one, two = before.get(name), after.get(name)
        if (one, type(one)) != (two, type(two)):  # `reshard = 1` is not True
            yield name, one, two


def _values(facts: Iterator[Fact] | tuple[Fact, ...]) -> dict[str, Value]:
    return {fact.name: fact.value for fact in facts}
