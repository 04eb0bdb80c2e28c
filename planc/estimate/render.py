"""An estimate as text and as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planc.estimate.answer import Answer, lines
from planc.estimate.moments import GIB, Item
from planc.ops import phrases

FORMAT = 1
"""Raised when a field of the document is removed or changes its meaning."""


def text(found: Answer, *, explain: bool = False) -> Iterator[str]:
    """The lines of an estimate.

    Args:
        explain: whether each number says how it comes about, and each constant where it is from.
    """
    batch = found.request.batch
    size = f", {batch.global_batch} x {batch.sequence} tokens a step" if batch else ""
    on = phrases.mesh(found.plan.mesh.axes)
    yield f"{found.plan.name} on {on}{size}; {found.hardware.name}, {found.stack.name}"
    yield ""
    yield from _memory(found, explain)
    if found.counted:
        yield ""
        yield from _time(found)
    if explain:
        yield ""
        yield from _sources(found)


def _memory(found: Answer, explain: bool) -> Iterator[str]:
    step = found.estimate
    peak, room = step.fullest.peak / GIB, step.usable / GIB
    moment = step.fullest.largest
    verdict = "fits" if step.fits else "DOES NOT FIT"
    place = f", place {step.fullest.rank} of the pipeline" * (len(step.ranks) > 1)
    at = f"{moment.name}{place}"
    yield f"memory of a rank: {peak:.2f} GiB at most ({at}); {room:.1f} usable: {verdict}"
    for item in sorted(moment.items, key=lambda i: -i.size):
        yield from _item(item, explain)
    for other in step.fullest.moments:
        if other is not moment:
            yield f"  {other.size / GIB:8.2f}  at another time: {other.name}"
    for rank in step.ranks:
        if rank is not step.fullest:
            yield f"  {rank.peak / GIB:8.2f}  at place {rank.rank}: {rank.largest.name}"


def _item(item: Item, explain: bool) -> Iterator[str]:
    place = f"  ({item.origin.place})" if item.origin else ""
    yield f"  {item.size / GIB:8.2f}  {item.name}{place}"
    if explain:
        yield f"            {item.how}"


def _time(found: Answer) -> Iterator[str]:
    time = found.estimate.time
    yield (
        f"time of a step: {time.seconds:.3f} s; {time.tokens_per_second:,.0f} tokens/s a rank, "
        f"MFU {time.mfu:.1%}"
    )
    said = lines(found.plan)
    for name, seconds in time.spent._asdict().items():
        place = f"  ({said[name].place})" if name in said else ""
        if seconds > 5e-7:
            yield f"  {seconds * 1e3:8.1f}  ms {name.replace('_', ' ')}{place}"
    yield f"bottleneck: {time.bottleneck}"


def _sources(found: Answer) -> Iterator[str]:
    for profile in (found.hardware, found.stack):
        yield f"constants of {profile.name}:"
        for key, source in profile.sources.items():
            yield f"  {key} = {getattr(profile, key)}: {source}"


def document(found: Answer) -> dict[str, Any]:
    """The estimate as plain data; bytes and seconds."""
    step, batch = found.estimate, found.request.batch
    return {
        "format_version": FORMAT,
        "plan": found.plan.name,
        "mesh": {a.name: a.size for a in found.plan.mesh.axes},
        "hardware": found.hardware.name,
        "stack": found.stack.name,
        "batch": batch and {"rows": batch.global_batch, "tokens": batch.sequence},
        "fits": step.fits,
        "usable": step.usable,
        "ranks": [
            {
                "peak": rank.peak,
                "largest": rank.largest.name,
                "moments": [
                    {"name": m.name, "size": m.size, "items": [_plain(i) for i in m.items]}
                    for m in rank.moments
                ],
            }
            for rank in step.ranks
        ],
        "time": found.counted
        and {
            "seconds": step.time.seconds,
            "tokens_per_second": step.time.tokens_per_second,
            "mfu": step.time.mfu,
            "bottleneck": step.time.bottleneck,
            "places": {name: line.place for name, line in lines(found.plan).items()},
            "spent": step.time.spent._asdict(),
        },
    }


def _plain(item: Item) -> dict[str, Any]:
    place = item.origin.place if item.origin else None
    return {"name": item.name, "size": item.size, "how": item.how, "place": place}
