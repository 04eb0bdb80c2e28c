"""`planc lower --format transformers`: a DistributedConfig, which transformers loads and trains."""

import json

import pytest
from console import call
from families import FAMILIES

PLAIN = ("--set", "sequence=false", "--set", "recompute=false")


def written(model, plan, *words, format="transformers", world=8):
    return call("lower", model, plan, "--world-size", world, *words, "--format", format)


def test_sizes_and_all_plans_of_a_mixture():
    code, text, errors = written(
        "mixtral-8x7b", "mixtral", "--set", "tp=2", "--set", "ep=4", *PLAIN
    )
    config = json.loads(text)
    assert code == 0, errors
    assert {n: v for n, v in config.items() if n.endswith("size")} == {
        "tp_size": 2,
        "fsdp_size": 4,
        "ep_size": 4,
    }
    assert config["ep_implementation"] == "all_to_all"
    assert config["fsdp_mixed_precision"] is True and config["fsdp_cpu_offload"] is False
    assert config["tp_plan"]["model.layers.*.self_attn.q_proj"] == "colwise"
    assert config["fsdp_plan"]["model.layers.*"] == "free_full_weight"
    experts = "model.layers.*.mlp.experts"
    assert config["ep_plan"][experts] == "ep_dispatch_experts"
    assert config["ep_plan"][f"{experts}.gate_up_proj"] == "grouped_gemm"


def test_a_split_that_the_plan_lacks_is_turned_off(tmp_path):
    """transformers merges the rules into those that it ships for the model."""
    (tmp_path / "a.plan").write_text(
        'plan a for llama\nextend "llama.plan"\noverride tensor on tp {\n'
        "    sequence = sequence\n    $blocks.mlp.{gate_proj,up_proj} : colwise\n"
        "    $blocks.mlp.down_proj : rowwise\n}\n"
    )
    code, text, errors = written("llama-3.1-8b", tmp_path / "a.plan", "--set", "tp=2", *PLAIN)
    plan = json.loads(text)["tp_plan"]
    assert code == 0, errors
    assert plan["model.layers.*.self_attn.q_proj"] == plan["lm_head"] == "replicate"
    assert plan["model.layers.*.mlp.down_proj"] == "rowwise"


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (("--set", "recompute=true"), 1, "`checkpoint`"),
        (("--set", "cp=2"), 1, "the axis `cp`"),
        (("--set", "tp=2", "--set", "sequence=true"), 1, "PL739"),
    ],
)
def test_what_has_no_word_is_named(words, code, named):
    found, _, errors = written("llama-3.1-8b", "llama", *PLAIN, *words)
    assert found == code and named in errors


def test_attributes_of_a_class():
    code, text, _ = written(
        "llama-3.1-8b", "llama", "--set", "tp=2", *PLAIN, format="transformers-class"
    )
    found = {}
    exec(text, found)
    from transformers import LlamaConfig

    assert code == 0
    assert LlamaConfig.base_model_tp_plan.items() <= found["base_model_tp_plan"].items()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("sizes", ["tp=2", "tp=1", "ep=2"])
def test_the_config_trains_the_same_model(name, sizes, four, tmp_path):
    """On four processes: (fsdp 2, tp 2), fsdp 4, and (fsdp 4, ep 2)."""
    from planc.syntax.plan_files import plan_of_family

    values = FAMILIES[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    plan = plan_of_family(values["model_type"]).name
    words = ("--set", sizes, "--set", "param_dtype=fp32", "--set", "reduce_dtype=fp32", *PLAIN)
    _, text, errors = written(str(tmp_path), plan, *words, world=4)
    config = json.loads(text)
    for row in four.run("distributed_config_jobs.train", values=values, config=config):
        assert row["loss"] < 1e-4 and row["gradient"] < 1e-4, (row, errors)
