"""Layout flow: shipped plans are proved, mutants refuted at their line, the rest is unknown.

The simulation itself is held against real processes in `make mutants`
(docs/generated/mutants.md).
"""

import ast
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import STATED, compiled_of, flat, mutant, sampled, simulated, slow
from torch._C._distributed_c10d import _get_work_registry_size

from planc import checks
from planc.checks.splits import attention_heads
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.files.resources import GRAMMARS, PLANS
from planc.model import cache
from planc.model.load import load
from planc.proof.layout_flow import flow
from planc.proxy.shrink import shrink
from planc.runtime import executor
from planc.runtime.known_verdict import KnownVerdict
from planc.simulate.trial_part import left_out

SHIPPED = [
    ("llama-3.1-8b", "llama", 8),
    ("llama-3.2-1b", "llama", 8),
    ("mistral-7b-v0.3", "llama", 2),
    ("qwen2.5-7b", "llama", 4),
    ("qwen2.5-0.5b", "llama", 2),
    ("qwen3-8b", "qwen3", 8),
    ("phi-4", "phi3", 4),
]


@pytest.mark.parametrize("sequence_parallel", ["true", slow("false")])
@pytest.mark.parametrize(("model", "plan", "tp"), sampled(SHIPPED, 2))
def test_shipped_plans_are_proved(model, plan, tp, sequence_parallel):
    settings = [f"tp={tp}", f"sequence={sequence_parallel}"]
    verdict, findings = simulated(model, plan, settings)
    assert (verdict.verdict, findings) == ("proved", [])
    assert 0 < verdict.outcome.worst < 1e-5


def test_no_collective_of_a_simulation_is_left_open(tmp_path, monkeypatch):
    """torch warns of them when the process ends; a block that runs again stops before it waits."""
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    open_before = _get_work_registry_size()
    verdict, _ = simulated("command-r7b", "cohere2", ["tp=2", "sequence=false"])
    assert verdict.verdict == "proved"
    assert _get_work_registry_size() == open_before


INDIVISIBLE = [
    ("deepseek-v2-lite", "deepseek_v3", {"moe_intermediate_size": 2048}, 32),
    ("pythia-6.9b", "gpt_neox", {"num_attention_heads": 12, "hidden_size": 768}, 8),
    ("bert-base", "bert", {"vocab_size": 30528}, 8),
]


@pytest.mark.parametrize(("model", "plan", "changes", "tp"), INDIVISIBLE)
def test_heads_that_do_not_divide_where_their_features_do(
    model, plan, changes, tp, tmp_path, monkeypatch
):
    """Real processes end in a view: a rank has half a head of 16, or one and a half of 12. The
    proxy model keeps that, also where no check knows the heads.
    """
    monkeypatch.setattr(checks, "RULES", tuple(r for r in checks.RULES if r is not attention_heads))
    values = json.loads((PLANS / "models" / f"{model}.json").read_text()) | changes
    path = tmp_path / "model.json"
    path.write_text(json.dumps(values))
    verdict, findings = simulated(str(path), plan, [f"tp={tp}"])
    wrong = [d for d in findings if d.severity == "error"]
    assert (verdict.verdict, [d.code for d in wrong]) == ("refuted", ["PL503"])
    assert any("is invalid for input of size" in fact for fact in wrong[0].facts)
    assert simulated(str(path), plan, ["tp=4"])[0].verdict == "proved"


def test_a_gradient_that_is_0_is_not_wrong():
    """A key's bias does nothing behind a softmax; what its gradient has is rounding."""
    verdict, findings = simulated("opt-1.3b", "opt", ["tp=2"])
    assert (verdict.verdict, [d.code for d in findings]) == ("proved", ["PL517"])  # a note


def test_fsdp_alone_is_simulated_and_one_rank_is_nothing():
    for model, plan in (("llama-3.1-8b", "llama"), ("gpt2", "gpt2")):
        verdict, findings = simulated(model, plan, [])
        assert (verdict.verdict, findings) == ("proved", [])
        assert [(s.name, s.by) for s in verdict.sections if s.data] == [
            ("fsdp on dp_shard", "simulation")
        ]
    compiled = compile_plan("llama-3.1-8b", "llama", Sink(), world_size=1)
    assert flow(compiled, Sink()).verdict == "nothing"


