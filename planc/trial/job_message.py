"""What a proof is asked, as JSON, between the command and its processes; imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Args:
    config: the fields of the small model's configuration.
    lowered: the plan lowered for it, as JSON text.
    digest: of that plan.
    ranks: the number of processes.
    seeds: of weights and data, one comparison each.
    limits: the largest errors that are let pass: `logits`, `loss`, `gradients`, `parameters`.
    code: the factory of a model of the user's own, in whose stead there is no configuration.
    folder: where the ranks leave what they found, `<rank>.json` each.
    seconds: how long a collective may wait.
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

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Job:
        values = json.loads(text)
        return cls(**{**values, "seeds": tuple(values["seeds"])})
