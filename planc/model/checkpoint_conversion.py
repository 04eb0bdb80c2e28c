"""Checkpoint tensor names of a transformers model, if they differ from the model's own names.

Modeling code changes over time, checkpoints do not. transformers keeps a list of renamings and
conversions (such as experts that are one tensor in the model and many in the files). This module
evaluates the list: which checkpoint tensors each tensor of the model is made of, which is read
without transformers, and the way back, for files as `save_pretrained` writes them.

Source: `transformers.conversion_mapping` and `transformers.core_model_loading`, version 5.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

Step = tuple[str, int, int]
"""`stack` or `join` along a dim, or `swap` of two dims; other names are not supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The way to make a tensor: names of checkpoint tensors by pattern, and the steps on them."""

    parts: tuple[tuple[str, ...], ...]
    steps: tuple[Step, ...] = ()


def recipes(model: Any, names: Iterable[str], known: Iterable[str]) -> dict[str, Recipe]:
    """The recipe of each tensor of a transformers model (wrapped or not), by its name in the model.

    What is stored unchanged has one name and no steps; names that the model lacks are unchanged.
    """
    plain = _plain_model(model)
    if plain is None:
        return {name: Recipe(parts=((name,),)) for name in names}
    from planc.compat.transformers import (
        WeightConverter,
        get_model_conversion_mapping,
        rename_source_key,
    )

    conversions = get_model_conversion_mapping(plain)
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    renamings = [c for c in conversions if not isinstance(c, WeightConverter)]
    model_names = dict.fromkeys(known, True)
    parts_by_target: dict[str, dict[str, list[str]]] = {}
    for name in sorted(names, key=_natural):
        target, pattern = name, None
        if name not in model_names:
            prefix = plain.base_model_prefix
            target, pattern = rename_source_key(name, renamings, converters, prefix, model_names)
        parts_by_target.setdefault(target, {}).setdefault(pattern or "", []).append(name)
    return {target: _recipe(parts, converters) for target, parts in parts_by_target.items()}


class HubNames:
    """The tensors of a model as the files of its checkpoint have them: `save_pretrained`'s way.

    Args:
        model: a transformers model, wrapped or not; of other models names and tensors stay.
    """

    def __init__(self, model: Any) -> None:
        self._plain = _plain_model(model)
        loaded = getattr(model, "_weight_conversions", None)  # by `from_pretrained`
        if self._plain is not None and loaded is not None:
            self._plain._weight_conversions = loaded

    def converted_together(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """The names of the model in groups, each of which `to_stored` takes whole."""
        if self._plain is None:
            return [(name,) for name in names]
        from planc.compat.transformers import (
            WeightConverter,
            get_model_conversion_mapping,
            rename_source_key,
        )

        conversions = getattr(self._plain, "_weight_conversions", None)
        if conversions is None:
            conversions = get_model_conversion_mapping(self._plain, add_legacy=False)
        back = [c.reverse_transform() for c in conversions[::-1] if isinstance(c, WeightConverter)]
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(rename_source_key(name, [], back)[0], []).append(name)
        return [tuple(group) for group in groups.values()]

    def to_stored(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of a checkpoint that are made of some of the model's, by their names."""
        if self._plain is None:
            return dict(tensors)
        from planc.compat.transformers import revert_weight_conversion

        return dict(revert_weight_conversion(self._plain, dict(tensors)))


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
    """A sort key that orders numbers by value: `experts.10` comes after `experts.9`."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in name.split(".")]


def _plain_model(model: Any) -> Any:
    """The model on meta, before any wrapping; None if it is not a transformers model.

    The conversions are looked up by class names, which FSDP changes. Its attention never runs, and
    transformers knows none that a plan brought.
    """
    import torch
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return None
    modules = "transformers.models"
    kind: Any = next(k for k in type(model).__mro__ if k.__module__.startswith(modules))
    with torch.device("meta"):
        return kind._from_config(deepcopy(model.config), attn_implementation="eager")


def written_name(model: Any, names: tuple[str, ...]) -> str:
    """The name under which a tied tensor is written: the one to which the model ties the others."""
    tied = tuple(getattr(model, "_tied_weights_keys", None) or ())
    return next((n for n in names if n not in tied), names[0])