MUTANTS = [
    # (what is replaced, by what, code, the line that is marked)
    (
        "self_attn.o_proj : rowwise(-> shard(1), local = false)",
        "self_attn.o_proj : rowwise(-> partial, local = false)",
        None,  # a DTensor carries its open sum on, so the result is right
        "",
    ),
    (
        "self_attn.o_proj : rowwise(-> shard(1), local = false)",
        "self_attn.o_proj : rowwise(-> shard(1))",
        "PL503",
        "self_attn.o_proj",
    ),
    ("$head : colwise(shard(1) -> replicate)", "", "PL503", ""),
    ("$final_norm : sequence", "$final_norm : sequence(dim = 0)", None, ""),
    (
        "$embedding : rowwise(-> shard(1), local = false)",
        "$embedding : rowwise(-> shard(1))",
        "PL507",
        "$embedding",
    ),
]


def llama():
    return flat("llama")


@pytest.mark.parametrize(("old", "new", "code", "line"), MUTANTS)
def test_mutants(tmp_path, old, new, code, line):
    path = mutant(tmp_path, "llama", old, new)
    verdict, findings = simulated("llama-3.1-8b", path, ["tp=8"])
    if code is None:
        assert verdict.verdict == "proved", findings
        return
    assert verdict.verdict == "refuted" and findings[0].code == code, verdict
    if line:
        assert any(line in label.span.text for label in findings[0].labels)


def test_what_arrives_is_told_from_the_numbers(tmp_path):
    """A rowwise layer that is handed whole activations: the boundary is the cause."""
    old = "mlp.{gate,up}_proj : colwise"
    path = mutant(tmp_path, "llama", old, f"{old}(-> replicate)")
    _, findings = simulated("llama-3.1-8b", path, ["tp=8", "sequence=false"])
    by_code = {d.code: d for d in findings}
    found = by_code["PL505"]
    assert found.severity == "error"
    assert "has layout replicate; the plan states shard(-1)" in found.message
    assert "mlp.down_proj" in found.labels[0].span.text
    assert any("modeling_llama.py" in fact and "self.down_proj" in fact for fact in found.facts)


def test_a_redistribution_that_no_rule_states(tmp_path):
    """An open sum on a DTensor: right, and torch adds it up where the residual needs it."""
    old = "mlp.down_proj : rowwise(-> shard(1), local = false)"
    path = mutant(tmp_path, "llama", old, "mlp.down_proj : rowwise(-> partial, local = false)")
    verdict, [found] = simulated("llama-3.1-8b", path, ["tp=8"])
    assert (verdict.verdict, found.code, found.severity) == ("proved", "PL506", "warning")
    assert "partial -> shard(1)" in found.message and "aten.add" in found.message
    assert any("residual + hidden_states" in fact for fact in found.facts)
    assert any(
        "down_proj" in label.span.text and label.text == "ended just before"
        for label in found.labels
    )


def test_every_kind_of_layer_has_a_verdict():
    verdict, _ = simulated("gemma-2-9b", "gemma2", ["tp=4"])
    assert [(k.modules, k.label, k.verdict) for k in verdict.layers] == [
        ("model.layers[0:41:2]", "sliding_attention", "proved"),
        ("model.layers[1:42:2]", "full_attention", "proved"),
        ("root", "", "proved"),
    ]
    assert all(0 < k.error < 1e-5 for k in verdict.layers)
    assert [(s.name, s.verdict, s.by) for s in verdict.sections] == [
        ("tensor on tp", "proved", "simulation"),
        ("checkpoint", "proved", "simulation"),
        ("fsdp on dp_shard", "proved", "simulation"),
        ("mixed precision", "left out", "structure"),
    ]


def test_a_kind_that_the_small_model_lacks_is_unknown(monkeypatch):
    """Were the shrunken model to lose a kind of layer, no one could take it for proved."""

    def first_kind_alone(config, **arguments):
        made = shrink(config, **arguments)
        made.values["layer_types"] = ["sliding_attention"] * len(made.values["layer_types"])
        return made

    monkeypatch.setattr("planc.proxy.shrink.shrink", first_kind_alone)
    verdict, [finding] = simulated("gemma-2-9b", "gemma2", ["tp=4"])
    assert (verdict.verdict, finding.code) == ("unknown", "PL504")
    assert "model.layers[1:42:2] (full_attention)" in verdict.reason
    sections = {s["name"]: s for s in verdict.document()["sections"]}
    assert {n: s["verdict"] for n, s in sections.items()} == {
        "tensor on tp": "unknown",
        "checkpoint": "unknown",
        "fsdp on dp_shard": "proved",
        "mixed precision": "left out",
    }
    assert sections["tensor on tp"]["reason"] == verdict.reason


