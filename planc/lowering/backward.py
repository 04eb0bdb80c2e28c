"""The reach of a backward pass: from the loss back to the first parameter that takes a gradient.

Modules run in the order in which the model defines them, but for the norms of a block, which run
before what they precede.
"""

from collections.abc import Iterable
from math import inf

from planc.ir.parameter_owners import Owned
from planc.model.facts import Modules
from planc.ops.lora import BASE_LAYER

Place = tuple[float, float, float]
"""The list of blocks, the block, and the module in it."""


class Backward:
    """Counts the modules of a step that have gradients.

    Args:
        owners: the modules with parameters, in the order of the model. Without them, as for a plan
            that was lowered before, all modules are taken to have gradients.
    """

    def __init__(self, owners: Iterable[Owned]) -> None:
        self.owners = tuple(owners)
        self.lists: dict[tuple[str, ...], int] = {}
        for at, owner in enumerate(self.owners):
            self.lists.setdefault(_list(owner.modules), at)
        places = [
            self._place(
                owner.modules, owner.modules.entries.first if owner.modules.entries else 0, at
            )
            for at, owner in enumerate(self.owners)
            if owner.has_trainable
        ]
        self.first: Place = min(places, default=(inf if self.owners else -inf, 0, 0))

        self.whole = all(o.trains(p) for o in self.owners for p in o.modules.module.parameters)

    @property
    def skips(self) -> bool:
        """Whether it ends behind the first block of a list."""
        blocks = (o.modules for o in self.owners if o.modules.entries)
        return not self.whole and any(
            (self.lists[_list(m)], m.entries.first) < self.first[:2] for m in blocks
        )

    def inputs(self, modules: Modules) -> int:
        """The number of these modules that have an input with a gradient. Those in a part of a
        block, such as the projections of an attention, have the input of the part.
        """
        if self.whole:
            return len(modules)
        at = modules.list_at
        depth = len(modules.path) - (modules.path[-1:] == (BASE_LAYER,)) - 1
        around = modules if at is None or depth <= at + 1 else _upto(modules, depth)
        inside = self._indices(around)
        return self._count(modules, inside[0] - 0.5) if inside else len(modules)

    def outputs(self, modules: Modules) -> int:
        """The number of these modules that have an output with a gradient."""
        if self.whole:
            return len(modules)
        inside = self._indices(modules)
        return self._count(modules, inside[-1]) if inside else len(modules)

    def count_trained(self, modules: Modules) -> int:
        """The number of these modules that have a parameter inside that takes a gradient."""
        if self.whole:
            return len(modules)
        sets = (o.modules.part_inside(modules) for o in self.owners if o.has_trainable)
        depth = len(modules.path)
        return len({n for m in sets if m for n in _upto(m, depth).names()})

    def nearest(self, candidates: Iterable[Modules]) -> Modules | None:
        """The set with the last of some modules that have no gradient; None where all have."""
        reached: list[tuple[Place, Modules]] = []
        for modules in () if self.whole else candidates:
            if inside := self._indices(modules):
                places = (self._place(modules, e, inside[-1]) for e in modules.entries or [0])
                reached += [(place, modules) for place in places if place < self.first]
        return max(reached, key=lambda pair: pair[0])[1] if reached else None

    def _indices(self, modules: Modules) -> list[int]:
        """The places of modules with parameters; of a layer with an adapter, of the layer alone."""
        if modules.path[-1:] == (BASE_LAYER,):
            return self._indices(_upto(modules, len(modules.path) - 1))[:1]
        return [at for at, owner in enumerate(self.owners) if owner.modules.part_inside(modules)]

    def _count(self, modules: Modules, at: float) -> int:
        entries = modules.entries or [0]
        behind = sum(self._place(modules, entry, at) >= self.first for entry in entries)
        return len(modules) * behind // len(entries)

    def _place(self, modules: Modules, entry: int, at: float) -> Place:
        norm = modules.module.kind == "norm" and bool(modules.entries)
        return (self.lists.get(_list(modules), at), entry, -1.0 if norm else at)


EVERYWHERE = Backward(())
"""The default if it is unknown which modules take gradients: all of them."""


def _upto(modules: Modules, depth: int) -> Modules:
    return Modules(modules.path[:depth], modules.module)


def _list(modules: Modules) -> tuple[str, ...]:
    """The list that has the modules; their path where none has."""
    return modules.key[: modules.list_at + 1] if modules.list_at is not None else modules.key
