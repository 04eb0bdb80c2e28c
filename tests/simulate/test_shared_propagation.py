"""Ranks that are threads share what DTensor propagates, and nothing that is a rank's own."""

from collections import Counter

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from planc.simulate import thread_ranks

MM = torch.ops.aten.mm.default
VIEW = torch.ops.aten.view.default


@pytest.fixture
def propagated(monkeypatch):
    """How often each operation was propagated, over all ranks."""
    counts = Counter()
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def counted(self, schema):
        counts[schema.op] += 1
        return propagate(self, schema)

    monkeypatch.setattr(ShardingPropagator, "_propagate_tensor_meta_non_cached", counted)
    return counts


def tensor(*shape):
    """Small integers, the same on every rank: sums of their products are exact."""
    return (torch.arange(torch.Size(shape).numel()) * 5 % 7).view(shape).float()


def ran(program, count=4):
    """What each rank's program returns on the tensor axis of a 2 x 2 mesh."""
    found = [None] * count

    def rank(number):
        mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("dp", "tp"))
        found[number] = program(mesh["tp"])

    assert thread_ranks.run_ranks(count, rank, 60.0) is None
    return found


def test_an_operation_is_propagated_once_for_all_ranks(propagated):
    def program(mesh):
        left, right = tensor(4, 6), tensor(6, 8)
        split = distribute_tensor(right, mesh, [Shard(1)])
        made = DTensor.from_local(left, mesh, [Replicate()]) @ split
        group = distributed.get_process_group_ranks(mesh.get_group())
        assert made.device_mesh is mesh and made.placements == (Shard(1),)
        return group, torch.equal(made.full_tensor(), left @ right)

    found = ran(program)
    assert [ranks for ranks, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all(right for _, right in found)
    assert propagated[MM] == 1


@pytest.mark.parametrize(("rows", "times"), [(6, 1), (5, 4)])
def test_sizes_of_local_shards_are_shared_only_where_all_are_equal(propagated, rows, times):
    def program(mesh):
        whole = tensor(rows, 4)
        split = distribute_tensor(whole, mesh, [Shard(0)]).view(rows, 2, 2)
        return split.to_local().shape[0], torch.equal(split.full_tensor(), whole.view(rows, 2, 2))

    found = ran(program)
    assert [size for size, _ in found] == [3, rows - 3, 3, rows - 3]
    assert all(right for _, right in found)
    assert propagated[VIEW] == times


def test_the_mask_of_an_embedding_is_each_ranks_own():
    def program(mesh):
        table, ids = tensor(10, 4), torch.arange(10).view(2, 5)
        split = distribute_tensor(table, mesh, [Shard(0)])
        found = torch.nn.functional.embedding(DTensor.from_local(ids, mesh, [Replicate()]), split)
        return torch.equal(found.full_tensor(), table[ids])

    assert all(ran(program))


def test_what_differs_is_propagated_again(propagated):
    """Another shape, other placements, another axis."""

    def program(mesh):
        left, right = tensor(4, 8), tensor(8, 8)
        for rows, placement in ((4, Shard(1)), (2, Shard(1)), (4, Replicate())):
            made = DTensor.from_local(left[:rows], mesh, [Replicate()]) @ distribute_tensor(
                right, mesh, [placement]
            )
            assert made.placements == (placement,)
            assert torch.equal(made.full_tensor(), left[:rows] @ right)
        summed = DTensor.from_local(left, mesh, [Partial()]) @ distribute_tensor(
            right, mesh, [Replicate()]
        )
        return torch.equal(summed.full_tensor(), mesh.size() * (left @ right))

    assert all(ran(program))
    assert propagated[MM] == 4
    assert all(ran(lambda mesh: program(mesh) and program(mesh._get_root_mesh()["dp"]), 8))
    assert propagated[MM] == 4 + 8


def test_what_torch_refuses_every_rank_is_told():
    def program(mesh):
        with pytest.raises(RuntimeError, match="mixed torch"):
            distribute_tensor(tensor(4, 4), mesh, [Shard(0)]) + tensor(4, 4)
        split = distribute_tensor(tensor(4, 4), mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match="Sharding propagation failed"):
            split @ distribute_tensor(tensor(5, 4), mesh, [Replicate()])
        return True

    assert all(ran(program))
