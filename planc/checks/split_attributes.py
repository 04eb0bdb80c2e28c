"""PL677, PL678: attributes that a module does not have, or that do not divide."""

from __future__ import annotations

from planc.checks.queries import axis_label, legal, ranks
from planc.diagnostic import Label, Sink, nearest, one_of
from planc.model.facts import Facts
from planc.ops.styles import Attributes
from planc.plan.ir import Plan, TensorRule


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
    own = [n for n, _ in module.facts]
    there = one_of((f"`{n}` = {v:,}" for n, v in module.facts), last="and") if own else "none"
    close = nearest(name, own)
    sink.error(
        "PL677",
        f"`{rule.modules}` has no attribute `{name}` to split",
        rule.origin,
        facts=[f"it is a {module.cls}; its integer attributes that count features: {there}"],
        help=f"did you mean `{close[0]}`?"
        if close
        else "name the attribute by which its code splits features",
    )
