"""The job of a proof as JSON, sent by the command to its processes; imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job of a proof.

    Args:
        config: the fields of the small model's configuration.
        lowered: the plan lowered for it, as JSON text.
        digest: the digest of the lowered plan.
        ranks: the number of processes.
        seeds: seeds of weights and data, one comparison each.
        limits: the largest errors that pass: `logits`, `loss`, `gradients`, `parameters`.
        code: the factory of a user's own model, used instead of `config`.
        folder: the folder in which each rank writes its result, `<rank>.json`.
        seconds: the timeout of a collective.
        precision: whether the plan's mixed precision runs; the ranks then derive the limits.
    """

    config: dict[str, Any]
    lowered: str
    digest: str
    ranks: int
    seeds: tuple[int, ...]
    limits: dict[str, float]
    folder: str
    seconds: float
    code: str = ""
    precision: bool = False

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Job:
        values = json.loads(text)
        return cls(**{**values, "seeds": tuple(values["seeds"])})
