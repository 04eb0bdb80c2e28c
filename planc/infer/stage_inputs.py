"""Places what stands before the blocks of a pipeline."""

from dataclasses import replace

from planc.diagnostics.diagnostic import Sink
from planc.ir.nodes import Plan
from planc.model.facts import Facts


def place_styled_inputs(plan: Plan, _facts: Facts, _sink: Sink) -> Plan:
    """Puts modules before the blocks on the first stage only, if they have a tensor style.

    Before:
        tensor on tp { model.rotary_emb : output(replicate -> shard(1)) }
        stage 0: model.embed_tokens, model.layers[0:16]    (inputs = model.embed_tokens)
        model.rotary_emb has no parameters, so it runs on every stage

    After:
        tensor on tp { model.rotary_emb : output(replicate -> shard(1)) }
        stage 0: model.embed_tokens, model.rotary_emb, model.layers[0:16]
        other stages receive its results, instead of a DTensor next to plain placeholders
    """
    rule = plan.pipeline
    if rule is None:
        return plan
    styled = (m for m in rule.before if any(r.modules.overlap(m) for r in plan.tensor))
    more = tuple(m for m in styled if m not in rule.op.inputs)
    return replace(
        plan, pipeline=replace(rule, op=replace(rule.op, inputs=(*rule.op.inputs, *more)))
    )
