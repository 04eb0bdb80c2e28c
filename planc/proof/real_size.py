"""The check of a plan at the real sizes of its model: shapes that no proxy model has.

One layer of each kind runs forward and backward at its real size on the first rank of the real
mesh, without stages and data ranks, on tensors without values. A rank that raises there does so in
the real run.
"""

from collections.abc import Sequence

from planc.compiler import Compiled
from planc.diagnostics.diagnostic import Sink
from planc.ir.nodes import Plan
from planc.ir.stand_in import Unrepresented, variants
from planc.model import cache
from planc.model.facts import Facts, generic
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.base import AxisRole
from planc.ops.document import digest
from planc.proof.responsible_rules import rule_labels
from planc.proof.small_case import SmallCase, SmallModel, case_of, small_case, small_model
from planc.proof.small_mesh import simulated_sizes, with_experts, with_stages
from planc.proxy.shrink import shallow_values
from planc.simulate.certificate import source_digest
from planc.simulate.outcome import Discrepancy, Outcome, outcome_of
from planc.simulate.trial_part import trial_part

_FORMAT = 2
_DIVIDES = (AxisRole.TENSOR, AxisRole.SEQUENCE, AxisRole.EXPERT)
_NOTHING = Outcome(verdict="nothing")


def report_real_size(compiled: Compiled, sink: Sink, input_kinds: Sequence[str] = ()) -> Outcome:
    """The outcome at the real sizes, cached or run; reports PL534 if it is `refuted`.

    Args:
        compiled: a plan that is proved with a proxy model. `nothing` if no axis divides work inside
            layers.
        input_kinds: the kinds of inputs besides text that the proxy model got; empty if unknown.
    """
    assert compiled.facts is not None and compiled.lowered is not None
    if not compiled.lowered.split_axes(*_DIVIDES):
        return _NOTHING
    case = _real_case(compiled)
    if isinstance(case, Unrepresented):
        return Outcome(verdict="unknown", reason=case.reason)
    outcome = _outcome(case, input_kinds)
    if outcome.verdict == "refuted":
        if _small_outcome(compiled).verdict != "proved":
            return Outcome(verdict="unknown", reason="the rank reads values of tensors")
        assert case.compiled.plan is not None
        _report(outcome.discrepancies[0], case.compiled.plan, compiled, sink)
    return outcome


def _real_case(compiled: Compiled) -> SmallCase | Unrepresented:
    """The plan for one layer of each kind on the real mesh, without stages.

    Data ranks are left out where they divide no experts: the outcome does not depend on their
    number.
    """
    facts, plan = compiled.facts, compiled.plan
    assert facts is not None and plan is not None
    experts = plan.mesh.experts
    left_out = {AxisRole.STAGE} if experts else {AxisRole.STAGE, AxisRole.DATA}
    sizes = {a.name: 1 if a.role in left_out else a.size for a in plan.mesh.axes}
    if experts:
        sizes[experts.ranks.name] = experts.ranks.size
    model = _real_model(facts, with_stages(plan, sizes))
    return case_of(compiled, model, sizes)


def _real_model(facts: Facts, plan: Plan) -> SmallModel | str:
    """A model of one layer of each kind; a user's own model, as it is."""
    if facts.lacks_config:
        small = small_model(facts)
        if isinstance(small, str) or not small.values:
            return small
    values = shallow_values(facts, variants(plan, facts))
    if isinstance(values, str):
        return values
    return SmallModel(
        values=values.values, kept=values.kept, code=facts.code, own_code=facts.own_code
    )


def _small_outcome(compiled: Compiled) -> Outcome:
    """The outcome of the proxy model, run as the real one: it fails too if the plan or the model
    needs values of tensors.
    """
    plan = compiled.plan
    assert plan is not None
    sizes = next(simulated_sizes(plan.mesh.axes, ()))
    sizes = {a.name: 1 if a.role is AxisRole.STAGE else sizes[a.name] for a in plan.mesh.axes}
    case = small_case(compiled, with_experts(sizes, plan.mesh))
    return _outcome(case) if isinstance(case, SmallCase) else _NOTHING


def _outcome(case: SmallCase, input_kinds: Sequence[str] = ()) -> Outcome:
    """The outcome of a case on tensors without values, cached or run."""
    lowered, model = case.compiled.lowered, case.model
    assert lowered is not None
    part = trial_part(lowered, tensor=True).without(Checkpoint)  # it repeats the same shapes
    kind = f"real size {_FORMAT}"
    key = cache.entry_name(kind, digest(part), config=model.values, sources=source_digest())
    kept = None if model.of_the_user or part.code else outcome_of(cache.recall(key))
    if kept is not None:
        return kept
    if cache.missing():
        return Outcome(verdict="unknown", reason=cache.unproved_reason())
    from planc.simulate.real_size import Builder, run_at_real_size

    builder = model.builder()
    assert isinstance(builder, Builder)
    outcome = run_at_real_size(builder, part, input_kinds)
    if not (model.of_the_user or part.code):
        cache.keep(key, outcome.document())
    return outcome


def _report(crash: Discrepancy, plan: Plan, compiled: Compiled, sink: Sink) -> None:
    assert compiled.lowered is not None
    subject = generic(crash.subject)
    axes = [a for a in compiled.lowered.axes if a.size > 1]
    sizes = ", ".join(f"{a.name} = {a.size}" for a in axes)
    facts = [crash.detail, *([f"the model's own code: {crash.line}"] if crash.line else [])]
    facts.append("seen on one rank at the real sizes, with tensors without values")
    sink.error(
        "PL534",
        f"`{subject or 'the model'}` has a shape that cannot be on a rank of {sizes}",
        *rule_labels(crash.subject, plan),
        facts=facts,
        help="choose sizes of the axes that divide what they split, such as heads and groups",
    )
