"""A draft as the compiler takes it, for a family without a plan."""

from planc.diagnostic import Sink
from planc.model import cache
from planc.model.facts import Facts
from planc.source import Source
from planc.syntax import ast, plan_files


def parsed(facts: Facts) -> tuple[ast.File, ...] | None:
    """The draft of a plan for a model; None where nothing can be proved, without torch."""
    from planc.draft.init import draft  # which imports the whole proof

    if cache.missing():
        return None
    return (parsed_text(draft(facts, Sink()).text),)


def parsed_text(text: str) -> ast.File:
    """The text of a draft, parsed."""
    from planc.syntax.parse import parse  # which imports lark

    return parse(Source(plan_files.DRAFT, text), Sink())
