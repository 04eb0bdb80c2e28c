"""The estimate beside measured runs, and what must hold of any estimate."""

import tomllib
from collections import Counter
from dataclasses import fields, replace
from math import log
from statistics import median

import measured_steps
import pytest
from decoder import Decoder, Run, split, workload
from estimating import errors, quantile, slow, spearman
from measured_tables import accelerator, hardware, playbook, playbook_model, stack, vtrain

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.lowering.schedules import SCHEDULES, in_flight, order, simulate_schedule
from planc.lowering.step import GATHER, REDUCE, SCATTER
from planc.model.load import load
from planc.tools.estimate import kernels, profiles
from planc.tools.estimate.answer import Request, answer_for, document, text
from planc.tools.estimate.counted import MicroBatch
from planc.tools.estimate.from_plan import Batch, PlanWork
from planc.tools.estimate.kept_tensors import count
from planc.tools.estimate.memory import GIB
from planc.tools.estimate.step import estimate
from planc.tools.estimate.step_time import step_time
from planc.tools.estimate.workload import Collective, Group, Recompute, Sharding
from planc.tools.suggest.measurements import Timed, calibrate

CHOICES = measured_steps.choices()


def kernel_profile(name):
    return profiles.kernels(name, Sink())


SMALL = Decoder(layers=8, hidden=1024, heads=8, ffn=4096, vocabulary=32000)


@pytest.fixture(scope="module")
def table():
    """Every run of the playbook that ended, with its estimated time."""
    machine, software = hardware("h100-efa"), stack("nanotron")
    runs = (run for run in playbook() if run.tokens_per_second)
    return [(run, step_time(run.work, machine, software)) for run in runs]


def test_the_playbook(table):
    assert median(errors(table)) < 0.12


def test_the_usual_runs_of_the_playbook(table):
    """Without the runs that took over twice as long as ones beside them."""
    apart = slow(table)
    usual = [pair for i, pair in enumerate(table) if i not in apart]
    assert len(apart) < len(table) / 5
    for nodes in (1, 2, 4, 8, 16, 32):
        part = [(run, e) for run, e in usual if int(run.row["nodes"]) == nodes]
        pairs = [(run.tokens_per_second, e.tokens_per_second) for run, e in part]
        assert spearman(pairs) > 0.85, nodes
        assert median(errors(part)) < 0.13, nodes


def test_what_would_be_chosen_is_nearly_the_fastest(table):
    near = 0
    for nodes in (1, 2, 4, 8, 16, 32, 64):
        part = [(r, e) for r, e in table if int(r.row["nodes"]) == nodes]
        chosen, _ = max(part, key=lambda p: p[1].tokens_per_second)
        near += chosen.tokens_per_second > 0.95 * max(r.tokens_per_second for r, _ in part)
    assert near >= 6


def test_the_a100s_after_calibrating_on_a_twentieth():
    machine, software = hardware("a100-8x"), stack("megatron")
    runs = list(vtrain())
    sample = [Timed(run.work, run.seconds) for run in runs[::20]]
    assert len(sample) <= len(runs) / 20
    fitted = calibrate(machine, software, sample)
    others = [run for i, run in enumerate(runs) if i % 20]
    found = [abs(step_time(r.work, fitted, software).seconds / r.seconds - 1) for r in others]
    assert median(found) < 0.10
    assert quantile(found, 0.95) < 0.30


def test_a_machine_far_from_every_profile():
    """As a CPU is: each step takes many times as long as the profile that is fitted says."""
    machine, software = hardware("a100-8x"), stack("megatron")
    far = replace(machine, matmul_tflops=5, memory_gb_s=60, launch_us=200, node_latency_us=90)
    works = [run.work for run in list(vtrain())[::20]]
    sample = [Timed(work, step_time(work, far, software).seconds) for work in works]
    fitted = calibrate(machine, software, sample)
    assert median([abs(log(one.ratio(machine, software))) for one in sample]) > 2
    assert median([abs(log(one.ratio(fitted, software))) for one in sample]) < 0.05


