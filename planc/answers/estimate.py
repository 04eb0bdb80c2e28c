"""The rest of the Python API: what is asked about a plan, each as the command of its name asks it.

`print` shows each answer as the terminal does. Where there is no answer, `PlanError` says why.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planc.answers.apply import Overrides, compiled_for, model_of, settings_of
from planc.diagnostics.diagnostic import PlanError, Sink

if TYPE_CHECKING:
    from torch import nn

    from planc.compiler import Compiled
    from planc.proof.verify import Proof
    from planc.provenance.answer import Reasons
    from planc.tools.estimate.answer import Answer as Estimate
    from planc.tools.init.init import InitResult
    from planc.tools.suggest.measured import MeasuredRanks


def init(
    model: str | os.PathLike[str] | nn.Module,
    *,
    overrides: Overrides = (),
    allow_code: bool = False,
) -> InitResult:
    """Drafts a first plan for a model, and proves it as it is written.

    Args:
        model: as for `check`.
        overrides: sizes of the axes `pp`, `cp` and `ep`.
        allow_code: whether Python code that `model` names may be run.

    Returns:
        `.text` is the plan, `.findings` what could not be decided or proved.

    Raises:
        PlanError: the model or an axis is wrong.
    """
    from planc.tools.init.init import drafted

    sink = Sink()
    made = drafted(model_of(model), settings_of(overrides), sink, allow_code=allow_code)
    if made is None:
        raise PlanError(sink)
    return replace(made, findings=tuple(sink))


def why(
    model: str | os.PathLike[str] | nn.Module,
    plan: str | os.PathLike[str] | None,
    name: str,
    *,
    world_size: int | None = None,
    overrides: Overrides = (),
    allow_code: bool = False,
) -> Reasons:
    """The lines of a plan that decide a module or a parameter, and what a rank holds of it.

    Args:
        name: its torch name, such as `model.layers.0.mlp.up_proj.weight`; the rest as for `check`.

    Raises:
        PlanError: the plan has errors, or the model has no such module.
    """
    from planc.provenance.query import why as reasons

    compiled, sink = compiled_for(model, plan, world_size, overrides, allow_code)
    found = reasons(name, compiled, sink)
    if found is None:
        raise PlanError(sink)
    return found


def estimate(
    model: str | os.PathLike[str] | nn.Module,
    plan: str | os.PathLike[str] | None = None,
    *,
    batch: int,
    seq: int,
    world_size: int | None = None,
    overrides: Overrides = (),
    micro_batches: int = 1,
    hardware: str = "h100-8x",
    stack: str = "torch",
    optimizer: str = "adamw",
    attention: str = "sdpa",
    imbalance: float = 1.0,
    allow_code: bool = False,
) -> Estimate:
    """Memory and time of a training step.

    Args:
        batch, seq: rows of a step on all ranks, and tokens of a row.
        micro_batches: the passes that a step accumulates gradients over.
        hardware, stack: names of profiles, or paths of `.toml` files.
        optimizer: `adamw`, `adam`, `sgd` or `momentum`.
        imbalance: how many times the mean of tokens the experts of the fullest rank get.
        attention: `sdpa` or `eager`; the rest as for `check`.

    Returns:
        `.estimate` has the numbers (`.fits`, `.usable`, `.time.seconds`), `.findings` what does
        not fit and what would help.

    Raises:
        PlanError: the plan has errors, or the batch or a profile is wrong.
        ValueError: a size is not positive, or there is no such optimizer or attention.
    """
    from planc.tools.estimate.advice import advise
    from planc.tools.estimate.answer import judge_fit

    compiled, sink = compiled_for(model, plan, world_size, overrides, allow_code)
    found = _estimated(
        compiled,
        sink,
        {"batch": batch, "seq": seq, "micro_batches": micro_batches},
        hardware=os.fspath(hardware),
        stack=os.fspath(stack),
        optimizer=optimizer,
        attention=attention,
        imbalance=imbalance,
    )
    judge_fit(found, sink)
    advise(found, sink)
    return replace(found, findings=tuple(sink))


def measure(
    model: str | os.PathLike[str] | nn.Module,
    plan: str | os.PathLike[str] | None = None,
    *,
    batch: int,
    seq: int,
    world_size: int | None = None,
    overrides: Overrides = (),
    micro_batches: int = 1,
    hardware: str = "h100-8x",
    optimizer: str = "adamw",
    attention: str = "sdpa",
    exact: bool = False,
    stages: Iterable[int] = (),
    device: str = "",
    layers: int | None = None,
    images: int = 0,
    allow_code: bool = False,
) -> MeasuredRanks:
    """The bytes that ranks of a plan hold in a step, counted by running one of each place of the
    pipeline in a process of its own.

    Args:
        batch, seq, micro_batches, hardware, optimizer, attention: as for `estimate`.
        exact: whether all layers are run, not a few.
        stages: places in the pipeline; none for all.
        device: `cpu` or `cuda`, on whose memory all layers are run and timed; empty for fake
            tensors, which have none.
        layers: of a model with fewer; None for all.
        images: of each row, of the size that the configuration says; 0 for text alone. The rest as
            for `check`.

    Returns:
        `.counted` has what was counted in the form of an estimate (`.fits`, `.fullest.peak` in
        bytes, `.ranks` by moment), `.answer` the estimate beside it, `.ranks` on a device the
        seconds of each part of a step, and where it had no more memory.

    Raises:
        PlanError: the plan has errors, the batch or the profile is wrong, or one rank alone cannot
            run the step (PL727).
        ValueError: a size is not positive, or there is no such optimizer, attention or device.
    """
    from planc.model.fused_kernels import run_on
    from planc.tools.measure.count import NotCountedError, shallower
    from planc.tools.suggest.measured import measure as measured

    if device not in ("", "cpu", "cuda"):
        raise ValueError(f"device is cpu or cuda, not {device!r}")
    compiled, sink = compiled_for(model, plan, world_size, overrides, allow_code)
    try:
        if layers is not None:
            compiled = shallower(compiled, layers, sink, device)
        found = _estimated(
            compiled,
            sink,
            {"batch": batch, "seq": seq, "micro_batches": micro_batches},
            hardware=os.fspath(hardware),
            optimizer=optimizer,
            attention=attention,
            kernels=run_on(device),
        )
        return measured(
            compiled,
            found,
            exact=exact,
            places=tuple(stages),
            device=device,
            allow_code=allow_code,
            images=images,
        )
    except NotCountedError as error:
        error.report(sink)
    raise PlanError(sink)


def _estimated(
    compiled: Compiled,
    sink: Sink,
    sizes: Mapping[str, int],
    *,
    imbalance: float = 1.0,
    **words: Any,
) -> Estimate:
    """The estimate of a step, without what is said of it.

    Raises:
        PlanError, ValueError: as `estimate`.
    """
    from planc.tools.estimate.answer import Request, answer_for
    from planc.tools.estimate.from_plan import OPTIMIZERS, Batch

    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{name} is a positive number, not {size!r}")
    for name, known in (("optimizer", tuple(OPTIMIZERS)), ("attention", _ATTENTION)):
        if words[name] not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, not {words[name]!r}")
    if not 1 <= imbalance < math.inf:
        raise ValueError(f"imbalance is a number from 1 on, not {imbalance!r}")
    step = Batch(
        global_batch=sizes["batch"],
        sequence=sizes["seq"],
        micro_batches=sizes["micro_batches"],
        imbalance=imbalance,
    )
    found = answer_for(compiled, Request(batch=step, **words), sink)
    if found is None or compiled.applied is None:
        raise PlanError(sink)
    return found


_ATTENTION = ("sdpa", "eager")


def verify(
    model: str | os.PathLike[str],
    plan: str | os.PathLike[str],
    *,
    world_size: int | None = None,
    overrides: Overrides = (),
    processes: int = 4,
    timeout: float = 120.0,
    precision: bool = False,
    allow_code: bool = False,
) -> Proof:
    """Proves a plan on real processes of this machine, with a small model of the family.

    Args:
        model, plan: as for `check`, by name: the processes build the model themselves.
        world_size: the number of ranks of the real run; by default `processes`.
        processes: at most as many as ranks.
        timeout: seconds for all of it.
        precision: whether the plan's own mixed precision runs; the result is not stored.

    Returns:
        `.verdict` is `verified`, `refuted` or `unknown`, `.certificate` the document that
        `planc verify --certificate` writes, `.findings` what is wrong.

    Raises:
        PlanError: the plan has errors, so that nothing was run.
        TypeError: the model is a module.
        ValueError: the timeout is not positive.
    """
    from planc.proof.verify import verify as proved

    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"verify takes the name of a model, not {type(model).__name__}")
    if timeout <= 0:
        raise ValueError(f"timeout is a positive number of seconds, not {timeout!r}")
    sink, settings = Sink(), settings_of(overrides)
    found = proved(
        os.fspath(model),
        os.fspath(plan),
        sink,
        world_size=world_size,
        processes=processes,
        settings=settings,
        allow_code=allow_code,
        timeout=timeout,
        precision=precision,
    )
    if found.certificate is None:
        raise PlanError(sink)
    return replace(found, findings=tuple(sink))
