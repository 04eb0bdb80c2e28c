"""The script of docs/training.md, unchanged under plans of every axis, with threads as ranks."""

import re
import sys
from pathlib import Path

import pytest
import torch

from planc.trial.random_numbers import RankRandom
from planc.trial.thread_ranks import run_ranks

ROOT = Path(__file__).parent.parent
SCRIPT = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.S)[1]
LONG = """plan long for llama

extend "llama"

override mesh {
    when pipeline_stages > 1 {
        pp = pipeline_stages
    }
    dp_shard = auto
    cp       = 2
    tp       = 1
}

context on cp {
    attention = all_gather
}

override fsdp on dp_shard * cp {
    precision(param = fp32, reduce = fp32)
    model.layers.* : unit
    root           : unit
}
"""
PLANS = {
    "fsdp": (2, "llama", []),
    "hsdp": (4, "llama", ["dp_replicate=2"]),
    "tp": (4, "llama", ["tp=2"]),
    "pp": (2, "llama", ["pipeline_stages=2", "microbatches=4"]),
    "pp and fsdp": (4, "llama", ["pipeline_stages=2", "microbatches=2"]),
    "pp and tp": (4, "llama", ["pipeline_stages=2", "tp=2", "microbatches=8"]),
    "zbv": (2, "llama", ["pipeline_stages=2", "microbatches=4", "pipeline_schedule=zbv"]),
    "loss on tp": (4, "llama", ["pipeline_stages=2", "tp=2", "microbatches=2", "loss_chunks=2"]),
    "pp, tp and fsdp": (8, "llama", ["pipeline_stages=2", "tp=2", "microbatches=2"]),
    "cp": (2, "long.plan", []),
    "cp, tp and fsdp": (8, "long.plan", ["tp=2"]),
    "pp and cp": (4, "long.plan", ["pipeline_stages=2", "microbatches=2"]),
}
MIXTURES = {
    "ep": (2, "mixtral", ["ep=2"]),
    "ep and tp": (4, "mixtral", ["ep=4", "tp=2"]),
    "ep and pp": (4, "mixtral", ["ep=2", "pipeline_stages=2", "microbatches=2"]),
}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def saved(folder, kind, **more):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


@pytest.fixture
def trained(tmp_path, monkeypatch, capsys):
    """Runs the script: (loss, norm) of three steps, and the weights that it exports."""
    from safetensors.torch import load_file

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.plan").write_text(LONG)

    def run(name, ranks, plan, settings, weights):
        precise = [] if plan.endswith(".plan") else ["param_dtype=fp32"]
        given = [part for text in [*precise, *settings] for part in ("--set", text)]
        folder = tmp_path / name
        where = ["--save", str(folder / "last"), "--steps", "3"]
        monkeypatch.setattr(sys, "argv", ["train.py", str(weights), plan, *where, *given])
        code = compile(SCRIPT, "train.py", "exec")

        def rank(_):
            with RankRandom():
                exec(code, {"__name__": "__main__"})

        failure = run_ranks(ranks, rank, seconds=300)
        assert failure is None, failure and (name, failure.message, failure.error)
        printed = capsys.readouterr().out
        lines = re.findall(r"^step \d, loss ([\d.]+), norm ([\d.]+)$", printed, re.M)
        steps = [[*map(float, line)] for line in lines]
        return steps, load_file(folder / "export" / "model.safetensors")

    return run


def same(trained, plans, weights, alone):
    steps, right = trained("one rank", 1, alone, [], weights)
    assert len(steps) == 3
    for name, (ranks, plan, settings) in plans.items():
        found, tensors = trained(name, ranks, plan, settings, weights)
        assert found == [pytest.approx(line, rel=1e-4) for line in steps], name
        assert tensors.keys() == right.keys(), name
        for key, value in right.items():
            torch.testing.assert_close(tensors[key], value, rtol=1e-3, atol=2e-5)


def test_the_script_trains_the_same_under_every_plan(trained, tmp_path):
    same(trained, PLANS, saved(tmp_path / "weights", "Llama"), "llama")


def test_the_script_trains_mixtures_the_same(trained, tmp_path):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    same(trained, MIXTURES, saved(tmp_path / "weights", "Mixtral", **experts), "mixtral")


def test_ranks_of_a_context_axis_that_read_different_rows_stop(tmp_path, monkeypatch):
    """On every rank, before the model runs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import planc

    (tmp_path / "long.plan").write_text(LONG)
    monkeypatch.chdir(tmp_path)
    models = [LlamaForCausalLM(LlamaConfig(**SIZES)) for _ in range(2)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    raised = {}

    def rank(number):
        run = planc.apply(models[number], "long.plan", device_type="cpu")
        tokens = torch.full((2, 16), number)
        try:
            run.forward_backward([{"input_ids": tokens, "labels": tokens}])
        except planc.PlanError as error:
            raised[number] = [d.code for d in error.diagnostics]

    assert run_ranks(2, rank, seconds=60) is None
    assert raised == {0: ["PL545"], 1: ["PL545"]}