def test_a_rank_alone_knows_nothing_of_links():
    """Nor of what they would hide: its launches are not behind them."""
    machine, software = hardware("a100-8x"), stack("megatron")
    slow = replace(machine, node_latency_us=1e4, node_reduce_gb_s=0.1, network_latency_us=1e4)
    work = next(run.work for run in vtrain() if run.work.tensor.size > 1)
    alone = Timed(work, 1.0, alone=True)
    assert alone.ratio(machine, software) == alone.ratio(slow, software)
    assert 0 < alone.ratio(machine, software) < Timed(work, 1.0).ratio(machine, software)


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_matmuls(name):
    found = list(measured_steps.matmul_errors(name, measured_steps.machine(name)))
    assert len(found) > 400
    assert median(found) < 0.08


@pytest.mark.parametrize(
    ("model", "batch", "seq", "ac", "mode"),
    [
        ("llama-8b", 2, 4096, "none", "fsdp"),
        ("llama-3.6b", 1, 4096, "none", "bf16"),
        ("qwen3-4b", 1, 16384, "full", "fsdp"),
        ("qwen3-moe-30b", 4, 4096, "none", "fsdp"),
    ],
)
@pytest.mark.parametrize("name", ["h100", "h200"])
def test_measured_steps(name, model, batch, seq, ac, mode):
    key = {"model": model, "batch": batch, "seq": seq, "ac": ac, "mode": mode}
    row = next(r for r in accelerator(name)["steps"] if key.items() <= r.items())
    found = measured_steps.estimated(row, measured_steps.machine(name), stack("torch"))
    assert found.fullest.peak / GIB == pytest.approx(row["peak"][1], rel=0.01)
    assert found.time.seconds * 1e3 == pytest.approx(row["step_ms"], rel=0.15)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "chunks", "micro"), [(4, 1, 8), (4, 2, 8), (1, 1, 3), (8, 1, 2)])
def test_every_pass_runs_once_and_after_what_it_needs(schedule, ranks, chunks, micro):
    chunks = chunks if schedule == "interleaved_1f1b" else 1
    for rank in range(ranks):
        passes = order(schedule, rank, ranks, chunks, micro)
        assert set(Counter(passes).values()) == {1}
        assert len(passes) == 2 * chunks * micro
        for each in passes:
            first = each._replace(forward=True)
            assert passes.index(first) <= passes.index(each)
    simulate_schedule(
        schedule,
        ranks=ranks,
        chunks=chunks,
        micro_batches=micro,
        forward=[1.0] * (ranks * chunks),
        backward=[2.0] * (ranks * chunks),
    )


def table_of(schedule, ranks, chunks, micro):
    stages = ranks * chunks
    return simulate_schedule(
        schedule,
        ranks=ranks,
        chunks=chunks,
        micro_batches=micro,
        forward=[1.0 / chunks] * stages,
        backward=[2.0 / chunks] * stages,
    )


def test_bubbles():
    """(p - 1) passes of each kind wait; v chunks a rank make that v times shorter."""
    assert table_of("1f1b", 4, 1, 8).seconds == pytest.approx(3 * (8 + 3))
    assert table_of("gpipe", 4, 1, 8).seconds == pytest.approx(3 * (8 + 3))
    assert table_of("interleaved_1f1b", 4, 2, 8).seconds == pytest.approx(3 * 8 + 3 * 3 / 2)
    assert table_of("1f1b", 1, 1, 8).busy == (24.0,)


def test_micro_batches_in_flight():
    def most(schedule, rank, ranks, micro):
        return max(in_flight(order(schedule, rank, ranks, 1, micro), 1))[0][0]

    assert [most("1f1b", rank, 4, 8) for rank in range(4)] == [4, 3, 2, 1]
    assert most("1f1b", 0, 4, 2) == 2
    assert most("gpipe", 3, 4, 8) == 8


