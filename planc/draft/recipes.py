"""The candidate splits of each part of a block, best first; a run decides which is right."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planc.draft.roles import Blocks, Linear, ProjectionGroup
from planc.model.facts import Module

StyleRules = dict[str, str]
"""Styles by module name."""

PACKED = re.compile(r"gate_up|up_gate|gateup|w13|wi_fused", re.I)
FUSED = re.compile(r"qkv|query_key_value|c_attn|w_?pack", re.I)
_DOWN = re.compile(r"down|w2|output|wo\b", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRecipe:
    """One way to split a part of a block.

    Args:
        name: `heads`, `packed`, `gathered`, `experts` or `whole` (replicated).
        rules: styles by module; planc infers the layouts.
        note: a comment for the plan.
    """

    name: str
    rules: StyleRules
    note: str = ""


@dataclass(slots=True, kw_only=True)
class SplitChoice:
    """A part of the model and its candidate splits, best first.

    Args:
        name: in the block: of the rowwise linear or the experts.
        members: the modules concerned, to attribute an error to the part.
        clash: why no layouts go with a recipe that was tried.
    """

    name: str
    members: tuple[str, ...]
    recipes: list[SplitRecipe]
    at: int = 0
    clash: str = ""

    @property
    def recipe(self) -> SplitRecipe:
        return self.recipes[self.at]

    @property
    def top(self) -> str:
        """The child of the block that contains the part; empty if it is the block itself."""
        return self.name.rpartition(".")[0].partition(".")[0]

    @property
    def last(self) -> bool:
        return self.at == len(self.recipes) - 1


def split_choices(
    blocks: Blocks, config: Mapping[str, Any], holders: Mapping[str, Module]
) -> list[SplitChoice]:
    """The parts of the blocks that can be split; packed sizes are expressions over the config."""
    found = [_projections(s, config, holders.get(s.holder)) for s in blocks.projection_groups]
    return found + [experts_choice(name, module) for name, module in blocks.experts.items()]


# Segments ----------------------------------------------------------------------------------------


def _projections(
    projections: ProjectionGroup, config: Mapping[str, Any], holder: Module | None
) -> SplitChoice:
    recipes: list[SplitRecipe] = []
    linear = projections.colwise[0]
    alone = len(projections.colwise) == 1
    conv1d = any(each.kind == "conv1d" for each in projections.linears)
    sinks = _sinks(projections, holder)
    twice = linear.outputs == 2 * projections.rowwise.inputs
    packed = alone and (PACKED.search(linear.name) or twice)
    fused = alone and (FUSED.search(linear.name) or linear.outputs > linear.inputs)
    if packed and not projections.attention:
        recipes.append(_split(projections, "packed", "parts = 2", sinks))
    if not conv1d:
        recipes.append(_split(projections, "heads", "", sinks))
    if fused and projections.attention:
        for parts in _parts(linear, projections.rowwise, config):
            recipes.append(_split(projections, "packed", f"parts = {parts}", sinks))
    if conv1d:
        recipes.append(_split(projections, "heads", "", sinks))
    recipes.append(_gathered(projections))
    recipes.append(SplitRecipe(name="whole", rules={}))
    members = [linear.name for linear in projections.linears]
    return SplitChoice(
        name=projections.rowwise.name,
        members=(*members, *([projections.holder] if projections.holder else [])),
        recipes=recipes,
    )


def _sinks(projections: ProjectionGroup, holder: Module | None) -> StyleRules:
    """Rules for the attention module's own parameters with one number per head: attention sinks."""
    if holder is None or not projections.attention:
        return {}
    per_head = [p.name for p in holder.parameters if len(p.shape) == 1]
    if not per_head or len(per_head) != len(holder.parameters):
        return {}
    return {projections.holder: f"parameters({', '.join(f'{n} = shard(0)' for n in per_head)})"}


def _split(projections: ProjectionGroup, name: str, parts: str, sinks: StyleRules) -> SplitRecipe:
    style = f"colwise({parts})" if parts else "colwise"
    rules = {linear.name: style for linear in projections.colwise}
    rules[projections.rowwise.name] = "rowwise"
    return SplitRecipe(name=name, rules={**rules, **sinks})


def _parts(linear: Linear, rowwise: Linear, config: Mapping[str, Any]) -> list[str]:
    """The sizes of query, key and value in a packed weight, as expressions of the configuration."""
    query, rest = rowwise.inputs, linear.outputs - rowwise.inputs
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


def _gathered(projections: ProjectionGroup) -> SplitRecipe:
    """Sharded weights and gathered outputs: right for any code between the linears."""
    rules = {linear.name: "colwise(-> replicate)" for linear in projections.linears}
    rules[projections.rowwise.name] = "rowwise"
    note = "its code needs full outputs: the weights are sharded, the outputs are gathered"
    return SplitRecipe(name="gathered", rules=rules, note=note)


# Experts -----------------------------------------------------------------------------------------


def experts_choice(name: str, module: Module) -> SplitChoice:
    """A module with the weights of all its experts."""
    recipes = []
    for packed in (True, False):
        arguments = _arguments(module, packed=packed)
        if arguments:
            rule = f"experts({', '.join(f'{n} = {v}' for n, v in arguments.items())})"
            recipe = SplitRecipe(name="experts", rules={name: rule})
            if recipe not in recipes:
                recipes.append(recipe)
    recipes.append(SplitRecipe(name="whole", rules={}))
    return SplitChoice(name=name, members=(name,), recipes=recipes)


def _arguments(module: Module, *, packed: bool) -> dict[str, str]:
    """How each parameter of fused experts is sharded, by the sizes that it shares with the others.

    Up projections are sharded on their intermediate output dim, down projections on that input dim.
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
