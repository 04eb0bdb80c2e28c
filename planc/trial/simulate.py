"""Layout flow: checks in one process what a plan's tensor parallelism computes.

A small model runs forward and backward with all ranks of the tensor axes simulated (torch's
LocalTensorMode keeps one local tensor per rank and executes their collectives). Logits, loss and
every gradient are compared with the plain model. Nothing is inferred: a missing reduction, a
gradient that stays partial or a mix of local tensors and DTensors shows in the numbers, or as the
exception of the real code.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import _local_tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from planc.model.facts import below
from planc.ops import styles as ir
from planc.ops.lora import Adapt
from planc.ops.lowered import Lowered
from planc.ops.tensor_parallel import Parallelize
from planc.runtime.executor import Worker, alone
from planc.runtime.lora import missing_peft
from planc.runtime.meshes import Meshes
from planc.runtime.standalone.shards import in_own_order, rank_orders
from planc.trial.implicit_redistribution import Implicit, redistributions
from planc.trial.launcher import with_random_adapters
from planc.trial.local_tensor_patch import Literals
from planc.trial.numerics import FLOOR, parameters_by_name, relative
from planc.trial.observed_layouts import (
    agrees,
    by_rank,
    observed_layouts,
    resized_inputs,
    stated_inputs,
)
from planc.trial.outcome import LIMIT, Discrepancy, Outcome
from planc.trial.tensor_part import tensor_part
from planc.trial.trace import ModuleCall, Trace, code_line


@dataclass(slots=True)
class _Runs:
    """The run without the plan and the one with it."""

    single: nn.Module
    model: nn.Module
    lowered: Lowered
    output: Any = None
    right: Trace = field(default_factory=Trace)
    mine: Trace = field(default_factory=Trace)
    implicit: list[Implicit] = field(default_factory=list)


def simulate(
    make: Callable[[], nn.Module], inputs: dict[str, torch.Tensor], lowered: Lowered
) -> Outcome:
    """Runs a small model with and without the plan's tensor parallelism and checkpointing, and
    compares.

    Args:
        make: builds the small model, the same each time.
        inputs: the inputs of its forward, with labels.
        lowered: the plan, lowered for this model on its tensor axes only.
    """
    if distributed.is_initialized():
        return Outcome(verdict="unknown", reason="a process group is running in this process")
    # built outside the simulation, in which random numbers differ by rank
    lowered = with_random_adapters(tensor_part(lowered))
    if (missing := missing_peft(lowered)) is not None:
        return Outcome(verdict="unknown", reason=missing)
    runs = _Runs(alone(make(), lowered), alone(make(), lowered), lowered)
    recomputed = Trace()
    try:
        with runs.right.of(dict(runs.single.named_modules())):
            runs.output = runs.single(**inputs)
        if getattr(runs.output, "loss", None) is None:
            return Outcome(verdict="unknown", reason="the model's forward gives no loss")
        with recomputed.of(dict(runs.single.named_modules())):
            runs.output.loss.backward()
    except Exception as error:
        return Outcome(verdict="unknown", reason=f"the small model does not run: {_first(error)}")
    with warnings.catch_warnings(), _quiet(), _ranks(lowered.world_size):
        warnings.simplefilter("ignore")
        outcome = _compare(runs, inputs)
    return replace(outcome, recomputed=next(iter(recomputed.calls), ""))


@contextmanager
def _ranks(count: int) -> Iterator[None]:
    """A process group whose ranks are all simulated in this process."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        with LocalTensorMode(count), Literals(), _Waits():
            yield
    finally:
        distributed.destroy_process_group()


