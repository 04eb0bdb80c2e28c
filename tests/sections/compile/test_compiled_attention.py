"""PL485 refuses what torch cannot run, and no more; test_activation_checkpoint.py runs both."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import planc
from planc.diagnostics.diagnostic import PlanError
from planc.runtime.preconditions import require_recomputable

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
BLOCKS, MLP = "model.layers.*", "model.layers.*.mlp"
DIES = {
    "full": (BLOCKS, "full", BLOCKS),
    "one graph": (f"{BLOCKS} : block(fullgraph = true)", "full", BLOCKS),
    "matrix products are saved": (BLOCKS, "ops(save = [matmul])", BLOCKS),
    "attention alone": (BLOCKS, "full", f"{BLOCKS}.self_attn"),
    "one of two blocks": (BLOCKS, "full", "model.layers[1]"),
}
RUNS = {
    "attention is saved": (BLOCKS, "ops(save = [attention])", BLOCKS),
    "no attention is recomputed": (BLOCKS, "full", MLP),
    "no attention is compiled": (MLP, "full", BLOCKS),
    "another block": ("model.layers[0]", "full", "model.layers[1]"),
}


def asked(folder, compiled, how, checkpointed, *, tp=2, device="cpu", attention="sdpa"):
    compiled = compiled if ":" in compiled else f"{compiled} : block"
    plan = folder / "example.plan"
    plan.write_text(
        f'plan t for llama\nextend "llama"\ncompile {{\n    {compiled}\n}}\n'
        f"override checkpoint {{\n    {checkpointed} : {how}\n}}\n"
    )
    model = LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation=attention))
    require_recomputable(
        model, planc.lower(model, str(plan), world_size=2, overrides=[f"tp={tp}"]), device
    )


@pytest.mark.parametrize("name", DIES)
def test_what_dies_is_refused(name, tmp_path):
    with pytest.raises(PlanError, match=r"PL485.*example\.plan:4.*example\.plan:7"):
        asked(tmp_path, *DIES[name])


@pytest.mark.parametrize("name", RUNS)
def test_what_runs_is_not(name, tmp_path):
    asked(tmp_path, *RUNS[name])


@pytest.mark.parametrize("other", [{"tp": 1}, {"device": "cuda"}, {"attention": "eager"}])
def test_what_runs_for_another_reason_is_not(other, tmp_path):
    asked(tmp_path, *DIES["full"], **other)
