"""Replaces each rule with a budget by rules that name the saved calls of each module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from planc.diagnostics.diagnostic import Sink, one_of
from planc.diagnostics.source import Span
from planc.ir.nodes import Plan
from planc.lowering.schedules import in_flight, orders
from planc.model.facts import Facts, Modules
from planc.model.indices import Indices
from planc.ops import phrases
from planc.ops.activation_checkpoint import GROUPS, Checkpoint, Save
from planc.ops.pipeline import stages_of_rank
from planc.sections.checkpoint.ops import Budget
from planc.simulate.call_table import CallTable, Point
from planc.simulate.count_calls import UncountedError, count_calls

_RECIPES = ((), ("attention",), ("attention", "matmul"))
"""Lists that others save, `full` among them: a choice is never worse than one of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Modules of a rank that make the same calls.

    Args:
        names: in order.
        table: of their calls.
        passes: how many passes of them are held at once, at most.
    """

    names: tuple[str, ...]
    table: CallTable
    passes: int

    def held_bytes(self, point: Point) -> int:
        """Bytes that one of them holds."""
        return self.passes * point.size


@dataclass(frozen=True)
class Share:
    """The modules of one rank that share a budget.

    Args:
        rules: of the line that gives the budget.
        groups: their modules on the rank.
    """

    rules: tuple[Budget, ...]
    groups: tuple[Alike, ...]

    @cached_property
    def plain(self) -> int:
        """Bytes that they hold without checkpoints."""
        return sum(g.held_bytes(g.table.plain) * len(g.names) for g in self.groups)

    @cached_property
    def least(self) -> int:
        """Bytes that they hold where nothing but inputs is kept."""
        return sum(g.held_bytes(g.table.front[0]) * len(g.names) for g in self.groups)

    @cached_property
    def bytes(self) -> int:
        """The budget in bytes."""
        size = self.rules[0].size
        return int(size * self.plain) if size <= 1 else int(size)

    @cached_property
    def points(self) -> dict[str, Point]:
        """The activation checkpointing of each module: the fastest of several allocations that fit
        the budget. If none fits, every module is fully recomputed.
        """
        ways = (self._steepest(), self._uniform(), *map(self._recipe, _RECIPES))
        fitting = [way for way in ways if self.held_bytes(way) <= self.bytes]
        if not fitting:
            return self._recipe(())
        return min(fitting, key=lambda way: (self.seconds(way), self.held_bytes(way)))

    def held_bytes(self, points: Mapping[str, Point]) -> int:
        """Bytes that the modules hold so."""
        return sum(g.held_bytes(points[name]) for g in self.groups for name in g.names)

    def seconds(self, points: Mapping[str, Point]) -> float:
        """Seconds that their recomputation takes in one pass."""
        return sum(point.seconds for point in points.values())

    def _steepest(self) -> dict[str, Point]:
        """The best steps first: equal modules have two neighboring points of the convex hull of
        their front, and what is left of the budget goes to single modules.
        """
        found = {name: g.table.front[0] for g in self.groups for name in g.names}
        left = self.bytes - self.held_bytes(found)
        steps = [
            ((a.seconds - b.seconds) / (g.held_bytes(b) - g.held_bytes(a)), g, a, b)
            for g in self.groups
            for a, b in pairwise(_hull(g.table.front))
        ]
        for _, g, a, b in sorted(steps, key=lambda step: -step[0]):
            at = [name for name in g.names if found[name] is a]
            many = min(len(at), max(0, left) // (g.held_bytes(b) - g.held_bytes(a)))
            found |= dict.fromkeys(at[:many], b)
            left -= many * (g.held_bytes(b) - g.held_bytes(a))
        return self._spend_rest(found, left)

    def _uniform(self) -> dict[str, Point]:
        """Each module has the same share of what it would hold without a checkpoint."""
        share = self.bytes / self.plain if self.plain else 1.0
        found = {
            name: _best(g.table.front, g.table.saved * share)
            for g in self.groups
            for name in g.names
        }
        return self._spend_rest(found, self.bytes - self.held_bytes(found))

    def _recipe(self, groups: Sequence[str]) -> dict[str, Point]:
        saves = [Save(name=name, ops=GROUPS[name]) for name in groups]
        return {name: g.table.keeping(saves) for g in self.groups for name in g.names}

    def _spend_rest(self, found: dict[str, Point], left: int) -> dict[str, Point]:
        """The points with what is left of the budget spent on one module after another."""
        for g in self.groups:
            for name in g.names:
                own = found[name]
                more = _best(g.table.front, own.size + max(0, left) // g.passes)
                if more.seconds < own.seconds:
                    found[name] = more
                    left -= g.held_bytes(more) - g.held_bytes(own)
        return found


def _best(front: Sequence[Point], size: float) -> Point:
    """The fastest point of at most so many bytes; the first one where none is."""
    return next((p for p in reversed(front) if p.size <= size), front[0])


def _hull(front: Sequence[Point]) -> list[Point]:
    """The points of a front whose steps save ever less time a byte."""
    found: list[Point] = []
    for point in front:
        while len(found) > 1 and _slope(found[-2], found[-1]) <= _slope(found[-2], point):
            found.pop()
        found.append(point)
    return found


def _slope(a: Point, b: Point) -> float:
    return (a.seconds - b.seconds) / (b.size - a.size)


# Plans -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BudgetLine:
    """The rules of a line that gives a budget: its modules, of several kinds, share it."""

    rules: tuple[Budget, ...]

    @classmethod
    def of_plan(cls, plan: Plan) -> Iterator[BudgetLine]:
        """The lines of a plan, before or after the calls are chosen."""
        lines: dict[Span, list[Budget]] = {}
        for rule in (*plan.replaced, *plan.checkpoint_rules):
            if isinstance(rule, Budget):
                lines.setdefault(rule.origin, []).append(rule)
        return (cls(tuple(rules)) for rules in lines.values())

    @property
    def modules(self) -> tuple[Modules, ...]:
        """The modules of all rules."""
        return tuple(rule.modules for rule in self.rules)

    def tables(self, plan: Plan, facts: Facts) -> dict[str, CallTable]:
        """`count_calls` for the rows of the budget, with the link to the host's memory that it
        states.
        """
        budget = self.rules[0]
        tables = count_calls(plan, facts, self.modules, budget.rows, budget.seq)
        host = budget.host_gb_s * 1e9
        return {name: replace(table, host=host) for name, table in tables.items()}


def choose_rules(
    plan: Plan, applied: tuple[Plan, Facts], sink: Sink
) -> tuple[Plan, tuple[Plan, Facts]]:
    """Replaces budgets by the checkpoints that fit them; reports PL583 or PL584 if none does.

    Before:
        checkpoint { model.layers.* : budget(8GiB, rows = 1, seq = 4096) }
        (no module has a rule yet)
        (no operator is chosen)

    After, for example:
        model.layers[0:20] : ops(save = [aten.mm.default(calls = [0, 1])])
        model.layers[20:32] : full
        (the budget is in `Plan.replaced`)

    Args:
        plan: without adapters.
        applied: the plan and the model with them.
    """
    own, facts = applied
    budgets = tuple(rule for rule in own.checkpoint_rules if isinstance(rule, Budget))
    if not budgets:
        return plan, applied
    lines = BudgetLine.of_plan(own)
    shares = (share for line in lines for share in _shares(line, own, facts, sink))
    chosen = _join_rules(rule for share in shares for rule in _rules(share))
    rules = (*(r for r in own.checkpoint_rules if not isinstance(r, Budget)), *chosen)
    plan, own = (replace(p.with_checkpoint_rules(rules), replaced=budgets) for p in (plan, own))
    return plan, (own, facts)


def _shares(line: BudgetLine, plan: Plan, facts: Facts, sink: Sink) -> tuple[Share, ...]:
    """The shares of a line's budget, one for each pipeline rank; empty after a finding."""
    rules, modules = line.rules, line.modules
    budget = rules[0]
    if compiled := next(
        (c for c in plan.compilations if any(map(c.modules.overlap, modules))), None
    ):
        reason = "torch.compile decides itself what compiled modules keep"
        return _report_uncounted(rules, reason, sink, "write `full` or `ops`", compiled.origin)
    try:
        tables = line.tables(plan, facts)
    except UncountedError as error:
        return _report_uncounted(rules, str(error), sink, "write `ops(save = [attention, matmul])`")
    shares = []
    for passes in _passes(plan):
        groups: dict[tuple[CallTable, int], list[str]] = {}
        for name in (name for at in modules for name in at.names()):
            if many := passes(name):
                groups.setdefault((tables[name], many), []).append(name)
        alike = (Alike(names=tuple(n), table=t, passes=p) for (t, p), n in groups.items())
        shares.append(Share(rules, tuple(alike)))
    short = max(shares, key=lambda share: share.least - share.bytes)
    if short.least > short.bytes:
        sink.error(
            "PL583",
            f"the inputs of {_module_names(rules)} alone are more than the budget of "
            f"{phrases.size(short.bytes)}",
            budget.origin,
            facts=[
                f"{budget.rows} x {budget.seq:,} tokens: {phrases.size(short.least)} with `full`, "
                f"{phrases.size(short.plain)} without a checkpoint"
            ],
            help=f"give it {phrases.size(short.least)} or more, or checkpoint larger modules",
        )
        return ()
    return tuple(shares)


