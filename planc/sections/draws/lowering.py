"""Random numbers of the ranks of a tensor axis: equal on all ranks, or different by rank."""

from collections.abc import Iterator
from dataclasses import replace

from planc.ir.nodes import Plan
from planc.ir.random_numbers import apart_axes, drawing_fields, split_axes
from planc.model.facts import Facts, Modules
from planc.model.module_table import towers
from planc.ops import styles as ir
from planc.ops.contract import contract
from planc.ops.layouts import Shard
from planc.ops.registry import AnyOp
from planc.sections.draws.ops import DrawApart, DrawByRank, SyncRng


def lower(plan: Plan, facts: Facts) -> Iterator[AnyOp]:
    """The operations of a plan whose model draws random numbers; none for other models.

    The ranks of a tensor axis work on the same activations. Ranks whose dropout masks or router
    jitter differ compute different models. Observed on four processes with different seeds (torch
    2.13): gradients of gpt2 with dropout, and of mixtral with router jitter, are wrong by more than
    1%.

    Ranks that read the same rows, and compute other layers or other tokens of them, would drop the
    same elements with one seed a data rank. Their operation follows those of the tensor axis, whose
    ranks then go on from a state of their place.
    """
    if not (fields := drawing_fields(plan, facts)):
        return
    yield from (SyncRng(axis=axis, fields=fields) for axis in split_axes(plan))
    yield from _draw_by_rank(plan, facts)
    if wide := apart_axes(plan):
        yield DrawApart(axes=wide)


def _draw_by_rank(plan: Plan, facts: Facts) -> Iterator[DrawByRank]:
    """Yields the modules at which activations become shards, and those at which they are full
    again.

    The model's code draws on what its last styled module returned, or on what a style gives to
    the module that it runs. The model begins and ends with the common stream.

    With several tensor axes, ranks draw alike: a stream by rank would need all their layouts.
    """
    yield from _draws_of_towers(plan, facts)
    axes = split_axes(plan)
    if len(axes) != 1:
        return
    adapted = [r.modules for r in plan.adapters.rules if r.adapt.dropout] if plan.adapters else []
    found = []
    for rule in plan.tensor:
        inside, after = _on_shards(rule.style)
        if not isinstance(rule.style, ir.Sequence | ir.Input):
            # only an adapter draws inside of a layer, on the layer's own input
            inside = inside if any(rule.modules.overlap(one) for one in adapted) else None
        if inside is not None or after is not None:
            own = DrawByRank(modules=rule.modules, axis=rule.axis, inside=inside, after=after)
            found.append(replace(own, origin=rule.origin))
    if any(op.inside or op.after for op in found):
        yield from found
        whole = Modules((), facts.root)
        yield DrawByRank(modules=whole, axis=axes[0], inside=False, after=False)


def _draws_of_towers(plan: Plan, facts: Facts) -> Iterator[DrawByRank]:
    """Towers whose ranks have other images each, and so draw other numbers and as many as they
    need; ranks of a context axis draw apart everywhere.
    """
    for setting in plan.images:
        if setting.divided and not setting.parts and plan.mesh.size(setting.axis) > 1:
            for modules in towers(facts):
                yield DrawByRank(
                    modules=modules,
                    axis=setting.axis,
                    inside=True,
                    after=False,
                    origin=setting.origin,
                )


def _on_shards(style: ir.Style) -> tuple[bool | None, bool | None]:
    """Whether a module of a style works on shards of activations, and whether it returns shards.

    A partial sum is no shard: dropout of a sum drops the same elements of each part.

    Returns:
        None for what the style does not change, or for arguments with different layouts.
    """
    found = contract(style)
    given = isinstance(style, ir.Input)  # it changes what the module's own code works on
    inside = {isinstance(flow.target if given else flow.source, Shard) for flow in found.takes}
    after = {isinstance(flow.target, Shard) for flow in found.gives}
    return _common(inside), _common(after)


def _common(found: set[bool]) -> bool | None:
    return next(iter(found)) if len(found) == 1 else None
