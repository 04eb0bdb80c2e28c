"""Memory and time of a step: `planc.estimate` and `planc.measure`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planc.answers.target import Overrides, compile_for
from planc.compiler import Compiled
from planc.diagnostics.diagnostic import PlanError, Sink
from planc.ops.lowered import Lowered
from planc.tools.estimate.advice import advise
from planc.tools.estimate.answer import Answer, Request, answer_for, judge_fit
from planc.tools.estimate.from_plan import OPTIMIZERS, Batch

if TYPE_CHECKING:
    from torch import nn

    from planc.tools.suggest.measured import MeasuredRanks


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
    hardware_changes: Iterable[str] = (),
    stack: str = "torch",
    kernels: str = "",
    optimizer: str = "adamw",
    attention: str = "sdpa",
    imbalance: float = 1.0,
    allow_code: bool = False,
) -> Answer:
    """Memory and time of a training step.

    Args:
        batch, seq: rows of a step on all ranks, and tokens of a row.
        micro_batches: the passes that a step accumulates gradients over.
        hardware, stack: names of profiles, or paths of `.toml` files.
        hardware_changes: fields of the hardware with other values: `network_latency_us=10`.
        kernels: of layers, likewise: `eager`, `compiled` or `fused`; empty for the plan's own.
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
    request = step_request(
        (batch, seq, micro_batches),
        imbalance=imbalance,
        hardware=os.fspath(hardware),
        hardware_changes=tuple(hardware_changes),
        stack=os.fspath(stack),
        layer_kernels=os.fspath(kernels),
        optimizer=optimizer,
        attention=attention,
    )
    compiled, sink = compile_for(model, plan, world_size, overrides, allow_code)
    answer = judge_step(compiled, request, sink)
    if answer is None:
        raise PlanError(sink)
    return replace(answer, findings=tuple(sink))


def judge_step(
    compiled: Compiled, request: Request, sink: Sink, *, advice: bool = True
) -> Answer | None:
    """The estimate of a step; reports what does not fit, and with `advice` what would help."""
    answer = answer_for(compiled, request, sink)
    if answer is not None:
        judge_fit(answer, sink)
        if advice:
            advise(answer, sink)
    return answer


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
    image_size: tuple[int, ...] = (),
    allow_code: bool = False,
) -> MeasuredRanks:
    """Returns the bytes that ranks of a plan hold in a step, counted by running each pipeline
    rank in a separate process.

    Args:
        batch, seq, micro_batches, hardware, optimizer, attention: as for `estimate`.
        exact: whether all layers are run, not a few.
        stages: the pipeline ranks to run, by number; empty for all.
        device: `cpu` or `cuda`, on whose memory all layers are run and timed; empty for fake
            tensors, which have none.
        layers: of a model with fewer; None for all.
        images: of each row; 0 for text alone.
        image_size: height and width of an image in pixels, if the configuration does not state
            them. The rest as for `check`.

    Returns:
        `.counted` has what was counted in the form of an estimate (`.fits`, `.fullest.peak` in
        bytes, `.ranks` by moment), `.answer` the estimate beside it and all
        `.findings`, `.ranks` on a device the seconds of each part of a step, and where it had no
        more memory.

    Raises:
        PlanError: the plan has errors, the batch or the profile is wrong, or one rank alone cannot
            run the step (PL727).
        ValueError: a size is not positive, or there is no such optimizer, attention or device.
    """
    from planc.tools.suggest import measured

    if device not in ("", "cpu", "cuda"):
        raise ValueError(f"device is cpu or cuda, not {device!r}")
    request = step_request(
        (batch, seq, micro_batches),
        hardware=os.fspath(hardware),
        optimizer=optimizer,
        attention=attention,
    )
    compiled, sink = compile_for(model, plan, world_size, overrides, allow_code)
    result = measured.measure(
        compiled,
        request,
        sink,
        exact=exact,
        places=tuple(stages),
        device=device,
        layers=layers,
        images=images,
        image_size=image_size,
        allow_code=allow_code,
    )
    if result is None:
        raise PlanError(sink)
    return replace(result, answer=replace(result.answer, findings=tuple(sink)))


def step_request(sizes: tuple[int, int, int], *, imbalance: float = 1.0, **choices: Any) -> Request:
    """The step to estimate: its batch, and the other fields of a request.

    Args:
        sizes: the batch, the tokens of a row, and the micro-batches.

    Raises:
        ValueError: as `estimate`.
    """
    for name, size in zip(("batch", "seq", "micro_batches"), sizes, strict=True):
        if type(size) is not int or size < 1:
            raise ValueError(f"{name} is a positive number, not {size!r}")
    for name, known in (("optimizer", tuple(OPTIMIZERS)), ("attention", ("sdpa", "eager"))):
        if name in choices and choices[name] not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, not {choices[name]!r}")
    if not 1 <= imbalance < math.inf:
        raise ValueError(f"imbalance is a number from 1 on, not {imbalance!r}")
    rows, tokens, passes = sizes
    batch = Batch(global_batch=rows, sequence=tokens, micro_batches=passes, imbalance=imbalance)
    return Request(batch=batch, **choices)


def fullest_step(lowered: Lowered, ranks: int, batch: int, passes: int) -> tuple[int, int]:
    """The batch and the passes of a rank with the most rows, where `run.accumulation` keeps the
    batch, and in a pass no more rows than on `ranks` ranks, the largest world size.
    """
    from planc.lowering.step import Step

    divisor = Step(lowered=lowered, micro_batches=passes).divisors[0]
    rows = math.ceil(batch / (divisor * ranks // lowered.world_size))
    most = math.ceil(batch / (divisor // passes * rows))
    divisor = divisor // passes * most
    return math.ceil(batch / divisor) * divisor, most
