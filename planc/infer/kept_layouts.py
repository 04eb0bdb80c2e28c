"""Inferred layouts in the cache: under the flow, the splits, and the sources that infer."""

from __future__ import annotations

import hashlib
from functools import cache as once
from pathlib import Path
from typing import Any

from planc.infer.flow_types import Clash, FoundRule, Layouts, Tried
from planc.infer.propagate import infer
from planc.model import cache
from planc.model.dataflow import DataFlow, encode
from planc.ops.codec import Reader, dump, shape_of
from planc.ops.styles import Style

Named = tuple[tuple[str, tuple[Style, ...]], ...]
Known = tuple[Named, Named]
"""Splits and complete styles, by the names of modules."""

_SOURCES = (
    "model/dataflow",
    "ops/contract",
    "infer/flow_types",
    "infer/gradient_sums",
    "infer/interpret_operations",
    "infer/propagate",
)
_STYLE = shape_of(Style)


@once
def _sources() -> str:
    root = Path(__file__).parents[1]
    return hashlib.sha256(b"".join((root / f"{n}.py").read_bytes() for n in _SOURCES)).hexdigest()


def layouts_of(flow: DataFlow, known: Known, *, sequence: bool) -> Layouts | Clash:
    """The layouts that follow, or why there are none; remembered with the flow and in the cache."""
    memo = (known, sequence)
    if memo not in flow.memo:
        if "text" not in flow.memo:
            flow.memo["text"] = encode(flow)
        parts = (flow.memo["text"], repr(known), str(sequence))
        key = cache.entry_name("layouts", *parts, sources=_sources())
        layouts = _decode(cache.recall(key))
        if layouts is None:
            try:
                layouts = infer(flow, dict(known[0]), dict(known[1]), sequence=sequence)
            except Clash as clash:
                layouts = clash
            cache.keep(key, _encode(layouts))
        flow.memo[memo] = layouts
    kept: Layouts | Clash = flow.memo[memo]
    return kept


def _encode(layouts: Layouts | Clash) -> dict[str, Any]:
    if isinstance(layouts, Clash):
        return {"clash": [str(layouts), layouts.line, layouts.rules]}
    styles = list(dict.fromkeys(rule.style for rule in layouts.rules))
    return {
        "styles": [dump(style, _STYLE) for style in styles],
        "rules": [rule._replace(style=styles.index(rule.style)) for rule in layouts.rules],  # type: ignore[arg-type]
        "parts": [layouts.parts, layouts.sums],
        "around": layouts.around,
        "why": layouts.why,
        "cuts": layouts.cuts,
    }


def _decode(data: Any) -> Layouts | Clash | None:
    try:
        if "clash" in data:
            why, line, rules = data["clash"]
            return Clash(why, line, rules=rules)
        reader = Reader()
        styles = [reader.load(style, _STYLE) for style in data["styles"]]
        return Layouts(
            rules=tuple(
                FoundRule(module, styles[at], reason, tuple(weights), line, tuple(beside))
                for module, at, reason, weights, line, beside in data["rules"]
            ),
            parts=data["parts"][0],
            sums=data["parts"][1],
            around=tuple(data["around"]),
            why=tuple(Tried(at, text, line, tuple(of)) for at, text, line, of in data["why"]),
            cuts=tuple((module, line) for module, line in data["cuts"]),
        )
    except (ValueError, TypeError, KeyError, IndexError):
        return None