def test_stages_are_balanced_by_compute():
    model = Decoder(layers=28, hidden=3072, heads=32, ffn=8192, vocabulary=131072, tied=True)
    assert split(model, 1) == [(True, 28, True)]
    assert split(model, 2) == [(True, 16, False), (False, 12, True)]
    assert [n for _, n, _ in split(model, 4)] == [8, 8, 8, 4]
    assert [n for _, n, _ in split(model, 8)] == [4] * 7 + [0]


def test_collectives_are_slower_across_nodes_and_with_few_ranks_a_node():
    machine = hardware("h100-8x")

    def seconds(size, stride, kind=GATHER):
        group = Group(name="g", size=size, stride=stride)
        return kernels.collective(Collective(kind=kind, size=2.0**28, group=group), machine)

    assert seconds(1, 1) == 0
    assert seconds(8, 1) < seconds(16, 1) < seconds(16, 2) < seconds(16, 8)
    assert seconds(8, 1, REDUCE) > seconds(8, 1)
    busy = 2.0**28 * 7 / 8 / 330e9
    assert seconds(8, 1) == pytest.approx(busy, rel=0.05)


def step(model=SMALL, software="torch", **settings):
    own = stack(software)
    return estimate(workload(model, Run(**settings), own), hardware("h100-8x"), own)


def item(found, name, moment="optimizer step"):
    items = next(m.items for m in found.fullest.moments if m.name == moment)
    return sum(i.size for i in items if i.name == name)


def test_what_sharding_divides():
    one, eight = step(data=1), step(data=8)
    for name in ("parameters", "gradients", "optimizer state"):
        assert item(one, name) == pytest.approx(8 * item(eight, name))
    assert item(one, "parameters") == 4 * SMALL.parameters + 4 * SMALL.hidden


def test_checkpointing_trades_memory_for_time():
    none, full = step(recompute=Recompute.NONE), step(recompute=Recompute.FULL)
    name = "activations of block"
    assert item(none, name, "loss") > 10 * item(full, name, "loss")
    assert full.time.spent.matmul > 1.2 * none.time.spent.matmul
    assert full.time.mfu < none.time.mfu


def test_tensor_parallelism_divides_and_communicates():
    one, two = step(tensor=1), step(tensor=2)
    blocks = "activations of block"
    assert item(two, blocks, "loss") == pytest.approx(item(one, blocks, "loss") / 2)
    assert one.time.spent.tensor_collectives == 0 < two.time.spent.tensor_collectives
    far = step(tensor=16, micro_batch=16)  # more than the host launches
    assert "across nodes" in far.time.bottleneck


def test_a_pipeline_waits():
    found = step(pipeline=4, micro_batches=8, sharding=Sharding.REPLICATED)
    assert len(found.ranks) == 4
    assert found.time.spent.pipeline_bubble > 0
    assert step().time.spent.pipeline_bubble == pytest.approx(0)
    assert found.time.spent.total == pytest.approx(found.time.seconds)


