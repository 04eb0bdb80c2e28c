"""Suggests other lines of the plan that the estimate shows to be better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planc.diagnostics.diagnostic import Sink
from planc.ops.base import AxisRole
from planc.sections import Hook
from planc.tools.estimate.answer import Answer
from planc.tools.estimate.memory import GIB
from planc.tools.estimate.step import estimate
from planc.tools.estimate.workload import Layer, Recompute

MATTERS = 0.1
"""The share of a step's time that is worth a finding."""

NOTABLE = 0.05
"""The share of the usable memory that one unit may take in float32."""

LARGE = 0.25
"""The share of the usable memory that one unit may take while it is gathered and reduced."""

_ADVISE = Hook[Callable[[Answer, Sink], None]]("estimate", "advise")


def advise(found: Answer, sink: Sink) -> None:
    """Reports PL714 to PL716, PL720 and PL721, each with what it follows from."""
    if not found.counted:
        return
    _tensor_across_nodes(found, sink)
    if found.estimate.fits:
        _needless_checkpoints(found, sink)
    _large_unit(found, sink)
    _float32_gathers(found, sink)
    _slow_offload(found, sink)
    for advise_section in _ADVISE.find_all(found.plan.sections):
        advise_section(found, sink)


def _tensor_across_nodes(found: Answer, sink: Sink) -> None:
    group, time = found.work.tensor, found.estimate.time
    share = time.spent.tensor_collectives / time.seconds
    if not group.crosses(found.hardware.ranks_per_node) or share < MATTERS:
        return
    inside = group.in_node(found.hardware.ranks_per_node)
    axes = found.plan.mesh.of_role(AxisRole.TENSOR)
    sink.warning(
        "PL714",
        f"{group.name} = {group.size} leaves the node: its collectives take "
        f"{time.spent.tensor_collectives:.2f} of {time.seconds:.2f} s",
        *(a.origin for a in axes[:1]),
        facts=(f"{inside} ranks of the group are in a node of {found.hardware.name}",),
        help=f"make it {inside} or less; `planc suggest` compares the meshes",
    )


def _needless_checkpoints(found: Answer, sink: Sink) -> None:
    """Reports PL715 if the step fits without recomputation and is faster."""
    if not found.plan.checkpoint_rules:
        return
    kept = found.work.map_layers(lambda layer, _: replace(layer, recompute=Recompute.NONE))
    other = estimate(kept, found.hardware, found.stack)
    less = 1 - other.time.seconds / found.estimate.time.seconds
    if other.fits and less >= MATTERS / 2:
        sink.warning(
            "PL715",
            f"checkpointing costs {less:.0%} of the time, and the memory for what it drops is free",
            found.plan.checkpoint_rules[0].origin,
            facts=(
                f"without it {other.fullest.peak / GIB:.1f} of the usable "
                f"{other.usable / GIB:.1f} GiB, {other.time.seconds:.3f} s a step",
            ),
            help="remove it, or keep what is expensive: `ops(save = [attention, matmul])`",
        )


def _float32_gathers(found: Answer, sink: Sink) -> None:
    """Units in float32 that take notable memory, where the accelerator computes in 16 bits."""
    work, section = found.work, found.plan.fsdp
    if section is None or work.data.size == 1:
        return
    for layer in {x.name: x for stage in work.stages for x, _ in stage}.values():
        width = layer.width or work.precision.compute
        size = 4 * layer.parameters
        if width == 4 and size > NOTABLE * found.estimate.usable:
            sink.warning(
                "PL720",
                f"{layer.name} is gathered in float32: {size / GIB:.1f} GiB at a time",
                layer.origin or section.origin,
                facts=(f"{layer.parameters:,} elements x 4 bytes, of which bf16 needs half",),
                help="add `precision(param = bf16, reduce = fp32)` to the section or to its unit",
            )
            return


def _slow_offload(found: Answer, sink: Sink) -> None:
    """Reports copies to the host, and an optimizer there, that take much of the step."""
    work, plan = found.work, found.plan
    lines = [rule.origin for rule in plan.checkpoint_rules if rule.hosts]
    lines += [rule.origin for rule in plan.optimizer if rule.op.offload]
    if plan.fsdp and plan.fsdp.offload:
        lines.insert(0, plan.fsdp.offload.origin)
    if not lines:
        return

    def home(layer: Layer, _: int) -> Layer:
        here = replace(
            layer, offloaded=False, away=0, kept_selective=layer.kept_selective + layer.away
        )
        return replace(here, states=layer.states + layer.hosted, hosted=0)

    kept = replace(work.map_layers(home), offload=False)
    other = estimate(kept, found.hardware, found.stack)
    less = 1 - other.time.seconds / found.estimate.time.seconds
    if less < MATTERS:
        return
    needs = f"{other.fullest.peak / GIB:.1f} of the usable {other.usable / GIB:.1f} GiB"
    sink.warning(
        "PL721",
        f"offloading takes {less:.0%} of the time"
        + (", and the memory for what it moves is free" if other.fits else ""),
        *lines[:1],
        facts=(f"without it {needs}, {other.time.seconds:.3f} s a step",),
        help="remove it" if other.fits else "shard over more ranks in its place",
    )


def _large_unit(found: Answer, sink: Sink) -> None:
    fullest, room = found.estimate.fullest, found.estimate.usable
    names = ("gathered units", "gradients before reduction", "gradients being reduced")
    items = [item for item in fullest.largest.items if item.name in names]
    size = sum(item.size for item in items)
    layers = [layer for stage in found.work.stages for layer, _ in stage]
    largest = max(layers, key=lambda layer: layer.parameters)
    if size > LARGE * room:
        sink.warning(
            "PL716",
            f"units take {size / GIB:.1f} of {room / GIB:.1f} GiB while gathered and reduced",
            *([largest.origin] if largest.origin else []),
            facts=tuple(f"{i.name}: {i.size / GIB:.1f} GiB = {i.how}" for i in items),
            help="make smaller modules units, such as the MLP or the experts of each block",
        )
