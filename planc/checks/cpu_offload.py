"""PL447: parameters in host memory that other words of the plan keep on the device."""

from __future__ import annotations

from planc.diagnostic import Label, Sink
from planc.model.facts import Facts
from planc.plan.ir import Plan


def cpu_offload(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A unit copies its shards to the device and frees them after forward.

    One that keeps its gathered parameters holds them on the device until backward is through; where
    all do, the whole model is there at once, and offloading only adds copies.
    """
    section = plan.fsdp
    if section is None or section.offload is None or "fsdp" in plan.broken:
        return
    if not section.shard:
        labels = [Label(span=section.origin, text="keeps whole parameters on every rank")]
    elif section.units and all(unit.reshard is False for unit in section.units):
        labels = [Label(span=u.origin, text="keeps what it gathers") for u in section.units[:3]]
    else:
        return
    sink.error(
        "PL447",
        "the whole model is on the device from forward to backward: nothing is offloaded",
        Label(span=section.offload.origin, text="offloads parameters"),
        *labels,
        help="shard the model, and let units reshard after forward",
    )