@pytest.mark.parametrize("kind", [profiles.Hardware, profiles.Stack, profiles.Kernels])
def test_shipped_profiles_are_whole_and_have_sources(kind):
    marker, read, least = {
        profiles.Hardware: ("ranks_per_node", hardware, 3),
        profiles.Stack: ("launches_a_unit", stack, 1),
        profiles.Kernels: ("expert_rows", kernel_profile, 3),
    }[kind]
    names = profiles.shipped_profiles(marker)
    assert len(names) >= least
    others = {"name", "sources", "devices", "ranks_per_node", "processors", "kernels", "fused"}
    numbers = {f.name for f in fields(kind)} - others
    for name in names:
        found = read(name)
        assert found.name == name
        assert set(found.sources) <= numbers
        if kind is profiles.Hardware:
            assert numbers - {"inner_latency_us", "start_us"} <= set(found.sources), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gb_s": 0}, "memory_gb_s is 0, not between 0.001 and 1e+06"),
        ({"launch_us": "20"}, "launch_us is '20', not a number"),
        ({"processors": 1.5}, "processors is 1.5, not an int"),
        ({"bandwith": 3}, "bandwith is not a field"),
        ({"name": 3}, "name is 3, not a str"),
        ({"context_gib": 64, "memory_gib": 40.0}, "which leaves nothing of memory_gib = 40.0"),
        ({"matmul_tflops": 7200}, "matmul_tflops is 7200, more than twice peak_tflops = 989"),
        ({"sources": 3}, "sources is 3, not a table"),
    ],
)
def test_absurd_profiles(tmp_path, change, message):
    table = tomllib.loads((profiles.FOLDER / "h100-8x.toml").read_text())
    del table["sources"]
    lines = [f"{key} = {value!r}" for key, value in (table | change).items()]
    (tmp_path / "own.toml").write_text("\n".join(lines))
    sink = Sink()
    assert profiles.hardware(str(tmp_path / "own.toml"), sink) is None
    [finding] = sink.diagnostics
    assert finding.code == "PL701"
    assert finding.message.endswith(message)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('bandwith = "measured"', "bandwith of sources is not a field"),
        ("launch_us = 20", "launch_us of sources is 20, not a text"),
    ],
)
def test_absurd_sources(tmp_path, source, message):
    numbers, _, _ = (profiles.FOLDER / "h100-8x.toml").read_text().partition("[sources]")
    (tmp_path / "own.toml").write_text(f"{numbers}[sources]\n{source}\n")
    sink = Sink()
    assert profiles.hardware(str(tmp_path / "own.toml"), sink) is None
    assert [d.message.endswith(message) for d in sink.diagnostics] == [True]


def test_a_file_that_is_no_profile(tmp_path):
    (tmp_path / "own.toml").write_text("= 3")
    for name in ("own.toml", "nothere.toml", "torch"):
        sink = Sink()
        assert profiles.hardware(str(tmp_path / name) if "." in name else name, sink) is None
        assert [d.code for d in sink.diagnostics] == ["PL700"]


def layers(*settings, world_size=8, rows=8, tokens=4096):
    sink = Sink()
    compiled = compile_plan("llama-3.1-8b", "llama", sink, world_size=world_size, settings=settings)
    work = PlanWork(*compiled.applied, Batch(global_batch=rows, sequence=tokens), stack("torch"))
    counted = count(work.facts, sink, MicroBatch(rows, tokens, work.compute_dtype))
    return work.workload(counted).stages[0]


def test_a_model_computes_in_the_dtype_of_most_elements(tmp_path):
    """Few parameters of each layer of ERNIE 4.5 stay in float32."""
    plan = tmp_path / "own.plan"
    plan.write_text(
        "plan own for ernie4_5_moe\nmesh {\n    dp_shard = auto\n}\nload {\n    dtype = bf16\n}\n"
        "fsdp on dp_shard {\n    model.layers.* : unit\n    root : unit\n}\n"
    )
    compiled = compile_plan("ernie-4.5-21b-a3b", str(plan), Sink(), world_size=8)
    work = PlanWork(*compiled.applied, Batch(global_batch=8, sequence=64), stack("torch"))
    dtypes = {held.parameter.dtype for held in work.holdings.all}
    assert (dtypes, work.compute_dtype) == ({"bfloat16", "float32"}, "bfloat16")


def test_a_loss_in_chunks_has_no_whole_logits():
    whole, chunked = (layers("tp=8", f"loss_chunks={n}")[-1][0] for n in (0, 4))
    logits = 8 * 4096 * 128256
    assert whole.transient == 8 * logits
    assert whole.kept - chunked.kept == pytest.approx(4 * logits, rel=0.001)
    gradients = 128256 / 8 * 4096 + 8 * 4096 * 4096  # of the weight and of the input, in float32
    assert chunked.transient == pytest.approx(12 * logits / 4 / 8 + 4 * gradients)
    logits, tokens = ([c.size for c in x.forward][-1] for x in (whole, chunked))
    assert (logits, tokens) == (2 * 8 * 4096 * 128256, 12 * 8 * 4096 / 4 * 8)


