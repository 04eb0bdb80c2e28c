"""A draft as the compiler takes it, for a family without a plan."""

from planc.diagnostics.diagnostic import Sink
from planc.model import cache
from planc.model.facts import Facts
from planc.syntax import ast
from planc.tools.init.plan_text import parsed_text


def parsed(facts: Facts) -> tuple[ast.File, ...] | None:
    """The draft of a plan for a model; None where nothing can be proved, without torch."""
    from planc.tools.init.init import draft  # which imports the whole proof

    if cache.missing():
        return None
    return parsed_text(draft(facts, Sink()).text)
