"""The repeated blocks of a model, and which of them have the same structure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planc.model.facts import Facts, Module, Modules
from planc.model.small.config_fields import DROPOUT


def block_lists(at: Modules) -> Iterator[Modules]:
    """Yields the outermost lists whose entries have children, below (and without) `at`."""
    for child in at.module.children:
        below = Modules((*at.path, child.segment), child.module)
        if child.module.kind == "list" and any(c.module.children for c in child.module.children):
            yield below
        elif child.indices is None:
            yield from block_lists(below)


def signature(module: Module) -> tuple[Any, ...]:
    """The structure of a block regardless of its sizes: classes, names and parameters.

    DropPath modules are ignored: with a rate of 0 they are `nn.Identity`.
    """
    made = [c for c in module.children if c.module.count or not DROPOUT.search(c.name)]
    inner = tuple(dict.fromkeys((c.name, signature(c.module)) for c in made))
    return (module.cls, tuple(p.name for p in module.parameters), inner)


def block_kinds(facts: Facts) -> dict[int, list[str]]:
    """For each block list, by its length, a number for the structure of each block.

    Two lists of the same length with different structures are left out: the length is ambiguous.
    """
    found: dict[int, list[str]] = {}
    ambiguous: set[int] = set()
    for at in block_lists(facts.model):
        known: dict[tuple[Any, ...], str] = {}
        row: dict[int, str] = {}
        for child in at.module.children:
            number = known.setdefault(signature(child.module), str(len(known)))
            row |= dict.fromkeys(child.indices or (), number)
        labels = [row[i] for i in sorted(row)]
        if found.setdefault(len(labels), labels) != labels:
            ambiguous.add(len(labels))
    return {length: labels for length, labels in found.items() if length not in ambiguous}
