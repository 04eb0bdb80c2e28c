"""Which modules a model's own code calls: what FSDP can gather in time, where no axis is split.

A plain run of the small model tells it, once for a configuration whatever the plan: it is kept by
the configuration and the library versions, so a warm check imports no torch.
"""

from __future__ import annotations

import json
from typing import Any

from planc.model import cache
from planc.model.facts import Facts
from planc.model.layer_kinds import sorts
from planc.model.small.shrink import shrink
from planc.proof.flow_findings import generic

_FORMAT = 1
_RANKS = 2  # as layout flow shrinks for one tensor axis, so that both look at the same model


def called(facts: Facts) -> tuple[frozenset[str] | None, str]:
    """The modules that are called, with stars for numbers; None, and why, where no run tells it.

    Args:
        facts: the model; code that it names was allowed.
    """
    values: dict[str, Any] = {}
    if not facts.code:
        if "model_type" not in facts.config:
            return None, "the model has no configuration to shrink"
        try:
            values = shrink(facts.config, ranks=_RANKS, blocks=sorts(facts))
        except Exception as error:
            return None, f"the model cannot be shrunk: {error}"
        values = json.loads(json.dumps(values, default=str))
        values["architectures"] = [facts.name]
    key = cache.named(f"calls {_FORMAT}", json.dumps(values, sort_keys=True))
    kept = None if facts.code else cache.recall(key)
    if isinstance(kept, list):
        return frozenset(map(str, kept)), ""
    try:
        names = sorted(_run(values, facts.code))
    except Exception as error:
        return None, f"the small model does not run: {error}"
    if not facts.code:  # which may change, and its name does not
        cache.keep(key, names)
    return frozenset(names), ""


def _run(values: dict[str, Any], code: str) -> set[str]:
    from planc.model.small.user_model import maker_of
    from planc.trial.trace import called as run

    maker = maker_of(values, code)
    return {generic(name) for name in run(maker.build(0), maker.sample())}
