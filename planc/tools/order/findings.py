"""Reports where the calls of a plan's ranks do not fit together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planc.compiler import Compiled
from planc.diagnostics.diagnostic import Label, Sink
from planc.lowering.rank_calls import WAIT, RankCall
from planc.lowering.step import Step
from planc.ops import phrases
from planc.simulate.rank_job import RankRunner
from planc.tools.measure.count import NotCountedError
from planc.tools.order.match import Different, Stuck, first_divergences, fits
from planc.tools.order.record import Order, of_places, small_orders

_MOST = 8
"""Ranks that are listed of those that wait forever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderVerdict:
    """The result of the check of the order of collectives.

    Args:
        verdict: `fits`, `differs`, or `unknown`.
        reason: why it is unknown.
        calls: of the rank with the most, in a step, on each mesh that was run.
    """

    verdict: str
    reason: str = ""
    calls: tuple[tuple[str, int], ...] = ()

    @property
    def text(self) -> str:
        """For the summary of a check."""
        if self.verdict == "unknown":
            return "order of collectives (unknown)"
        ran = "; ".join(f"{count} calls a step on {mesh}" for mesh, count in self.calls)
        return f"order of collectives ({self.verdict}: {ran})"

    def document(self) -> dict[str, object]:
        ran = [{"mesh": mesh, "calls": count} for mesh, count in self.calls]
        return {"verdict": self.verdict, "reason": self.reason or None, "ran": ran}


def order(compiled: Compiled, sink: Sink, *, allow_code: bool = False) -> OrderVerdict:
    """Runs the ranks of small meshes, each alone, and reports what does not fit: PL613 to PL616.

    Args:
        compiled: a plan without errors.
        allow_code: whether Python code that the plan names may be run.
    """
    ran, wrong = [], False
    try:
        with RankRunner() as runner:
            for small in small_orders(compiled, runner, allow_code=allow_code):
                mesh = phrases.mesh(axis for axis in small.lowered.axes if axis.size > 1)
                ran.append((mesh or "one rank", max(map(_count, small.later.values()))))
                wrong = report(small, sink) or wrong
                if wrong:
                    break
    except NotCountedError as error:
        _unknown("whether the collectives of all ranks fit together", error, sink)
        return OrderVerdict(verdict="unknown", reason=str(error))
    return OrderVerdict(verdict="differs" if wrong else "fits", calls=tuple(ran))


def known_order(compiled: Compiled, sink: Sink) -> Order | None:
    """The calls of the first rank of each pipeline rank, for the model as it is; None after
    PL616.
    """
    assert compiled.lowered is not None
    try:
        return of_places(compiled, Step(lowered=compiled.lowered))
    except NotCountedError as error:
        _unknown("the order of the plan's collectives", error, sink)
        return None


def _unknown(what: str, error: NotCountedError, sink: Sink) -> None:
    help = "`planc verify` runs a proxy model on real processes"
    sink.warning("PL616", f"{what} is not known: {error}", *error.where, help=help)


def _count(calls: tuple[RankCall, ...]) -> int:
    return sum(call.kind != WAIT for call in calls)


def report(calls: Order, sink: Sink) -> bool:
    """Reports what of an order does not fit; returns whether anything does not.

    Two steps follow each other, so that a call that a rank leaves out meets the next step's.
    """
    both = {rank: (*calls.first[rank], *calls.later[rank]) for rank in calls.first}
    places = {rank: calls.pipeline_rank(rank) for rank in both}
    before = sink.errors
    pair = next(first_divergences(both, places), None)
    if pair:
        _report_apart(*pair, sink)
    for fault in fits(both):
        match fault:
            case Different():
                _report_different(fault, sink)
            case Stuck():
                _report_stuck(fault, len(both), sink)
        break  # what follows is a consequence
    return sink.errors > before


def _labels(*calls: RankCall | None) -> Iterator[Label]:
    """The lines of the plan that make calls, each once."""
    seen = set()
    for call in calls:
        if call is not None and call.op is not None and call.op.origin not in seen:
            seen.add(call.op.origin)
            if call.op.origin.place:
                yield Label(span=call.op.origin, text=f"makes the call of rank {call.rank}")


def _fact(call: RankCall) -> str:
    return f"rank {call.rank}, call {call.number}: {call.text}"


def _report_apart(usual: RankCall | None, other: RankCall | None, sink: Sink) -> None:
    """`usual` is a call of a rank that does what most of its place do."""
    call = other or usual
    assert call is not None
    if usual and other:
        message = (
            f"rank {other.rank} leaves the order of rank {usual.rank} at its call {other.number}: "
            f"{other.what} over {other.over}, not {usual.what} over {usual.over}"
        )
    else:
        whom = "that most ranks of its stage do not make" if other else "that another leaves out"
        message = f"rank {call.rank} makes a call {whom}: {call.what} over {call.over}"
    sink.error(
        "PL615",
        message,
        *_labels(usual, other),
        facts=[_fact(c) for c in (usual, other) if c],
        help="ranks of one stage run one program: look for what this one does by its rank",
    )


def _report_different(fault: Different, sink: Sink) -> None:
    first, other = fault.first, fault.other
    sink.error(
        "PL613",
        f"ranks {first.rank} and {other.rank} meet in calls over {first.over} that are not one "
        f"collective: {fault.why}",
        *_labels(first, other),
        facts=map(_fact, (first, other)),
        help="the calls before these were of one collective each: one of the ranks has made a call "
        "too many, left one out, or has a tensor of another shape",
    )


def _report_stuck(fault: Stuck, count: int, sink: Sink) -> None:
    first = fault.cycle[0] if fault.cycle else next(iter(fault.waits))
    call, others = fault.waits[first]
    if fault.cycle:
        circle = " -> ".join(map(str, (*fault.cycle, first)))
        what = f"ranks wait for each other forever, {circle}, on {fault.network}"
    else:
        what = f"rank {first} waits forever for rank {others[0]}, which has ended its step"
    lines = [
        waiting for rank, (waiting, _) in fault.waits.items() if rank in (fault.cycle or [first])
    ]
    facts = [
        f"{_fact(waiting)}; waits for {', '.join(f'rank {o}' for o in others)}"
        for waiting, others in list(fault.waits.values())[:_MOST]
    ]
    if len(fault.waits) > _MOST:
        facts.append(f"{len(fault.waits) - _MOST} more of {count} ranks wait")
    sink.error(
        "PL614",
        f"{what}: {call.what} over {call.over}",
        *_labels(*lines[:2]),
        facts=facts,
        help="make ranks that wait for each other call in one order",
    )
