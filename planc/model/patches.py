"""The place of image patches in the transformers of diffusers, by their class."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from planc.model.facts import Facts, Modules

ALONE, AFTER_TEXT, BEFORE_TEXT = "alone", "after_text", "before_text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """The patches of a class.

    Args:
        place: where they are among the tokens of attention: `alone`, or with text before or
            behind them.
        lists: the lists of blocks, in the order of the model.
        seeing: the modules of a block, by name, in which patches see each other.
        behind: the module behind the blocks whose output is that of each patch.
    """

    place: str
    lists: tuple[str, ...]
    seeing: tuple[str, ...] = ("attn",)
    behind: str = "proj_out"

    def attention(self, facts: Facts) -> tuple[Modules, ...]:
        """The modules in which patches see each other."""
        inside = (m for m in facts.model.below() if len(m.path) == 3 and m.path[0] in self.lists)
        return tuple(m for m in inside if m.path[-1] in self.seeing)

    def ends(self, facts: Facts) -> tuple[str, str]:
        """The names of the first block, and of the module behind the last one."""
        entries = [m for m in facts.model.below() if len(m.path) == 2]
        first = next(m for name in self.lists for m in entries if m.path[0] == name)
        return first.first_name, self.behind


_TWO_LISTS = ("transformer_blocks", "single_transformer_blocks")
_CLASSES = {
    "WanTransformer3DModel": Patches(place=ALONE, lists=("blocks",), seeing=("attn1",)),
    "FluxTransformer2DModel": Patches(place=AFTER_TEXT, lists=_TWO_LISTS),
    "HunyuanVideoTransformer3DModel": Patches(place=BEFORE_TEXT, lists=_TWO_LISTS),
    "SD3Transformer2DModel": Patches(
        place=BEFORE_TEXT, lists=_TWO_LISTS[:1], seeing=("attn", "attn2")
    ),
}
"""The classes that are proved; the cross-attention of Wan (`attn2`) has patches only as queries."""
KNOWN = tuple(_CLASSES)


def patches_of_class(facts: Facts) -> Patches | None:
    """The patches of a model; None where it has none, or they are not known."""
    return _CLASSES.get(facts.name)


def outputs_of(config: Mapping[str, Any]) -> int | None:
    """The numbers that a model gives for each patch: its volume for each channel."""
    side = config.get("patch_size")
    channels = config.get("out_channels") or config.get("in_channels")
    if isinstance(side, int):
        side = [config.get("patch_size_t") or 1, side, side]
    return channels * prod(side) if channels and side else None
