"""Tensors of a rank that runs alone: fake, except for those of integers."""

import torch
from torch import nn

from planc.compat.fakes import FakeTensor
from planc.simulate.fake_ranks import FakeFloats, with_memory


def test_a_model_from_meta_gets_fake_memory():
    """Real memory for the parameters of a large model would be taken, and computed with."""
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with FakeFloats(allow_non_fake_inputs=True):
        with_memory(model, "cpu")
        moment = torch.zeros_like(model.weight)
    assert isinstance(model.weight.data, FakeTensor)
    assert isinstance(moment, FakeTensor) and moment.device.type == "cpu"


def test_places_of_images_have_values():
    with FakeFloats(allow_non_fake_inputs=True):
        tokens = torch.tensor([[1, 7, 7, 2]])
        assert (tokens == 7).nonzero().shape == (2, 2)
