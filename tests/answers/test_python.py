"""The Python API: what each function takes, and that `print` shows what the terminal does."""

import json
import logging
from pathlib import Path

import pytest
import torch
from console import call
from modelfolder import BROKEN_QWEN3, QWEN3
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

import planc
from planc.model import cache
from planc.ops.document import digest

RUN = ("model", "qwen3", "--world-size", "4", "--set", "tp=2")
SETTINGS = {"world_size": 4, "overrides": {"tp": 2}}


@pytest.fixture
def folder(home, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text(json.dumps(QWEN3))
    (home / "broken.plan").write_text(BROKEN_QWEN3)
    return home


def terminal(*words):
    """What a command prints on standard output."""
    return call(*words)[1].rstrip("\n")


def test_what_is_exported_is_there():
    assert [name for name in planc.__all__ if not hasattr(planc, name)] == []
    assert {planc.init, planc.why, planc.estimate, planc.verify} <= {
        getattr(planc, name) for name in planc.__all__
    }
    with pytest.raises(AttributeError, match="no attribute 'verfy'"):
        planc.verfy  # noqa: B018


def test_the_package_of_estimates_does_not_hide_the_function():
    from planc.tools.estimate import memory

    assert callable(planc.estimate) and memory.GIB == 2**30


def test_findings_print_as_check_does(folder):
    found = planc.check("model", "qwen3", **SETTINGS)
    assert str(found) == terminal("check", *RUN)
    assert "layout flow (proved" in str(found)
    wrong = planc.check(Path("model"), Path("broken.plan"), **SETTINGS)
    assert "PL502" in {d.code for d in wrong}
    assert str(wrong) == terminal("check", "model", "broken.plan", *RUN[2:])
    assert tuple(wrong) == wrong and wrong[:0] == ()
    structure = planc.check(Path("model"), Path("broken.plan"), level="structure", **SETTINGS)
    assert "PL502" not in {d.code for d in structure}
    with pytest.raises(ValueError, match="level"):
        planc.check("model", "qwen3", level="deep")


def test_lowered_plans_and_diffs_print_as_the_commands_do(folder):
    plain = planc.lower("model", "qwen3", **SETTINGS)
    assert str(plain) == terminal("lower", *RUN)
    other = planc.lower("model", "qwen3", world_size=4, overrides=["tp=2", "recompute=false"])
    new = ("--new-set", "recompute=false")
    assert str(planc.diff(plain, other)) == terminal("diff", *RUN, *new)
    assert str(planc.diff(plain, plain)) == "No changes."


def test_why_prints_as_the_command_does(folder):
    name = "model.layers.0.self_attn.q_proj.weight"
    found = planc.why("model", "qwen3", name, **SETTINGS)
    assert str(found) == terminal("why", *RUN, name)
    assert found.tensor[0].place.endswith(".plan:62") or found.tensor
    with pytest.raises(planc.PlanError, match="PL130"):
        planc.why("model", "qwen3", "model.layers.0.lost", **SETTINGS)
    with pytest.raises(planc.PlanError, match="PL006"):
        planc.why("model", "lost", name, **SETTINGS)


def test_an_estimate_prints_as_the_command_does(folder):
    found = planc.estimate("model", "qwen3", batch=8, seq=128, **SETTINGS)
    assert str(found) == terminal("estimate", *RUN, "--batch", "8", "--seq", "128")
    assert found.estimate.fits and found.estimate.time.seconds > 0
    big = planc.estimate("llama-3.1-8b", "llama", world_size=1, batch=1, seq=128)
    assert not big.estimate.fits and "PL704" in {d.code for d in big.findings}
    with pytest.raises(planc.PlanError, match="PL702"):
        planc.estimate("model", "qwen3", batch=3, seq=128, **SETTINGS)
    with pytest.raises(planc.PlanError, match="PL700"):
        planc.estimate("model", "qwen3", batch=8, seq=128, hardware="abacus", **SETTINGS)
    Path("l.json").write_text(call("lower", *RUN, "--format", "json")[1])
    with pytest.raises(planc.PlanError, match="PL705"):
        planc.estimate("model", "l.json", batch=8, seq=128)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0, "seq": 8}, "batch is a positive number, not 0"),
        ({"batch": 8, "seq": "8"}, "seq is a positive number, not '8'"),
        ({"batch": 8, "seq": 8, "optimizer": "lion"}, "optimizer is one of adamw, .*, not 'lion'"),
        ({"batch": 8, "seq": 8, "attention": "x"}, "attention is one of sdpa, eager, not 'x'"),
    ],
)
def test_an_estimate_of_nothing(folder, arguments, message):
    with pytest.raises(ValueError, match=message):
        planc.estimate("model", "qwen3", **arguments, **SETTINGS)