class _Waits(TorchDispatchMode):  # type: ignore[misc]  # torch has no types for it
    """Waits for each collective at once: torch warns at exit about collectives that were not
    awaited.

    Recomputed checkpoints have such: no one needs their last output.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and isinstance(out, torch.Tensor):
            torch.ops._c10d_functional.wait_tensor(out)
        return out


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses what torch logs in addition to raising it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _compare(runs: _Runs, inputs: dict[str, torch.Tensor]) -> Outcome:
    model, mine = runs.model, runs.mine
    worker = Worker(model, dict(model.named_modules()), Meshes(runs.lowered, "cpu"), runs.lowered)
    styled = set(_styled(runs.lowered))
    try:
        for op in runs.lowered.ops:
            if not isinstance(op, Adapt):  # the model already has adapters
                worker.run(op)
        with mine.of(worker.modules), redistributions(mine, styled, runs.implicit):
            output = model(**inputs)
        output.loss.backward()
    except Exception as error:
        return _crashed(error, worker, runs)
    gradients = list(_gradients(runs))
    logits = _error(output.logits, runs.output.logits)
    loss = _error(output.loss, runs.output.loss)
    found = [*_sizes(runs)]
    if max(logits, loss) > LIMIT:
        found.append(
            _first_wrong_output(runs) or Discrepancy(kind="output", subject="", error=logits)
        )
    found += [p for p in gradients if p.error > LIMIT or p.kind == "missing"]
    return Outcome(
        verdict="refuted" if found else "proved",
        discrepancies=(*found, *_unstated(runs)),
        logits=logits,
        loss=loss,
        gradient=max((p.error for p in gradients), default=0.0),
        modules=_modules(runs, gradients),
    )


def _styled(lowered: Lowered) -> Iterator[str]:
    """Yields the modules whose computation a style distributes."""
    for op in lowered.ops:
        if isinstance(op, Parallelize) and not isinstance(op.style, ir.Input | ir.Output):
            yield from op.modules.names()


# What differs ------------------------------------------------------------------------------------


def _gradients(runs: _Runs) -> Iterator[Discrepancy]:
    reference = dict(parameters_by_name(runs.single))
    every = (p.grad for p in reference.values() if p.grad is not None)
    floor = FLOOR * max((float(grad.abs().max()) for grad in every), default=0.0)
    orders = rank_orders(runs.model)
    for name, parameter in parameters_by_name(runs.model):
        wanted = reference[name].grad
        if wanted is None:
            continue
        call = runs.mine.calls.get(name.rpartition(".")[0])
        line = call.line if call else ""
        if parameter.grad is None:
            yield Discrepancy(kind="missing", subject=name, error=1.0, line=line)
            continue
        error = _error(in_own_order(_full(parameter.grad), orders.get(name)), wanted, floor)
        kind = "gradient"
        if error > LIMIT and not isinstance(parameter.grad, DTensor):
            total = sum(by_rank(parameter.grad), torch.zeros_like(wanted))
            if _relative(total, wanted, floor) < LIMIT:
                kind = "partial"
        yield Discrepancy(kind=kind, subject=name, error=error, line=line)


def _first_wrong_output(runs: _Runs) -> Discrepancy | None:
    """The first module, in the order in which they end, whose output is wrong."""
    last = None
    for name in runs.mine.finished:
        mine, right = runs.mine.calls[name], runs.right.calls.get(name)
        error = _output_error(mine, right)
        if error is None or right is None or right.output is None or mine.output is None:
            continue
        if error > LIMIT and not observed_layouts(mine.output, right.output, LIMIT):
            detail = (
                f"`{last}` before it gives a part of a sum that nothing adds up" if last else ""
            )
            before = last or ""
            return Discrepancy(
                kind="output",
                subject=name,
                error=error,
                line=mine.line,
                detail=detail,
                before=before,
            )
        partial = observed_layouts(mine.output, right.output, LIMIT) == (ir.Partial(),)
        if not partial or isinstance(mine.output, DTensor):
            last = None
        elif last is None or not below(last, name):  # an enclosing module returns the same tensor
            last = name
    return None


def _output_error(mine: ModuleCall, right: ModuleCall | None) -> float | None:
    """The relative error of a module's output, None if it cannot be compared."""
    if right is None or mine.output is None or right.output is None:
        return None
    whole = _full(mine.output)
    if not _comparable(whole, right.output):
        return None
    return _error(whole, right.output)


def _modules(runs: _Runs, gradients: list[Discrepancy]) -> tuple[tuple[str, float | None], ...]:
    """The error of each module that the plain model ran: its output and its own gradients."""
    found: dict[str, float | None] = {}
    for name, right in runs.right.calls.items():
        mine = runs.mine.calls.get(name)
        if mine is None or (mine.output is None and right.output is not None):
            found[name] = None
            continue
        error = _output_error(mine, right) or 0.0
        if error > LIMIT and mine.output is not None and right.output is not None:
            # a shard or summand can have the same shape
            error = 0.0 if observed_layouts(mine.output, right.output, LIMIT) else error
        found[name] = error
    for part in gradients:
        holder = part.subject.rpartition(".")[0]
        found[holder] = max(found.get(holder) or 0.0, part.error)
    return tuple(found.items())


