"""Estimates of plans with pipelines, divided experts and parts of sequences."""

import json
from collections import Counter
from dataclasses import replace
from statistics import median

import measured_peaks
import pytest
from measured_tables import hardware, stack

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.lowering.collectives import by_pass
from planc.lowering.schedules import in_flight, orders, simulate_schedule
from planc.lowering.step import EXCHANGE, SEND, During, Step
from planc.ops.pipeline import stages_of_rank
from planc.tools.estimate.answer import Request, answer
from planc.tools.estimate.from_plan import Batch
from planc.tools.estimate.step import estimate
from planc.tools.estimate.timeline import bytes_sent

OF_TORCH = ("zero_bubble", "zbv", "dualpipe_v")
CONTEXT = """plan parts for llama

option attention = "all_gather"

mesh {
    dp_shard = auto
    cp       = 2
}

context on cp {
    attention = attention
}

fsdp on dp_shard * cp {
    precision(param = bf16, reduce = fp32)
    model.layers.* : unit
    root           : unit(reshard = never)
}
"""


def found(model, plan, world_size, rows, tokens, *settings):
    sink = Sink()
    compiled = compile_plan(model, plan, sink, world_size=world_size, settings=settings)
    assert compiled.applied, sink.diagnostics
    batch = Batch(global_batch=rows, sequence=tokens)
    made = answer(*compiled.applied, Request(batch=batch), sink)
    assert made, sink.diagnostics
    return made


@pytest.mark.parametrize("schedule", OF_TORCH)
@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_schedules_run_each_pass_once(schedule, ranks):
    for rank, passes in enumerate(orders(schedule, ranks, 2, 8)):
        assert len(set(passes)) == len(passes)
        own = stages_of_rank(schedule, rank, ranks, 2 * ranks)
        assert {p.chunk for p in passes} == {*range(len(own))}
        forward = {(p.chunk, p.micro_batch) for p in passes if p.forward}
        whole = {(p.chunk, p.micro_batch) for p in passes if not p.forward and p.part != "I"}
        assert forward == whole == {(c, m) for c in range(2) for m in range(8)}
        held = in_flight(passes, 2)
        assert max(sum(each.held) for each in held) < 16
        assert all(w <= h for each in held for w, h in zip(each.waiting, each.held, strict=True))
    pace = {"ranks": ranks, "chunks": 2, "micro_batches": 8}
    table = simulate_schedule(
        schedule, forward=[0.5] * 2 * ranks, backward=[1.0] * 2 * ranks, **pace
    )
    plain = {"ranks": ranks, "chunks": 1, "micro_batches": 8}
    simple = simulate_schedule("1f1b", forward=[1.0] * ranks, backward=[2.0] * ranks, **plain)
    assert table.busy == simple.busy == (24.0,) * ranks
    assert 24 < table.seconds < simple.seconds


def test_a_message_within_a_rank_takes_no_time():
    """The fold of a V: both stages in the middle are on the last rank."""
    pace = {"ranks": 2, "chunks": 2, "micro_batches": 4, "hops": [(0.5, 0.5)] * 3}
    passes = {"forward": [1.0] * 4, "backward": [2.0] * 4}
    assert simulate_schedule("zbv", **pace, **passes).busy == (24 + 4, 24 + 4)
    assert simulate_schedule("interleaved_1f1b", **pace, **passes).busy[0] == 24 + 4 * 1.5


def test_stages_hold_the_model_once():
    whole = found("llama-3.1-8b", "llama", 8, 64, 1024).work
    staged = found("llama-3.1-8b", "llama", 8, 64, 1024, "pp=4").work
    assert [sum(n for x, n in stage if x.matmuls and not x.loss) for stage in staged.stages] == [
        8
    ] * 4

    def parameters(stages):
        return sum(x.parameters * n for stage in stages for x, n in stage)

    assert parameters(staged.stages) == parameters(whole.stages)
    assert [any(x.loss for x, _ in stage) for stage in staged.stages] == [False] * 3 + [True]
    assert staged.model_flops == pytest.approx(whole.model_flops)
    assert staged.ranks == whole.ranks == 8


def test_tied_parameters_are_on_both_ends():
    staged = found("llama-3.2-1b", "llama", 8, 64, 1024, "pp=2").work
    first, last = (sum(x.parameters * n for x, n in stage) for stage in staged.stages)
    assert last - first == 2048  # the last norm; both have 8 blocks and the embedding


def items(made, rank, moment="loss"):
    moments = {m.name: m for m in made.estimate.ranks[rank].moments}
    return {i.name: i.size for i in moments[moment].items}


def test_microbatches_in_flight_and_whole_gradients():
    made = found("llama-3.1-8b", "llama", 8, 64, 1024, "pp=4")
    blocks = [items(made, rank)["activations of model.layers.*"] for rank in range(4)]
    assert blocks == [pytest.approx(blocks[3] * (4 - rank)) for rank in range(4)]
    sent = [items(made, rank).get("outputs sent to the next stage", 0) for rank in range(4)]
    assert sent == [n * 4 * 1024 * 4096 * 2 for n in (4, 3, 2, 0)]
    blocks = sum(x.parameters * n for x, n in made.work.stages[1])
    assert items(made, 1)["whole gradients"] == 4 * blocks


