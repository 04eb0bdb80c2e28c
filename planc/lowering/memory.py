"""Bytes of parameters on one rank.

They are counted on the compressed module table, so the cost does not grow with depth. A parameter
belongs to the innermost unit that contains it; a tied parameter counts once, at its first name.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from planc.infer.apply_adapters import is_compressed
from planc.ir.local_shapes import local_shape, split_by_rules, split_dim
from planc.ir.nodes import Plan, Precision, SpreadRule, TensorRule, Unit
from planc.ir.parameter_owners import owned_modules
from planc.lowering.backward import Backward
from planc.model.facts import DTYPE_BYTES, Facts, Modules, Parameter
from planc.ops.fsdp import FullyShard, Spread
from planc.ops.lowered import Lowered
from planc.ops.styles import PARAMETERLESS
from planc.sections import Hook


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Equal parameters of equal modules, with the unit that shards them and the spread in it, or
    None.

    Args:
        local: the shape after tensor parallelism, on the rank with the largest shard.
        count: the number of modules that own the parameter; the others share it by a tie.
        trains: whether it takes a gradient.
        narrow: whether FSDP gathers it in one byte an element.
    """

    modules: Modules
    unit: Unit | None
    spread: SpreadRule | None = None
    parameter: Parameter
    local: tuple[int, ...]
    count: int
    trains: bool = True
    narrow: bool = False

    def sharded_bytes(self, ranks: int) -> int:
        """Bytes at rest when FSDP shards a dim over `ranks` (dim 0 padded, as torch.chunk does)."""
        first, *rest = self.local or (1,)
        width = DTYPE_BYTES.get(self.parameter.dtype, 4)
        placement = self.spread or self.unit
        if placement is not None and split_dim(self.local, placement.shard_dim, ranks):
            return prod(self.local) // ranks * width
        return -(-first // ranks) * prod(rest) * width

    def gathered_bytes(self, dtype: str | None) -> int:
        """Bytes when all-gathered, in the dtype that FSDP gathers in."""
        width = 1 if self.narrow else DTYPE_BYTES.get(dtype or self.parameter.dtype, 4)
        return prod(self.local) * width


_NARROW = Hook[Callable[[Plan], Iterator[Any]]]("lowering", "narrow_rules")
"""The rules on modules whose weights FSDP gathers in one byte an element."""


class Holdings:
    """All parameters of a model under a plan's tensor parallelism."""

    def __init__(self, facts: Facts, plan: Plan, tensor: Iterable[TensorRule]) -> None:
        self.plan, self.tied = plan, Tied(facts)
        self.backward = Backward(owned_modules(plan, facts))
        rules = [r for r in tensor if not isinstance(r.style, PARAMETERLESS)]
        hooks = _NARROW.find_all(plan.sections)
        gathers = self.gathers = [rule for narrow in hooks for rule in narrow(plan)]
        self.all = [
            Holding(
                modules=part,
                unit=owner.unit,
                spread=owner.spread,
                parameter=_with_stored_dtype(parameter, plan),
                local=local,
                count=count,
                trains=owner.trains(parameter),
                narrow=bool(low) and parameter.name == "weight",
            )
            for owner in self.backward.owners
            for whole, on in split_by_rules(owner.modules, rules)
            for part, low in split_by_rules(whole, gathers)
            for parameter in part.module.parameters
            if (count := self.tied.owners(part, parameter.name))
            for local in [_local(part, parameter, on, plan)]
        ]

    @property
    def main_dtype(self) -> str:
        """The dtype of most elements."""
        elements = Counter({"float32": 0})
        for held in self.all:
            elements[held.parameter.dtype] += held.count * held.parameter.numel
        return elements.most_common(1)[0][0]

    def ranks(self, holding: Holding) -> int:
        """The number of ranks that a unit shards the parameter over."""
        placement = holding.spread or holding.unit
        if holding.unit is None or placement is None or self.plan.fsdp is None:
            return 1
        return self.plan.mesh.size(*self.plan.fsdp.axes(placement)[0])

    def parts(self, unit: Unit) -> list[tuple[Modules, ...]]:
        """The members of a unit's calls; modules with narrow weights are in separate calls."""
        parts = list(unit.members)
        for op in () if unit.group else self.gathers:
            inner = Modules(op.modules.path[: len(parts[0].path)], parts[0].module)
            cut = [(part.overlap(inner), part.minus(inner)) for part in parts]
            parts = [p for both, rest in cut for p in (*((both,) if both else ()), *rest)]
        return [unit.members] if unit.group else [(part,) for part in parts]

    def of_unit(
        self, unit: Unit, precision: Precision | None, part: tuple[Modules, ...] | None = None
    ) -> tuple[int, int, int, int]:
        """Bytes of the parameters of one call: at rest on one rank, and all-gathered; what all
        calls gather that takes no gradient; and what narrow weights save one call of those that do.

        Args:
            part: the members of these calls, where they are not all (`parts`).
        """
        param = precision.param if precision else None
        inside = [h for h in self.all if h.unit is unit]
        if part is not None and part != unit.members:
            inside = [i for h in inside if (i := self._restrict(h, part[0]))]
        calls = 1 if unit.group else len((part or unit.members)[0])
        rest = sum(h.count * h.sharded_bytes(self.ranks(h)) for h in inside)
        gathered = [(h.count * h.gathered_bytes(param), h.trains) for h in inside]
        frozen = sum(size for size, trains in gathered if not trains)
        size = sum(size for size, _ in gathered)
        wide = (
            replace(h, narrow=False).gathered_bytes(param) - h.gathered_bytes(param)
            for h in inside
            if h.trains
        )
        trained = (h.count for h in inside if h.trains)
        saved = sum(count * less for count, less in zip(trained, wide, strict=True))
        return rest // calls, size // calls, frozen, (size + saved) // calls - size // calls

    def _restrict(self, held: Holding, part: Modules) -> Holding | None:
        """Restricts a group of equal parameters to some of the unit's modules; None if these
        modules own none of them.
        """
        inside = held.modules.part_inside(part)
        count = self.tied.owners(inside, held.parameter.name) if inside else 0
        return replace(held, modules=inside, count=count) if inside and count else None

    def at_rest(self) -> int:
        """Bytes of all parameters that one rank holds between steps."""
        sizes = (
            h.gathered_bytes(None) if h.unit is None else h.sharded_bytes(self.ranks(h))
            for h in self.all
        )
        return sum(h.count * size for h, size in zip(self.all, sizes, strict=True))


def _with_stored_dtype(parameter: Parameter, plan: Plan) -> Parameter:
    dtype = plan.dtype(parameter)
    return parameter if dtype == parameter.dtype else replace(parameter, dtype=dtype)


def _local(
    part: Modules, parameter: Parameter, rules: tuple[TensorRule, ...], plan: Plan
) -> tuple[int, ...]:
    """The shape after the rules; a compressed weight has no dims, so a share of its column."""
    if not rules or not is_compressed(part.module) or parameter.name != "weight":
        return local_shape(parameter, rules, plan)
    left = parameter.shape[0]
    for rule in rules:
        if rule.split(parameter):
            left = -(-left // plan.mesh.size(rule.axis))
    return (left, 1)


def kept_shape(
    local: tuple[int, ...], unit: FullyShard | Spread | None, lowered: Lowered
) -> tuple[int, ...]:
    """The shape of a rank's shard of a parameter in a unit."""
    ranks = lowered.axis_size(*unit.shard) if unit else 1
    if unit is None or not local:
        return local
    dim = unit.shard_dim if split_dim(local, unit.shard_dim, ranks) else 0
    return (*local[:dim], -(-local[dim] // ranks), *local[dim + 1 :])


class Tied:
    """Finds parameters that are another parameter by a second name.

    Modules are visited one by one only where some of their set are tied.
    """

    def __init__(self, facts: Facts) -> None:
        self.names = {name for group in facts.ties for name in group[1:]}
        parts = (name.split(".") for name in self.names)
        self.keys = {tuple("[]" if p.isdecimal() else p for p in name) for name in parts}

    def owners(self, modules: Modules, parameter: str) -> int:
        """The number of modules that own a parameter; the others share it."""
        if (*modules.key, parameter) not in self.keys:
            return len(modules)
        full = (".".join(filter(None, [name, parameter])) for name in modules.names())
        return sum(name not in self.names for name in full)
