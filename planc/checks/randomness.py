"""PL670 to PL672: random numbers in training, and who must draw the same ones."""

from collections.abc import Iterator, Sequence

from planc.checks.queries import active, axis_label, ranks
from planc.diagnostic import Sink, one_of
from planc.model.facts import Facts
from planc.model.randomness import layer_drop_fields
from planc.ops.styles import Custom
from planc.plan.ir import Plan, TensorRule
from planc.plan.random_numbers import drawing_fields, split_axes


def randomness(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Ranks of a tensor axis share activations, and ranks of an FSDP axis share layers."""
    rules = active(plan) if "tensor" not in plan.broken else ()
    fields = drawing_fields(plan, facts)
    if rules and fields:
        sink.info(
            "PL670",
            f"training draws random numbers: {', '.join(fields)}",
            axis_label(plan, rules[0]),
            facts=list(_how(plan, rules)),
            help="set the seed before `apply`, or afterwards the same seed on all ranks of a "
            "tensor axis",
        )
    for checkpoint in plan.checkpoint if fields else ():
        if not checkpoint.preserve_rng:
            sink.warning(
                "PL672",
                f"the recomputation of `{checkpoint.modules}` draws other random numbers than its "
                f"forward pass: {', '.join(fields)}",
                checkpoint.origin,
                help="leave out `preserve_rng = false`, unless these modules draw none",
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
