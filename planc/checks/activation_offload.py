"""PL473: activations that should wait on the CPU, in a graph that torch.compile has planned."""

from __future__ import annotations

from planc.diagnostic import Label, Sink
from planc.model.facts import Facts
from planc.plan.ir import Plan


def activation_offload(plan: Plan, facts: Facts, sink: Sink) -> None:
    """What a compiled graph keeps for backward its compiler decides; the hooks that move saved
    tensors to the CPU are not part of it.
    """
    for rule in plan.checkpoint:
        if not rule.offload:
            continue
        for compiled in plan.compile:
            if rule.modules.within(compiled.modules) or compiled.modules.within(rule.modules):
                sink.error(
                    "PL473",
                    f"`{rule.modules}` cannot offload what `{compiled.modules}` compiles",
                    Label(span=rule.origin, text="its activations go to the CPU"),
                    Label(span=compiled.origin, text="compiled"),
                    help="take `offload = cpu` away, or compile other modules",
                )
