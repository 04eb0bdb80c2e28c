"""PL431, PL432 and PL434 to PL436: modules that torch cannot compile as the plan says."""

from planc.checks.queries import active, axis_label, report_nested
from planc.diagnostics.diagnostic import Label, Sink, one_of
from planc.ir.nodes import Plan
from planc.model.facts import Facts
from planc.model.indices import Indices
from planc.ops.styles import Colwise, Input, Replicate, Rowwise, Shard, Style
from planc.sections.compile.ops import Compile


def check(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Reports what torch cannot compile, or compiles to something else."""
    report_nested(plan.sections["compile"], "PL431", "compiled", "keep one of the two", sink)
    _embedding_gradient(plan, sink)
    _graph_breaks(plan, sink)
    _async_tensor_parallel(plan, sink)


def _first_block(rule: Compile) -> bool:
    """Whether the first block of a list, which consumes the embedding, is compiled as a whole.

    The gradient was right where only later blocks or only parts of blocks were compiled.
    """
    last = rule.modules.path[-1] if rule.modules.path else ""
    return isinstance(last, Indices) and 0 in last


def _embedding_gradient(plan: Plan, sink: Sink) -> None:
    """torch 2.13 loses the gradient of a vocabulary-parallel embedding in this arrangement.

    Observed on four gloo processes with the aot_eager and inductor backends: the forward pass and
    all other gradients are right, and the embedding's gradient is 0. Under sequence parallelism
    (the output stays a DTensor) and with a colwise embedding it is right. It is right in gemma3
    too, which scales its embeddings before the first block, but the module table does not show
    that, so gemma3 is reported as well.
    """
    first = next((r for r in plan.sections["compile"] if _first_block(r)), None)
    if first is None:
        return
    for rule in active(plan):
        style = rule.style
        if rule.modules.module.kind != "embedding" or not isinstance(style, Rowwise):
            continue
        if style.local and isinstance(style.output, Replicate):
            sink.error(
                "PL432",
                f"torch loses the gradient of `{rule.modules}` where compiled blocks follow it",
                Label(span=rule.origin, text="its output is a sum over the ranks"),
                Label(span=first.origin, text="compiled"),
                facts=["torch 2.13: the embedding's gradient is 0, all others are right"],
                help="use sequence parallelism (`rowwise(-> shard(1), local = false)`), or "
                "`colwise(-> replicate)` where the embedding is not tied",
            )


def _graph_breaks(plan: Plan, sink: Sink) -> None:
    """FSDP's hooks break a graph, and fake tensors cannot index a vocabulary-parallel weight.

    Both were observed on four processes (torch 2.13), the second with and without sequence
    parallelism; a colwise embedding compiles.
    """
    for compiled in plan.sections["compile"] if "compile" not in plan.broken else ():
        for unit in plan.fsdp.units if plan.fsdp and compiled.fullgraph else ():
            for member in unit.members:
                if member.module.count and member.deeper(compiled.modules):
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
            if rowwise and rule.modules.is_within(compiled.modules):
                sink.error(
                    "PL435",
                    f"torch cannot compile `{rule.modules}` while it is rowwise",
                    Label(span=compiled.origin, text=f"compiles `{compiled.modules}`"),
                    Label(span=rule.origin, text="shards the vocabulary"),
                    axis_label(plan, rule),
                    help="compile the blocks only, as in `model.layers.* : block`",
                )


def _async_tensor_parallel(plan: Plan, sink: Sink) -> None:
    """The compiler's pass cuts an all-gather before a matrix product, and a reduce-scatter after
    one, and leaves all-reduces alone.

    Source: torch/_inductor/fx_passes/micro_pipeline_tp.py, which matches these two patterns, and
    whose parts are equal: a dim that the ranks do not divide evenly matches nothing.
    """
    rules = active(plan) if "tensor" not in plan.broken else ()
    for compiled in plan.sections["compile"] if rules else ():
        if not compiled.async_tp:
            continue
        label = Label(span=compiled.origin, text="async_tp")
        own = [r for r in rules if r.modules.is_within(compiled.modules)]
        if len(compiled.async_tp) > 1:
            axes = one_of(compiled.async_tp, last="and")
            message = f"torch overlaps the collectives of one axis, and the styles use {axes}"
            sink.error("PL436", message, label, help="remove `async_tp`, or one of the axes")
        elif not any(_along_sequence(r.style) for r in own):
            sink.error(
                "PL436",
                f"no style in `{compiled.modules}` gathers or scatters a sequence: there is no "
                "collective that the compiler could overlap",
                label,
                facts=["an all-reduce is not cut into parts"],
                help="use sequence parallelism, or remove `async_tp`",
            )


def _along_sequence(style: Style) -> bool:
    """Whether a style's matrix product follows an all-gather, or precedes a reduce-scatter."""
    match style:
        case Colwise(input=layout) | Rowwise(output=layout):
            return isinstance(layout, Shard)
        case Input():
            return any(
                isinstance(c.source, Shard) and c.target == Replicate() for c in style.changes
            )
    return False
