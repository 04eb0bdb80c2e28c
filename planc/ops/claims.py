"""The operation that makes a collective of a run: each operation says how closely it fits."""

from collections.abc import Collection, Iterable
from typing import NamedTuple, Protocol

from planc.model.facts import below

ROOT = "root"
"""The unit of FSDP that is the whole model, which FSDP leaves without a name."""
MESSAGES = ("send", "recv")


class ObservedCall(Protocol):
    """A collective or a message that a rank called.

    Attributes:
        kind: `all_reduce`, `send`, ...
        axes: the axes of the mesh along which its group lies.
        module: the module in whose forward or backward pass it is; empty for none.
        unit: modules that FSDP gathers or reduces, separated by commas; empty for none.
    """

    @property
    def kind(self) -> str: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def module(self) -> str: ...
    @property
    def unit(self) -> str: ...


class CallClaim(NamedTuple):
    """The strength with which an operation claims a collective; the strongest claim wins, and the
    first one among equals.
    """

    strength: int
    nearness: int = 0


UNIT, MESSAGE, MODULE, GRADIENT = CallClaim(3), CallClaim(2), CallClaim(1), CallClaim(0)
"""Claims on a unit of FSDP, on a message between stages, by a module (or the model, if no module is
nearer), and on the gradient of a weight that a style leaves replicated."""


def unit_names(collective: ObservedCall) -> list[str]:
    """The names of the modules of a collective's unit."""
    return [unit.replace(ROOT, "") for unit in collective.unit.split(", ") if unit]


def module_claim(
    collective: ObservedCall, axes: Collection[str], names: Iterable[str]
) -> CallClaim | None:
    """The claim of modules on a collective that they call along some of the axes: the longest name
    that contains the collective's module is the nearest. None if no module contains it.
    """
    if set(axes).isdisjoint(collective.axes):
        return None
    at = collective.module
    lengths = (len(name) for name in names if at and (at == name or below(at, name)))
    nearest = max(lengths, default=None)
    return None if nearest is None else MODULE._replace(nearness=nearest)