def _module_names(rules: Iterable[Budget]) -> str:
    return one_of((f"`{rule.modules}`" for rule in rules), last="and")


def _report_uncounted(
    rules: tuple[Budget, ...], reason: str, sink: Sink, help: str, *lines: Span
) -> tuple[Share, ...]:
    message = f"what {_module_names(rules)} calls cannot be counted: {reason}"
    sink.error("PL584", message, rules[0].origin, *lines, help=help)
    return ()


def _passes(plan: Plan) -> Iterator[Callable[[str], int]]:
    """For each pipeline rank, a function that returns how many microbatches of a module it holds at
    once.
    """
    if plan.pipeline is None:
        yield lambda _name: 1
        return
    op = plan.pipeline.op
    ranks = plan.mesh.size(op.axis)
    chunks = op.stages // ranks
    every = orders(op.schedule, ranks, chunks, op.microbatches, op.rank_passes)
    for rank, passes in enumerate(every):
        own = stages_of_rank(op.schedule, rank, ranks, op.stages)
        most = [max(m.held[i] for m in in_flight(passes, chunks)) for i in range(chunks)]
        held = dict(zip(own, most, strict=True))

        def passes_of(name: str, held: Mapping[int, int] = held) -> int:
            head, _, rest = name.partition(f"{op.blocks}.")
            if head or not rest:  # outside the blocks: with the first stage
                return held.get(0, 0)
            return held.get(op.stage_of(int(rest.partition(".")[0])), 0)

        yield passes_of


