"""Chooses the layers of a model that a proxy model keeps, and writes them into its
configuration.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from math import lcm
from typing import Any, TypeGuard

from planc.model.config_fields import LAYERS, NESTED
from planc.model.layer_kinds import DEEPSTACK, DEEPSTACK_FIELD

Fields = Mapping[str, Any]
Kind = tuple[str, ...]
LONGEST = 16
"""The most consecutive layers that are kept where kinds of layer come at fixed periods, and that
are left out at once."""


def nested_configs(config: Fields) -> list[tuple[str, Fields]]:
    """The configurations in one, by name; that of a tower comes after that of the decoder, which
    says how many features the tower gives.
    """
    return [
        (name, value)
        for name, value in sorted(config.items(), key=lambda item: item[0] == "vision_config")
        if isinstance(value, Mapping) and (name.endswith("_config") or name in NESTED)
    ]


class Depth:
    """Shrinks the depth of the configurations of one model to at least `least` layers, all kinds.

    Args:
        blocks, variants: the structure of each block, and the plan's rules on it, by the length of
            its list; a list in which rules depend on the kind of layer alone is left out.

    Attributes:
        kept: the layers that the small ones stand for, by the length of a list; several where lists
            of one length are in different configurations.
        deepstack: the number of kept decoder blocks after which features of images are added, which
            is that of the features that the small tower gives.
    """

    def __init__(
        self, least: int, blocks: Mapping[int, list[str]], variants: Mapping[int, list[str]]
    ) -> None:
        self.least, self.blocks, self.variants = least, blocks, variants
        self.kept: dict[int, list[tuple[int, ...]]] = {}
        self.deepstack = 0

    def shrink(
        self, config: Fields, small: dict[str, Any], inner: Callable[[Fields], dict[str, Any]]
    ) -> None:
        """Shrinks the depth of `config` in `small`; `inner` shrinks that of a single layer."""
        named = [n for n in LAYERS if number(config.get(n))]
        kinds = config.get("layers_block_type")
        if not named and isinstance(kinds, list):  # nemotron_h: only the list states the depth
            kept = self._of_list(kinds)
            small["layers_block_type"] = [kinds[i] for i in kept]
            self.kept.setdefault(len(kinds), []).append(tuple(kept))
        for name in named:
            self._keep_layers(config, small, name, inner)

    def _of_list(self, kinds: list[str]) -> list[int]:
        variants = self.variants.get(len(kinds))
        if variants:
            return neighbors(list(zip(kinds, variants, strict=True)), self.least)
        return list(_window([(kind,) for kind in kinds], self.least) or range(len(kinds)))

    def _keep_layers(
        self,
        config: Fields,
        small: dict[str, Any],
        name: str,
        inner: Callable[[Fields], dict[str, Any]],
    ) -> None:
        """Keeps one layer of each kind, and at least as many as requested."""
        depth, blocks = config[name], self.blocks.get(config[name], [])
        features = self.deepstack if config.get(DEEPSTACK_FIELD) else 0
        lists = [n for n, v in config.items() if isinstance(v, list) and len(v) == depth > 1]
        layer_numbers = list(
            range(depth)
        )  # a list of all layer numbers does not distinguish layers
        columns = [[str(v) for v in config[n]] for n in lists if config[n] != layer_numbers]
        single = {int(i): v for i, v in (config.get("per_layer_config") or {}).items()}
        if single:
            columns.append([str(single.get(i)) for i in range(depth)])
        last = config.get("num_kv_shared_layers")  # layers that have no kv projections
        last = last if number(last) and last < depth else 0
        columns += [[str(i >= depth - last) for i in range(depth)]] if last else []
        kept, offsets = self._kept_layers(config, depth, columns, max(self.least, features))
        small |= offsets
        for field in lists:
            values = [config[field][i] for i in kept]
            small[field] = list(range(len(kept))) if config[field] == layer_numbers else values
        if single:
            kept_layers = {str(kept.index(i)): v for i, v in single.items() if i in kept}
            small["per_layer_config"] = {i: inner(v) for i, v in kept_layers.items()}
        small[name] = len(kept)
        self.deepstack += sum(DEEPSTACK in kind for i, kind in enumerate(blocks) if i in kept)
        _numbered_layers(small, kept, depth, done=lists)
        if features:
            small[DEEPSTACK_FIELD] = list(range(len(kept)))[-features:]
        if last:
            small["num_kv_shared_layers"] = sum(i >= depth - last for i in kept)
        for field in _dense_first(config, depth):
            small[field] = min(sum(i < config[field] for i in kept), len(kept) - 1)
        self.kept.setdefault(depth, []).append(tuple(kept))

    def _kept_layers(
        self, config: Fields, depth: int, columns: list[list[str]], least: int
    ) -> tuple[list[int], dict[str, int]]:
        """The layers that are kept, and the offsets of their kinds, by field."""
        repeats = _period(config, depth)
        structure = self.blocks.get(depth, ())
        if (columns or repeats == 1) and len(set(structure)) > 1:
            columns = [*columns, list(structure)]
        variants = self.variants.get(depth)
        if variants and (columns or repeats == 1):
            return neighbors(list(zip(*columns, variants, strict=True)), least), {}
        if columns:
            return _of_each(list(zip(*columns, strict=True)), least), {}
        whole = min(depth, max(least, repeats, 2 if _dense_first(config, depth) else 1))
        if offsets := _offsets(config, depth):
            turns = [str([i % p == config[o] for o, p in offsets.items()]) for i in range(depth)]
            run = _window(list(zip(turns, variants or turns, strict=True)), least)
            run = run or _window([(turn,) for turn in turns], least) or range(depth)
            return list(run), {o: (config[o] - run.start) % p for o, p in offsets.items()}
        if variants:
            kinds = [(str(i % repeats), variant) for i, variant in enumerate(variants)]
            for size in range(whole, min(depth, LONGEST) + 1):
                if edges(kinds[:size]) == edges(kinds):
                    return list(range(size)), {}
        return list(range(whole)), {}


def _of_each(kinds: list[Kind], least: int) -> list[int]:
    """The first layer of each kind, the last layer where it is of an earlier kind than the last of
    these, then the next ones until there are enough.
    """
    first = {kind: i for i, kind in reversed(list(enumerate(kinds)))}
    kept = {*first.values(), *_sharing(kinds)}
    if kinds[max(kept)] != kinds[-1]:
        kept.add(len(kinds) - 1)
    for i in range(len(kinds)):
        if len(kept) >= least:
            break
        kept.add(i)
    return sorted(kept)


def number(value: object) -> TypeGuard[int]:
    """Whether a field's value is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def edges(kinds: Sequence[Kind]) -> set[tuple[Kind | None, Kind | None]]:
    """The kinds that follow each other, with None before the first and after the last."""
    return set(pairwise((None, *kinds, None)))


