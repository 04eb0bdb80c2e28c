"""The meaning of each style of transformers' plans, once.

Nothing here decides a verdict: `apply.py` runs transformers' own code. The table names what a rule
does in a finding, and which other styles may be right where it is wrong.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class StyleMeaning:
    """The effect of a style of transformers.

    Args:
        forward, backward: its effect in the two passes.
        others: styles to try instead, the most likely first.
    """

    forward: str
    backward: str = "leaves gradients as they are"
    others: tuple[str, ...] = ()


_COLWISE = "shards the weight by outputs; the output stays sharded"
_ROWWISE = "shards the weight by inputs; an all-reduce sums the outputs"
_SUM = "sums the gradient of the input over the ranks"
_WHOLE = "divides the gradient of the output among the ranks"
_COLWISE_WHOLE = StyleMeaning(
    forward="shards the weight by outputs, and all-gathers the output", backward=_SUM
)
_ROWWISE_OF_WHOLE = StyleMeaning(
    forward="splits the input, shards the weight by inputs, and sums the outputs",
    backward="all-gathers the gradient of the input",
    others=("rowwise",),
)
"""transformers has two names for each of these."""

STYLES: Mapping[str, StyleMeaning] = {
    "colwise": StyleMeaning(
        forward=_COLWISE, backward=_SUM, others=("packed_colwise", "colwise_gather_output")
    ),
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), _COLWISE_WHOLE),
    "rowwise": StyleMeaning(forward=_ROWWISE, others=("rowwise_split_input",)),
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), _ROWWISE_OF_WHOLE),
    "packed_colwise": StyleMeaning(
        forward="shards each half of a fused weight by outputs", backward=_SUM, others=("colwise",)
    ),
    "packed_rowwise": StyleMeaning(
        forward="shards each half of a fused weight by its last dim",
        others=("rowwise",),
    ),
    "embedding_rowwise": StyleMeaning(
        forward="shards the vocabulary, and sums the ranks' lookups", backward=_WHOLE
    ),
    "embedding_colwise": StyleMeaning(
        forward="shards the width of the vectors, and all-gathers them", backward=_WHOLE
    ),
    "sequence_parallel": StyleMeaning(
        forward="shards the sequence", backward="sums the gradients of its parameters"
    ),
    "replicated_with_grad_allreduce": StyleMeaning(
        forward="leaves the module as it is", backward="sums the gradients of its parameters"
    ),
    "mla_kv_a_proj": StyleMeaning(
        forward="leaves the module as it is",
        backward="sums the gradient of the rotary part of its output",
    ),
    "all_reduce": StyleMeaning(forward="sums the output over the ranks"),
    "moe_tp_experts": StyleMeaning(
        forward="runs a shard of each expert, and sums the outputs",
        backward="sums the gradients of tokens and routing weights",
    ),
    "moe_identity_expert": StyleMeaning(
        forward="divides the input by the number of ranks", backward="divides the gradient likewise"
    ),
    "local_params": StyleMeaning(
        forward="computes with the local shards of its parameters",
    ),
    "replicate": StyleMeaning(forward="leaves the module as it is"),
    "grouped_gemm": StyleMeaning(forward="shards the weight by experts"),
    "ep_dispatch_experts": StyleMeaning(
        forward="sends tokens to the ranks of their experts, and results back",
        backward="sends gradients the same ways",
    ),
    "free_full_weight": StyleMeaning(
        forward="all-gathers the weights, and frees them after forward",
        backward="all-gathers them again, and reduces their gradients",
    ),
    "keep_full_weight": StyleMeaning(
        forward="all-gathers the weights, and keeps them until backward",
        backward="reduces their gradients",
    ),
}
"""Source: `ALL_PARALLEL_STYLES` and `ALL_FSDP_STYLES` of transformers 5.23."""

GRADIENT_SUM = "replicated_with_grad_allreduce"
"""The style that sums the gradient of parameters that a rank uses for its shard alone."""


def code_place(style: str) -> str:
    """`distributed/tensor_parallel.py:90`, the code of a style; empty if it has no class."""
    from planc.compat.transformers_distributed import ALL_PARALLEL_STYLES

    if style not in ALL_PARALLEL_STYLES:
        return "distributed/fsdp.py" if style in STYLES else ""
    cls = type(ALL_PARALLEL_STYLES[style])
    path = Path(inspect.getsourcefile(cls) or "")
    return f"{path.parent.name}/{path.name}:{inspect.getsourcelines(cls)[1]}"
