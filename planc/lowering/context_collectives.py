"""The collectives of context parallelism in a step."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from planc.lowering.step import EXCHANGE, GATHER, SCATTER, SEND, During, Sent, Step, again
from planc.model.patches import ALONE, outputs_of
from planc.ops.base import AxisRole
from planc.ops.context import Attend, ContextParallel, KeysOp


def context_collectives(op: ContextParallel, step: Step) -> Iterator[Sent]:
    """Yields what attention and states exchange, and what masks need to know of the tokens of all
    ranks.
    """
    if op.patches:
        yield from _of_patches(op, step)
        return
    repeats = _repeats(step)
    template = Sent(
        word=op.WORD, where="positions", kind=GATHER, axes=(op.axis,), times=0, size=None
    )
    stages, blocks = attending(step)
    facts = step.tokens and 8 * step.tokens * step.lowered.sequence_parts
    yield replace(template, times=step.passes * stages, size=facts)
    template = replace(
        template, during=During.FORWARD, where="keys and values", times=step.passes * blocks
    )
    layers = [*step.lowered.find_ops(Attend)]
    most = max(0, blocks - sum(len(layer.modules) for layer in layers))
    exchanges = [*_of_attention(op, step, replace(template, times=step.passes * most), _both(step))]
    if op.states:  # what a state is depends on the family
        template = replace(
            template, kind=GATHER, where="states", times=step.passes * blocks, size=None
        )
        exchanges += [template, replace(template, kind=SCATTER, during=During.BACKWARD)]
    yield from again(iter(exchanges), repeats)


def layer_collectives(op: Attend, step: Step) -> Iterator[Sent]:
    """Yields what attention exchanges in some layers."""
    repeats = _repeats(step)
    times = step.passes * len(op.modules)
    template = Sent(
        word=op.WORD, where="keys and values", kind=GATHER, axes=(op.axis,), times=times, size=None
    )
    template = replace(template, modules=op.modules, during=During.FORWARD)
    yield from again(_of_attention(op, step, template, _both(step)), repeats)


def _repeats(step: Step) -> Fraction:
    """The share of the blocks' forward passes that backward repeats for checkpoints."""
    return Fraction(any(not op.save for op in step.lowered.checkpoint_ops))


def _both(step: Step) -> int | None:
    """The features of keys and values that a rank has of a token."""
    heads, keys, dim, split = _heads(step)
    if "kv_lora_rank" in step.config:  # keys and values have widths of their own
        widths = [step.number(f"{n}_head_dim") for n in ("qk_nope", "qk_rope", "v")]
        return heads // split * sum(n or 0 for n in widths) if heads else None
    return keys and dim and 2 * keys // split * dim


def _of_patches(op: ContextParallel, step: Step) -> Iterator[Sent]:
    """Yields the collectives of a diffusion transformer: keys and values of patches in attention,
    and the output patches. Text is replicated. Sizes that depend on its unknown length are None.
    """
    heads, _, dim, split = _heads(step)
    both = heads and dim and 2 * heads // split * dim
    modules, joint = sum(map(len, op.seeing)), op.patches != ALONE
    repeats = _repeats(step)
    template = Sent(
        word=op.WORD, where="keys and values", kind=GATHER, axes=(op.axis,), times=0, size=0
    )
    template = replace(template, times=step.passes * modules, during=During.FORWARD)
    exchanges = [*_of_attention(op, step, template, both)]
    if joint and op.attention == "ring":
        exchanges = [replace(f, size=None) for f in exchanges]
    if joint and op.ulysses_ranks(step.lowered.sequence_parts) > 1:
        text = replace(template, where="outputs of text", size=None)
        exchanges += [text, replace(text, kind=SCATTER, during=During.BACKWARD)]
    yield from again(iter(exchanges), repeats)
    size = step.size(step.lowered.sequence_parts, outputs_of(step.config))
    whole = replace(template, where="outputs of patches", times=step.passes, size=size)
    yield from (whole, replace(whole, kind=SCATTER, during=During.BACKWARD))


def _heads(step: Step) -> tuple[int | None, int | None, int | None, int]:
    """Heads of queries, and of keys and values; their width, None where these have several; and
    the ranks that have some of them each.
    """
    tensor = (a.name for a in step.lowered.axes if a.role is AxisRole.TENSOR)
    heads = step.number("num_attention_heads", "n_head")
    keys = step.number("num_key_value_heads") or heads
    dim = step.number("head_dim", "attention_head_dim") or (
        step.hidden // heads if step.hidden and heads else None
    )
    dim = None if "kv_lora_rank" in step.config else dim
    return heads, keys, dim, step.lowered.axis_size(*tensor)


def _of_attention(op: KeysOp, step: Step, template: Sent, both: int | None) -> Iterator[Sent]:
    """Yields the collectives of attention in the blocks; `both` are the features of keys and values
    that a rank has of a token.
    """
    several = op.ulysses_ranks(step.lowered.sequence_parts)
    others = step.lowered.sequence_parts // several
    if op.attention == "gather":
        both, template = step.hidden, replace(template, where="hidden states")
    nested = several > 1 < others
    if several > 1:
        yield from _of_heads(step, replace(template, among=(several, 1) if nested else None))
    template = replace(template, among=(others, several) if nested else None)
    if op.attention == "ring":  # gradients are summed in float32
        size, times = step.size(both), template.times * (others - 1)
        template = replace(template, kind=SEND, times=times, size=size)
        back = replace(template, during=During.BACKWARD)
        summed = size and size // step.width * 4
        yield from (template, back, replace(back, where="gradients", size=summed))
    elif others > 1:
        size = step.size(others, both)
        yield replace(template, size=size)
        yield replace(template, size=size, kind=SCATTER, during=During.BACKWARD)


def _of_heads(step: Step, template: Sent) -> Iterator[Sent]:
    """Yields the Ulysses all-to-alls of queries, keys, values and outputs."""
    heads, keys, dim, split = _heads(step)
    for where, n, number in (
        ("queries", 1, heads),
        (template.where, 2, keys),
        ("outputs", 1, heads),
    ):
        size = step.size(number and number // split, dim)
        each = replace(template, kind=EXCHANGE, where=where, times=template.times * n, size=size)
        yield from (each, replace(each, during=During.BACKWARD))


def attending(step: Step) -> tuple[int, int]:
    """The stages of a rank at the fullest place of a pipeline, and the blocks of these."""
    pipeline = step.lowered.pipeline
    bounds = pipeline.bounds if pipeline else (0, step.lowered.layers)
    stage_count = pipeline.stages if pipeline else 1
    stages = stage_count // (step.lowered.axis_size(pipeline.axis) if pipeline else 1)
    return stages, stages * max(len(range(*bounds[s : s + 2])) for s in range(stage_count))
