"""The candidate splits of each part of a block, best first; a run decides which is right."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, islice

from planc.model.facts import Facts, Module, generic
from planc.model.module_table import SAME
from planc.proof.small_mesh import RANKS
from planc.tools.init.part_sizes import PartSizes
from planc.tools.init.roles import Blocks, Linear, ProjectionGroup

StyleRules = dict[str, str]
"""Styles by module name."""

_DOWN = re.compile(r"down|w2|output|wo\b", re.I)
_SUBSETS = 16
"""The most sets of integers that are tried; each takes a run."""
_SIZE = re.compile(r"dim|size|width|(^|_)d(_|$)", re.I)
"""Names in code for the size of one head, which may be the number of heads too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRecipe:
    """One way to split a part of a block.

    Args:
        rules: styles by module, none where it stays whole; planc infers the layouts.
        note: a comment for the plan.
    """

    rules: StyleRules
    note: str = ""


@dataclass(slots=True, kw_only=True)
class SplitChoice:
    """A part of the model and its candidate splits, best first.

    Args:
        name: in the block: of the rowwise linear or the experts.
        members: the modules concerned, to attribute an error to the part.
        why: what was wrong with the first recipe, with all that was added to it.
    """

    name: str
    members: tuple[str, ...]
    recipes: list[SplitRecipe]
    at: int = 0
    why: str = ""

    @property
    def recipe(self) -> SplitRecipe:
        return self.recipes[self.at]

    @property
    def top(self) -> str:
        """The child of the block that contains the part; empty if it is the block itself."""
        return self.name.rpartition(".")[0].partition(".")[0]

    @property
    def notes(self) -> dict[str, str]:
        """A comment for each module whose rules are not the best ones, or for one size only."""
        rules = self.recipe.rules
        note = ": ".join(filter(None, (self.recipe.note, self.why)))
        notes = dict.fromkeys(rules, note) if self.recipe.note else {}
        literal = (name for name, style in rules.items() if re.search(r"parts = \[\d", style))
        return notes or dict.fromkeys(literal, _LITERAL)

    def refute(self, why: str) -> None:
        """Keeps what is wrong with the recipe that is tried."""
        if not self.why or self.recipes[0].rules.items() <= self.recipe.rules.items():
            self.why = why

    @property
    def last(self) -> bool:
        return self.at == len(self.recipes) - 1


def split_choices(blocks: Blocks, facts: Facts, holders: Mapping[str, Module]) -> list[SplitChoice]:
    """The parts of the blocks that can be split; sizes are expressions over a configuration."""
    groups = blocks.projection_groups
    choices = [_projections(s, facts, holders.get(generic(s.holder))) for s in groups]
    return choices + [experts_choice(name, module) for name, module in blocks.experts.items()]


# Segments ----------------------------------------------------------------------------------------


def _projections(projections: ProjectionGroup, facts: Facts, holder: Module | None) -> SplitChoice:
    """With the parts that the code cuts outputs into, without, and with one set of keys and values
    for all heads; each with the code's own counts of heads and features, then with these divided.
    """
    rowwise, colwise = projections.rowwise, projections.colwise
    sinks = _sinks(projections, holder)
    counts = [] if sinks else _counts(projections, holder)
    narrow = [
        linear.name
        for linear in colwise
        if max(linear.parts, default=linear.outputs) < rowwise.inputs
    ]
    wide = [linear for linear in colwise if linear.name not in narrow]
    recipes: list[SplitRecipe] = []
    for split, in_parts in ((colwise, True), (colwise, False), (wide, True)):
        for divided in ((), *(counts if split is colwise and in_parts else counts[:1])):
            rules = dict(sinks)
            if divided:
                numbers = ", ".join(f"{name} = split" for name in divided)
                rules[projections.holder] = f"attributes({numbers})"
            for linear in split:
                parts = _parts(linear, projections, facts, holder, divided) if in_parts else ""
                rules[linear.name] = parts or "colwise"
            rules[rowwise.name] = "rowwise"
            recipe = SplitRecipe(rules=rules, note=_WHOLE if split is wide else "")
            if split and rules not in [other.rules for other in recipes]:
                recipes.append(recipe)
    gathered = dict.fromkeys((linear.name for linear in colwise), "colwise(-> replicate)")
    gathered[rowwise.name] = "rowwise"
    recipes += [SplitRecipe(rules=gathered, note=_GATHERED), SplitRecipe(rules={})]
    members = (
        *(linear.name for linear in colwise),
        rowwise.name,
        *filter(None, [projections.holder]),
    )
    return SplitChoice(name=rowwise.name, members=members, recipes=recipes)


