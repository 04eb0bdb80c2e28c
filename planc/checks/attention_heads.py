"""PL201: attention heads that do not divide by the size of the tensor axis."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from planc.checks.queries import (
    active,
    around,
    axis_label,
    legal,
    ranks,
    splits_output,
    takes_split,
)
from planc.diagnostic import Label, Sink, one_of
from planc.model.facts import Facts, Modules
from planc.ops.styles import Colwise, Rowwise
from planc.plan.ir import Plan, TensorRule
from planc.source import Span


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """A projection whose output features are heads."""

    rule: TensorRule
    name: str
    count: int


def attention_heads(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Attention reads `head_dim` features as one head, so each rank must hold whole heads.

    transformers writes `view(..., -1, head_dim)` and keeps the whole model's number of key/value
    groups, so both query heads and key/value heads must divide. Otherwise the forward pass fails in
    that view, or each rank pairs the wrong heads.
    """
    found: dict[tuple[HeadSplit, ...], list[Modules]] = {}
    for parent, own in around(facts, active(plan)):
        size = parent.module.fact("head_dim")
        if size:
            found.setdefault(tuple(_splits(own, size)), []).append(parent)
    for splits, attentions in found.items():
        _attention(_together(attentions), splits, plan, facts, sink)


def _together(modules: list[Modules]) -> Modules:
    """Attention modules with the same projections as one set, whatever else differs in them."""
    first, *rest = modules
    for other in rest:
        first = first.union(other) or first
    return first


def _splits(rules: tuple[TensorRule, ...], size: int) -> Iterator[HeadSplit]:
    """The projections among the rules that are sharded by heads of `size` features."""
    for rule in rules:
        shape = next((p.shape for p in rule.modules.module.parameters if p.name == "weight"), ())
        if len(shape) != 2 or rule.modules.module.kind != "linear":
            continue
        if not isinstance(rule.style, Colwise | Rowwise):
            continue
        features = shape[0] if splits_output(rule) else shape[1] if takes_split(rule) else 0
        name = str(rule.modules.path[-1])
        for part in dict.fromkeys(_parts(rule, features)):
            if part and part % size == 0:
                yield HeadSplit(rule, name, part // size)


def _parts(rule: TensorRule, features: int) -> tuple[int, ...]:
    """The number of features of each projection that a weight holds."""
    assert isinstance(rule.style, Colwise | Rowwise)
    parts = rule.style.parts
    return parts if isinstance(parts, tuple) else (features // parts,)


def _attention(
    parent: Modules, splits: tuple[HeadSplit, ...], plan: Plan, facts: Facts, sink: Sink
) -> None:
    bad = sorted((s for s in splits if s.count % ranks(plan, s.rule)), key=lambda s: s.count)
    if not bad:
        return
    fewest = bad[0]
    axis = fewest.rule.axis
    common = gcd(*(s.count for s in splits))
    outer = [s for s in splits if splits_output(s.rule)] or list(splits)
    labels: dict[Span, Label] = {}
    for split in bad:  # projections of one rule share a mark
        label = Label(span=split.rule.origin, text=f"{split.name} is split by head")
        labels.setdefault(split.rule.origin, label)
    sink.error(
        "PL201",
        f"{fewest.count} {_kind(fewest, outer)}heads of `{parent}` cannot be split over "
        f"{axis} = {ranks(plan, fewest.rule)}",
        *labels.values(),
        axis_label(plan, fewest.rule),
        facts=_facts(parent, outer, facts),
        help=f"{axis} can be {one_of(map(str, legal(common, most=common)))} for this model",
    )


def _kind(fewest: HeadSplit, splits: list[HeadSplit]) -> str:
    """`key/value ` where the projection has fewer heads than another one, else an empty text."""
    most = max(s.count for s in splits)
    return "key/value " if fewest.count < most else "attention "


def _facts(parent: Modules, splits: list[HeadSplit], facts: Facts) -> list[str]:
    told = [f"head_dim = {parent.module.fact('head_dim')}  ({parent.module.cls})"]
    for field in ("num_attention_heads", "num_key_value_heads", "n_head"):
        value = facts.config.get(field)
        if isinstance(value, int):
            told.append(f"{field} = {value}  ({facts.source(field)})")
    counts = ", ".join(f"{s.name} {s.count}" for s in splits)
    return [*told, f"heads by projection: {counts}"]
