"""PL430, PL433, PL473 and PL672: modules that cannot be recomputed, or with other numbers."""

from planc.checks.queries import report_nested
from planc.diagnostics.diagnostic import Label, Sink
from planc.ir.nodes import Plan
from planc.ir.random_numbers import drawing_fields
from planc.model.facts import Facts
from planc.ops.activation_checkpoint import Checkpoint


def check(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Reports what a recomputation cannot do, or does differently than the forward pass."""
    help = "keep one of the two, or exclude entries with `override ... : none`"
    report_nested(plan.checkpoint_rules, "PL430", "checkpointed", help, sink)
    fields = drawing_fields(plan, facts)
    for rule in plan.checkpoint_rules:
        if not rule.modules.path:
            message = "the model itself cannot be checkpointed: it has no parent module"
            help = "name its blocks, as in `model.layers.* : full`"
            sink.error("PL433", message, rule.origin, help=help)
        if rule.hosts:
            _check_offload_in_compiled(rule, plan, sink)
        if fields and not rule.preserve_rng:
            sink.warning(
                "PL672",
                f"the recomputation of `{rule.modules}` uses different random numbers than its "
                f"forward pass: {', '.join(fields)}",
                rule.origin,
                help="leave out `preserve_rng = false`, unless these modules use no random numbers",
            )


def _check_offload_in_compiled(rule: Checkpoint, plan: Plan, sink: Sink) -> None:
    """Reports compiled modules whose activations are offloaded (PL473).

    The compiler decides which activations a graph saves for backward; the saved-tensor hooks that
    move activations to the CPU are not part of the graph.
    """
    for compiled in plan.compilations:
        if rule.modules.is_within(compiled.modules) or compiled.modules.is_within(rule.modules):
            sink.error(
                "PL473",
                f"`{rule.modules}` cannot offload activations that `{compiled.modules}` compiles",
                Label(span=rule.origin, text="its activations go to the CPU"),
                Label(span=compiled.origin, text="compiled"),
                help="remove `offload = cpu`, or compile other modules",
            )
