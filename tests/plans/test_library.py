"""The shipped plans: found by the family's name, checked and lowered for a model of real shape.

Shapes in plans/models are written from memory of what was published; `TOTALS` in test_model.py
holds how many parameters each comes to.
"""

import json

import diffused
import pytest
from console import call
from folders import ROOT, TESTS
from helpers import sampled

import planc
from planc.compiler import read
from planc.diagnostics.diagnostic import Sink
from planc.ops.document import digest, loads
from planc.syntax.plan_files import families, locate, plan_of_family

PLANS = ROOT / "plans"
BASES = {p.stem for p in PLANS.glob("*.plan") if families(p) == ("any",)}

CASES = [
    ("llama-3.1-8b", "llama", ["tp=2", "sequence=false"]),
    ("llama-3.2-1b", "llama", ["tp=4"]),
    ("mistral-7b-v0.3", "llama", ["tp=2"]),
    ("qwen2.5-7b", "llama", ["tp=4"]),
    ("qwen3-8b", "qwen3", ["tp=2"]),
    ("gemma-3-1b", "gemma3", []),
    ("phi-4", "phi3", ["tp=2"]),
    ("gpt2", "gpt2", []),
    ("gemma-2-9b", "gemma2", ["tp=2"]),
    ("stablelm-2-1.6b", "stablelm", ["tp=2"]),
    ("starcoder2-3b", "starcoder2", ["tp=2"]),
    ("olmo-7b", "olmo", ["tp=2"]),
    ("olmo-2-7b", "olmo2", ["tp=2"]),
    ("phi-2", "phi", ["tp=2"]),
    ("command-r", "cohere", ["tp=2"]),
    ("command-r7b", "cohere2", ["tp=2"]),
    ("glm-4-9b", "glm", ["tp=2"]),
    ("glm-4-9b-0414", "glm4", ["tp=2"]),
    ("minitron-4b", "nemotron", ["tp=2"]),
    ("pythia-6.9b", "gpt_neox", ["tp=2"]),
    ("gpt-j-6b", "gptj", ["tp=2"]),
    ("opt-1.3b", "opt", ["tp=2"]),
    ("falcon-7b", "falcon", ["tp=2"]),
    ("bloom-7b1", "bloom", ["tp=2"]),
    ("mpt-7b", "mpt", ["tp=2"]),
    ("codegen-350m", "codegen", ["tp=2"]),
    ("starcoder", "gpt_bigcode", ["tp=2"]),
    ("xglm-564m", "xglm", ["tp=2"]),
    ("biogpt", "biogpt", ["tp=2"]),
    ("persimmon-8b", "persimmon", ["tp=2"]),
    ("mixtral-8x7b", "mixtral", ["tp=2"]),
    ("deepseek-v2-lite", "deepseek_v3", ["tp=2"]),
    ("gpt-oss-20b", "gpt_oss", ["tp=2"]),
    ("olmoe-1b-7b", "olmoe", ["tp=2"]),
    ("qwen3-30b-a3b", "qwen3_moe", ["tp=2"]),
    ("qwen3-235b-a22b", "qwen3_moe", ["tp=2"]),
    ("nemotron-h-8b", "nemotron_h", ["tp=2"]),
    ("mamba-codestral-7b", "mamba2", ["tp=2"]),
    ("jamba-v0.1", "jamba", ["tp=2"]),
    ("qwen3-next-80b-a3b", "qwen3_next", ["tp=2"]),
    ("bert-base", "bert", ["tp=2"]),
    ("llama-4-scout", "llama4", ["tp=2"]),
    ("llama-4-maverick", "llama4", ["tp=2"]),
    ("ministral-8b", "llama", ["tp=2"]),
    ("qwen1.5-moe-a2.7b", "mixtral", ["tp=2"]),
    ("gemma-7b", "llama", ["tp=2"]),
    ("gemma-4-26b-a4b", "gemma4", ["tp=2"]),
    ("gemma-4-e4b", "gemma4", ["tp=2"]),
    ("gemma-3-4b", "gemma3_vision", ["tp=2"]),
    ("phi-3.5-moe", "phimoe", ["tp=2"]),
    ("deepseek-v3", "deepseek_v3", ["tp=2"]),
    ("kimi-k2", "deepseek_v3", ["tp=2"]),
    ("glm-4.5-air", "qwen3_moe", ["tp=2"]),
    ("granite-3.1-8b", "llama", ["tp=2"]),
    ("granite-3.1-1b-a400m", "granitemoe", ["tp=2"]),
    ("bamba-9b", "falcon_h1", ["tp=2"]),
    ("falcon-h1-0.5b", "falcon_h1", ["tp=2"]),
    ("zamba2-2.7b", "zamba2", ["tp=2"]),
    ("jetmoe-8b", "jetmoe", ["tp=2"]),
    ("ctrl", "ctrl", ["tp=2"]),
    ("cpm-ant-10b", "cpmant", ["tp=2"]),
    ("qwen3-vl-8b", "qwen3_vl", ["tp=2"]),
    ("qwen3-vl-30b-a3b", "qwen3_vl", ["tp=2"]),
    ("qwen2.5-vl-7b", "qwen2_5_vl", ["tp=2"]),
    ("diffusiongemma-26b-a4b", "diffusion_gemma", ["tp=2"]),
    ("minimax-text-01", "minimax", ["tp=2"]),
    ("smollm3-3b", "llama", ["tp=2"]),
    ("exaone-4.0-32b", "exaone4", ["tp=2"]),
    ("ernie-4.5-21b-a3b", "mixtral", ["tp=2"]),
    ("ernie-4.5-0.3b", "llama", ["tp=2"]),
    ("apertus-8b", "apertus", ["tp=2"]),
    ("hunyuan-7b", "hunyuan_v1_dense", ["tp=2"]),
    ("diffllama-1b", "diffllama", ["tp=2"]),
    ("helium-1-2b", "llama", ["tp=2"]),
    ("seed-oss-36b", "llama", ["tp=2"]),
    ("afm-4.5b", "nemotron", ["tp=2"]),
    ("olmo-3-7b", "olmo2", ["tp=2"]),
    ("llama-3.2-1b-classes", "classifier", ["tp=2"]),
    ("qwen2.5-0.5b", "llama", ["tp=2"]),
    ("phi-3-mini", "phi3", ["tp=2"]),
    ("qwen3.5-9b", "qwen3_next", ["tp=2"]),
    ("qwen3.5-35b-a3b", "qwen3_next", ["tp=2"]),
    ("kimi-linear-48b-a3b", "kimi_linear", ["tp=2"]),
    ("deepseek-v3.2", "deepseek_v3", ["tp=2"]),
    ("glm-5", "deepseek_v3", ["tp=2"]),
    ("minimax-m2", "mixtral", ["tp=2"]),
    ("lfm2-1.2b", "lfm2", ["tp=2"]),
    ("granite-4.0-h-tiny", "granitemoehybrid", ["tp=2"]),
    ("olmo-hybrid-7b", "olmo_hybrid", ["tp=2"]),
    ("llava-1.5-7b", "llava", ["tp=2"]),
    ("llava-v1.6-mistral-7b", "llava", ["tp=2"]),
    ("llava-onevision-7b", "llava", ["tp=2"]),
    ("internvl3.5-8b", "internvl", ["tp=2"]),
    ("gemma-4-31b", "gemma4_vision", ["tp=2"]),
    ("qwen3.5-27b", "qwen3_5", ["tp=2"]),
    ("qwen3.5-397b-a17b", "qwen3_5", ["tp=2"]),
    ("deepseek-v4-flash", "deepseek_v4", ["tp=2"]),
]
"""A model, its plan, and settings."""