def test_init_prints_as_the_command_does(folder):
    made = planc.init("model")
    assert str(made) == terminal("init", "model") and made.outcome.verdict == "proved"
    assert made.text.startswith("#") or made.text.startswith("plan")
    with pytest.raises(planc.PlanError, match="PL106"):
        planc.init("model", overrides={"tp": 2})
    with pytest.raises(planc.PlanError, match=r"PL600"):
        planc.init("lost")


def test_verify_prints_as_the_command_does(folder, monkeypatch):
    """The processes are those of the command: tests/simulate/test_verify.py runs them."""
    from planc.proof import verify

    ran = []

    def proved(model, plan, sink, **options):
        ran.append((model, plan, options))
        return verify.Proof(verdict="verified", certificate=CERTIFICATE)

    monkeypatch.setattr(verify, "verify", proved)
    found = planc.verify(Path("model"), "qwen3", processes=2, **SETTINGS)
    assert str(found) == terminal("verify", *RUN, "--processes", "2")
    assert "Verified on 2 processes" in str(found) and found.verdict == "verified"
    api, command = ran
    assert api == command and api[:2] == ("model", "qwen3")


CERTIFICATE = {
    "verdict": "verified",
    "reason": None,
    "plan": "qwen3",
    "model": "Qwen3ForCausalLM",
    "lowered": "0" * 64,
    "processes": 2,
    "small": None,
    "seeds": [0],
    "limits": dict.fromkeys(("logits", "loss", "gradients", "parameters"), 1e-4),
    "errors": dict.fromkeys(("logits", "loss", "gradients", "parameters"), 1e-7),
    "worst": None,
    "first": None,
    "checks": [],
    "not_reached": [],
    "left_out": [],
    "seconds": 1.0,
}


def test_verify_without_an_answer_raises(folder):
    with pytest.raises(planc.PlanError, match="PL006"):
        planc.verify("model", "lost", world_size=2)
    with pytest.raises(TypeError, match="the name of a model, not Linear"):
        planc.verify(torch.nn.Linear(2, 2), "qwen3")


@pytest.mark.parametrize(
    "overrides", ["tp=2", ["tp=2"], ("tp=2",), {"tp": 2}, {"tp": "2"}, iter(["tp=2"])]
)
def test_overrides_are_texts_or_a_mapping(folder, overrides):
    wanted = planc.lower("model", "qwen3", world_size=4, overrides=["tp=2"])
    assert planc.lower(Path("model"), "qwen3", world_size=4, overrides=overrides) == wanted


def test_a_truth_value_is_written_as_a_plan_writes_it(folder):
    one = planc.lower("model", "qwen3", world_size=4, overrides={"recompute": False})
    assert one == planc.lower("model", "qwen3", world_size=4, overrides="recompute=false")


@pytest.mark.parametrize(
    ("model", "plan", "more", "message"),
    [
        ("model", "qwen3", {"overrides": 5}, "overrides are texts `name=value`, or a mapping"),
        ("model", "qwen3", {"overrides": [5]}, r"or a mapping, not \[5\]"),
        ("model", "qwen3", {"overrides": b"tp=2"}, "overrides are texts"),
        ("model", "qwen3", {"world_size": "4"}, "world_size is a number of ranks, not '4'"),
        ("model", "qwen3", {"world_size": True}, "world_size is a number of ranks, not True"),
        ("model", 5, {}, "a plan is a path or a name, not int"),
        ("model", "plan a for b\n", {}, "a plan is a path or a name, not the text of a plan"),
        (5, "qwen3", {}, "a model is a folder, a name, or an nn.Module, not int"),
        (None, "qwen3", {}, "nn.Module, not NoneType"),
    ],
)
@pytest.mark.parametrize("function", [planc.check, planc.lower])
def test_other_types_are_clear_errors(folder, function, model, plan, more, message):
    with pytest.raises(TypeError, match=message):
        function(model, plan, **more)


def test_a_lowered_plan_in_the_place_of_a_plan(folder):
    lowered = planc.lower("model", "qwen3", **SETTINGS)
    with pytest.raises(TypeError, match="a plan is a path or a name, not Lowered"):
        planc.check("model", lowered)


def test_a_name_in_the_place_of_a_lowered_plan_or_a_module():
    with pytest.raises(TypeError, match=r"as `planc\.lower` gives them, not str"):
        planc.diff("llama", "qwen3")
    with pytest.raises(TypeError, match=r"apply takes an nn\.Module, not str"):
        planc.apply("llama-3.1-8b", "llama")


