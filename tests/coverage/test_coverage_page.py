"""docs/generated/coverage.md is made of rows; what two ranks found judges transformers' own."""

import json
import subprocess
import sys
from typing import get_args

import axes_table
import family_rows
import options
import pytest
import theirs
from folders import ROOT

from planc.diagnostics.diagnostic import Sink
from planc.elaborate.settings import SETTINGS
from planc.ops.pipeline import Schedule
from planc.syntax import plan_files

PLANNED = {"plan": {"lm_head": "colwise"}}
GOOD = {**PLANNED, "logits": 1e-6, "loss": 0.0, "gradient": 2e-6, "off": {}, "weights": 0.0}


@pytest.mark.parametrize(
    ("ranks", "verdict", "told"),
    [
        ([{"plan": {}}, {"plan": {}}], "none", ""),
        ([GOOD, GOOD], "right", ""),
        ([GOOD, {**GOOD, "gradient": 0.5, "off": {"norm": 0.5}}], "wrong", "gradients"),
        ([{**GOOD, "logits": float("nan")}, GOOD], "wrong", "logits"),
        ([GOOD, {**PLANNED, "stage": "training", "error": "E"}], "crash", "training: E"),
        ([{**PLANNED, "stage": "one process", "error": "E"}] * 2, "unbuilt", "E"),
    ],
)
def test_one_rank_that_is_off_is_enough(ranks, verdict, told):
    found, reason = theirs.judged(ranks)
    assert found == verdict and told in reason


def row(name, **more):
    errors = {"logits": 1e-6, "loss": 0.0, "gradient": 2e-6, "parameters": 0.0}
    found = {"type": name, "source": "init", "verdict": "proved", "reason": "", "flow": "proved"}
    return {**found, "share": 1.0, "kept": [], "errors": errors, **more}


def test_a_page_counts_and_tells_why(tmp_path):
    rows = [
        row("llama", source="shipped", plan="llama", errorssp={"logits": 1e-6, "gradient": 3e-6}),
        row(
            "mixtral",
            experts={"share": 1.0, "styles": ["experts"]},
            inputs={"padding": True, "uneven": False},
            training="no dropout",
        ),
        row(
            "dbrx",
            share=0.1,
            kept=[["mlp (DbrxExpertGLU)", 0.9]],
            experts={"share": 0.0},
            inputs={"padding": True, "uneven": True},
            training="yes",
        ),
        row("gemma4_assistant", verdict="", reason="StrictDataclassError"),
        row("nothere", verdict="", reason="can't be built: no | such class"),
    ]
    own = [
        {"type": "llama", "verdict": "right", "split": 1.0},
        {"type": "mixtral", "verdict": "wrong", "reason": "", **GOOD, "gradient": 0.5},
        {"type": "dbrx", "verdict": "right", "split": 0.0},
        {"type": "gemma4_assistant", "verdict": "none"},
    ]
    (tmp_path / "theirs").mkdir()
    for found, folder in [(rows, tmp_path), (own, tmp_path / "theirs")]:
        for one in found:
            (folder / f"{one['type']}.json").write_text(json.dumps(one))
    words = [sys.executable, "tests/coverage/page.py", "--folder", str(tmp_path)]
    text = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    page = " ".join(text.split())
    assert "Of 5 types, 4 can be built; **3 are proved** (1 with a plan that ships), 2 of" in page
    assert "2 are mixtures of experts; 1 of those run with every expert split" in page
    assert "Of 4 types, 3 have a plan of their own: **2 train right** (1 of them without" in page
    assert "**1 are silently wrong** (mixtral). planc's plan is right for 1 of those 1" in page
    assert "| llama | [llama](../../plans/llama.plan) | 100% |  | proved | 1e-06 |" in text
    assert "| mixtral | wrong gradient, off by 50% |" in text and "| **wrong** |" in text
    assert "| dbrx | 10% | `mlp (DbrxExpertGLU)` 90% | the weights of all experts" in text
    assert "| gemma4_assistant | a drafter: its forward takes" in text
    # a family that has not been run since there is a column is never counted as run
    assert "| 3e-06 | not run | not run | not run | right, 100% |" in text
    assert "|  | yes | means | no dropout | **wrong** |" in text
    assert "|  | yes | yes | yes | right, splits no block |" in text
    assert "of the 2 families that were run since" in page and "2 ran with padding" in page
    assert "1 with labels that are ignored unevenly" in page and "and 1 in training mode" in page
    assert "| nothere | can't be built: no / such class |" in text


