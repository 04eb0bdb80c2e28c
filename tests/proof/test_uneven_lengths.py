"""Lengths that the tensor axis does not divide: right numbers, or refused when the batch comes."""

import copy

import pytest
import torch
from helpers import sampled, simulated
from test_own_module import Net

import planc
from planc.runtime.executor import apply_lowered
from planc.runtime.known_verdict import KnownVerdict
from planc.trial import batches
from planc.trial.thread_ranks import run_ranks

CASES = [
    ("llama-3.1-8b", "llama", 2, ("tp=2",)),
    ("phi-4", "phi3", 2, ("tp=2",)),
    ("llama-3.1-8b", "llama", 4, ("tp=2", "pp=2")),
    ("llama-3.1-8b", "adapted", 2, ("tp=2",)),
    ("mixtral-8x7b", "mixtral", 4, ("tp=4",)),
    ("gpt2", "gpt2", 4, ("tp=4",)),
]
ADAPTED = """plan adapted for llama

extend "llama"

adapters {
    model.layers.*.self_attn.{q,o}_proj : lora(rank = 4)
    model.layers.*.mlp.{gate,down}_proj : lora(rank = 4)
}
"""


@pytest.mark.parametrize(("model", "plan", "world", "settings"), sampled(CASES, 4))
def test_the_last_ranks_have_fewer_tokens(model, plan, world, settings, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    (tmp_path / "adapted.plan").write_text(ADAPTED)
    plan = str(tmp_path / "adapted.plan") if plan == "adapted" else plan
    lengths = []
    real = batches._uneven_length
    seen = lambda *given: lengths.append(real(*given)) or lengths[-1]  # noqa: E731
    monkeypatch.setattr(batches, "_uneven_length", seen)
    verdict, found = simulated(model, plan, settings, world=world)
    assert verdict.verdict == "proved", [d.message for d in found]
    assert lengths and lengths[0] % int(settings[0].removeprefix("tp="))
    kinds = {d.kind for d in verdict.outcome.discrepancies}
    assert "lengths" not in kinds and "PL516" not in [d.code for d in found]


LOCAL = """plan own for Net

mesh {
    tp = 2
}

tensor on tp {
    table : rowwise(-> shard(1))
    blocks.* {
        norm : sequence(local = true)
        up   : colwise(shard(1) -> shard(-1))
        down : rowwise(-> shard(1))
    }
    head : colwise(shard(1) -> replicate)
}
"""


def test_local_shards_are_right_for_lengths_that_divide(tmp_path):
    """The shards of 15 tokens do not say that they are of 15."""
    (tmp_path / "own.plan").write_text(LOCAL)
    found = planc.check(Net(), str(tmp_path / "own.plan"), world_size=2)
    [one] = [d for d in found if d.severity != "info" and d.code != "PL414"]
    assert (one.code, one.severity) == ("PL516", "warning")
    assert "tp is 2" in one.labels[0].text


@pytest.mark.parametrize(("length", "even"), [(16, True), (15, True), (15, False)])
def test_a_batch_of_another_length_is_refused_where_the_proof_says_so(length, even, tmp_path):
    text = LOCAL.replace("-> shard(1))", "-> shard(1), local = false)")
    (tmp_path / "own.plan").write_text(text.replace("sequence(local = true)", "sequence"))
    torch.manual_seed(0)
    models, raised = [copy.deepcopy(Net()) for _ in range(2)], []
    lowered = planc.lower(models[0], str(tmp_path / "own.plan"), world_size=2)
    known = KnownVerdict(level="proved", text="proved", even=even)

    def rank(number):
        apply_lowered(models[number], lowered, digest="", device_type="cpu", known=known)
        try:
            models[number](torch.ones(2, length, dtype=torch.int64))
        except planc.PlanError as error:
            raised.extend(d.code for d in error.diagnostics)

    failure = run_ranks(2, rank, seconds=60)
    assert failure is None, failure.message
    assert raised == (["PL516"] * 2 if even and length == 15 else [])
