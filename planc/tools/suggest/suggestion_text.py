"""A suggestion as text and as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from planc.tools.estimate.answer import model_assumptions
from planc.tools.estimate.memory import GIB
from planc.tools.suggest.candidates import Candidate
from planc.tools.suggest.suggest import Compared, Suggestion

FORMAT = 1
"""Raised when a field of the document is removed or changes its meaning."""


def text(made: Suggestion) -> Iterator[str]:
    """The lines of a suggestion, without its plan."""
    batch, found, tally = made.asked.request.batch, made.found, made.found.tally
    assert batch is not None
    tokens = f"{batch.global_batch} x {batch.sequence} tokens a step"
    yield f"{made.asked.world_size:,} ranks of {made.hardware.name}, {made.stack.name}; {tokens}"
    yield f"counted with {'; '.join(_assumptions(made))}"
    if made.assumes_fp32:
        yield "the optimizer is assumed to step fp32; `load { dtype = ... }` in a plan says another"
    yield f"{tally.tried:,} plans were estimated that extend {made.base}"
    yield ""
    yield from _table(found.best)
    yield ""
    yield from _reasons(found.best, found.apart)
    if made.coarser:
        less = 1 - made.coarser.seconds / found.best[0].seconds
        yield f"reduce_dtype = bf16 takes {less:.1%} less time, and sums gradients less exactly"
    yield from map(partial(_comparison, found.best), made.compared)
    for condition, other in found.costs.items():
        yield f"--require {condition!r} costs {_cost(found.best[0], other)}"
    if tally.excluded:
        yield ""
        yield "left out:"
    for reason, out in sorted(tally.excluded.items(), key=lambda pair: -pair[1].count):
        yield f"  {out.count:6,}  {reason}, such as {out.example}"


def run_text(made: Suggestion, run: Suggestion) -> Iterator[str]:
    """The lines about ranks that were run: of plans of a suggestion, and of those that are left."""
    names = {candidate.label: str(i + 1) for i, candidate in enumerate(made.found.best)}
    left = {candidate.label for candidate in run.found.best}
    first = run.found.best[0]
    for label, name in names.items():
        if label not in left:
            yield f"{name} does not fit when a rank is run, and is left out"
    if first.counted:
        size = first.counted / GIB
        yield f"{names[first.label]} holds {size:.1f} GiB at most when a rank is run"


def _assumptions(made: Suggestion) -> Iterator[str]:
    """Yields the assumptions that all plans of a search share."""
    yield f"{made.stack.kernels.name} kernels"
    batch = made.asked.request.batch
    yield from model_assumptions(made.facts, batch.sequence if batch else 0)
    if made.experts:
        yield "equal shares of tokens for all experts"


def _table(best: tuple[Candidate, ...]) -> Iterator[str]:
    rows = [("", "s a step", "tokens/s a rank", "MFU", "GiB", "micro-batches", "mesh", "how")]
    for i, found in enumerate(best):
        time = found.estimate.time
        numbers = (f"{time.seconds:.3f}", f"{time.tokens_per_second:,.0f}", f"{time.mfu:.1%}")
        sizes = (f"{found.peak:.1f}", str(found.micro_batches))
        rows.append((str(i + 1), *numbers, *sizes, found.axes, found.words))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        pairs = list(zip(row, widths, strict=True))
        right, left = (t.rjust(w) for t, w in pairs[:-2]), (t.ljust(w) for t, w in pairs[-2:])
        yield "  ".join([*right, *left]).rstrip()


def _reasons(best: tuple[Candidate, ...], apart: Candidate | None) -> Iterator[str]:
    """Why the first is before the second, and before the first on another mesh."""
    first = best[0]
    yield f"bottleneck of 1: {first.estimate.time.bottleneck}"
    if len(best) > 1:
        yield f"2 takes {_longer(first, best[1])}"
    if apart:
        yield f"{apart.axes}; {apart.words}: takes {_longer(first, apart)}"


def _comparison(best: tuple[Candidate, ...], other: Compared) -> str:
    """Describes what makes a plan with other settings slower than the first one."""
    name, fastest = f"--compare {other.settings!r}", other.best
    if fastest is None and other.nearest:
        room = other.nearest.estimate.usable / GIB
        needs = f"{other.nearest.peak:.1f} GiB of the usable {room:.1f}"
        return f"{name} does not fit: the leanest needs {needs} ({other.nearest.words})"
    if fastest is None:
        return f"{name} has no plan: {other.reason}"
    ranks = [rank for rank, plan in enumerate(best, 1) if plan.text == fastest.text]
    if ranks:
        return f"{name} is {ranks[0]}"
    label = f"{fastest.axes}; {fastest.words}; {fastest.peak:.1f} GiB"
    return f"{name} takes {_longer(best[0], fastest)} ({label})"


def _longer(first: Candidate, other: Candidate) -> str:
    more = other.seconds / first.seconds - 1
    if more < 0:
        text = f"{-more:.1%} less than 1, which cannot be told apart, and has no slack in memory"
    else:
        text = f"{more:.1%} longer than 1"
    return f"{text}: {_difference(first, other)}"


def _difference(first: Candidate, other: Candidate) -> str:
    """Describes the parts of the step with the largest differences in time."""
    spent = first.estimate.time.spent
    parts = other.estimate.time.spent.plus(spent, -1)._asdict()
    order = sorted(parts, key=lambda name: -abs(parts[name]))
    words = [
        f"{parts[n] * 1e3:+,.1f} ms {n.replace('_', ' ')}"
        for n in order[:3]
        if abs(parts[n]) > 5e-5
    ]
    return ", ".join(words) or "nothing that is modeled but rounding"


def _cost(best: Candidate, other: Candidate | None) -> str:
    if other is None or other.seconds >= best.seconds:
        return "nothing"
    return (
        f"{best.seconds / other.seconds - 1:.1%}: without it {other.label}, {other.seconds:.3f} s"
    )


def document(made: Suggestion) -> dict[str, Any]:
    """The suggestion as plain data; bytes and seconds."""
    found, batch = made.found, made.asked.request.batch
    return {
        "format_version": FORMAT,
        "world_size": made.asked.world_size,
        "hardware": made.hardware.name,
        "stack": made.stack.name,
        "kernels": made.stack.kernels.name,
        "batch": batch and {"rows": batch.global_batch, "tokens": batch.sequence},
        "extends": made.base,
        "tried": found.tally.tried,
        "best": [_plain(c) for c in found.best],
        "constraints": {c: o and _plain(o) for c, o in found.costs.items()},
        "compared": {c.settings: c.best and _plain(c.best) for c in made.compared},
        "excluded": [
            {"reason": reason, "count": out.count, "example": out.example}
            for reason, out in found.tally.excluded.items()
        ],
    }


def _plain(found: Candidate) -> dict[str, Any]:
    time = found.estimate.time
    return {
        "mesh": dict(found.mesh),
        "options": dict(found.choice.options),
        "save": found.choice.save,
        "reshard_never": found.choice.resident,
        "micro_batches": found.micro_batches,
        "seconds": time.seconds,
        "tokens_per_second": time.tokens_per_second,
        "mfu": time.mfu,
        "peak": found.estimate.fullest.peak,
        "counted": found.counted,
        "bottleneck": time.bottleneck,
        "spent": time.spent._asdict(),
        "plan": found.text,
    }
