"""PL434, PL435: what torch.compile cannot trace into one graph, or cannot trace at all."""

from planc.checks.queries import active, axis_label
from planc.diagnostic import Label, Sink
from planc.model.facts import Facts
from planc.ops.styles import Rowwise
from planc.plan.ir import Plan


def compile_graph_breaks(plan: Plan, facts: Facts, sink: Sink) -> None:
    """FSDP's hooks break a graph, and fake tensors cannot index a vocabulary-parallel weight.

    Both were observed on four processes (torch 2.13), the second with and without sequence
    parallelism; a colwise embedding compiles.
    """
    for compiled in plan.compile if "compile" not in plan.broken else ():
        for unit in plan.fsdp.units if plan.fsdp and compiled.fullgraph else ():
            for member in unit.members:
                deeper = len(member.path) > len(compiled.modules.path)
                if deeper and member.module.count and member.within(compiled.modules):
                    sink.error(
                        "PL434",
                        f"`{compiled.modules}` cannot be one graph: it contains the unit "
                        f"`{member}`",
                        Label(span=compiled.origin, text="fullgraph"),
                        Label(span=unit.origin, text="its hooks break the graph"),
                        help="remove `fullgraph = true`, or make the unit as large as the graph",
                    )
        for rule in active(plan):
            rowwise = isinstance(rule.style, Rowwise) and rule.modules.module.kind == "embedding"
            if rowwise and rule.modules.within(compiled.modules):
                sink.error(
                    "PL435",
                    f"torch cannot compile `{rule.modules}` while it is rowwise",
                    Label(span=compiled.origin, text=f"compiles `{compiled.modules}`"),
                    Label(span=rule.origin, text="shards the vocabulary"),
                    axis_label(plan, rule),
                    help="compile the blocks only, as in `model.layers.* : block`",
                )