def test_divided_experts():
    one, two = (found("qwen3-30b-a3b", "qwen3_moe", 16, 32, 1024, f"ep={n}") for n in (1, 4))
    (plain, _), (divided, _) = one.work.stages[0][0], two.work.stages[0][0]
    experts = 128 * 3 * 2048 * 768
    assert divided.apart == experts / 4 and plain.apart == 0
    assert plain.parameters - experts == divided.parameters - divided.apart
    assert two.work.apart[0].size == 4 and two.work.experts.size == 4
    for name in ("parameters", "optimizer state"):
        sizes = [items(made, 0, "optimizer step")[name] for made in (one, two)]
        assert sizes[0] == pytest.approx(sizes[1])
    assert sum(m.flops for m in divided.matmuls) == pytest.approx(
        sum(m.flops for m in plain.matmuls), rel=0.001
    )
    rows = 2 * 1024 * 8  # each token goes to eight experts
    sent = [(c.size, c.count) for c in divided.forward if c.kind is EXCHANGE]
    assert sent == [(8 * 128, 1), (rows * 2048 * 2, 2), (rows * 2, 1)]  # counts, states, weights
    assert (
        two.estimate.time.spent.expert_collectives > 0 == one.estimate.time.spent.expert_collectives
    )


@pytest.mark.parametrize("attention", ["all_gather", "ulysses"])
def test_parts_of_sequences(tmp_path, attention):
    path = tmp_path / "parts.plan"
    path.write_text(CONTEXT)
    plan = str(path), 8, 8, 4096
    one = found("llama-3.1-8b", *plan, "cp=1")
    four = found("llama-3.1-8b", *plan, "cp=4", f"attention={attention}")
    layer, whole = four.work.stages[0][0][0], one.work.stages[0][0][0]
    width = 1024 if attention == "all_gather" else 4096  # keys and values of 8 heads, or of all
    rows, tokens = 4, 1024
    [part] = layer.attention
    gathers = attention == "all_gather"
    assert (part.queries, part.keys) == (tokens if gathers else 4 * tokens, 4 * tokens)
    assert part.heads == (32 if gathers else 8)
    assert part.masked and not whole.attention[0].masked
    assert part.flops == pytest.approx(whole.attention[0].flops)
    sizes = [c.size for c in layer.forward for _ in range(c.count)]
    if gathers:
        assert sizes == [2 * rows * 4 * tokens * width * 2]
    else:
        assert sizes == [rows * tokens * n * 2 for n in (4096, 1024, 1024, 4096)]
    assert four.work.ranks == 8 and four.estimate.time.spent.context_collectives > 0


def test_keys_and_values_go_around(tmp_path):
    """Each layer keeps its own alone, and half of the pairs are computed."""
    path = tmp_path / "parts.plan"
    path.write_text(CONTEXT)
    kept, layers = {}, {}
    for attention in ("all_gather", "ring"):
        settings = "cp=4", f"attention={attention}"
        layers[attention] = found("llama-3.1-8b", str(path), 8, 8, 4096, *settings).work.stages[0]
        kept[attention] = layers[attention][0][0].kept
    rows, tokens, own, whole = 4, 1024, 2 * 8 * 128, 2 * 32 * 128
    # sdpa with a mask repeats the keys and values of each head, of all ranks; its output is copied
    saved = 2 * rows * tokens * (4 * whole - own + whole // 2)
    assert kept["all_gather"] - kept["ring"] == pytest.approx(saved, rel=0.01)
    layer = layers["ring"][0][0]
    sends = [(c.size, c.count) for c in layer.forward if c.kind == SEND]
    assert sends == [(2 * rows * tokens * own, 3)]
    sends = [(c.size, c.count) for c in layer.backward if c.kind == SEND]
    assert sends == [(2 * rows * tokens * own, 3), (4 * rows * tokens * own, 3)]
    attended = {name: sum(a.flops for a in of[0][0].attention) for name, of in layers.items()}
    assert attended["ring"] == pytest.approx(attended["all_gather"] / 2, rel=0.01)


@pytest.mark.slow
def test_experts_that_are_chosen_by_ids_get_those_of_own_tokens():
    """Ids are of whole rows, where hidden states are gathered for attention alone."""
    whole, parts = (found("deepseek-v4-flash", "deepseek_v4", 4, 8, 512, f"cp={n}") for n in (1, 2))
    assert whole.counted and parts.counted
    kept = [sum(layer.kept for layer, _ in made.work.stages[0]) for made in (whole, parts)]
    assert kept[0] < kept[1] < 2 * kept[0]  # as many tokens of a rank, attention to twice as many


def test_what_a_pipeline_sends_is_reduced_once():
    made = found("llama-3.1-8b", "llama", 8, 64, 1024, "pp=2")
    two = estimate(replace(made.work, runs=2), hardware("h100-8x"), stack("torch"))
    assert two.time.spent.matmul == pytest.approx(2 * made.estimate.time.spent.matmul)
    assert two.time.seconds < 2 * made.estimate.time.seconds


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("llama-3.1-8b", ["tp=2"]),
        ("llama-3.1-8b", ["tp=2", "sequence=false"]),
        ("llama-3.1-8b", ["tp=2", "loss_chunks=4", "pp=2"]),
        ("llama-3.1-8b", ["cp=4"]),
        ("qwen3-30b-a3b", ["ep=4", "tp=2"]),
        ("mixtral-8x7b", ["tp=4"]),
        ("deepseek-v3", ["tp=4", "ep=8"]),
    ],
    ids=str,
)
def test_an_estimate_has_the_collectives_that_a_step_sends(model, settings):
    """All of a step's, of all passes and layers, are those of `planc lower --sends`."""
    sink, batch = Sink(), Batch(global_batch=64, sequence=1024, micro_batches=2)
    compiled = compile_plan(model, None, sink, world_size=16, settings=settings)
    made = answer(*compiled.applied, Request(batch=batch), sink)
    facts = compiled.applied[1]
    step = Step(
        lowered=compiled.lowered,
        config=facts.config,
        batch=batch.global_batch,
        sequence=batch.sequence,
        micro_batches=batch.micro_batches,
    )
    told, seen = Counter(), Counter()
    for one in by_pass(step):
        if one.during is not During.STEP:
            told[one.kind, " x ".join(one.axes), one.size] += one.times
    for layer, n in (pair for stage in made.work.stages for pair in stage):
        for one in (*layer.forward, *layer.backward, *(layer.repeated or ())):
            seen[one.kind, one.group.name, one.size] += n * one.count * step.passes
    assert seen == told and told


