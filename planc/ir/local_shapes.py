"""The shapes of parameters on a rank, and the dim along which `shard_dim = auto` shards them."""

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from planc.ir.experts import expert_styles
from planc.ir.nodes import Plan, SpreadRule, TensorRule, Unit
from planc.ir.parameter_owners import Owned
from planc.model.facts import Modules, Parameter
from planc.ops.contract import Split, part_sizes
from planc.ops.styles import PARAMETERLESS

AUTO = -1
"""`shard_dim = auto`, until it is resolved."""


def split_dim(local: tuple[int, ...], dim: int, ranks: int) -> bool:
    """Whether FSDP can shard that dim (not dim 0) of a shape: torch requires it to be divisible."""
    return 0 < dim < len(local) and local[dim] % ranks == 0


def local_shape(parameter: Parameter, rules: Iterable[TensorRule], plan: Plan) -> tuple[int, ...]:
    """The shape of a parameter's shard after the rules, on the rank with the largest shard.

    Each rule shards the result of those before it; in a packed dim, each part is sharded.
    """
    slices = local_slices(parameter, rules, plan)
    return tuple(sum(slices.get(dim, (size,))) for dim, size in enumerate(parameter.shape))


def local_slices(
    parameter: Parameter, rules: Iterable[TensorRule], plan: Plan
) -> dict[int, tuple[int, ...]]:
    """The sizes of the slices of each dim that rules shard, as `local_shape` has them."""
    shape = parameter.shape
    dims: dict[int, list[tuple[Split, int]]] = {}
    for rule in rules if shape else ():
        if split := rule.split(parameter):
            dims.setdefault(split.dim, []).append((split, plan.mesh.size(rule.axis)))
    slices = {}
    for dim, splits in dims.items():
        packed = next((split for split, _ in splits if split.is_packed), None)
        sizes = part_sizes(packed, shape[dim]) if packed else (shape[dim],)
        for _, count in splits:
            sizes = tuple(-(-size // count) for size in sizes)
        slices[dim] = sizes
    return slices


def splitting(plan: Plan) -> list[TensorRule]:
    """The rules that split parameters over more than one rank, those of experts among them."""
    rules = [r for r in plan.tensor if plan.mesh.size(r.axis) > 1]
    return [r for r in rules if not isinstance(r.style, PARAMETERLESS)] + expert_styles(plan)


class _Placed(Protocol):
    @property
    def modules(self) -> Modules: ...


Rule = TypeVar("Rule", bound=_Placed)


def split_by_rules(
    modules: Modules, rules: Iterable[Rule]
) -> list[tuple[Modules, tuple[Rule, ...]]]:
    """The modules, split by the rules on them: each part with all of its rules, in order."""
    parts: list[tuple[Modules, tuple[Rule, ...]]] = [(modules, ())]
    for rule in rules:
        split = []
        for part, rules_of_part in parts:
            both = part.overlap(rule.modules)
            if both is None:
                split.append((part, rules_of_part))
            else:
                split += [
                    (both, (*rules_of_part, rule)),
                    *((rest, rules_of_part) for rest in part.minus(both)),
                ]
        parts = split
    return parts


def placed_parameters(
    part: Unit | SpreadRule, assignments: list[Owned], plan: Plan
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape after tensor parallelism) of the parameters that a unit or spread places."""
    rules = splitting(plan)
    for assignment in assignments:
        if (assignment.spread or assignment.unit) is not part or assignment.unit is None:
            continue
        for modules, found_rules in split_by_rules(assignment.modules, rules):
            for parameter in modules.module.parameters:
                yield f"{modules}.{parameter.name}", local_shape(parameter, found_rules, plan)
