"""The adapters section -> operations: LoRA on layers; the bytes of their compressed weights."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

from planc.infer.apply_adapters import adapted_tensor_rules
from planc.ir.nodes import Plan
from planc.model.facts import Modules, merge_sets
from planc.ops.base import Op
from planc.ops.lora import Adapt
from planc.ops.styles import Colwise, Rowwise


def adapt(plan: Plan) -> Iterator[Adapt]:
    """One operation per rule, each with another seed, so that rules start with different values."""
    if section := plan.adapters:
        for number, op in enumerate(group_by_line((r.adapt, r.modules) for r in section.rules)):
            yield replace(op, seed=section.seed + number)


OpT = TypeVar("OpT", bound=Op)


def group_by_line(rules: Iterable[tuple[OpT, Modules]]) -> Iterator[OpT]:
    """Yields an operation for each line of the plan, with all modules of the line as `members`."""
    sets_by_line: dict[tuple[OpT, str], list[Modules]] = {}
    for op, modules in rules:
        sets_by_line.setdefault((op, op.place), []).append(modules)
    for (op, _), sets in sets_by_line.items():
        members: dict[str, Any] = {"members": tuple(merge_sets(sets))}
        yield replace(op, **members)


def scales(plan: Plan) -> int:
    """Bytes of the scales of compressed weights on one rank: FSDP does not shard them."""
    total = 0
    for rule in plan.adapters.rules if plan.adapters else ():
        if rule.compressed is None:
            continue
        numel = prod(rule.modules.module.weight.shape)
        split = [
            (part, plan.mesh.size(base.axis))
            for other, base, part in adapted_tensor_rules(plan)
            if other is rule and isinstance(base.style, Colwise | Rowwise)
        ]
        whole = len(rule.modules) - sum(len(part) for part, _ in split)
        total += whole * rule.compressed.scale_bytes(numel, 1)
        for part, ranks in split:
            total += len(part) * rule.compressed.scale_bytes(numel, ranks)
    return total
