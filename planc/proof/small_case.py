"""Makes a proxy model of the same family, and gives it the decisions of the real plan.

A transformers or diffusers model is shrunk: its resolved configuration becomes a small one for the
same class, that of the model's own folder where the user allowed its code. A user's own model is
run as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planc.checks import check
from planc.compiler import Compiled, complete_plan
from planc.diagnostics.codes import REAL_SIZES
from planc.diagnostics.diagnostic import Diagnostic, Sink
from planc.elaborate.scope import Sizes
from planc.infer.apply_adapters import adapt_plan
from planc.ir.nodes import OptimizerRule, Plan
from planc.ir.optimizer_groups import cut_rows, is_matrix, outputs_dim, steps_of
from planc.ir.stand_in import Unrepresented, stand_in, variants
from planc.lowering import lower
from planc.model import cache
from planc.model.config import buildable
from planc.model.facts import Facts, OwnCode
from planc.model.load import load_values
from planc.model.randomness import with_noise
from planc.ops.base import AxisRole
from planc.ops.optimizer import Optimize
from planc.proof.small_mesh import RANKS, with_stages
from planc.proxy.shrink import UNSHRUNK, small_values

if TYPE_CHECKING:
    from torch import nn

    from planc.proxy.user_model import ModelBuilder


_OF_INSTANCES = (
    "this script's model is too large to be run itself, and one built small from its configuration "
    "runs other functions: put yours into the classes, before the model is built"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """The model that is built and run instead of the original one.

    Args:
        values: the small configuration; empty where `user_model` is copied.
        code: the factory of a user's own model, or the folder with the code of its class.
        kept: the layers that the small ones stand for, as of `Shrunk`.
        dropout: whether a user's own model keeps its dropout; a configuration says it itself.
        inputs_and_loss: the inputs and the loss of a user's own model, where the user says them.
        own_code: the functions of the script that it runs, where the configuration builds it.
    """

    values: dict[str, Any]
    code: str = ""
    kept: Mapping[int, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    user_model: nn.Module | None = None
    dropout: bool = False
    inputs_and_loss: tuple[Any, Any] = (None, None)
    own_code: OwnCode = field(default_factory=OwnCode)

    @property
    def of_the_user(self) -> bool:
        """Whether its code can change while its name stays the same."""
        return bool(self.code or self.own_code) or self.user_model is not None

    def builder(self) -> ModelBuilder:
        """The builder of the model and its inputs; imports torch. Raises as `builder_of`."""
        from planc.proxy.user_model import builder_of

        return builder_of(
            self.values,
            self.code,
            self.user_model,
            dropout=self.dropout,
            given=self.inputs_and_loss,
            attention=self.own_code.attention,
        )

    def facts(self, model: Facts, sink: Sink) -> Facts | None:
        """The facts of the proxy model, or None after a finding.

        They state the original's dropout and jitter, which the values leave out: ranks draw random
        numbers as the real ones do, since some models draw whatever their configuration says.

        Args:
            model: the facts of the original model.
            sink: receives the findings (PL60x).
        """
        if self.user_model is not None or (self.code and not self.values):
            return model
        name, library = "the proxy model", not self.own_code
        facts = load_values(self.values, name, sink, folder=self.code, cache=library)
        return facts and replace(facts, config=with_noise(facts.config, model.config))


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallCase:
    """A proxy model and the plan compiled for it without errors."""

    model: SmallModel
    compiled: Compiled


def small_model(
    facts: Facts, ranks: Mapping[str, int] | None = None, plan: Plan | None = None
) -> SmallModel | str:
    """The proxy model for a model, or the reason why there is none.

    Args:
        ranks: what heads, widths and experts must be divisible by, by the role of a mesh axis; by
            default one tensor axis of `RANKS`.
        plan: layers on which other rules act are kept apart, and heads that do not divide stay so.
    """
    ranks = {AxisRole.TENSOR: RANKS} if ranks is None else ranks
    if facts.code and not Path(facts.code).is_absolute():
        return SmallModel(values={}, code=facts.code)
    if facts.user_model is not None:
        small = _of_the_script(facts, ranks, plan)
        if small is None and buildable(facts.config) and facts.count > UNSHRUNK:
            return _OF_INSTANCES
        return small or SmallModel(
            values={}, user_model=facts.user_model, inputs_and_loss=facts.inputs_and_loss
        )
    shrunk = _shrunk(facts, ranks, plan)
    return shrunk if isinstance(shrunk, str) else replace(shrunk, code=facts.code)


def _shrunk(facts: Facts, ranks: Mapping[str, int], plan: Plan | None) -> SmallModel | str:
    real = plan.split_of_heads({a.name: a.size for a in plan.mesh.axes}) if plan else None
    values = small_values(facts, ranks, real=real, variants=variants(plan, facts) if plan else {})
    return values if isinstance(values, str) else SmallModel(values=values.values, kept=values.kept)


def _of_the_script(facts: Facts, ranks: Mapping[str, int], plan: Plan | None) -> SmallModel | None:
    """The proxy model of a configuration, as this process builds it: it runs what the script has
    put into classes and modules of libraries. None where it would not run the same functions.
    """
    said = any(given is not None for given in facts.inputs_and_loss)
    if not (facts.own_code and buildable(facts.config)) or said or facts.user_model is None:
        return None
    model = None if hasattr(facts.user_model, "planc_inputs") else _shrunk(facts, ranks, plan)
    if model is None or isinstance(model, str):
        return None
    from planc.model.own_code import own_code

    model = replace(model, own_code=facts.own_code)
    try:
        code = own_code(model.builder().build(0))
    except Exception:  # of the script's code, which its own model then raises too
        return None
    return model if code.code == facts.own_code.code else None


def small_case(
    compiled: Compiled, sizes: Mapping[str, int], *, checks: Sink | None = None
) -> SmallCase | Unrepresented:
    """The plan for a proxy model on a mesh of small sizes, or the reason why there is none.

    The plan is elaborated again for the real model, with only the numbers in arguments taken from
    the small one; then small modules take the place of the real ones that they stand for. `checks`
    receives the findings of checks, which then do not stop the compiler.
    """
    assert compiled.facts is not None and compiled.plan is not None
    ranks: dict[str, int] = {}
    for axis in compiled.plan.mesh.axes:
        ranks[axis.role] = ranks.get(axis.role, 1) * sizes[axis.name]
    if experts := compiled.plan.mesh.experts:
        ranks[AxisRole.EXPERT] = sizes[experts.ranks.name]
    op = compiled.plan.pipeline.op if compiled.plan.pipeline else None
    if op and op.rank_passes and sizes[op.axis] not in (1, compiled.plan.mesh.size(op.axis)):
        real = compiled.plan.mesh.size(op.axis)
        return Unrepresented(reason=f"its schedule is for {real} ranks of {op.axis}")
    ranks[AxisRole.TENSOR] = max(RANKS, compiled.plan.split_of_heads(sizes))
    staged = with_stages(compiled.plan, sizes)
    model = small_model(compiled.facts, ranks, staged)
    return case_of(compiled, model, sizes, checks=checks)


def case_of(
    compiled: Compiled,
    model: SmallModel | str,
    sizes: Mapping[str, int],
    *,
    checks: Sink | None = None,
) -> SmallCase | Unrepresented:
    """The plan for a model of other layers or sizes, or the reason why there is none; arguments as
    of `small_case`.
    """
    assert compiled.facts is not None
    if isinstance(model, str):
        return Unrepresented(reason=model)
    quiet = Sink()
    facts = model.facts(compiled.facts, quiet)
    if facts is None and cache.missing():
        return Unrepresented(reason=cache.unproved_reason())
    if facts is None:
        error = next(d for d in quiet if d.severity == "error")
        reason = f"the model cannot be shrunk: {error.message} ({error.code})"
        return Unrepresented(reason=reason)
    if facts.name != compiled.facts.name:
        return Unrepresented(reason=f"the proxy model is a {facts.name}, not {compiled.facts.name}")
    plan = small_plan(compiled, model, facts, sizes)
    if isinstance(plan, Unrepresented):
        return plan
    return with_plan(SmallCase(model=model, compiled=replace(compiled, facts=facts)), plan, checks)


def without_optimizer_classes(compiled: Compiled) -> Compiled:
    """A compiled plan without its optimizer section, if that names a class of the user's."""
    plan, lowered, applied = compiled.plan, compiled.lowered, compiled.applied
    if plan is None or lowered is None or applied is None or not lowered.optimizer_classes:
        return compiled
    return replace(
        compiled,
        plan=replace(plan, optimizer=()),
        applied=(replace(applied[0], optimizer=()), applied[1]),
        lowered=lowered.without(Optimize),
    )


