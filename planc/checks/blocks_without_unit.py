"""PL412: a block outside every unit while other blocks of its list are units."""

from collections.abc import Sequence

from planc.diagnostic import Label, Sink
from planc.model.facts import Facts, Modules
from planc.plan.ir import Plan


def blocks_without_unit(plan: Plan, facts: Facts, sink: Sink) -> None:
    """The parameters of such a block are in the root unit, which is gathered for a whole step."""
    if plan.fsdp is None or "fsdp" in plan.broken:
        return
    members = [(m, u) for u in plan.fsdp.units for m in u.members]
    done: set[tuple[str, ...]] = set()
    for modules in facts.model.below():
        if modules.key[-1:] != ("[]",) or not modules.module.count:
            continue
        some = [(m, u) for m, u in members if m.key == modules.key]
        if not some or modules.key in done or _covered(modules, members):
            continue
        left = [modules]
        for member, _ in some:
            left = [rest for part in left for rest in part.minus(member)]
        if not left:
            continue
        done.add(modules.key)
        count = sum(len(part) for part in left)
        siblings = Modules(modules.path[:-1], modules.module)
        sink.warning(
            "PL412",
            f"`{left[0]}` ({count} modules) is not a unit, unlike other entries of its list",
            *(Label(span=u.origin, text="these are") for _, u in some[:1]),
            facts=["its parameters are in the root unit, which stays gathered"],
            help=f"name the whole list: `{siblings}.* : unit`",
        )


def _covered(modules: Modules, members: Sequence[tuple[Modules, object]]) -> bool:
    """Whether units inside the blocks hold all of the blocks' parameters."""
    inner = [m for m, _ in members if len(m.path) > len(modules.path) and m.within(modules)]
    held = sum(m.module.count * len(m) for m in inner)
    return held >= modules.module.count * len(modules)
