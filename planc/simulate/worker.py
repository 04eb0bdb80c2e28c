"""One rank of a proof, from its fork to the result in the folder."""

import contextlib
import datetime
import faulthandler
import json
import math
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from planc.diagnostics.diagnostic import Sink
from planc.files import atomic_write
from planc.ops.document import loads
from planc.ops.lowered import Lowered
from planc.proxy.user_model import ModelBuilder, builder_of
from planc.runtime.preconditions import of_all_ranks
from planc.runtime.standalone.shards import plain_name
from planc.simulate.discrepancies import Runs, first_wrong_output
from planc.simulate.launcher import Job
from planc.simulate.numerics import NEARLY, InFloat64, device_for
from planc.simulate.program import RankResult, SingleError
from planc.simulate.prove import Errors, prove, train

_MAKERS: dict[str, ModelBuilder] = {}


def prepare(job: Job) -> None:
    """Work that all ranks share, done once before the fork."""
    torch.set_num_threads(1)
    try:
        builder = _MAKERS[job.digest] = builder_of(job.config, job.code)
        _ = builder.choice  # computed once for all ranks
    except Exception:  # each rank tries again and reports the error
        _MAKERS.clear()


def main(job: Job, number: int) -> int:
    """Writes `<number>.json`; returns 0 if there is a comparison, whatever its result."""
    report: dict[str, Any] = {"rank": number, "phase": "start"}
    stack = (Path(job.folder) / f"{number}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack)
    try:
        report["device"] = device = device_for(job.ranks)
        if device == "cuda":
            torch.cuda.set_device(number)
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        distributed.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            rank=number,
            world_size=job.ranks,
            store=distributed.FileStore(str(Path(job.folder) / "store"), job.ranks),
            timeout=datetime.timedelta(seconds=job.seconds),
        )
        compare_with_reference(job, report)
    except BaseException as error:
        report["single"] = isinstance(error, SingleError)
        report["error"] = f"{type(error).__name__}: {error}".strip().removeprefix("SingleError: ")
        report["frames"], report["module"] = _frames(error), _module(error)
    report["time"] = time.monotonic()
    atomic_write.write(Path(job.folder) / f"{number}.json", json.dumps(_finite(report)))
    return int("error" in report)


def _frames(error: BaseException) -> list[tuple[str, int, str, str]]:
    """The frames of an exception, after those of its causes."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    before = _frames(cause) if cause else []
    stack = traceback.extract_tb(error.__traceback__)
    return [*before, *((f.filename, f.lineno or 0, f.name, f.line or "") for f in stack)]


def _module(error: BaseException) -> str:
    """The name of the innermost module in whose call an exception was raised; empty for none."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    called = [m for m in (f.f_locals.get("self") for f in frames) if isinstance(m, nn.Module)]
    names = {id(m): name for name, m in called[0].named_modules()} if called else {}
    return next((plain_name(names[id(m)]) for m in reversed(called) if id(m) in names), "")


def compare_with_reference(job: Job, numbers: dict[str, Any]) -> None:
    """Trains this rank of a process group and the single process, and adds the errors and the phase
    to `numbers`. If all are nearly right, they are compared once more in float64, which tells a
    fault from the rounding of a model that amplifies it.

    Raises:
        SingleError: the model does not train in a single process.
    """

    def report(phase: str) -> None:
        numbers["phase"] = phase

    report("build")
    builder = _MAKERS.get(job.digest) or builder_of(job.config, job.code)
    sink = Sink()
    lowered = loads(job.lowered, "the lowered plan", sink)
    if lowered is None:
        raise ValueError("; ".join(d.message for d in sink))
    wrong = _wrong(builder, lowered, job, numbers, report)
    if wrong is None:
        return
    limits, seed = numbers["limits"], numbers["seeds"][-1]["seed"]
    nearly = all(numbers["seeds"][-1][kind] < NEARLY for kind in limits)
    if all(of_all_ranks(nearly and not job.precision)):
        exact = {"device": numbers["device"], "exact": True}
        wide: Any = InFloat64(builder)
        with contextlib.suppress(SingleError):  # of all ranks, where nothing was sent yet
            if _wrong(wide, lowered, job, exact, report) is None:
                numbers.update(exact)
                return
    report("locate")
    beyond = {n: e for n, e in wrong.gradients.items() if e > limits["gradients"]}
    job = replace(job, limits=limits)
    numbers["first"] = _locate(builder, lowered, job, seed, beyond, device=numbers["device"])


def _wrong(
    builder: ModelBuilder,
    lowered: Lowered,
    job: Job,
    numbers: dict[str, Any],
    report: Callable[[str], None],
) -> Errors | None:
    """The errors of this rank for the first seed with which a rank's are beyond the limits; adds
    those of all seeds so far to `numbers`. None where all are within them.
    """
    numbers["seeds"] = []
    for seed in job.seeds:
        how = {"device": numbers["device"], "precision": job.precision}
        errors = prove(builder, lowered, job.digest, seed, report, **how)
        last = {"seed": seed, **_worst(errors)}
        numbers["seeds"].append(last)
        limits = numbers["limits"] = errors.limits or job.limits
        numbers["chooses"] = errors.chooses
        if any(of_all_ranks(any(not last[kind] <= limit for kind, limit in limits.items()))):
            return errors
    return None


def _worst(errors: Errors) -> dict[str, Any]:
    """The largest error of each kind, and the names with it."""
    out: dict[str, Any] = {"logits": errors.logits, "loss": errors.loss, "norm": errors.norm}
    for kind, values in (("gradients", errors.gradients), ("parameters", errors.parameters)):
        if name := max(values, key=values.__getitem__, default=""):
            out[kind], out[f"{kind}_at"] = values[name], name
    return out


def _locate(
    builder: ModelBuilder,
    lowered: Lowered,
    job: Job,
    seed: int,
    wrong: dict[str, float],
    *,
    device: str,
) -> dict[str, Any] | None:
    """Finds the first divergence of the models, by a second simulation that records module outputs.

    The first module whose output is wrong; if all outputs are right, the wrong gradient that
    backward computes first, which is that of the module that forward ran last.
    """
    if lowered.pipeline is not None:
        return None  # a stage has no outputs of its own, and its microbatches are parts of a batch
    result, reference, data = train(
        builder, lowered, job.digest, seed, lambda _: None, device=device, traced=True
    )
    seen = RankResult(
        data_rank=result.data_rank,
        part_rank=result.part_rank,
        parts=result.parts,
        traces=result.traces,
    )
    runs = Runs(lowered=lowered, batches=data, reference=reference, results=of_all_ranks(seen))
    first_wrong = first_wrong_output(runs, job.limits["logits"])
    order = {n: i for i, n in enumerate(reference.passes[0].traces[0].finished)}
    if first_wrong is not None:  # or the module before it, that gives a part of a sum
        name = first_wrong.before or first_wrong.subject or "the model"
        return {"what": "output", "name": name, "error": first_wrong.error, "order": 0}
    if not wrong:
        return None
    name = max(wrong, key=lambda n: order.get(n.rpartition(".")[0], -1))
    last = len(order) - order.get(name.rpartition(".")[0], -1)
    return {"what": "gradient", "name": name, "error": wrong[name], "order": last}


def _finite(value: Any) -> Any:
    """Replaces infinite numbers, which JSON does not have."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return 1e9 if isinstance(value, float) and not math.isfinite(value) else value
