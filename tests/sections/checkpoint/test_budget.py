"""Which calls are kept within a budget: the knapsack, how layers share it, and what plans say."""

import gc
import itertools
import random
from dataclasses import replace

import pytest
import torch
import transformers
from console import call
from torch.profiler import ProfilerActivity, profile

import planc
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.ops.activation_checkpoint import GROUPS, Checkpoint, Save
from planc.runtime.standalone import activation_checkpoint as checkpointing
from planc.sections.checkpoint import choice
from planc.sections.checkpoint.choice import Alike, BudgetLine, Share
from planc.sections.checkpoint.ops import Budget
from planc.simulate import call_table as rates
from planc.simulate.call_table import CallTable, CountedCall
from planc.simulate.count_calls import count_calls
from planc.tools.estimate import profiles

STATE = 5056
"""Bytes of the random state that a checkpoint keeps on the CPU."""


def table(seed, count=10, host=0.0):
    """A table of random calls, of which some cannot be kept."""
    draw = random.Random(seed)
    names = ("aten.mm.default", "attention", "aten.mul.Tensor")
    calls, nth = [], dict.fromkeys(names, 0)
    for _ in range(count):
        op = draw.choice(names)
        size = draw.randrange(1, 9) * 1000
        work = draw.randrange(10**9) if op != names[2] else 0
        calls.append(CountedCall(op, nth[op], size, work, 3 * size, 0, draw.random() < 0.2))
        nth[op] += 1
    saved = sum(c.size for c in calls) * 3 // 4
    return CallTable(tuple(calls), count - 1, 500, saved, host)


def some_of(calls):
    return itertools.chain(*(itertools.combinations(calls, n) for n in range(len(calls) + 1)))


@pytest.mark.parametrize("host", [0.0, 20e9])
@pytest.mark.parametrize("seed", range(8))
def test_the_front_is_exact(seed, host):
    """For every number of bytes no choice of calls is faster than the front's: of those that are
    kept, and of those that are copied to the host, where that is sooner done.
    """
    counted = table(seed, host=host)
    free = [i for i, c in enumerate(counted.calls[: counted.stop]) if not c.fixed]
    away = [i for i in free if counted.moves(counted.calls[i])]
    assert bool(away) == bool(host)
    every = [
        counted.point(kept, hosted)
        for kept in some_of(free)
        for hosted in some_of([i for i in away if i not in kept])
    ]
    every = [point for point in every if point.size < counted.saved]
    assert len(every) > 10
    for wanted in every:
        best = next(p for p in reversed(counted.front) if p.size <= wanted.size)
        assert best.seconds <= wanted.seconds + 1e-15
    sizes = [p.size for p in counted.front]
    times = [p.seconds for p in counted.front]
    assert sizes == sorted({*sizes}) and times == sorted({*times}, reverse=True)
    assert counted.front[0].kept == () and counted.front[-1].seconds == 0
    assert set(counted.front[0].hosted) == set(away)
    assert all({*p.hosted} == {*away} - {*p.kept} for p in counted.front if p.kept is not None)


def share(size, *counts):
    """A budget for so many layers of each of some tables."""
    groups = (
        Alike(names=tuple(f"{at}.{i}" for i in range(n)), table=table(at), passes=1 + at % 2)
        for at, n in enumerate(counts)
    )
    rule = Budget(modules=None, size=size, rows=1, seq=1)
    return Share((rule,), tuple(groups))


@pytest.mark.parametrize("counts", [(1,), (7,), (3, 4), (1, 2, 5)])
def test_no_recipe_is_better(counts):
    """With the bytes of `full`, of lists, and of no checkpoint a choice is at least as fast."""
    whole = share(1.0, *counts)
    recipes = [(), ("attention",), ("attention", "matmul")]
    for recipe in recipes:
        points = whole._recipe(recipe)
        own = share(whole.held_bytes(points) + 1, *counts)
        assert own.held_bytes(own.points) <= own.bytes
        assert own.seconds(own.points) <= own.seconds(points) + 1e-15
    assert whole.seconds(whole.points) == 0 and whole.held_bytes(whole.points) <= whole.plain
    times = [share(part / 20, *counts) for part in range(4, 21)]
    times = [own.seconds(own.points) for own in times if own.least <= own.bytes]
    assert times == sorted(times, reverse=True)


def test_equal_layers_have_two_neighboring_points():
    own = share(0.5, 60)
    used = sorted({point.size for point in own.points.values()})
    assert len(used) <= 3  # two of the hull, and one layer that has what is left
    assert own.bytes - own.held_bytes(own.points) < 9000


def test_rates_are_those_of_the_profile():
    hardware = profiles.hardware("h100-8x", Sink())
    assert hardware.matmul_tflops * 1e12 == rates.FLOPS
    assert hardware.memory_gb_s * 1e9 == rates.MEMORY
    assert hardware.node_gb_s * 1e9 == rates.LINK


