"""The styles of transformers' tensor parallel plans, in the language of planc."""

import re

_EXPERTS = "experts(gate_up_proj = shard(1, parts = 2), down_proj = shard(2))"
_EXPERT_PARALLEL = "`dispatch(all_to_all)` in a section `expert on ep`; over a tensor axis it is"

_STYLES = {
    "colwise_rep": "`colwise(-> replicate)`",
    "colwise_gather_output": "`colwise(-> replicate)`",
    "rowwise_rep": "`rowwise(replicate -> replicate)`",
    "rowwise_split_input": "`rowwise(replicate -> replicate)`",
    "embedding_rowwise": "`rowwise`",
    "embedding_colwise": "`colwise(-> replicate)`",
    "local_colwise": "`colwise`",
    "local_rowwise": "`rowwise`",
    "packed_colwise": f"`colwise(parts = 2)`; of fused experts `{_EXPERTS}`",
    "packed_rowwise": "`rowwise(parts = 2)`",
    "local_packed_rowwise": "`rowwise(parts = 2)`",
    "sequence_parallel": "`sequence(local = true)`",
    "gather": "`output(partial -> replicate)`",
    "all_reduce": "`output(partial -> replicate)`",
    "replicated_with_grad_allreduce": "`replicate(gradient = sum)`",
    "mla_kv_a_proj": "`mla_kv(rope = config.qk_rope_head_dim)`",
    "moe_tp_experts": f"`{_EXPERTS}`",
    "moe_experts_allreduce": f"`{_EXPERTS}`",
    "moe_identity_expert": 'a style of your own: `style NAME = python "package.module:Class"`',
    "local": "`parameters(weight = shard(0))`, with the names and dims of its parameters",
    "local_params": "`parameters(sinks = shard(0))`, with the names of its parameters",
    "grouped_gemm": f"{_EXPERT_PARALLEL} `{_EXPERTS}`",
    "ep_dispatch_experts": f"{_EXPERT_PARALLEL} `{_EXPERTS}`",
    "ep_router": f"{_EXPERT_PARALLEL} `replicate`",
}
"""Source: `ALL_PARALLEL_STYLES` of transformers 4.50 to 5. `colwise`, `rowwise` and `replicate`
have the same name in both languages."""


def equivalent(name: str) -> str | None:
    """The help for a style of transformers: what a plan writes in its place; None for any other."""
    told = _STYLES.get(name)
    return f"`{name}` of transformers is, in a plan, {told}" if told else None


def style_of_transformers(name: str) -> str | None:
    """A style of transformers as a plan writes it; None if no style of a plan has its meaning."""
    same = name in ("colwise", "rowwise", "replicate")
    found = re.match(r"`([^`]*)`(;|$)", f"`{name}`" if same else _STYLES.get(name, ""))
    return found[1] if found else None
