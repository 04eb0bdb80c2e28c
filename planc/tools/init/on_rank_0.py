"""The draft of a plan that all ranks of a run take: rank 0 writes it, in a process of its own."""

import logging

from planc.diagnostics.diagnostic import Sink
from planc.model.facts import Facts
from planc.proof.in_subprocess import NoAnswerError, answer_elsewhere, readable
from planc.runtime.preconditions import of_rank_0
from planc.syntax import ast
from planc.tools.init.init import draft
from planc.tools.init.plan_text import parsed_text

_log = logging.getLogger("planc")


def parsed_for_run(facts: Facts, device_type: str) -> tuple[ast.File, ...] | None:
    """The draft of a plan for a model, equal on all ranks; None where rank 0 could not write one.

    Raises:
        AnnouncedError: another rank has a plan, or an error.
    """
    text = of_rank_0(lambda: _draft_text(facts), device_type)
    return None if text is None else parsed_text(text)


def _draft_text(facts: Facts) -> str | None:
    _log.warning(
        "no plan is for %s, so rank 0 drafts one; `planc init` writes it into a file to read",
        facts.family,
    )
    try:
        return str(answer_elsewhere(_text, readable(facts), of=facts))
    except NoAnswerError as error:
        advice = "; write it before the run, by `planc init`" if error.late else ""
        _log.warning("the draft could not be written: %s%s", error, advice)
        return None


def _text(facts: Facts) -> str:
    return draft(facts, Sink()).text
