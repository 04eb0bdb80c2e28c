"""The data flow of a model, from the cache or recorded with a proxy model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from planc.diagnostics.diagnostic import Sink
from planc.model import cache
from planc.model.dataflow import FORMAT, DataFlow, decode, encode
from planc.model.facts import Facts
from planc.model.load import load_values
from planc.proxy.shrink import small_values

RANKS = 2
"""The number that divides the proxy model's heads and widths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSource:
    """The proxy model with which a flow is recorded.

    Args:
        facts, values: its facts and its configuration, empty for a user's own model.
        kept: the layers of the real model that its layers are (as of `Shrunk`).
    """

    facts: Facts
    values: dict[str, Any]
    kept: Mapping[int, Sequence[tuple[int, ...]]]


def flow_source(facts: Facts, variants: Mapping[int, list[str]], layers: int) -> FlowSource | str:
    """The proxy model of a model, or the reason why there is none; arguments as of `shrink`."""
    if facts.lacks_config:
        return FlowSource(facts=facts, values={}, kept={})
    shrunk = small_values(facts, RANKS, layers=layers, variants=variants)
    if isinstance(shrunk, str):
        return shrunk
    small = load_values(shrunk.values, "the proxy model", quiet := Sink(), folder=facts.code)
    if small is None or small.name != facts.name:
        lacks = cache.unproved_reason() if cache.missing() else ""
        return lacks or next((d.message for d in quiet), f"the proxy model is no {facts.name}")
    return FlowSource(facts=small, values=shrunk.values, kept=shrunk.kept)


def flow_of(source: FlowSource, facts: Facts) -> DataFlow | str:
    """The flow of a proxy model, or why there is none. A library's model is cached; code of the
    user's, which can change while its name stays the same, runs each time.
    """
    key = cache.entry_name(f"dataflow {FORMAT}", config=source.values)
    of_library = source.values and not facts.code
    text = cache.recall(key) if of_library else None
    kept = _decode(text) if isinstance(text, str) else None
    if kept is not None:
        return kept
    if cache.missing():
        return cache.unproved_reason()
    flow = _record_flow(source.values, facts)
    if of_library and not isinstance(flow, str):
        cache.keep(key, text := encode(flow))
        return _decode(text) or flow
    return flow


@lru_cache(maxsize=64)
def _decode(text: Any) -> DataFlow | None:
    """One object for a text, which remembers it, and what was inferred from it."""
    flow = decode(text)
    if flow is not None:
        flow.memo["text"] = text
    return flow


def _record_flow(values: dict[str, Any], facts: Facts) -> DataFlow | str:
    from planc.proxy.record_flow import record
    from planc.proxy.user_model import builder_of

    try:
        given, model = facts.inputs_and_loss, facts.user_model
        return record(builder_of(values, facts.code, model, given=given, dropout=True))
    except Exception as error:
        text = " ".join(str(error).split())
        return f"the proxy model does not run: {type(error).__name__}: {text[:200]}"
