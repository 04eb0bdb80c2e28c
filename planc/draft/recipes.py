"""What can be done with the parts of a block, the best first; which holds, a run tells.

A recipe is rules in two versions: without and with sequence parallelism, where norms and
residuals hold a part of the sequence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planc.draft.roles import Blocks, Experts, Linear, Segment
from planc.model.facts import Module

Rules = dict[str, str]
"""Style by the name of a module."""

PACKED = re.compile(r"gate_up|up_gate|gateup|w13|wi_fused", re.I)
FUSED = re.compile(r"qkv|query_key_value|c_attn|w_?pack", re.I)
_DOWN = re.compile(r"down|w2|output|wo\b", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Args:
    name: how it splits: `heads`, `packed`, `gathered`, `experts` or `whole`.
    plain: rules without sequence parallelism.
    sequence: rules with it, where they differ in more than the wrapping of the whole holder; None
        where only that wrapping will do.
    note: what a reader should know.
    """

    name: str
    plain: Rules
    sequence: Rules | None = None
    note: str = ""


@dataclass(slots=True, kw_only=True)
class Choice:
    """A part of the model and what can be done with it.

    Args:
        name: of the part, inside its block: the closing linear or the experts.
        members: the modules concerned, to find out whose fault an error is.
        top: the child of the block that it is in, empty where it is the block itself.
        recipes: the best first.
        at: the one that is tried.
    """

    name: str
    members: tuple[str, ...]
    top: str
    recipes: list[Recipe]
    at: int = 0

    @property
    def recipe(self) -> Recipe:
        return self.recipes[self.at]

    @property
    def last(self) -> bool:
        return self.at == len(self.recipes) - 1


def choices(
    blocks: Blocks, config: Mapping[str, Any], holders: Mapping[str, Module]
) -> list[Choice]:
    """Every part of the blocks that can be split.

    Args:
        blocks: the roles.
        config: of the model, to write sizes of packed projections as expressions over it.
        holders: the modules of a block by name, for their own parameters.
    """
    found = [_segment(s, config, holders.get(s.holder)) for s in blocks.segments]
    return found + [_experts(e) for e in blocks.experts]


# Segments ----------------------------------------------------------------------------------------


def _segment(segment: Segment, config: Mapping[str, Any], holder: Module | None) -> Choice:
    recipes: list[Recipe] = []
    fan = segment.fans[0]
    alone = len(segment.fans) == 1
    sinks = _sinks(segment, holder)
    packed = alone and (PACKED.search(fan.name) or fan.outputs == 2 * segment.close.inputs)
    fused = alone and segment.attention and (FUSED.search(fan.name) or fan.outputs > fan.inputs)
    if packed and not segment.attention:
        recipes.append(_split(segment, "packed", "parts = 2", sinks))
    if not any(linear.kind == "conv1d" for linear in segment.linears):
        recipes.append(_split(segment, "heads", "", sinks))
    if fused:
        for parts in _parts(fan, segment.close, config):
            recipes.append(_split(segment, "packed", f"parts = {parts}", sinks))
    if any(linear.kind == "conv1d" for linear in segment.linears):
        recipes.append(_split(segment, "heads", "", sinks))
    recipes.append(_gathered(segment))
    recipes.append(Recipe(name="whole", plain={}))
    members = [linear.name for linear in segment.linears]
    top = segment.close.name.partition(".")[0] if "." in segment.close.name else ""
    return Choice(
        name=segment.close.name,
        members=(*members, *([segment.holder] if segment.holder else [])),
        top=top,
        recipes=recipes,
    )


def _sinks(segment: Segment, holder: Module | None) -> Rules:
    """Parameters of the attention module itself: one number a head, as attention sinks are."""
    if holder is None or not segment.attention:
        return {}
    own = [p.name for p in holder.parameters if len(p.shape) == 1]
    if not own or len(own) != len(holder.parameters):
        return {}
    return {segment.holder: f"parameters({', '.join(f'{n} = shard(0)' for n in own)})"}


