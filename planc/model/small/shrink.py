"""Makes a small configuration of the same family, for which a plan means the same.

What decides whether a parallel plan is right is kept: one layer of each kind, how query heads share
kv heads, ties, biases, norms, experts. What only costs time is reduced: widths, depth, vocabulary.
Fields are recognized by meaning, under the names that all families of transformers use, so a new
family is likely to shrink too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import ceil, lcm
from typing import Any, TypeGuard

from planc.model.config import is_diffusers
from planc.model.small.config_fields import (
    COUNTS,
    DROPOUT,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    LIMITS,
    NESTED,
    POSITIONS,
    QK,
    TOKEN,
    VOCABULARY,
    WIDE,
)
from planc.model.small.multimodal import shrink_multimodal

Fields = Mapping[str, Any]
HEAD = 16  # head width, even also if only a quarter of it is rotated
MOST = 16  # query heads, if at least two share a kv head; more show no further errors


def shrink(
    config: Fields,
    *,
    ranks: Mapping[str, int] | int,
    layers: int = 2,
    blocks: Mapping[int, list[str]] | None = None,
) -> dict[str, Any]:
    """A small configuration of the same family.

    Args:
        config: the fields, including `model_type`: preferably the resolved ones (`Facts.config`),
            because a field that is left to the family's defaults cannot be shrunk.
        ranks: the number of ranks by the role of a mesh axis (`AxisRole`); a single number means
            `tensor`. Heads, widths and vocabulary divide by `tensor`, experts by `expert`.
        layers: the least number of layers; a model with more kinds of layer keeps more.
        blocks: the structure of each block, by the length of its list (`layer_kinds.block_kinds`),
            for kinds that the configuration does not state, such as dense first layers.

    Returns:
        Fields for `AutoConfig.for_model`: those of `config`, smaller, with dropout off. For a
        diffusers model, the fields of its class.
    """
    roles = {"tensor": ranks} if isinstance(ranks, int) else dict(ranks)
    if is_diffusers(config):
        from planc.model.small import diffusers_model

        return diffusers_model.shrink(config, tp=roles.get("tensor", 1))
    made = _Shrinker(roles.get("tensor", 1), roles.get("expert", 1), layers, blocks or {})
    small = made.config(config)
    shrink_multimodal(config, small)
    return small


def _joined(config: Fields) -> list[int]:
    """The widths of heads that are a rotated and an unrotated part, in any layer."""
    layers = (config, *({**config, **v} for v in (config.get("per_layer_config") or {}).values()))
    parts = ([layer.get(name) for name in QK] for layer in layers)
    return [sum(b for b in both if _number(b)) for both in parts if all(map(_number, both))]


class _Shrinker:
    """Shrinks one configuration.

    Args:
        tp, ep: what heads and experts must be divisible by.
        layers: the least number of layers.
        blocks: the structure of each block, by the length of its list.
    """

    def __init__(self, tp: int, ep: int, layers: int, blocks: Mapping[int, list[str]]) -> None:
        self.tp, self.ep = tp, ep
        self.layers = layers
        self.blocks = blocks

    def config(self, config: Fields) -> dict[str, Any]:
        """Shrinks one level; nested configurations (`text_config`) are shrunk separately."""
        small = {n: v for n, v in config.items() if n not in ("dtype", "torch_dtype")}
        for name, value in config.items():
            if isinstance(value, Mapping) and (name.endswith("_config") or name in NESTED):
                small[name] = self.config(value)
        _sizes_of_sibling(config, small)
        self._depth(config, small)
        self._width(config, small)
        self._experts(small)
        self._rest(small)
        _rope(small)
        _mamba(small)
        return small

    # Depth ---------------------------------------------------------------------------------------

    def _depth(self, config: Fields, small: dict[str, Any]) -> None:
        """Keeps one layer of each kind, and at least as many as requested."""
        named = [n for n in LAYERS if _number(config.get(n))]
        kinds = config.get("layers_block_type")
        if not named and isinstance(kinds, list):  # nemotron_h: only the list states the depth
            kept = list(_window(kinds, self.layers))
            small["layers_block_type"] = [kinds[i] for i in kept]
        for name in named:
            depth = config[name]
            lists = [n for n, v in config.items() if isinstance(v, list) and len(v) == depth > 1]
            every = list(range(depth))  # a list of all layer numbers does not distinguish layers
            columns = [[str(v) for v in config[n]] for n in lists if config[n] != every]
            single = {int(i): v for i, v in (config.get("per_layer_config") or {}).items()}
            if single:
                columns.append([str(single.get(i)) for i in range(depth)])
            last = config.get("num_kv_shared_layers")  # layers that have no kv projections
            last = last if _number(last) and last < depth else 0
            columns += [[str(i >= depth - last) for i in range(depth)]] if last else []
            repeats = _period(config, depth)
            if (columns or repeats == 1) and len(set(self.blocks.get(depth, ()))) > 1:
                columns.append(list(self.blocks[depth]))
            kept = self._kept(list(zip(*columns, strict=True)))
            repeats = max(repeats, 2 if _dense_first(config, depth) else 1)
            if not kept and (offsets := _offsets(config, depth)):
                turns = [
                    str([i % p == config[o] for o, p in offsets.items()]) for i in range(depth)
                ]
                kept = list(_window(turns, self.layers))
                small |= {o: (config[o] - kept[0]) % p for o, p in offsets.items()}
            kept = kept or list(range(min(depth, max(self.layers, repeats))))
            for field in lists:
                values = [config[field][i] for i in kept]
                small[field] = list(range(len(kept))) if config[field] == every else values
            if single:
                kept_layers = {str(kept.index(i)): v for i, v in single.items() if i in kept}
                small["per_layer_config"] = {i: self.config(v) for i, v in kept_layers.items()}
            small[name] = len(kept)
            _numbered_layers(small, kept, depth, done=lists)
            if last:
                small["num_kv_shared_layers"] = sum(i >= depth - last for i in kept)
            for field in _dense_first(config, depth):
                small[field] = min(sum(i < config[field] for i in kept), len(kept) - 1)

    def _kept(self, kinds: list[tuple[str, ...]]) -> list[int]:
        """The first layer of each kind, then the next ones until there are enough."""
        first = {kind: i for i, kind in reversed(list(enumerate(kinds)))}
        kept = set(first.values())
        shared = [i for i, kind in enumerate(kinds) if "hybrid" in kind]
        kept.update(shared[:2])  # blocks that share weights: keep two, so that they stay tied
        for i in range(len(kinds)):
            if len(kept) >= self.layers:
                break
            kept.add(i)
        return sorted(kept)

    # Width ---------------------------------------------------------------------------------------

    def _width(self, config: Fields, small: dict[str, Any]) -> None:
        heads = 0
        for name in HEADS:
            if _number(config.get(name)):
                heads = max(heads, self._heads(config, small, name))
        if not heads:
            heads = 4 * self.tp // (2 if self.tp > 1 else 1)
        size = heads * HEAD
        first = next((config[n] for n in HIDDEN if _number(config.get(n))), 1)
        for name in HIDDEN:
            if _number(config.get(name)):
                times, rest = divmod(config[name], first)
                small[name] = size * times if times <= 4 and not rest else size
        for name in HEAD_DIM:
            if _number(config.get(name)):
                small[name] = HEAD
        if config.get("head_dim") in _joined(config):
            small["head_dim"] = HEAD * len(QK)
        if _number(config.get("qk_head_dim")):
            small["qk_head_dim"] = sum(HEAD for n in QK if _number(config.get(n)))
            if _number(config.get("swa_head_dim")):
                small["swa_head_dim"] = small["qk_head_dim"]
        if _number(config.get("attention_head_dim")):
            inner = small.get("attention_hidden_size", size)
            small["attention_head_dim"] = inner // max(heads, 1)
        for name in WIDE & config.keys():
            value = config[name]
            if _number(value) and value > 1:
                small[name] = self._even(96 if size < 96 else size + 32)
            elif isinstance(value, list):
                small[name] = [self._even(96)] * small.get("num_hidden_layers", len(value))
        for name in VOCABULARY & config.keys():
            if _number(config[name]):
                small[name] = min(self._even(128), self._even(config[name]))

    def _heads(self, config: Fields, small: dict[str, Any], name: str) -> int:
        """Shrinks query heads and their kv heads; returns the number of query heads."""
        queries = config[name]
        # `num_attention_heads` goes with `num_key_value_heads`, `swa_num_...` with `swa_num_...`
        before = name.removesuffix("num_attention_heads") if name.endswith("_heads") else ""
        fields = [f for f in KV_HEADS if _number(config.get(before + f))]
        grouped = min((config[before + f] for f in fields), default=queries)
        ratio = max(1, queries // max(1, grouped))
        if grouped == 1 and ratio > 1:
            small_kv, small_queries = 1, self._even(4, self.tp)
        else:
            small_kv = self._even(2 if ratio > 1 else 4, self.tp)
            if grouped % self.tp and ratio > 1:  # indivisible heads stay indivisible
                small_kv = next(k for k in range(2, self.tp + 2) if k % self.tp)
            small_queries = small_kv * min(ratio, max(2, MOST // small_kv))
            if small_queries % self.tp:
                small_queries = lcm(small_kv, self.tp)
        small[name] = small_queries
        for field in fields:
            small[before + field] = small_kv
        return int(small_queries)

    def _even(self, size: int, step: int = 0) -> int:
        """The size rounded up to a multiple of the ranks (and of 8, for a width)."""
        unit = step or lcm(8, self.tp)
        return ceil(size / unit) * unit

    # The rest ------------------------------------------------------------------------------------

    def _experts(self, small: dict[str, Any]) -> None:
        for name in EXPERTS & small.keys():
            value = small[name]
            if _number(value) and value > 1:
                small[name] = min(value, max(4, 2 * self.ep)) if value % self.ep == 0 else value
            elif isinstance(value, list):
                small[name] = [max(4, 2 * self.ep)] * len(value)
        for name, most in COUNTS.items():
            if _number(small.get(name)):
                small[name] = min(small[name], most)

    def _rest(self, small: dict[str, Any]) -> None:
        scaled = any(small.get(n) for n in ("rope_scaling", "original_max_position_embeddings"))
        scaled = scaled or any(t != "default" for t in _rope_types(small.get("rope_parameters")))
        for name, most in LIMITS.items():
            value = small.get(name)
            if _number(value) and value > most and not (scaled and name in POSITIONS):
                small[name] = most
        vocabulary = min((small[n] for n in VOCABULARY if _number(small.get(n))), default=128)
        used: set[int] = set()
        for name, value in small.items():
            if (
                DROPOUT.search(name)
                and isinstance(value, int | float)
                and not isinstance(value, bool)
            ):
                small[name] = type(value)(0)
            elif TOKEN.search(name):
                small[name] = _token(value, vocabulary, used)


def _number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _token(value: Any, vocabulary: int, used: set[int]) -> Any:
    """A token id inside the vocabulary; ids beyond it become distinct ids at its end."""
    if isinstance(value, list):
        return [_token(v, vocabulary, used) for v in value]
    if not _number(value) or value < vocabulary:
        return value
    last = next(v for v in range(vocabulary - 1, -1, -1) if v not in used)
    used.add(last)
    return last


def _numbered_layers(
    small: dict[str, Any], kept: list[int], depth: int, *, done: list[str]
) -> None:
    """Remaps lists of layer indices to the kept layers, in place."""
    for name, value in small.items():
        if name in done or not re.search(r"layer_ids$|layers$|_idxs$|_indices$|_indexes$", name):
            continue
        if isinstance(value, list) and all(isinstance(v, int) and 0 <= v < depth for v in value):
            small[name] = [kept.index(v) for v in value if v in kept]
            if value and not small[name] and re.search(r"_indexes$|_layers_indices$", name):
                small[name] = [len(kept) - 1]  # a tower returns the output of some layer


def _window(kinds: list[str], least: int) -> range:
    """The first of the shortest runs of consecutive layers that contain every kind.

    Args:
        kinds: the kind of each layer.
        least: the least number of layers.
    """
    depth, every = len(kinds), set(kinds)
    for size in range(min(depth, max(least, len(every))), depth):
        for start in range(depth - size + 1):
            if set(kinds[start : start + size]) == every:
                return range(start, start + size)
    return range(depth)


_PERIOD = re.compile(r"(period|interval|pattern|sparse_step|layer_step|every_n_layers)$")


def _offsets(config: Fields, depth: int) -> dict[str, int]:
    """Periods of kinds of layer, by the field with their offset (jamba); empty if one has none."""
    periods = [n for n, v in config.items() if _PERIOD.search(n) and _number(v) and v < depth]
    offsets = {name.removesuffix("period") + "offset": config[name] for name in periods}
    return offsets if all(isinstance(config.get(name), int) for name in offsets) else {}


def _period(config: Fields, depth: int) -> int:
    """After how many layers a model without a list of layer kinds repeats."""
    period = 1
    for name, value in config.items():
        if not _number(value) or value >= depth:
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
    return [n for n in names if _number(config[n]) and 0 < config[n] < depth]


def _sizes_of_sibling(config: Fields, small: dict[str, Any]) -> None:
    """Fields for a size of another part: `hidden_size_global` is `global_config`'s
    `hidden_size`.
    """
    nested = (n for n, v in config.items() if n.endswith("_config") and isinstance(v, Mapping))
    parts = {name.removesuffix("_config"): name for name in nested}
    for part in parts.values():
        for field, value in config[part].items():
            size, _, other = field.rpartition("_")
            if other in parts and _number(value) and value == config[parts[other]].get(size):
                small[part][field] = small[parts[other]][size]


def _rope_types(parameters: Any) -> Iterator[str]:
    if isinstance(parameters, Mapping):
        if "rope_type" in parameters or "type" in parameters:
            yield str(parameters.get("rope_type") or parameters.get("type"))
        for value in parameters.values():
            yield from _rope_types(value)


def _rope(small: dict[str, Any]) -> None:
    """Cuts lists of frequency factors to the small head; each pair of dims has one."""
    head = small.get("qk_rope_head_dim") or small.get("head_dim") or HEAD
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(small.get(name), Mapping):
            small[name] = _scaled(small[name], head, small.get("partial_rotary_factor") or 1.0)


def _scaled(values: Mapping[str, Any], head: int, partial: float) -> dict[str, Any]:
    out: dict[str, Any] = {}
    factor = values.get("partial_rotary_factor") or partial
    pairs = int(head * factor) // 2
    for name, value in values.items():
        if isinstance(value, Mapping):
            out[name] = _scaled(value, head, partial)
        elif name in ("short_factor", "long_factor") and isinstance(value, list):
            out[name] = value[:pairs]
        elif name == "mrope_section" and isinstance(value, list):
            out[name] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        else:
            out[name] = value
    return out


def _mamba(small: dict[str, Any]) -> None:
    """Heads times head width of a state-space layer equal its expanded hidden size."""
    hidden = next((small[n] for n in HIDDEN if _number(small.get(n))), 64)
    for expand in ("mamba_expand", "expand"):
        inner = small.get("mamba_d_ssm") or int((small.get(expand) or 2) * hidden)
        if not small.get(expand):
            continue
        for heads, width in (
            ("mamba_n_heads", "mamba_d_head"),
            ("mamba_num_heads", "mamba_head_dim"),
            ("num_heads", "head_dim"),
            ("n_mamba_heads", "mamba_headdim"),
        ):
            if _number(small.get(heads)) and _number(small.get(width)):
                small[width] = HEAD
                small[heads] = inner // HEAD
