"""Makes a small configuration of the same family, for which a plan means the same.

What decides whether a parallel plan is right is kept: one layer of each kind, how query heads share
kv heads, ties, biases, norms, experts. What only costs time is reduced: widths, depth, vocabulary.
Fields are recognized by meaning, under the names that all families of transformers use, so a new
family is likely to shrink too.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, lcm
from typing import Any

from planc.model import config_fields as fields
from planc.model.config import buildable, is_diffusers
from planc.model.facts import Facts
from planc.model.layer_kinds import block_kinds
from planc.proxy.depth import Depth, nested_configs, number
from planc.proxy.multimodal import shrink_multimodal

Fields = Mapping[str, Any]
UNSHRUNK = 200_000_000
"""The most parameters of a model that is run as it is: a user's own, without a configuration."""
HEAD = 16  # head width, even also if only a quarter of it is rotated
MOST = 16  # query heads, if at least two share a kv head; more show no further errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """A small configuration: fields for `AutoConfig.for_model`, or a diffusers class, with dropout
    off.

    Args:
        kept: the layers that the small ones stand for, in order, by the length of their list;
            several where lists of one length are in different parts of the configuration.
    """

    values: dict[str, Any]
    kept: Mapping[int, Sequence[tuple[int, ...]]]


def small_values(
    facts: Facts,
    ranks: Mapping[str, int] | int,
    *,
    real: int | None = None,
    layers: int = 2,
    variants: Mapping[int, list[str]] | None = None,
) -> Shrunk | str:
    """The small configuration of a model as JSON, with the name of its class, or the reason why
    there is none; arguments as of `shrink`.
    """
    if not buildable(facts.config):
        return f"{facts.name} has no configuration that planc can make small"
    try:
        blocks = block_kinds(facts)
        shrunk = shrink(
            facts.config, ranks=ranks, real=real, layers=layers, blocks=blocks, variants=variants
        )
    except Exception as error:
        return f"the model cannot be shrunk: {error}"
    values = json.loads(json.dumps(shrunk.values, default=str))
    return replace(shrunk, values={**values, "architectures": [facts.name]})


def shallow_values(facts: Facts, variants: Mapping[int, list[str]]) -> Shrunk | str:
    """The configuration of a model with one layer of each kind at its real size, or the reason why
    there is none; arguments as of `shrink`.
    """
    if not buildable(facts.config):
        return f"{facts.name} has no configuration of transformers or diffusers"
    depth = Depth(1, block_kinds(facts), variants)

    def shallow(config: Fields) -> dict[str, Any]:
        small = {n: v for n, v in config.items() if n not in ("dtype", "torch_dtype")}
        for name, value in nested_configs(config):
            small[name] = shallow(value)
        depth.shrink(config, small, shallow)
        _without_last_stages(config, small)
        return small

    if is_diffusers(facts.config):
        from planc.proxy import diffusers_model

        values_of_depth = diffusers_model.shallow(facts.config, layers=2)
    else:
        values_of_depth = shallow(facts.config)
    values = json.loads(json.dumps(values_of_depth, default=str))
    return Shrunk(values={**values, "architectures": [facts.name]}, kept=depth.kept)


def shrink(
    config: Fields,
    *,
    ranks: Mapping[str, int] | int,
    real: int | None = None,
    layers: int = 2,
    blocks: Mapping[int, list[str]] | None = None,
    variants: Mapping[int, list[str]] | None = None,
) -> Shrunk:
    """A small configuration of the same family.

    Args:
        config: the fields, including `model_type`: preferably the resolved ones (`Facts.config`),
            because a field that is left to the family's defaults cannot be shrunk.
        ranks: the number of ranks by the role of a mesh axis (`AxisRole`); a single number means
            `tensor`. Heads, widths and vocabulary divide by `tensor`, experts by `expert`.
        real: the number of tensor ranks of the real run: heads and vocabularies that do not divide
            by it do not divide by `ranks` either. Without it, key/value heads that do not divide
            by `ranks` do not; other heads and vocabularies do.
        layers: the least number of layers; a model with more kinds of layer keeps more.
        blocks: the structure of each block, by the length of its list (`layer_kinds.block_kinds`),
            for kinds that the configuration does not state, such as dense first layers.
        variants: which rules of a plan act on each block, by the length of its list; lists in which
            they depend on the kind of block alone are left out.
    """
    roles = {"tensor": ranks} if isinstance(ranks, int) else dict(ranks)
    tp = roles.get("tensor", 1)
    if is_diffusers(config):
        from planc.proxy import diffusers_model

        small = diffusers_model.shrink(config, tp=tp, layers=layers)
        return Shrunk(values=small, kept={})
    depth = Depth(layers, blocks or {}, variants or {})
    small = _Shrinker(tp, roles.get("expert", 1), real, depth).config(config)
    shrink_multimodal(config, small)
    return Shrunk(values=small, kept=depth.kept)


def _split_head_widths(config: Fields) -> list[int]:
    """The widths of heads that are a rotated and an unrotated part, in any layer."""
    layers = (config, *({**config, **v} for v in (config.get("per_layer_config") or {}).values()))
    parts = ([layer.get(name) for name in fields.QK] for layer in layers)
    return [sum(b for b in both if number(b)) for both in parts if all(map(number, both))]


class _Shrinker:
    """Shrinks one configuration: what heads (`tp`, and as the `real` ones) and experts divide by;
    `depth` chooses the layers that are kept.
    """

    def __init__(self, tp: int, ep: int, real: int | None, depth: Depth) -> None:
        self.tp, self.ep, self.real = tp, ep, real
        self.depth = depth

    def config(self, config: Fields) -> dict[str, Any]:
        """Shrinks one level; nested configurations (`text_config`) are shrunk separately."""
        small = {n: v for n, v in config.items() if n not in ("dtype", "torch_dtype")}
        for name, value in nested_configs(config):
            small[name] = self.config(value)
        _sizes_of_sibling(config, small)
        self.depth.shrink(config, small, self.config)
        self._width(config, small)
        self._experts(small)
        self._limit_others(small)
        _rope(small)
        _mamba(small)
        _without_last_stages(config, small)
        return small

    # Width ---------------------------------------------------------------------------------------

    def _width(self, config: Fields, small: dict[str, Any]) -> None:
        heads = 0
        for name in fields.HEADS:
            if number(config.get(name)):
                heads = max(heads, self._heads(config, small, name))
        if not heads:
            heads = 4 * self.tp // (2 if self.tp > 1 else 1)
        size = heads * HEAD
        first = next((config[n] for n in fields.HIDDEN if number(config.get(n))), 1)
        for name in fields.HIDDEN:
            if number(config.get(name)):
                small[name] = size * _ratio(config[name], first) // _ratio(first, config[name])
        for name in fields.HEAD_DIM:
            if number(config.get(name)):
                small[name] = HEAD
        if config.get("head_dim") in _split_head_widths(config):
            small["head_dim"] = HEAD * len(fields.QK)
        if number(config.get("qk_head_dim")):
            small["qk_head_dim"] = sum(HEAD for n in fields.QK if number(config.get(n)))
            if number(config.get("swa_head_dim")):
                small["swa_head_dim"] = small["qk_head_dim"]
        if number(config.get("attention_head_dim")):
            inner = small.get("attention_hidden_size", size)
            small["attention_head_dim"] = inner // max(heads, 1)
        for name in fields.WIDE & config.keys():
            value = config[name]
            if number(value) and value > 1:
                small[name] = self._even(96 if size < 96 else size + 32)
            elif isinstance(value, list):
                small[name] = [self._even(96)] * small.get("num_hidden_layers", len(value))
        for name in fields.VOCABULARY & config.keys():
            if number(config[name]):
                small[name] = min(self._even(128), self._even(config[name]))
                if self.tp > 1 and self.real and config[name] % self.real:
                    small[name] += 1

    def _heads(self, config: Fields, small: dict[str, Any], name: str) -> int:
        """Shrinks query heads and their kv heads; returns the number of query heads."""
        queries = config[name]
        # `num_attention_heads` goes with `num_key_value_heads`, `swa_num_...` with `swa_num_...`
        before = name.removesuffix("num_attention_heads") if name.endswith("_heads") else ""
        shared = [f for f in fields.KV_HEADS if number(config.get(before + f))]
        grouped = min((config[before + f] for f in shared), default=queries)
        ratio = max(1, queries // max(1, grouped))
        if grouped == 1 and ratio > 1:
            small_kv, small_queries = 1, self._even(4, self.tp)
        else:
            small_kv = self._even(2 if ratio > 1 else 4, self.tp)
            real = self.real or self.tp
            if self.tp > 1 and grouped % real and ratio > 1:  # indivisible heads stay indivisible
                fewer = max(1, self.tp * grouped // real)  # than the ranks
                small_kv = fewer if grouped < real else 3 * self.tp // 2
            small_queries = small_kv * min(ratio, max(2, MOST // small_kv))
            if small_queries % self.tp:
                small_queries = lcm(small_kv, self.tp)
        if self.tp > 1 and self.real and queries % self.real:
            small_kv = small_kv if ratio > 1 else _indivisible(1, 1, self.tp)
            small_queries = _indivisible(small_kv, min(ratio, 2), self.tp)
        small[name] = small_queries
        for field in shared:  # a family reads one, and ignores what another family calls it
            alike = config[before + field] == queries
            small[before + field] = small_queries if alike else small_kv
        return int(small_queries)

    def _even(self, size: int, step: int = 0) -> int:
        """The size rounded up to a multiple of the ranks (and of 8, for a width)."""
        unit = step or lcm(8, self.tp)
        return ceil(size / unit) * unit

    # The rest ------------------------------------------------------------------------------------

    def _experts(self, small: dict[str, Any]) -> None:
        for name in fields.EXPERTS & small.keys():
            value = small[name]
            if number(value) and value > 1:
                small[name] = min(value, max(4, 2 * self.ep)) if value % self.ep == 0 else value
            elif isinstance(value, list):
                small[name] = [max(4, 2 * self.ep)] * len(value)
        for name, most in fields.COUNTS.items():
            if number(small.get(name)):
                small[name] = min(small[name], most)

    def _limit_others(self, small: dict[str, Any]) -> None:
        scaled = any(small.get(n) for n in ("rope_scaling", "original_max_position_embeddings"))
        scaled = scaled or any(t != "default" for t in _rope_types(small.get("rope_parameters")))
        for name, most in fields.LIMITS.items():
            value = small.get(name)
            if number(value) and value > most and not (scaled and name in fields.POSITIONS):
                small[name] = most
        vocabulary = min((small[n] for n in fields.VOCABULARY if number(small.get(n))), default=128)
        used: set[int] = set()
        for name, value in small.items():
            if (
                (fields.DROPOUT.search(name) or fields.SPEC_AUGMENT.search(name))
                and isinstance(value, int | float)
                and not isinstance(value, bool)
            ):
                small[name] = type(value)(0)
            elif fields.TOKEN.search(name):
                small[name] = _token(value, vocabulary, used)


def _token(value: Any, vocabulary: int, used: set[int]) -> Any:
    """A token id inside the vocabulary; ids beyond it become distinct ids at its end."""
    if isinstance(value, list):
        return [_token(v, vocabulary, used) for v in value]
    if not number(value) or value < vocabulary:
        return value
    last = next(v for v in range(vocabulary - 1, -1, -1) if v not in used)
    used.add(last)
    return last


def _indivisible(step: int, least: int, ranks: int) -> int:
    """The smallest multiple of `step`, from `least` times on, that is at least 1.5 times the number
    of ranks and not divisible by it. The features of these heads stay divisible by powers of two.
    """
    multiples = range(least * step, 8 * step * ranks, step)
    return next(n for n in multiples if 2 * n >= 3 * ranks - 1 and n % ranks)


def _sizes_of_sibling(config: Fields, small: dict[str, Any]) -> None:
    """Fields for a size of another part, as `hidden_size_global` for `global_config`'s."""
    nested = (n for n, v in config.items() if n.endswith("_config") and isinstance(v, Mapping))
    parts = {name.removesuffix("_config"): name for name in nested}
    for part in parts.values():
        for field, value in config[part].items():
            size, _, other = field.rpartition("_")
            if other in parts and number(value) and value == config[parts[other]].get(size):
                small[part][field] = small[parts[other]][size]


