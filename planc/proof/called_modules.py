"""Which modules a model's own code calls: what FSDP can gather in time, where no axis is split.

A plain run of the small model tells it, once for a configuration whatever the plan: it is kept by
the configuration, the library versions and planc's sources, so a warm check imports no torch.
"""

from __future__ import annotations

import json

from planc.model import cache
from planc.model.facts import Facts
from planc.proof.flow_findings import generic
from planc.proof.small_case import SmallModel, small_model
from planc.trial.source_digest import source_digest

_FORMAT = 2


def called_modules(facts: Facts) -> tuple[frozenset[str] | None, str]:
    """The modules that are called, with stars for numbers; None, and why, where no run tells it.

    Args:
        facts: the model; code that it names was allowed.
    """
    model = small_model(facts)
    if isinstance(model, str):
        return None, model
    config = json.dumps(model.values, sort_keys=True)
    key = cache.entry_name(
        f"calls {_FORMAT}", config, *cache.extra_versions(model.values), source_digest()
    )
    kept = None if model.code else cache.recall(key)
    if isinstance(kept, list):
        return frozenset(map(str, kept)), ""
    try:
        names = sorted(_run(model))
    except Exception as error:
        return None, f"the small model does not run: {error}"
    if not model.code:  # which may change, and its name does not
        cache.keep(key, names)
    return frozenset(names), ""


def _run(model: SmallModel) -> set[str]:
    from planc.trial.trace import run_order as run

    builder = model.builder()
    return {generic(name) for name in run(builder.build(0), builder.sample())}
