"""PL401, PL402: tied parameters that the plan would part."""

from __future__ import annotations

from planc.checks.table import active, axis_label, holds, split_dim, unit_of
from planc.diagnostic import Label, Sink
from planc.ir.plan import Plan, TensorRule
from planc.model.facts import Facts, Modules, Parameter
from planc.source import Span

Half = tuple[str, Modules, Parameter]


def ties(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Parameters that are one tensor must be split alike, and gathered by one unit.

    torch's `fully_shard` refuses a parameter that is in two groups; two styles would leave two
    tensors where the model has one.
    """
    parted: set[tuple[Span, ...]] = set()
    for group in facts.ties:
        halves = [(name, *facts.find(name)) for name in group]
        for other in halves[1:]:
            if "tensor" not in plan.broken:
                _styles(halves[0], other, plan, sink)
            if plan.fsdp is not None and "fsdp" not in plan.broken:
                _units(halves[0], other, plan, sink, parted)


def _rule(half: Half, plan: Plan) -> TensorRule | None:
    _, modules, parameter = half
    return next(
        (
            r
            for r in active(plan)
            if r.modules.overlap(modules) and split_dim(r, parameter) is not None
        ),
        None,
    )


def _styles(one: Half, two: Half, plan: Plan, sink: Sink) -> None:
    rules = _rule(one, plan), _rule(two, plan)
    dims = [
        (r.axis, split_dim(r, half[2])) if r else None
        for r, half in zip(rules, (one, two), strict=True)
    ]
    if dims[0] == dims[1]:
        return
    labels = [
        Label(span=r.origin, text=f"{half[0]} is split along dim {dim[1]}")
        for r, half, dim in zip(rules, (one, two), dims, strict=True)
        if r and dim
    ]
    some = next(r for r in rules if r)
    whole = [half[0] for r, half in zip(rules, (one, two), strict=True) if not r]
    sink.warning(
        "PL401",
        f"`{one[0]}` and `{two[0]}` are one tensor, and the plan splits them differently",
        *labels,
        axis_label(plan, some),
        facts=[f"{name} stays whole" for name in whole],
        help="split both along the vocabulary: `rowwise` on the embedding with "
        "`colwise(-> replicate)` on the head",
    )


def _apart(one: Half, two: Half, plan: Plan, sink: Sink) -> bool:
    """Whether one half is ignored, which takes the other out of its unit too."""
    section = plan.fsdp
    assert section is not None
    said = [
        (next((i for i in section.ignored if holds(i.modules, half[1])), None), half)
        for half in (one, two)
    ]
    ignored = [(i, half) for i, half in said if i]
    if len(ignored) == 1:
        own, half = ignored[0]
        other = two if half is one else one
        sink.error(
            "PL402",
            f"`{half[0]}` and `{other[0]}` are one tensor, and only one of them is ignored",
            own.origin,
            help=f"ignore `{other[1]}` too, or neither",
        )
    return bool(ignored)


def _units(one: Half, two: Half, plan: Plan, sink: Sink, parted: set[tuple[Span, ...]]) -> None:
    """`parted` holds the lines that were reported: blocks may share tens of parameters."""
    if _apart(one, two, plan, sink):
        return
    first, second = unit_of(plan, one[1]), unit_of(plan, two[1])
    alike = first is second and (first is None or first.group or first.root or one[1] == two[1])
    if alike:
        return
    places = tuple(unit.origin for unit in (first, second) if unit)
    if places in parted:
        return
    parted.add(places)
    labels = [
        Label(span=unit.origin, text=f"{half[0]} is here")
        for unit, half in ((first, one), (second, two))
        if unit
    ]
    names = f"{one[1]}, {two[1]}"
    sink.error(
        "PL402",
        f"`{one[0]}` and `{two[0]}` are one tensor, and they are in two units",
        *labels,
        help=f"put both into one: `group({names}) : unit`",
    )
