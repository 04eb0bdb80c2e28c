"""What checkpoints call the weights of a transformers model, where it is not what the model does.

Libraries change how they hold weights; checkpoints stay. transformers keeps a list of renamings and
of conversions (experts that are one tensor in the model and many in the files); this reads the list
and says what each tensor of the model is made of. Nothing is read or converted here.

Source: `transformers.conversion_mapping` and `transformers.core_model_loading`, version 5.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Step = tuple[str, int, int]
"""`stack` along a dim, `join` along a dim, `swap` of two dims; any other name is not supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a tensor of the model is made of those in a checkpoint.

    Args:
        parts: the names of tensors; those of one part were matched by one pattern.
        steps: what is done to the parts, in order.
    """

    parts: tuple[tuple[str, ...], ...]
    steps: tuple[Step, ...] = ()


def recipes(model: Any, names: Iterable[str], known: Iterable[str]) -> dict[str, Recipe]:
    """What the tensors of a model are made of, by the model's name.

    Args:
        model: a transformers model, wrapped or not; of others nothing is known.
        names: what the checkpoint holds.
        known: what the model holds.

    Returns:
        A recipe of one name and no steps for a tensor that is stored as it is. Names of the
        checkpoint that the model does not know keep theirs.
    """
    plain = _unwrapped(model)
    if plain is None:
        return {name: Recipe(parts=((name,),)) for name in names}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    every = get_model_conversion_mapping(plain)
    converters = [c for c in every if isinstance(c, WeightConverter)]
    renamings = [c for c in every if not isinstance(c, WeightConverter)]
    own = dict.fromkeys(known, True)
    made: dict[str, dict[str, list[str]]] = {}
    for name in sorted(names, key=_natural):
        target, pattern = name, None
        if name not in own:
            prefix = plain.base_model_prefix
            target, pattern = rename_source_key(name, renamings, converters, prefix, own)
        made.setdefault(target, {}).setdefault(pattern or "", []).append(name)
    return {target: _recipe(parts, converters) for target, parts in made.items()}


def _recipe(parts: dict[str, list[str]], converters: list[Any]) -> Recipe:
    patterns = set(parts)
    converter = next((c for c in converters if patterns <= set(c.source_patterns)), None)
    if converter is None:
        return Recipe(parts=tuple(tuple(names) for names in parts.values()))
    order = [p for p in converter.source_patterns if p in parts]
    steps = tuple(_step(operation) for operation in converter.operations)
    if len(converter.target_patterns) > 1:
        steps = (*steps, ("split", 0, 0))
    return Recipe(parts=tuple(tuple(parts[p]) for p in order), steps=steps)


def _step(operation: Any) -> Step:
    match type(operation).__name__:
        case "MergeModulelist":
            return "stack", operation.dim, 0
        case "Concatenate" if operation.num_shards_attribute is None:
            return "join", operation.dim, 0
        case "Transpose" if not operation.check_dims:
            return "swap", operation.dim0, operation.dim1
        case name:
            return name, 0, 0


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers in their order: `experts.10` comes after `experts.9`."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in re.split(r"[.]", name)]


def _unwrapped(model: Any) -> Any:
    """The model as it was built, without weights; None for one that is not from transformers.

    The list is looked up by the names of classes, which FSDP changes.
    """
    import torch
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return None
    modules = "transformers.models"
    kind: Any = next(k for k in type(model).__mro__ if k.__module__.startswith(modules))
    with torch.device("meta"):
        return kind._from_config(model.config)