def _rules(share: Share) -> Iterator[Checkpoint]:
    """The rules for the modules of one rank, each for those that keep the same."""
    kept: dict[tuple[Save, ...], list[str]] = {}
    for group in share.groups:
        for name in group.names:
            point = share.points[name]
            if point.kept is not None:
                kept.setdefault(group.table.saves(point), []).append(name)
    for saves, names in kept.items():
        for rule in share.rules:
            if own := [name for name in names if rule.modules.has(name)]:
                modules = _modules(rule.modules, own)
                yield Checkpoint(modules=modules, save=saves, origin=rule.origin)


def _modules(of: Modules, names: Sequence[str]) -> Modules:
    """The modules of a set that have these names."""
    at = of.list_at
    if at is None or len(names) == len(of):
        return of
    return of.with_entries(Indices.from_numbers(int(name.split(".")[at]) for name in names))


def _join_rules(rules: Iterable[Checkpoint]) -> Iterator[Checkpoint]:
    """The rules of several ranks, of which those that decide the same are one."""
    found: dict[tuple[object, ...], Checkpoint] = {}
    for rule in rules:
        key = (rule.modules.key, rule.save, rule.origin)
        known = found.setdefault(key, rule)
        found[key] = replace(known, modules=known.modules.join(rule.modules))
    yield from found.values()