def small_plan(
    compiled: Compiled, model: SmallModel, facts: Facts, sizes: Mapping[str, int]
) -> Plan | Unrepresented:
    """The decisions of a plan on the modules of a proxy model, whose facts these are."""
    assert compiled.facts is not None and compiled.plan is not None
    quiet = Sink()
    plan = _small_numbers(compiled, Sizes(facts=facts, axes=sizes), quiet)
    if plan is not None and not compiled.plan.optimizer:  # `without_optimizer_classes`
        plan = replace(plan, optimizer=())
    if plan is None:
        return _unfit(quiet)
    staged, kept = with_stages(plan, sizes), model.kept
    small = stand_in(staged, compiled.facts, facts, kept=kept, sizes=sizes)
    if isinstance(small, Unrepresented):
        return small
    return _small_blocks(_small_parts(small, facts), facts)


def _small_parts(plan: Plan, facts: Facts) -> Plan:
    """The plan with Muon's parts, which a rule may state in numbers of the real model, in
    proportion to the small weights.
    """
    if not any(isinstance(rule.parts, tuple) for rule in plan.optimizer):
        return plan
    outputs: dict[int, set[int]] = {}
    for step in steps_of(plan, facts):
        if step.rule is not None and is_matrix(step.modules, step.parameter):
            size = step.parameter.shape[outputs_dim(step)]
            outputs.setdefault(id(step.rule), set()).add(size)
    rules = (_in_proportion(rule, outputs.get(id(rule), set())) for rule in plan.optimizer)
    return replace(plan, optimizer=tuple(rules))


