"""A serving engine: its ranks, and the rules of its layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from planc.diagnostics.source import Span
from planc.ir.nodes import Meaning, Plan
from planc.model.facts import Modules

FUSED = ("qkv", "merged", "whole", "experts")
"""The layers of several weights of the files."""
STACKS = {"experts_merged": 1, "experts_column": 1, "experts_row": 2}
"""The stacks of experts that the files have, by the dim that ranks of a group split."""
QUANTIZED = (*FUSED, "column", "row")
"""The layers whose weights are in fp8 if the engine's are."""
LAYERS = (*QUANTIZED, *STACKS, "vocab", "replicate", "renames", "left_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRule(Meaning):
    """A line of a serve section: layers of the engine by the ends of their names.

    Args:
        ends: of names of the engine's layers.
        kind: of `LAYERS`.
        parts: the layers of the files that a fused layer consists of, in order; none if the files
            have it fused.
        transposed: whether the last two dims of a stack in the files are swapped in the engine.
        dtype: torch's name of the dtype in the engine; None for that of the section.
        optional: whether the model may lack it.
        override: whether it replaces an earlier rule for the same tensors.
    """

    ends: tuple[str, ...]
    kind: str
    parts: tuple[str, ...] = ()
    transposed: bool = False
    dtype: str | None = None
    optional: bool = False
    override: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving(Meaning):
    """A serve section: an engine's version, its ranks and its layers.

    Args:
        modules: the model.
        tp: the ranks of one engine that split layers.
        dp: the engines, or groups of ranks with equal attention layers.
        ep: the groups of ranks, of all, that have different experts; ranks of a group split each.
        fp8: the rows and columns that share a scale in weights of linear layers, which are then in
            fp8; 0 for none.
        dtype: torch's name of the dtype of other weights; None for that of the model.
        rows_by_ranks: whether a padded vocabulary that tp does not divide grows to a multiple that
            it does (SGLang), instead of being refused (vLLM).
    """

    modules: Modules
    engine: str
    version: str
    tp: int = 1
    dp: int = 1
    ep: int = 1
    fp8: int = 0
    dtype: str | None = None
    rows_by_ranks: bool = False
    rules: tuple[ServeRule, ...] = ()
    sizes: Mapping[str, Span] = field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self) -> int:
        return self.tp * self.dp

    def engine_name(self, name: str) -> str:
        """The engine's name of a tensor, with renamed parts."""
        path = f".{name}."
        for rule in self.rules:
            if rule.kind == "renames":
                path = path.replace(f".{rule.parts[0]}.", f".{rule.ends[0]}.")
        return path[1:-1]

    def engine_text(self) -> str:
        return f"{self.engine} {self.version}".strip()


def serving_of(plan: Plan) -> Serving | None:
    """The serving engine that a plan describes, if it describes one."""
    rules = (rule for rules in plan.sections.values() for rule in rules)
    return next((rule for rule in rules if isinstance(rule, Serving)), None)
