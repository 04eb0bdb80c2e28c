"""PL473: activation offloading inside a module that torch.compile traces."""

from planc.diagnostic import Label, Sink
from planc.model.facts import Facts
from planc.plan.ir import Plan


def activation_offload(plan: Plan, facts: Facts, sink: Sink) -> None:
    """The compiler decides which activations a compiled graph saves for backward; the saved-tensor
    hooks that move activations to the CPU are not part of that graph.
    """
    for rule in plan.checkpoint:
        if not rule.offload:
            continue
        for compiled in plan.compile:
            if rule.modules.within(compiled.modules) or compiled.modules.within(rule.modules):
                sink.error(
                    "PL473",
                    f"`{rule.modules}` cannot offload activations that `{compiled.modules}` "
                    "compiles",
                    Label(span=rule.origin, text="its activations go to the CPU"),
                    Label(span=compiled.origin, text="compiled"),
                    help="remove `offload = cpu`, or compile other modules",
                )
