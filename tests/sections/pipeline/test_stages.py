"""Pipelines on real processes: the page's script saves, resumes and exports, and `planc verify`."""

import json

import pytest
from loop_plans import ROWS, SCRIPT
from test_pipeline_values import FIELDS, PLAN
from test_saving import script
from test_schedule_files import TEXT, of_torch
from transformers import AutoConfig

from planc.cli import main

pytestmark = pytest.mark.slow

STAGES = ["--set", "pp=2", "--set", "microbatches=4"]


@pytest.mark.parametrize(("first", "then"), [(STAGES, []), ([], STAGES)], ids=["from", "to"])
def test_a_run_goes_on_with_other_stages(tmp_path, first, then):
    from numerics import build
    from safetensors.torch import load_file

    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "rows.py").write_text(ROWS)
    build("llama", vocab_size=256).save_pretrained(tmp_path / "weights")
    fp32 = ["--set", "param_dtype=fp32"]
    whole = script(tmp_path, "one", "--steps", "12", *fp32)
    begun = script(tmp_path, "two", "--steps", "10", *fp32, *first)
    ended = script(tmp_path, "two", "--steps", "12", *fp32, *then)
    for column in (1, 2):
        found = [line[column] for line in begun + ended]
        assert found == pytest.approx([line[column] for line in whole], rel=1e-3)
    exports = [load_file(tmp_path / run / "export" / "model.safetensors") for run in ("one", "two")]
    assert exports[0].keys() == exports[1].keys()
    for name, right in exports[0].items():
        assert float((exports[1][name] - right).abs().max()) < 1e-3, name


@pytest.mark.parametrize(
    "settings",
    [
        ["pp=2"],
        ["pp=2", "tp=2"],
        ["pp=2", "schedule=zbv"],
        ["pp=4", "stages=work"],
        ["pp=2", "schedule=interleaved_1f1b", "tp=2", "loss_chunks=2"],
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.2-1b"])
def test_verify(model, settings, capsys):
    given = [part for text in settings for part in ("--set", text)]
    assert main(["verify", model, "llama", "--world-size", "4", *given]) == 0
    assert "Verified on 4 processes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "schedule"),
    [("zamba", "1f1b"), ("zaya", "1f1b"), ("gemma4_text", "interleaved_1f1b")],
)
def test_models_that_are_no_plain_list(tmp_path, capsys, family, schedule):
    """Blocks that share a module; states of routers; per-layer inputs, shared keys and values."""
    values = {**AutoConfig.for_model(family).to_dict(), **FIELDS.get(family, {})}
    (tmp_path / "config.json").write_text(json.dumps(values, default=str))
    given = dict(family=family, pp=2, schedule=schedule, blocks="model.layers", more="")
    text = PLAN.format(**given)
    (tmp_path / "t.plan").write_text(text)
    assert main(["verify", str(tmp_path), str(tmp_path / "t.plan"), "--world-size", "4"]) == 0
    assert "Verified on 4 processes" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble", "own"])
def test_a_schedule_file_from_a_file(tmp_path, capsys, name):
    """The last one runs its microbatches backward in reverse order, as none of torch's does."""
    each, rows = 1, "0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0\n1F0,1F1,1F2,1F3,1B3,1B2,1B1,1B0"
    if name != "own":
        each, rows = 2, of_torch(name, 2, 4, 2)
    (tmp_path / "schedule.csv").write_text(rows)
    (tmp_path / "t.plan").write_text(TEXT.format(ranks=2, micro=4, each=each))
    assert main(["verify", "llama-3.2-1b", str(tmp_path / "t.plan"), "--world-size", "4"]) == 0
    assert "Verified on 4 processes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "settings",
    [
        ["pp=2", "microbatches=2"],
        ["pp=2", "microbatches=2", "tp=2", "schedule=zbv"],
    ],
    ids=str,
)
def test_the_script_computes_the_same_bits(four, settings):
    results = four.run("stage_jobs.scripted", settings=[*settings, "param_dtype=fp32"])
    for gradients, _, unlike in results:
        assert gradients > 10
        assert unlike == []
    assert sum(losses for _, losses, _ in results) == 4
