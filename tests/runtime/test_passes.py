"""Passes of units beside torch's FSDP, in one process."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from planc.runtime.standalone.passes import shards_at_rest


class Tower(nn.Module):
    """A model that runs one of its units only where there are images."""

    def __init__(self):
        super().__init__()
        self.text, self.images = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, text, images=None):
        return self.text(text) + (0 if images is None else self.images(images))


@pytest.fixture
def tower(ends_its_group):
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    mesh, model = init_device_mesh("cpu", (1,)), Tower()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (model.text, model.images, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    shards_at_rest(model)
    return model


@pytest.mark.parametrize("images", [False, True])
def test_accumulated_passes_before_the_first_image(tower, images):
    """torch upcasts gradients of a unit that was never gathered, and stops."""
    tower.set_requires_gradient_sync(False)
    tower(torch.ones(2, 4)).sum().backward()
    tower.set_requires_gradient_sync(True)
    tower(torch.ones(2, 4), torch.ones(2, 4) if images else None).sum().backward()
    assert torch.equal(tower.text.weight.grad.full_tensor(), torch.full((4, 4), 4.0))
    if images:
        assert torch.equal(tower.images.weight.grad.full_tensor(), torch.full((4, 4), 2.0))
    else:
        assert tower.images.weight.grad is None
