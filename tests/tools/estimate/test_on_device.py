"""One rank of a plan on the CPU's memory, beside real processes, and what a record becomes."""

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gloo_peaks
import pytest
import torch
from console import call
from gloo_combinations import COMBINATIONS, DECODER
from helpers import slow

import planc
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.model.load import load_values
from planc.simulate.rank_job import RankRunner, RankStep
from planc.tools.measure.allocations import Allocations, Clock, cuda_changes
from planc.tools.measure.count import NotCountedError, count, shallower

PEAKS = json.loads(gloo_peaks.PEAKS.read_text())
LLAMA = {**DECODER, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    "name",
    [
        "llama, pp 2",
        *map(slow, ("llama, tp 2", "llama, hsdp 2", "gpt2", "llama, replicated", "llama, bf16")),
        *map(slow, ("qwen3, tp 2", "llama, 2 batches", "llama, loss in 4, tp 2")),
        *map(slow, ("llama, pp 2, zbv", "tied llama, pp 2, tp 2")),
    ],
)
def test_as_on_real_processes(name):
    """To a scalar: which the C library's allocator has beside what the profiler tells of."""
    for rank, sizes in zip(COMBINATIONS[name].counted("cpu"), PEAKS[name], strict=True):
        assert 0 <= min(sizes) - rank.peak <= 4, name
        assert {"backward", "clipping", "optimizer"} < {*rank.seconds}
        assert rank.seconds["backward"] > rank.seconds["clipping"] > 0


def compiled(**fields):
    sink = Sink()
    facts = load_values({**LLAMA, **fields}, "llama", sink)
    made = compile_plan(facts, "llama", sink, world_size=4)
    assert made.lowered, sink.diagnostics
    return made


@pytest.fixture
def little_memory(monkeypatch):
    """The process that runs ranks may take 400 MiB more than it has."""
    plain = RankRunner.ask
    monkeypatch.setenv("PLANC_TEST_MEMORY", "400")  # no other test is lent this process

    def limited(runner, job):
        if runner._process is None:
            plain(runner, replace(job, lowered="{}"))  # what it imports is there
            pid = runner._process.pid
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + 400 * 2**20
            resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
        return plain(runner, job)

    monkeypatch.setattr(RankRunner, "ask", limited)


@pytest.mark.usefixtures("little_memory")
def test_out_of_memory_is_a_result():
    """Logits need 512 MiB."""
    large = RankStep(rows=64, tokens=64, micro_batches=1, dtype="float32")
    [rank] = count(compiled(num_hidden_layers=1, vocab_size=32768), large, device="cpu")
    assert rank.missed
    assert rank.missed.moment == "loss"
    assert rank.missed.what == "activations of LlamaForCausalLM"  # logits in float32
    assert "you tried to allocate" in rank.missed.said
    assert rank.moments["loss"]["parameters"]
    assert not rank.seconds


@pytest.mark.usefixtures("little_memory")
def test_out_of_memory_does_not_fit(tmp_path):
    """What it held until then is no peak, which an estimate could be held against."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 32768}))
    words = [
        "measure",
        str(tmp_path),
        "llama",
        "--world-size",
        "4",
        "--batch",
        "256",
        "--seq",
        "64",
    ]
    code, out, errors = call(*words, "--layers", "1", "--device", "cpu")
    assert code == 1, errors
    first = next(line for line in out.splitlines() if line.startswith("memory of a rank"))
    assert "when there was no more (loss); " in first and first.endswith(": DOES NOT FIT")
    assert "out of memory (loss) for activations of LlamaForCausalLM" in out
    [line] = (line for line in out.splitlines() if line.startswith("estimated: "))
    assert "%" not in line
    code, out, _ = call(*words, "--layers", "1", "--device", "cpu", "--format", "json")
    found = json.loads(out)
    assert code == 1 and found["fits"] is False and found["out_of_memory"][0]["moment"] == "loss"


def test_a_rank_in_a_process_of_its_own(monkeypatch):
    """As ranks on CUDA are, which does not survive a fork."""
    step = RankStep(rows=1, tokens=64, micro_batches=1, dtype="float32")
    asked, plain = [], RankRunner.ask

    def noted(runner, job):
        asked.append((job, plain(runner, job)))
        return asked[-1][1]

    monkeypatch.setattr(RankRunner, "ask", noted)
    count(compiled(num_hidden_layers=1), step, device="cpu")
    [(job, forked)] = asked
    words = [sys.executable, "-W", "ignore", "-m", RankRunner.MODULE, "alone"]
    done = subprocess.run(words, input=job.dumps(), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["moments"] == forked["moments"] != {}


def test_fewer_layers():
    sink, every = Sink(), compiled(num_hidden_layers=8)
    few = shallower(every, 3, sink)
    assert few.facts.config["num_hidden_layers"] == 3 and not sink.diagnostics
    assert shallower(every, 8, sink) is every
    with pytest.raises(NotCountedError, match="has 8 layers, and 9"):
        shallower(every, 9, sink)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def test_the_command(folder, tmp_path):
    path = tmp_path / "rows.csv"
    words = [folder, "llama", "--world-size", "4", "--batch", "8", "--seq", "64"]
    code, out, errors = call("measure", *words, "--layers", "2", "--device", "cpu")
    assert code == 0, errors
    assert "two steps of one rank, on cpu, " in out and "compute of a step: " in out
    assert "ms recomputation of model.layers.*  (plans/blocks.plan:" in out
    assert "  (plans/blocks.plan:" in next(x for x in out.splitlines() if "gathered" in x)
    assert "not measured: collectives, which return at once" in out
    code, _, errors = call("measure", *words, "--layers", "2", "-o", str(path))
    assert code == 2 and "leave --layers off" in errors
    code, _, errors = call("measure", *words, "--layers", "5")
    assert code == 2 and "PL727" in errors and "5 were asked for" in " ".join(errors.split())


@pytest.mark.slow
@pytest.mark.parametrize("state", ["", slow("state = int8, ")])
def test_states_in_the_hosts_memory_are_not_on_the_device(folder, tmp_path, state):
    """As on fake tensors, where the device is the host's memory too."""
    held = []
    for terms in (state.rstrip(", "), f"{state}offload = states"):
        path = tmp_path / "own.plan"
        rule = f"optimizer {{\n    root : adamw{f'({terms})' * bool(terms)}\n}}\n"
        path.write_text(f'plan own for llama\n\nextend "llama"\n\n{rule}')
        asked = {"world_size": 4, "batch": 8, "seq": 64}
        ways = ({"device": "cpu"}, {"exact": True})
        found = [planc.measure(folder, str(path), **asked, **way) for way in ways]
        held += map(_states, found)
    here, fake, left, fakes_left = held
    assert here == pytest.approx(fake, rel=0.01) and here > 10_000
    assert left == pytest.approx(fakes_left, abs=8192) and left < here / 10


