"""The loss section -> the head whose loss is computed in chunks of tokens."""

from dataclasses import replace

from planc.elaborate.call_arguments import Arguments
from planc.elaborate.program import Program
from planc.elaborate.rule_conflicts import Claims
from planc.elaborate.sections.tensor import modules_of, rules_of
from planc.model.logits import scale_of, softcap_of
from planc.sections.loss.ops import ChunkLoss
from planc.syntax import ast

_ACTION = "cross_entropy"
_POSITIVE = ("a positive number", lambda value: value > 0)
_FRACTION = ("a number from 0 to 1", lambda value: 0 <= value <= 1)
_TERMS = ("chunks", "scale", "softcap", "label_smoothing", "z_loss")


def read(program: Program) -> tuple[ChunkLoss, ...]:
    """The rules of the loss sections, in the plan's order; the axis of each may have one rank."""
    claims: Claims[ChunkLoss | None] = Claims(program.sink)
    for section in program.sections_named("loss"):
        # the axis that shards the vocabulary; a section without one needs none
        axes = (*section.axes, *section.replicate)
        if len(axes) > 1:
            message = "a loss section works over one axis of the mesh"
            help = "write `loss on tp {`, or `loss {` where the vocabulary is not sharded"
            program.sink.error("PL305", message, section.name_origin, help=help)
        axis = tuple(name.path for name in axes[:1])
        for rule, placed in rules_of(section, (_ACTION,), "loss", program):
            found, op = modules_of(rule, placed, program.scope), _op(rule.action, program)
            if op is not None:
                made = replace(op, axes=axis, origin=rule.origin)
                claims.add(found, "loss", made, rule.origin, override=rule.override)
    return claims.rules()


def _op(call: ast.Call, program: Program) -> ChunkLoss | None:
    """`cross_entropy(...)` on the whole model, or None after a finding.

    What the model does with its logits is read from its configuration, where the plan says nothing.
    """
    arguments = Arguments(call, program.scope, _TERMS)
    config = program.facts.config
    chunks = arguments.integer("chunks", 1)
    scale = arguments.number("scale", scale_of(config), *_POSITIVE)
    softcap = arguments.number("softcap", softcap_of(config), *_POSITIVE)
    smoothing = arguments.number("label_smoothing", 0.0, *_FRACTION)
    z_loss = arguments.number("z_loss", 0.0, *_FRACTION)
    if not arguments.done():
        return None
    if chunks < 1:
        hint = "8 keeps an eighth of the logits at a time"
        arguments.wrong(call, f"`chunks` is 1 or more, not {chunks}", hint)
        return None
    return ChunkLoss(
        modules=program.facts.model,
        chunks=chunks,
        scale=scale,
        softcap=softcap,
        label_smoothing=smoothing,
        z_loss=z_loss,
    )