WHOLE = {
    "llama-3.1-8b",
    "mixtral-8x7b",
    "deepseek-v3",
    "nemotron-h-8b",
    "gemma-3-4b",
    "wan2.1-t2v-1.3b",
}
"""Their lowered texts are goldens: dense, experts, latent attention, hybrid, towers, diffusion. Of
the others the digest is, which says what is lowered and nothing of its wording."""

UNEVEN = {"granite-3.1-8b", "granite-3.1-1b-a400m", "hunyuan-7b"}
"""Their vocabularies do not divide by 2, which is a warning."""

NAMED = """
llama llama4 mistral mixtral ministral qwen2 qwen3 qwen2_moe qwen3_moe qwen3_next gemma gemma2
gemma3 gemma4 phi phi3 phimoe gpt2 gpt_neox gptj gpt_oss opt bloom falcon falcon_h1 mpt stablelm
starcoder2 olmo2 olmoe deepseek_v2 deepseek_v3 glm4 glm4_moe cohere cohere2 granite granitemoe
nemotron nemotron_h bamba jamba mamba2 zamba2 minimax smollm3 exaone4 ernie4_5_moe
diffusion_gemma bert kimi_linear deepseek_v32 glm_moe_dsa minimax_m2 lfm2 granitemoehybrid
olmo_hybrid llava llava_next llava_onevision internvl qwen3_5 qwen3_5_moe deepseek_v4 qwen3_vl_moe
"""
"""Families that the library has by name, whatever file their plan is in."""


