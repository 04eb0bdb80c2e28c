"""Rules that find mistakes in well-formed plans: one rule per file, run in this order.

A rule sees the whole plan and reports its findings. It draws no conclusion from what is missing
in a section that already has errors (`Plan.broken`).
"""

from collections.abc import Callable

from planc.checks.activation_offload import activation_offload
from planc.checks.adapters import adapters
from planc.checks.attention_heads import attention_heads
from planc.checks.axis_use import axis_use
from planc.checks.blocks_without_unit import blocks_without_unit
from planc.checks.colwise_rowwise_pairs import colwise_rowwise_pairs
from planc.checks.compile_embedding_gradient import compile_embedding_gradient
from planc.checks.compile_graph_breaks import compile_graph_breaks
from planc.checks.context import context
from planc.checks.cpu_offload import cpu_offload
from planc.checks.divisibility import divisibility
from planc.checks.expert_parallel import expert_parallel
from planc.checks.freezing import freezing
from planc.checks.fsdp_root import fsdp_root
from planc.checks.grouped_experts import grouped_experts
from planc.checks.ignored_parameters import ignored_parameters
from planc.checks.loss_head import loss_head
from planc.checks.megatron_fsdp import megatron_fsdp
from planc.checks.mixed_dtypes import mixed_dtypes
from planc.checks.module_parameters import module_parameters
from planc.checks.nested_checkpoints import nested_checkpoints
from planc.checks.nested_units import nested_units
from planc.checks.norm_gradients import norm_gradients
from planc.checks.optimizer_precision import optimizer_precision
from planc.checks.packed_by_name import packed_by_name
from planc.checks.packed_by_width import packed_by_width
from planc.checks.packed_parts import packed_parts
from planc.checks.partial_reshard import partial_reshard
from planc.checks.pipeline import pipeline
from planc.checks.prefetch import prefetch
from planc.checks.projection_groups import projection_groups
from planc.checks.quantization import four_bits
from planc.checks.randomness import randomness
from planc.checks.replicate_options import replicate_options
from planc.checks.sequence_layout import sequence_layout
from planc.checks.split_attributes import split_attributes
from planc.checks.spread_without_unit import spread_without_unit
from planc.checks.style_targets import style_targets
from planc.checks.tied_parameters import tied_parameters
from planc.checks.uncalled_modules import uncalled_modules
from planc.checks.unit_axes import unit_axes
from planc.checks.unreduced_gradients import unreduced_gradients
from planc.checks.unsplit_parameters import unsplit_parameters
from planc.checks.unused_precision import unused_precision
from planc.diagnostic import Sink
from planc.model.facts import Facts
from planc.plan.ir import Plan

Check = Callable[[Plan, Facts, Sink], None]

RULES: tuple[Check, ...] = (
    axis_use,
    uncalled_modules,
    style_targets,
    module_parameters,
    split_attributes,
    packed_parts,
    packed_by_name,
    packed_by_width,
    attention_heads,
    divisibility,
    grouped_experts,
    expert_parallel,
    projection_groups,
    colwise_rowwise_pairs,
    norm_gradients,
    sequence_layout,
    tied_parameters,
    loss_head,
    context,
    nested_units,
    fsdp_root,
    blocks_without_unit,
    unreduced_gradients,
    ignored_parameters,
    freezing,
    mixed_dtypes,
    optimizer_precision,
    unused_precision,
    partial_reshard,
    unit_axes,
    spread_without_unit,
    megatron_fsdp,
    replicate_options,
    cpu_offload,
    prefetch,
    nested_checkpoints,
    activation_offload,
    compile_embedding_gradient,
    compile_graph_breaks,
    adapters,
    randomness,
    four_bits,
    pipeline,
    unsplit_parameters,
)


def check(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Runs every rule and adds the findings to the sink.

    Args:
        plan: the elaborated plan, with its adapters applied.
        facts: the model that the plan was elaborated for, with the plan's adapters in it.
        sink: receives PL15x and PL16x (style targets, pairs and norms), PL18x (adapters), PL2xx
            (shapes and parameters), PL35x (axes), PL4xx (composition), PL56x (pipelines) and PL68x
            (4-bit weights).
    """
    for rule in RULES:
        rule(plan, facts, sink)
