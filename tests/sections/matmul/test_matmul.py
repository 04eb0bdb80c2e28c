"""The matmul section: which layers can have fp8 matmuls, and what a plan makes of it.

torchao is no part of the development environment: peft 0.18 does not run beside it. Where it is
installed, the proof with emulated products runs too, and so it does in `make fp8`.
"""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from console import call
from scale_faults import wrong_amax

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import PlanError, Sink
from planc.files.resources import GRAMMARS
from planc.ops.fsdp import FullyShard
from planc.sections.matmul.ops import LowPrecision, ScaleWeights
from planc.sections.matmul.proof import report_wrong
from planc.simulate.launcher import LIMITS, Comparison
from planc.simulate.trial_part import left_out, trial_part

LINEAR = "$blocks.{self_attn,mlp}.*_proj"
here = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


@pytest.fixture
def compiled(tmp_path):
    """Compiles a plan that extends a family's with a matmul section, and gives its findings."""

    def compile(rules, *sets, base="llama", model="llama-3.1-8b", more=""):
        plan = tmp_path / "mine.plan"
        section = f"matmul {{ {rules} }}" if rules else ""
        plan.write_text(f'plan mine for any\nextend "{base}"\n{section}\n{more}\n')
        sink = Sink()
        return compile_plan(model, str(plan), sink, world_size=8, settings=sets), sink

    return compile


def codes(sink):
    return {d.code for d in sink if d.severity != "info"}


def matmuls(made):
    ops = (op for op in made.lowered.ops if isinstance(op, LowPrecision))
    return {str(op.modules): (op.recipe, op.gather) for op in ops}


def test_later_rules_take_islands_out(compiled):
    made, sink = compiled(
        f"{LINEAR} : fp8\n"
        "override $blocks.mlp.down_proj : fp8(recipe = rowwise)\n"
        "override model.layers[0,-1].self_attn.*_proj : none",
        more="compile { $blocks : block }",
    )
    found = matmuls(made)
    assert not codes(sink)
    assert found["model.layers[0:32].mlp.down_proj"] == ("rowwise", False)
    assert found["model.layers[1:31].self_attn.q_proj"] == ("tensorwise", False)


def test_two_rules_conflict_without_override(compiled):
    _, sink = compiled(f"{LINEAR} : fp8\n$blocks.mlp.down_proj : mxfp8")
    assert "PL102" in codes(sink)


def test_the_order_is_convert_then_tensor_then_fsdp(compiled):
    made, _ = compiled(f"{LINEAR} : fp8(gather = fp8)", "tp=2")
    words = [*dict.fromkeys(op.WORD for op in made.lowered.ops)]
    wanted = ["matmul", "tensor", "checkpoint", "fsdp", "scales"]
    assert [word for word in words if word in wanted] == wanted
    assert made.lowered.has(ScaleWeights)


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ("lm_head : fp8", "PL622"),
        ("$blocks.mlp : fp8", "PL621"),
        ("$embedding : fp8", "PL621"),
        (f"{LINEAR} : fp8(recipe = rowwise, gather = fp8)", "PL625"),
        (f"{LINEAR} : mxfp8", "PL626"),
        (
            "$blocks.mlp.up_proj : fp8(gather = fp8)\n"
            "$blocks.mlp.down_proj : fp8(recipe = rowwise)",
            "PL625",
        ),
        (f"{LINEAR} : fp8(recipe = blockwise)", "PL012"),
        (f"{LINEAR} : mxfp8(recipe = rowwise)", "PL012"),
    ],
)
def test_refused(rules, code, compiled):
    assert code in codes(compiled(rules, "tp=2")[1])


def test_a_scale_of_a_part_of_the_tokens_is_refused(compiled):
    assert "PL626" in codes(compiled(f"{LINEAR} : fp8", "cp=2")[1])
    assert "PL626" not in codes(compiled(f"{LINEAR} : fp8(recipe = rowwise)", "cp=2")[1])


