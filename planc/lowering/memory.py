"""Bytes of parameters on a rank: what a plan is for, in numbers.

Counted on the compressed module table, so the cost does not grow with depth. A parameter belongs
to the innermost unit around it; a tied one counts once, where it is first named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from planc.ir.plan import Plan, Precision, TensorRule, Unit
from planc.ir.style import Input, Output, weight_shard
from planc.model.facts import DTYPE_BYTES, Facts, Modules, Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Like parameters of like modules.

    Args:
        modules: who owns them.
        parameter: as the model has it.
        local: its shape after tensor parallelism, on the rank that holds most.
    """

    modules: Modules
    parameter: Parameter
    local: tuple[int, ...]

    def sharded(self, ranks: int) -> int:
        """Bytes at rest when FSDP splits dim 0 over `ranks` (padded, as torch.chunk does)."""
        first, *rest = self.local or (1,)
        return -(-first // ranks) * prod(rest) * DTYPE_BYTES.get(self.parameter.dtype, 4)

    def whole(self, dtype: str | None) -> int:
        """Bytes when gathered, in the precision that FSDP gathers in."""
        return prod(self.local) * DTYPE_BYTES.get(dtype or self.parameter.dtype, 4)


class Holdings:
    """All parameters of a model under a plan's tensor parallelism."""

    def __init__(self, facts: Facts, plan: Plan, tensor: Iterable[TensorRule]) -> None:
        self.plan = plan
        rules = [r for r in tensor if not isinstance(r.style, Input | Output)]
        tied = {name for group in facts.ties for name in group[1:]}
        self.all: list[Holding] = []
        for modules in facts.model.below():
            for part, rule in _ruled(modules, rules):
                self.all.extend(self._holdings(part, rule, tied))

    def _holdings(
        self, part: Modules, rule: TensorRule | None, tied: set[str]
    ) -> Iterator[Holding]:
        for parameter in part.module.parameters:
            if len(part) == 1 and tied:
                prefix = next(part.names())
                name = f"{prefix}.{parameter.name}" if prefix else parameter.name
                if name in tied:
                    continue
            local = list(parameter.shape)
            if rule is not None:
                kind, ndim = part.module.kind, len(local)
                dim = weight_shard(rule.style, kind, parameter.name, ndim)
                if dim is not None and ndim:
                    local[dim] = -(-local[dim] // self.plan.mesh.size(rule.axis))
            yield Holding(modules=part, parameter=parameter, local=tuple(local))

    @property
    def ranks(self) -> int:
        return self.plan.mesh.size(*self.plan.fsdp.shard) if self.plan.fsdp else 1

    def of_unit(self, unit: Unit, precision: Precision | None) -> tuple[int, int]:
        """Bytes of one call's parameters: at rest on a rank, and gathered."""
        assert self.plan.fsdp is not None
        inner = [u for u in self.plan.fsdp.units if u is not unit]
        param = precision.param if precision else None
        rest = gathered = 0
        calls = 1 if unit.group else len(unit.members[0])
        for holding in self.all:
            for member in unit.members:
                count = _owned(holding.modules, member, inner)
                rest += count * holding.sharded(self.ranks)
                gathered += count * holding.whole(param)
        return rest // calls, gathered // calls

    def at_rest(self) -> int:
        """Bytes of all parameters that one rank holds between steps."""
        if self.plan.fsdp is None:
            return sum(len(h.modules) * h.whole(None) for h in self.all)
        members = [m for u in self.plan.fsdp.units for m in u.members]
        total = 0
        for holding in self.all:
            outside = _left(holding.modules, members)
            total += (len(holding.modules) - outside) * holding.sharded(self.ranks)
            total += outside * holding.whole(None)
        return total


def _ruled(
    modules: Modules, rules: list[TensorRule]
) -> Iterator[tuple[Modules, TensorRule | None]]:
    """The modules, split by the rule that decides them."""
    left = [modules]
    for rule in rules:
        for part in list(left):
            both = part.overlap(rule.modules)
            if both is not None:
                left.remove(part)
                left.extend(part.minus(both))
                yield both, rule
    for part in left:
        yield part, None


def _inside(modules: Modules, outer: Modules) -> Modules | None:
    """Those of the modules that are in (or are) one of the outer ones."""
    n = len(outer.path)
    if modules.key[:n] != outer.key:
        return None
    head = Modules(modules.path[:n], outer.module).overlap(outer)
    return None if head is None else Modules((*head.path, *modules.path[n:]), modules.module)


def _left(modules: Modules, members: Iterable[Modules]) -> int:
    """How many of the modules are in none of the members."""
    left = [modules]
    for member in members:
        left = [rest for m in left for rest in _minus(m, member)]
    return sum(len(m) for m in left)


def _minus(modules: Modules, outer: Modules) -> tuple[Modules, ...]:
    both = _inside(modules, outer)
    return (modules,) if both is None else modules.minus(both)


def _owned(modules: Modules, member: Modules, others: Iterable[Unit]) -> int:
    """How many of the modules belong to a member and to no unit deeper inside."""
    mine = _inside(modules, member)
    if mine is None:
        return 0
    deeper = [
        m
        for unit in others
        for m in unit.members
        if len(m.path) > len(member.path) and m.within(member)
    ]
    return _left(mine, deeper)
