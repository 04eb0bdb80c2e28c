"""The time of fp8 matmuls, and what an estimate reports of them."""

from collections.abc import Iterator

from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Span
from planc.ir.nodes import Plan
from planc.model.facts import Modules
from planc.tools.estimate.answer import Answer
from planc.tools.estimate.formats import NumberFormat

CASTS = {"tensorwise": (6, 0, 5, 3, 6), "rowwise": (5, 3, 3, 7, 8), "mxfp8": (3, 3, 3, 3, 6)}
"""`NumberFormat.casts` by recipe: a largest value, and both layouts that the products take.

Source: `get_tensor_memory_traffic_ovhd_s` of torchao 0.18's roofline, without what a compiler fuses
with the operator before.
"""


def formats(plan: Plan) -> Iterator[tuple[Modules, NumberFormat]]:
    """The formats of the rules; of a weight that FSDP gathers in fp8 only one layout is cast."""
    for rule in plan.sections["matmul"]:
        into, again, weight, weight_again, gradient = CASTS[rule.recipe]
        if rule.gather:
            weight, weight_again = 0, 2
        casts = (into, again, weight, weight_again, gradient)
        yield rule.modules, NumberFormat(recipe=rule.recipe, casts=casts)


def advise(answer: Answer, sink: Sink) -> None:
    """Reports recipes that the hardware has no rate for (PL553)."""
    hardware, rules = answer.hardware, answer.plan.sections["matmul"]
    for recipe in dict.fromkeys(rule.recipe for rule in rules):
        if not hardware.rate(recipe):
            sink.warning(
                "PL553",
                f"{hardware.name} has no rate for {recipe} matmuls",
                *dict.fromkeys(rule.origin for rule in rules if rule.recipe == recipe),
                facts=("the estimate counts them as matmuls in 16 bits",),
                help=f"name hardware that has them, or write {recipe}_tflops into a profile",
            )


def assumptions(answer: Answer) -> Iterator[str]:
    """Yields the source of the rates, and the matmuls that stay in 16 bits."""
    layers = (layer for stage in answer.work.stages for layer, _ in stage)
    if any(m.grouped and m.format is None for layer in layers for m in layer.matmuls):
        yield "matmuls of experts in 16 bits"
    if any(answer.hardware.rate(rule.recipe) for rule in answer.plan.sections["matmul"]):
        yield "fp8 matmuls at published rates, compiled: planc has not measured a GPU with them"


def measurement_obstacles(plan: Plan) -> Iterator[tuple[str, list[Span]]]:
    """Yields the reason for which `planc measure` cannot run a rank, and the lines of the plan."""
    lines = dict.fromkeys(rule.origin for rule in plan.sections["matmul"])
    yield "fp8 matmuls are emulated here, which holds more memory than on a GPU", [*lines]
