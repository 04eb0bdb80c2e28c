"""Models of diffusers: found, read safely, built by the installed class, shrunk, proved."""

import json
import subprocess
import sys

import diffused
import pytest
from helpers import mutant, sampled, simulated, slow
from modelfolder import found

import planc
from planc.cli import main
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.files.resources import PLANS
from planc.model import cache
from planc.model.load import load
from planc.proxy.shrink import shrink

pytestmark = diffused.needed


def config(name="wan2.1-t2v-1.3b", **fields):
    values = json.loads((PLANS / "models" / f"{name}.json").read_text())
    return {k: v for k, v in {**values, **fields}.items() if v is not ...}


def written(folder, values):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def facts_of(model):
    sink = Sink()
    facts = load(model, sink)
    assert facts is not None, [d.message for d in sink]
    return facts


# Reading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", diffused.TOTALS)
def test_shipped_models(name):
    facts = facts_of(name)
    assert facts.count == diffused.TOTALS[name]
    assert facts.name == facts.family == config(name)["_class_name"]
    assert facts.config_name == f"plans/models/{name}.json"
    assert facts.stated_fields >= {"num_layers", "num_attention_heads", "attention_head_dim"}


@pytest.mark.parametrize(("name", "plan"), [("wan2.1-t2v-1.3b", "wan"), ("flux.1-dev", "flux")])
def test_a_model_that_a_script_has_built(home, name, plan):
    """Its configuration names no class; layouts are inferred as for the folder's."""
    import diffusers
    import torch

    values = shrink(facts_of(name).config, ranks=2).values
    kind = getattr(diffusers, values["_class_name"])
    with torch.device("meta"):
        made = kind.from_config({k: v for k, v in values.items() if k != "_class_name"})
    folder = written(home / "model", values)
    own, named = (
        planc.lower(model, plan, world_size=4, overrides=["tp=2"]) for model in (made, folder)
    )
    assert own == named