def settled(settings):
    return [word for setting in settings for word in ("--set", setting)]


def family(model):
    """The model type of a shipped configuration."""
    return json.loads((PLANS / "models" / f"{model}.json").read_text())["model_type"]


@pytest.mark.parametrize(("model", "plan", "settings"), [*CASES, *diffused.CASES])
def test_lowers(golden, golden_digest, model, plan, settings):
    words = ("lower", model, plan, "--world-size", "8", *settled(settings))
    code, text, err = call(*words)
    assert code == 0
    assert not err or (model in UNEVEN and "PL203" in err), err
    _, document, _ = call(*words, "--format", "json")
    found = digest(loads(document, model, Sink()))
    assert f"lowered {found[:12]}" in text.splitlines()[0]
    golden_digest(model, found)
    if model in WHOLE:
        golden(f"{model}.txt", text)


@pytest.mark.parametrize(("model", "plan", "settings"), sampled(CASES, 3))
def test_is_checked(model, plan, settings):
    """No errors, and layout flow has the last word on what it can run."""
    words = (model, plan, "--world-size", "8", *settled(settings))
    code, out, _ = call("check", *words)
    assert code == 0, out
    said = "layout flow (proved"
    assert said in out, out
    assert "PL504" not in out, out


def test_every_plan_has_a_golden():
    """A shipped plan without a case here would have no digest, and no check in CI."""
    cases = [(model, plan) for model, plan, _ in CASES]
    cases += [param.values[:2] for param in diffused.CASES]
    assert {p.stem for p in PLANS.glob("*.plan")} - BASES == {plan for _, plan in cases}
    digests = json.loads((TESTS / "goldens" / "digests.json").read_text())
    assert set(digests) == {model for model, _ in cases}
    assert all((TESTS / "goldens" / f"{model}.txt").is_file() for model in WHOLE)


def test_every_family_of_every_header_has_a_case():
    others = {param.values[1] for param in diffused.CASES} | BASES
    named = {n for p in PLANS.glob("*.plan") if p.stem not in others for n in families(p)}
    classes = {n for n in named if n.endswith("ForSequenceClassification")}
    assert classes and all(plan_of_family(n).path.stem == "classifier" for n in classes)
    assert named - classes == {family(model) for model, _, _ in CASES}


@pytest.mark.parametrize("name", NAMED.split())
def test_is_found_by_its_family_and_proved(name):
    """By `planc check MODEL family`; a row of the numerics is for its plan and of its kind."""
    import numerics
    import test_plans

    place = locate(name)
    assert place is not None
    mine = [f for f in families(place.path) if f.removesuffix("_text") == name]
    assert mine
    proved = {
        (numerics.MODELS[model]["model_type"].removesuffix("_text"), plan)
        for model, plan in test_plans.CASES + test_plans.ALSO + test_plans.ALWAYS
    }
    assert (name, place.path.stem) in proved


def test_a_family_is_a_name_for_its_plan():
    one = call("lower", "mistral-7b-v0.3", "mistral", "--world-size", "8")
    two = call("lower", "mistral-7b-v0.3", "llama", "--world-size", "8")
    assert one == two and one[0] == 0


