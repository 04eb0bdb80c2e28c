"""Stages that are cut by estimated time: `stages = balanced(...)`."""

from itertools import pairwise
from math import prod

import pytest

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.ops.base import AxisRole
from planc.tools.estimate import kept_tensors
from planc.tools.estimate.answer import Request, answer
from planc.tools.estimate.from_plan import Batch

CASES = {
    "a head": ("llama-3.1-8b", "llama", ["microbatches=8"], 1, 8192),
    "two stages a rank": ("llama-3.1-8b", "llama", ["schedule=interleaved_1f1b"], 1, 8192),
    "there and back": ("llama-3.1-8b", "llama", ["schedule=zbv", "recompute=false"], 1, 8192),
    "long rows": ("llama-3.1-8b", "llama", ["cp=2"], 1, 65536),
    "split weights": ("llama-3.1-8b", "llama", ["tp=2"], 1, 4096),
    "windows, a large head": ("gemma-3-1b", "gemma3", [], 1, 4096),
    "windows, larger microbatches": ("gemma-3-1b", "gemma3", [], 4, 4096),
    "layers of three kinds": ("nemotron-h-8b", "nemotron_h", [], 1, 4096),
    "dense first layers": ("deepseek-v2-lite", "deepseek_v2", [], 1, 4096),
}
UNEQUAL = """plan sizes for llama

extend "llama.plan"

override pipeline on pp {{
    microbatches = 8
    stages       = weighted($blocks, blocks = [{}, {}])
}}
"""


def timed(model, plan, world_size, settings, rows, tokens):
    """The estimated seconds of a step whose microbatches are of so many rows, and the number of
    blocks of each stage.
    """
    sink = Sink()
    compiled = compile_plan(model, plan, sink, world_size=world_size, settings=settings)
    assert compiled.applied, sink.diagnostics
    op, mesh = compiled.plan.pipeline.op, compiled.plan.mesh
    ranks = prod(axis.size for axis in mesh.of_role(AxisRole.DATA))
    batch = Batch(global_batch=rows * ranks * op.microbatches, sequence=tokens)
    found = answer(*compiled.applied, Request(batch=batch), sink)
    assert found.counted
    return found.estimate.time.seconds, [b - a for a, b in pairwise(op.bounds)]


@pytest.mark.parametrize("case", CASES)
def test_stages_of_equal_time_are_never_slower(case):
    model, plan, settings, rows, tokens = CASES[case]
    terms = ["pp=4", f"stages_rows={rows}", f"stages_seq={tokens}", *settings]
    ways = {
        way: timed(model, plan, 8, [*terms, f"stages={way}"], rows, tokens)
        for way in ("blocks", "work", "balanced")
    }
    seconds = {way: took for way, (took, _) in ways.items()}
    assert seconds["balanced"] <= min(seconds["blocks"], seconds["work"])


@pytest.mark.parametrize(
    ("model", "plan", "tokens", "before", "faster"),
    [
        ("llama-3.1-8b", "llama", 131072, "work", 0.98),
        ("llama-3.1-8b", "llama", 4096, "blocks", 0.93),
        ("gemma-3-1b", "gemma3", 4096, "work", 0.93),
        ("nemotron-h-8b", "nemotron_h", 8192, "blocks", 0.93),
        ("gemma-2-9b", "gemma2", 4096, "work", 0.98),
    ],
)
def test_a_step_is_faster(model, plan, tokens, before, faster):
    terms = ["pp=4", "microbatches=16", f"stages_seq={tokens}"]
    slow, _ = timed(model, plan, 8, [*terms, f"stages={before}"], 1, tokens)
    fast, _ = timed(model, plan, 8, [*terms, "stages=balanced"], 1, tokens)
    assert fast < faster * slow


def test_no_other_cut_in_two_is_faster(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    every = {}
    for first in range(1, 32):
        (tmp_path / "sizes.plan").write_text(UNEQUAL.format(first, 32 - first))
        every[first], _ = timed("llama-3.1-8b", "sizes.plan", 2, ["pp=2"], 1, 4096)
    terms = ["pp=2", "microbatches=8", "stages=balanced"]
    took, sizes = timed("llama-3.1-8b", "llama", 2, terms, 1, 4096)
    assert took == min(every.values())
    assert sizes == [17, 15]


def test_longer_rows_make_the_loss_a_smaller_part():
    def last(tokens):
        terms = ["pp=4", "stages=balanced", f"stages_seq={tokens}"]
        return timed("llama-3.1-8b", "llama", 8, terms, 1, tokens)[1][-1]

    assert last(4096) < last(131072) <= 8


def test_the_reason_is_that_of_the_layers(tmp_path, monkeypatch):
    """Beside a warning of the checks, which is about something else."""

    def unknown(_facts, sink, _job):
        sink.warning("PL703", "what the model's layers keep is unknown: it reads values")

    monkeypatch.setattr(kept_tensors, "count", unknown)
    plan = tmp_path / "own.plan"
    plan.write_text(
        'plan own for llama\nextend "llama.plan"\n'
        "optimizer {\n    root : adamw\n    $final_norm : muon\n}\n"
    )
    sink = Sink()
    terms = ["pp=2", "stages=balanced"]
    compile_plan("llama-3.1-8b", str(plan), sink, world_size=8, settings=terms)
    found = {d.code: d.message for d in sink}
    assert "PL579" in found
    assert found["PL564"] == "stages cannot be cut by time: it reads values"
