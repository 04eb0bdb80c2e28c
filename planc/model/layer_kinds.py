"""The repeated blocks of a model, and which of them have the same structure."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from planc.model.config_fields import DROPOUT
from planc.model.facts import Facts, Module, Modules
from planc.model.module_table import LANGUAGE_MODEL

_TOWER = re.compile(r"vision|audio|speech")
"""A tower's configuration does not describe the language model's layers, even of equal number."""

_APART = re.compile(r"^rope_|_(indexes|indices|idxs|ids)$")
"""Lists without an entry per layer: frequencies, layer indices."""


def block_lists(at: Modules) -> Iterator[Modules]:
    """Yields the outermost lists whose entries have children, below (and without) `at`."""
    for child, below in zip(at.module.children, at.children, strict=True):
        if child.module.kind == "list" and any(c.module.children for c in child.module.children):
            yield below
        elif child.indices is None:
            yield from block_lists(below)


def signature(module: Module) -> str:
    """The structure of a block regardless of its sizes: classes, names and parameters.

    DropPath modules are ignored: with a rate of 0 they are `nn.Identity`. It is a text, which
    Python hashes once, and not for each of a thousand layers.
    """

    def describe(module: Module) -> tuple[Any, ...]:
        children = [c for c in module.children if c.module.count or not DROPOUT.search(c.name)]
        inner = tuple(dict.fromkeys((c.name, describe(c.module)) for c in children))
        return (module.cls, tuple(p.name for p in module.parameters), inner)

    return repr(describe(module))


DEEPSTACK = "deepstack"
"""In the kind of a decoder's block: features of images are added to what it returns."""
DEEPSTACK_FIELD = "deepstack_visual_indexes"
"""The layers of a tower whose features go to as many first blocks of the decoder."""


_NEXT = "whole"
"""In the kind of the block after these, which gets whole states where others get parts."""


def blocks_added_to(at: Modules, facts: Facts) -> int:
    """The number of a list's first blocks to whose outputs features of images are added."""
    tower = facts.config.get("vision_config")
    taken = tower.get(DEEPSTACK_FIELD) if isinstance(tower, Mapping) else None
    return len(taken) if isinstance(taken, list) and LANGUAGE_MODEL in at.path else 0


def _by_features(at: Modules, facts: Facts) -> dict[int, str]:
    """Labels of the blocks whose kind depends on image features, by their index: each block that
    adds features to its hidden states, and the block after the last of these.
    """
    added = blocks_added_to(at, facts)
    return {**dict.fromkeys(range(added), DEEPSTACK), added: _NEXT} if added else {}


def block_kinds(facts: Facts) -> dict[int, list[str]]:
    """For each block list, by its length, a number for the structure of each block.

    Two lists of the same length with different structures are left out: the length is ambiguous.
    """
    labels_by_length: dict[int, list[str]] = {}
    ambiguous: set[int] = set()
    for at in block_lists(facts.model):
        known: dict[str, str] = {}
        row: dict[int, str] = {}
        for child in at.module.children:
            number = known.setdefault(signature(child.module), str(len(known)))
            row |= dict.fromkeys(child.indices or (), number)
        more = _by_features(at, facts)
        labels = [row[i] + more.get(i, "") for i in sorted(row)]
        if labels_by_length.setdefault(len(labels), labels) != labels:
            ambiguous.add(len(labels))
    return {
        length: labels for length, labels in labels_by_length.items() if length not in ambiguous
    }


Kind = tuple[tuple[str, ...], str]
"""A kind of layer: its words in the configuration's per-layer lists, and its structure."""


def length(at: Modules) -> int:
    """The number of entries of a list."""
    return sum(child.times for child in at.module.children)


def layer_columns(at: Modules, facts: Facts, named: Facts) -> list[tuple[str, list[Any]]]:
    """The configuration's lists with one entry for each block of a list, by their field.

    Args:
        at: a block list of `facts`.
        facts: the facts with the blocks.
        named: the facts whose configuration decides which lists are per layer: those of the
            original model, because in a small one any list can be as long as the layers.
    """
    wide = next((o for o in block_lists(named.model) if o.path == at.path), None)
    return list(_columns(facts.config, named.config, length(wide) if wide else 0, str(at)))


def entry_kinds(at: Modules, facts: Facts, named: Facts) -> dict[int, Kind]:
    """The kind of each entry of a block list; arguments as of `layer_columns`.

    Only lists of words or truths count: a number can be another one in a proxy model.
    """
    columns = [c for _, c in layer_columns(at, facts, named) if isinstance(c[0], str | bool)]
    more = _by_features(at, facts)
    kinds: dict[int, Kind] = {}
    for child in at.module.children:
        structure = signature(child.module)
        if not (columns or more):
            kinds |= dict.fromkeys(child.indices or (), ((), structure))
            continue
        for i in child.indices or ():
            words = tuple(str(c[i]) for c in columns if i < len(c))
            kinds[i] = ((*words, *([more[i]] if i in more else [])), structure)
    return dict(sorted(kinds.items()))


def _columns(
    config: Mapping[str, Any], named: Mapping[str, Any], length: int, path: str
) -> Iterator[tuple[str, list[Any]]]:
    """Yields the configuration's lists with one entry for each block of the list at `path`."""
    for name, value in named.items():
        if _APART.search(name):
            continue
        if isinstance(value, Mapping) and isinstance(config.get(name), Mapping):
            if _TOWER.findall(name) == _TOWER.findall(path):
                yield from _columns(config[name], value, length, path)
        elif isinstance(value, list) and len(value) == length > 1 and value != [*range(length)]:
            column = config.get(name)
            if isinstance(column, list) and not isinstance(value[0], list):  # not image sizes
                yield name, column
