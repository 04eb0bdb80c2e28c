"""PL420: an optimizer that steps parameters in 16 bits, without a copy in fp32."""

from planc.diagnostic import Sink
from planc.model.facts import Facts
from planc.ops import phrases
from planc.plan.ir import Plan
from planc.plan.parameter_owners import stepped

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
    for dtype, count in stepped(plan, facts).items():
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
