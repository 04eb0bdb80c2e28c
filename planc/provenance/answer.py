"""What `planc why` answers, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planc.model.facts import Modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One thing that a line of the plan decides.

    Args:
        what: the decision, in words.
        target: the module that the line decides: the one asked for, or one around or inside it.
        place: `name:line`; empty for what planc adds itself.
        text: the line's words, where the plan is at hand.
        op: which operation of the lowered plan it is.
    """

    what: str
    target: str
    place: str
    text: str = ""
    op: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterAnswer:
    """One parameter, on the rank that holds most of it.

    Args:
        name: in its module.
        shape: as the model has it.
        dtype: its torch dtype.
        trainable: whether it takes a gradient.
        local: its shape after tensor parallelism.
        spread: (ranks, size) along the tensor-parallel dim, in order, where ranks differ.
        shard: its shape at rest, after FSDP.
        at_rest: bytes that a rank keeps.
        gathered: bytes while its unit is gathered, in the dtype that it is gathered in.
        computed: that dtype.
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
    """What is decided of one module, or of one of its parameters.

    Args:
        name: as torch has it; `root` for the model itself.
        parameter: the parameter's name in the module, None where the module was asked for.
        cls: the module's class.
        kind: `linear`, `norm` and the like.
        like: the set of like modules that it is one of.
        parameters: of the module itself, or the one that was asked for.
        count: elements of all its parameters, with those of the modules inside it.
        load: how weights arrive, and what they are kept in.
        adapter: the adapter on the layer, or that the module is a part of.
        tensor: styles on the module itself.
        around: styles on modules around it: what comes in there and goes out.
        inside: styles on modules inside it.
        checkpoint, compile: what is around it, is it, or is inside it.
        unit: the unit that it belongs to, then those inside it.
        training: what freezes it, or lets it train.
        unit_bytes: of the unit that it belongs to: at rest on a rank, and gathered.
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
    unit: tuple[Reason, ...] = ()
    unit_bytes: tuple[int, int] | None = None
    ties: tuple[Reason, ...] = ()
    training: tuple[Reason, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
