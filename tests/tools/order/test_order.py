"""The order of collectives: what ranks call, and whether it fits together."""

from dataclasses import replace
from itertools import count

import pytest
from helpers import slow
from order_faults import Faulty

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.lowering.rank_calls import WAIT, Groups, RankCall
from planc.simulate.rank_job import RankRunner
from planc.tools.order.findings import report
from planc.tools.order.match import Different, Network, Stuck, first_divergences, fits
from planc.tools.order.record import Order, small_meshes, small_orders
from planc.tools.order.show import Repeated, rows

TENSOR = ("llama-3.1-8b", 4, "tp=2")
STAGES = ("llama-3.1-8b", 4, "pp=4", "microbatches=4")
EXPERTS = ("mixtral-8x7b", 4, "ep=2")
SHARDED_EXPERTS = ("mixtral-8x7b", 8, "ep=2")
BOTH = ("llama-3.1-8b", 4, "pp=2", "microbatches=2")


RING = """plan ring for llama

extend "llama.plan"

context on cp {
    attention = ring
}
"""


def compiled(model, world_size, *settings, plan=None):
    sink = Sink()
    made = compile_plan(model, plan, sink, world_size=world_size, settings=settings)
    assert made.lowered, sink.diagnostics
    return made


@pytest.fixture(scope="module")
def recorded():
    """The order of a plan, whose ranks may have a fault; each is run once."""
    known = {}
    with Faulty() as runner:

        def order(case, fault=""):
            if (case, fault) not in known:
                runner.fault = fault
                [known[case, fault]] = small_orders(compiled(*case), runner)
            return known[case, fault]

        yield order


def findings(order):
    sink = Sink()
    report(order, sink)
    return sink.diagnostics


def with_calls(order, rank, change):
    """An order in which a rank's calls of each step are others."""
    first, later = (
        {**steps, rank: tuple(change(list(steps[rank])))} for steps in (order.first, order.later)
    )
    return replace(order, first=first, later=later)


def texts(found):
    return "\n".join((found.message, *found.facts))


# recorded -----------------------------------------------------------------------------------------


def test_calls_have_their_axes_and_lines(recorded):
    """Everything has the line that makes it, but for what the training loop does itself."""
    order = recorded(TENSOR)
    own = order.later[0]
    assert {call.axes for call in own} == {("dp_shard",), ("tp",), ("dp_shard", "tp")}
    assert {call.during for call in own if call.op is None} == {"", "clipping"}
    assert {call.during for call in own} >= {"forward", "recomputation", "backward", "clipping"}
    [one] = [
        c
        for c in own
        if c.module.endswith("layers.1.mlp.down_proj")
        and c.kind == "reduce_scatter"
        and c.during == "forward"
    ][:1]
    assert one.op.WORD == "tensor" and "down_proj" in str(one.op.modules) and one.op.place
    gathers = [c for c in own if c.kind == "all_gather" and c.axes == ("dp_shard",)]
    assert gathers and all(c.op.WORD == "fsdp" and c.unit for c in gathers)


def test_ranks_of_every_axis():
    lowered = compiled("mixtral-8x7b", 16, "ep=4", "tp=2").lowered
    groups = Groups(lowered)
    assert groups.axes([0, 2, 4, 6, 8, 10, 12, 14]) == ("dp_shard",)
    assert groups.axes([6, 7]) == ("tp",)
    assert groups.axes(range(16)) == ("dp_shard", "tp")
    assert groups.axes([4, 5, 6, 7]) == ("ep",)
    assert groups.axes([1, 5, 9, 13]) == ("ep_shard",)
    assert groups.axes([0, 3]) == ()


RIGHT = [
    TENSOR,
    slow(STAGES),
    slow(EXPERTS),
    slow(("llama-3.1-8b", 8, "pp=2", "tp=2", "microbatches=2")),
    slow(("llama-3.1-8b", 8, "cp=2", "tp=2")),
    slow(("llama-3.1-8b", 8, "dp_replicate=2", "tp=2")),
    slow(("llama-3.1-8b", 4, "pp=2", "microbatches=2", "schedule=gpipe")),
    slow(("llama-3.1-8b", 4, "pp=2", "microbatches=2", "schedule=interleaved_1f1b")),
    slow(("qwen3-8b", 4, "pp=2", "microbatches=4", "schedule=zero_bubble")),
    slow(("llama-3.1-8b", 4, "pp=2", "microbatches=4", "schedule=zbv")),
    slow(("llama-3.1-8b", 4, "pp=2", "microbatches=4", "schedule=dualpipe_v")),
    slow(("mixtral-8x7b", 8, "ep=2", "pp=2", "microbatches=2")),
    slow(("mixtral-8x7b", 8, "ep=4", "tp=2")),
    slow(("gpt2", 4, "tp=2")),
]


@pytest.mark.parametrize("case", RIGHT)
def test_right_plans_fit(recorded, case):
    order = recorded(case)
    assert not findings(order)
    assert min(len(calls) for calls in order.later.values()) > 10


