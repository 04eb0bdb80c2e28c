"""PL150: a style on a module that cannot take it."""

from planc.diagnostic import Sink
from planc.model.facts import Facts, Module
from planc.ops import styles as ir
from planc.plan.ir import Plan, TensorRule


def style_targets(plan: Plan, facts: Facts, sink: Sink) -> None:
    """torch's colwise and rowwise styles take nn.Linear and nn.Embedding, its sequence style
    leaves.

    Source: `_apply` of the styles in torch.distributed.tensor.parallel.style. transformers' Conv1D,
    a linear with a transposed weight, has planc's own style.
    """
    for rule in plan.tensor:
        found = _wrong(rule)
        if found is None:
            continue
        reason, told = found
        module = rule.modules.module
        sink.error(
            "PL150",
            f"`{rule.modules}` does not support `{ir.style_name(rule.style)}`: {reason}",
            rule.origin,
            facts=[f"`{rule.modules}` is a {module.cls}"],
            help=told,
        )


def _latent(style: ir.MlaKv, module: Module) -> tuple[str, str] | None:
    """MLA's keys and values come out of one linear, with the rotary features last."""
    wide = next((p.shape[0] for p in module.parameters if p.name == "weight"), 0)
    if module.kind != "linear":
        return ("it is not a linear layer", "put it on `kv_a_proj_with_mqa`")
    if wide <= style.rope:
        told = "write `mla_kv(rope = config.qk_rope_head_dim)`"
        return (f"it has {wide:,} output features, and `rope` is {style.rope:,} of them", told)
    return None


def _over_features(module: Module) -> tuple[str, str] | None:
    """A factor corrects an RMS norm over sharded features; one that subtracts the mean has none."""
    weights = [p.name for p in module.parameters]
    if module.kind != "norm" or weights != ["weight"] or "RMS" not in module.cls:
        return ("it is not an RMS norm with one weight", "gather its input, and replicate the norm")
    return None


def _wrong(rule: TensorRule) -> tuple[str, str] | None:
    """Why the module cannot take the style, and the fix; None where it can."""
    module = rule.modules.module
    match rule.style:
        case ir.Colwise() | ir.Rowwise():
            if module.kind not in ("linear", "embedding", "conv1d"):
                return (
                    "it is neither a linear layer nor an embedding",
                    "name the projections inside it" if module.children else "leave it replicated",
                )
            if module.kind == "embedding" and not isinstance(rule.style.input, ir.Replicate):
                return (
                    "an embedding needs replicated token ids",
                    f"write `{ir.style_name(rule.style)}(replicate -> ...)`",
                )
            if module.kind == "embedding" and rule.style.parts != 1:
                return ("an embedding holds no projections", "remove `parts`")
        case ir.Features():
            return _over_features(module)
        case ir.MlaKv():
            return _latent(rule.style, module)
        case ir.Replicated() if rule.style.summed and not module.count:
            return ("it has no parameters", "remove the rule")
        case ir.Sequence():
            if module.children:
                return ("it has submodules", "put `sequence` on the norms themselves")
            if module.kind in ("embedding", "conv1d"):
                return ("it is not a norm", "put `sequence` on norms and dropouts")
    return None
