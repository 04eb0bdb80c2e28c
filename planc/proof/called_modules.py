"""What the small model shows by itself: tokens that see others, and which modules are called, for
plans without tensor parallelism: FSDP gathers a unit when its module is called.

A plain run of the small model answers it, once per configuration and for any plan. The answer is
cached by the configuration, the library versions and planc's sources, so a warm check does not
import torch.
"""

from planc.diagnostic import Sink
from planc.model import cache
from planc.model.facts import Facts, generic
from planc.ops.documents import parts_reset
from planc.ops.lowered import Lowered
from planc.proof.small_case import SmallModel, small_model
from planc.runtime.leaks import DOCUMENTS, PADDING, leaks
from planc.trial.certificate import source_digest

_FORMAT = 2


def report_leaks(facts: Facts, lowered: Lowered, sink: Sink) -> None:
    """Reports what the model's tokens see that they must not (PL517, PL518)."""
    own = facts.code or facts.user_model is not None or not facts.config.get("model_type")
    found = {} if own else leaks(facts.config, facts.name, parts_reset(lowered.ops))
    if DOCUMENTS in found:
        sink.info(
            "PL517",
            f"{facts.name} does not keep packed documents apart: `planc.apply` refuses rows whose "
            "positions begin again",
            facts=[
                f"with other tokens in a first document the next one moves by "
                f"{found[DOCUMENTS]:.1g} of the output, in one process"
            ],
            help="give each document a row of its own, padded on the right",
        )
    if PADDING in found:
        sink.info(
            "PL518",
            f"{facts.name} sees padding on the left of a row, though a mask says it: `planc.apply` "
            "refuses such rows",
            facts=[
                f"with other tokens in the padding the rest moves by {found[PADDING]:.1g} of "
                "the output, in one process"
            ],
            help="pad rows on the right, with labels of -100",
        )


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
