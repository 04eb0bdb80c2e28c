"""The list of all kinds of operations."""

from typing import Annotated, get_args

from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.backend import Backend
from planc.ops.base import Form, Op
from planc.ops.compile import Compile
from planc.ops.configure import Configure
from planc.ops.context import Attend, ContextParallel
from planc.ops.documents import ResetStates
from planc.ops.expert_capacity import LimitExperts
from planc.ops.expert_parallel import DispatchExperts
from planc.ops.freeze import Freeze
from planc.ops.fsdp import Divide, FullyShard, Prefetch
from planc.ops.load import Load
from planc.ops.lora import Adapt
from planc.ops.loss import ChunkLoss
from planc.ops.optimizer import Optimize
from planc.ops.pipeline import Pipeline
from planc.ops.quantization import Quantize
from planc.ops.rng import DrawApart, DrawByRank, SyncRng
from planc.ops.rotary import ShareLongestPosition
from planc.ops.tensor_parallel import Parallelize, Tie
from planc.ops.towers import DivideImages, ShareTower
from planc.sections.matmul.ops import LowPrecision, ScaleWeights

AnyOp = Annotated[
    Pipeline
    | Configure
    | Load
    | Adapt
    | LowPrecision
    | Parallelize
    | Tie
    | DispatchExperts
    | ContextParallel
    | Attend
    | ResetStates
    | Freeze
    | Quantize
    | Checkpoint
    | LimitExperts
    | Compile
    | FullyShard
    | Backend
    | ScaleWeights
    | Divide
    | Prefetch
    | ChunkLoss
    | DivideImages
    | ShareTower
    | ShareLongestPosition
    | SyncRng
    | DrawByRank
    | DrawApart
    | Optimize,
    Form(tag="op"),
]

KINDS: tuple[type[Op], ...] = get_args(get_args(AnyOp)[0])
"""In the order in which `apply` runs them."""


def units_of(op: Op) -> tuple[FullyShard, ...]:
    """The FSDP units of an operation; empty for other operations."""
    if isinstance(op, Backend):
        return tuple(op.units())
    return (op,) if isinstance(op, FullyShard) else ()
