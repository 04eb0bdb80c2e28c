"""PL677, PL678: attributes that a module does not have, or that do not divide."""

from planc.checks.queries import axis_label, legal, ranks
from planc.diagnostic import Label, Sink, did_you_mean, one_of
from planc.model.facts import Facts
from planc.model.module_table import INTEGER_ATTRIBUTES
from planc.ops.styles import Attributes
from planc.plan.ir import Plan, TensorRule

_SAME = ("head_dim", "num_key_value_groups", "is_sliding")
"""Attributes that are the same on every rank: the size of one head, a ratio, a flag."""

_COUNTS = tuple(name for name in INTEGER_ATTRIBUTES if name not in _SAME)


def split_attributes(plan: Plan, facts: Facts, sink: Sink) -> None:
    """`attributes` names integers that a module's own code reads, such as its number of heads.

    Model facts hold the integers that decide how features are split; only those can be named.
    """
    for rule in plan.tensor:
        for name in rule.style.names if isinstance(rule.style, Attributes) else ():
            value = rule.modules.module.fact(name)
            if value is None:
                _missing(rule, name, sink)
            elif value % ranks(plan, rule):
                over = ranks(plan, rule)
                sink.error(
                    "PL678",
                    f"`{rule.modules}` has {name} = {value:,}, which cannot be split over "
                    f"{rule.axis} = {over}",
                    Label(span=rule.origin, text="split here"),
                    axis_label(plan, rule),
                    help=f"{rule.axis} can be {one_of(map(str, legal(value, most=64)))} here",
                )


def _missing(rule: TensorRule, name: str, sink: Sink) -> None:
    module = rule.modules.module
    own = {n: v for n, v in module.facts if n in _COUNTS}
    there = one_of((f"`{n}` = {v:,}" for n, v in own.items()), last="and") or "none of them"
    sink.error(
        "PL677",
        f"`{rule.modules}` has no attribute `{name}` to split",
        rule.origin,
        facts=[
            f"the attributes that planc knows: {', '.join(_COUNTS)}",
            f"it is a {module.cls}, which has {there}",
        ],
        help=did_you_mean(name, own, "name the attribute by which its code splits features")
        if own
        else "remove the rule where its code infers the number of heads from the features",
    )