@pytest.mark.parametrize(
    ("tokens", "chunks", "measured"),
    [
        (8192, 1, 9.910),
        (8192, 2, 7.953),
        (8192, 4, 5.019),
        (8192, 8, 3.857),
        (8192, 16, 3.491),
        (8192, 64, 3.215),
        (32768, 16, 5.394),
        (32768, 64, 4.052),
    ],
)
def test_what_a_loss_in_chunks_holds_on_an_h100(tokens, chunks, measured):
    """GiB of `chunked_loss` in bf16, 4,096 features and 128,256 entries, besides its arguments."""
    settings = ("dp_shard=1", f"loss_chunks={chunks}")
    head = layers(*settings, world_size=1, rows=1, tokens=tokens)[-1][0]
    assert head.transient / GIB == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("row", CHOICES, ids=str)
def test_measured_choices(row, tmp_path):
    """Checkpointing, chunks of the loss, resharding: what each changes of memory and time."""
    plain, found = (measured_steps.chosen(r, tmp_path) for r in (CHOICES[0], row))
    assert found.fullest.peak / GIB == pytest.approx(row["gib"], rel=0.005)
    assert found.time.seconds * 1e3 == pytest.approx(row["ms"], rel=0.12)
    if "micro" not in row:
        more = (found.time.seconds - plain.time.seconds) * 1e3
        assert more == pytest.approx(row["ms"] - CHOICES[0]["ms"], abs=10)


def test_what_a_plans_tensor_parallelism_splits():
    (one, times), (eight, _) = layers("dp_shard=1", world_size=1)[0], layers("tp=8")[0]
    assert times == 32
    assert sum(m.flops for m in one.matmuls) == 8 * sum(m.flops for m in eight.matmuls)
    assert one.attention[0].heads == 8 * eight.attention[0].heads == 32
    assert one.parameters == 218_112_000
    assert eight.parameters == (one.parameters - 2 * 4096) // 8 + 2 * 4096
    stream = 8 * 4096 * 4096 * 2
    assert one.boundary == stream == 8 * eight.boundary
    gathered = 2 * stream  # DTensor keeps the gathered inputs of both pairs of column layers whole
    assert eight.kept == pytest.approx((one.kept - gathered) / 8 + gathered, rel=0.01)
    kinds = [c.kind for c in eight.forward]
    assert sorted(kinds) == [GATHER] * 2 + [SCATTER] * 2
    plain, _ = layers("tp=8", "sequence=false")[0]
    assert [c.kind for c in plain.forward] == [REDUCE] * 2
    assert plain.boundary == stream
    assert one.forward == ()


def test_shapes_of_the_playbook():
    """The names are numbers of parameters, so the shapes must have as many."""
    for name in ("1.34B", "3.57B", "8.86B", "80.0B"):
        assert f"{playbook_model(name).parameters / 1e9:.3g}" == f"{float(name[:-1]):.3g}"


@pytest.mark.parametrize(
    ("more", "rest", "states"), [("", 4, 8), ("load {\n    dtype = bf16\n}\n", 2, 4)]
)
def test_the_optimizer_steps_fp32_where_nothing_says_otherwise(more, rest, states, tmp_path):
    """The configuration says bf16 of the stored weights; docs/training.md's script loads fp32."""
    (tmp_path / "a.plan").write_text(f'plan a for llama\n\nextend "llama.plan"\n\n{more}')
    sink, path = Sink(), str(tmp_path / "a.plan")
    compiled = compile_plan("llama-3.1-8b", path, sink, world_size=8, settings=())
    made = answer_for(compiled, Request(batch=Batch(global_batch=64, sequence=1024)), sink)
    sizes = {i.name: i.size for i in made.estimate.fullest.moments[0].items}
    each = 8_030_261_248 / 8
    assert sizes["parameters"] == rest * each and sizes["optimizer state"] == states * each
    said = list(text(made))[1]
    assert ("(assumed" in said) is (rest == 4) and "1 micro-batch of 8 rows a rank" in said
    assert document(made)["optimizer"] == {"name": "adamw", "bytes": rest, "assumed": rest == 4}


