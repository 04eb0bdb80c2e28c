"""The list of all kinds of operations."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, get_args

from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.backend import Backend
from planc.ops.base import Form, Op
from planc.ops.configure import Configure
from planc.ops.context import Attend, ContextParallel
from planc.ops.expert_capacity import LimitExperts
from planc.ops.expert_parallel import DispatchExperts
from planc.ops.freeze import Freeze
from planc.ops.fsdp import Divide, FullyShard, Prefetch
from planc.ops.load import Load
from planc.ops.lora import Adapt
from planc.ops.optimizer import Optimize
from planc.ops.pipeline import Pipeline
from planc.ops.rotary import ShareLongestPosition
from planc.ops.tensor_parallel import Parallelize, Tie
from planc.sections import NAMES, Hook

_KINDS = Hook[tuple[type[Op], ...]]("ops", "KINDS")


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionOp(Op):
    """An operation in the folder of a section; it names the section as `SECTION`."""

    @classmethod
    def all_installed(cls) -> Iterator[type[Op]]:
        """The kinds of all sections, whose modules are imported only here."""
        return (kind for kinds in _KINDS.find_all(NAMES) for kind in kinds)


AnyOp = Annotated[
    SectionOp
    | Pipeline
    | Configure
    | Load
    | Adapt
    | Parallelize
    | Tie
    | DispatchExperts
    | ContextParallel
    | Attend
    | Freeze
    | Checkpoint
    | LimitExperts
    | FullyShard
    | Backend
    | Divide
    | Prefetch
    | ShareLongestPosition
    | Optimize,
    Form(tag="op"),
]


@cache
def kinds(sections: tuple[str, ...] = NAMES) -> tuple[type[Op], ...]:
    """The kinds of operations of the compiler and of sections, in the order of `apply`."""
    core = [kind for kind in get_args(get_args(AnyOp)[0]) if kind is not SectionOp]
    own = (kind for kinds in _KINDS.find_all(sections) for kind in kinds)
    return tuple(sorted((*own, *core), key=attrgetter("PHASE")))


def units_of(op: Op) -> tuple[FullyShard, ...]:
    """The FSDP units of an operation; empty for other operations."""
    if isinstance(op, Backend):
        return tuple(op.units())
    return (op,) if isinstance(op, FullyShard) else ()
