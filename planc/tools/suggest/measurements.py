"""A user's own measurements, and the hardware profile that is fitted to them."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf, isfinite, log
from pathlib import Path
from statistics import median
from typing import NamedTuple

from planc import compiler
from planc.diagnostics.diagnostic import Sink
from planc.files import atomic_write
from planc.tools.estimate.answer import Answer, Request, answer_for
from planc.tools.estimate.from_plan import Batch
from planc.tools.estimate.memory import GIB
from planc.tools.estimate.profiles import Hardware, Stack
from planc.tools.estimate.step_time import step_time
from planc.tools.estimate.workload import Workload

CONSTANTS = ("matmul_tflops", "memory_gb_s", "launch_us", "node_latency_us", "node_reduce_gb_s")
"""The constants that differ most between machines that share a name: clocks, power, memory, CPU,
links."""

NEEDED = ("model", "plan", "world_size", "batch", "seq", "seconds")
OPTIONAL = ("set", "micro_batches", "gib", "compute")
ROWS = len(CONSTANTS) + 1
"""The fewest rows that say something of all constants that are fitted."""

APART = 1.5
"""The largest ratio of two measurements of one setting."""

_OUTLIER = 0.5
"""The absolute logarithm of a ratio from which on it says no more."""


class Timed(NamedTuple):
    """A workload with the seconds of a step; `alone`, those of its compute."""

    work: Workload
    seconds: float
    alone: bool = False

    def ratio(self, hardware: Hardware, stack: Stack) -> float:
        """The ratio of the estimated to the measured time."""
        time = step_time(
            self.work, hardware.without_collectives() if self.alone else hardware, stack
        )
        return (time.spent.compute if self.alone else time.seconds) / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A row of the file.

    Args:
        setting: the texts of its other columns.
        seconds: of a step, None where it was not measured.
        gib: the peak of `torch.cuda.max_memory_allocated`, None where it was not measured.
        compute: seconds of a step in which collectives take none, as one rank alone runs it; None
            where it was not measured.
        made: its estimate with the profile that is fitted.
    """

    setting: tuple[str, ...]
    seconds: float | None
    gib: float | None
    compute: float | None
    made: Answer

    @property
    def timings(self) -> Iterator[Timed]:
        """The times of a step that were measured."""
        if self.seconds is not None:
            yield Timed(self.made.work, self.seconds)
        if self.compute is not None:
            yield Timed(self.made.work, self.compute, alone=True)


def read(path: Path, request: Request, sink: Sink, *, allow_code: bool) -> list[Measured]:
    """The measurements of a CSV file.

    Its columns are those of `NEEDED` and, if it has them, of `OPTIONAL`: `set` has settings of the
    plan between spaces. A row has seconds of a step, or of its compute alone, or `gib`.

    Args:
        request: the profiles; its batch does not count.
        sink: receives PL717 (the file or a row cannot be used), PL718 (too few rows, or rows that
            contradict each other), and what is wrong with a plan.
    """
    try:
        rows = list(csv.DictReader(path.read_text().splitlines()))
    except (OSError, ValueError) as error:
        sink.error("PL717", f"{path} cannot be read: {error}", help="name a CSV file")
        return []
    columns = {name for row in rows[:1] for name in row}
    if missing := [name for name in NEEDED if name not in columns]:
        sink.error(
            "PL717",
            f"{path} has no column `{missing[0]}`",
            help=f"columns are {', '.join(NEEDED)}, and may be {', '.join(OPTIONAL)}",
        )
        return []
    read_rows = [_read_row(row, i + 2, request, sink, allow_code) for i, row in enumerate(rows)]
    measured = [row for row in read_rows if row]
    if len(measured) == len(read_rows):
        _judge(measured, path, sink)
    return measured


def _read_row(
    row: dict[str, str], line: int, request: Request, sink: Sink, allow_code: bool
) -> Measured | None:
    try:
        world_size, rows, tokens = (int(row[name]) for name in ("world_size", "batch", "seq"))
        micro = int(row.get("micro_batches") or 1)
        gib = float(row["gib"]) if row.get("gib") else None
        compute = float(row["compute"]) if row.get("compute") else None
        only = gib is None and compute is None
        seconds = float(row["seconds"]) if row["seconds"] or only else None
        settings = shlex.split(row.get("set") or "")
    except (TypeError, ValueError) as error:
        sink.error("PL717", f"line {line}: {error}", help="write numbers")
        return None
    measured = [n for n in (seconds, gib, compute) if n is not None]
    numbers = (world_size, rows, tokens, micro, *measured)
    if not all(n > 0 and isfinite(n) for n in numbers):
        sink.error("PL717", f"line {line}: a number is not positive", help="leave out failed runs")
        return None
    from planc.model.load import load

    facts = load(row["model"], sink, allow_code=allow_code)
    compiled = facts and compiler.compile_plan(
        facts, row["plan"] or None, sink, world_size=world_size, settings=settings
    )
    batch = Batch(global_batch=rows, sequence=tokens, micro_batches=micro)
    asked = replace(request, batch=batch)
    answer = answer_for(compiled, asked, sink) if compiled else None
    if answer is None or not answer.counted:
        sink.error("PL717", f"line {line} has no estimate", help="mend its plan, or leave it out")
        return None
    setting = tuple(str(row.get(name)) for name in (*NEEDED[:-1], *OPTIONAL[:2]))
    return Measured(setting=setting, seconds=seconds, gib=gib, compute=compute, made=answer)