def _states(found):
    """Bytes of the optimizer's states on the device, at the loss."""
    (loss,) = (m for m in found.counted.ranks[0].moments if m.name == "loss")
    return sum(item.size for item in loss.items if item.name == "optimizer state")


@pytest.mark.slow
def test_rows_with_compute(folder, tmp_path):
    path = tmp_path / "rows.csv"
    words = [folder, "llama", "--world-size", "4", "--batch", "8", "--seq", "64"]
    head = "model,plan,world_size,batch,seq,seconds,set,micro_batches,gib,compute"
    rows = [f"{folder},llama,4,{8 * n},64,,,,,{0.01 * n}" for n in range(2, 7)]
    path.write_text("\n".join([head, *rows, ""]))
    code, _, errors = call("calibrate", str(path), "-o", str(tmp_path / "own.toml"))
    assert code == 2 and "has 5 settings, and 5 constants are fitted" in " ".join(errors.split())
    assert call("measure", *words, "--device", "cpu", "-o", str(path))[0] == 0
    last = path.read_text().splitlines()[-1].split(",")
    assert last[5] == "" and float(last[8]) > 0 and float(last[9]) > 0
    code, out, errors = call("calibrate", str(path), "-o", str(tmp_path / "own.toml"))
    assert code == 0, errors
    assert "node_reduce_gb_s" not in out  # nothing is known of links
    assert "memory_gb_s = " in out or "matmul_tflops = " in out or "launch_us = " in out


@pytest.mark.slow
def test_the_function(folder):
    made = planc.measure(
        folder, "llama", world_size=4, batch=8, seq=64, device="cpu", layers=2, overrides=["tp=2"]
    )
    assert made.layers == (2,) and made.seconds > 0 and made.fits
    with pytest.raises(ValueError, match="device is cpu or cuda"):
        planc.measure(folder, "llama", world_size=4, batch=8, seq=64, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(planc.PlanError, match=r"PL727.*no CUDA device"):
            planc.measure(folder, "llama", world_size=4, batch=8, seq=64, device="cuda")
    with pytest.raises(planc.PlanError, match=r"PL727.*9 were asked for"):
        planc.measure(folder, "llama", world_size=4, batch=8, seq=64, layers=9)


def entry(action, address, size, note=None):
    return {"action": action, "addr": address, "size": size, "user_metadata": note or ""}


def test_the_record_of_cuda():
    """Entries as `torch.cuda.memory._snapshot` has them: a text with what is allocated, and blocks
    that count as free when that is asked for.
    """
    told = Allocations(lambda: "")
    told.notes = [
        ("moment", "parameters", ()),
        ("what", "the batch", ()),
        ("tensors", "parameters", (64,)),
        ("moment", "loss", ()),
        ("what", "activations of lm_head", ()),
        ("moment", "optimizer step", ()),
    ]
    told._replay(
        cuda_changes(
            [
                entry("segment_alloc", 0, 2**21),
                entry("alloc", 64, 100, "1"),
                entry("alloc", 512, 30, "4"),
                entry("alloc", 1024, 5, "4"),
                entry("free_requested", 512, 30),
                entry("free_completed", 512, 30),
                entry("alloc", 512, 20, "5"),
                entry("free_requested", 4096, 7),  # older than the record
            ]
        )
    )
    assert [*told.moments()] == [
        ("parameters", {"parameters": 100}),
        ("loss", {"parameters": 100, "activations of lm_head": 35}),
        ("optimizer step", {"parameters": 100, "activations of lm_head": 25}),
    ]


def test_a_clock_sums_parts():
    clock = Clock("cpu")
    for part in ("one", "two", "one", "end"):
        clock.start_part(part)
    assert {*clock.spent()} == {"one", "two"}
    clock.stamps = [("one", 1.0), ("two", 3.0), ("one", 4.0), ("end", 8.0)]
    assert clock.spent() == {"one": 6.0, "two": 1.0}
