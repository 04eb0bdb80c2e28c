"""PL151: a fused weight of several projections that is sharded as if it were one projection."""

from planc.checks.queries import active, axis_label, splits_output
from planc.diagnostic import Sink
from planc.model.facts import Facts
from planc.ops.styles import Colwise
from planc.plan.ir import Plan

FUSED = {
    "qkv_proj": "q, k and v",
    "gate_up_proj": "gate and up",
    "c_attn": "q, k and v",
    "Wqkv": "q, k and v",
}
"""Names that transformers gives to concatenated projections, whose outputs the model then cuts."""


def packed_by_name(plan: Plan, facts: Facts, sink: Sink) -> None:
    """The rows of a fused weight are all of q, then all of k, then all of v.

    In equal chunks the first ranks hold only q, and the model's own split of its local output then
    mixes the projections.
    """
    for rule in active(plan):
        name = rule.modules.path[-1] if rule.modules.path else ""
        if not isinstance(name, str) or name not in FUSED or not splits_output(rule):
            continue
        if isinstance(rule.style, Colwise) and rule.style.parts != 1:
            continue
        sink.warning(
            "PL151",
            f"`{rule.modules}` is a fused projection of {FUSED[name]}; plain colwise shards it "
            "across the parts",
            rule.origin,
            axis_label(plan, rule),
            help="state its parts, `colwise(parts = 2)`, if the model splits its output into "
            "parts; else gather its output: `colwise(-> replicate)`, and write "
            "`rowwise(replicate -> ...)` on the next projection",
        )
