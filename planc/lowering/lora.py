"""The adapters section -> operations: LoRA around layers, and their weights in 4 bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod

from planc.model.facts import Modules
from planc.ops.lora import Adapt
from planc.ops.quantization import Quantize
from planc.ops.styles import Colwise, Rowwise
from planc.plan.apply_adapters import BASE_LAYER, adapted_tensor_rules
from planc.plan.ir import AdapterRule, Plan


def adapt(plan: Plan) -> Iterator[Adapt]:
    """One for each rule, with a seed of its own: two rules would begin with the same values."""
    ops: dict[tuple[Adapt, str], list[Modules]] = {}
    for rule in plan.adapters.rules if plan.adapters else ():
        op = Adapt(
            members=(),
            rank=rule.rank,
            alpha=rule.alpha,
            dropout=rule.dropout,
            dtype=rule.dtype,
            init=rule.init,
            place=rule.origin.place,
        )
        ops.setdefault((op, op.place), []).append(rule.modules)
    for number, ((op, _), members) in enumerate(ops.items()):
        assert plan.adapters is not None
        seed = plan.adapters.seed + number
        yield replace(op, members=_merged(members), seed=seed)


def _merged(sets: Iterable[Modules]) -> tuple[Modules, ...]:
    """Sets of modules as few, where unlike blocks parted them."""
    result: list[Modules] = []
    for modules in sets:
        for i, other in enumerate(result):
            union = other.union(modules)
            if union is not None:
                result[i] = union
                break
        else:
            result.append(modules)
    return tuple(result)


def quantize(plan: Plan) -> Iterator[Quantize]:
    """One for each rule whose layers are in 4 bits."""
    ops: dict[tuple[Quantize, str], list[Modules]] = {}
    for rule in plan.adapters.rules if plan.adapters else ():
        quant = rule.quant
        if quant is None:
            continue
        assert quant.storage is not None
        op = Quantize(
            members=(),
            kind=quant.kind,
            storage=quant.storage,
            compute=quant.compute,
            double=quant.double,
            block=quant.block,
            place=rule.origin.place,
        )
        inner = Modules((*rule.modules.path, BASE_LAYER), rule.modules.module)
        ops.setdefault((op, op.place), []).append(inner)
    for (op, _), members in ops.items():
        yield replace(op, members=_merged(members))


def scales(plan: Plan) -> int:
    """Bytes of the scales of 4-bit weights on a rank: no unit shards them.

    A scale is a float32; with `double` a byte, and a float32 for 256 of them.
    """
    total = 0
    for rule in plan.adapters.rules if plan.adapters else ():
        if rule.quant is None:
            continue
        split = [
            (part, plan.mesh.size(base.axis))
            for own, base, part in adapted_tensor_rules(plan)
            if own is rule and isinstance(base.style, Colwise | Rowwise)
        ]
        whole = len(rule.modules) - sum(len(part) for part, _ in split)
        total += whole * _scales(rule, 1)
        total += sum(len(part) * _scales(rule, ranks) for part, ranks in split)
    return total


def _scales(rule: AdapterRule, ranks: int) -> int:
    assert rule.quant is not None
    weight = next(p for p in rule.modules.module.parameters if p.name == "weight")
    blocks = -(-prod(weight.shape) // (ranks * rule.quant.block))
    return blocks + 4 * -(-blocks // 256) if rule.quant.double else 4 * blocks
