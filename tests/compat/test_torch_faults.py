"""What planc refuses or works around in torch, reproduced without planc.

Each test asserts what torch should do, and is expected to fail on the versions where it was seen
not to. Where torch is mended the test fails: add no version to it, and let the check or the
workaround go. On a version that is not listed, the test tells whether the fault is still there.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from planc.compat.rows import minor
from planc.simulate.thread_ranks import run_ranks

HERE = minor(torch.__version__)


def seen(*versions, raises):
    """Expects a test to fail on these versions of torch, by an exception, and to pass on others."""
    return pytest.mark.xfail(HERE in versions, raises=raises, strict=True, reason="torch's fault")


def on_ranks(count, program):
    """Runs a program on ranks that are threads, and raises what the first of them raises."""
    failure = run_ranks(count, program, seconds=60)
    if failure is not None:
        raise failure.error or AssertionError(failure.message)


@seen("2.13", raises=ValueError)
def test_a_dtensor_is_distributed_over_another_mesh():
    """PL352: a module is sharded over two axes."""

    def rank(_):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        once = distribute_tensor(torch.eye(4), mesh["a"], [Shard(0)])
        assert distribute_tensor(once, mesh["b"], [Shard(1)]).shape == (4, 4)

    on_ranks(4, rank)


@seen("2.13", raises=RuntimeError)
def test_local_outputs_of_uneven_shards_are_taken_by_a_rowwise_layer():
    """PL202: a dim that its ranks do not divide."""

    def rank(_):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))
        x = torch.randn(3, 4)
        wanted = model(x)
        styles = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (2,)), styles)
        torch.testing.assert_close(model(x), wanted)

    on_ranks(2, rank)


@seen("2.13", raises=RuntimeError)
def test_grouped_products_take_rows_of_any_size():
    """PL226: experts whose rows are not a multiple of 16 bytes."""
    tokens, weights = torch.randn(4, 6).bfloat16(), torch.randn(2, 6, 8).bfloat16()
    found = torch._grouped_mm(tokens, weights, offs=torch.tensor([2, 4], dtype=torch.int32))
    wanted = torch.cat([tokens[:2] @ weights[0], tokens[2:] @ weights[1]])
    torch.testing.assert_close(found, wanted)


@seen("2.13", raises=RuntimeError)
def test_a_group_of_modules_runs_without_a_root():
    """PL418: a group that is in no other unit."""

    def rank(_):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard([model[0], model[1]], mesh=init_device_mesh("cpu", (2,)))
        model(torch.ones(2, 4)).sum().backward()

    on_ranks(2, rank)


@seen("2.13", raises=AssertionError)
def test_gradients_of_a_shard_that_is_whole_are_divided_once():
    """`planc.runtime.standalone.fsdp.divide_once`: in fp16 torch divides twice."""

    def rank(number):
        model = nn.Linear(2, 1, bias=False)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model.set_gradient_divide_factor(2.0)
        model(torch.full((1, 2), float(2 * number + 2))).sum().backward()
        torch.testing.assert_close(model.weight.grad.to_local(), torch.full((1, 2), 3.0))

    on_ranks(2, rank)


@seen("2.13", raises=AssertionError)
def test_a_frozen_norm_stays_frozen_under_sequence_parallelism():
    """The `freeze` operation."""

    def rank(_):
        norm = nn.LayerNorm(4).requires_grad_(False)
        parallelize_module(norm, init_device_mesh("cpu", (2,)), SequenceParallel())
        assert not norm.weight.requires_grad

    on_ranks(2, rank)


def test_other_styles_keep_a_frozen_layer_frozen():
    def rank(_):
        layer = nn.Linear(4, 4).requires_grad_(False)
        parallelize_module(layer, init_device_mesh("cpu", (2,)), ColwiseParallel())
        assert not layer.weight.requires_grad

    on_ranks(2, rank)


@seen("2.13", raises=torch._dynamo.exc.Unsupported)
def test_a_unit_is_compiled_as_a_part_of_one_graph():
    """PL434: its hooks break the graph."""

    def rank(_):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 4))

    on_ranks(1, rank)
