"""Runs a proof on processes of this machine, from the command; imports no torch.

The processes are a session of their own, started by `fork_server`. However a proof ends, by a
verdict, an error, the time limit or Ctrl-C, all of them are ended before `compare` returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from planc.diagnostics.diagnostic import one_of
from planc.ops.document import digest, dumps
from planc.ops.lowered import Lowered
from planc.simulate.trial_part import separate_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job of a proof: a proxy model (`config`, or a user's own, `code`) and its plan as JSON.

    Args:
        seeds: of weights and data, one comparison each.
        limits: the largest errors that pass: `logits`, `loss`, `gradients`, `parameters`.
        folder: the folder in which each rank writes its result, `<rank>.json`.
        seconds: the timeout of a collective.
        precision: whether the plan's mixed precision runs; the ranks then derive the limits.
    """

    config: dict[str, Any]
    lowered: str
    digest: str
    ranks: int
    seeds: tuple[int, ...]
    limits: dict[str, float]
    folder: str
    seconds: float
    code: str = ""
    precision: bool = False

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Job:
        values = json.loads(text)
        return cls(**{**values, "seeds": tuple(values["seeds"])})


LIMITS = {"logits": 1e-4, "loss": 1e-4, "gradients": 1e-4, "norm": 1e-4, "parameters": 1e-3}
"""The largest relative errors in float32 that count as the same; parameters are those after two
steps of AdamW."""
SEEDS = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFailure:
    """Why there is no comparison.

    Args:
        kind: `rank` (it raised or died), `time` (timeout), `single` (the proxy model does not train
            in one process).
        rank, phase: which failed first (-1: unknown), in build, single, apply, parallel, compare or
            locate.
        detail: the last lines of the log, if no exception ended the rank.
        frames: file, line, function and source line of each call, innermost last, if an exception
            ended the rank; those of its causes come first.
        module: the name of the innermost module in whose call the exception was raised; empty for
            none.
    """

    kind: str
    message: str
    rank: int = -1
    phase: str = ""
    detail: str = ""
    frames: tuple[tuple[str, int, str, str], ...] = ()
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of comparing the parallel model with the single one, on a kind of device.

    Args:
        errors, limits: by kind, the largest error over ranks and seeds, and that which passes.
        worst: the names of the gradient and the parameter with the largest error.
        first: where the models diverge: `what` (output or gradient), `name`, `error`; or None.
        chooses: whether the model selects experts by numbers that are rounded.
        exact: whether it was compared in float64, where float32 was nearly right.
    """

    errors: dict[str, float]
    worst: dict[str, str]
    first: dict[str, Any] | None
    seconds: float
    device: str = "cpu"
    limits: dict[str, float] = field(default_factory=lambda: dict(LIMITS))
    chooses: bool = False
    exact: bool = False

    def with_section(self, name: str, other: Comparison) -> Comparison:
        """This comparison, and the largest error of the separate one of a section."""
        errors = {**self.errors, name: max(other.errors.values())}
        limits = {**self.limits, name: max(other.limits.values())}
        seconds = self.seconds + other.seconds
        return replace(self, errors=errors, limits=limits, seconds=seconds)

    @property
    def same(self) -> bool:
        return all(map(self.within_limit, self.limits))

    def within_limit(self, kind: str) -> bool:
        """Whether the errors of a kind are within its limit, or the kind was not compared."""
        return kind not in self.limits or self.errors[kind] <= self.limits[kind]


class ForkServer:
    """Processes that import torch while the command still compiles; made by `fork_server()`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "planc.simulate.fork_server"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
                start_new_session=True,
            )

    def compare(
        self,
        config: dict[str, Any],
        lowered: Lowered,
        *,
        timeout: float,
        code: str = "",
        precision: bool = False,
    ) -> Comparison | TrialFailure:
        """Trains the proxy model with and without the plan, and compares.

        Args:
            config: the configuration of the proxy model.
            lowered: the plan for it, from `trial_part`.
            timeout: seconds for the whole comparison.
            code: the factory of a user's own model, which is run as it is.
            precision: whether the plan's mixed precision runs.
        """
        began = time.monotonic()
        job = Job(
            config=config,
            lowered=dumps(lowered),
            digest=digest(lowered),
            ranks=lowered.world_size,
            seeds=SEEDS,
            limits=_limits(lowered),
            folder=str(self.folder),
            seconds=timeout,
            code=code,
            precision=precision,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the process has died; its exit code is handled below
            self._process.stdin.write(f"{job.dumps()}\n".encode())
            self._process.stdin.flush()
        late = False
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGUSR1)  # a rank writes its stack on it
            time.sleep(0.5)
        reports = list(_reports(self.folder, job.ranks))
        if late or self._process.returncode != 0 or len(reports) < job.ranks:
            return self._failure(reports, timeout if late else None, job.ranks)
        return comparison(reports, time.monotonic() - began)

    def close(self) -> None:
        """Ends every process, including those that a rank started."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()  # ends the processes by itself if the signal is late
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _failure(
        self, reports: list[dict[str, Any]], late: float | None, ranks: int
    ) -> TrialFailure:
        failed = sorted((f for f in reports if "error" in f), key=lambda f: float(f["time"]))
        single = [f for f in failed if f["single"] or f["phase"] in ("build", "single")]
        ended = sorted(_signals(self.folder))
        if single:
            return _failure_of("single", single[0])
        # after a rank died, exceptions of other ranks are consequences
        if failed and not ended:
            return _failure_of("rank", failed[0])
        if ended:
            _, rank, number = ended[0]
            message = f"ended by {signal.Signals(number).name}"
            return TrialFailure(kind="rank", message=message, rank=rank, detail=_tail(self.log))
        if late is not None:
            silent = sorted(set(range(ranks)) - {f["rank"] for f in reports})
            who = "any rank" if len(silent) == ranks else f"rank {one_of(map(str, silent))}"
            message = f"no answer from {who} in {late:g} s"
            waits = "\n".join(_waiting(self.folder, silent))
            return TrialFailure(kind="time", message=message, detail=waits or _tail(self.log))
        lines = _tail(self.log).splitlines()
        message = f"the processes did not start: {lines[-1] if lines else 'no word'}"
        return TrialFailure(kind="rank", message=message, detail="\n".join(lines))


@contextlib.contextmanager
def fork_server() -> Iterator[ForkServer]:
    """Processes for one proof, which end with the block."""
    temporary = tempfile.TemporaryDirectory(prefix="planc-verify-", ignore_cleanup_errors=True)
    with temporary as name, contextlib.closing(ForkServer(Path(name))) as server:
        yield server


def _limits(lowered: Lowered) -> dict[str, float]:
    """The largest errors that count as equal, by kind; a separate simulation makes no step."""
    limit = separate_limit(lowered)
    return dict.fromkeys(("logits", "loss", "gradients"), limit) if limit else LIMITS


def _reports(folder: Path, ranks: int) -> Iterator[dict[str, Any]]:
    for rank in range(ranks):
        with contextlib.suppress(OSError, ValueError):
            yield json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))


def _signals(folder: Path) -> Iterator[tuple[float, int, int]]:
    """Yields for each rank ended by a signal: the time, the rank and the signal."""
    for path in folder.glob("*.signal"):
        number, when = path.read_text().split()
        yield float(when), int(path.stem), int(number)


def _waiting(folder: Path, ranks: list[int]) -> Iterator[str]:
    """Describes where the main threads of ranks wait: the two innermost frames of each."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            # faulthandler writes the main thread last, and its innermost frame first
            stack = (folder / f"{rank}.stack").read_text().rpartition("most recent call first):\n")
            frames = re.findall(r'([^/"]+)", line (\d+) in (.+)', stack[2])[:2]
            if frames:
                places = (f"{name} ({file}:{line})" for file, line, name in frames)
                yield f"rank {rank} waits in {', called by '.join(places)}"


