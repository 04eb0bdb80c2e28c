"""PL450: options of sharded units on a replicated model."""

from planc.diagnostic import Label, Sink
from planc.model.facts import Facts
from planc.plan.ir import Plan
from planc.source import Span


def replicate_options(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A replicate section keeps whole parameters: there is nothing to gather, reshard or place.

    Source: `replicate` in torch.distributed._composable.replicate_with_fsdp takes neither
    `reshard_after_forward` nor `shard_placement_fn`.
    """
    section = plan.fsdp
    if section is None or section.shard or "fsdp" in plan.broken:
        return
    said: list[tuple[str, Span]] = []
    for unit in section.units:
        if unit.reshard is not True:
            said.append(("reshard", unit.origin))
        if unit.shard is not None:
            said.append(("on", unit.origin))
        if unit.shard_dim:
            said.append(("shard_dim", unit.origin))
    said += [("spread", spread.origin) for spread in section.spreads]
    if section.prefetch is not None:
        said.append(("prefetch", section.prefetch.origin))
    for name, origin in dict.fromkeys(said):
        sink.error(
            "PL450",
            f"`{name}` has no effect where parameters are replicated on every rank",
            Label(span=origin),
            Label(span=section.origin, text="replicates the model"),
            help=f"remove `{name}`, or write an fsdp section",
        )
