"""Finds the tensor rules of a plan that leave its layouts without a solution (PL525).

The weight splits are compared with those of a right plan, and layouts are inferred again with the
rules of one block replaced at a time. No model is run: inference alone decides.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from planc.compiler import Compiled, Draft
from planc.diagnostics.diagnostic import Diagnostic, Sink
from planc.diagnostics.source import NOWHERE
from planc.infer.infer_layouts import infer_layouts, without_layouts
from planc.ir.nodes import Plan, TensorRule
from planc.model.facts import Modules
from planc.ops.base import AxisRole
from planc.proof.remedy import fewest, one_module, right_compiled
from planc.proof.rule_differences import At, RuleChange, Rules, differences, tensor_rules


def explain_splits(compiled: Compiled, sink: Sink, draft: Draft) -> None:
    """Names in PL525 the splits of a right plan with which layouts follow, and marks their lines.

    Args:
        compiled: a plan that was not lowered.
        sink: contains its findings; PL525 is replaced if such splits are found.
        draft: makes a plan if none ships for the family.
    """
    errors = [error for error in sink if error.severity == "error"]
    if compiled.plan is None or [error.code for error in errors] != ["PL525"]:
        return
    if changes := _changes(compiled, draft):
        sink.replace(errors[0], _explain(errors[0], changes))


def _explain(finding: Diagnostic, changes: Sequence[RuleChange]) -> Diagnostic:
    labels = tuple(dict.fromkeys(label for change in changes for label in change.label))
    texts = dict.fromkeys(change.text for change in changes)
    help = f"{', and '.join(texts)}: then layouts follow"
    return replace(finding, labels=labels or finding.labels, help=help)


def _changes(compiled: Compiled, draft: Draft) -> list[RuleChange]:
    """The fewest blocks' changes with which layouts follow; empty if none are found."""
    plan, facts = compiled.plan, compiled.facts
    assert plan is not None and facts is not None
    axes = plan.mesh.of_role(AxisRole.TENSOR)
    if len(axes) != 1:
        return []
    right = next((r.plan for r in right_compiled(compiled, draft) if r.plan), None)
    if right is None:
        return []
    mine = tensor_rules(plan, axes[0].name)
    wanted = _splits(tensor_rules(right, right.mesh.of_role(AxisRole.TENSOR)[0].name))

    def follows(changes: Sequence[RuleChange]) -> bool:
        quiet = Sink()
        rules = tuple(_apply_changes(plan, axes[0].name, wanted, changes))
        infer_layouts(replace(plan, tensor=rules, broken=plan.broken - {"tensor"}), facts, quiet)
        return not quiet.has_errors

    return fewest(_blocks(differences(mine, wanted, plan, right)), follows)


def _splits(rules: Rules) -> dict[At, TensorRule]:
    """The rules that a plan states, without their inferred layouts."""
    stated = {at: rule for at, rule in rules.items() if rule.written is not NOWHERE}
    return {at: _open(rule) for at, rule in stated.items()}


def _open(rule: TensorRule) -> TensorRule:
    bare = without_layouts(rule)
    if rule.inferred is None and bare.style != rule.style:
        return rule
    return replace(bare, inferred=None)


def _blocks(changes: Iterable[RuleChange]) -> list[list[RuleChange]]:
    """The changes of each block, such as attention: wrong splits come in pairs. A rule that states
    its layouts is meant as it is, and its change stands alone.
    """
    blocks: dict[object, list[RuleChange]] = {}
    for change in changes:
        parents = frozenset(path.rpartition(".")[0] for path in change.paths)
        meant = change.old is not None and not change.old.open
        blocks.setdefault(id(change) if meant else parents, []).append(change)
    return list(blocks.values())


def _apply_changes(
    plan: Plan, axis: str, right: Rules, changes: Sequence[RuleChange]
) -> Iterator[TensorRule]:
    """Yields the plan's tensor rules with some changes made."""
    places = {at for change in changes for at in change.places}
    for rule in plan.tensor:
        rules = tensor_rules(replace(plan, tensor=(rule,)), axis)
        at = [key for key, styled in rules.items() if styled]
        kept = [key for key in at if key not in places]
        if len(kept) == len(at):
            yield rule
        else:
            yield from _join_rules((rule, name) for name, _ in kept)
    yield from _join_rules(
        (replace(right[at], axis=axis), at[0]) for at in sorted(places) if at in right
    )


def _join_rules(rules: Iterable[tuple[TensorRule, str]]) -> Iterator[TensorRule]:
    """Rules on single modules, with the like modules of one rule joined."""
    joined: dict[tuple[int, tuple[str, ...]], tuple[TensorRule, Modules]] = {}
    for rule, name in rules:
        modules = one_module(rule.modules, name)
        key = (id(rule.written), modules.key)
        _, before = joined.get(key, (rule, modules))
        joined[key] = rule, before.union(modules) or modules
    for rule, modules in joined.values():
        yield replace(rule, modules=modules)