def _split(segment: Segment, name: str, parts: str, sinks: Rules) -> Recipe:
    plain = {fan.name: f"colwise({parts})" if parts else "colwise" for fan in segment.fans}
    plain[segment.close.name] = "rowwise"
    lead = f"{parts}, " if parts else ""
    sequence: Rules = {}
    if segment.takes is not None and not sinks:
        sequence[segment.holder] = f"input({segment.takes})"
        sequence |= {fan.name: plain[fan.name] for fan in segment.fans}
    elif not segment.latent:
        for fan in segment.fans:
            sequence[fan.name] = f"colwise({lead}shard(1) -> shard(-1))"
    sequence[segment.close.name] = "rowwise(-> shard(1), local = false)"
    clean = not sinks and not segment.latent
    return Recipe(name=name, plain={**plain, **sinks}, sequence=sequence if clean else None)


def _parts(fan: Linear, close: Linear, config: Mapping[str, Any]) -> list[str]:
    """The sizes of query, key and value in one weight, over the configuration."""
    query, rest = close.inputs, fan.outputs - close.inputs
    if rest <= 0 or rest % 2:
        return []
    heads = next((n for n in ("num_attention_heads", "n_head", "num_heads") if config.get(n)), None)
    if rest == 2 * query:
        return ["3"]
    groups = config.get("num_key_value_heads")
    if heads is None or not groups:
        return []
    size = "config.head_dim"
    if not config.get("head_dim"):
        width = next((n for n in ("hidden_size", "n_embd") if config.get(n)), None)
        if width is None:
            return []
        size = f"config.{width} // config.{heads}"
    kv = f"config.num_key_value_heads * {size}"
    return [f"[config.{heads} * {size}, {kv}, {kv}]"]


def _gathered(segment: Segment) -> Recipe:
    """The weights are split, what they give is whole: right whatever the code between does."""
    plain: Rules = {linear.name: "colwise(-> replicate)" for linear in segment.linears}
    plain[segment.close.name] = "rowwise(replicate -> replicate)"
    sequence = None
    if not segment.latent:
        sequence = {f.name: "colwise(shard(1) -> replicate)" for f in segment.fans}
        sequence[segment.close.name] = "rowwise(replicate -> shard(1), local = false)"
    note = "its code counts on whole outputs: the weights are split, the outputs are gathered"
    return Recipe(name="gathered", plain=plain, sequence=sequence, note=note)


# Experts -----------------------------------------------------------------------------------------


def _experts(experts: Experts) -> Choice:
    recipes = []
    for packed in (True, False):
        arguments = _arguments(experts.module, packed=packed)
        if arguments:
            rule = f"experts({', '.join(f'{n} = {v}' for n, v in arguments.items())})"
            recipe = Recipe(name="experts", plain={experts.name: rule})
            if recipe not in recipes:
                recipes.append(recipe)
    recipes.append(Recipe(name="whole", plain={}))
    return Choice(
        name=experts.name,
        members=(experts.name,),
        top=experts.name.partition(".")[0],
        recipes=recipes,
    )


def _arguments(module: Module, *, packed: bool) -> dict[str, str]:
    """How each parameter of fused experts is split, by the sizes that it shares with the others.

    What goes up is split where its intermediate dim is, what goes down where it takes that in.
    """
    large = [p for p in module.parameters if len(p.shape) == 3]
    down = next((p for p in large if _DOWN.search(p.name)), None)
    up = next((p for p in large if p is not down), None)
    if down is None or up is None:
        return {}
    shared = set(up.shape[1:]) & set(down.shape[1:])
    width = next((n for n in shared if down.shape[1:].count(n) == 1), None)
    if width is None:
        return {}
    inner = next(n for n in down.shape[1:] if n != width)
    found: dict[str, str] = {}
    for p in module.parameters:
        below = bool(_DOWN.search(p.name))
        if len(p.shape) == 3:
            dim = next((i for i in (1, 2) if p.shape[i] != width), None)
            if dim is None:
                return {}
            two = packed and not below and p.shape[dim] == 2 * inner
            found[p.name] = f"shard({dim}, parts = 2)" if two else f"shard({dim})"
        elif below and p.shape[-1] == width:
            found[p.name] = "partial"
        elif not below and len(p.shape) == 2 and p.shape[-1] in (inner, 2 * inner):
            two = packed and p.shape[-1] == 2 * inner
            found[p.name] = "shard(1, parts = 2)" if two else "shard(1)"
        else:
            return {}
    return found
