"""PL415, PL416, PL420, PL421 and PL570: dtypes, and lost updates."""

from collections.abc import Collection

from planc.diagnostics.diagnostic import Label, Sink
from planc.ir.nodes import Plan, Precision, Unit
from planc.ir.parameter_owners import owned_modules, stepped_dtypes
from planc.model.facts import Facts, Modules, Parameter
from planc.ops import phrases


def mixed_dtypes(plan: Plan, facts: Facts, sink: Sink) -> None:
    """FSDP gathers a unit as one flat tensor, so its trainable parameters must share one dtype.

    Source: `FSDPParamGroup._init_mp_dtypes` in torch, which raises in the first forward.
    """
    if plan.fsdp is None or plan.fsdp.backend is not None:
        return
    found: dict[Unit, dict[str, tuple[Modules, Parameter]]] = {}
    for own in owned_modules(plan, facts):
        for parameter in own.modules.module.parameters:
            if own.unit is not None and own.trains(parameter):
                first = (own.modules, parameter)
                found.setdefault(own.unit, {}).setdefault(plan.dtype(parameter), first)
    for unit, by_type in found.items():
        if len(by_type) > 1:
            sink.error(
                "PL415",
                f"the unit `{unit.members[0]}` mixes {' and '.join(sorted(by_type))}",
                unit.origin,
                facts=[
                    f"{modules}.{parameter.name} stays {dtype}, as the model requires"
                    if _island(plan, parameter)
                    else f"{modules}.{parameter.name} is {dtype}"
                    for dtype, (modules, parameter) in sorted(by_type.items())
                ],
                help=_help_for_mixed(plan, by_type.values()),
            )


def _island(plan: Plan, parameter: Parameter) -> bool:
    """Whether a parameter keeps its dtype where the load section casts the model."""
    load = None if plan.adapted else plan.load
    return load is not None and load.dtype not in (None, plan.dtype(parameter))


def _help_for_mixed(plan: Plan, mixed: Collection[tuple[Modules, Parameter]]) -> str:
    islands = any(_island(plan, parameter) for _, parameter in mixed)
    for modules, parameter in mixed:
        dtypes = {plan.dtype(p) for below in modules.below() for p in below.module.parameters}
        if len(dtypes) > 1:  # a parameter beside modules of another dtype, which no unit separates
            cast = "`islands = none` in the load section" if islands else "a cast of the model"
            name = f"{modules}.{parameter.name}"
            return f"a unit is a module, and that of `{name}` has both: {cast} makes them one dtype"
    if islands:
        return (
            "`dtype(fp32) : unit` makes them separate units; `islands = none` in the load section "
            "casts them too"
        )
    return "`dtype(fp32) : unit` makes units of modules of one dtype; or cast the model"


HALF = ("bfloat16", "float16")


def optimizer_precision(plan: Plan, facts: Facts, sink: Sink) -> None:
    """An update that is smaller than the last digit of a weight is lost: bfloat16 has eight bits,
    so a step of less than about 1/256 of the weight rounds to nothing.

    The dtype is known where the load section casts, or where a script passes the model that it
    trains. A configuration alone says how weights are stored: `planc lower` prints what follows.
    Adapters are exempt: what is frozen takes no step, and `lora(dtype = fp32)` decides the others.
    """
    cast = plan.load if plan.load and plan.load.dtype else None
    if plan.adapters is not None or "load" in plan.broken or not (cast or facts.built):
        return
    for dtype, count in stepped_dtypes(plan, facts).items():
        if dtype not in HALF:
            continue
        short = phrases.value(dtype)
        source = "the load section" if cast else "the model that was passed"
        sink.warning(
            "PL420",
            f"the optimizer steps {count:,} parameters in {short}, without a copy in fp32",
            *([cast.origin] if cast else []),
            facts=[f"their dtype is from {source}"],
            help="`load { dtype = fp32 }` keeps them in fp32; the fsdp section's "
            f"`precision(param = {short})` still computes in {short}",
        )


def unscaled_gradients(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A gradient below 6e-8 is zero in float16, and after a mean over many tokens most are small:
    where one trains in it, the loss is scaled, which planc does not do.
    """
    if not any(stepped_dtypes(plan, facts).values()):
        return
    fsdp = plan.fsdp
    policies = {p for u in fsdp.units if (p := fsdp.policy(u)) is not None} if fsdp else set()
    found = {
        policy.origin: f"`{name} = fp16`"
        for policy in policies
        for name, dtype in (("reduce", policy.reduce), ("param", policy.param))
        if dtype == "float16"
    }
    if plan.load and plan.load.dtype == "float16" and not any(p.param for p in policies):
        found[plan.load.origin] = "`dtype = fp16`"
    for origin, text in found.items():
        sink.warning(
            "PL570",
            f"{text} without a loss scale: small gradients become zero, and planc scales no loss",
            origin,
            help="bf16 has the range of fp32; `run.forward_backward` refuses to train in fp16, and "
            "a loop of your own needs a loss scale that all ranks share",
        )


def kept_in_float32(plan: Plan, facts: Facts, sink: Sink) -> None:
    """FSDP gathers all parameters of a unit in one dtype, also those that `from_pretrained` leaves
    in float32: a router that is rounded to bfloat16 sends tokens to other experts.
    """
    found: dict[Precision, dict[tuple[tuple[str, ...], str], Modules]] = {}
    for own in owned_modules(plan, facts):
        policy = plan.fsdp.policy(own.unit) if plan.fsdp else None
        if policy is None or policy.param is None:
            continue
        for parameter in own.modules.module.parameters:
            if parameter.keep_in_fp32 and parameter.cast(policy.param) != policy.param:
                names, key = found.setdefault(policy, {}), (own.modules.key, parameter.name)
                names[key] = own.modules.join(names.get(key, own.modules))
    for policy, names in found.items():
        assert policy.param is not None
        short = phrases.value(policy.param)
        many = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
        (_, first), modules = next(iter(names.items()))
        sink.info(
            "PL421",
            f"`{modules}.{first}`{many} computed in {short}, and kept in fp32 by transformers",
            Label(span=policy.origin, text=f"gathers in {short}"),
            facts=["named by `_keep_in_fp32_modules` or `_keep_in_fp32_modules_strict`"],
            help=f"`{modules} : unit(precision(param = fp32))` gathers it in fp32",
        )


def unused_precision(plan: Plan, facts: Facts, sink: Sink) -> None:
    """The section's precision applies to units without their own."""
    if plan.fsdp is None or plan.fsdp.precision is None or "fsdp" in plan.broken:
        return
    if all(u.precision is not None for u in plan.fsdp.units):
        reason = "every unit has its own" if plan.fsdp.units else "the section has no unit"
        message = f"no unit uses this precision: {reason}"
        sink.error("PL416", message, plan.fsdp.precision.origin, help="remove it, or add a unit")
