"""Questions that several rules ask about a plan and a model: containment, units, active styles."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from planc.diagnostics.diagnostic import Label, Sink, one_of
from planc.ir.nodes import Plan, TensorRule, Unit
from planc.model.config_fields import EXPERTS
from planc.model.facts import Facts, Modules, Parameter, merge_sets
from planc.ops.contract import Side, contract
from planc.ops.phrases import together
from planc.ops.styles import PARAMETERLESS, Replicated, Shard


def ranks(plan: Plan, rule: TensorRule) -> int:
    """The number of ranks that a rule shards over."""
    return plan.mesh.size(rule.axis)


def active(plan: Plan) -> tuple[TensorRule, ...]:
    """The tensor rules with an effect: those over more than one rank."""
    return tuple(r for r in plan.tensor if ranks(plan, r) > 1)


def axis_label(plan: Plan, rule: TensorRule) -> Label:
    """The place that sets the size of the rule's axis."""
    axis = plan.mesh.axis(rule.axis)
    assert axis is not None  # a rule over an axis that is not there was reported earlier
    return axis.label


def child_rules(outer: Modules, rules: Iterable[TensorRule]) -> Iterator[TensorRule]:
    """The rules on children of the modules."""
    n = len(outer.path)
    for rule in rules:
        if len(rule.modules.path) == n + 1 and rule.modules.is_within(outer):
            yield rule


def rules_by_parent(
    facts: Facts, rules: Sequence[TensorRule]
) -> Iterator[tuple[Modules, tuple[TensorRule, ...]]]:
    """The parent modules of the rules, each set once, with the rules on their children."""
    parents = dict.fromkeys(p for rule in rules for p in facts.parents(rule.modules))
    return ((parent, tuple(child_rules(parent, rules))) for parent in parents)


def splits_output(rule: TensorRule) -> bool:
    """Whether a rule shards its module's output by features."""
    style_contract = contract(rule.style)
    return style_contract.splits is Side.OUT and _last(style_contract.gives[0].target)


def takes_split(rule: TensorRule) -> bool:
    """Whether a rule takes an input that is sharded by features."""
    style_contract = contract(rule.style)
    return style_contract.splits is Side.IN and _last(style_contract.takes[0].source)


def _last(layout: object) -> bool:
    return isinstance(layout, Shard) and layout.dim in (-1, 2)


def sharding_rules(rules: Iterable[TensorRule]) -> Iterator[TensorRule]:
    """The rules that decide how weights are sharded."""
    return (r for r in rules if not isinstance(r.style, (*PARAMETERLESS, Replicated)))


def unit_of(plan: Plan, modules: Modules) -> Unit | None:
    """The innermost unit that contains all of the modules."""
    assert plan.fsdp is not None
    around = [
        (len(member.path), -i, unit)
        for i, unit in enumerate(plan.fsdp.units)
        for member in unit.members
        if holds(member, modules)
    ]
    return max(around, key=lambda item: item[:2])[2] if around else None


def holds(outer: Modules, modules: Modules) -> bool:
    """Whether every one of the modules is, or is inside, one of the outer modules."""
    return not modules.parts_outside([outer])


def looked_up(modules: Modules, parameter: Parameter, facts: Facts) -> str | None:
    """Names a weight whose rows are looked up or chosen one by one; None for any other.

    Source: Jordan et al., Muon: embeddings and heads are stepped by AdamW; torchtitan's fp8 keeps
    heads and routers in their precision.
    """
    rows, name = parameter.shape[0], str(modules)
    if modules.module.kind == "embedding":
        return "an embedding"
    if len(parameter.shape) != 2 or name.endswith("_proj"):
        return None
    if rows in _field_values(facts.config, ("vocab_size",)) and "[" not in name:
        return "the head"
    if rows > 1 and rows in _field_values(facts.config, EXPERTS):
        return "a router"
    return None


def _field_values(config: Mapping[str, Any], fields: Collection[str]) -> set[Any]:
    """The values of fields of a configuration, and of those in it, such as of a language model."""
    inner = (_field_values(value, fields) for value in config.values() if isinstance(value, dict))
    return {config[field] for field in fields if isinstance(config.get(field), int)}.union(*inner)


def several(sets: Iterable[Modules], ending: str = "") -> str:
    """Sets of modules as one text, `model.layers[0:26].self_attn.{q,k}_norm` in backticks: sets
    that differ in their indices or their last name only are written once. With `ending`, such as
    `.weight`, after each.
    """
    return one_of(
        (f"`{path}{ending}`" for path in together(map(str, merge_sets(sets)))), last="and"
    )


def divisors(number: int, largest: int | None = None) -> tuple[int, ...]:
    """The divisors of a number that are not above a limit, in order."""
    pairs = {d for n in range(1, int(number**0.5) + 1) if number % n == 0 for d in (n, number // n)}
    return tuple(sorted(d for d in pairs if d <= (largest or number)))


def report_nested(rules: Sequence[Any], code: str, word: str, help: str, sink: Sink) -> None:
    """Reports each rule on modules inside those of another one.

    Args:
        rules: nodes with modules and an origin.
        word: `checkpointed` or `compiled`.
    """
    for inner in rules:
        for outer in rules:
            if inner.modules.deeper(outer.modules):
                sink.error(
                    code,
                    f"`{inner.modules}` is {word}, and so is `{outer.modules}`, which contains it",
                    Label(span=inner.origin, text="inside"),
                    Label(span=outer.origin, text="contains it"),
                    help=help,
                )