def test_a_block_of_8b_is_computed_again_as_the_docs_say(tmp_path, monkeypatch):
    """Also with other rates and without its input among the bytes, as others count."""
    written = plan(tmp_path, "budget(8GiB, rows = 1, seq = 4096)")
    sink = Sink()
    applied, facts = compile_plan("llama-3.1-8b", written, sink, world_size=8).applied
    modules = next(BudgetLine.of_plan(applied)).modules
    counted = count_calls(applied, facts, modules, 1, 4096)["model.layers.1"]

    def again(table):
        shares = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
        fits = ([p for p in table.front if p.size <= table.saved * share] for share in shares)
        return [round(100 * points[-1].seconds / table.forward) for points in fits]

    assert again(counted) == [80, 68, 56, 44, 31, 20, 18, 13]
    monkeypatch.setattr(rates, "FLOPS", 600e12)
    monkeypatch.setattr(rates, "MEMORY", 3000e9)
    assert again(replace(counted, inputs=0)) == [68, 62, 48, 36, 22, 16, 14, 10]


def test_lists_are_counted_as_torch_does():
    """Every second call of a group, and the calls of numbers."""
    counted = table(1)
    matmuls = [i for i, c in enumerate(counted.calls) if c.op == "aten.mm.default"]
    assert len(matmuls) > 2
    every = Save(name="matmul", every=2, ops=GROUPS["matmul"])
    assert counted.keeping([every]).kept == tuple(matmuls[::2])
    some = Save(name="aten.mm.default", calls=(1,), ops=("aten.mm.default",))
    assert counted.keeping([some]).kept == (matmuls[1],)
    for counted in (table(1), table(1, host=2e12)):
        point = counted.front[len(counted.front) // 2]
        assert counted.keeping(counted.saves(point)) == point
    assert point.hosted and point.away == sum(counted.calls[i].size for i in point.hosted)


# Plans -------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MIXTURE = {
    "mlp_only_layers": [0],
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def model(family, **more):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES, **more)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def plan(tmp_path, rule, family="llama"):
    path = tmp_path / "b.plan"
    text = f"override checkpoint {{\n    $blocks : {rule}\n}}\n"
    path.write_text(f'plan b for any\nextend "{family}"\n{text}')
    return str(path)


AWAY = ", offload = cpu, host_gb_s = 100000"
"""A link so fast that all results are sooner copied than computed again."""


def bytes_parked(patch):
    """The sizes of what is copied to the host's memory from now on."""
    parked, real = [], checkpointing._Parked.__init__

    def noting(self, tensor, pin):
        real(self, tensor, pin)
        parked.append(self.held.untyped_storage().nbytes())

    patch.setattr(checkpointing._Parked, "__init__", noting)
    return parked


