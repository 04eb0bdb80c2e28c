"""PL415: a unit whose trainable parameters have several dtypes."""

from __future__ import annotations

from planc.diagnostic import Sink
from planc.ir.owners import owned
from planc.ir.plan import Plan, Unit
from planc.model.facts import Facts


def dtypes(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A unit is gathered as one flat tensor, so its trainable parameters have one dtype.

    Source: `FSDPParamGroup._init_mp_dtypes` in torch, which raises in the first forward.
    """
    if plan.fsdp is None or plan.fsdp.megatron is not None:  # that has a buffer for each dtype
        return
    found: dict[int, dict[str, str]] = {}
    origins: dict[int, Unit] = {}
    for own in owned(plan, facts):
        if own.unit is None:
            continue
        origins[id(own.unit)] = own.unit
        for parameter in own.modules.module.parameters:
            if own.trains(parameter):
                name = f"{own.modules}.{parameter.name}"
                found.setdefault(id(own.unit), {}).setdefault(plan.dtype(parameter), name)
    for key, by_type in found.items():
        if len(by_type) > 1:
            sink.error(
                "PL415",
                f"the unit `{origins[key].members[0]}` mixes {' and '.join(sorted(by_type))}",
                origins[key].origin,
                facts=[f"{name} is {dtype}" for dtype, name in sorted(by_type.items())],
                help="give the modules of one dtype a unit of their own, or cast the model",
            )
