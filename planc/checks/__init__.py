"""Rules that find mistakes in well-formed plans, in files by theme, run in this order.

A rule sees the whole plan and reports its findings. It draws no conclusion from what is missing
in a section that already has errors (`Plan.broken`).
"""

from collections.abc import Callable

from planc.checks import (
    adapters,
    context,
    expert_parallel,
    optimizer,
    packed_weights,
    parameters,
    pipeline,
    precision,
    replicated,
    splits,
    stated_layouts,
    targets,
    unit_options,
    units,
)
from planc.diagnostics.diagnostic import Sink
from planc.ir.nodes import Plan
from planc.model.facts import Facts
from planc.sections import IMPLIED, Hook

Check = Callable[[Plan, Facts, Sink], None]

RULES: tuple[Check, ...] = (
    targets.axis_use,
    targets.uncalled_modules,
    targets.style_targets,
    targets.module_parameters,
    targets.split_attributes,
    packed_weights.packed_parts,
    splits.attention_heads,
    splits.divisibility,
    splits.grouped_experts,
    expert_parallel.expert_parallel,
    parameters.tied_parameters,
    context.context,
    units.nested_units,
    units.fsdp_root,
    units.blocks_without_unit,
    units.unreduced_gradients,
    parameters.ignored_parameters,
    precision.mixed_dtypes,
    precision.optimizer_precision,
    precision.unscaled_gradients,
    precision.kept_in_float32,
    precision.unused_precision,
    unit_options.partial_reshard,
    unit_options.unit_axes,
    units.spread_without_unit,
    unit_options.backend,
    unit_options.replicate_options,
    unit_options.cpu_offload,
    units.prefetch,
    adapters.adapters,
    pipeline.pipeline,
    replicated.unsplit_parameters,
    optimizer.optimizer,
)
_CHECK = Hook[Check]("checks", "check")


def check(plan: Plan, facts: Facts, sink: Sink, *, bare: tuple[Plan, Facts] | None = None) -> None:
    """Runs every rule and adds the findings to the sink.

    Args:
        plan: the elaborated plan, with its adapters applied.
        facts: the model that the plan was elaborated for, with the plan's adapters in it.
        bare: both without adapters; None for a proxy model, whose stated layouts are judged with
            the real one's.
        sink: receives PL15x and PL16x (style targets, pairs and norms), PL18x (adapters), PL2xx
            (shapes and parameters), PL35x (axes), PL4xx (composition) and PL56x (pipelines).
    """
    if bare is not None:
        stated_layouts.stated_layouts(*bare, sink)
    for rule in (*RULES, *_CHECK.find_all((*IMPLIED, *plan.sections))):
        rule(plan, facts, sink)
