"""Describes the calls of a block with a budget: their results, bytes and time, and which are
saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planc.ir.nodes import Plan
from planc.model.facts import Facts
from planc.ops import phrases
from planc.ops.activation_checkpoint import Save
from planc.sections.checkpoint.choice import BudgetLine
from planc.sections.checkpoint.ops import Budget
from planc.simulate.call_table import CallTable, CountedCall
from planc.simulate.count_calls import UncountedError


def describe_block(
    name: str, plan: Plan, facts: Facts, saves: Sequence[Save] | None
) -> Iterator[str]:
    """Yields lines on a block that a budget decides; none on others.

    Args:
        name: of the block.
        plan, facts: as lowered.
        saves: what its checkpoint saves; None where it has none.
    """
    for line in BudgetLine.of_plan(plan):
        if any(at.has(name) for at in line.modules):
            try:
                table = line.tables(plan, facts)[name]
            except UncountedError:  # where torch is missing, and the cache has been emptied since
                return
            yield from _lines(table, saves, line.rules[0])


def _lines(table: CallTable, saves: Sequence[Save] | None, budget: Budget) -> Iterator[str]:
    tokens, plain = f"{budget.rows} x {budget.seq:,} tokens", phrases.size(table.saved)
    if saves is None:
        yield f"it holds {plain} for {tokens} until its backward pass, and computes nothing again"
        return
    point = table.keeping(saves)
    hosted = [table.calls[i] for i in point.hosted]
    copies = sum(map(table.copy_seconds, hosted))
    held = f"it holds {phrases.size(point.size)} of {plain} until its backward pass"
    yield (
        f"for {tokens} {held}, and computes {_time(point.seconds - copies)} again of a forward "
        f"pass of {_time(table.forward)}"
    )
    if hosted:
        there = phrases.size(point.away)
        yield f"in the host's memory: {there}, copied there and back in {_time(copies)}"
    yield f"input: {phrases.size(table.inputs)}"
    for call in sorted(hosted, key=lambda call: -call.seconds):
        took = _time(call.seconds - table.copy_seconds(call))
        yield f"keeps {_name(call)} on cpu: {phrases.size(call.size)}, saves {took} beside copies"
    kept = [table.calls[i] for i in point.kept or ()]
    for call in sorted(kept, key=lambda call: -call.seconds):
        yield f"keeps {_name(call)}: {phrases.size(call.size)}, saves {_time(call.seconds)}"
    chosen = {*(point.kept or ()), *point.hosted}
    others = (c for i, c in enumerate(table.calls[: table.stop]) if i not in chosen)
    again = sorted((c for c in others if c.seconds and not c.fixed), key=lambda c: -c.seconds)
    for call in again[:_SHOWN]:
        yield f"computes {_name(call)} again: {_time(call.seconds)} for {phrases.size(call.size)}"
    if rest := again[_SHOWN:]:
        size, seconds = sum(c.size for c in rest), sum(c.seconds for c in rest)
        yield f"and {len(rest)} smaller ones: {_time(seconds)} for {phrases.size(size)}"


_SHOWN = 8
"""The number of recomputed calls that are named."""


def _name(call: CountedCall) -> str:
    return str(Save(name=call.op, ops=(call.op,), calls=(call.nth,)))


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"
