"""PL530, PL531: a loss in a module that computes no logits, or that is sharded otherwise."""

from planc.checks.queries import active, sharding_rules, unit_of
from planc.diagnostics.diagnostic import Label, Sink
from planc.ir.nodes import Plan, TensorRule
from planc.model.facts import Facts
from planc.ops import phrases
from planc.ops.styles import Colwise, Replicate, Rowwise, style_name
from planc.sections.loss.ops import ChunkLoss


def check(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A loss in chunks multiplies by the head's weight itself, so that weight must be plain, and
    the head must return a tensor that is equal on all ranks.
    """
    for rule in plan.sections["loss"] if "loss" not in plan.broken else ():
        reason = _not_a_head(rule, plan)
        if reason is not None:
            message, *labels = reason
            sink.error(
                "PL530",
                message,
                Label(span=rule.origin, text="its loss is computed here"),
                *labels,
                help="name the linear layer that computes the logits, such as `lm_head`, without "
                "an adapter or a checkpoint",
            )
        elif "tensor" not in plan.broken:
            _split(rule, plan, sink)


def _not_a_head(rule: ChunkLoss, plan: Plan) -> tuple[str, *tuple[Label, ...]] | None:
    """The reason why the loss cannot be computed in these modules, and the lines at fault."""
    name = f"`{rule.modules}`"
    if rule.modules.module.kind != "linear" or len(list(rule.modules.names())) > 1:
        return (f"{name} is not one linear layer",)
    if len(plan.sections["loss"]) > 1:
        other = (r for r in plan.sections["loss"] if r is not rule)
        others = (Label(span=r.origin, text="another head") for r in other)
        return "a model has one loss, so one head", *others
    for adapter in plan.adapters.rules if plan.adapters else ():
        if adapter.modules.overlap(rule.modules):
            label = Label(span=adapter.origin, text="adapted")
            return f"{name} is adapted, so its weight is not all that it computes", label
    for checkpoint in plan.checkpoint_rules:
        if rule.modules.is_within(checkpoint.modules):
            label = Label(span=checkpoint.origin, text="checkpointed")
            return f"{name} is recomputed without labels in the backward pass", label
    return _rounding_unit(rule, plan)


def _rounding_unit(rule: ChunkLoss, plan: Plan) -> tuple[str, Label] | None:
    """The unit that rounds what the head returns, which is a loss."""
    precision = plan.fsdp.policy(unit_of(plan, rule.modules)) if plan.fsdp else None
    if precision is None or precision.output in (None, "float32"):
        return None
    label = Label(span=precision.origin, text=f"output = {phrases.dtype(precision.output)}")
    return f"the unit of `{rule.modules}` rounds its loss", label


def _split(rule: ChunkLoss, plan: Plan, sink: Sink) -> None:
    wanted = next((axis for axis in rule.axes if plan.mesh.size(axis) > 1), None)
    styles = [r for r in sharding_rules(active(plan)) if r.modules.overlap(rule.modules)]
    if not styles and wanted is None:
        return
    right = [r for r in styles if r.axis == wanted and _returns_whole(r)]
    if right and len(styles) == 1:
        return
    axis = wanted or styles[0].axis
    if not styles:
        message = f"`{rule.modules}` is not sharded over {wanted}, as its loss section says"
    elif styles[0].axis == wanted:
        message = f"`{rule.modules}` returns no tensor that is equal on all ranks of {wanted}"
    else:
        message = f"`{rule.modules}` is sharded over {styles[0].axis}, which its loss is not"
    sink.error(
        "PL531",
        message,
        Label(span=rule.origin, text=f"its loss, over {wanted or 'no axis'}"),
        *(Label(span=r.origin, text=f"`{_text(r)}` over {r.axis}") for r in styles),
        help=f"write `loss on {axis}`, and in `tensor on {axis}`: "
        f"`{rule.modules} : colwise(-> replicate)`",
    )


def _text(rule: TensorRule) -> str:
    output = f"(-> {rule.style.output})" if isinstance(rule.style, Colwise | Rowwise) else ""
    return f"{style_name(rule.style)}{output}"


def _returns_whole(rule: TensorRule) -> bool:
    style = rule.style
    return isinstance(style, Colwise) and isinstance(style.output, Replicate) and style.parts == 1
