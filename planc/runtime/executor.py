"""Runs a lowered plan on a model: exactly the operations of the list, in its order."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import assert_never

from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.tensor.parallel import parallelize_module

from planc.diagnostic import PlanError
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.compile import Compile
from planc.ops.configure import Configure
from planc.ops.freeze import Freeze
from planc.ops.fsdp import Divide, FullyShard, Prefetch
from planc.ops.load import Load
from planc.ops.lora import Adapt
from planc.ops.lowered import Lowered
from planc.ops.megatron_fsdp import MegatronShard
from planc.ops.quantization import Quantize
from planc.ops.registry import AnyOp
from planc.ops.rng import Draw
from planc.ops.tensor_parallel import Parallelize, Tie
from planc.runtime import megatron_fsdp
from planc.runtime.fsdp import arrive, divide, keywords, prefetch, recomputing, wrap
from planc.runtime.lora import inject, require
from planc.runtime.meshes import Meshes, device_of, start
from planc.runtime.preconditions import called, ready, stop
from planc.runtime.run import Run
from planc.runtime.standalone.rng import draw_alike
from planc.runtime.tensor_styles import build, imported

_log = logging.getLogger("planc")


def apply_lowered(
    model: nn.Module,
    lowered: Lowered,
    *,
    digest: str,
    device_type: str | None = None,
    describe: Callable[[], str] | None = None,
    allow_code: bool = False,
) -> Run:
    """Spreads a model over the ranks of this run, in place.

    Inside a process group it works over that one; outside, it starts one: torchrun's, or one of
    a single rank.

    Args:
        model: on meta, CPU or CUDA, and not parallel yet.
        lowered: the operations.
        digest: of `lowered`; all ranks must have the same.
        device_type: `cpu` or `cuda`; by default where the model is, from meta `cuda` if there is
            any.
        describe: gives the text of `Run.describe`.
        allow_code: whether styles of the plan's own may be imported.

    Raises:
        PlanError: PL172 (a style of the plan's own), PL490 (world size), PL491 (digests differ),
            PL493 (parallel already), PL494 (another model), PL495 (no process group or mesh), PL499
            (Megatron-FSDP cannot run), all before the model is touched; PL492 (torch refused an
            operation).
    """
    began = time.perf_counter()
    _code(lowered, allow_code)
    with _without_collection():
        modules, meshes = _prepare(model, lowered, digest, device_of(model, device_type))
        worker = Worker(model, modules, meshes, lowered)
        for op in lowered.stage.ops:
            try:
                worker.run(op)
            except Exception as error:
                raise _refused(op, worker.at, error) from error
    if distributed.get_rank() == 0:
        taken = time.perf_counter() - began
        shape = " | ".join(f"{a.name} {a.size}" for a in lowered.axes)
        _log.info(
            "plan %s (%s) applied to %s on %s in %.2f s",
            *(lowered.plan, digest[:12], lowered.model, shape, taken),
        )
    return Run(
        model=model,
        lowered=lowered,
        digest=digest,
        meshes=meshes,
        text=describe or (lambda: f"{lowered.plan} for {lowered.model}, {digest[:12]}"),
    )


def _code(lowered: Lowered, allowed: bool) -> None:
    """The styles of the plan's own, imported before anything is touched."""
    for path in lowered.code:
        if not allowed:
            raise stop(
                "PL172",
                f"the plan has a style of its own, {path}, which is code",
                help="look at it, then allow it: `planc.apply(..., allow_code=True)`",
            )
        try:
            imported(path)
        except Exception as error:
            text = f"{type(error).__name__}: {_first(error)}"
            raise stop("PL172", f"the style {path} cannot be imported: {text}") from error


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection: torch makes so many small objects that it would be half the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _prepare(
    model: nn.Module, lowered: Lowered, digest: str, device: str
) -> tuple[dict[str, nn.Module], Meshes]:
    """All that can fail before the model is touched; a process group of its own goes with it."""
    started = False
    try:
        require(lowered)
        megatron_fsdp.require(lowered, device)
        started = start(device)
        return ready(model, lowered, digest), Meshes(lowered, device)
    except Exception as error:
        if started:
            distributed.destroy_process_group()
        if isinstance(error, PlanError):
            raise
        raise stop("PL495", f"no process group or mesh on {device}: {_first(error)}") from error


def _refused(op: AnyOp, at: str, error: Exception) -> PlanError:
    return stop("PL492", f"torch refused {called(op)} of {at or 'the model'}: {_first(error)}")


def _first(error: Exception) -> str:
    """The first line that an error says; the rest is in the error that this one is chained to."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Worker:
    """Runs operations on one model.

    Args:
        model: what `modules` belong to.
        modules: every module under the name that it had at first, whatever was wrapped since.
        meshes: the mesh and its parts.
        lowered: the plan that they are of.
        at: the names that torch is at work on, for a message.
    """

    def __init__(
        self, model: nn.Module, modules: dict[str, nn.Module], meshes: Meshes, lowered: Lowered
    ) -> None:
        self.lowered = lowered
        self.model = model
        self.modules = modules
        self.meshes = meshes
        self.at = ""

    def run(self, op: AnyOp) -> None:
        self.at = ""
        match op:
            case Configure():
                owner, _, name = op.name.rpartition(".")
                config = self.model.config
                setattr(attrgetter(owner)(config) if owner else config, name, op.value)
            case Load():
                arrive(self.model, op)
            case Parallelize():
                mesh, style = self.meshes.root[op.axes], build(op.style)
                for self.at in op.modules.names():
                    # by name, and not by a dictionary of names, which torch would search for again
                    parallelize_module(self.modules[self.at], mesh, style)
            case Tie():
                self._tie(op)
            case Adapt():
                self._adapt(op)
            case Freeze():
                for self.at in op.modules.names():
                    self.modules[self.at].requires_grad_(op.trainable)
            case Quantize():
                self._quantize(op)
            case Checkpoint():
                self._checkpoint(op)
            case Compile():
                for self.at in op.modules.names():
                    self.modules[self.at].compile(fullgraph=op.fullgraph)
            case FullyShard():
                self._shard(op)
            case MegatronShard():
                megatron_fsdp.shard(self.model, op, self.lowered, self.meshes.root)
            case Divide():
                divide(op, self.model, self.modules, self.meshes.root)
            case Prefetch():
                prefetch(op, self.modules)
            case Draw():
                draw_alike(self.meshes.root, op.axis)
            case _:
                assert_never(op)

    def _inner(self, name: str) -> nn.Module:
        """The module itself, whatever it is wrapped in: the one that holds its children."""
        module = self.modules[name]
        return (
            module._checkpoint_wrapped_module if isinstance(module, CheckpointWrapper) else module
        )

    def _tie(self, op: Tie) -> None:
        self.at = op.parameter
        owner, _, name = op.parameter.rpartition(".")
        source, _, other = op.source.rpartition(".")
        setattr(self._inner(owner), name, getattr(self._inner(source), other))

    def _adapt(self, op: Adapt) -> None:
        """peft's layer takes the place, and the name, of the layer that it is around."""
        self.at = ", ".join(map(str, op.members))
        inject(self.model, op)
        for name in op.names():
            layer = self.model.get_submodule(name)
            inner = layer.named_modules()
            self.modules |= {f"{name}.{n}" if n else name: module for n, module in inner}

    def _quantize(self, op: Quantize) -> None:
        from planc.runtime import quantization

        for members in op.members:
            for self.at in members.names():
                quantization.quantise(self.modules[self.at], op, self.meshes.root.device_type)

    def _checkpoint(self, op: Checkpoint) -> None:
        options = recomputing(op)
        for self.at in op.modules.names():
            parent, _, last = self.at.rpartition(".")
            wrapped = checkpoint_wrapper(
                self.modules[self.at], checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options
            )
            self._inner(parent).register_module(last, wrapped)
            self.modules[self.at] = wrapped

    def _shard(self, op: FullyShard) -> None:
        shared = keywords(op, self.meshes, self.modules)
        names = [name for members in op.members for name in members.names()]
        if op.group:
            self.at = f"[{', '.join(names)}]"
            wrap(op, [self.modules[name] for name in names], shared)
            return
        for self.at in names:
            wrap(op, self.modules[self.at], shared)