def neighbors(kinds: Sequence[Kind], least: int) -> list[int]:
    """A few layers in which exactly those kinds follow each other that do so in the whole model.

    They include the first and the last layer: where rules differ from layer to layer, what a layer
    hands to the next one may be right between some of them and wrong between others.

    Args:
        kinds: the kind of each layer, which includes the rules that act on it.
        least: the least number of layers.
    """
    wanted, depth = edges(kinds), len(kinds)
    first = {pair: i for i, pair in reversed(list(enumerate(pairwise(kinds))))}
    needed = {0, depth - 1, *_sharing(kinds)}
    kept = needed.union(*((i, i + 1) for i in first.values()))
    for entry, following in pairwise(sorted(kept)):
        if (kinds[entry], kinds[following]) not in wanted:
            kept.update(range(entry, following))

    def spare() -> list[int]:
        """The shortest run of layers that can be left out: one where two of a kind may follow each
        other, two where two kinds take turns; empty for none.
        """
        order = sorted(kept)
        for size in range(1, min(LONGEST, len(order) - least) + 1):
            for at in range(1, len(order) - size):
                run = order[at : at + size]
                rest = (kinds[layer] for layer in order if layer not in run)
                ends = kinds[order[at - 1]], kinds[order[at + size]]
                if needed.isdisjoint(run) and ends in wanted and edges([*rest]) == wanted:
                    return run
        return []

    while run := spare():
        kept.difference_update(run)
    return sorted(kept)


def _sharing(kinds: Sequence[Kind]) -> list[int]:
    """Two of the blocks that share weights, so that they stay tied."""
    return [i for i, kind in enumerate(kinds) if "hybrid" in kind][:2]


def _numbered_layers(
    small: dict[str, Any], kept: list[int], depth: int, *, done: Collection[str]
) -> None:
    """Remaps lists of layer indices to the kept layers, in place."""
    for name, value in small.items():
        if name in done or not re.search(r"layer_ids$|layers$|_idxs$|_indices$|_indexes$", name):
            continue
        if isinstance(value, list) and all(isinstance(v, int) and 0 <= v < depth for v in value):
            small[name] = [kept.index(v) for v in value if v in kept]
            if value and not small[name] and re.search(r"_indexes$|_layers_indices$", name):
                small[name] = [len(kept) - 1]  # a tower returns the output of some layer


def _window(kinds: list[Kind], least: int) -> range | None:
    """The first of the shortest runs of layers that contain every kind (configuration, rules), or
    None if it is all layers. Where rules make more kinds, the same must follow each other.
    """
    depth, all_kinds = len(kinds), set(kinds)
    varied = len(all_kinds) > len({kind[0] for kind in kinds})
    for size in range(min(depth, max(least, len(all_kinds))), depth):
        for start in range(depth - size + 1):
            run = kinds[start : start + size]
            if set(run) == all_kinds and (not varied or edges(run) == edges(kinds)):
                return range(start, start + size) if not varied or size <= LONGEST else None
    return None


_PERIOD = re.compile(r"(period|interval|pattern|sparse_step|layer_step|every_n_layers)$")


def _offsets(config: Fields, depth: int) -> dict[str, int]:
    """Periods of kinds of layer, by the field with their offset (jamba); empty if one has none."""
    periods = [n for n, v in config.items() if _PERIOD.search(n) and number(v) and v < depth]
    offsets = {name.removesuffix("period") + "offset": config[name] for name in periods}
    return offsets if all(isinstance(config.get(name), int) for name in offsets) else {}


def _period(config: Fields, depth: int) -> int:
    """After how many layers a model without a list of layer kinds repeats."""
    period = 1
    for name, value in config.items():
        if not number(value) or value >= depth:
            continue
        if _PERIOD.search(name):
            period = lcm(period, value)
    pattern = config.get("block_types")  # a list that is repeated
    if isinstance(pattern, list) and len(pattern) < depth:
        period = lcm(period, len(pattern))
    return min(period, depth)


def _dense_first(config: Fields, depth: int) -> list[str]:
    """The fields that state how many of the first layers are dense."""
    names = [n for n in config if re.search(r"(_dense_replace|_dense_layers|_start_index)$", n)]
    return [n for n in names if number(config[n]) and 0 < config[n] < depth]
