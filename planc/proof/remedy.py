"""Finds the fewest rules of a refuted plan that, replaced by those of a right plan, prove it.

Where numbers go wrong is often not where the plan is: a module that is split and should not be
makes another one raise. So the tensor rules are compared with those of a plan that is right, that
of the family or a draft, and the proxy model is run again with one difference mended at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from planc.compiler import Compiled, Draft, compile, complete_plan
from planc.diagnostics.diagnostic import Diagnostic, Sink
from planc.diagnostics.source import Span
from planc.elaborate.settings import SEQUENCE, uses
from planc.ir.nodes import Plan
from planc.model.facts import Modules
from planc.model.indices import Indices
from planc.ops.base import AxisRole
from planc.ops.styles import Style
from planc.proof.judge import judge
from planc.proof.rule_differences import At, RuleChange, Rules, differences, shared, tensor_rules
from planc.proof.small_case import SmallCase, small_plan, with_plan
from planc.simulate.outcome import Outcome
from planc.syntax import ast, plan_files

_MOST = 12
"""The most differences that are tried one by one."""
_FEW = 3
"""The most of which each is tried before all at once: more runs than that are seldom in vain."""


def remedy(
    compiled: Compiled, small: SmallCase, outcome: Outcome, draft: Draft
) -> tuple[RuleChange, ...]:
    """Returns the fewest changes of tensor rules with which a refuted plan is proved on the proxy
    model; empty if none are found.

    Args:
        compiled: the plan for the real model.
        small: what was refuted.
        outcome: of it.
        draft: what drafts a plan where no file is for the family.
    """
    plan = small.compiled.plan
    assert plan is not None
    axes = plan.mesh.of_role(AxisRole.TENSOR)
    # whether a section other than the tensor section is at fault
    elsewhere = any(d.kind in ("context", "draws", "uneven") for d in outcome.discrepancies[:1])
    if len(axes) != 1 or axes[0].size == 1 or elsewhere:
        return ()
    assert compiled.plan is not None
    axis = axes[0].name
    mine = tensor_rules(plan, axis)
    rights = [
        (tensor_rules(*right_plan), real)
        for right_plan, real in _right_plans(compiled, small, draft)
    ]
    candidates = [(differences(mine, right, compiled.plan, real), right) for right, real in rights]
    changes, right = min(candidates, key=lambda candidate: len(candidate[0]), default=([], {}))
    if len(changes) > 1 or any(change.old is None for change in changes):
        right_plans = [real for _, real in rights]
        for condition, wanted in sorted(
            _wrong_conditions(compiled, right_plans), key=lambda at: at[1]
        ):
            other, rules = candidates[wanted]
            if _proves(small, plan, axis, rules, other):
                return (replace(other[0], condition=condition),)
    changes.sort(key=partial(_distance, outcome))
    return tuple(fewest(_parts(changes), partial(_proves, small, plan, axis, right)))


def _wrong_conditions(compiled: Compiled, rights: Sequence[Plan]) -> Iterator[tuple[Span, int]]:
    """The conditions that, inverted, give the tensor rules of a right plan, and which that is: a
    `when` the wrong way around is one mistake that changes many rules.
    """
    assert isinstance(compiled.files, tuple) and compiled.facts is not None
    wanted = [_styles(right) for right in rights]
    nodes = (node for file in compiled.files for node in ast.walk(file))
    for when in (node for node in nodes if isinstance(node, ast.When)):
        files = tuple(_negate(file, when) for file in compiled.files)
        world = compiled.world_size
        plan = complete_plan(
            files, compiled.facts, Sink(), world_size=world, settings=compiled.settings
        )
        styles = plan and _styles(plan)
        if styles in wanted:
            yield when.condition.origin, wanted.index(styles)


def _negate(node: Any, when: ast.When) -> Any:
    """A file, or what is inside one, with the condition of a `when` negated."""
    if node is when:
        origin = when.condition.origin
        return replace(when, condition=ast.Unary(op="not", operand=when.condition, origin=origin))
    parts = {name: getattr(node, name, None) for name in _CONTAIN}
    negated = {
        name: tuple(_negate(child, when) for child in part)
        for name, part in parts.items()
        if isinstance(part, tuple)
    }
    return replace(node, **negated) if negated else node


_CONTAIN = ("statements", "items", "then", "otherwise")
"""The fields in which a file, a section, a block or a `when` has others."""


def _styles(plan: Plan) -> Mapping[At, Style]:
    axis = plan.mesh.of_role(AxisRole.TENSOR)[0].name
    return {at: rule.style for at, rule in tensor_rules(plan, axis).items()}


def blamed_first(
    findings: Sequence[Diagnostic], changes: Sequence[RuleChange]
) -> Iterator[Diagnostic]:
    """Yields the first error, moved to the lines at fault, with the edit as its help.

    The other errors become facts of it. If the edit removes rules, the help of the error itself
    comes first.
    """
    if not (findings and changes):
        yield from findings
        return
    first, *others = findings
    blamed = dict.fromkeys(label for change in changes for label in change.label)
    texts = dict.fromkeys(change.text for change in changes)
    ways = [f"{', and '.join(texts)}: then the proxy model is proved", first.help]
    if first.help and any(change.new is None for change in changes if not change.condition):
        ways, blamed = ways[::-1], dict.fromkeys(first.labels)
    help = "; or ".join(filter(None, ways))
    also = (f"from the same cause: {other.message}" for other in others)
    facts = (*first.facts, *also)
    yield replace(first, labels=tuple(blamed) or first.labels, facts=facts, help=help)


def _distance(outcome: Outcome, change: RuleChange) -> int:
    """The distance of a change from the first wrong module: minus the common prefix of their
    names.
    """
    seen = outcome.discrepancies[0].subject if outcome.discrepancies else ""
    return -max(shared(seen, name) for name, _ in change.places)


def _right_plans(
    compiled: Compiled, small: SmallCase, draft: Draft
) -> Iterator[tuple[tuple[Plan, str], Plan]]:
    """The plans that ship for the family, or its draft, on the proxy model, with their tensor axis,
    and on the real one: with and without sequence parallelism, which needs other rules.
    """
    facts, plan = small.compiled.facts, small.compiled.plan
    assert facts is not None and plan is not None and compiled.plan
    ranks = plan.mesh.size(compiled.plan.mesh.of_role(AxisRole.TENSOR)[0].name)
    for right in right_compiled(compiled, draft):
        assert right.plan is not None
        sizes = {a.name: ranks if a.role is AxisRole.TENSOR else 1 for a in right.plan.mesh.axes}
        small_right = small_plan(right, small.model, facts, sizes)
        if isinstance(small_right, Plan):
            yield (small_right, small_right.mesh.of_role(AxisRole.TENSOR)[0].name), right.plan


def right_compiled(compiled: Compiled, draft: Draft) -> Iterator[Compiled]:
    """Yields the plans that ship for the family, or its draft, compiled without errors for the real
    model on the tensor axis alone: with and without sequence parallelism.
    """
    assert compiled.facts is not None and compiled.plan is not None
    written = partial(draft, compiled.facts)
    files = plan_files.read_for(compiled.facts.names, Sink(), written, user_folders=False)
    if not files:
        return
    size = compiled.plan.mesh.of_role(AxisRole.TENSOR)[0].size
    for settings in _settings(files, compiled.plan):
        right_settings = (f"tp={size}", *settings)
        right = compile(files, compiled.facts, Sink(), world_size=size, settings=right_settings)
        if right.plan is not None and right.lowered is not None:
            yield right


def _settings(files: Sequence[ast.File], plan: Plan) -> Iterator[tuple[str, ...]]:
    """With and without sequence parallelism, as the refuted plan has it first."""
    if not uses(SEQUENCE, files):
        yield ()
        return
    sequence = plan.options.get(SEQUENCE.word, SEQUENCE.default)
    for value in (sequence, not sequence):
        yield (f"{SEQUENCE.word}={str(value).lower()}",)


def _parts(changes: Iterable[RuleChange]) -> list[list[RuleChange]]:
    """Changes that are made together: of rules that lack the same layers; each other one alone."""
    parts: dict[object, list[RuleChange]] = {}
    for change in changes:
        parts.setdefault(change.layers or id(change), []).append(change)
    return list(parts.values())


def fewest(
    parts: list[list[RuleChange]], proves: Callable[[Sequence[RuleChange]], bool]
) -> list[RuleChange]:
    """One part that is enough, else as few of all as can be."""
    if not parts or len(parts) > _MOST:
        return []
    if len(parts) > _FEW and not proves(_all(parts)):
        return []
    for part in parts:
        if proves(part):
            return part
    if len(parts) == 1 or (len(parts) <= _FEW and not proves(_all(parts))):
        return []
    needed = parts
    for part in parts:
        rest = [other for other in needed if other is not part]
        if proves(_all(rest)):
            needed = rest
    return _all(needed)


def _all(parts: Iterable[Iterable[RuleChange]]) -> list[RuleChange]:
    return [change for part in parts for change in part]


def _proves(
    small: SmallCase, plan: Plan, axis: str, right: Rules, changes: Sequence[RuleChange]
) -> bool:
    """Whether the proxy model is right with some changes."""
    new = {at: right.get(at) for change in changes for at in change.places}
    mine = {at: rule for at, rule in tensor_rules(plan, axis).items() if at not in new}
    mine |= {at: rule for at, rule in new.items() if rule is not None}
    other = [rule for rule in plan.tensor if rule.axis != axis]
    tensor = [
        replace(rule, axis=axis, modules=one_module(rule.modules, name))
        for (name, _), rule in mine.items()
    ]
    plan = replace(plan, tensor=(*other, *tensor))
    case = with_plan(small, plan)
    return isinstance(case, SmallCase) and judge(case).verdict == "proved"


def one_module(modules: Modules, name: str) -> Modules:
    """The one module of a set that has a torch name."""
    words = zip(modules.path, name.split("."), strict=True)
    path = (Indices.from_numbers([int(w)]) if isinstance(s, Indices) else w for s, w in words)
    return Modules(tuple(path), modules.module)
