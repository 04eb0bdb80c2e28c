"""PL150: a style on a module that cannot take it."""

from __future__ import annotations

from planc.diagnostic import Sink
from planc.ir.plan import Plan, TensorRule
from planc.ir.style import Colwise, Replicate, Rowwise, Sequence, style_name
from planc.model.facts import Facts


def kinds(plan: Plan, facts: Facts, sink: Sink) -> None:
    """torch's colwise and rowwise take nn.Linear and nn.Embedding, its sequence style leaves.

    Source: `_apply` of the styles in torch.distributed.tensor.parallel.style; transformers' Conv1D
    is no nn.Linear, and its weight is transposed.
    """
    for rule in plan.tensor:
        found = _wrong(rule)
        if found is None:
            continue
        reason, told = found
        module = rule.modules.module
        sink.error(
            "PL150",
            f"`{style_name(rule.style)}` cannot be put on `{rule.modules}`: {reason}",
            rule.origin,
            facts=[f"`{rule.modules}` is a {module.cls}"],
            help=told,
        )


def _wrong(rule: TensorRule) -> tuple[str, str] | None:
    """Why the module can't take the style, and what to do; None where it can."""
    module = rule.modules.module
    match rule.style:
        case Colwise() | Rowwise():
            if module.kind == "conv1d":
                return (
                    "its weight is transposed, and no style of torch's splits it",
                    "leave it whole, and spread the model by FSDP",
                )
            if module.kind not in ("linear", "embedding"):
                return (
                    "it is neither a linear layer nor an embedding",
                    "name the projections inside it" if module.children else "leave it whole",
                )
            if module.kind == "embedding" and not isinstance(rule.style.input, Replicate):
                return (
                    "an embedding takes whole token ids",
                    f"write `{style_name(rule.style)}(replicate -> ...)`",
                )
        case Sequence():
            if module.children:
                return ("it has modules inside", "put `sequence` on the norms themselves")
            if module.kind in ("embedding", "conv1d"):
                return ("it is not a norm", "put `sequence` on norms and dropouts")
    return None
