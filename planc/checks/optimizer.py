"""PL575 to PL579, PL590: what the optimizer section steps, as matrices, with states in 8 bits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import gcd

from planc.checks.queries import looked_up, several
from planc.diagnostics.diagnostic import Label, Sink, one_of
from planc.diagnostics.source import Span
from planc.ir.nodes import OptimizerRule, Plan
from planc.ir.optimizer_groups import (
    Stepped,
    cut_of,
    cut_rows,
    outputs_dim,
    packing_rule,
    steps_of,
    use_of,
)
from planc.model.facts import Facts, Modules, generic
from planc.ops.contract import part_sizes
from planc.ops.optimizer import Cut, Muon
from planc.proxy.products import WeightUse


@dataclass(frozen=True, slots=True)
class _Finding:
    """An error on one parameter, whose name takes the place of `{}` in the message."""

    parameter: str
    origin: Span
    code: str
    message: str
    facts: tuple[str, ...]
    help: str
    label: Label | None = None


def optimizer(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Every trainable parameter has one rule, and Muon takes matrices whose parts are known."""
    if not plan.optimizer or {"optimizer", "tensor"} & plan.broken or not plan.freezes_known:
        return
    steps = [*steps_of(plan, facts)]
    _report_undecided(steps, plan, sink)
    _check_ties(steps, facts, sink)
    used = {id(step.rule) for step in steps}
    for rule in plan.optimizer:
        if id(rule) not in used:
            what = "matrix" if isinstance(rule.op.algorithm, Muon) else "parameter"
            message = f"this rule steps no {what}: other rules take those of `{rule.modules}`"
            sink.warning("PL579", message, rule.origin, help="remove the rule")
    # modules that a unit divides have the same findings
    modules_by_finding: dict[_Finding, list[Modules]] = {}
    blocks = ((cut[0], _blocks(*cut)) for cut in cut_rows(plan, facts))
    for step, findings in chain(blocks, _matrices(steps, plan, facts)):
        for finding in findings:
            modules_by_finding.setdefault(finding, []).append(step.modules)
    for finding, modules in modules_by_finding.items():
        name = several(modules, f".{finding.parameter}")
        message, facts_ = finding.message.replace("{}", name), [*finding.facts]
        labels = [finding.label] if finding.label else []
        sink.error(finding.code, message, finding.origin, *labels, facts=facts_, help=finding.help)


def _report_undecided(steps: list[Stepped], plan: Plan, sink: Sink) -> None:
    left = [s for s in steps if s.rule is None]
    if not left:
        return
    partly = {s.modules for s in steps if s.rule is not None}
    sets: dict[str, list[Modules]] = {}
    for step in left:
        ending = f".{step.parameter.name}" if step.modules in partly else ""
        sets.setdefault(ending, []).append(step.modules)
    texts = [several(dict.fromkeys(some), ending) for ending, some in sets.items()]
    names = one_of(texts, last="and")
    sink.error(
        "PL575",
        f"no rule of the optimizer section steps {names}",
        plan.optimizer[0].origin,
        facts=[f"{sum(s.parameter.numel * len(s.modules) for s in left):,} trainable elements"],
        help="add `root : adamw` for all that has no rule of its own; what must not train is "
        "`frozen` in a train section",
    )


def _check_ties(steps: list[Stepped], facts: Facts, sink: Sink) -> None:
    """PL102 where a parameter that several modules hold is not stepped as a rule of one says: its
    first name decides, or a wider rule around the others.
    """
    for group in facts.ties:
        first, *others = (_step_of(name, steps) for name in group)
        for other in others:
            if first is None or other is None or first.rule is None or other.rule is None:
                continue
            rule, other_rule = first.rule, other.rule
            same = replace(rule.op, modules=other_rule.op.modules) == other_rule.op
            same = same and all(getattr(rule, name) == getattr(other_rule, name) for name in _UNITS)
            if same or first.modules.is_within(other_rule.modules):
                continue
            sink.error(
                "PL102",
                f"two rules decide the optimizer of one tensor, `{group[0]}`",
                rule.origin,
                Label(span=other_rule.origin, text="and here"),
                facts=[f"`{other.modules}.{other.parameter.name}` is tied to it"],
                help="write one rule on both modules",
            )


_UNITS = ("per", "parts", "interleaved")


def _step_of(name: str, steps: list[Stepped]) -> Stepped | None:
    owner, _, parameter = name.rpartition(".")
    return next((s for s in steps if s.parameter.name == parameter and s.modules.has(owner)), None)


def _blocks(step: Stepped, rule: OptimizerRule, slices: tuple[int, ...]) -> Iterator[_Finding]:
    """PL590 where the slices of rows on a rank are not whole blocks."""
    block, whole = rule.op.block or 1, gcd(*slices)
    if whole % block == 0:
        return
    fits = whole & -whole
    smaller = f"write `block = {fits}`, which divides them; " if fits >= _LEAST else ""
    size, *others = dict.fromkeys(slices)
    error = partial(_Finding, step.parameter.name, rule.origin)
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
    for step in steps:
        if step.rule is not None and isinstance(step.rule.op.algorithm, Muon):
            yield step, _matrix(step, step.rule, plan, facts)


