"""The outcome of a proxy model under the plan, the lines at fault, and the stored verdict."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod

from planc.compiler import Compiled
from planc.model import cache
from planc.ops.document import digest
from planc.proof.small_case import SmallCase, small_case
from planc.proof.small_mesh import with_experts
from planc.simulate.certificate import source_digest
from planc.simulate.outcome import Outcome, outcome_of
from planc.simulate.trial_part import trial_part

_FORMAT = 12


def judge(
    small: SmallCase, *, quick: bool = False, draws: bool = False, section: str = ""
) -> Outcome:
    """The outcome of a small lowered plan, cached or simulated; options as of `simulate`."""
    lowered, model = small.compiled.lowered, small.model
    assert lowered is not None
    run = trial_part(lowered, tensor=quick, draws=draws, section=section)
    part = digest(replace(run, plan=""))
    kind = f"flow {_FORMAT} {quick} {draws}"
    kind += cache.package_versions(run.packages)
    key = cache.entry_name(kind, part, config=model.values, sources=source_digest())
    user_code = bool(model.of_the_user or lowered.code)  # can change while its name stays the same
    kept = None if user_code else outcome_of(cache.recall(key))
    if kept is not None:
        return kept
    if cache.missing():
        return Outcome(verdict="unknown", reason=cache.unproved_reason())
    from planc.simulate.simulate import simulate

    try:
        builder = model.builder()
    except Exception as error:
        return Outcome(verdict="unknown", reason=f"the proxy model cannot be built: {error}")
    outcome = simulate(builder, lowered, quick=quick, draws=draws, section=section)
    choice = builder.choice
    outcome = replace(
        outcome, input_kinds=choice.kinds, missing_inputs=choice.missing, lacks=choice.lacks
    )
    if outcome.verdict != "unknown" and not user_code:  # unknown may change with the environment
        from planc.model.own_code import own_code

        if not own_code(builder.build(0)):  # else a script has changed a class of the library
            cache.keep(key, outcome.document())
    return outcome


def attribute_to_context(
    outcome: Outcome, compiled: Compiled, sizes: Mapping[str, int], parts: Collection[str]
) -> Outcome:
    """Attributes a refuted outcome of the small mesh to the context section, if that is at fault.

    It is if the plan is right without the axes (`parts`) that shard the sequence. The outcome is
    returned unchanged otherwise.
    """
    assert compiled.plan is not None
    whole = {axis: 1 if axis in parts else size for axis, size in sizes.items()}
    if whole == dict(sizes) or not outcome.discrepancies:
        return outcome
    if prod(whole.values()) > 1:
        case = small_case(compiled, with_experts(whole, compiled.plan.mesh))
        if not isinstance(case, SmallCase) or judge(case).verdict != "proved":
            return outcome
    first, *others = outcome.discrepancies
    return replace(outcome, discrepancies=(replace(first, kind="context"), *others))
