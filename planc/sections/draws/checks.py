"""PL670 and PL671: random numbers in training, and layers that are skipped at random."""

from collections.abc import Iterator, Sequence

from planc.checks.queries import active, axis_label, ranks
from planc.diagnostics.diagnostic import Sink, one_of
from planc.ir.nodes import Plan, TensorRule
from planc.ir.random_numbers import apart_axes, drawing_fields, split_axes
from planc.model.facts import Facts
from planc.model.randomness import layer_drop_fields, spec_augment_fields
from planc.ops.styles import Custom


def check(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Reports random numbers that ranks must share or not share (PL670), and layer drop (PL671)."""
    rules = active(plan) if "tensor" not in plan.broken else ()
    fields, masks = drawing_fields(plan, facts), spec_augment_fields(facts)
    apart = [a for a in plan.mesh.axes if a.name in apart_axes(plan)]
    if (rules or apart) and (fields or masks):
        drawn = f"; SpecAugment masks come from numpy ({', '.join(masks)})" if masks else ""
        shared = rules[0].axis if rules else apart[0].name
        seed = f"the script must give numpy the same seed on all ranks of {shared}"
        sink.info(
            "PL670",
            f"training uses random numbers: {', '.join(fields)}{drawn}",
            *([axis_label(plan, rules[0])] if rules else []),
            *(axis.label for axis in apart),
            facts=[*(_how(plan, rules) if rules else ()), *_rng_notes(plan), *[seed] * bool(masks)],
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
    """Yields the axes along which ranks always use different random numbers."""
    if axes := apart_axes(plan):
        named = one_of(axes, last="and")
        yield (
            f"ranks along {named} hold different layers or tokens: they use different random "
            "numbers, even if the script gives them one seed; layout flow does not compare these"
        )


def _how(plan: Plan, rules: Sequence[TensorRule]) -> Iterator[str]:
    """Yields how the ranks of a tensor axis share random numbers, and how layout flow checks it."""
    axis, count, axes = rules[0].axis, ranks(plan, rules[0]), split_axes(plan)
    if len(axes) > 1:
        yield (
            f"the ranks of {one_of(axes, last='and')} use the same random numbers, even for "
            "different shards: planc has an RNG state per rank for one tensor axis only"
        )
        return
    yield (
        f"`apply` gives the {count} ranks of {axis} one RNG state; for shards of activations each "
        "rank uses different numbers"
    )
    own = dict.fromkeys(f"`{r.modules}`" for r in rules if isinstance(r.style, Custom))
    if own:
        some = one_of(own, last="and")
        yield f"whether {some} return shards is unknown: the RNG state does not change there"
    yield (
        "layout flow compares a step with a single process that reuses the random numbers of the "
        "ranks; `planc verify` runs without dropout"
    )
