"""The data flow of a model, from the cache or recorded with a small one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from planc.diagnostic import Sink
from planc.model import cache
from planc.model.dataflow import FORMAT, Flow, decode, encode
from planc.model.facts import Facts
from planc.model.load import load_values
from planc.model.small.shrink import small_values

RANKS = 2
"""By what the small model's heads and widths divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFlow:
    """A flow, the facts of the small model that it was recorded with, and the layers of the real
    model that its layers are (as of `Shrunk`).
    """

    flow: Flow
    facts: Facts
    kept: Mapping[int, Sequence[tuple[int, ...]]]


def small_flow(facts: Facts, variants: Mapping[int, list[str]]) -> SmallFlow | str:
    """The flow of a model, or the reason why there is none.

    A model of a library is cached; code of the user's, which can change while its name stays the
    same, runs each time.

    Args:
        variants: what to keep apart among the blocks of a list, by its length, as of `shrink`.
    """
    if facts.user_model is not None or (facts.code and not Path(facts.code).is_absolute()):
        found = _recorded({}, facts)
        return found if isinstance(found, str) else SmallFlow(flow=found, facts=facts, kept={})
    made = small_values(facts, RANKS, variants=variants)
    if isinstance(made, str):
        return made
    key = cache.entry_name(f"dataflow {FORMAT}", config=made.values)
    kept = None if facts.code else _decoded(cache.recall(key))
    small = load_values(made.values, "the small model", quiet := Sink(), folder=facts.code)
    if small is None or small.name != facts.name:
        lacks = cache.unproved() if cache.missing() else ""
        return lacks or next((d.message for d in quiet), f"the small model is no {facts.name}")
    if kept is None:
        if cache.missing():
            return cache.unproved()
        recorded = _recorded(made.values, facts)
        if isinstance(recorded, str):
            return recorded
        kept = recorded
        if not facts.code:
            cache.keep(key, encode(kept))
    return SmallFlow(flow=kept, facts=small, kept=made.kept)


@lru_cache(maxsize=64)
def _decoded(text: Any) -> Flow | None:
    """One object for a text, which remembers what was inferred from it."""
    return decode(text)


def _recorded(values: dict[str, Any], facts: Facts) -> Flow | str:
    from planc.model.small.record_flow import record
    from planc.model.small.user_model import builder_of

    try:
        given = facts.inputs_and_loss
        return record(builder_of(values, facts.code, facts.user_model, given=given))
    except Exception as error:
        text = " ".join(str(error).split())
        return f"the small model does not run: {type(error).__name__}: {text[:200]}"