def test_processes_are_asked_of_what_threads_have_proved():
    proved = {"verdict": "proved", "worst": 1e-6}
    wrong = {"verdict": "refuted", "code": "PL520", "reason": "errors: gradient 0.5"}
    rows = [
        {"type": "llama", "all": proved, "processes": {**proved, "worst": 3e-6}},
        {"type": "mixtral", "all": proved, "processes": wrong},
        {"type": "bloom", "all": proved},
        {"type": "rwkv", "all": {"verdict": "refused", "code": "PL503", "reason": "RwkvModel no"}},
    ]
    text = axes_table.section(rows)
    assert "| the same, eight gloo processes | 1 | 0 | 1 | 0 | 1 |" in text
    assert "| llama | not run | not run | not run | not run | not run | 1e-06 | 3e-06 |" in text
    assert "| 1e-06 | **PL520** |" in text and "| 1e-06 | not run |" in text
    assert "| rwkv | not run | not run | not run | not run | not run | PL503 |  |" in text


def test_a_row_without_a_column_is_made_again(tmp_path):
    def kept(**more):
        path = tmp_path / "row.json"
        path.write_text(json.dumps(row("llama", **more)))
        return path

    assert family_rows.settled(kept(training="no dropout"), failed=False)
    assert not family_rows.settled(kept(), failed=False)
    assert family_rows.settled(kept(verdict=""), failed=False)
    assert not family_rows.settled(kept(verdict=""), failed=True)


def test_the_family_s_own_dropout_comes_back_and_no_layer_is_skipped():
    own = {"attn_pdrop": 0.1, "layerdrop": 0.1, "n_embd": 768, "text": {"dropout": 0.2, "drop": 0}}
    small = {"attn_pdrop": 0.0, "layerdrop": 0.0, "n_embd": 64, "text": {"dropout": 0, "drop": 0}}
    assert family_rows.drawing(own, small) == {
        "attn_pdrop": 0.1,
        "layerdrop": 0.0,
        "n_embd": 64,
        "text": {"dropout": 0.2, "drop": 0},
    }


# Options of plans --------------------------------------------------------------------------------


def test_each_setting_is_tried_with_each_of_its_words():
    assert set(options.WAYS) == set(SETTINGS)
    tried = {one for ways in options.WAYS.values() for way in ways for one in way.split()}
    for word, ways in options.WAYS.items():
        assert all(f"{word}=" in way for way in ways), word
    for setting in SETTINGS.values():
        for value in setting.others:
            assert f"{setting.word}={str(value).lower()}" in tried
    schedules = {f"schedule={word}" for word in get_args(Schedule)}
    assert schedules - tried == {f"schedule={SETTINGS['schedule'].default}"}


def test_an_option_is_tried_with_one_data_rank_and_with_two():
    files = plan_files.read("internvl", Sink())
    columns = options.columns_of(files)
    assert {"tp=2 images=rows | 1", "tp=2 images=rows | 2"} <= {*columns}
    llama = options.columns_of(plan_files.read("llama", Sink()))
    assert not [column for column in llama if "images" in column]
    ways = ("tp=2 cp=2", "ep=2", "tp=2 ep=2 etp=2", "dp_replicate=2")
    assert [options.ranks_of(way, 2) for way in ways] == [8, 4, 8, 4]


def test_a_refuted_option_fails_the_target(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "models", lambda: {"llama-3.2-1b": "llama"})
    words = ["options.py", "--ways", "sequence=false", "--folder", str(tmp_path)]
    kept, way = tmp_path / "llama-3.2-1b.json", "tp=2 sequence=false"
    kept.write_text(
        json.dumps({f"{way} | 1": {"verdict": "refuted"}, f"{way} | 2": {"verdict": "refused"}})
    )
    monkeypatch.setattr(sys, "argv", words)
    assert options.main() == 1
    monkeypatch.setattr(sys, "argv", [*words, "--again", "refuted"])  # as planc check judges it
    assert options.main() == 0
    assert json.loads(kept.read_text())[f"{way} | 1"]["verdict"] == "proved"
