"""Positions of a rank's tokens in their sequences, for code that counts tokens."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from planc.runtime.standalone.context_tokens import ContextError, order_of

UPDATE = "update_indexer"
"""The method of a cache that gives an indexer the keys by which it chooses."""


def counting_of(
    model: nn.Module,
) -> Callable[[Mapping[str, Any]], Tensor | None] | None:
    """The function by which a model computes the positions of a batch without them.

    Returns:
        From a batch of whole rows to positions `[rows, length]`, as the model's code
        computes them; None where they are 0, 1, 2 and so on.
    """
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return functools.partial(positions_of_tokens, module)
    if any(names_in(module, "cumsum") for module in inner_models(model)):
        return positions_in_mask
    return None


def positions_of_tokens(module: Any, batch: Mapping[str, Any]) -> Tensor:
    """Positions that count the ids that are no padding, as fairseq's models do."""
    ids, pad = batch.get("input_ids"), module.padding_idx
    positions: Tensor
    if ids is None:
        given = batch["inputs_embeds"]
        positions = module.create_position_ids_from_inputs_embeds(given, pad)
    else:
        positions = module.create_position_ids_from_input_ids(ids, pad)
    return positions


def positions_in_mask(batch: Mapping[str, Any]) -> Tensor | None:
    """Positions that count what the mask shows."""
    mask = batch.get("attention_mask")
    return None if mask is None else mask.cumsum(1) * mask - 1


def names_in(module: nn.Module, *names: str) -> bool:
    """Whether the code of a module's forward calls something of one of these names."""
    plain = inspect.unwrap(type(module).forward)
    return not {*names}.isdisjoint(plain.__code__.co_names)


def inner_models(model: nn.Module) -> Iterator[nn.Module]:
    """A transformers model and those that it is made of."""
    return (m for m in model.modules() if hasattr(m, "base_model_prefix"))


def position_tables(model: nn.Module) -> list[nn.Module]:
    """The modules that look up position embeddings in a model without the argument
    `position_ids`, whose code counts positions; includes modules of other stages.
    """
    if "position_ids" in inspect.signature(model.forward).parameters:
        return []
    # transformers 5.24 renamed `past_key_values_length`
    lengths = {"past_key_values_length", "cache_length"}
    tables = []
    for module in model.modules():
        taken = inspect.signature(type(module).forward).parameters
        if "position_ids" in taken and not lengths.isdisjoint(taken):
            tables.append(module)
    return tables


def cache_readers(model: nn.Module) -> list[nn.Module]:
    """The layers whose code reads the position of their first token, or the keys of an
    indexer, from a cache.
    """
    models = {*inner_models(model)}
    asked = ("get_seq_length", UPDATE)
    return [m for m in model.modules() if m not in models and names_in(m, *asked)]


def cache_argument(layer: nn.Module) -> str:
    """The name of the cache among the arguments of a layer.

    transformers 5.24 renamed it, and where a call has both names it drops the old one.
    """
    taken = inspect.signature(type(layer).forward).parameters
    return "cache" if "cache" in taken else "past_key_values"


class PartCache:
    """Stands in for the key/value cache in layers that read positions or keys from it,
    because earlier tokens of a sequence are on other ranks.

    Args:
        context: the `ContextParallel` of the model.
        hidden: the layer's input, `[rows, tokens, ...]`.
    """

    def __init__(self, context: Any, hidden: Tensor) -> None:
        self.context, self.hidden = context, hidden

    def get_seq_length(self, *_: Any, **__: Any) -> Tensor:
        """The number of tokens of other ranks before each token of this rank."""
        length, context = self.hidden.shape[1], self.context
        if context.tokens is not None and context.tokens.several():
            text = "the model's code counts the tokens of a row"
            raise ContextError(f"{text}: use another balance than `per_document`")
        order = order_of(self.hidden, context.size, context.balance)
        first = torch.arange(length, device=order.device)
        return order.view(-1, length)[context.rank] - first

    def update(
        self, keys: Tensor, values: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns this rank's keys and values; attention exchanges them later."""
        return keys, values

    def update_indexer(self, keys: Tensor, *_: Any, **__: Any) -> Tensor:
        """All-gathers the indexer's keys `[rows, tokens, features]` of all ranks."""
        if self.context.keys.heads > 1 or self.context.others:
            raise ContextError("an indexer chooses keys: use `attention = all_gather`")
        gathered: Tensor = self.context.gather_rank_by_rank(keys.unsqueeze(1))
        return gathered.squeeze(1)
