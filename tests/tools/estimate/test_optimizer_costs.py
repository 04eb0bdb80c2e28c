"""What estimates and `--sends` say of the optimizer section, beside counted and measured bytes."""

import json

import pytest
import torch
from folders import ROOT
from helpers import slow

import planc
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.lowering import optimizer_collectives
from planc.lowering.collectives import step_collectives
from planc.lowering.step import Step
from planc.ops import optimizer as ops
from planc.runtime.standalone import optimizer as standalone
from planc.tools.estimate.answer import Request, answer
from planc.tools.estimate.from_plan import Batch

MUON = "root : sgd(momentum = 0.9)\n model.layers.*.{self_attn,mlp}.*_proj : muon"
GIB = 2**30
PLANS = ROOT / "plans"


def _compiled(tmp_path, rules, settings=(), world_size=16, model="llama-3.2-1b"):
    path = tmp_path / "own.plan"
    section = f"optimizer {{\n {rules}\n}}\n" if rules else ""
    path.write_text(f'plan own for llama\nextend "llama"\n{section}')
    sink = Sink()
    done = compile_plan(model, str(path), sink, world_size=world_size, settings=[*settings])
    assert not sink.errors
    return done


def _estimated(compiled):
    batch = Batch(global_batch=16, sequence=512)
    return answer(*compiled.applied, Request(batch=batch), Sink())


def _item(found, name, rank=0):
    moments = found.estimate.ranks[rank].moments
    return next(i.size for m in moments for i in m.items if i.name == name)


def test_what_runs_and_what_is_counted_have_the_same_limits():
    assert (standalone.BUCKET, standalone.AT_ONCE) == (ops.BUCKET, ops.AT_ONCE)


