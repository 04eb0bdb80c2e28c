"""PL413, PL414: parameters whose gradients are not averaged, and optimizers over mixed tensors."""

from planc.checks.queries import active, axis_label
from planc.diagnostic import Sink
from planc.model.facts import Facts
from planc.plan.ir import Plan
from planc.plan.parameter_owners import owned


def unreduced_gradients(plan: Plan, facts: Facts, sink: Sink) -> None:
    """FSDP averages the gradients of its units alone. Gradients of parameters outside every unit
    are not all-reduced, so ranks diverge silently.
    """
    if "fsdp" in plan.broken:
        return
    if plan.fsdp is None:
        _mixed(plan, sink)
        return
    if plan.mesh.size(*plan.fsdp.shard, *plan.fsdp.replicate) == 1:
        return
    outside = [
        (own.modules, p)
        for own in owned(plan, facts)
        if own.unit is None and own.ignored is None
        for p in own.modules.module.parameters
        if own.trains(p)
    ]
    if outside:
        names = [f"{m}.{p.name}" for m, p in outside]
        shown = ", ".join(f"`{n}`" for n in names[:3]) + (", ..." if len(names) > 3 else "")
        sink.error(
            "PL413",
            f"no FSDP unit contains {shown}: their gradients are not reduced, so the ranks diverge",
            plan.fsdp.origin,
            help="write `root : unit`, which contains the parameters of no other unit",
        )


def _mixed(plan: Plan, sink: Sink) -> None:
    rules = active(plan)
    if rules:
        sink.warning(
            "PL414",
            "tensor parallelism without an fsdp section mixes DTensors and plain tensors",
            rules[0].origin,
            axis_label(plan, rules[0]),
            facts=[
                "torch's optimizers (foreach, the default) and clip_grad_norm_ do not support "
                "the mix"
            ],
            help="add an fsdp section; over an axis of one rank it only turns all parameters "
            "into DTensors",
        )
