"""Layout flow: what a plan's tensor parallelism computes, found out in one process.

A small model of the same code runs forward and backward with all ranks of the tensor axes
simulated (torch's LocalTensorMode holds one local tensor for each rank and carries out their
collectives), and logits, loss and every gradient are compared with the plain model. Nothing is
inferred: a missing reduction, a gradient that stays a part of a sum or a mix of local and
distributed tensors shows as what it does to the numbers, or as the error of the real run.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from planc.lowering.ops import Freeze, Lowered, Parallelize, Tie
from planc.runtime.adapters import adapted, missing_peft
from planc.runtime.apply import Worker
from planc.runtime.locate import Outputs, watched
from planc.runtime.meshes import Meshes
from planc.runtime.numerics import FLOOR, relative
from planc.runtime.verify import told_apart

LIMIT = 1e-4
"""Largest relative error that counts as equal, in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Where the two runs part.

    Args:
        kind: `output`, `gradient`, `partial` (a gradient whose sum over the ranks is right, and
            that nothing sums), `missing` (no gradient) or `crash`.
        subject: the torch name of a module or of a parameter, empty where it is not known.
        error: the relative error, 0 for a crash.
        detail: torch's message and the model's source line, for a crash.
        before: the module without modules inside that ended last before a crash.
    """

    kind: str
    subject: str
    error: float = 0.0
    detail: str = ""
    before: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulation found.

    Args:
        verdict: `proved`, `refuted` or `unknown`.
        reason: why it is unknown.
        parts: where the runs part, the first in execution order in front.
        logits, loss, gradient: the largest relative errors.
    """

    verdict: str
    reason: str = ""
    parts: tuple[Part, ...] = ()
    logits: float = 0.0
    loss: float = 0.0
    gradient: float = 0.0


@dataclass(frozen=True, slots=True)
class _Plain:
    """The run without a plan."""

    model: nn.Module
    trace: Outputs
    output: Any


def simulate(
    make: Callable[[], nn.Module], inputs: dict[str, torch.Tensor], lowered: Lowered
) -> Outcome:
    """Whether the tensor-parallel operations of a plan leave the model the same.

    Args:
        make: builds the small model, the same each time.
        inputs: what its forward takes, with labels.
        lowered: the plan, lowered for this model over its tensor axes alone.
    """
    if distributed.is_initialized():
        return Outcome(verdict="unknown", reason="a process group is running in this process")
    lowered = told_apart(lowered)
    if (missing := missing_peft(lowered)) is not None:
        return Outcome(verdict="unknown", reason=missing)
    single = adapted(make(), lowered)
    plain: Outputs = {}
    try:
        with watched(single, plain, lambda _, value: value.detach()):
            right = single(**inputs)
        right.loss.backward()
    except Exception as error:
        return Outcome(verdict="unknown", reason=f"the small model does not run: {_first(error)}")
    # outside the simulation, where random numbers would differ by rank
    model = adapted(make(), lowered)
    with warnings.catch_warnings(), _quiet(), _ranks(lowered.world_size):
        warnings.simplefilter("ignore")
        return _compare(_Plain(single, plain, right), model, inputs, lowered)


