"""The answer of `planc why`, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from planc.model.facts import Modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One decision of one line of the plan.

    Args:
        target: the module that the line is about: the one asked for, an ancestor or a submodule.
        place, text: `name:line`, empty for what planc adds, and the line, where the plan is
            available.
        op: the index of the operation in the lowered plan.
    """

    what: str
    target: str
    place: str
    text: str = ""
    op: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterAnswer:
    """One parameter, on the rank with the largest shard.

    Args:
        local: its shape after tensor parallelism; `shard` is that at rest, after FSDP.
        spread: (ranks, size) along the dim of tensor parallelism, in order, where ranks differ.
        at_rest, gathered: bytes on one rank, and while its unit is all-gathered as `computed`.
        ties: names of the parameters that are the same tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    local: tuple[int, ...]
    spread: tuple[tuple[int, int], ...]
    shard: tuple[int, ...]
    at_rest: int
    gathered: int
    computed: str
    ties: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All decisions about one module (`root` is the model), or about one of its parameters.

    Args:
        like: the set of equal modules that contains the module.
        parameters, count: its own, or the one asked for; the elements of all, submodules included.
        adapter: on the layer, or the one that contains the module.
        tensor, around, inside: styles on the module, on ancestors (at whose bounds tensors are
            redistributed) and on submodules.
        checkpoint, compile: of the module, of its ancestors and of its submodules.
        unit, unit_bytes: the unit that contains it, at rest on one rank and gathered; units inside.
        training: what freezes or unfreezes it.
        draws: how ranks draw random numbers in the module and after it.
        missing: by section, why nothing decides it.
    """

    name: str
    parameter: str | None
    cls: str
    kind: str
    like: Modules
    parameters: tuple[ParameterAnswer, ...]
    count: int
    load: tuple[Reason, ...] = ()
    adapter: tuple[Reason, ...] = ()
    tensor: tuple[Reason, ...] = ()
    around: tuple[Reason, ...] = ()
    inside: tuple[Reason, ...] = ()
    checkpoint: tuple[Reason, ...] = ()
    compile: tuple[Reason, ...] = ()
    experts: tuple[Reason, ...] = ()
    loss: tuple[Reason, ...] = ()
    unit: tuple[Reason, ...] = ()
    unit_bytes: tuple[int, int] | None = None
    ties: tuple[Reason, ...] = ()
    training: tuple[Reason, ...] = ()
    draws: tuple[Reason, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
