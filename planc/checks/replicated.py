"""PL204: parameters that tensor parallelism leaves replicated."""

from planc.checks.queries import active, ranks
from planc.diagnostics.diagnostic import Sink
from planc.infer.apply_adapters import styles
from planc.ir.experts import expert_styles
from planc.ir.nodes import Plan, TensorRule
from planc.ir.parameter_owners import owned_modules
from planc.model.facts import Facts, Modules

_SMALL = 1
"""The share, in percent, below which replicated parameters are not reported."""


def _splitting(plan: Plan) -> tuple[TensorRule, ...]:
    return (*active(plan), *(r for r in styles(plan) if ranks(plan, r) > 1))


def replicated_parameters(plan: Plan, facts: Facts) -> list[tuple[int, str]] | None:
    """The numbers of elements of parameters that every rank of the tensor axis holds in full, with
    their names as of `Modules`; None where no rule splits anything.
    """
    rules = _splitting(plan)
    all_rules = (*rules, *expert_styles(plan))
    if not rules or "tensor" in plan.broken:
        return None
    whole: list[tuple[int, str]] = []
    shared = _shared_modules(rules[0].axis, plan, facts)
    for modules in facts.model.below():
        for parameter in modules.module.parameters:
            splits = [rule.modules for rule in all_rules if rule.split(parameter)]
            left = (rest for p in modules.parts_outside(shared) for rest in p.subtract(splits))
            whole.extend((parameter.numel * len(part), f"{part}.{parameter.name}") for part in left)
    return whole


def unsplit_parameters(plan: Plan, facts: Facts, sink: Sink) -> None:
    """An info: the share of parameters that every rank of the tensor axis holds in full, unless it
    is below `_SMALL`, as that of norms.
    """
    whole, rules = replicated_parameters(plan, facts) or [], _splitting(plan)
    kept = sum(count for count, _ in whole)
    share = 100 * kept / facts.root.count
    if share < _SMALL:
        return
    percent = f"{share:.0f}%" if share >= 10 else f"{share:.2g}%"
    largest = sorted(whole, reverse=True)[:3]
    names = ", ".join(f"{name} {count:,}" for count, name in largest)
    sink.info(
        "PL204",
        f"{percent} of the parameters are replicated over {rules[0].axis} = "
        f"{ranks(plan, rules[0])}",
        facts=[f"the largest: {names}"],
    )


def _shared_modules(axis: str, plan: Plan, facts: Facts) -> list[Modules]:
    section = plan.fsdp
    if section is None or not any(section.extra_axes(part) for part in section.parts):
        return []
    placements = ((o.modules, o.spread or o.unit) for o in owned_modules(plan, facts))
    return [m for m, part in placements if part and axis in section.axes(part)[0]]
