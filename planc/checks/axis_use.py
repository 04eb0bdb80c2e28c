"""PL350, PL351, PL352: mesh axes with two conflicting uses, or with none."""

from planc.checks.queries import active, weighted
from planc.diagnostic import Label, Sink
from planc.model.facts import Facts
from planc.ops.base import AxisRole
from planc.plan.ir import Plan


def axis_use(plan: Plan, facts: Facts, sink: Sink) -> None:
    """The ranks of a tensor axis hold shards of one weight; those of a data axis hold replicas."""
    section = plan.fsdp
    used = {*section.shard, *section.replicate} if section else set()
    rules = active(plan)
    for axis in dict.fromkeys(r.axis for r in rules):
        if section is not None and axis in used:
            sink.error(
                "PL350",
                f"tensor parallelism and FSDP both work over `{axis}`",
                Label(span=section.origin, text="shards over it"),
                Label(span=next(r.origin for r in rules if r.axis == axis), text="splits over it"),
                help="use different axes",
            )
    split = list(weighted(rules))
    for i, rule in enumerate(split):
        for other in split[:i]:
            both = rule.modules.overlap(other.modules)
            # torch 2.13 refuses it: `distribute_tensor` takes no DTensor of another mesh, and
            # no style works over two dimensions; shapes and bytes would be right
            if other.axis != rule.axis and both is not None:
                sink.error(
                    "PL352",
                    f"`{both}` is sharded over `{other.axis}` and over `{rule.axis}`",
                    Label(span=rule.origin, text=f"over {rule.axis}"),
                    Label(span=other.origin, text=f"over {other.axis}"),
                    help="keep one of the two",
                )
    _sequence_axes(plan, sink)


def _sequence_axes(plan: Plan, sink: Sink) -> None:
    """PL351: ranks that would compute the same, because nothing slices their sequences."""
    section = plan.fsdp
    used = {*section.shard, *section.replicate} if section else set()
    for context in plan.mesh.of_role(AxisRole.SEQUENCE):
        sliced = any(r.axis == context.name for r in plan.context) or "context" in plan.broken
        if section is None or context.size == 1 or context.name not in used or sliced:
            continue
        sink.error(
            "PL351",
            f"the {context.size} ranks of {context.name} read the same batch, and no section "
            "says that its sequences are sliced",
            Label(span=context.origin, text=f"{context.name} is {context.size}"),
            Label(span=section.origin, text="only parameters are sharded over it"),
            facts=["its ranks would all compute the same"],
            help=f"write `context on {context.name} {{ attention = all_gather }}`, or `script` "
            f"where the script slices the sequences itself; or set `{context.name} = 1`",
        )
