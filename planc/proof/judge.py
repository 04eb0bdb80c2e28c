"""The outcome of a small case: from the cache, or by simulation."""

import json
from dataclasses import replace

from planc.model import cache
from planc.ops.document import digest
from planc.proof.small_case import SmallCase
from planc.trial.outcome import Outcome, outcome_of
from planc.trial.source_digest import source_digest
from planc.trial.trial_part import trial_part

_FORMAT = 8


def judge(small: SmallCase, *, quick: bool = False, draws: bool = False) -> Outcome:
    """The outcome of a small lowered plan, from the cache or by simulation.

    Args:
        small: the small model and the plan compiled for it.
        quick: one step of one pass, with the tensor axes alone.
        draws: with the dropout of adapters.
    """
    lowered, model = small.compiled.lowered, small.model
    assert lowered is not None
    config = json.dumps(model.values, sort_keys=True)
    part = digest(replace(trial_part(lowered, tensor=quick, draws=draws), plan=""))
    extra_versions = cache.extra_versions(model.values)
    kind = f"flow {_FORMAT} {quick} {draws}"
    key = cache.entry_name(kind, part, config, *extra_versions, source_digest())
    user_code = bool(model.of_the_user or lowered.code)  # can change while its name stays the same
    kept = None if user_code else outcome_of(cache.recall(key))
    if kept is not None:
        return kept
    from planc.trial.simulate import simulate

    try:
        builder = model.builder()
    except Exception as error:
        return Outcome(verdict="unknown", reason=f"the small model cannot be built: {error}")
    outcome = simulate(builder, lowered, quick=quick, draws=draws)
    outcome = replace(outcome, missing_inputs=builder.choice.missing)
    if outcome.verdict != "unknown" and not user_code:  # unknown may change with the environment
        cache.keep(key, outcome.document())
    return outcome
