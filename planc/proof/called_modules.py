"""Which modules the model's code calls, for plans without tensor parallelism: FSDP gathers a
unit when its module is called.

A plain run of the small model answers it, once per configuration and for any plan. The answer is
cached by the configuration, the library versions and planc's sources, so a warm check does not
import torch.
"""

from planc.model import cache
from planc.model.facts import Facts, generic
from planc.proof.small_case import SmallModel, small_model
from planc.trial.certificate import source_digest

_FORMAT = 2


def called_modules(facts: Facts) -> tuple[frozenset[str] | None, str]:
    """The modules that are called, with `*` for indices, or None and why; a model's code is run."""
    model = small_model(facts)
    if isinstance(model, str):
        return None, model
    key = cache.entry_name(f"calls {_FORMAT}", config=model.values, sources=source_digest())
    kept = None if model.of_the_user else cache.recall(key)
    if isinstance(kept, list):
        return frozenset(map(str, kept)), ""
    if cache.missing():
        return None, cache.unproved()
    try:
        names = sorted(_run(model))
    except Exception as error:
        return None, f"the small model does not run: {error}"
    if not model.of_the_user:  # can change while its name stays the same
        cache.keep(key, names)
    return frozenset(names), ""


def _run(model: SmallModel) -> set[str]:
    from planc.model.small.transformers_model import without_cache
    from planc.trial.trace import run_order as run

    builder = model.builder()
    made = builder.build(0)
    without_cache(made)
    return {generic(name) for name in run(made, builder.sample())}
