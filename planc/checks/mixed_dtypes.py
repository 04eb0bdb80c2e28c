"""PL415: a unit whose trainable parameters have several dtypes."""

from planc.diagnostic import Sink
from planc.model.facts import Facts
from planc.plan.ir import Plan, Unit
from planc.plan.parameter_owners import owned


def mixed_dtypes(plan: Plan, facts: Facts, sink: Sink) -> None:
    """FSDP gathers a unit as one flat tensor, so its trainable parameters must share one dtype.

    Source: `FSDPParamGroup._init_mp_dtypes` in torch, which raises in the first forward.
    """
    if plan.fsdp is None or plan.fsdp.megatron is not None:  # that has a buffer for each dtype
        return
    found: dict[int, dict[str, tuple[str, bool]]] = {}
    origins: dict[int, Unit] = {}
    for own in owned(plan, facts):
        if own.unit is None:
            continue
        origins[id(own.unit)] = own.unit
        for parameter in own.modules.module.parameters:
            if own.trains(parameter):
                name = f"{own.modules}.{parameter.name}"
                dtype = plan.dtype(parameter)
                load = None if plan.adapted else plan.load
                island = load is not None and load.dtype not in (None, dtype)
                found.setdefault(id(own.unit), {}).setdefault(dtype, (name, island))
    for key, by_type in found.items():
        if len(by_type) > 1:
            islands = any(island for _, island in by_type.values())
            sink.error(
                "PL415",
                f"the unit `{origins[key].members[0]}` mixes {' and '.join(sorted(by_type))}",
                origins[key].origin,
                facts=[
                    f"{name} {'stays' if island else 'is'} "
                    f"{dtype}{', as the model requires' if island else ''}"
                    for dtype, (name, island) in sorted(by_type.items())
                ],
                help="`dtype(fp32) : unit` makes them separate units; `islands = none` in the "
                "load section casts them too"
                if islands
                else "`dtype(fp32) : unit` makes units of modules of one dtype; or cast the model",
            )
