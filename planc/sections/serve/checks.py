"""PL692 to PL694: whether an engine can have the layers of a serve section."""

from planc.diagnostics.diagnostic import Sink
from planc.ir.engine_layout import engine_side
from planc.ir.nodes import Plan
from planc.ir.serving import serving_of
from planc.model.facts import Facts
from planc.model.hub_tensors import UnknownHubError


def check(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Lays the tensors of the model's files out over the engine's ranks."""
    serving = serving_of(plan)
    if serving is None or "serve" in plan.broken:
        return
    try:
        engine_side(serving, facts, sink)
    except UnknownHubError as error:
        message = f"the tensors of the files of {facts.name} are not known: {error}"
        help = "serve a model that transformers builds from its configuration"
        sink.error("PL694", message, serving.origin, help=help)