_ROWS = "`muon(parts = [a, b, c])` with the rows of each"
_HEADS = "`muon(per = head)` where each head has its own"
_ANYWAY = "`anyway = true`"


def _matrix(step: Stepped, rule: OptimizerRule, plan: Plan, facts: Facts) -> Iterator[_Finding]:
    error = partial(_Finding, step.parameter.name, rule.origin)
    cut, known = cut_of(step, facts), use_of(step, facts)
    use = WeightUse() if isinstance(known, str) else known
    fused = rule.per is None and rule.parts == 1 and use.parts > 1
    if isinstance(cut, Cut) and not rule.anyway:
        cut = _of_other_units(rule, cut, known) or cut
    if isinstance(cut, str) and not fused:
        yield error(
            "PL577",
            f"{{}} has no such units: {cut}",
            facts=(f"its shape is {list(step.parameter.shape)}",),
            help=f"say what is one matrix: `muon(per = matrix)`, or {_parts_rule(use) or _ROWS}",
        )
        return
    role = looked_up(step.modules, step.parameter, facts)
    what, why = role, "its rows are looked up or chosen one by one, not mixed by a product"
    if role is None and use.elementwise:
        what, why = "no factor of a product", "the model's code adds or multiplies its elements"
    if what is not None and not rule.anyway:
        name = generic(step.modules.first_name)
        yield error(
            "PL576",
            f"{{}} is {what}, which Muon is not made for",
            facts=(why,),
            help=f"step it otherwise: `{name} : adamw`; or write {_ANYWAY} in the rule",
        )
    elif isinstance(cut, str):
        yield error(
            "PL578",
            f"{{}} is {use.parts} projections in one, and nothing says the rows of each",
            facts=(
                f"the model's code takes what it gives apart: {use.line}",
                "as one matrix it gets another update than each projection by itself",
            ),
            help=f"write {_HEADS if use.order == 'blocks' else f'{_ROWS}, or {_HEADS}'}; or, "
            "where one matrix is meant, `muon(per = matrix)`",
        )
    elif not rule.anyway:
        yield from _contradiction(step, rule, cut, plan)


def _parts_rule(use: WeightUse) -> str:
    """The rule that takes the parts that the code takes; empty if it is not known."""
    if not use.equal or use.order == "blocks":
        return ""
    return f"`muon(parts = {use.parts}{', interleaved = true' if use.alternate else ''})`"


def _of_other_units(rule: OptimizerRule, cut: Cut, use: WeightUse | str) -> str | None:
    """The units that the model's code takes, if they are not those of the rule."""
    if isinstance(use, str):
        return None
    if rule.per == "head":
        return None if use.heads else "the model's code makes no heads of its rows"
    if rule.parts == 1 or not cut.sizes:
        return None
    if use.parts == 1:
        return "the model's code does not cut its outputs"
    if use.order == "blocks" or use.alternate != cut.interleaved:
        which = {"alternate": "every n-th", "ranges": "ranges", "blocks": "ranges of each head"}
        return f"the model's code takes {which[use.order]} of its features: {use.line}"
    if len(cut.sizes) != use.parts:
        return f"the model's code takes {use.parts} parts of its features: {use.line}"
    equal = len({*cut.sizes}) == 1
    if use.equal and not equal:
        return f"the model's code takes parts of equal sizes: {use.line}"
    if equal and len({*use.sizes}) > 1:
        return f"the model's code takes parts of different sizes: {use.line}"
    return None


def _contradiction(step: Stepped, rule: OptimizerRule, cut: Cut, plan: Plan) -> Iterator[_Finding]:
    """PL533 where a tensor rule states other parts of a weight than the optimizer rule takes."""
    stated = None if rule.per in ("matrix", "head", "expert") else packing_rule(step, plan)
    if stated is None:
        return
    tensor, split = stated
    sizes = part_sizes(split, step.parameter.shape[outputs_dim(step)])
    if (sizes, split.interleaved) == (cut.sizes, cut.interleaved):
        return
    error = partial(_Finding, step.parameter.name, rule.origin)
    yield error(
        "PL533",
        "two rules state different parts of {}",
        facts=(f"this rule takes {_parts(cut.sizes, cut.interleaved)}",),
        help="state the same parts in both rules; `muon(per = matrix)` takes the whole weight",
        label=Label(span=tensor.origin, text=f"states {_parts(sizes, split.interleaved)}"),
    )


def _parts(sizes: tuple[int, ...], interleaved: bool) -> str:
    """`rows of 64 and 128`, in the words of a message."""
    if not sizes:
        return "the whole weight"
    alternate = " that alternate" if interleaved else ""
    return f"{len(sizes)} parts of {one_of((f'{s:,}' for s in sizes), last='and')}{alternate}"
