"""The script of docs/training.md under plans that join axes, with threads as ranks.

tests/runtime/test_loop_on_processes.py runs it under all plans.
"""

import copy
import sys

import pytest
import torch
from loop_plans import (
    EXPERTS,
    LONG,
    MIXTURES,
    PLANS,
    ROWS,
    SCRIPT,
    SIZES,
    arguments,
    saved,
    steps_of,
    weights_of,
)

from planc.simulate.random_numbers import RankRandom
from planc.simulate.thread_ranks import run_ranks

JOINED = ("pp, tp and fsdp", "pp and cp", "loss on tp")


@pytest.fixture
def trained(tmp_path, monkeypatch, capsys):
    """Runs the script: (loss, norm) of three steps, and the weights that it exports."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.plan").write_text(LONG)
    (tmp_path / "rows.py").write_text(ROWS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rows", raising=False)

    def run(name, ranks, plan, settings, weights):
        monkeypatch.setattr(sys, "argv", arguments(tmp_path / name, plan, settings, weights))
        code = compile(SCRIPT, "train.py", "exec")

        def rank(_):
            with RankRandom():
                exec(code, {"__name__": "__main__"})

        failure = run_ranks(ranks, rank, seconds=300)
        assert failure is None, failure and (name, failure.message, failure.error)
        return steps_of(capsys.readouterr().out), weights_of(tmp_path / name)

    yield run
    sys.modules.pop("rows", None)


def same(trained, plans, weights, alone):
    steps, right = trained("one rank", 1, alone, [], weights)
    assert len(steps) == 3
    for name, (ranks, plan, settings) in plans.items():
        found, tensors = trained(name, ranks, plan, settings, weights)
        assert found == [pytest.approx(line, rel=1e-4) for line in steps], name
        assert tensors.keys() == right.keys(), name
        for key, value in right.items():
            torch.testing.assert_close(tensors[key], value, rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_the_script_trains_the_same_under_plans_that_join_axes(trained, tmp_path):
    plans = {name: PLANS[name] for name in JOINED}
    same(trained, plans, saved(tmp_path / "weights", "Llama"), "llama")


@pytest.mark.slow
def test_the_script_trains_a_mixture_the_same(trained, tmp_path):
    weights = saved(tmp_path / "weights", "Mixtral", **EXPERTS)
    same(trained, {"ep and tp": MIXTURES["ep and tp"]}, weights, "mixtral")


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


def test_a_rank_may_ask_alone_which_rows_it_reads(monkeypatch):
    """No mesh is created for it, whose process group would wait for the other ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import planc

    torch.manual_seed(0)
    models = [LlamaForCausalLM(LlamaConfig(**SIZES)) for _ in range(4)]
    models[1:] = [copy.deepcopy(models[0]) for _ in models[1:]]
    overrides, found = ["dp_replicate=2", "tp=1"], {}

    def created(*_):
        raise AssertionError("a mesh was asked for")

    def rank(number):
        run = planc.apply(
            models[number], "llama", overrides=overrides, device_type="cpu", compare=0
        )
        monkeypatch.setattr(run.meshes, "mesh_of", created)
        found[number] = run.data_rank, run.data_size

    assert run_ranks(4, rank, seconds=60) is None
    assert found == {number: (number, 4) for number in range(4)}
