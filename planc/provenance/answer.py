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
        name: in its module.
        shape: in the model.
        dtype: its torch dtype.
        trainable: whether it requires a gradient.
        local: its shape after tensor parallelism.
        spread: (ranks, size) along the dim of tensor parallelism, in order, where ranks differ.
        shard: its shape at rest, after FSDP.
        at_rest: bytes on one rank.
        gathered: bytes while its unit is all-gathered, in the dtype of `computed`.
        computed: the dtype that it is all-gathered in.
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
class Reasons:
    """All decisions about one module, or about one of its parameters.

    Args:
        name: in torch; `root` for the model itself.
        parameter: the parameter's name in the module, None where the module was asked for.
        cls: the module's class.
        kind: `linear`, `norm` and so on.
        like: the set of equal modules that contains the module.
        parameters: of the module itself, or the one that was asked for.
        count: the number of elements in all its parameters, those of submodules included.
        load: how weights are loaded, and their dtype.
        adapter: the adapter on the layer, or the one that contains the module.
        tensor: styles on the module itself.
        around: styles on its ancestors, which redistribute inputs and outputs there.
        inside: styles on its submodules.
        checkpoint, compile: of the module, of its ancestors and of its submodules.
        experts: how tokens come to its experts, which ranks divide.
        loss: how the loss is computed in it.
        unit: the unit that contains it, then the units inside it.
        training: what freezes or unfreezes it.
        draws: how ranks draw random numbers in the module and after it.
        unit_bytes: of the unit that contains it: at rest on one rank, and all-gathered.
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

    def __str__(self) -> str:
        from planc.provenance.render import text  # which is about this class

        return text(self).rstrip()