def test_gathering_in_fp8_has_no_stages(compiled):
    assert "PL625" in codes(compiled(f"{LINEAR} : fp8(gather = fp8)", "pp=2")[1])


def test_routers_and_experts_stay(compiled):
    _, sink = compiled(
        "$experts : fp8\n$blocks.mlp.gate : fp8", base="qwen3_moe", model="qwen3-30b-a3b"
    )
    assert codes(sink) == {"PL621"}


def test_adapted_and_tied_layers_stay(compiled):
    more = "adapters { $blocks.self_attn.q_proj : lora(rank = 8) }"
    assert "PL622" in codes(compiled("$blocks.self_attn.q_proj : fp8", more=more)[1])
    assert "PL622" not in codes(compiled("$blocks.self_attn.o_proj : fp8", more=more)[1])
    _, sink = compiled("lm_head : fp8", model="qwen2.5-0.5b")
    assert "PL622" in codes(sink)


@pytest.mark.parametrize(("width", "wrong"), [(14336, False), (14336 + 16, True)])
def test_features_on_a_rank(width, wrong, compiled, tmp_path):
    config = json.loads(Path("plans/models/llama-3.1-8b.json").read_text())
    model = tmp_path / "config.json"
    model.write_text(json.dumps({**config, "intermediate_size": width}))
    _, sink = compiled("$blocks.mlp.*_proj : fp8", "tp=2", model=str(model))
    assert ("PL623" in codes(sink)) == wrong
    if wrong:
        (found,) = [d for d in sink if d.code == "PL623" and "down" in d.message]
        assert "7,176 input features" in found.message and "`override" in found.help


def test_compiled_or_said(compiled):
    assert "PL624" in codes(compiled(f"{LINEAR} : fp8")[1])
    assert "PL624" not in codes(compiled(f"{LINEAR} : fp8", more="compile { $blocks : block }")[1])


def test_float8_styles_of_torchao_cast_tensorwise(compiled):
    style = 'style theirs = python "torchao.float8.float8_tensor_parallel:Float8ColwiseParallel"'
    more = f"{style}\ntensor on tp {{ override $blocks.mlp.up_proj : theirs }}"
    assert "PL626" in codes(compiled(f"{LINEAR} : fp8(recipe = rowwise)", "tp=2", more=more)[1])


def test_a_trial_of_its_own(compiled, monkeypatch):
    made, _ = compiled(f"{LINEAR} : fp8(gather = fp8)", "tp=2")
    assert not trial_part(made.lowered).has(LowPrecision, ScaleWeights)
    eight = trial_part(made.lowered, section="matmul")
    assert all(op.emulate for op in eight.ops if isinstance(op, LowPrecision))
    plain, _ = compiled("", "tp=2")
    assert trial_part(made.lowered).stages == trial_part(plain.lowered).stages
    monkeypatch.setattr("planc.sections.matmul.ops.cache.version", lambda _: "none")
    assert dict(left_out(made.lowered))["matmul"].startswith("torchao is not installed")


def test_blocks_gather_what_their_own_recipes_leave(compiled):
    """Every byte against the sizes of llama-3.1-8b; four processes count them in `make fp8`."""
    islands = "override model.layers[3].mlp.*_proj : none"
    made, _ = compiled(f"{LINEAR} : fp8(gather = fp8)\n{islands}", "tp=2")
    units = {
        str(m): op for op in made.lowered.ops if isinstance(op, FullyShard) for m in op.members
    }
    mlp, attention, norms = 3 * 4096 * 14336 // 2, (2 * 4096 + 2 * 1024) * 4096 // 2, 2 * 4096
    alike, island = units["model.layers[0:3,4:31]"], units["model.layers[3]"]
    assert (alike.gathered, alike.saved) == (mlp + attention + 2 * norms, mlp + attention)
    assert (island.gathered, island.saved) == (2 * mlp + attention + 2 * norms, attention)