def test_a_model_a_pipeline_and_a_cached_hub_name(home, monkeypatch):
    plain = facts_of(written(home / "model", config()))
    written(home / "pipe" / "transformer", config())
    written(home / "pipe" / "transformer_2", config(num_layers=7))
    (home / "pipe" / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    whole = facts_of(str(home / "pipe"))
    assert whole.root == plain.root
    assert whole.config_name.endswith("pipe/transformer/config.json")
    assert facts_of(str(home / "pipe" / "transformer_2")).config["num_layers"] == 7
    hub = home / "hub" / "models--Wan-AI--Wan"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("0123")
    (home / "pipe").rename(hub / "moved")
    (hub / "snapshots").mkdir()
    (hub / "moved").rename(hub / "snapshots" / "0123")
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    assert facts_of("Wan-AI/Wan").config_name == "Wan-AI/Wan/transformer/config.json"


def test_the_cache_gives_what_was_built_and_knows_the_version(home, monkeypatch):
    folder = written(home / "model", config())
    fresh, _ = found(folder, cache=False)
    facts_of(folder)
    assert facts_of(folder) == fresh
    one = cache.key_of(config())
    monkeypatch.setattr(cache, "version", lambda name: "9" if name == "diffusers" else "1")
    two = cache.key_of(config())
    monkeypatch.setattr(cache, "version", lambda name: "8" if name == "diffusers" else "1")
    assert len({one, two, cache.key_of(config())}) == 3
    llama = cache.key_of({"model_type": "llama"})
    monkeypatch.setattr(cache, "version", lambda name: "7" if name == "diffusers" else "1")
    assert cache.key_of({"model_type": "llama"}) == llama


WRONG = [
    ({"_class_name": "WanTransformer3dModel"}, "PL676", "did you mean WanTransformer3DModel"),
    ({"_class_name": "WanPipeline"}, "PL676", "its `transformer` folder"),
    ({"_class_name": "os.system"}, "PL676", "no model class 'os.system'"),
    ({"_class_name": "__builtins__"}, "PL676", "no model class"),
    ({"_class_name": "torch"}, "PL676", "no model class"),
    ({"_class_name": 3}, "PL603", "`_class_name` is 3"),
    ({"num_layers": ...}, "PL603", "lacks `num_layers`"),
    ({"num_layers": "many"}, "PL603", '`num_layers` is "many"'),
    ({"patch_size": "big"}, "PL606", "diffusers cannot build a model"),
]


@pytest.mark.parametrize(("change", "code", "told"), WRONG)
def test_what_is_wrong_with_a_configuration(home, change, code, told):
    sink = Sink()
    assert load(written(home / "model", config(**change)), sink) is None
    assert {d.code for d in sink} == {code}
    assert told in " ".join(f"{d.message} {d.help}" for d in sink)


def test_a_check_that_has_no_model_exits_2(home, monkeypatch, capsys):
    """Nothing could be judged: not a finding about the plan."""
    mistaken = written(home / "model", config(_class_name="WanTransformer3dModel"))
    assert main(["check", mistaken, "wan"]) == 2
    assert "error[PL676]" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert main(["check", mistaken, "wan"]) == 2
    assert "error[PL675]" in capsys.readouterr().out


def test_code_in_the_folder_is_not_run(home):
    folder = written(home / "model", config(auto_map={"AutoModel": "mine.Model"}))
    (home / "model" / "mine.py").write_text("raise SystemExit('it ran')")
    assert load(folder, Sink()) is not None


def test_without_diffusers_the_extra_is_named(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    sink = Sink()
    assert load(written(home / "model", config()), sink) is None
    assert [(d.code, d.help) for d in sink] == [("PL675", "pip install 'planc[diffusers]'")]


def test_other_models_import_no_diffusers():
    """So it costs them nothing; torch and transformers are there on a cold cache."""
    code = "import sys; from planc.model.load import load\n"
    code += "from planc.diagnostics.diagnostic import Sink\n"
    code += "load('gpt2', Sink(), cache=False); print('diffusers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


# Small -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", diffused.TOTALS)
def test_the_small_model_runs_and_reaches_all(name, tp):
    from planc.proxy.diffusers_model import DiffusersBuilder

    small = shrink(facts_of(name).config, ranks=tp).values
    assert (small["num_attention_heads"] % tp == 0) == (
        config(name)["num_attention_heads"] % tp == 0
    )
    builder = DiffusersBuilder(small)
    model = builder.build(0)
    assert sum(p.numel() for p in model.parameters()) < 3_000_000
    output = model(**builder.sample())
    output.loss.backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # the last block of SD3 drops what its text attends to
    last = f"transformer_blocks.{small['num_layers'] - 1}.attn.add_q_proj"
    assert idle == ([f"{last}.weight", f"{last}.bias"] if name == "sd3-medium" else [])


def test_of_another_class_the_inputs_are_not_known():
    values = {
        "_class_name": "AuraFlowTransformer2DModel",
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
    }
    from planc.proxy.diffusers_model import DiffusersBuilder

    with pytest.raises(ValueError, match="what the forward of AuraFlowTransformer2DModel takes"):
        DiffusersBuilder(values)


# Proofs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", ["true", slow("false")])
@pytest.mark.parametrize(
    ("name", "plan"), sampled([(n, diffused.plan_of(n)) for n in diffused.TOTALS], 2)
)
def test_shipped_plans_are_proved(name, plan, checkpointing):
    settings = ["tp=4", f"recompute={checkpointing}"]
    verdict, findings = simulated(name, plan, settings)
    said = Sink()
    compile_plan(name, plan, said, world_size=64, settings=settings)
    assert (verdict.verdict, findings) == ("proved", [])
    assert 0 < verdict.outcome.worst < 1e-5
    assert {d.code for d in said} <= {"PL204", "PL527"}


MUTANTS = [  # (model, plan, what it says, what it is to say, the code, in its message)
    ("wan2.1-t2v-1.3b", "wan", "ffn.net[2] : rowwise", "", "PL50", "ffn"),
    ("wan2.1-t2v-1.3b", "wan", "attn{1,2}.to_out[0] : rowwise", "", "PL50", "to_out"),
    ("wan2.1-t2v-1.3b", "wan", "attn{1,2} :", "attn1 :", "PL50", "attn2"),
    ("wan2.1-t2v-1.3b", "wan", ": features", ": parameters(weight = shard(0))", "PL50", "norm_q"),
    ("wan2.1-i2v-14b", "wan", "optional attn2.norm_added_k : features", "", "PL50", "attn2"),
    ("flux.1-dev", "flux", "parts = [width, 4 * width]", "parts = 5", "PL50", "proj_out"),
    ("flux.1-dev", "flux", "attn.norm_{q,k} : replicate(gradient = sum)", "", "PL50", "norm_q"),
    ("flux.1-dev", "flux", "norm_out.linear : colwise(-> replicate)",
     "norm_out.linear : colwise", "PL50", "norm_out"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan", "right", "wrong", "code", "where"), sampled(MUTANTS, 3))
def test_a_broken_plan_is_refuted(tmp_path, name, plan, right, wrong, code, where):
    path = mutant(tmp_path, plan, right, wrong)
    verdict, findings = simulated(name, path, ["tp=2"])
    assert verdict.verdict == "refuted"
    assert any(d.code.startswith(code) and where in d.message for d in findings)


def test_heads_that_do_not_split_are_refused():
    sink = Sink()
    assert (
        compile_plan("wan2.1-t2v-1.3b", "wan", sink, world_size=8, settings=["tp=8"]).lowered
        is None
    )
    assert "attention is split over heads" in " ".join(d.message for d in sink)


# Units -------------------------------------------------------------------------------------------

SHARDED = """plan sharded for CLASS

mesh {
    dp_shard = auto
}

fsdp on dp_shard {
    UNITS : unit
    root  : unit
}
"""


@pytest.fixture
def bypassed(monkeypatch, home):
    """Feed-forward modules whose `forward` is called past their hooks, and a cache of its own."""
    from diffusers.models.attention import FeedForward

    monkeypatch.setattr(FeedForward, "__call__", FeedForward.forward)
    return home


def sharded(folder, name, units):
    path = folder / "sharded.plan"
    cls = config(name)["_class_name"]
    path.write_text(SHARDED.replace("CLASS", cls).replace("UNITS", units))
    return simulated(name, path, [])


UNCALLED = [("wan2.1-t2v-1.3b", "blocks.*", "ffn"), ("flux.1-dev", "transformer_blocks.*", "ff")]


@pytest.mark.parametrize(("name", "block", "inner"), UNCALLED)
def test_a_unit_that_is_never_called_where_nothing_is_split(bypassed, name, block, inner):
    verdict, findings = sharded(bypassed, name, f"{block}.{inner}")
    assert [d.code for d in findings] == ["PL508"]
    assert findings[0].labels[0].span.line == 8
    assert verdict.verdict == "refuted"
    verdict, findings = sharded(bypassed, name, block)
    assert (verdict.verdict, findings) == ("proved", [])
    assert [(s.name, s.verdict) for s in verdict.sections] == [("fsdp on dp_shard", "proved")]


@pytest.mark.parametrize(("name", "block", "inner"), UNCALLED)
def test_units_of_a_shipped_model_that_are_called(home, name, block, inner):
    verdict, findings = sharded(home, name, f"{block}.{inner}")
    assert (verdict.verdict, findings) == ("proved", [])
    assert verdict.gathered


def test_each_plan_has_the_verdict_of_its_own_units(bypassed):
    verdict, findings = simulated("wan2.1-t2v-1.3b", "wan", ["tp=2"])
    assert (verdict.verdict, findings) == ("proved", [])
    root = "    root : unit"
    path = mutant(bypassed, "wan", root, f"    $blocks.ffn : unit\n{root}")
    verdict, findings = simulated("wan2.1-t2v-1.3b", path, ["tp=2"])
    assert [d.code for d in findings] == ["PL508"]
    assert verdict.verdict == "refuted"