def test_json_has_the_verdicts(capsys):
    import jsonschema

    from planc.cli import main

    schema = json.loads((GRAMMARS / "diagnostics.schema.json").read_text())
    words = ["--world-size", "64", "--set", "tp=4", "--format", "json"]
    assert main(["check", "gemma-2-9b", "gemma2", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, schema)
    assert found["flow"]["verdict"] == "proved"
    assert 0 < found["flow"]["errors"]["gradient"] < 1e-5
    assert [layer["label"] for layer in found["flow"]["layers"]] == [
        "sliding_attention",
        "full_attention",
        "",
    ]
    assert main(["check", "gemma-2-9b", "gemma2", *words, "--level", "structure"]) == 0
    assert json.loads(capsys.readouterr().out)["flow"] is None


def test_a_gradient_that_nothing_sums(tmp_path):
    """qwen3 without its rule for q_norm, past the structural check that would catch it first."""
    sink = Sink()
    settings = ["tp=2", "sequence=false"]
    compiled = compile_plan("qwen3-8b", "qwen3", sink, world_size=8, settings=settings)

    from planc.proxy.transformers_model import TransformersBuilder
    from planc.simulate.simulate import simulate

    values = shrink(compiled.facts.config, ranks=2).values
    small = compile_plan_for(values, settings)
    kept = tuple(o for o in small.ops if not str(getattr(o, "modules", "")).endswith("q_norm"))
    builder = TransformersBuilder({**values, "architectures": ["Qwen3ForCausalLM"]})
    outcome = simulate(builder, small.map_ops(lambda _: kept))
    assert outcome.verdict == "refuted" and outcome.logits < 1e-5
    assert {p.kind for p in outcome.discrepancies} == {"partial"}
    assert all(p.subject.endswith("q_norm.weight") for p in outcome.discrepancies)


def compile_plan_for(values, settings):
    from planc.model.load import load_values

    facts = load_values({**values, "architectures": ["Qwen3ForCausalLM"]}, "small", Sink())
    return compile_plan(facts, "qwen3", Sink(), world_size=2, settings=settings).lowered


def test_unknown_is_said_and_strict_makes_it_an_error(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("no way")

    monkeypatch.setattr("planc.proxy.shrink.shrink", refuse)
    stated = STATED / "llama.plan"
    verdict, [finding] = simulated("llama-3.1-8b", stated, ["tp=8"])
    assert verdict.verdict == "unknown" and "no way" in verdict.reason
    assert (finding.code, finding.severity) == ("PL504", "warning")
    _, [finding] = simulated("llama-3.1-8b", stated, ["tp=8"], strict=True)
    assert finding.severity == "error"
    compile_plan("llama-3.1-8b", "llama", found := Sink(), world_size=64, settings=["tp=8"])
    [finding] = found  # without layouts there is nothing to prove
    assert (finding.code, finding.severity) == ("PL524", "error") and "no way" in finding.message


def test_a_verdict_is_remembered_without_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    fresh = simulated("llama-3.1-8b", "llama", ["tp=4"])
    code = "import sys; from planc.cli import main; code = main(sys.argv[1:]); slow = ('torch', "
    code += "'transformers', 'huggingface_hub', 'jsonschema'); "
    code += "print(code, [m for m in slow if m in sys.modules])"
    words = ["check", "llama-3.1-8b", "llama", "--world-size", "64", "--set", "tp=4"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"
    assert "layout flow (proved" in done.stdout
    assert simulated("llama-3.1-8b", "llama", ["tp=4"]) == fresh


def test_a_damaged_verdict_is_judged_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    fresh = simulated("qwen2.5-0.5b", "llama", ["tp=2"])
    for path in tmp_path.glob("*.json"):
        path.write_text(path.read_text()[:-9])
    assert simulated("qwen2.5-0.5b", "llama", ["tp=2"]) == fresh
    for path in tmp_path.glob("*.json"):  # whole, and of another kind
        cache.keep(path.stem, json.loads("[1]"))
    assert simulated("qwen2.5-0.5b", "llama", ["tp=2"]) == fresh


@pytest.fixture
def simulations(tmp_path, monkeypatch):
    """How often something was simulated, with a cache of the test's own."""
    from planc.simulate import simulate

    made, real = [], simulate.simulate
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(simulate, "simulate", lambda *a, **k: made.append(1) or real(*a, **k))
    return made


def test_a_verdict_is_remembered_by_what_the_simulation_runs(tmp_path, simulations):
    path = tmp_path / "own.plan"
    text = llama()
    settings = ["tp=2", "sequence=false"]
    for old, new, runs in (
        ("reshard = except_last", "reshard = never", 2),
        ("reshard = except_last", "reshard = except_last, precision(param = fp32)", 2),
        ("reduce = reduce_dtype", "reduce = bf16", 2),
        ("mlp.down_proj : rowwise\n", "mlp.down_proj : rowwise(-> replicate)\n", 2),  # the default
        ("when recompute {", "when not recompute {", 3),
    ):
        assert old in text, old
        for content in (text, text.replace(old, new)):
            path.write_text(content)
            assert simulated("llama-3.2-1b", path, settings)[0].verdict == "proved"
        assert len(simulations) == runs, new


@pytest.mark.parametrize("factor", [2, 3])
def test_a_divisor_that_is_not_the_mean_is_said(tmp_path, factor):
    """On 8 ranks, of which 2 are tensor ranks: 4 of data."""
    path = tmp_path / "own.plan"
    line = "precision(param = param_dtype"
    path.write_text(llama().replace(line, f"divide = {factor}\n    {line}"))
    settings = ["tp=2", "sequence=false"]
    summed, _ = simulated("llama-3.2-1b", path, settings, world=8)
    mean, _ = simulated("llama-3.2-1b", path, settings, world=2 * factor)
    said = f"for a loss that is a sum: gradients are summed, then divided by {factor}"
    assert summed.verdict == mean.verdict == "proved"
    assert said in summed.text and "a sum" not in mean.text
    assert section_of_mean(summed)["reason"] == said and section_of_mean(mean) is None


def section_of_mean(verdict):
    sections = verdict.document()["sections"]
    return next((s for s in sections if s["name"] == "mean over data ranks"), None)


@pytest.mark.parametrize(("factor", "said"), [(3, True), (8, False)])
def test_a_sum_without_tensor_parallelism_is_said(tmp_path, factor, said, caplog):
    """By check, by verify's certificate, and by `apply`."""
    path = tmp_path / "own.plan"
    line = "precision(param = param_dtype"
    path.write_text(llama().replace(line, f"divide = {factor}\n    {line}"))
    compiled = compiled_of("llama-3.2-1b", path, ["tp=1"], 8)
    verdict = flow(compiled, Sink())
    sentence = f"for a loss that is a sum: gradients are summed, then divided by {factor}"
    assert (sentence in verdict.text) == said
    assert (section_of_mean(verdict) is not None) == said
    assert (("mean over data ranks", sentence) in left_out(compiled.lowered)) == said
    caplog.set_level("INFO", "planc")
    known = KnownVerdict(level="proved", text="proved")
    executor._tell(compiled.lowered, "digest", known, 0.0)
    assert (sentence in caplog.text) == said


def test_a_bug_fixed_in_planc_leaves_no_verdict_standing(simulations, monkeypatch):
    from planc.proof import judge

    settings = ["tp=2", "sequence=false"]
    simulated("llama-3.2-1b", "llama", settings)
    simulated("llama-3.2-1b", "llama", settings)
    assert len(simulations) == 1
    monkeypatch.setattr(judge, "source_digest", lambda: "of other sources")
    simulated("llama-3.2-1b", "llama", settings)
    assert len(simulations) == 2


def test_planc_s_sources_are_known_by_their_contents(tmp_path, monkeypatch):
    from planc.simulate import certificate as module

    digest = module.source_digest.__wrapped__
    shutil.copytree(module.PACKAGE, tmp_path / "planc")
    before = digest()
    monkeypatch.setattr(module, "PACKAGE", tmp_path / "planc")
    assert digest() == before
    path = tmp_path / "planc" / "simulate" / "numerics.py"
    path.write_text(f"{path.read_text()}# fixed\n")
    assert digest() != before


def test_what_runs_in_a_proof_is_among_the_sources():
    """What else is imported holds names, places and messages, and no numbers."""
    from planc.simulate import certificate as module

    code = "import sys, planc.simulate.simulate, planc.simulate.worker, planc.proxy.user_model\n"
    code += "print([m for m in sys.modules if m.startswith('planc.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = {name.removeprefix("planc.") for name in ast.literal_eval(done.stdout)}
    paths = [Path(p).relative_to(module.PACKAGE).with_suffix("") for p in module.files()]
    known = {p.as_posix().removesuffix("/__init__").replace("/", ".") for p in paths}
    beside = {"version"}
    packages = {"diagnostics", "elaborate", "files", "infer", "ir", "lowering", "syntax"}
    assert {n for n in names - known - beside if n.split(".")[0] not in packages} == set()
    assert {"simulate.simulate", "runtime.executor", "proxy.user_model"} <= names & known
    assert "ir.stand_in" in known, "it says which small layer runs for which real one"


def test_a_plan_is_proved_as_it_was_checked(tmp_path, simulations, monkeypatch):
    """A file that changes between the two is read once, and what was read is what is proved."""
    from planc.syntax import plan_files

    base, path = tmp_path / "base.plan", tmp_path / "own.plan"
    base.write_text(llama())
    path.write_text('plan own for llama\nextend "base.plan"\n')
    settings = ["tp=2", "sequence=false"]
    compiled = compiled_of("llama-3.2-1b", path, settings)
    base.write_text(
        llama().replace("mlp.down_proj : rowwise\n", "mlp.down_proj : rowwise(-> partial)\n")
    )
    path.unlink()
    for name in ("read", "text", "locate"):
        monkeypatch.setattr(plan_files, name, lambda *_: pytest.fail("the plan was read again"))
    assert flow(compiled, Sink()).verdict == "proved"
    assert len(simulations) == 1
    monkeypatch.undo()
    assert simulated("llama-3.2-1b", base, settings)[0].verdict == "refuted"


PAIRS = """
from torch import nn
from torch.nn import functional as F


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(32, 64), nn.Linear(64, 32)


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.pairs = nn.ModuleList([Pair(), Pair()])
        self.head = nn.Linear(32, 64)

    def forward(self, ids, labels=None):
        x = self.table(ids)
        for pair in self.pairs:
            x = x + pair.two(F.relu(pair.one(x)))
        logits = self.head(x)
        return {"logits": logits, "loss": F.cross_entropy(logits.view(-1, 64), labels.view(-1))}
"""
PAIRED = """
plan pairs for Pairs

mesh {
    dp_shard = auto
    tp       = 1
}

tensor on tp {
    pairs.*.one : colwise
    pairs.*.two : rowwise
}

fsdp on dp_shard {
    UNITS : unit
    root  : unit
}
"""


def test_a_proof_overrules_what_structure_presumes(tmp_path, monkeypatch, capsys):
    """A projection that is cut into every other feature, which shards do too: the warning is kept
    apart.
    """
    import jsonschema

    import planc
    from planc.cli import main

    monkeypatch.chdir(tmp_path)
    every_other = "pair.one(x)[..., ::2].repeat_interleave(2, -1)"
    (tmp_path / "own_cut.py").write_text(PAIRS.replace("pair.one(x)", every_other))
    (tmp_path / "a.plan").write_text(PAIRED.replace("UNITS", "pairs.*.{one,two}"))
    words = ["check", "own_cut:Pairs", "a.plan", "--allow-code", "--world-size", "4"]
    words += ["--set", "tp=2", "--strict"]
    assert main([*words, "--level", "structure", "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    presumed = [d for d in found["diagnostics"] if d["code"] == "PL151"]
    assert len(presumed) == 1 and found["counts"]["warning"] == 1 and found["overruled"] == []
    assert main([*words, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, json.loads((GRAMMARS / "diagnostics.schema.json").read_text()))
    assert found["flow"]["verdict"] == "proved" and found["overruled"] == presumed
    assert found["counts"]["warning"] == 0
    assert "PL151" not in {d["code"] for d in found["diagnostics"]}
    assert main(words) == 0 and "PL151" not in capsys.readouterr().out
    arguments = {"world_size": 4, "overrides": ["tp=2"], "allow_code": True}
    stands = planc.check("own_cut:Pairs", "a.plan", **arguments)
    assert "PL151" not in {d.code for d in stands}


@pytest.mark.parametrize(
    ("code", "style", "found"),
    [
        ("pair.one(x).chunk(2, -1)[1].repeat(1, 1, 2)", "colwise", ["PL151"]),
        ("pair.one(x)[..., :32].repeat(1, 1, 2)", "colwise", ["PL151"]),
        ("pair.one(x).chunk(2, -1)[1].repeat(1, 1, 2)", "colwise(parts = 2)", []),
        ("pair.one(x).chunk(2, -1)[1].repeat(1, 1, 2)", "colwise(-> replicate)", []),
        ("pair.one(x).unflatten(-1, (8, 8)).chunk(2, -1)[1].repeat(1, 1, 1, 2).flatten(2)",
         "colwise", []),
        ("pair.one(x).unflatten(-1, (8, 8)).chunk(2, 2)[1].repeat(1, 1, 2, 1).flatten(2)",
         "colwise", ["PL151"]),
        ("pair.one(x)", "colwise", []),
    ],
    ids=["chunk", "slice", "parts", "gathered", "in a head", "of heads", "whole"],
)  # fmt: skip
def test_an_output_that_the_code_cuts_is_found_without_a_run(
    tmp_path, monkeypatch, capsys, code, style, found
):
    """Under any name, with the line of the model's code."""
    from planc.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = tmp_path.name
    (tmp_path / f"{name}.py").write_text(PAIRS.replace("pair.one(x)", code))
    plan = PAIRED.replace("one : colwise", f"one : {style}").replace("UNITS", "pairs.*.{one,two}")
    plan = plan.replace("tensor on tp {", "tensor on tp {\n    sequence = false")
    (tmp_path / "a.plan").write_text(plan)
    words = ["check", f"{name}:Pairs", "a.plan", "--allow-code", "--world-size", "4"]
    main([*words, "--set", "tp=2", "--level", "structure", "--format", "json"])
    cuts = [d for d in json.loads(capsys.readouterr().out)["diagnostics"] if d["code"] == "PL151"]
    assert [d["code"] for d in cuts] == found
    assert all(f"`pairs.*.one`: {name}.py:" in str(d["facts"]) for d in cuts)


POOLED = """

class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.probe = nn.Parameter(torch.ones(1, 1, 32))

    def forward(self, x):
        return (x * self.probe).sum(1)


class Pooled(Pairs):
    def __init__(self):
        super().__init__()
        self.pool = Pool()

    def forward(self, ids, labels=None):
        self.pool(self.table(ids))  # and nothing takes what it gives
        return super().forward(ids, labels)
"""


def test_what_a_loss_does_not_use_has_no_gradient(tmp_path, monkeypatch, capsys):
    """The pooling head of a tower (gemma3's, by default) runs, and a step leaves it as it is: it
    had zeros for its gradient, on which the optimizer applied its weight decay.
    """
    from planc.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_pooled.py").write_text(f"import torch\n{PAIRS}{POOLED}")
    plan = PAIRED.replace("for Pairs", "for Pooled").replace("UNITS", "pairs.*.{one,two}")
    (tmp_path / "a.plan").write_text(plan)
    words = ["check", "own_pooled:Pooled", "a.plan", "--allow-code", "--world-size", "4"]
    assert main([*words, "--set", "tp=2", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["flow"]["verdict"] == "proved"


@pytest.mark.parametrize(
    ("check", "verdict", "told"),
    [
        (
            "if y.shape[-1] != 64: raise ValueError(f'64 features, not {y}')",
            "refuted",
            "the model raises in `pairs.*.two` under this plan",
        ),
        ("assert y.sum().item() != 0.5", "proved", ""),
        ("y = y + collective(y)", "unknown", "ReduceScatter does not support"),
    ],
)
def test_what_ends_a_run_is_the_model_or_the_simulation(
    tmp_path, monkeypatch, capsys, check, verdict, told
):
    """Where an error is raised decides, not its words."""
    from planc.cli import main

    monkeypatch.chdir(tmp_path)
    before, apart = "x = x + pair.two(F.relu(pair.one(x)))", "x = x + pair.two(F.relu(y))"
    code = PAIRS.replace(before, "\n            ".join(["y = pair.one(x)", check, apart]))
    name = f"own_pairs_{verdict}_{len(check)}"
    (tmp_path / f"{name}.py").write_text(code + COLLECTIVE)
    (tmp_path / "a.plan").write_text(PAIRED.replace("UNITS", "pairs.*.{one,two}"))
    words = ["check", f"{name}:Pairs", "a.plan", "--allow-code", "--world-size", "2"]
    main([*words, "--set", "tp=2", "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    assert found["flow"]["verdict"] == verdict
    if told:
        assert [d["message"] for d in found["diagnostics"] if told in d["message"]], found


COLLECTIVE = """
import torch
from torch import distributed


def collective(y):
    if distributed.is_initialized():  # one that gloo has, and the simulation does not
        most = distributed.ReduceOp.MAX
        distributed.reduce_scatter_tensor(torch.empty(1), torch.ones(2), op=most)
    return 0
"""


def test_which_modules_are_called_is_known_from_the_data_flow(monkeypatch):
    from planc.proof import called_modules
    from planc.proxy import flow

    facts = load("llama-3.2-1b", Sink())
    names, reason = called_modules.called_modules(facts)
    assert {"model.layers.*", "model.layers.*.mlp.up_proj"} <= names and not reason
    monkeypatch.setattr(flow, "_record_flow", lambda *_: pytest.fail("it was run again"))
    assert called_modules.called_modules(facts) == (names, "")


def test_a_model_that_does_not_run_leaves_its_units_unknown(monkeypatch, capsys):
    from planc.cli import main
    from planc.proof import called_modules, layout_flow

    outcome = layout_flow.Outcome(verdict="unknown", reason="it does not run")
    monkeypatch.setattr(layout_flow, "judge", lambda *_, **__: outcome)
    monkeypatch.setattr(layout_flow, "called_modules", lambda facts: (None, "no reason"))
    assert called_modules.called_modules is not layout_flow.called_modules
    assert main(["check", "llama-3.2-1b", "llama", "--world-size", "4", "--format", "json"]) == 0
    sections = json.loads(capsys.readouterr().out)["flow"]["sections"]
    found = {s["name"]: (s["verdict"], s["reason"]) for s in sections}
    assert found["fsdp on dp_shard"] == (
        "unknown",
        "whether its units are called: no reason",
    )


@pytest.mark.parametrize("unit", [False, True])
def test_a_model_that_runs_itself_again_in_backward_keeps_its_blocks_in_the_root(unit):
    """Reversible layers: a unit reshards its parameters before they run again."""
    values = {
        "model_type": "reformer",
        "hidden_size": 128,
        "vocab_size": 128,
        "num_attention_heads": 4,
        "attention_head_size": 32,
        "feed_forward_size": 128,
        "attn_layers": ["local", "local"],
        "num_hidden_layers": 2,
        "is_decoder": True,
        "axial_pos_embds": False,
        "max_position_embeddings": 256,
        # it seeds its dropout by the clock, on each rank by its own: PL511
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
    }
    from planc.model.load import load_values
    from planc.tools.init.init import draft

    facts = load_values(values, "config.json", Sink())
    assert facts is not None
    text = draft(facts, Sink()).text
    assert "again in the backward pass" in text and "unit(reshard = except_last)" not in text
    if unit:
        text = text.replace("    root :", "    reformer.encoder.layers.* : unit\n    root :")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reformer.plan"
        path.write_text(text)
        sink = Sink()
        compiled = compile_plan(facts, str(path), sink, world_size=4, settings=["tp=2"])
        verdict = flow(compiled, sink)
    assert verdict.verdict == ("refuted" if unit else "proved")
    sections = {s["name"]: s["verdict"] for s in verdict.document()["sections"]}
    assert sections["fsdp on dp_shard"] == ("refuted" if unit else "proved")
    assert ("PL503" in {d.code for d in sink}) == unit