def _sizes(runs: _Runs) -> Iterator[Discrepancy]:
    """Positions and ids that the model's code made as long as a local shard of the sequence."""
    for name, call in runs.mine.calls.items():
        right = runs.right.calls.get(name)
        for which, value, wanted in resized_inputs(call, right) if right else ():
            detail = f"{which} of {list(value.shape)} where one process has {list(wanted.shape)}"
            yield Discrepancy(kind="size", subject=name, detail=detail, line=call.line)
            return


def _unstated(runs: _Runs) -> Iterator[Discrepancy]:
    """Yields layouts and redistributions that the plan does not state, whether right or wrong."""
    for name, which, layout, _ in stated_inputs(runs.lowered):
        mine, right = runs.mine.calls.get(name), runs.right.calls.get(name)
        if mine is None or right is None:
            continue
        value, wanted = mine.inputs.get(which), right.inputs.get(which)
        if value is None or wanted is None:
            continue
        found = observed_layouts(value, wanted, LIMIT)
        if found and not agrees(layout, found, wanted.dim()):
            both = (str(layout), str(found[0]))
            yield Discrepancy(kind="boundary", subject=name, layouts=both, line=mine.line)
    for seen in runs.implicit:
        yield Discrepancy(
            kind="unstated",
            subject=seen.module,
            layouts=(seen.source, seen.target),
            op=seen.op,
            line=seen.line,
            before=seen.before,
        )


def _crashed(error: Exception, worker: Worker, runs: _Runs) -> Outcome:
    """The outcome of an exception: unknown if the simulation itself failed, else refuted."""
    frames = traceback.extract_tb(error.__traceback__)
    if _raised_by_simulation(error, Path(frames[-1].filename)):
        return Outcome(verdict="unknown", reason=f"the simulation failed: {_first(error)}")
    own_frames = [f for f in frames if "/modeling_" in f.filename.replace("\\", "/")]
    line = (
        code_line(own_frames[-1].filename, own_frames[-1].lineno or 0, own_frames[-1].line)
        if own_frames
        else ""
    )
    part = _first_wrong_output(runs)
    subject = part.subject if part else worker.at
    if runs.mine.calls and not part:  # the model runs, so the plan has been applied
        subject = _next_module(runs) or runs.mine.finished[-1]
    crash = Discrepancy(
        kind="crash",
        subject=subject,
        detail=_first(error),
        line=line,
        before=runs.mine.leaf,
    )
    found = (crash, *([part] if part else []), *_sizes(runs), *_unstated(runs))
    return Outcome(verdict="refuted", discrepancies=found, modules=_modules(runs, []))


def _raised_by_simulation(error: Exception, raised: Path) -> bool:
    """Whether torch's simulation of ranks failed, and not the model under the plan.

    The file that raises decides: LocalTensorMode raises for what it cannot simulate, such as a
    number that differs between ranks, and an op that fails on a rank's tensors raises elsewhere,
    as on a cluster. One case is recognized by its message: if an op does not accept LocalTensor,
    torch raises a TypeError in any file.

    Args:
        error: the exception that ended the run.
        raised: the file of its innermost frame.
    """
    if raised.parent == Path(_local_tensor.__file__).parent:
        return True
    return isinstance(error, TypeError) and _local_tensor.LocalTensor.__name__ in str(error)


def _next_module(runs: _Runs) -> str:
    """The module that was to end next."""
    return next((name for name in runs.right.finished if name not in runs.mine.finished), "")


# Tensors -----------------------------------------------------------------------------------------


def _full(value: torch.Tensor) -> torch.Tensor:
    """The full tensor, if its layout is known."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def _comparable(value: torch.Tensor, wanted: torch.Tensor) -> bool:
    return all(part.shape == wanted.shape for part in by_rank(value))


def _error(value: torch.Tensor, wanted: torch.Tensor, floor: float = 0.0) -> float:
    """The largest relative error over the ranks; 1 if the shapes differ."""
    whole = _full(value)
    if not _comparable(whole, wanted):
        return 1.0
    return max(_relative(part, wanted, floor) for part in by_rank(whole))


def _relative(value: torch.Tensor, wanted: torch.Tensor, floor: float = 0.0) -> float:
    return relative(value.detach(), wanted.detach(), max(floor, 1e-12))


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
