"""Makes a small model of the same family, and compiles the plan for it.

A transformers or diffusers model is shrunk: its resolved configuration becomes a small one for the
same class. A user's own model is run as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from planc import compiler
from planc.codes import DATA_AXES
from planc.compiler import Compiled
from planc.diagnostic import Diagnostic, Sink
from planc.model.config import buildable
from planc.model.facts import Facts
from planc.model.layer_kinds import block_kinds
from planc.model.load import load_values
from planc.model.small.shrink import shrink
from planc.ops.base import AxisRole
from planc.proof import small_mesh

if TYPE_CHECKING:
    from torch import nn

    from planc.model.small.user_model import ModelBuilder

RANKS = 2
"""The size of a simulated axis: errors on 8 ranks show on 2, and heads stay divisible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """The model that is built and run instead of the original one.

    Args:
        values: the small configuration; empty for a user's own model.
        code: the factory of a user's own model, else empty.
        own: a user's own model, of which copies are run.
    """

    values: dict[str, Any]
    code: str = ""
    own: nn.Module | None = None

    @property
    def of_the_user(self) -> bool:
        """Whether its code can change while its name stays the same."""
        return bool(self.code) or self.own is not None

    def builder(self) -> ModelBuilder:
        """The object that builds the model and its inputs; imports torch. Raises as
        `builder_of`.
        """
        from planc.model.small.user_model import builder_of

        return builder_of(self.values, self.code, self.own)

    def facts(self, model: Facts, sink: Sink) -> Facts | None:
        """The facts of the small model, or None after a finding.

        Args:
            model: the facts of the original model.
            sink: receives the findings (PL60x).
        """
        return model if self.of_the_user else load_values(self.values, "the small model", sink)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallCase:
    """A small model and the plan compiled for it without errors."""

    model: SmallModel
    compiled: Compiled


def small_model(facts: Facts, ranks: Mapping[str, int] | None = None) -> SmallModel | str:
    """The small model for a model, or the reason why there is none.

    Args:
        facts: the facts of the model.
        ranks: what heads, widths and experts must be divisible by, by the role of a mesh axis; by
            default one tensor axis of `RANKS`.
    """
    ranks = {AxisRole.TENSOR: RANKS} if ranks is None else ranks
    if facts.code:
        return SmallModel(values={}, code=facts.code)
    if facts.own is not None:
        return SmallModel(values={}, own=facts.own)
    if not buildable(facts.config):
        return f"{facts.name} has no configuration that planc can make small"
    try:
        values = shrink(facts.config, ranks=ranks, blocks=block_kinds(facts))
    except Exception as error:
        return f"the model cannot be shrunk: {error}"
    values = json.loads(json.dumps(values, default=str))
    return SmallModel(values={**values, "architectures": [facts.name]})


def small_case(
    compiled: Compiled,
    sizes: Mapping[str, int],
    *,
    checks: Sink | None = None,
) -> SmallCase | str:
    """The plan compiled for a small model on a small mesh, or the reason why it can't be.

    Args:
        compiled: the plan for the original model.
        sizes: the sizes of the small mesh by axis.
        checks: receives the findings of the checks, which then do not stop the compiler.
    """
    assert compiled.facts is not None and compiled.plan is not None
    ranks: dict[str, int] = {}
    for axis in compiled.plan.mesh.axes:
        ranks[axis.role] = ranks.get(axis.role, 1) * sizes[axis.name]
    ranks[AxisRole.TENSOR] = max(RANKS, ranks.get(AxisRole.TENSOR, 1))
    model = small_model(compiled.facts, ranks)
    if isinstance(model, str):
        return model
    quiet = Sink()
    facts = model.facts(compiled.facts, quiet)
    if facts is None:
        return f"the model cannot be shrunk: {_first(quiet)}"
    if facts.name != compiled.facts.name:
        return f"the small model is a {facts.name}, not a {compiled.facts.name}"
    settings = small_mesh.settings(compiled.settings, dict(sizes))
    world = prod(sizes.values())
    found = Sink() if checks is None else checks
    small = compiler.compile(
        compiled.files, facts, quiet, world_size=world, settings=settings, checks=found
    )
    # the small mesh has one rank on the data axes, and the simulation runs none of FSDP
    wrong = [d for d in found if d.severity == "error" and d.code not in DATA_AXES]
    if checks is None and wrong:
        return f"the plan does not fit the small model: {_told(wrong[0])}"
    if small.lowered is None:
        return f"the plan does not fit the small model: {_first(quiet)}"
    return SmallCase(model=model, compiled=small)


def _first(sink: Sink) -> str:
    """The first error, as a reason."""
    error = next(d for d in sink if d.severity == "error")
    return _told(error)


def _told(error: Diagnostic) -> str:
    return f"{error.message} ({error.code})"