@pytest.mark.slow
def test_a_ring_fits(tmp_path):
    """Keys and values go around: more calls on the axis than where they are gathered."""
    path = tmp_path / "ring.plan"
    path.write_text(RING)
    with RankRunner() as runner:
        every = (compiled("llama-3.1-8b", 4, "cp=4", plan=plan) for plan in (str(path), None))
        orders = [next(iter(small_orders(one, runner))) for one in every]
    assert not any(map(findings, orders))
    ring, gathered = (sum(c.axes == ("cp",) for c in order.later[0]) for order in orders)
    assert ring > gathered > 0


def test_few_ranks_stand_for_many():
    def sizes(*case):
        meshes = small_meshes(compiled(*case).plan)
        return [{name: size for name, size in one.items() if size > 1} for one in meshes]

    assert sizes(*TENSOR) == [{"dp_shard": 2, "tp": 2}]
    assert sizes("llama-3.1-8b", 512, "tp=8", "dp_replicate=4") == [
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    ]
    assert sizes("llama-3.1-8b", 256, "pp=8", "tp=4", "microbatches=8") == [
        {"pp": 2, "dp_shard": 2, "tp": 2},
        {"pp": 4, "dp_shard": 2},
    ]


# faults of programs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "case", "codes", "said"),
    [
        ("no_clip", TENSOR, "PL615 PL614", ["rank 1 leaves", "clipping", "0 -> 1 -> 0"]),
        slow(
            "longer",
            TENSOR,
            "PL613",
            ["ranks 2 and 3 meet", "elements", "embed_tokens", "decoder.plan:"],
        ),
        slow(
            "skips_layer",
            TENSOR,
            "PL615 PL613",
            ["rank 3", "fsdp of model.layers.1", "blocks.plan:"],
        ),
        slow("sums", TENSOR, "PL615 PL613", ["rank 1", "(sum)", "(avg)", "fsdp", ".plan:"]),
        slow(
            "logs",
            TENSOR,
            "PL615 PL614",
            ["rank 0 leaves", "all-reduce (sum) of 1 fp32 over dp_shard"],
        ),
        slow("prefetches", TENSOR, "PL615 PL613", ["model.layers.0", "model.layers.1"]),
        slow("no_loss", STAGES, "PL613", ["over pp", "all-reduce (sum) of 1 fp32"]),
        slow("keeps_tokens", EXPERTS, "PL615 PL614", ["all-to-all", "over ep", "experts"]),
        slow("one_clips", TENSOR, "PL615 PL614", ["rank 1", "clipping"]),
        slow("gathers_inside", TENSOR, "PL615 PL613", ["rank 2", "all-gather of 2 fp32 over tp"]),
        slow(
            "recomputes_nothing",
            TENSOR,
            "PL615 PL613",
            ["rank 1", "recomputation of model.layers."],
        ),
        slow("evaluates", TENSOR, "PL615 PL614", ["rank 3"]),
        slow("sums_later", BOTH, "PL613", ["over pp", "clipping"]),
        slow("prefetches_experts", SHARDED_EXPERTS, "PL615 PL613", ["rank 1", "experts"]),
    ],
)
def test_faults_of_a_program(recorded, fault, case, codes, said):
    found = findings(recorded(case, fault))
    assert " ".join(one.code for one in found) == codes
    every = "\n".join(f"{texts(one)} {one.labels}" for one in found)
    assert [word for word in said if word not in every] == []


# faults of sequences ------------------------------------------------------------------------------


def test_two_groups_in_another_order(recorded):
    """It fits where groups share one rank; a library may run them in the order of one stream."""

    def swapped(calls):
        at = next(i for i in range(8, len(calls)) if calls[i].axes != calls[i + 1].axes)
        return [*calls[:at], calls[at + 1], calls[at], *calls[at + 2 :]]

    [found] = findings(with_calls(recorded(TENSOR), 1, swapped))
    assert found.code == "PL615" and "rank 1" in found.message and found.labels


@pytest.mark.parametrize("case", [slow(STAGES)])
def test_crossed_messages(recorded, case):
    """Two neighbors send before they receive, each message alone: NCCL has them in one queue."""
    order = recorded(case)
    for rank in (2, 3):
        peer = 5 - rank

        def alone(calls, peer=peer):
            both = [c.batch for c in calls if c.peer == peer and c.batch]
            apart = {c.work for c in calls if both and c.batch == both[0]}
            changed = [replace(c, batch=0) if c.work in apart else c for c in calls]
            sends = [c for c in changed if c.work in apart and c.kind == "send"]
            other = [c for c in changed if c not in sends]
            at = next(i for i, c in enumerate(other) if c.work in apart)
            return [*other[:at], *sends, *other[at:]]

        order = with_calls(order, rank, alone)
    [found] = findings(order)
    assert found.code == "PL614" and "2 -> 3 -> 2" in found.message and "NCCL" in found.message
    assert "pipeline" in texts(found) and "blocks.plan" in found.labels[0].span.place


