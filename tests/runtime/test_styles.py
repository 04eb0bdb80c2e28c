"""The styles that torch does not have train what one process trains, and keep their weights."""

import pytest
import torch
import toy_model
from test_script import well_made
from torch.distributed.checkpoint import FileSystemReader

import planc
from planc.emit.python.script import render

pytestmark = pytest.mark.slow

LIMIT = 1e-4


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "toy_model.plan"
    path.write_text(toy_model.PLAN)
    return path


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("script", [False, True])
def test_every_style(four, plan, tp, script):
    overrides = [f"tp={tp}"]
    for result in four.run("toy_model.compare", plan=str(plan), overrides=overrides, script=script):
        assert result["kept"], "the whole weights are not in the model's order"
        wrong = {n: e for n, e in result["errors"].items() if not e < LIMIT}
        assert not wrong


def test_the_script_carries_what_it_needs(plan, monkeypatch):
    monkeypatch.chdir(plan.parent)
    lowered = planc.lower(toy_model.made(), plan.name, world_size=4, overrides=["tp=2"])
    source = render(lowered, digest="0" * 64)
    well_made(source)
    plain = planc.lower("llama-3.1-8b", "llama", world_size=4, overrides=["tp=2"])
    needless = render(plain, digest="0" * 64)
    for name in (
        "PackedParallel",
        "TransposedParallel",
        "SummedGradient",
        "RotaryGradient",
        "FeaturesParallel",
        "DividedAttributes",
    ):
        assert source.count(f"class {name}(") == 1
        assert name not in needless


WRONG = [  # (what the plan says, what it is to say, a gradient that then is wrong)
    ("gate     : replicate(gradient = sum)", "gate     : replicate", "blocks.0.gate.0.weight"),
    ("latent   : mla_kv(rope = 4)", "latent   : replicate", "blocks.1.latent.weight"),
    ("attn              : attributes(heads = split)", "", "blocks.0.attn.to_q.weight"),
    ("colwise(parts = [16, 8, 8])", "colwise(parts = 4)", "blocks.0.qkv.weight"),
    ("down_bias = partial", "down_bias = replicate", "loss"),
    ("two      : colwise(parts = 2)", "two      : colwise", "blocks.0.two.weight"),
]


@pytest.mark.parametrize(("right", "wrong", "where"), WRONG)
def test_each_can_be_wrong(four, plan, right, wrong, where):
    """So the test above would see it."""
    assert right in toy_model.PLAN
    plan.write_text(toy_model.PLAN.replace(right, wrong))
    results = four.run("toy_model.compare", plan=str(plan), overrides=["tp=2"])
    assert all(r["errors"][where] > 100 * LIMIT for r in results)


@pytest.mark.parametrize(("old", "new"), [(2, 1), (1, 2), (2, 4)])
def test_another_plan_goes_on(four, plan, tmp_path, old, new):
    results = four.run(
        "toy_model.resume",
        plan=str(plan),
        old=[f"tp={old}"],
        new=[f"tp={new}"],
        folder=str(tmp_path),
    )
    stored = FileSystemReader(tmp_path / "run").read_metadata().state_dict_metadata
    fused = stored["model.blocks.0.two.weight"]
    assert fused.size == torch.Size([48, 16])
    assert len(fused.chunks) > 1, "a rank held the whole tensor to save it"
    for result in results:
        assert result["equal"], "the weights changed on the way"
        assert result["losses"] == pytest.approx(result["right"], rel=1e-5)
        assert result["losses"][2] != pytest.approx(result["losses"][1], rel=1e-4)
