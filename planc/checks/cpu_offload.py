"""PL447: CPU-offloaded parameters that other rules keep on the device."""

from planc.diagnostic import Label, Sink
from planc.model.facts import Facts
from planc.plan.ir import Plan


def cpu_offload(plan: Plan, facts: Facts, sink: Sink) -> None:
    """An offloaded unit copies its shards to the device and frees them after forward.

    A unit that is not resharded keeps its gathered parameters on the device until backward ends. If
    no unit is resharded, the whole model is on the device at once and offloading only adds copies.
    """
    section = plan.fsdp
    if section is None or section.offload is None or "fsdp" in plan.broken:
        return
    if not section.shard:
        labels = [Label(span=section.origin, text="keeps full parameters on every rank")]
    elif section.units and all(unit.reshard is False for unit in section.units):
        labels = [
            Label(span=u.origin, text="keeps its parameters gathered") for u in section.units[:3]
        ]
    else:
        return
    sink.error(
        "PL447",
        "`offload` has no effect: every unit stays gathered from forward to backward",
        Label(span=section.offload.origin, text="offloads parameters"),
        *labels,
        help="shard the model, and let units reshard after forward",
    )
