"""PL440, PL441: ignored parameters that train, or that another rule decides too."""

from planc.diagnostic import Label, Sink
from planc.model.facts import Facts
from planc.ops.styles import Attributes, Input, Output
from planc.plan.ir import Ignored, Plan
from planc.plan.parameter_owners import owned


def ignored_parameters(plan: Plan, facts: Facts, sink: Sink) -> None:
    """FSDP neither shards nor reduces ignored parameters: over several ranks they must be frozen.

    Source: `ignored_params` of `fully_shard` in torch.
    """
    section = plan.fsdp
    if section is None or not section.ignored:
        return
    for one in section.ignored:
        _decided(one, plan, sink)
    if plan.mesh.size(*section.shard, *section.replicate) == 1 or "train" in plan.broken:
        return
    found: dict[Ignored, list[str]] = {}
    for own in owned(plan, facts):
        if own.ignored is not None:
            trained = [p for p in own.modules.module.parameters if own.trains(p)]
            found.setdefault(own.ignored, []).extend(f"{own.modules}.{p.name}" for p in trained)
    for one, names in found.items():
        if names:
            more = ", ..." if len(names) > 3 else ""
            shown = ", ".join(f"`{n}`" for n in names[:3]) + more
            message = f"FSDP does not reduce the gradients of {shown}, which are ignored and train"
            help = f"freeze them: `train {{` and in it `{one.modules} : frozen`"
            sink.error("PL440", message, one.origin, help=help)


def _decided(one: Ignored, plan: Plan, sink: Sink) -> None:
    """A style makes weights DTensors and a unit shards them: that rule or `ignore` is wrong."""
    assert plan.fsdp is not None
    units = ((member, u.origin) for u in plan.fsdp.units for member in u.members)
    said = [(member, origin, "a unit") for member, origin in units if member.path]
    rules = (r for r in plan.tensor if not isinstance(r.style, Attributes | Input | Output))
    said += [(rule.modules, rule.origin, "a style") for rule in rules]
    for modules, origin, what in said:
        if modules.within(one.modules):
            sink.error(
                "PL441",
                f"`{modules}` is ignored, and has {what}",
                Label(span=one.origin, text=f"ignores `{one.modules}`"),
                Label(span=origin, text=f"sets {what}"),
                help="keep one of the two",
            )