def add(path: Path, row: Mapping[str, object], sink: Sink) -> None:
    """Writes a row of a file, which is created if it does not exist.

    Args:
        path: of a CSV file with columns that `read` knows.
        row: its values by column; what is left out is empty.
        sink: receives PL630 where the file is of another kind, or cannot be written.
    """
    columns = (*NEEDED, *OPTIONAL)
    try:
        text = path.read_text() if path.exists() else ""
        known = next(csv.reader(text.splitlines()), [*columns])
        if not {*row} <= {*known} <= {*columns}:
            raise ValueError("its columns are others than those of `planc calibrate`")
        line = io.StringIO(newline="")
        writer = csv.DictWriter(line, known, lineterminator="\n")
        if not text:
            writer.writeheader()
        writer.writerow(row)
        between = "\n" * (bool(text) and not text.endswith("\n"))
        atomic_write.write(path, text + between + line.getvalue())
    except (OSError, ValueError) as error:
        sink.error("PL630", f"{path} takes no row: {error}", help="name another file")


def _judge(rows: Sequence[Measured], path: Path, sink: Sink) -> None:
    """Reports PL718."""
    times: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        for timing in row.timings:
            times.setdefault((*row.setting, "compute" * timing.alone), []).append(timing.seconds)
    if len(times) < ROWS:
        timed = " with seconds" * (not all([*row.timings] for row in rows))
        sink.error(
            "PL718",
            f"{path} has {len(times)} settings{timed}, and {len(CONSTANTS)} constants are fitted",
            help=f"measure at least {ROWS} steps that differ in batch, model or mesh",
        )
    for setting, seconds in times.items():
        if max(seconds) > APART * min(seconds):
            sink.error(
                "PL718",
                f"one setting takes {min(seconds):g} s and {max(seconds):g} s",
                facts=(" ".join(text for text in setting if text not in ("", "None")),),
                help="leave out steps that waited for something else",
            )


def fit(rows: Sequence[Measured], name: str) -> Hardware:
    """The profile of the rows with constants that are nearest to them."""
    first = rows[0].made
    measured = [timing for row in rows for timing in row.timings]
    fitted = calibrate(first.hardware, first.stack, measured)
    changed = {n for n in CONSTANTS if getattr(fitted, n) != getattr(first.hardware, n)}
    sources = dict.fromkeys(changed, f"fitted to {len(measured)} measured steps")
    return replace(fitted, name=name, sources=first.hardware.sources | sources)


def calibrate(hardware: Hardware, stack: Stack, measured: Sequence[Timed]) -> Hardware:
    """The profile whose step times are nearest to measured ones.

    Nearest is by the mean of the absolute logarithm of the ratio, where a ratio beyond 1.65 counts
    as that: an outlier says little. Where most are, the profile is of another kind of machine, and
    is brought near first.

    Args:
        measured: steps.
    """
    far = median(abs(log(timing.ratio(hardware, stack))) for timing in measured) > _OUTLIER
    for most in (inf, _OUTLIER) if far else (_OUTLIER,):
        hardware = _nearest(hardware, stack, measured, most)
    return hardware


def _nearest(hardware: Hardware, stack: Stack, measured: Sequence[Timed], most: float) -> Hardware:
    """Raises and lowers each constant in turn by a step that shrinks; no step counts for more than
    `most`.
    """

    def error(profile: Hardware) -> float:
        ratios = (log(timing.ratio(profile, stack)) for timing in measured)
        return sum(min(abs(r), most) for r in ratios) / len(measured)

    best, step = error(hardware), 0.3
    while step > 0.02:
        better = False
        for name in CONSTANTS:
            for factor in (1 + step, 1 / (1 + step)):
                other = replace(hardware, **{name: getattr(hardware, name) * factor})
                if (candidate_error := error(other)) < best - 1e-6:
                    best, hardware, better = candidate_error, other, True
        step = step if better else step / 2
    return hardware


def toml(profile: Hardware) -> str:
    """A profile as a file."""
    plain = [f for f in fields(profile) if f.name != "sources"]
    lines = [f"{f.name} = {json.dumps(getattr(profile, f.name))}" for f in plain]
    sources = [f"{name} = {json.dumps(text)}" for name, text in profile.sources.items()]
    return "\n".join([*lines, "", "[sources]", *sources, ""])


def report(rows: Sequence[Measured], profile: Hardware) -> Iterator[str]:
    """The errors before and after, and the constants that changed."""
    stack, before = rows[0].made.stack, rows[0].made.hardware
    for words, machine in (("before", before), ("after", profile)):
        timed = [timing for row in rows for timing in row.timings]
        errors = sorted(abs(timing.ratio(machine, stack) - 1) for timing in timed)
        yield f"{words}: time error median {median(errors):.1%}, worst {errors[-1]:.1%}"
    peaks = [abs(r.made.estimate.fullest.peak / GIB / r.gib - 1) for r in rows if r.gib]
    if peaks:
        yield f"memory error median {median(peaks):.1%}, worst {max(peaks):.1%} (nothing is fitted)"
    for name in CONSTANTS:
        old, new = getattr(before, name), getattr(profile, name)
        if old != new:
            yield f"  {name} = {old:g} -> {new:.4g}"