# matching -----------------------------------------------------------------------------------------


def made(rank, *words):
    """Calls of a rank: `ar:01` (an all-reduce over ranks 0 and 1), `s:2`, `r:2`, `w:2`: a send to
    rank 2, a receive from it, and the wait for the last of these.
    """
    calls, works, number = [], {}, count(1)
    for at, word in enumerate(words):
        kind, _, of = word.partition(":")
        if kind == "w":
            calls.append(RankCall(rank=rank, number=at, kind=WAIT, work=works[of]))
        elif kind in ("s", "r"):
            works[of] = next(number)
            kind = {"s": "send", "r": "recv"}[kind]
            calls.append(
                RankCall(
                    rank=rank,
                    number=at,
                    kind=kind,
                    peer=int(of),
                    ranks=(0, 1, 2, 3),
                    work=works[of],
                )
            )
        else:
            ranks = tuple(map(int, of))
            calls.append(RankCall(rank=rank, number=at, kind=kind, ranks=ranks, numel=4))
    return tuple(calls)


def test_collectives_that_cross():
    ranks = {0: made(0, "ar:01", "ag:01"), 1: made(1, "ag:01", "ar:01")}
    [found] = fits(ranks)
    assert isinstance(found, Different) and found.why == "ar and ag"
    ranks = {0: made(0, "ar:01", "ar:012"), 1: made(1, "ar:012", "ar:01"), 2: made(2, "ar:012")}
    [found] = fits(ranks)
    assert isinstance(found, Stuck) and found.cycle == (0, 1)


def test_groups_of_the_same_ranks():
    """Two groups that have one name each: each has calls of its own, in its own order."""
    both = [
        replace(call, group=name)
        for call, name in zip(made(0, "ar:01", "ar:01"), "ab", strict=True)
    ]
    other = [
        replace(call, group=name)
        for call, name in zip(made(1, "ar:01", "ar:01"), "ba", strict=True)
    ]
    [found] = fits({0: both, 1: other})
    assert isinstance(found, Stuck) and found.cycle == (0, 1)
    assert not [*fits({0: both, 1: [replace(c, rank=1) for c in both]})]


def test_a_rank_that_ends():
    ranks = {0: made(0, "ar:01", "ar:01"), 1: made(1, "ar:01")}
    [found] = fits(ranks)
    assert isinstance(found, Stuck) and not found.cycle and found.waits[0][1] == (1,)


def test_messages_that_cross():
    """Both send, then both receive. gloo carries both; on NCCL each waits in its own queue."""
    ranks = {0: made(0, "s:1", "w:1", "r:1", "w:1"), 1: made(1, "s:0", "w:0", "r:0", "w:0")}
    assert [*fits(ranks)]
    ranks = {0: made(0, "s:1", "r:1", "w:1"), 1: made(1, "s:0", "r:0", "w:0")}
    assert not [*fits(ranks, [Network.GLOO])]
    [found] = fits(ranks)
    assert found.network is Network.NCCL and found.cycle == (0, 1)


def test_a_communicator_for_all():
    """A message alone is on the communicator of its pair, unless the group has a device."""
    ranks = {
        0: made(0, "s:1", "s:2"),
        1: made(1, "s:2", "r:0", "w:0"),
        2: made(2, "r:0", "r:1", "w:1"),
    }
    assert not [*fits(ranks, [Network.GLOO, Network.NCCL])]
    [found] = fits(ranks)
    assert found.network is Network.ONE_COMMUNICATOR and set(found.cycle) == {0, 1, 2}


def test_a_message_of_another_size():
    one = [replace(c, numel=8, dtype="float32") for c in made(0, "s:1", "w:1")]
    other = [replace(c, numel=4, dtype="float32") for c in made(1, "r:0", "w:0")]
    [found] = fits({0: one, 1: other})
    assert isinstance(found, Different) and found.why == "8 and 4 elements"


def test_ranks_of_one_place():
    ranks = {0: made(0, "ar:01", "ag:01"), 1: made(1, "ar:01"), 2: made(2, "ag:23")}
    [(one, other)] = first_divergences(ranks, {0: 0, 1: 0, 2: 1})
    assert one.kind == "ag" and other is None


# shown --------------------------------------------------------------------------------------------


def test_layers_are_one_row(recorded):
    layers = [row for row in rows(recorded(TENSOR).later[0]) if isinstance(row, Repeated)]
    assert layers and all(one.times >= 2 for one in layers)
    lengths = sum(len(one.rows) * one.times for one in layers)
    assert lengths + 20 > sum(c.kind != WAIT for c in recorded(TENSOR).later[0]) / 2


def test_an_order_is_data(recorded):
    order = recorded(TENSOR)
    assert isinstance(order, Order) and order.first.keys() == order.later.keys() == {*range(4)}