def _in_proportion(rule: OptimizerRule, outputs: set[int]) -> OptimizerRule:
    """The rule with its list of parts scaled to the only number of outputs, if there is one."""
    if not isinstance(rule.parts, tuple) or len(outputs) != 1:
        return rule
    (size,) = outputs
    ends = (round(size * end / sum(rule.parts)) for end in accumulate(rule.parts))
    parts = tuple(end - start for start, end in pairwise((0, *ends)))
    return replace(rule, parts=parts) if all(parts) else rule


def _small_blocks(plan: Plan, facts: Facts) -> Plan:
    """The plan with blocks of states in 8 bits that the small rows on a rank are whole ones of."""
    if all(rule.op.block is None for rule in plan.optimizer):
        return plan
    least = _with_blocks(plan, 1)
    whole = gcd(_BLOCK, *(size for *_, slices in cut_rows(least, facts) for size in slices))
    return _with_blocks(plan, whole)


def _with_blocks(plan: Plan, block: int) -> Plan:
    def resize_block(op: Optimize) -> Optimize:
        return op if op.block is None else replace(op, block=block)

    return replace(plan, optimizer=tuple(replace(r, op=resize_block(r.op)) for r in plan.optimizer))


_BLOCK = 8
"""Numbers in a block of the proxy model, at most: more than one block in a row."""


def with_plan(case: SmallCase, plan: Plan, checks: Sink | None = None) -> SmallCase | Unrepresented:
    """A proxy model under a plan for its modules; `checks` as for `small_case`."""
    assert case.compiled.facts is not None
    applied = adapt_plan(plan, case.compiled.facts)
    findings = Sink() if checks is None else checks
    check(*applied, findings)
    wrong = [d for d in findings if d.severity == "error" and d.code not in REAL_SIZES]
    if checks is None and wrong:
        return _unfit(wrong)
    compiled = replace(case.compiled, plan=plan, applied=applied, lowered=lower(*applied))
    return replace(case, compiled=compiled)


def _small_numbers(compiled: Compiled, sizes: Sizes, sink: Sink) -> Plan | None:
    """The plan for the real model, with the numbers of the small one; None after a finding."""
    assert isinstance(compiled.files, tuple) and compiled.facts is not None
    plan = complete_plan(
        compiled.files,
        compiled.facts,
        sink,
        world_size=compiled.world_size,
        settings=compiled.settings,
        sizes=sizes,
    )
    if plan and compiled.plan and plan.pipeline and plan.pipeline.times:
        plan = replace(plan, pipeline=compiled.plan.pipeline)  # cut for the real model
    return None if sink.errors else plan


def _unfit(findings: Iterable[Diagnostic]) -> Unrepresented:
    error = next(d for d in findings if d.severity == "error")
    reason = f"the plan does not fit the proxy model: {error.message} ({error.code})"
    return Unrepresented(reason=reason, origins=tuple(label.span for label in error.labels))
