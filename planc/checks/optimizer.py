"""PL575 to PL579, PL590: what the optimizer section steps, as matrices, with states in 8 bits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import gcd

from planc.checks.queries import looked_up, several
from planc.diagnostic import Label, Severity, Sink, one_of
from planc.model.facts import Facts, Modules, generic
from planc.model.products import WeightUse, weight_uses
from planc.ops.optimizer import Cut, Muon
from planc.plan.ir import OptimizerRule, Plan
from planc.plan.optimizer_groups import Stepped, cut_of, cut_rows, steps_of
from planc.source import Span


@dataclass(frozen=True, slots=True)
class _Finding:
    """A finding on one parameter, whose name takes the place of `{}` in the message."""

    severity: Severity
    parameter: str
    origin: Span
    code: str
    message: str
    facts: tuple[str, ...]
    help: str


def optimizer(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Every trainable parameter has one rule, and Muon takes matrices whose parts are known."""
    if not plan.optimizer or {"optimizer", "train", "tensor"} & plan.broken:
        return
    steps = [*steps_of(plan, facts)]
    _undecided(steps, plan, sink)
    _tied(steps, facts, sink)
    used = {id(step.rule) for step in steps}
    for rule in plan.optimizer:
        if id(rule) not in used:
            what = "matrix" if isinstance(rule.op.algorithm, Muon) else "parameter"
            message = f"this rule steps no {what}: other rules take those of `{rule.modules}`"
            sink.warning("PL579", message, rule.origin, help="remove the rule")
    found: dict[_Finding, list[Modules]] = {}  # modules that a unit divides have the same
    blocks = ((cut[0], _blocks(*cut)) for cut in cut_rows(plan, facts))
    for step, findings in chain(blocks, _matrices(steps, plan, facts)):
        for one in findings:
            found.setdefault(one, []).append(step.modules)
    for one, modules in found.items():
        name = several(modules, f".{one.parameter}")
        message, facts_ = one.message.replace("{}", name), [*one.facts]
        sink.report(one.severity, one.code, message, one.origin, facts=facts_, help=one.help)


def _undecided(steps: list[Stepped], plan: Plan, sink: Sink) -> None:
    left = [s for s in steps if s.rule is None]
    if not left:
        return
    partly = {s.modules for s in steps if s.rule is not None}
    sets: dict[str, list[Modules]] = {}
    for step in left:
        own = f".{step.parameter.name}" if step.modules in partly else ""
        sets.setdefault(own, []).append(step.modules)
    texts = [several(dict.fromkeys(some), own) for own, some in sets.items()]
    names = one_of(texts, last="and")
    sink.error(
        "PL575",
        f"no rule of the optimizer section steps {names}",
        plan.optimizer[0].origin,
        facts=[f"{sum(s.parameter.numel * len(s.modules) for s in left):,} trainable elements"],
        help="add `root : adamw` for all that has no rule of its own; what must not train is "
        "`frozen` in a train section",
    )


def _tied(steps: list[Stepped], facts: Facts, sink: Sink) -> None:
    """PL102 where a parameter that several modules hold is not stepped as a rule of one says: its
    first name decides, or a wider rule around the others.
    """
    for group in facts.ties:
        first, *others = (_step_of(name, steps) for name in group)
        for other in others:
            if first is None or other is None or first.rule is None or other.rule is None:
                continue
            one, two = first.rule, other.rule
            same = replace(one.op, modules=two.op.modules) == two.op
            same = same and all(getattr(one, name) == getattr(two, name) for name in _UNITS)
            if same or first.modules.within(two.modules):
                continue
            sink.error(
                "PL102",
                f"two rules decide the optimizer of one tensor, `{group[0]}`",
                one.origin,
                Label(span=two.origin, text="and here"),
                facts=[f"`{other.modules}.{other.parameter.name}` is tied to it"],
                help="write one rule on both modules",
            )


_UNITS = ("per", "parts", "interleaved")


def _step_of(name: str, steps: list[Stepped]) -> Stepped | None:
    owner, _, own = name.rpartition(".")
    return next((s for s in steps if s.parameter.name == own and s.modules.has(owner)), None)


