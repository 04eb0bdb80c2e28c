"""The plan and the model of the ranks at one place of a pipeline: what their stages hold."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from planc.model.facts import Facts, Module, Modules
from planc.model.indices import Indices
from planc.model.module_table import Path, divided
from planc.ops.pipeline import Pipeline, stages_of_rank
from planc.plan import ir
from planc.source import Span


def of_ranks(plan: ir.Plan, facts: Facts) -> Iterator[tuple[ir.Plan, Facts]]:
    """The plan and the facts of the ranks at each place of the pipeline, in order.

    The modules of other stages have no parameters there, and no rule acts on them.
    """
    if plan.pipeline is None:
        yield plan, facts
        return
    op = plan.pipeline.op
    ranks = plan.mesh.size(op.axis)
    for rank in range(ranks):
        own = stages_of_rank(op.schedule, rank, ranks, op.stages)
        mine = replace(op, own=own)
        gone = tuple(elsewhere(mine, facts))
        left = plan.placed(partial(_outside, gone))
        rule = replace(plan.pipeline, op=mine)
        yield replace(left, pipeline=rule), _facts_without(facts, gone)


def elsewhere(op: Pipeline, facts: Facts) -> Iterator[Modules]:
    """The modules that other ranks hold."""
    ends = op.last or 0 in op.own
    for stage, modules in ((0, op.inputs), (op.stages - 1, op.outputs)):
        if stage not in op.own:
            yield from (part for m in modules for part in m.outside(op.shared if ends else ()))
    kept = Indices(0)
    for stage in op.own:
        kept |= Indices.of(range(*op.bounds[stage : stage + 2]))
    for child in op.blocks.module.children:
        if child.indices is not None and (rest := child.indices - kept):
            yield Modules((*op.blocks.path, rest), child.module)


def _outside(gone: tuple[Modules, ...], modules: Modules, _: Span) -> tuple[Modules, ...]:
    return modules.outside(gone)


def _facts_without(facts: Facts, gone: tuple[Modules, ...]) -> Facts:
    left = (tuple(n for n in names if facts.find(n)[0].outside(gone)) for names in facts.ties)
    root = _without(facts.root, [(m.path, m) for m in gone])
    return replace(facts, root=root, ties=tuple(group for group in left if len(group) > 1))


def _without(at: Module, gone: list[tuple[Path, Modules]]) -> Module:
    """A module in which those of other ranks have no parameters."""
    if not gone:
        return at
    if any(not path for path, _ in gone):
        return _emptied(at)
    parts = divided(at, gone)
    return replace(at, children=tuple(replace(c, module=_without(c.module, g)) for c, g in parts))


def _emptied(at: Module) -> Module:
    children = tuple(replace(c, module=_emptied(c.module)) for c in at.children)
    return replace(at, parameters=(), children=children)