def test_buckets_are_those_that_run(tmp_path, monkeypatch):
    """A rank without others: as many parameters as there are, in buckets of at most so many."""
    shapes = [(64, 64)] * 5 + [(64, 256)] * 3
    total = sum(a * b for a, b in shapes)
    for limit in (2**12, 10_000, 2**15, 2**20):
        monkeypatch.setattr(standalone, "BUCKET", limit)
        buckets = [*standalone.make_buckets([torch.empty(s) for s in shapes])]
        assert sum(len(some) for _, some in buckets) == len(shapes)
        assert len(buckets) == min(-(-total // limit), len(buckets))
        if limit >= 64 * 256:
            assert len(buckets) == -(-total // limit)


@pytest.mark.parametrize("limit", [2**20, 2**28])
def test_every_matrix_is_exchanged_twice(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(optimizer_collectives, "BUCKET", limit)
    done = _compiled(tmp_path, MUON, ["tp=2"])
    [one] = [s for s in step_collectives(Step(lowered=done.lowered)) if s.word == "optimizer"]
    # 16 layers of llama-3.2-1b: q and o, k and v, three of the MLP; 2 bytes, 16 ranks
    elements = 16 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048)
    buckets = -(-elements // (limit * 16))
    assert (one.kind, one.axes, one.times) == ("all-to-all", ("dp_shard", "tp"), 2 * buckets)
    assert one.size == elements * 2 // 16 // buckets


def test_states_are_those_of_each_rule(tmp_path):
    """In float32, on 16 ranks: two for each parameter of AdamW, one of Muon and of momentum."""
    plain = _item(_estimated(_compiled(tmp_path, "")), "optimizer state")
    adamw = _item(_estimated(_compiled(tmp_path, "root : adamw")), "optimizer state")
    half = _item(_estimated(_compiled(tmp_path, "root : adamw(state = bf16)")), "optimizer state")
    muon = _item(_estimated(_compiled(tmp_path, MUON)), "optimizer state")
    none = _item(_estimated(_compiled(tmp_path, "root : sgd")), "optimizer state")
    assert adamw == pytest.approx(plain) and plain > GIB / 2
    assert half == pytest.approx(plain / 2)
    assert muon == pytest.approx(plain / 2)
    assert none == 0
    rows = _item(_estimated(_compiled(tmp_path, "root : adafactor")), "optimizer state")
    layer = 2 * (2048 + 2048) + 2 * (512 + 2048) + 3 * (8192 + 2048)
    vectors = (16 * 2 + 1) * 2048 / 16  # of norms; the others are whole on every rank
    assert rows == pytest.approx(4 * (16 * layer + 128256 + 2048 + vectors), rel=1e-3)


def test_frozen_parameters_have_no_states(tmp_path):
    path = tmp_path / "own.plan"
    head = 'plan own for llama\nextend "llama"\n'
    path.write_text(f"{head}train {{\n model.layers[0:8] : frozen\n}}\n")
    frozen = compile_plan("llama-3.2-1b", str(path), Sink(), world_size=16)
    whole = _item(_estimated(_compiled(tmp_path, "")), "optimizer state")
    left = _item(_estimated(frozen), "optimizer state")
    layer = 2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048 + 2 * 2048
    assert whole - left == pytest.approx(8 * layer * 8 / 16, rel=1e-3)


def test_time_has_the_iterations_and_the_exchange(tmp_path):
    def seconds(rules, settings=()):
        return _estimated(_compiled(tmp_path, rules, settings)).estimate.time.spent.optimizer

    momentum, full = seconds("root : sgd(momentum = 0.9)"), seconds(MUON)
    half = seconds(MUON + "(compute = bf16)")
    assert momentum < half < full / 2
    # every rank has all matrices: the iterations are not shared, and nothing is exchanged
    assert seconds(MUON, ["dp_replicate=16"]) > 4 * full


def test_the_estimate_names_the_plans_optimizer(tmp_path):
    text = str(_estimated(_compiled(tmp_path, MUON)))
    assert "sgd and muon on parameters in fp32 (assumed" in text
    assert "ms optimizer  (" in text and "own.plan:4)" in text


@pytest.mark.parametrize(
    ("rules", "near"),
    [
        slow("root : adamw(state = bf16)", 0.02),
        ("root : adamw(state = int8)", 0.02),
        slow("root : adamw(offload = states)", 0.02),
        slow("root : adamw(state = int8, offload = states)", 0.02),
        (MUON, 0.12),
    ],
)
def test_what_a_step_holds_is_what_a_rank_holds(tmp_path, rules, near):
    """Two of its layers, run on fake tensors; rank 0 owns two of the six largest matrices, and the
    estimate has the mean of the ranks. With all 16 layers Muon is within 1 % too.
    """
    config = json.loads((PLANS / "models" / "llama-3.2-1b.json").read_text())
    model = tmp_path / "config.json"
    model.write_text(json.dumps({**config, "num_hidden_layers": 2}))
    done = _compiled(tmp_path, rules, world_size=4, model=str(tmp_path))
    plan = str(tmp_path / "own.plan")
    found = planc.measure(str(tmp_path), plan, world_size=4, batch=4, seq=64, exact=True)
    told, seen = _estimated(done).estimate.ranks, found.counted.ranks
    assert _at_the_step(told) == pytest.approx(_at_the_step(seen), rel=near)


def _at_the_step(ranks):
    """Bytes of rank 0 at the optimizer's step."""
    return next(m.size for m in ranks[0].moments if "optimizer" in m.name)


@pytest.mark.slow
@pytest.mark.parametrize("terms", ["", "(state = bf16)", "(state = int8)"])
def test_lists_of_so_many_elements_do_not_grow_with_layers(tmp_path, terms):
    """What a step copies is of one list; a rank of 3 and 4 layers made it of 16 (0.46 GiB more)."""
    done = _compiled(tmp_path, f"root : adamw{terms}", world_size=8, model="llama-3.2-1b")
    plan = str(tmp_path / "own.plan")
    found = planc.measure("llama-3.2-1b", plan, world_size=8, batch=8, seq=64)
    told, seen = _estimated(done).estimate.ranks, found.counted.ranks
    assert _at_the_step(told) == pytest.approx(_at_the_step(seen), rel=0.01)
