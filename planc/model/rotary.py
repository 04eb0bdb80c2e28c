"""Rotary embeddings whose frequencies depend on the rows of a pass."""

from collections.abc import Iterator, Mapping
from typing import Any

_BY_LENGTH = ("dynamic", "longrope")
"""The types for which transformers chooses frequencies by the longest position of a pass
(`dynamic_rope_update` in modeling_rope_utils)."""


def length_dependent_rotary(config: Mapping[str, Any]) -> str:
    """The type of a rotary embedding of a configuration whose frequencies depend on the longest
    position of a pass; empty if there is none.
    """
    return next((kind for kind in _rotary_kinds(config) if kind in _BY_LENGTH), "")


def _rotary_kinds(config: Mapping[str, Any]) -> Iterator[str]:
    """The types of rotary embeddings that a configuration names, also for kinds of layers."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            if name.startswith("rope_"):
                parameters = [value, *(v for v in value.values() if isinstance(v, Mapping))]
                yield from (str(v.get("rope_type") or v.get("type")) for v in parameters)
            yield from _rotary_kinds(value)
