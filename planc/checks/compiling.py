"""PL430 to PL432, PL434, PL435, PL473, PL670 to PL672: checkpoints, torch.compile, randomness."""

from collections.abc import Iterator, Sequence

from planc.checks.queries import active, axis_label, ranks, report_nested
from planc.diagnostics.diagnostic import Label, Sink, one_of
from planc.ir.nodes import Plan, TensorRule
from planc.ir.random_numbers import apart_axes, drawing_fields, split_axes
from planc.model.facts import Facts
from planc.model.indices import Indices
from planc.model.randomness import layer_drop_fields, spec_augment_fields
from planc.ops.compile import Compile
from planc.ops.styles import Colwise, Custom, Input, Replicate, Rowwise, Shard, Style


def nested_compilations(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A compiled module inside another one would be compiled twice."""
    report_nested(plan.compile, "PL431", "compiled", "keep one of the two", sink)


def _first_block(rule: Compile) -> bool:
    """Whether the first block of a list, which consumes the embedding, is compiled as a whole.

    The gradient was right where only later blocks or only parts of blocks were compiled.
    """
    last = rule.modules.path[-1] if rule.modules.path else ""
    return isinstance(last, Indices) and 0 in last


def compile_embedding_gradient(plan: Plan, facts: Facts, sink: Sink) -> None:
    """torch 2.13 loses the gradient of a vocabulary-parallel embedding in this arrangement.

    Observed on four gloo processes with the aot_eager and inductor backends: the forward pass and
    all other gradients are right, and the embedding's gradient is 0. Under sequence parallelism
    (the output stays a DTensor) and with a colwise embedding it is right. It is right in gemma3
    too, which scales its embeddings before the first block, but the module table does not show
    that, so gemma3 is reported as well.
    """
    first = next((r for r in plan.compile if _first_block(r)), None)
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


def compile_graph_breaks(plan: Plan, facts: Facts, sink: Sink) -> None:
    """FSDP's hooks break a graph, and fake tensors cannot index a vocabulary-parallel weight.

    Both were observed on four processes (torch 2.13), the second with and without sequence
    parallelism; a colwise embedding compiles.
    """
    for compiled in plan.compile if "compile" not in plan.broken else ():
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


def async_tensor_parallel(plan: Plan, facts: Facts, sink: Sink) -> None:
    """The compiler's pass cuts an all-gather before a matrix product, and a reduce-scatter after
    one, and leaves all-reduces alone.

    Source: torch/_inductor/fx_passes/micro_pipeline_tp.py, which matches these two patterns, and
    whose parts are equal: a dim that the ranks do not divide evenly matches nothing.
    """
    rules = active(plan) if "tensor" not in plan.broken else ()
    for compiled in plan.compile if rules else ():
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


def randomness(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Ranks of a tensor axis share activations, and ranks of an FSDP axis share layers."""
    rules = active(plan) if "tensor" not in plan.broken else ()
    fields, masks = drawing_fields(plan, facts), spec_augment_fields(facts)
    apart = [a for a in plan.mesh.axes if a.name in apart_axes(plan)]
    if (rules or apart) and (fields or masks):
        drawn = f"; SpecAugment draws masks with numpy ({', '.join(masks)})" if masks else ""
        shared = rules[0].axis if rules else apart[0].name
        numpy = [f"numpy's seed is the script's: alike on the ranks of {shared}"] if masks else []
        sink.info(
            "PL670",
            f"training draws random numbers: {', '.join(fields)}{drawn}",
            *([axis_label(plan, rules[0])] if rules else []),
            *(axis.label for axis in apart),
            facts=[*(_how(plan, rules) if rules else ()), *_rng_notes(plan), *numpy],
            help="set the seed before `apply`, or afterwards the same seed on all ranks of a "
            "tensor axis",
        )
    if skipped := layer_drop_fields(facts):
        shards = plan.fsdp is not None and plan.mesh.size(*plan.fsdp.shard) > 1
        if shards or rules:
            sink.warning(
                "PL671",
                f"training skips layers at random ({', '.join(skipped)}), and ranks that skip "
                "different layers deadlock",
                *([plan.fsdp.origin] if plan.fsdp else [rules[0].origin]),
                help="set it to 0 in the configuration, or use the same seed on all ranks",
            )


def _rng_notes(plan: Plan) -> Iterator[str]:
    if axes := apart_axes(plan):
        named = one_of(axes, last="and")
        yield (
            f"ranks along {named} hold other layers or tokens: they draw other numbers, also where "
            "a script gives them one seed; layout flow does not compare these"
        )


def _how(plan: Plan, rules: Sequence[TensorRule]) -> Iterator[str]:
    axis, count, axes = rules[0].axis, ranks(plan, rules[0]), split_axes(plan)
    if len(axes) > 1:
        yield (
            f"the ranks of {one_of(axes, last='and')} draw alike, also for different shards: "
            "planc has streams by rank for one tensor axis only"
        )
        return
    yield (
        f"`apply` gives the {count} ranks of {axis} one random state; for shards of activations "
        "each draws numbers of its own"
    )
    own = dict.fromkeys(f"`{r.modules}`" for r in rules if isinstance(r.style, Custom))
    if own:
        some = one_of(own, last="and")
        yield f"whether {some} give shards is not known: the ranks draw after it as before"
    yield (
        "layout flow compares a step with a single process that uses the numbers that the ranks "
        "drew; `planc verify` runs without dropout"
    )