def step(made, tokens):
    """Bytes that a forward pass leaves, and the gradients."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = made(input_ids=tokens, labels=tokens).loss
        gc.collect()
    loss.backward()
    held = sum(e.self_cpu_memory_usage for e in profiler.key_averages())
    return held, [p.grad.full_tensor() for p in made.parameters()]


@pytest.mark.parametrize(("family", "more"), [("llama", {}), ("qwen3_moe", MIXTURE)])
def test_what_is_held_is_what_was_predicted(tmp_path, monkeypatch, ends_its_group, family, more):
    """Real tensors, to the byte; gradients have the bits of a run without checkpoints."""
    tokens = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(1))
    known, real = [], choice._shares

    def noting(*args):
        known[:] = real(*args)
        return tuple(known)

    monkeypatch.setattr(choice, "_shares", noting)
    parked = bytes_parked(monkeypatch)

    def ran(rule):
        made = model(family, **more)
        path = plan(tmp_path, rule, family)
        run = planc.apply(made, path, overrides=["param_dtype=fp32"], device_type="cpu")
        return *step(made, tokens), run

    full, right, _ = ran("full")
    for part, away in ((0.75, ""), (0.3, ""), (0.3, AWAY)):
        parked.clear()
        held, gradients, run = ran(f"budget({part}, rows = 2, seq = 32{away})")
        (own,) = known
        plain = sum(point.kept is None for point in own.points.values())
        held -= sum(parked)  # the host's memory, which is the CPU's here
        assert held - full == own.held_bytes(own.points) - own.least - STATE * plain
        assert sum(parked) == sum(point.away for point in own.points.values())
        assert bool(parked) == bool(away)
        assert 0.9 * own.bytes < own.held_bytes(own.points) <= own.bytes
        assert all(torch.equal(*pair) for pair in zip(gradients, right, strict=True))
        rules = [op for op in run.lowered.ops if isinstance(op, Checkpoint)]
        assert any(save.calls for op in rules for save in op.save)
        assert sum(len(op.modules) for op in rules) == 3 - plain


def test_the_plan_is_what_a_list_says(tmp_path):
    """Two budgets, their words in messages, and a list of calls that a person writes."""
    path = tmp_path / "own.plan"
    listed = "ops(save = [attention(calls = [0]), aten.mm.default(calls = [4, 0])])"
    path.write_text(
        f'plan own for llama\nextend "llama"\noverride checkpoint {{\n    $blocks : {listed}\n}}\n'
    )
    lowered = planc.lower("llama-3.1-8b", str(path), world_size=8)
    (op,) = (op for op in lowered.ops if isinstance(op, Checkpoint))
    assert op.headline() == "ops(save = [attention[0], mm[0,4]])"
    assert [save.calls for save in op.save] == [(0,), (0, 4)]


def test_a_plan_without_mixed_precision_counts_what_the_estimate_assumes(tmp_path):
    """The configuration says bf16, and the script that the docs have steps and computes float32."""
    given = {
        "assumed": "",
        "stated": "load { dtype = fp32 }",
        "bf16": "load { dtype = bf16 }",
    }
    kept = {}
    for name, text in given.items():
        path = tmp_path / f"{name}.plan"
        path.write_text(
            "plan own for llama\nmesh { dp_shard = auto }\n"
            f"checkpoint {{ model.layers.* : budget(4GiB, seq = 4096) }}\n{text}\n"
            "fsdp on dp_shard {\n    model.layers.* : unit\n    root : unit\n}\n"
        )
        lowered = planc.lower("llama-3.1-8b", str(path), world_size=8)
        kept[name] = [op.headline() for op in lowered.ops if isinstance(op, Checkpoint)]
    assert kept["assumed"] == kept["stated"] != kept["bf16"]


@pytest.mark.parametrize(
    ("seq", "link", "away"),
    [
        (4096, "", set()),
        (16384, "", set()),
        (32768, "", {"attention"}),
        (4096, ", host_gb_s = 450", {"attention", "aten.mm.default"}),
    ],
)
def test_where_offloading_pays(tmp_path, seq, link, away):
    """Of a block of 8B that has room for little but its input: on PCIe 5 results of attention over
    30,000 tokens or more, and on NVLink-C2C, as a GH200 has, those of large products too.
    """
    path = plan(tmp_path, f"budget(0.045, seq = {seq}, offload = cpu{link})")
    lowered = planc.lower("llama-3.1-8b", path, world_size=8)
    rules = [op for op in lowered.ops if isinstance(op, Checkpoint)]
    hosted = {s.name for op in rules for s in op.save if s.hosted}
    assert hosted & {"attention", "aten.mm.default"} == away


def test_what_is_kept_in_the_hosts_memory_is_said(tmp_path):
    """A list by a person; estimates, whose copies take the time of their bytes; and `why`."""
    listed = "ops(save = [aten.mm.default(calls = [0, 4], offload = [4])])"
    path = plan(tmp_path, listed)
    lowered = planc.lower("llama-3.1-8b", path, world_size=8)
    (op,) = (op for op in lowered.ops if isinstance(op, Checkpoint))
    assert op.headline() == "ops(save = [mm[0], mm[4] on cpu])"
    asked = {"world_size": 8, "batch": 8, "seq": 4096}
    found = planc.estimate("llama-3.1-8b", path, **asked)
    copied = 32 * 2 * 4096 * 14336 * 2 / 50e9  # 32 blocks, there and back, bf16
    assert found.estimate.time.spent.host_copies == pytest.approx(copied)
    with pytest.raises(planc.PlanError, match="PL727"):
        planc.measure("llama-3.1-8b", path, **asked)
    path = plan(tmp_path, "budget(0.045, seq = 4096, offload = cpu, host_gb_s = 450)")
    said = call("why", "llama-3.1-8b", path, "model.layers.31", "--world-size", "8")[1]
    assert "in the host's memory: " in said and "MiB, copied there and back in " in said
    assert "keeps mm[4] on cpu: 112.0 MiB, saves 0.146 ms beside copies" in said


@pytest.mark.parametrize(
    "rule",
    [
        "ops(save = [aten.mm.default(calls = [0], offload = [1])])",
        "ops(save = [matmul(offload = [1])])",
        "ops(save = [aten.mm.default(calls = [0], offload = [0])], offload = cpu)",
        "budget(0.5, seq = 64, host_gb_s = 50)",
        "budget(0.5, seq = 64, offload = cpu, host_gb_s = 0)",
    ],
)
def test_what_means_nothing_is_refused(tmp_path, rule):
    with pytest.raises(planc.PlanError, match=r"PL012|PL013"):
        planc.lower("llama-3.1-8b", plan(tmp_path, rule), world_size=8)
