"""PL151, by structure: a linear with twice the width of the layer that takes its sharded output."""

from planc.checks.packed_by_name import FUSED
from planc.checks.queries import active, axis_label, inside, parents, splits_output, takes_split
from planc.diagnostic import Label, Sink
from planc.model.facts import Facts
from planc.ops.styles import Colwise
from planc.plan.ir import Plan, TensorRule

_ATTENTION = ("head_dim", "num_heads", "num_attention_heads", "num_key_value_groups")
"""What an attention has: DeepSeek's kv_b_proj is twice its o_proj, and is cut head by head."""


def packed_by_width(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A linear that outputs twice the next layer's input width holds two projections.

    The model splits its output in the middle, which is the wrong place in a rank's local output
    (observed on four processes with GLM, torch 2.13: nothing fails, the logits are wrong). As a
    DTensor (`local = false`) the output is split in the right place.
    """
    rules = active(plan)
    seen: set[str] = set()
    for rule in rules:
        named = rule.modules.path and rule.modules.path[-1] in FUSED
        style = rule.style
        local = isinstance(style, Colwise) and style.local and style.parts == 1
        if named or not local or not splits_output(rule) or str(rule.modules) in seen:
            continue
        for parent in parents(facts, rule.modules):
            if any(parent.module.fact(f) for f in _ATTENTION):
                continue
            takers = [r for r in inside(parent, rules) if takes_split(r)]
            half = next((t for t in takers if _wide(rule, 0) == 2 * _wide(t, 1)), None)
            if half is not None and str(rule.modules) not in seen:
                seen.add(str(rule.modules))
                sink.warning(
                    "PL151",
                    f"`{rule.modules}` has {_wide(rule, 0):,} output features, twice the input "
                    f"features of `{half.modules.path[-1]}`: it holds two parts, and plain "
                    "colwise shards it across them",
                    Label(span=rule.origin, text="two parts in one weight"),
                    Label(span=half.origin, text=f"{_wide(half, 1):,} input features"),
                    axis_label(plan, rule),
                    help="state them: `colwise(parts = 2)`; or gather its output: `colwise(-> "
                    "replicate)`, and write `rowwise(replicate -> replicate)` on the next "
                    "projection",
                )


def _wide(rule: TensorRule, dim: int) -> int:
    weights = [p.shape for p in rule.modules.module.parameters if p.name == "weight"]
    return weights[0][dim] if weights and len(weights[0]) == 2 else 0
