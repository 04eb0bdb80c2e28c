"""Facts of a model without a plan: tokens that see others, and the modules that are called, for
plans without tensor parallelism: FSDP gathers a unit when its module is called.
"""

from planc.diagnostics.diagnostic import Sink
from planc.model.facts import Facts, generic
from planc.ops.lowered import Lowered
from planc.proxy.flow import flow_of, flow_source
from planc.runtime.leaks import DOCUMENTS, PADDING, leaks

_LAYERS = 2
"""The layers of the proxy model: units of one list are called alike."""


def report_leaks(facts: Facts, lowered: Lowered, sink: Sink) -> None:
    """Reports what the model's tokens see that they must not (PL517, PL518), or that this is
    unknown (PL558).
    """
    own = facts.code or facts.user_model is not None or not facts.config.get("model_type")
    found = {} if own else leaks(facts.config, facts.name, lowered.state_updates)
    if isinstance(found, str):
        sink.info(
            "PL558",
            f"whether {facts.name} keeps packed documents apart, and ignores padding, is unknown",
            facts=[found],
            help="give each document a row of its own, padded on the right",
        )
        return
    if DOCUMENTS in found:
        sink.info(
            "PL517",
            f"{facts.name} does not keep packed documents apart: `planc.apply` refuses rows whose "
            "positions restart",
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
    """The modules that are called, with `*` for indices, or None and why."""
    source = flow_source(facts, {}, _LAYERS)
    flow = source if isinstance(source, str) else flow_of(source, facts)
    if isinstance(flow, str):
        return None, flow
    return frozenset(generic(call.name) for call in flow.calls), ""