def test_bytes_of_a_step():
    """By the axes of the groups; a batch that is twice as large sends activations twice."""
    sent = []
    for rows in (32, 64):
        compiled = compile_plan("llama-3.1-8b", "llama", Sink(), world_size=16, settings=["tp=2"])
        config = compiled.applied[1].config
        step = Step(lowered=compiled.lowered, config=config, batch=rows, sequence=1024)
        sent.append(bytes_sent(step))
    states = 4 * 1024 * 4096 * 2
    blocks = 32 * (4 + 4 + 3) + 2 + 2  # passes forward and back, repeated; the ends of the model
    logits = 4 * 1024 * 128256 * 2
    norms = (32 * 2 + 1) * 4096 * 2 * 2
    assert sent[0]["tp"] == pytest.approx((blocks * states + logits + norms) / 2)
    assert sent[1]["tp"] == pytest.approx(2 * sent[0]["tp"] - norms / 2)
    assert sent[1]["dp_shard"] == sent[0]["dp_shard"]


def test_the_peaks_of_four_ranks():
    peaks = json.loads(measured_peaks.PEAKS.read_text())
    assert set(peaks) == set(measured_peaks.RUNS)
    found = [abs(error) for *_, error in measured_peaks.errors(peaks)]
    assert median(found) < 0.02
    assert max(found) < 0.05


def test_the_rank_whose_experts_get_most_tokens():
    """Twice the mean of tokens: twice the rows, bytes and messages of experts; FLOPs of all ranks
    are the same, and an imbalance that no rank can have is said.
    """
    compiled = compile_plan(
        "mixtral-8x7b", "mixtral", Sink(), world_size=16, settings=["ep=4", "recompute=false"]
    )

    def at(imbalance):
        sink = Sink()
        batch = Batch(global_batch=16, sequence=1024, imbalance=imbalance)
        made = answer(*compiled.applied, Request(batch=batch), sink)
        layer = next(x for x, _ in made.work.stages[0] if x.attention)
        return made, layer, [d.code for d in sink]

    (even, one, none), (most, two, nothing) = at(1.0), at(2.0)
    assert none == nothing == []
    rows = [sum(m.m for m in layer.matmuls if m.count == 2) for layer in (one, two)]
    assert rows[1] == 2 * rows[0] > 0
    assert two.kept > 1.3 * one.kept and two.transient == 2 * one.transient
    sizes = [sum(c.size for c in layer.forward if c.kind == EXCHANGE) for layer in (one, two)]
    assert sizes[1] == 2 * sizes[0] > 0
    assert most.work.model_flops == even.work.model_flops
    spent = [made.estimate.time.spent for made in (even, most)]
    assert spent[1].matmul > 1.5 * spent[0].matmul
    assert spent[1].expert_collectives > spent[0].expert_collectives
    assert most.estimate.time.mfu < even.estimate.time.mfu
    assert at(4.0)[2] == [] and at(5.0)[2] == ["PL585"]
    assert at(5.0)[0].estimate.time.seconds == at(4.0)[0].estimate.time.seconds
