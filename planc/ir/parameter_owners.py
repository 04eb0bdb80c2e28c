"""The unit that owns each parameter, and whether it trains: the innermost enclosing rule wins."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from planc.ir.nodes import Ignored, Plan, SpreadRule, Unit
from planc.model.facts import Facts, Modules, Parameter
from planc.ops.freeze import Freeze

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """Modules with own parameters, and the rules that act on all of them: unit, placement in it,
    exemption from units, and what freezes or trains them; None where there is none.
    """

    modules: Modules
    unit: Unit | None = None
    spread: SpreadRule | None = None
    ignored: Ignored | None = None
    training: Freeze | None = None

    def trains(self, parameter: Parameter) -> bool:
        """Whether a parameter of these modules takes a gradient."""
        return parameter.trainable if self.training is None else self.training.trainable

    @property
    def has_trainable(self) -> bool:
        """Whether any parameter of these modules takes a gradient."""
        return any(self.trains(p) for p in self.modules.module.parameters)


_LAST: list[tuple[Plan, Facts, tuple[Owned, ...]]] = []
"""The arguments and the result of the last call: the checks of a plan make the same one in turn."""


def owned_modules(plan: Plan, facts: Facts) -> tuple[Owned, ...]:
    """Every module that has parameters of its own, in the order of the model."""
    for asked, model, assignments in _LAST:
        if asked is plan and model is facts:
            return assignments
    assignments = tuple(_find_owners(plan, facts))
    _LAST[:] = [(plan, facts, assignments)]
    return assignments


def _find_owners(plan: Plan, facts: Facts) -> Iterator[Owned]:
    units = plan.fsdp.units if plan.fsdp else ()
    ignored = plan.fsdp.ignored if plan.fsdp else ()
    members = inner_first([(m, u) for u in units for m in u.members])
    spreads = [(s.modules, s) for s in plan.fsdp.spreads] if plan.fsdp else []
    placed: list[tuple[Modules, Unit | SpreadRule]] = inner_first([*members, *spreads])
    kept = inner_first([(i.modules, i) for i in ignored])
    trained = inner_first([(t.modules, t) for t in plan.freezes])
    for modules in facts.model.below():
        if not modules.module.parameters:
            continue
        for part, training in divided_by(modules, trained):
            for subset, ignore in divided_by(part, kept):
                if ignore is not None:
                    yield Owned(modules=subset, ignored=ignore, training=training)
                    continue
                for piece, unit, spread in _by_placement(subset, members, placed):
                    yield Owned(modules=piece, unit=unit, spread=spread, training=training)


def stepped_dtypes(plan: Plan, facts: Facts) -> dict[str, int]:
    """The dtypes of the parameters that the optimizer steps, each with their number of elements.

    A backend may give the optimizer weights of its own, in their own dtype. A tied parameter counts
    under each of its names.
    """
    backend = plan.fsdp.backend if plan.fsdp else None
    main = backend.optimizer_dtype if backend else None
    counts: dict[str, int] = {}
    for assignment in owned_modules(plan, facts):
        for parameter in assignment.modules.module.parameters:
            if assignment.trains(parameter):
                dtype = main or plan.dtype(parameter)
                counts[dtype] = counts.get(dtype, 0) + parameter.numel * len(assignment.modules)
    return counts


def _by_placement(
    modules: Modules,
    units: Sequence[tuple[Modules, Unit]],
    placed: Sequence[tuple[Modules, Unit | SpreadRule]],
) -> Iterator[tuple[Modules, Unit | None, SpreadRule | None]]:
    """The modules, divided by their unit and by the spread that applies to them.

    A unit's own placement wins over a `spread` on the unit or on an ancestor.
    """
    for piece, placement in divided_by(modules, placed):
        if isinstance(placement, SpreadRule):
            yield from ((part, unit, placement) for part, unit in divided_by(piece, units))
        else:
            yield piece, placement, None


def inner_first(around: Sequence[tuple[Modules, T]]) -> list[tuple[Modules, T]]:
    """Sets of modules, those of the longest paths first."""
    return sorted(around, key=lambda pair: -len(pair[0].path))


def divided_by(
    modules: Modules, around: Sequence[tuple[Modules, T]]
) -> Iterator[tuple[Modules, T | None]]:
    """The modules, divided by the first set that contains them."""
    left = [modules]
    for outer, what in around:
        for part in list(left):
            both = part.part_inside(outer)
            if both is not None:
                left.remove(part)
                left.extend(part.minus(both))
                yield both, what
    yield from ((part, None) for part in left)
