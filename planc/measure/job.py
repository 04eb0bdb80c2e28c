"""What one rank is asked to run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """The steps that a rank takes.

    Args:
        rows, tokens: of each pass of a rank.
        micro_batches: passes of a step.
        dtype: that the parameters are built in; empty for the configuration's own.
        optimizer: `adamw`, `adam`, `sgd` or `momentum`, where the plan has no optimizer section.
        attention: transformers' `attn_implementation`.
    """

    rows: int
    tokens: int
    micro_batches: int
    dtype: str
    optimizer: str = "adamw"
    attention: str = "sdpa"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """
    Args:
        step: what the rank does.
        config: the fields of the model's configuration.
        lowered, digest: the plan.
        rank: of the mesh.
        begins: the blocks before which another forward pass begins.
        edges: the blocks at which backward passes from one moment to the next: by their name, that
            of the moment.
        form: of what the stages before it send.
        order: whether what it sends is noted, in place of what it holds.
        device: where tensors have memory, `cpu` or `cuda`; empty for fake ones.
        code: whether the plan's custom styles may be imported.
    """

    step: RankStep
    config: dict[str, Any]
    lowered: str
    digest: str
    rank: int
    begins: tuple[str, ...] = ()
    edges: dict[str, str] = field(default_factory=dict)
    form: dict[str, Any] = field(default_factory=dict)
    order: bool = False
    device: str = ""
    code: bool = False

    def dumps(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def loads(cls, text: str) -> RankJob:
        values = json.loads(text)
        return cls(**{**values, "step": RankStep(**values["step"])})