def _failure_of(kind: str, report: dict[str, Any]) -> TrialFailure:
    first = next((line for line in report["error"].splitlines() if line.strip()), report["error"])
    return TrialFailure(
        kind=kind,
        message=first.strip(),
        rank=report["rank"],
        phase=report["phase"],
        module=report.get("module", ""),
        frames=tuple(
            (str(f), int(n), str(name), str(code)) for f, n, name, code in report["frames"]
        ),
    )


def comparison(reports: list[dict[str, Any]], seconds: float) -> Comparison:
    """The comparison of all ranks as one; `reports` are theirs, as of
    `worker.compare_with_reference`.
    """
    seeds = [seed for report in reports for seed in report["seeds"]]
    limits = reports[0].get("limits", LIMITS)
    errors = {kind: max(float(s[kind]) for s in seeds) for kind in limits}
    worst = {
        kind: str(max(seeds, key=lambda s: float(s[kind]))[f"{kind}_at"])
        for kind in ("gradients", "parameters")
        if kind in limits
    }
    differences = [f["first"] for f in reports if f.get("first")]
    first = min(differences, key=lambda f: int(f["order"])) if differences else None
    return Comparison(
        errors=errors,
        worst=worst,
        first=first,
        seconds=seconds,
        device=reports[0]["device"],
        limits=limits,
        chooses=reports[0].get("chooses", False),
        exact=reports[0].get("exact", False),
    )


def _tail(log: Path, lines: int = 12) -> str:
    with contextlib.suppress(OSError):
        text = log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])
    return ""