def test_sizes_that_are_none_are_refused(folder):
    with pytest.raises(ValueError, match="batch is a positive number, not True"):
        planc.estimate("model", "qwen3", batch=True, seq=8)
    with pytest.raises(ValueError, match="timeout is a positive number of seconds, not -1"):
        planc.verify("model", "qwen3", timeout=-1)


def test_several_overrides_in_one_text(folder):
    with pytest.raises(planc.PlanError, match="each setting is a text of its own"):
        planc.lower("model", "qwen3", world_size=4, overrides="tp=2,dp_replicate=2")


def test_a_summary_is_json_for_trackers(folder, caplog):
    planc.check("model", "qwen3", **SETTINGS)
    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model"))
        with caplog.at_level(logging.INFO, logger="planc"):
            run = planc.apply(model, "qwen3", overrides={"tp": 2}, device_type="cpu")
    finally:
        distributed.destroy_process_group()
    found = json.loads(json.dumps(run.summary()))
    assert found == run.summary()
    lowered = planc.lower(model_like(), "qwen3", **SETTINGS)
    assert found["digest"] == run.digest == digest(lowered)
    assert found["plan"] == "qwen3" and len(found["plan_digest"]) == 64
    assert found["mesh"] == {"dp_replicate": 1, "dp_shard": 2, "tp": 2}
    assert found["sets"] == {"tp": "2"} and found["world_size"] == 4
    assert found["verdict"] == "proved" and found["model"] == "Qwen3ForCausalLM"
    assert found["versions"] == {"planc": planc.__version__, **cache.versions({})}
    assert str(run) == run.describe().rstrip()


def model_like():
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("model"))


def test_a_model_and_a_plan_in_the_wrong_order(folder):
    """The API says what the commands say, not that there is no model `qwen3`."""
    wrong = "qwen3", "model"
    assert str(planc.check(*wrong)) == terminal("check", *wrong)
    for ask in (planc.lower, planc.verify, lambda *names: planc.why(*names, "lm_head")):
        with pytest.raises(planc.PlanError, match=r"PL600.*MODEL comes before PLAN") as caught:
            ask(*wrong)
        assert [d.code for d in caught.value.diagnostics] == ["PL600"]
    with pytest.raises(planc.PlanError, match=r"PL006.*in the place of a plan"):
        planc.lower("model", "model")
    document = json.loads(call("verify", *wrong, "--format", "json")[1])
    assert document["verdict"] == "unknown" and document["certificate"] is None
    assert [d["code"] for d in document["diagnostics"]] == ["PL600"]


def test_answers_have_the_findings_that_commands_print(folder, monkeypatch):
    monkeypatch.setattr("planc.tools.suggest.measured.count", lambda *_, **__: ())  # runs ranks
    Path("mine.plan").write_text(WITH_A_WARNING)
    known = planc.lower("model", "mine.plan", **SETTINGS).findings
    assert codes(known) == ["PL104"]
    why = planc.why("model", "mine.plan", "lm_head", **SETTINGS)
    assert codes(why.findings) == codes(known)
    step = planc.measure("model", "mine.plan", batch=8, seq=128, **SETTINGS)
    assert codes(step.answer.findings) == codes(known)
    printed = call("why", "model", "mine.plan", *RUN[2:], "lm_head")[2]
    assert [code for code in codes(known) if code not in printed] == []


def codes(findings):
    return [d.code for d in findings if d.severity != "info"]


WITH_A_WARNING = """plan mine for qwen3

extend "qwen3"

option unused = 1
"""


def test_fewer_layers_of_a_plan_with_errors(folder):
    """PL727, that one rank cannot run it, is no second error of a plan that is wrong."""
    Path("mine.plan").write_text('plan mine for qwen3\n\nextend "lost"\n')
    with pytest.raises(planc.PlanError) as caught:
        planc.measure("model", "mine.plan", batch=8, seq=128, layers=1, **SETTINGS)
    assert [d.code for d in caught.value.diagnostics] == ["PL006"]


def test_the_name_of_a_plan_with_a_line_break():
    """In a script it is the text of a plan by mistake; on a command line a name like any other."""
    with pytest.raises(TypeError, match="not the text of a plan"):
        planc.lower("llama-3.1-8b", "plan a\n")
    code, _, errors = call("lower", "llama-3.1-8b", "plan a\n")
    assert code == 2 and "PL006" in errors