def test_what_is_not_counted_does_not_fit_for_sure():
    """Without torch, or for a model that planc cannot build, activations are unknown."""
    compiled = compile_plan("llama-3.1-8b", "llama", Sink(), world_size=8, settings=())
    made = answer_for(compiled, Request(batch=Batch(global_batch=8, sequence=1024)), Sink())
    assert made.fits is True
    bare = replace(made, counted=False)
    assert bare.fits is None and document(bare)["fits"] is None
    assert "unknown whether it fits" in str(bare) and "at least" in str(bare)


def test_linear_attention_is_counted_as_its_kernel():
    """fla's, not the loop over chunks that transformers has without it."""
    facts = load("qwen3-next-80b-a3b", Sink())
    counted = count(facts, Sink(), MicroBatch(1, 4096, "bfloat16"))
    [linear] = [a for part in counted.parts for a in part.attended if a.linear]
    config = facts.config
    heads, wide = config["linear_num_value_heads"], config["linear_value_head_dim"]
    narrow = config["linear_key_head_dim"]
    assert (linear.heads, linear.queries, linear.head_dim) == (heads, 4096, wide)
    flops = 6 * 64 * narrow + 4 * 64 * wide + 6 * narrow * wide
    assert linear.keys * 4 * wide == pytest.approx(flops, rel=0.01)
    assert not [p for part in counted.parts for p in part.products if p.count > 1 and not p.divided]
    name = "qwen3-next-80b-a3b"
    compiled = compile_plan(name, "qwen3_next", Sink(), world_size=64, settings=())
    made = answer_for(compiled, Request(batch=Batch(global_batch=64, sequence=4096)), Sink())
    spent = made.estimate.time.spent
    assert spent.matmul < 0.6 * made.estimate.time.seconds
    assert "linear attention in fused kernels" in str(made)


def kept_around_blocks(model):
    """Bytes that the forward of a model keeps outside of its blocks."""
    counted = count(load(model, Sink()), Sink(), MicroBatch(1, 1024, "bfloat16"))
    return sum(saved.size for part in counted.parts if not part.at for saved in part.saved)


def test_a_language_model_behind_a_tower_is_counted_as_one_alone():
    """Blocks of a nested configuration are counted by kind, and not again as what is around."""
    alone = kept_around_blocks("qwen3-8b")
    assert kept_around_blocks("qwen3-vl-8b") == pytest.approx(alone, rel=0.1)


@pytest.mark.parametrize(
    ("model", "plan", "tower"),
    [
        ("gemma-3-4b", "gemma3_vision", "model.vision_tower.encoder.layers"),
        ("qwen3.5-27b", "qwen3_5", "model.visual.blocks"),
    ],
)
def test_what_towers_compute_is_said_not_to_be_counted(model, plan, tower):
    compiled = compile_plan(model, plan, Sink(), world_size=64, settings=())
    made = answer_for(compiled, Request(batch=Batch(global_batch=64, sequence=1024)), Sink())
    assert made.counted and f"not counted, nor what {tower} compute" in str(made)
    assert document(made)["not_counted"] == [tower]


def test_the_bottleneck_is_the_largest_part():
    compiled = compile_plan("llama-3.1-8b", "llama", Sink(), world_size=8, settings=())
    made = answer_for(compiled, Request(batch=Batch(global_batch=8, sequence=4096)), Sink())
    spent = made.estimate.time.spent._asdict()
    most = max(spent, key=spent.get)
    assert made.estimate.time.bottleneck.startswith(most.replace("_", " "))
    assert most != "matmul" or ", then " in made.estimate.time.bottleneck


def test_layers_that_cannot_be_counted():
    facts = load("llama-3.1-8b", Sink())
    for broken in (
        replace(facts, code="mylib.models:build"),
        replace(facts, config={**facts.config, "rope_parameters": {"rope_type": "nonsense"}}),
    ):
        sink = Sink()
        assert count(broken, sink, MicroBatch(1, 128, "bfloat16")) is None
        assert "PL703" in {d.code for d in sink.diagnostics}