def test_a_family_has_one_plan():
    """Of plans that name a family in their headers, at most one bears a family's name."""
    every = [p for p in PLANS.glob("*.plan") if p.stem in families(p)]
    names = [name for p in every for name in families(p)]
    assert len(names) == len(set(names))
    assert locate("llama4_text").path.stem == "llama4"
    assert locate("nothere") is None


def own_plans(folder, monkeypatch, **headers):
    """A folder of the user's own plans, each with the families of its header."""
    for name, header in headers.items():
        (folder / f"{name}.plan").write_text(f'plan {name} for {header}\n\nextend "qwen3.plan"\n')
    monkeypatch.setenv("PLANC_PATH", str(folder))


def test_two_plans_of_ones_own_are_not_taken_by_their_alphabet(tmp_path, monkeypatch):
    own_plans(tmp_path, monkeypatch, fast="qwen3", small="qwen3")
    code, text, _ = call("check", "qwen3-8b", "--world-size", 8, "--level", "structure")
    assert code == 2 and "[PL611]" in text
    assert "fast.plan" in text and "small.plan" in text
    with pytest.raises(planc.PlanError, match="PL611"):
        planc.lower("qwen3-8b", None, world_size=8)
    words = ("--world-size", 8, "--level", "structure")
    assert call("check", "qwen3-8b", "small", *words)[0] == 0
    own_plans(tmp_path, monkeypatch, qwen3="qwen3")  # its name says which is meant
    code, text, errors = call("check", "qwen3-8b", *words)
    assert code == 0 and "qwen3.plan" in text + errors


def test_the_class_of_a_model_comes_before_its_family():
    """A classifier has no `lm_head`; the plan whose header names its class is taken."""
    place = plan_of_family("LlamaForSequenceClassification", "llama")
    assert place.path.name == "classifier.plan"
    assert plan_of_family("LlamaForCausalLM", "llama").path.name == "llama.plan"
    assert plan_of_family("mistral").path.name == "llama.plan"
    code, text, errors = call("lower", "llama-3.2-1b-classes", "--world-size", 8, "--set", "tp=2")
    assert code == 0 and text.startswith("classifier for Llama"), errors


def test_remedies_do_not_depend_on_other_plans_of_ones_own(tmp_path, monkeypatch):
    """What is right comes from the plan that ships, whatever other plans a user has."""
    monkeypatch.chdir(tmp_path)
    shipped = (PLANS / "llama.plan").read_text()
    shipped = shipped.replace("\ntensor on tp", "\noverride tensor on tp")  # all is stated
    rules = "self_attn.o_proj, mlp.down_proj            : rowwise\n"
    partial = "self_attn.o_proj : rowwise(-> partial)\n        mlp.down_proj : rowwise\n"
    wrong = shipped.replace(rules, partial)
    assert wrong != shipped
    (tmp_path / "wrong.plan").write_text(wrong)
    words = ("llama-3.1-8b", "wrong.plan", "--world-size", 4, "--set", "tp=2")
    words = ("check", *words, "--set", "sequence=false")
    before = call(*words)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "llama.plan").write_text(wrong)
    monkeypatch.setenv("PLANC_PATH", "own")
    assert call(*words) == before
    assert "give `model.layers.*.self_attn.o_proj` the style `rowwise`" in " ".join(
        before[1].split()
    )


@pytest.mark.parametrize("folder", ["", "/nowhere/", "../nowhere/", "nowhere/", "./"])
def test_a_file_that_is_missing_is_no_shipped_plan(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert locate(f"{folder}llama.plan") is None and locate("serve/vllm.plan") is not None


@pytest.mark.parametrize(
    ("name", "help"),
    [
        ("lama.plan", "did you mean `llama`"),
        ("serve/vlm.plan", "did you mean `vllm`?"),
        ("../plans/vlm.plan", "a path is relative to the file that names it"),
    ],
)
def test_a_misspelled_base_names_shipped_plans(name, help, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.plan").write_text(f'plan a for llama\nextend "{name}"\n')
    sink = Sink()
    assert read("a.plan", sink) is None
    assert [d.code for d in sink] == ["PL006"] and next(iter(sink)).help.startswith(help)
