"""The plan and the model of each pipeline rank, with the modules of its stages alone."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from planc.diagnostics.source import NOWHERE, Span
from planc.ir import nodes as ir
from planc.model.facts import Facts, Module, Modules
from planc.model.indices import Indices
from planc.model.module_table import Path, divide_children
from planc.ops.pipeline import Pipeline, stages_of_rank


def of_ranks(plan: ir.Plan, facts: Facts) -> Iterator[tuple[ir.Plan, Facts]]:
    """The plan and the facts of each pipeline rank, in order.

    The modules of other stages have no parameters there, and no rule acts on them.
    """
    if plan.pipeline is None:
        yield plan, facts
        return
    op = plan.pipeline.op
    ranks = plan.mesh.size(op.axis)
    for rank in range(ranks):
        local_stages = stages_of_rank(op.schedule, rank, ranks, op.stages)
        mine = replace(op, own=local_stages)
        gone, kept = tuple(elsewhere(mine)), mine.shared_modules
        left = _with_kept(
            plan, plan.map_modules(partial(_remaining_modules, gone, kept)), gone, kept
        )
        rule = replace(plan.pipeline, op=mine)
        yield replace(left, pipeline=rule), _facts_without(facts, gone, kept)


def elsewhere(op: Pipeline) -> Iterator[Modules]:
    """The modules that other ranks hold; parts of them may be shared with this one."""
    for stage, modules in ((0, op.inputs), (op.stages - 1, op.outputs)):
        if stage not in op.own:
            yield from (part for m in modules for part in m.parts_outside(op.shared_modules))
    gone = Indices.all(op.bounds[-1])
    for stage in op.own:
        gone -= op.blocks_of(stage)
    yield from op.blocks.entries_in(gone)


def _remaining_modules(
    gone: tuple[Modules, ...], kept: tuple[Modules, ...], modules: Modules, _: Span
) -> tuple[Modules, ...]:
    away = (part for other in gone if (part := modules.part_inside(other)) is not None)
    shared = (both for part in away for k in kept if (both := part.part_inside(k)) is not None)
    return (*modules.parts_outside(gone), *shared)


def _with_kept(
    plan: ir.Plan, left: ir.Plan, gone: tuple[Modules, ...], kept: tuple[Modules, ...]
) -> ir.Plan:
    """The rest of a plan, with the kept modules in the groups that they are inside of: FSDP shards
    a parameter of several modules in one unit.
    """
    if plan.fsdp is None or left.fsdp is None:
        return left

    def place(unit: ir.Unit, modules: Modules, at: Span) -> tuple[Modules, ...]:
        remaining = _remaining_modules(gone, kept, modules, at)
        away = (m for other in gone if (m := modules.part_inside(other)) is not None)
        inner = (m for part in away for k in kept if (m := k.part_inside(part)) is not None)
        more = (m for m in inner if len(m.path) > len(modules.path))
        return (*remaining, *more) if unit.group else remaining

    units = (part for unit in plan.fsdp.units for part in unit.with_members(partial(place, unit)))
    return replace(left, fsdp=replace(left.fsdp, units=tuple(units)))


def _facts_without(facts: Facts, gone: tuple[Modules, ...], kept: tuple[Modules, ...]) -> Facts:
    left = (
        tuple(n for n in names if _remaining_modules(gone, kept, facts.find(n)[0], NOWHERE))
        for names in facts.ties
    )
    away = [*((m.path, False) for m in gone), *((m.path, True) for m in kept)]
    root = _without(facts.root, away)
    return replace(facts, root=root, ties=tuple(group for group in left if len(group) > 1))


def _without(at: Module, parts: list[tuple[Path, bool]], gone: bool = False) -> Module:
    """A module in which those of other ranks have no parameters.

    Args:
        at: the module.
        parts: paths from it, of modules that other ranks hold, and of those kept inside them.
        gone: whether another rank holds the module itself.
    """
    if not (parts or gone) or ((), True) in parts:
        return at
    gone = gone or ((), False) in parts
    children = tuple(
        replace(child, module=_without(child.module, below, gone))
        for child, below in divide_children(at, [part for part in parts if part[0]])
    )
    return replace(at, parameters=() if gone else at.parameters, children=children)
