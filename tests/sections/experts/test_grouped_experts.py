"""PL226 says of a model on one rank what torch says of its first forward and backward."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import planc

PLAN = """plan t for {family}
mesh {{
    dp_shard = auto
}}
{compile}
fsdp on dp_shard {{
    root : unit
}}
"""
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "num_local_experts": 4,
}
BATCHED, LOOP = ({"experts_implementation": kind} for kind in ("batched_mm", "eager"))
HALF = {"dtype": torch.bfloat16}
CASES = [
    ("mixtral", {"intermediate_size": 40}, {}, True),
    ("mixtral", {"intermediate_size": 36}, {}, True),
    ("mixtral", {"intermediate_size": 34}, {}, False),
    ("mixtral", {"intermediate_size": 34}, BATCHED, True),
    ("mixtral", {"intermediate_size": 34}, LOOP, True),
    ("mixtral", {"intermediate_size": 40}, HALF, True),
    ("mixtral", {"intermediate_size": 36}, HALF, False),
    ("mixtral", {"intermediate_size": 36}, {**HALF, **LOOP}, True),
    ("mixtral", {"intermediate_size": 40, "hidden_size": 66}, {}, False),
    ("gpt_oss", {"intermediate_size": 36}, {}, True),
    ("gpt_oss", {"intermediate_size": 34}, {}, False),
    ("gpt_oss", {"intermediate_size": 36}, HALF, False),
    ("llama4_text", {"intermediate_size": 34, "intermediate_size_mlp": 48}, HALF, True),
]


def built(family, fields, **choices):
    config = AutoConfig.for_model(family, **{**SMALL, **fields})
    return AutoModelForCausalLM.from_config(config, **choices)


def found(model, tmp_path, compile=""):
    plan = tmp_path / "example.plan"
    plan.write_text(PLAN.format(family=model.config.model_type, compile=compile))
    return [d.code for d in planc.check(model, str(plan), world_size=2, level="structure")]


@pytest.mark.parametrize(("family", "fields", "choices", "runs"), CASES)
def test_what_torch_says(family, fields, choices, runs, tmp_path):
    model = built(family, fields, **choices)
    ids = torch.arange(32).reshape(2, 16)
    try:
        model(input_ids=ids, labels=ids).loss.backward()
        ran = True
    except RuntimeError as error:
        assert "strides should be multiple of 16 bytes" in str(error)
        ran = False
    assert ran is runs
    assert ("PL226" in found(model, tmp_path)) is not runs


def test_a_graph_multiplies_expert_by_expert_except_in_bf16(tmp_path):
    compile = "compile {\n    model.layers.* : block\n}"
    assert "PL226" not in found(built("mixtral", {"intermediate_size": 34}), tmp_path, compile)
    assert "PL226" in found(built("mixtral", {"intermediate_size": 36}, **HALF), tmp_path, compile)
