"""`run.profile()` in one process; tests/runtime/test_run_profile.py runs it on processes."""

import json

import pytest
import torch
from folders import ROOT
from test_metrics import rows, small

import planc

pytestmark = pytest.mark.usefixtures("ends_its_group")

PLANS = ROOT / "plans"
COMPILED = """plan compiled for llama

extend "llama"

compile {
    $blocks : block
}
"""


def applied(**options):
    return planc.apply(small(), device_type="cpu", overrides=["param_dtype=fp32"], **options)


def steps(run, profile, count):
    for _ in range(count):
        run.forward_backward([rows(2, 16)])
        profile.step()


def names(path):
    events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def test_only_the_active_steps_are_in_the_trace(tmp_path):
    """And the user's own ranges; a module's in a checkpoint is there twice."""
    run = applied()
    with run.profile(tmp_path / "a" / "b", wait=1, warmup=1, active=2) as profile:
        for number in range(6):
            with torch.profiler.record_function(f"mine {number}"):
                steps(run, profile, 1)
    found = names(profile.path)
    assert profile.path == tmp_path / "a" / "b" / "rank_0.json"
    assert {n for n in found if n.startswith("mine")} >= {"mine 2", "mine 3"}
    assert {n for n in found if n.startswith("mine")} <= {"mine 2", "mine 3", "mine 4"}
    lines = (PLANS / "blocks.plan").read_text().splitlines()
    line = lines.index("        $blocks : full") + 1
    assert found.count(f"plans/blocks.plan:{line} model.layers.1 checkpoint") == 2 * 2
    assert found.count("plans/decoder.plan:23 model.embed_tokens fsdp") == 2


def test_a_trace_that_no_step_came_to_is_said(tmp_path, caplog):
    run = applied()
    with run.profile(tmp_path / "none") as profile:
        steps(run, profile, 1)
    assert not (tmp_path / "none").exists()
    assert "no trace was written: call its `step()` after each of 3 steps" in caplog.text


def test_an_error_inside_is_the_scripts_and_leaves_nothing(tmp_path):
    run, before = applied(), torch.nn.Module.__call__
    with (
        pytest.raises(KeyError, match="of the script"),
        run.profile(tmp_path, wait=0, warmup=0, active=1),
    ):
        raise KeyError("of the script")
    assert torch.nn.Module.__call__ is before
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.slow
def test_compiled_blocks_stay_compiled(tmp_path):
    """A mode would make torch run them eagerly."""
    (tmp_path / "compiled.plan").write_text(COMPILED)
    run = applied(plan=str(tmp_path / "compiled.plan"))
    run.forward_backward([rows(2, 16)])
    with run.profile(tmp_path, wait=0, warmup=0, active=1) as profile:
        steps(run, profile, 1)
    events = json.loads(profile.path.read_text())["traceEvents"]
    assert any("CompiledFunction" in event["name"] for event in events)
    assert "plans/decoder.plan:23 model.embed_tokens fsdp" in names(profile.path)


@pytest.mark.parametrize("wrong", [{"active": 0}, {"wait": -1}, {"ranks": "last"}])
def test_arguments(wrong):
    with pytest.raises(ValueError, match="no profile has steps"):
        applied().profile(**wrong)