def _blocks(step: Stepped, rule: OptimizerRule, slices: tuple[int, ...]) -> Iterator[_Finding]:
    """PL590 where the slices of rows on a rank are not whole blocks."""
    block, whole = rule.op.block or 1, gcd(*slices)
    if whole % block == 0:
        return
    fits = whole & -whole
    smaller = f"write `block = {fits}`, which divides them; " if fits >= _LEAST else ""
    size, *others = dict.fromkeys(slices)
    error = partial(_Finding, Severity.ERROR, step.parameter.name, rule.origin)
    yield error(
        "PL590",
        "the rows of {} on a rank are no whole blocks",
        facts=(
            f"a rank has {size:,} numbers of a row{' and other slices' if others else ''}, a block "
            f"of states in 8 bits has {block:,}",
            "blocks that a mesh cuts have other scales than those of one process",
        ),
        help=f"{smaller}`state = bf16` has no blocks",
    )


_LEAST = 16
"""The smallest block that a message names: its scale is a quarter of what its numbers take."""


def _matrices(
    steps: list[Stepped], plan: Plan, facts: Facts
) -> Iterator[tuple[Stepped, Iterator[_Finding]]]:
    """Yields the parameters that Muon takes, with their findings."""
    own = [s for s in steps if s.rule is not None and isinstance(s.rule.op.algorithm, Muon)]
    uses = weight_uses(facts) if own else {}
    for step in own:
        name = generic(f"{step.modules.first_name}.{step.parameter.name}")
        yield step, _matrix(step, plan, facts, uses.get(name, WeightUse()))


_ROWS = "`muon(parts = [a, b, c])` with the rows of each"
_EITHER = f"{_ROWS}, or `muon(per = head)` where each head has its own"


def _of_other_parts(cut: Cut, rule: OptimizerRule, use: WeightUse) -> bool:
    """Whether the code takes ranges of features where the cut has every n-th, or the reverse."""
    parts = use.parts > 1 and cut.sizes and rule.per != "head"
    return bool(parts) and use.alternate != cut.interleaved


def _matrix(step: Stepped, plan: Plan, facts: Facts, use: WeightUse) -> Iterator[_Finding]:
    assert step.rule is not None
    own = step.parameter.name, step.rule.origin
    error, warning = (partial(_Finding, s, *own) for s in (Severity.ERROR, Severity.WARNING))
    cut = cut_of(step, plan, facts)
    if step.rule.per == "head" and not use.heads:
        cut = "the model's code makes no heads of its rows"
    elif isinstance(cut, Cut) and _of_other_parts(cut, step.rule, use):
        which = "every n-th" if use.alternate else "ranges"
        cut = f"the model's code takes {which} of its features: {use.line}"
    alternate = f"`muon(parts = {use.parts}, interleaved = true)`" if use.alternate else ""
    if isinstance(cut, str):
        yield error(
            "PL577",
            f"{{}} has no such units: {cut}",
            facts=(f"its shape is {list(step.parameter.shape)}",),
            help=f"say what is one matrix: `muon(per = matrix)`, or {alternate or _ROWS}",
        )
        return
    role = looked_up(step.modules, step.parameter, facts)
    what, why = role, "its rows are looked up or chosen one by one, not mixed by a product"
    if role is None and use.elementwise:
        what, why = "no factor of a product", "the model's code adds or multiplies its elements"
    if what is not None:
        yield warning(
            "PL576",
            f"{{}} is {what}, which Muon is not made for",
            facts=(why,),
            help=f"step it otherwise: `{generic(step.modules.first_name)} : adamw`",
        )
    elif use.parts > 1 and not cut.sizes and step.rule.per is None:
        yield warning(
            "PL578",
            f"{{}} is {use.parts} projections in one, and Muon would take them for one matrix",
            facts=(
                f"the model's code takes what it gives apart: {use.line}",
                "the update is another one than that of each projection by itself",
            ),
            help=f"write {alternate or _EITHER}; or, where one matrix is meant, "
            "`muon(per = matrix)`",
        )
