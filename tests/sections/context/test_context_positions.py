"""The names that versions of transformers have for the cache, and for the number of its tokens."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from planc.runtime.standalone.context import ContextParallel
from planc.runtime.standalone.context_images import ContextBehindImages
from planc.runtime.standalone.context_positions import PartCache, position_tables


class Before(nn.Module):
    """A layer as transformers has them before 5.24."""

    def forward(self, hidden_states, past_key_values=None):
        return past_key_values


class Since(nn.Module):
    """A layer as transformers has them since 5.24: of two caches it takes the new one."""

    def forward(self, hidden_states, cache=None, **kwargs):
        return cache


@pytest.mark.parametrize(
    ("layer", "given"), [(Before(), {}), (Since(), {}), (Since(), {"cache": None})]
)
def test_a_layer_gets_the_cache_by_the_name_that_it_has(layer, given):
    context = SimpleNamespace()
    args, kwargs = ContextParallel._answer(context, layer, (torch.ones(1, 2, 3),), given)
    assert isinstance(layer(*args, **kwargs), PartCache)


class Table(nn.Module):
    def forward(self, input_ids, past_key_values_length=0, position_ids=None):
        return position_ids


class TableSince(nn.Module):
    def forward(self, input_ids, cache_length=0, position_ids=None):
        return position_ids


class Model(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.positions, self.layer = table, Since()

    def forward(self, input_ids):
        return self.positions(input_ids)


@pytest.mark.parametrize("table", [Table(), TableSince()])
def test_a_table_of_counted_positions_is_known_by_either_name(table):
    assert position_tables(Model(table)) == [table]


def test_layers_pass_keywords_to_the_cache():
    """Since 5.24 they call `cache.update(..., kwargs=kwargs)`."""
    keys = torch.ones(1, 2, 3)
    context = SimpleNamespace(
        keys=SimpleNamespace(heads=1),
        others={},
        gather_rank_by_rank=lambda part: torch.cat([part, part], 2),
    )
    cache = PartCache(context, keys)
    assert cache.update(keys, keys, 0, kwargs={}) == (keys, keys)
    assert cache.update_indexer(keys, 0, kwargs={}).shape == (1, 4, 3)


def test_keys_behind_images_are_gathered_as_without_images():
    """In the order of ranks; the rows of embeddings have another order, of which masks know."""
    assert ContextBehindImages.gather_rank_by_rank is ContextParallel.gather_rank_by_rank
