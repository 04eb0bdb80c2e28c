"""PL418, PL419: units without a root unit around them."""

from planc.checks.queries import holds
from planc.diagnostic import Sink
from planc.model.facts import Facts
from planc.plan.ir import Plan, Unit
from planc.plan.parameter_owners import owned


def fsdp_root(plan: Plan, facts: Facts, sink: Sink) -> None:
    """torch runs a group only below another unit ("FSDP requires a single root module").

    Observed on four processes (torch 2.13); separate units without a root train right, each as its
    own root.
    """
    section = plan.fsdp
    if section is None or "fsdp" in plan.broken or not section.units:
        return
    alone = [u for u in section.units if u.group and not _covered(u, section.units)]
    for unit in alone:
        members = ", ".join(str(m) for m in unit.members)
        sink.error(
            "PL418",
            f"the group of `{members}` is in no other unit, and torch runs groups only inside one",
            unit.origin,
            help="write `root : unit`",
        )
    rest = any(o.unit is None and o.ignored is None for o in owned(plan, facts))
    if not alone and not rest and not any(u.root for u in section.units):
        sink.warning(
            "PL419",
            "no unit is the root, so every outermost unit is one",
            section.origin,
            facts=[
                "the model itself is then not an FSDP module: it has no set_requires_gradient_sync"
            ],
            help="write `root : unit(reshard = never)`",
        )


def _covered(unit: Unit, units: tuple[Unit, ...]) -> bool:
    """Whether a group needs no root, or has one."""
    if sum(len(m) for m in unit.members) == 1:
        return True
    outer = [m for u in units if u is not unit for m in u.members]
    return any(all(m != o and holds(o, m) for m in unit.members) for o in outer)
