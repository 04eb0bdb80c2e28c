"""The adapters section -> operations: LoRA on layers, and their weights in 4 bits."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import TypeVar

from planc.infer.apply_adapters import adapted_tensor_rules
from planc.ir.nodes import AdapterRule, Plan
from planc.model.facts import Modules, merge_sets
from planc.ops.lora import BASE_LAYER, Adapt
from planc.ops.styles import Colwise, Rowwise
from planc.sections.quantization.ops import Quantize


def adapt(plan: Plan) -> Iterator[Adapt]:
    """One operation per rule, each with another seed, so that rules start with different values."""
    if section := plan.adapters:
        for number, op in enumerate(_by_line((r.adapt, r.modules) for r in section.rules)):
            yield replace(op, seed=section.seed + number)


def quantize(plan: Plan) -> list[Quantize]:
    """One operation per rule whose layers are in 4 bits."""
    rules = plan.adapters.rules if plan.adapters else ()
    return _by_line(
        (r.quantize, Modules((*r.modules.path, BASE_LAYER), r.modules.module))
        for r in rules
        if r.quantize is not None
    )


Rule = TypeVar("Rule", Adapt, Quantize)


def _by_line(rules: Iterable[tuple[Rule, Modules]]) -> list[Rule]:
    """One operation per line of the plan, on all of its modules."""
    sets_by_line: dict[tuple[Rule, str], list[Modules]] = {}
    for op, modules in rules:
        sets_by_line.setdefault((op, op.place), []).append(modules)
    return [replace(op, members=tuple(merge_sets(sets))) for (op, _), sets in sets_by_line.items()]


def scales(plan: Plan) -> int:
    """Bytes of the scales of 4-bit weights on one rank: FSDP does not shard them.

    A scale is a float32; with `double` it is a byte, plus one float32 for 256 of them.
    """
    total = 0
    for rule in plan.adapters.rules if plan.adapters else ():
        if rule.quantize is None:
            continue
        split = [
            (part, plan.mesh.size(base.axis))
            for other, base, part in adapted_tensor_rules(plan)
            if other is rule and isinstance(base.style, Colwise | Rowwise)
        ]
        whole = len(rule.modules) - sum(len(part) for part, _ in split)
        total += whole * _scales(rule, 1)
        total += sum(len(part) * _scales(rule, ranks) for part, ranks in split)
    return total


def _scales(rule: AdapterRule, ranks: int) -> int:
    assert rule.quantize is not None
    weight = rule.modules.module.weight
    blocks = -(-prod(weight.shape) // (ranks * rule.quantize.block))
    return blocks + 4 * -(-blocks // 256) if rule.quantize.double else 4 * blocks