@contextmanager
def _ranks(count: int) -> Iterator[None]:
    """A process group of ranks that are all simulated here."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        with LocalTensorMode(count):
            yield
    finally:
        distributed.destroy_process_group()


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs what it also raises."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _compare(
    right: _Plain, model: nn.Module, inputs: dict[str, torch.Tensor], lowered: Lowered
) -> Outcome:
    trace: Outputs = {}
    worker = Worker(model, dict(model.named_modules()), Meshes(lowered, "cpu"))
    try:
        for op in lowered.ops:
            if isinstance(op, Parallelize | Freeze | Tie):
                worker.run(op)
        with watched(model, trace, lambda _, value: _whole(value)):
            output = model(**inputs)
        output.loss.backward()
    except Exception as error:
        return _crashed(error, worker, trace, right.trace)
    gradients = list(_gradients(right.model, model))
    logits = _error(output.logits, right.output.logits)
    loss = _error(output.loss, right.output.loss)
    parts = [p for p in gradients if p.error > LIMIT or p.kind == "missing"]
    if max(logits, loss) > LIMIT:
        parts.insert(
            0, _first_part(trace, right.trace) or Part(kind="output", subject="", error=logits)
        )
    return Outcome(
        verdict="refuted" if parts else "proved",
        parts=tuple(parts),
        logits=logits,
        loss=loss,
        gradient=max((p.error for p in gradients), default=0.0),
    )


def _gradients(single: nn.Module, model: nn.Module) -> Iterator[Part]:
    reference = dict(single.named_parameters())
    every = (p.grad for p in reference.values() if p.grad is not None)
    floor = FLOOR * max((float(grad.abs().max()) for grad in every), default=0.0)
    for name, parameter in model.named_parameters():
        wanted = reference[name].grad
        if wanted is None:
            continue
        if parameter.grad is None:
            yield Part(kind="missing", subject=name, error=1.0)
            continue
        error = _error(parameter.grad, wanted, floor)
        kind = "gradient"
        if error > LIMIT and not isinstance(parameter.grad, DTensor):
            total = sum(_by_rank(parameter.grad), torch.zeros_like(wanted))
            if _relative(total, wanted, floor) < LIMIT:
                kind = "partial"
        yield Part(kind=kind, subject=name, error=error)


def _first_part(trace: Outputs, plain: Outputs) -> Part | None:
    """The first module, in the order in which they end, whose output is not the same."""
    for name, value in trace.items():
        wanted = plain.get(name)
        if wanted is None or not _comparable(value, wanted):
            continue
        error = _error(value, wanted)
        if error > LIMIT:
            return Part(kind="output", subject=name, error=error)
    return None


def _crashed(error: Exception, worker: Worker, trace: Outputs, plain: Outputs) -> Outcome:
    """An error of the simulation itself is unknown, any other would happen on the cluster."""
    frames = traceback.extract_tb(error.__traceback__)
    if "LocalTensor" in str(error) or frames[-1].filename.endswith("_local_tensor/__init__.py"):
        return Outcome(verdict="unknown", reason=f"the simulation failed: {_first(error)}")
    own = [f for f in frames if "/modeling_" in f.filename.replace("\\", "/")]
    where = ""
    if own:
        name = own[-1].filename.replace("\\", "/").rpartition("/")[2]
        where = f" ({name}:{own[-1].lineno}: {own[-1].line})"
    part = _first_part(trace, plain)
    subject = part.subject if part else worker.at
    if trace and not part:
        subject = _after(trace, plain) or next(reversed(trace))
    ended = list(trace)
    leaves = (n for n in reversed(ended) if not any(o.startswith(f"{n}.") for o in ended))
    before = next(leaves, "")
    detail = f"{_first(error)}{where}"
    crash = Part(kind="crash", subject=subject, detail=detail, before=before)
    return Outcome(verdict="refuted", parts=(crash, *([part] if part else [])))


def _after(trace: Outputs, plain: Outputs) -> str:
    """The module that was to end next."""
    return next((name for name in plain if name not in trace), "")


# Tensors -----------------------------------------------------------------------------------------


def _whole(value: torch.Tensor) -> torch.Tensor:
    """A tensor as every rank would see it whole, where its layout is known."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def _by_rank(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensor of each rank; a plain tensor is the same on all."""
    parts = getattr(value, "_local_tensors", None)
    return list(parts.values()) if parts is not None else [value]


def _comparable(value: torch.Tensor, wanted: torch.Tensor) -> bool:
    return all(part.shape == wanted.shape for part in _by_rank(value))


def _error(value: torch.Tensor, wanted: torch.Tensor, floor: float = 0.0) -> float:
    """The largest relative error over the ranks; 1 where the shapes differ."""
    whole = _whole(value)
    if not _comparable(whole, wanted):
        return 1.0
    return max(_relative(part, wanted, floor) for part in _by_rank(whole))


def _relative(value: torch.Tensor, wanted: torch.Tensor, floor: float = 0.0) -> float:
    return relative(value.detach(), wanted.detach(), max(floor, 1e-12))


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
