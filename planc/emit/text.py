"""The lowered plan as text, to be read before a run.

Sections are in the order in which `apply` runs them; each operation writes its own.
"""

from collections.abc import Iterator
from typing import Any

from planc.ops import phrases
from planc.ops.lowered import FORMAT_VERSION, Lowered
from planc.ops.registry import kinds

_WIDTH = 100


def render(lowered: Lowered, *, digest: str) -> str:
    """The text of a lowered plan; deterministic."""
    return "".join(f"{line.rstrip()}\n" for line in _lines(lowered, digest))


def _lines(lowered: Lowered, digest: str) -> Iterator[str]:
    yield _title(lowered, digest)
    yield ""
    sizes = (f"{a.name} {a.size}{' (auto)' if a.inferred else ''}" for a in lowered.axes)
    yield phrases.head("mesh", " | ".join(sizes))
    if parts := lowered.experts:
        split = f"{parts.rest.name} {parts.rest.size} | {parts.ranks.name} {parts.ranks.size}"
        yield phrases.head("", f"{' * '.join(parts.axes)} as {split}")
    yield phrases.head("data", _data(lowered))
    for kind in kinds(lowered.sections):
        ops: list[Any] = lowered.find_ops(kind)
        yield from ops[0].section(ops, lowered) if ops else ()
    if not lowered.ops:
        yield phrases.head("nothing", "to do: the model stays as it is")
    yield phrases.head("per rank", _total(lowered))
    if steps := dict.fromkeys(dtype for stage in lowered.stages for dtype in stage.steps):
        shown = " and ".join(map(phrases.value, steps))
        yield phrases.head("optimizer", f"steps parameters in {shown}")


def _title(lowered: Lowered, digest: str) -> str:
    layers = f", {lowered.layers} layers" if lowered.layers else ""
    ranks = f"{lowered.world_size:,} rank{'' if lowered.world_size == 1 else 's'}"
    left = f"{lowered.plan} for {lowered.model}{layers}, {ranks}"
    right = f"lowered {digest[:12]}, format {FORMAT_VERSION}"
    return f"{left}{right.rjust(max(len(right) + 2, _WIDTH - len(left)))}"


def _data(lowered: Lowered) -> str:
    """The number of samplers, by which a rank's batch size is multiplied."""
    names = lowered.wide_data
    if not names:
        return "the same on every rank"
    return f"split {lowered.axis_size(*names):,} ways, over {' * '.join(names)}"


def _total(lowered: Lowered) -> str:
    text = f"{phrases.size(lowered.parameters)} of parameters at rest"
    if lowered.largest_gathered:
        text += f"; the largest unit is {phrases.size(lowered.largest_gathered)} while gathered"
    return text
