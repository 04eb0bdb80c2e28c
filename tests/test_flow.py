"""Layout flow: shipped plans are proved, mutants refuted at their line, the rest is unknown.

The simulation itself is held against real processes in `tests/dist/test_mutants.py`.
"""

import json
import subprocess
import sys

import pytest

from planc.diagnostic import Sink
from planc.driver import compile_plan
from planc.model import cache
from planc.proof.flow import flow
from planc.share import PLANS

SHIPPED = [
    ("llama-3.1-8b", "llama", 8),
    ("llama-3.2-1b", "llama", 8),
    ("mistral-7b-v0.3", "llama", 2),
    ("qwen2.5-7b", "llama", 4),
    ("qwen2.5-0.5b", "llama", 2),
    ("qwen3-8b", "qwen3", 8),
    ("phi-4", "phi3", 4),
]


def judged(model, plan, settings, strict=False):
    sink = Sink()
    compiled = compile_plan(model, str(plan), sink, world_size=64, settings=settings)
    assert compiled.lowered is not None, [d.message for d in sink]
    found = Sink()
    verdict = flow(compiled, str(plan), settings, found, strict=strict)
    return verdict, list(found)


@pytest.mark.parametrize("sequence_parallel", ["true", "false"])
@pytest.mark.parametrize(("model", "plan", "tp"), SHIPPED)
def test_shipped_plans_are_proved(model, plan, tp, sequence_parallel):
    settings = [f"tp={tp}", f"sequence_parallel={sequence_parallel}"]
    verdict, findings = judged(model, plan, settings)
    assert (verdict.verdict, findings) == ("proved", [])
    assert 0 < max(verdict.logits, verdict.gradient) < 1e-5


def test_a_gradient_that_is_0_is_not_wrong():
    """A key's bias does nothing behind a softmax; what its gradient has is rounding."""
    verdict, findings = judged("opt-1.3b", "opt", ["tp=2"])
    assert (verdict.verdict, findings) == ("proved", [])


def test_without_tensor_parallelism_there_is_nothing_to_follow():
    assert judged("llama-3.1-8b", "llama", [])[0].verdict == "nothing"
    assert judged("gpt2", "gpt2", [])[0].verdict == "nothing"


MUTANTS = [
    # (what is replaced, by what, code, the line that is marked)
    (
        "self_attn.o_proj   : rowwise(-> shard(1), local = false)",
        "self_attn.o_proj   : rowwise(-> partial, local = false)",
        None,  # a DTensor carries its open sum on, so the result is right
        "",
    ),
    (
        "self_attn.o_proj   : rowwise(-> shard(1), local = false)",
        "self_attn.o_proj   : rowwise(-> shard(1))",
        "PL503",
        "self_attn.o_proj",
    ),
    ("lm_head            : colwise(shard(1) -> replicate)", "", "PL503", ""),
    (
        "model.norm         : sequence",
        "model.norm         : sequence(dim = 0)",
        None,
        "",
    ),
    (
        "model.embed_tokens : rowwise(-> shard(1), local = false)",
        "model.embed_tokens : rowwise(-> shard(1))",
        "PL503",
        "",
    ),
]


@pytest.mark.parametrize(("old", "new", "code", "line"), MUTANTS)
def test_mutants(tmp_path, old, new, code, line):
    text = (PLANS / "llama.plan").read_text()
    assert old in text
    path = tmp_path / "mutant.plan"
    path.write_text(text.replace(old, new))
    verdict, findings = judged("llama-3.1-8b", path, ["tp=8"])
    if code is None:
        assert verdict.verdict == "proved", findings
        return
    assert verdict.verdict == "refuted" and findings[0].code == code, verdict
    if line:
        assert any(line in label.span.text for label in findings[0].labels)


def test_a_gradient_that_nothing_sums(tmp_path):
    """qwen3 without its rule for q_norm, past the structural check that would catch it first."""
    sink = Sink()
    settings = ["tp=2", "sequence_parallel=false"]
    compiled = compile_plan("qwen3-8b", "qwen3", sink, world_size=8, settings=settings)
    from dataclasses import replace

    from planc.model.real import Maker
    from planc.model.shrink import shrink
    from planc.runtime.flow import simulate

    values = shrink(compiled.facts.config, ranks=2)
    small = compile_plan_for(values, settings)
    kept = tuple(o for o in small.ops if not str(getattr(o, "modules", "")).endswith("q_norm"))
    maker = Maker({**values, "architectures": ["Qwen3ForCausalLM"]})
    outcome = simulate(lambda: maker.build(0), maker.sample(), replace(small, ops=kept))
    assert outcome.verdict == "refuted" and outcome.logits < 1e-5
    assert {p.kind for p in outcome.parts} == {"partial"}
    assert all(p.subject.endswith("q_norm.weight") for p in outcome.parts)


def compile_plan_for(values, settings):
    from planc.model.load import of_values

    facts = of_values({**values, "architectures": ["Qwen3ForCausalLM"]}, "small", Sink())
    return compile_plan(facts, "qwen3", Sink(), world_size=2, settings=settings).lowered


def test_unknown_is_said_and_strict_makes_it_an_error(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("no way")

    monkeypatch.setattr("planc.proof.flow.shrink", refuse)
    verdict, [finding] = judged("llama-3.1-8b", "llama", ["tp=8"])
    assert verdict.verdict == "unknown" and "no way" in verdict.reason
    assert (finding.code, finding.severity) == ("PL504", "warning")
    _, [finding] = judged("llama-3.1-8b", "llama", ["tp=8"], strict=True)
    assert finding.severity == "error"


def test_a_verdict_is_remembered_without_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    fresh = judged("llama-3.1-8b", "llama", ["tp=4"])
    code = "import sys; from planc.cli import main; code = main(sys.argv[1:]); "
    code += "print(code, [m for m in ('torch', 'transformers') if m in sys.modules])"
    words = ["check", "llama-3.1-8b", "llama", "--world-size", "64", "--set", "tp=4"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"
    assert "layout flow (proved" in done.stdout
    assert judged("llama-3.1-8b", "llama", ["tp=4"]) == fresh


def test_a_damaged_verdict_is_judged_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    fresh = judged("qwen2.5-0.5b", "llama", ["tp=2"])
    for path in tmp_path.glob("*.json"):
        path.write_text(path.read_text()[:-9])
    assert judged("qwen2.5-0.5b", "llama", ["tp=2"]) == fresh
    for path in tmp_path.glob("*.json"):  # whole, and of another kind
        cache.keep(path.stem, json.loads("[1]"))
    assert judged("qwen2.5-0.5b", "llama", ["tp=2"]) == fresh
