"""The collectives of context parallelism in a step."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from planc.lowering.step import EXCHANGE, GATHER, SCATTER, SEND, During, Sent, Step, again
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.base import AxisRole
from planc.ops.context import ContextParallel


def context_sends(op: ContextParallel, step: Step) -> Iterator[Sent]:
    """Yields what attention and states exchange, and what masks need to know of the tokens of all
    ranks.
    """
    tensor = (a.name for a in step.lowered.axes if a.role is AxisRole.TENSOR)
    split = step.lowered.axis_size(*tensor)
    heads = step.number("num_attention_heads", "n_head")
    keys = step.number("num_key_value_heads") or heads
    dim = step.number("head_dim") or (step.hidden // heads if step.hidden and heads else None)
    both = keys and dim and 2 * keys // split * dim
    if "kv_lora_rank" in step.config:  # keys and values have widths of their own
        dim = None
        widths = [step.number(f"{n}_head_dim") for n in ("qk_nope", "qk_rope", "v")]
        both = heads // split * sum(n or 0 for n in widths) if heads else None
    repeats = Fraction(any(not o.save for o in step.every(Checkpoint)))
    one = Sent(word=op.WORD, where="positions", kind=GATHER, axes=(op.axis,), times=0, size=None)
    stages, blocks = attending(step)
    facts = step.tokens and 8 * step.tokens * step.parts
    yield replace(one, times=step.passes * stages, size=facts)
    one = replace(one, during=During.FORWARD, where="keys and values", times=step.passes * blocks)
    found: list[Sent] = []
    if op.attention == "gather":
        size = step.size(step.parts, step.hidden)
        one = replace(one, where="hidden states", size=size)
        found = [one, replace(one, kind=SCATTER, during=During.BACKWARD)]
    elif op.attention == "all_gather":
        one = replace(one, size=step.size(step.parts, both))
        found = [one, replace(one, kind=SCATTER, during=During.BACKWARD)]
    elif op.attention == "ring":  # gradients are summed in float32
        one = replace(one, kind=SEND, times=one.times * (step.parts - 1), size=step.size(both))
        back = replace(one, during=During.BACKWARD)
        summed = one.size and one.size // step.width * 4
        found = [one, back, replace(back, where="gradients", size=summed)]
    else:
        for where, n, number in (
            ("queries", 1, heads),
            (one.where, 2, keys),
            ("outputs", 1, heads),
        ):
            size = step.size(number and number // split, dim)
            each = replace(one, kind=EXCHANGE, where=where, times=one.times * n, size=size)
            found += [each, replace(each, during=During.BACKWARD)]
    if op.states:  # what a state is depends on the family
        one = replace(one, kind=GATHER, where="states", times=step.passes * blocks, size=None)
        found += [one, replace(one, kind=SCATTER, during=During.BACKWARD)]
    yield from again(iter(found), repeats)


def attending(step: Step) -> tuple[int, int]:
    """The stages of a rank at the fullest place of a pipeline, and the blocks of these."""
    pipeline = step.lowered.pipeline
    bounds = pipeline.bounds if pipeline else (0, step.lowered.layers)
    every = pipeline.stages if pipeline else 1
    stages = every // (step.lowered.axis_size(pipeline.axis) if pipeline else 1)
    return stages, stages * max(len(range(*bounds[s : s + 2])) for s in range(every))
