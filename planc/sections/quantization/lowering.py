"""The adapter rules with 4-bit weights as operations."""

from collections.abc import Iterator

from planc.ir.nodes import Plan
from planc.lowering.lora import group_by_line
from planc.model.facts import Facts, Modules
from planc.ops.lora import BASE_LAYER
from planc.ops.registry import AnyOp
from planc.sections.quantization.ops import Quantize


def lower(plan: Plan, _facts: Facts) -> Iterator[AnyOp]:
    """One operation per line, on the layers that peft wraps."""
    rules = plan.adapters.rules if plan.adapters else ()
    yield from group_by_line(
        (rule.compressed, Modules((*rule.modules.path, BASE_LAYER), rule.modules.module))
        for rule in rules
        if isinstance(rule.compressed, Quantize)
    )