_GATHERED = "the outputs are gathered, because no way to leave them sharded was proved"
_LITERAL = (
    "these parts are those of this model alone: no integer of its code or its configuration gives "
    "them at another size"
)
_WHOLE = "each rank needs all keys and values, so their weights are whole"


def _counts(projections: ProjectionGroup, holder: Module | None) -> list[tuple[str, ...]]:
    """The sets of integers of the holder that may count heads or features of all heads, the most
    likely set first: without the integers that are named like the size of one head and equal to it.
    """
    heads = {n for linear in projections.colwise for n in linear.heads}
    if holder is None or not projections.holder or not heads:
        return []
    features = {n for linear in projections.colwise for n in (*linear.parts, linear.outputs)}
    of_a_head = {linear.size for linear in projections.colwise}
    values = {
        name: value
        for name, value in holder.facts
        if value in {*heads, *features, projections.rowwise.inputs} and name not in SAME
        if value % RANKS == 0
    }
    likely = tuple(n for n, v in values.items() if not (v in of_a_head and _SIZE.search(n)))
    sizes = range(len(values), 0, -1)
    subsets = (names for size in sizes for names in combinations(values, size))
    return [*dict.fromkeys(filter(None, (likely, *islice(subsets, _SUBSETS))))]


def _sinks(projections: ProjectionGroup, holder: Module | None) -> StyleRules:
    """Rules for the attention module's own parameters with one number per head: attention sinks."""
    heads = {n for linear in projections.colwise for n in linear.heads}
    shapes = [p.shape for p in holder.parameters] if holder else []
    if not shapes or any(len(shape) != 1 or shape[0] not in heads for shape in shapes):
        return {}
    names = [p.name for p in holder.parameters] if holder else []
    return {projections.holder: f"parameters({', '.join(f'{n} = shard(0)' for n in names)})"}


def _parts(
    linear: Linear,
    projections: ProjectionGroup,
    facts: Facts,
    holder: Module | None,
    divided: tuple[str, ...],
) -> str:
    """The style that splits each part of an output; empty where the code cuts it into none."""
    parts, config = linear.parts, facts.config
    if not parts:
        return ""
    if len({*parts}) == 1:
        return f"colwise(parts = {len(parts)})"
    if facts.lacks_config:
        parent = holder if linear.name.rpartition(".")[0] == projections.holder else None
        known = PartSizes.from_facts(facts, parent, divided).expressions(linear)
        return f"colwise(parts = [{', '.join(known or map(str, parts))}])"
    heads = next((n for n in ("num_attention_heads", "n_head", "num_heads") if config.get(n)), None)
    width = next((n for n in ("hidden_size", "n_embd") if config.get(n)), None)
    of_head = f"config.{width} // config.{heads}" if width else ""
    size = "config.head_dim" if config.get("head_dim") else of_head
    query, *others = parts
    grouped = query == projections.rowwise.inputs and len(others) == 2 and others[0] == others[1]
    if not (grouped and heads and size and config.get("num_key_value_heads")):
        return ""
    kv = f"config.num_key_value_heads * {size}"
    return f"colwise(parts = [config.{heads} * {size}, {kv}, {kv}])"


# Experts -----------------------------------------------------------------------------------------


def experts_choice(name: str, module: Module) -> SplitChoice:
    """A module with the weights of all its experts."""
    recipes = []
    for packed in (True, False):
        arguments = _arguments(module, packed=packed)
        if arguments:
            rule = f"experts({', '.join(f'{n} = {v}' for n, v in arguments.items())})"
            recipe = SplitRecipe(rules={name: rule})
            if recipe not in recipes:
                recipes.append(recipe)
    recipes.append(SplitRecipe(rules={}))
    return SplitChoice(name=name, members=(name,), recipes=recipes)


def _arguments(module: Module, *, packed: bool) -> dict[str, str]:
    """The sharding of each parameter of fused experts, by the sizes that it shares with the others.

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
    layouts: dict[str, str] = {}
    for p in module.parameters:
        below = bool(_DOWN.search(p.name))
        if len(p.shape) == 3:
            dim = next((i for i in (1, 2) if p.shape[i] != width), None)
            if dim is None:
                return {}
            two = packed and not below and p.shape[dim] == 2 * inner
            layouts[p.name] = f"shard({dim}, parts = 2)" if two else f"shard({dim})"
        elif below and p.shape[-1] == width:
            layouts[p.name] = "partial"
        elif not below and len(p.shape) == 2 and p.shape[-1] in (inner, 2 * inner):
            two = packed and p.shape[-1] == 2 * inner
            layouts[p.name] = "shard(1, parts = 2)" if two else "shard(1)"
        else:
            return {}
    return layouts
