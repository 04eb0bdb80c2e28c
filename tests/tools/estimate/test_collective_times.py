"""Seconds of collectives by kind, on links within a node and across nodes."""

import pytest
from measured_tables import hardware, stack

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.lowering.step import EXCHANGE, GATHER, REDUCE
from planc.tools.estimate import kernels
from planc.tools.estimate.answer import Request, answer_for
from planc.tools.estimate.from_plan import Batch
from planc.tools.estimate.step_time import Passes
from planc.tools.estimate.workload import Collective, Group, Layer, Matmul, Workload

MIB = 2**20
DGX = hardware("h100-8x")


def seconds(kind, size, ranks, machine=DGX, stride=1):
    group = Group(name="some", size=ranks, stride=stride)
    return kernels.collective(Collective(kind=kind, size=size, group=group), machine)


def test_an_all_to_all_across_nodes_has_the_link_of_a_rank():
    """Of 64 ranks 56 are in other nodes: their part crosses a link of 42 GB/s, after 60 us."""
    size = 64 * MIB
    assert seconds(EXCHANGE, size, 64) == pytest.approx(size * 56 / 64 / 42e9 + 60e-6)


def test_an_all_to_all_in_a_node_has_its_links():
    size = 64 * MIB
    assert seconds(EXCHANGE, size, 8) == pytest.approx(size * 7 / 8 / 330e9 + 60e-6)


def test_the_latency_of_an_all_to_all_does_not_grow_with_ranks():
    assert seconds(EXCHANGE, 0, 16) == seconds(EXCHANGE, 0, 512) == pytest.approx(60e-6)


def test_the_latency_of_a_ring_is_of_steps_in_nodes_and_across():
    """512 ranks take 2.4 ms (NCCL's tuning.cc), and not 20."""
    expected = (512 - 64) * 3.4e-6 + 63 * 14e-6 + 8.4e-6
    assert seconds(GATHER, 0, 512) == pytest.approx(expected)
    assert expected == pytest.approx(2.4e-3, rel=0.02)


def test_the_latency_of_an_all_reduce_across_nodes_is_of_a_tree():
    expected = 2 * (7 * 3.4e-6 + 6 * 14e-6) + 8.4e-6
    assert seconds(REDUCE, 0, 512) == pytest.approx(expected)


def test_a_profile_without_inner_steps_has_one_latency_for_all():
    """The profile of the playbook's cluster, whose latency is fitted to its table."""
    assert seconds(GATHER, 0, 64, hardware("h100-efa")) == pytest.approx(63 * 40e-6)


def dispatch(ranks, choices, nodes=0, size=64 * MIB):
    """Seconds of a dispatch that sends a token once to each node, without the latency."""
    group = Group(name="experts", size=ranks)
    one = Collective(kind=EXCHANGE, size=size, group=group, choices=choices, nodes=nodes)
    return kernels.collective(one, DGX) - 60e-6


def test_a_dispatch_sends_a_token_once_to_each_node():
    """Of 8 experts at random 5.25 of 8 nodes have some: 4.6 copies cross, and not 7."""
    reached = 8 * (1 - (7 / 8) ** 8)
    assert dispatch(64, 8) == pytest.approx(64 * MIB / 8 * reached * 7 / 8 / 42e9)
    every_copy = seconds(EXCHANGE, 64 * MIB, 64) - 60e-6
    assert dispatch(64, 8) / every_copy == pytest.approx(reached / 8)


def test_groups_of_experts_limit_the_nodes_of_a_token():
    """DeepSeek-V3's tokens go to experts of 4 nodes at most."""
    assert dispatch(64, 8, nodes=4) == pytest.approx(64 * MIB / 8 * 4 * 7 / 8 / 42e9)


def test_a_dispatch_in_a_node_sends_a_token_once_to_each_rank():
    copies = 8 * (1 - (7 / 8) ** 8)
    assert dispatch(8, 8) == pytest.approx(64 * MIB / 8 * copies * 7 / 8 / 330e9)


def expert_collectives(name):
    """All-to-alls of a layer of DeepSeek-V3 on 64 ranks that divide experts."""
    compiled = compile_plan("deepseek-v3", "deepseek_v3", Sink(), world_size=64, settings=["ep=64"])
    request = Request(batch=Batch(global_batch=64, sequence=512), layer_kernels=name)
    [stage] = answer_for(compiled, request, Sink()).work.stages
    every = [c for layer, _ in stage for c in layer.forward if c.kind == EXCHANGE]
    return {(c.choices, c.nodes) for c in every}


def test_kernels_decide_how_tokens_are_dispatched():
    assert expert_collectives("eager") == {(0, 0)}
    assert expert_collectives("fused") == {(8, 4)}


def work_of(ranks, **more):
    layer = Layer(name="some", parameters=1000, **more)
    data = Group(name="data", size=ranks)
    return Passes(
        Workload(stages=(((layer, 1),),), data=data, tokens=1), DGX, stack("torch")
    ), layer


@pytest.mark.parametrize(("ranks", "size"), [(1, 40), (8, 2 * 4 + 6 + 26 / 8)])
def test_copies_of_fsdp_are_of_gathered_parameters_and_of_shards(ranks, size):
    """On one rank 40 bytes a parameter were measured, of which 26 are of the shard."""
    passes, layer = work_of(ranks)
    assert passes.copied_bytes(layer) == pytest.approx(1000 * size)


def test_units_that_stay_gathered_are_copied_once():
    passes, layer = work_of(8, resident=1.0)
    assert passes.copied_bytes(layer) == pytest.approx(1000 * (4 + 6 + 26 / 8))


def hidden(data, replicate):
    """Milliseconds by which hidden collectives of FSDP slow a backward pass of 100 ms."""
    layer = Layer(name="some", parameters=10**8, matmuls=(Matmul(m=40000, n=8192, k=54900),))
    groups = {
        "data": Group(name="data", size=data),
        "replicate": Group(name="replicate", size=replicate, stride=data),
    }
    work = Workload(stages=(((layer, 1),),), **groups, tokens=1)
    return Passes(work, DGX, stack("torch")).backward(layer).data_collectives * 1e3


def test_collectives_across_nodes_slow_what_hides_them():
    """All-gathers, reductions and all-reduces of replicas alike, and none within a node."""
    assert hidden(8, 1) == 0
    assert hidden(64, 1) > 0.5
    within, replicas = (
        kernels.collective(Collective(kind=REDUCE, size=4e8 / 8, group=group), DGX) * 1e3
        for group in (Group(name="none", size=1), Group(name="replicate", size=8, stride=8))
    )
    assert hidden(8, 8) == pytest.approx(0.6 * replicas) and within == 0
