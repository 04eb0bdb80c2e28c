"""Units that are found by parameter count or dtype. The result is a list of explicit units."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from planc.ir.unit_lists import split_child
from planc.model.facts import Facts, Modules, Parameter


def by_size(
    facts: Facts, least: int, taken: Sequence[Modules], ignored: Sequence[Modules]
) -> tuple[Modules, ...]:
    """The smallest modules with at least `least` parameters, outside of units inside them, of those
    that the plan has `taken`, and around none that is ignored.

    The rule of torch's `size_based_auto_wrap_policy`: children first, never a container.
    """
    search = _SizeSearch(facts, least, (*taken, *ignored))
    search.remaining_parameters(facts.model)
    return tuple(search.found)


@dataclass(slots=True)
class _SizeSearch:
    facts: Facts
    least: int
    taken: tuple[Modules, ...]
    found: list[Modules] = field(default_factory=list)

    def remaining_parameters(self, modules: Modules) -> int:
        """The number of parameters outside units of one of these modules, after its own units."""
        if modules.path and any(modules.overlap(t) is not None for t in self.taken):
            return 0
        count = sum(p.numel for p in modules.module.parameters)
        for child in _children(modules, self.taken):
            count += self.remaining_parameters(child) * len(child) // len(modules)
        fits = count >= self.least and not modules.module.container and modules.path
        if fits and not _parts_tie(self.facts, modules):
            self.found.append(modules)
            return 0
        return count


def by_dtype(
    modules: Modules, dtype: str, taken: Sequence[Modules], kept: Callable[[Parameter], str]
) -> Iterator[Modules]:
    """The largest modules whose parameters all have a dtype and that the plan does not name.

    Args:
        modules: the model; else modules in which they are searched.
        dtype: a torch dtype name.
        taken: the units that the plan names; modules inside them are considered.
        kept: the dtype of a parameter after `load`.
    """
    dtypes = {kept(p) for below in modules.below() for p in below.module.parameters}
    if dtype not in dtypes:
        return
    if dtypes == {dtype} and modules.path and not modules.module.container:
        if all(modules.overlap(t) is None for t in taken):
            yield modules
        return
    for child in _children(modules, taken):
        yield from by_dtype(child, dtype, taken, kept)


def _children(modules: Modules, taken: Sequence[Modules]) -> Iterator[Modules]:
    """The child modules; entries of a list are separate where a set distinguishes them."""
    return (
        part for child in modules.module.children for part in split_child(modules, child, taken)
    )


def _parts_tie(facts: Facts, modules: Modules) -> bool:
    """Whether a module contains one name of a tied parameter but not the other."""
    for group in facts.ties:
        held = sum(facts.find(name)[0].is_within(modules) for name in group)
        if 0 < held < len(group):
            return True
    return False