def _without_last_stages(config: Fields, small: dict[str, Any]) -> None:
    """Removes the name of the last layer, which a shallower backbone lacks, if it returns that."""
    names = config.get("stage_names")
    if isinstance(names, list) and config.get("out_features") == names[-1:]:
        for name in fields.STAGES:
            small.pop(name, None)


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
            small[name] = _scale_rotary(
                small[name], head, small.get("partial_rotary_factor") or 1.0
            )


def _scale_rotary(values: Mapping[str, Any], head: int, partial: float) -> dict[str, Any]:
    out: dict[str, Any] = {}
    factor = values.get("partial_rotary_factor") or partial
    pairs = int(head * factor) // 2
    for name, value in values.items():
        if isinstance(value, Mapping):
            out[name] = _scale_rotary(value, head, partial)
        elif name in ("short_factor", "long_factor") and isinstance(value, list):
            out[name] = value[:pairs]
        elif name == "mrope_section" and isinstance(value, list):
            out[name] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        else:
            out[name] = value
    return out


def _ratio(size: int, other: int) -> int:
    """The ratio of two widths, from 1 to 4; 1 if it is not a whole number."""
    times, rest = divmod(size, other)
    return times if 1 <= times <= 4 and not rest else 1


def _mamba(small: dict[str, Any]) -> None:
    """Heads times head width of a state-space layer equal its expanded hidden size."""
    hidden = next((small[n] for n in fields.HIDDEN if number(small.get(n))), 64)
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
            if number(small.get(heads)) and number(small.get(width)):
                small[width] = HEAD
                small[heads] = inner // HEAD
