"""A plan at the real sizes of a model: its shapes, on tensors without values."""

import inspect
import json

import pytest
from helpers import compiled_of, simulated, slow
from torch import nn

import planc
from planc import checks
from planc.checks.splits import attention_heads
from planc.files.resources import PLANS
from planc.ops.activation_checkpoint import Checkpoint
from planc.proof import real_size
from planc.proxy import transformers_model
from planc.simulate import real_size as run


@pytest.fixture
def without_heads(monkeypatch):
    """No check knows heads, as of a model whose attributes have other names."""
    monkeypatch.setattr(checks, "RULES", tuple(r for r in checks.RULES if r is not attention_heads))


def at_real_size(model, plan, settings, world, folder, **changes):
    """The outcome at the real sizes alone, without a proxy model."""
    path = folder / "model.json"
    path.write_text(
        json.dumps(json.loads((PLANS / "models" / f"{model}.json").read_text()) | changes)
    )
    return real_size._outcome(real_size._real_case(compiled_of(str(path), plan, settings, world)))


INDIVISIBLE = [
    ("bert-base", "bert", {"vocab_size": 30528}, 8, "bert.encoder.layer.0.attention.self"),
    slow(
        *("deepseek-v2-lite", "deepseek_v3", {"moe_intermediate_size": 2048}, 32),
        "model.layers.0.self_attn",
    ),
    slow(
        *("pythia-6.9b", "gpt_neox", {"num_attention_heads": 12, "hidden_size": 768}, 8),
        "gpt_neox.layers.0.attention",
    ),
    slow("deepseek-v3", "deepseek_v3", {}, 256, "model.layers.0.self_attn"),
    slow("deepseek-v3.2", "deepseek_v3", {}, 256, "model.layers.0.self_attn"),
    slow("glm-5", "deepseek_v3", {}, 128, "model.layers.0.self_attn"),
    slow("kimi-linear-48b-a3b", "kimi_linear", {}, 64, "model.layers.2.self_attn"),
]


@pytest.mark.parametrize(("model", "plan", "changes", "tp", "module"), INDIVISIBLE)
def test_heads_that_do_not_divide_end_in_the_attention(
    model, plan, changes, tp, module, tmp_path, monkeypatch, without_heads
):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    outcome = at_real_size(model, plan, [f"tp={tp}"], tp, tmp_path, **changes)
    [crash] = outcome.discrepancies
    assert (outcome.verdict, crash.subject) == ("refuted", module)
    assert "is invalid for input of size" in crash.detail
    assert ".view(" in crash.line


class Attention(nn.Module):
    """Attention whose head size has no name that planc knows."""

    def __init__(self, heads):
        super().__init__()
        self.wide = 48 // heads
        self.q, self.k, self.v, self.o = (nn.Linear(48, 48) for _ in "qkvo")

    def forward(self, x):
        heads = (
            p(x).unflatten(-1, (-1, self.wide)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.embed = nn.Embedding(64, 48)
        self.layers = nn.ModuleList(Attention(heads) for _ in range(2))
        self.head = nn.Linear(48, 64)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


PLAN = """plan own for Model

mesh {
    tp = 8
}

tensor on tp {
    layers.*.{q,k,v} : colwise
    layers.*.o       : rowwise
}
"""


@pytest.mark.parametrize("heads", [12, 24])
def test_a_plan_that_is_right_on_fewer_ranks_is_refuted_at_its_line(heads, tmp_path):
    """The proxy model runs on 2 and on 4 ranks, which divide 12 heads; 8 ranks do not."""
    path = tmp_path / "own.plan"
    path.write_text(PLAN)
    found = planc.check(Model(heads), str(path), world_size=8)
    wrong = [d for d in found if d.severity == "error"]
    assert [d.code for d in wrong] == (["PL534"] if heads == 12 else [])
    for finding in wrong:
        assert "layers.*" in finding.message
        assert any("unflatten" in fact for fact in finding.facts)
        assert {label.span.place.rpartition(":")[2] for label in finding.labels} <= {"8", "9"}


def test_verify_says_it_too(tmp_path, monkeypatch):
    """Four processes divide 12 heads."""
    source = inspect.getsource(Attention), inspect.getsource(Model)
    head = "from torch import nn\n\n\n"
    (tmp_path / "twelve.py").write_text(
        head + "\n\n".join(source).replace("(self, heads)", "(self, heads=12)")
    )
    (tmp_path / "own.plan").write_text(PLAN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / "own.plan")
    proof = planc.verify("twelve:Model", path, world_size=8, processes=4, allow_code=True)
    assert proof.verdict == "refuted" and "PL534" in str(proof)
    assert "shape that cannot be" in proof.certificate["reason"]


def test_the_outcome_is_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    verdict, _ = simulated("llama-3.2-1b", "llama", ["tp=4"])
    assert verdict.verdict == "proved"
    monkeypatch.delattr(run, "run_at_real_size")
    case = real_size._real_case(compiled_of("llama-3.2-1b", "llama", ["tp=4"], 64))
    assert real_size._outcome(case).verdict == "proved"


WHOLE_NORMS = """plan own for WanTransformer3DModel

mesh {
    tp = 2
}

tensor on tp {
    blocks.*.attn1.{to_q,to_k,to_v} : colwise
    blocks.*.attn1.to_out[0]        : rowwise
}
"""


@pytest.mark.parametrize(("plan", "verdict"), [("wan", "proved"), (WHOLE_NORMS, "refuted")])
@pytest.mark.slow
def test_a_model_of_diffusers_runs_at_its_real_size(plan, verdict, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    path = tmp_path / "own.plan"
    path.write_text(plan)
    name, settings = (plan, ["tp=2"]) if verdict == "proved" else (str(path), [])
    outcome = at_real_size("wan2.1-t2v-14b", name, settings, 2, tmp_path)
    assert outcome.verdict == verdict, outcome
    assert [crash.subject for crash in outcome.discrepancies] == (
        [] if verdict == "proved" else ["blocks.0.attn1.norm_q"]
    )


def test_shapes_run_once_and_towers_are_not_searched_again(monkeypatch, tmp_path):
    """Recomputation repeats the shapes of a forward pass; the proxy model's inputs are known."""
    ran = []

    def choose(*_):
        raise AssertionError("all kinds of inputs are tried again")

    def forward(*given):
        ran.append((given[1], plain(*given)))
        return ran[-1][1]

    case = real_size._real_case(compiled_of("llava-1.5-7b", "llava", ["tp=2"], 8))
    assert case.compiled.lowered.has(Checkpoint)
    plain = run._run
    monkeypatch.setattr(run, "_run", forward)
    monkeypatch.setattr(transformers_model, "choose", choose)
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    assert real_size._outcome(case, ("images",)).verdict == "proved"
    [(lowered, (crash, late))] = ran
    assert (crash, late) == (None, "") and not lowered.has(Checkpoint)


def test_what_reads_values_is_not_checked(tmp_path):
    class Reading(Model):
        def forward(self, tokens):
            return super().forward(tokens) * (1 if int(tokens.max()) else 2)

    path = tmp_path / "own.plan"
    path.write_text(PLAN.replace("Model", "Reading"))
    found = planc.check(Reading(24), str(path), world_size=8)
    assert [d for d in found if d.severity == "error"] == []
    assert "not checked: real sizes" in str(found)