def test_without_torchao(compiled, monkeypatch):
    from planc.runtime.preconditions import require_packages

    made, _ = compiled(f"{LINEAR} : fp8")
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    monkeypatch.setitem(__import__("sys").modules, "torchao.float8", None)
    with pytest.raises(PlanError, match="PL627"):
        require_packages(made.lowered)
    require_packages(compiled("")[0].lowered)  # nothing to round, nothing to import


@pytest.mark.parametrize(("capability", "right"), [((8, 0), False), ((8, 9), True)])
def test_a_gpu_without_such_products(capability, right, compiled, monkeypatch):
    import torch

    from planc.sections.matmul.runtime import require

    made, _ = compiled(f"{LINEAR} : fp8")
    monkeypatch.setitem(__import__("sys").modules, "torchao", torch)
    monkeypatch.setitem(__import__("sys").modules, "torchao.float8", torch)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if right:
        require(made.lowered, "cuda")
        return
    with pytest.raises(PlanError, match=r"PL628.*8\.9"):
        require(made.lowered, "cuda")


def test_printed_and_answered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f'plan mine for llama\nextend "llama"\nmatmul {{ {LINEAR} : fp8(gather = fp8) }}\n'
    (tmp_path / "mine.plan").write_text(text)
    target = ("llama-3.1-8b", "mine.plan", "--world-size", "8", "--set", "tp=2")
    assert "fp8, tensorwise, gathered in fp8" in call("lower", *target)[1]
    script = call("lower", *target, "--format", "python")[1]
    assert "needs torchao and torch alone" in script and "def scale_before_forward" in script
    compile(script, "script", "exec")
    answer = call("why", *target[:2], "model.layers.3.mlp.up_proj", *target[2:])[1]
    assert "products in fp8, tensorwise" in answer and "mine.plan:3" in answer
    assert "published rates" in call("estimate", *target, "--batch", "8", "--seq", "512")[1]


def test_a_certificate_names_the_errors_of_the_section(compiled):
    kinds = ("logits", "loss", "gradients")
    plain = Comparison(errors=dict.fromkeys(LIMITS, 0.0), worst={}, first=None, seconds=1.0)
    limits = dict.fromkeys(kinds, LowPrecision.SIMULATION_LIMIT)
    rounded = replace(plain, errors=dict.fromkeys(kinds, 0.5), limits=limits)
    found = plain.with_section("matmul", rounded)
    assert plain.same and not found.same
    assert [kind for kind in found.limits if not found.within_limit(kind)] == ["matmul"]
    schema = json.loads((GRAMMARS / "certificate.schema.json").read_text())
    jsonschema.validate(found.errors, schema["$defs"]["errors"])
    made, sink = compiled(f"{LINEAR} : fp8")
    reason = report_wrong(found.errors["matmul"], made.plan, sink)
    assert reason == "fp8 matmuls differ from those of one process"
    [finding] = [d for d in sink if d.code == "PL629"]
    assert finding.labels[0].span.place.endswith("mine.plan:3")
    assert "5.0e-01 off" in finding.facts[0]


@here
@pytest.mark.parametrize("fault", ["right", "of a rank", "of data ranks too"])
def test_faults_of_the_largest_value(fault, compiled, monkeypatch):
    from torchao.float8 import float8_utils

    from planc.proof.small_case import small_case
    from planc.simulate.simulate import simulate

    made, _ = compiled(f"{LINEAR} : fp8", "tp=2")
    sizes = {"dp_replicate": 1, "dp_shard": 2, "tp": 2}
    small = small_case(made, sizes)
    monkeypatch.setattr(float8_utils, "tensor_to_amax", wrong_amax(fault))
    outcome = simulate(small.model.builder(), small.compiled.lowered, section="matmul")
    if fault == "right":
        assert outcome.verdict == "proved" and 0 < outcome.gradient < 1e-4
    else:
        assert outcome.verdict == "refuted" and outcome.gradient > 0.1
