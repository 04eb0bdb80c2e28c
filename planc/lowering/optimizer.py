"""The optimizer rules -> operations: Muon's on the modules that hold its matrices."""

from collections.abc import Iterator
from dataclasses import replace

from planc.model.facts import Facts, Modules
from planc.ops.optimizer import Cut, Muon, Optimize
from planc.plan.ir import OptimizerRule, Plan
from planc.plan.optimizer_groups import cut_of, steps_of


def optimize(plan: Plan, facts: Facts) -> Iterator[Optimize]:
    """Rules of other algorithms, outer modules first; then the matrices of each `muon`."""
    for rule in plan.optimizer:
        if not isinstance(rule.op.algorithm, Muon):
            yield replace(rule.op, modules=rule.modules, origin=rule.origin)
    found: dict[tuple[Modules, OptimizerRule], list[tuple[str, Cut]]] = {}
    for step in steps_of(plan, facts):
        if step.rule is None or not isinstance(step.rule.op.algorithm, Muon):
            continue
        cut = cut_of(step, plan, facts)
        if isinstance(cut, Cut):
            found.setdefault((step.modules, step.rule), []).append((step.parameter.name, cut))
    for (modules, rule), cuts in found.items():
        assert isinstance(rule.op.algorithm, Muon)
        algorithm = replace(rule.op.algorithm, units=tuple(cuts))
        yield replace(rule.op, modules=modules, algorithm=algorithm, origin=rule.origin)
