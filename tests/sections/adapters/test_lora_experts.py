"""LoRA on the weights of fused experts trains as peft does in one process: logits, loss, every
gradient, and the adapters after three steps; wrong plans are seen.
"""

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("peft")

LIMIT = 1e-5
MESHES = {
    "dp 4": [],
    "HSDP": ["dp_replicate=2"],
    "tp 2": ["tp=2"],
    "tp 2, sequence": ["tp=2", "sequence=true"],
    "ep 2": ["ep=2"],
    "ep 4": ["ep=4"],
    "ep 4 of tp 2": ["ep=4", "tp=2"],
    "ep 2, etp 2": ["tp=2", "ep=2", "etp=2"],
}
FP32 = ["param_dtype=fp32"]


def right(results, count):
    for found in results:
        assert max(found[w] for w in ("logits", "loss", "gradient", "change")) < LIMIT, found
        assert found["count"] == count


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("family", "count"),
    [("mixtral", 8), ("qwen3_moe", 4), ("gpt_oss", 8), ("deepseek_v3", 4)],
)
def test_experts_train_as_in_one_process(four, family, count, mesh):
    overrides = [*MESHES[mesh], *FP32]
    right(four.run("expert_adapter_jobs.compare", family=family, overrides=overrides), count)


@pytest.mark.parametrize("kind", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("mesh", ["tp 2", "ep 2"])
def test_each_way_to_compute_experts(four, kind, mesh):
    changes = {"experts_implementation": kind}
    arguments = {"family": "mixtral", "overrides": [*MESHES[mesh], *FP32], "changes": changes}
    right(four.run("expert_adapter_jobs.compare", **arguments), 8)


@pytest.mark.parametrize("mesh", ["tp 2", "ep 2, etp 2"])
@pytest.mark.parametrize("broken", ["no parts", "no sum", "another expert"])
def test_a_wrong_factor_is_seen(four, broken, mesh):
    arguments = {"family": "mixtral", "overrides": [*MESHES[mesh], *FP32], "broken": broken}
    found = four.run("expert_adapter_jobs.compare", **arguments)
    assert max(max(f["gradient"], f["change"]) for f in found) > 1e-2


def test_stages(four):
    overrides = ["pp=2", "microbatches=2", *FP32]
    for found in four.run("expert_adapter_jobs.compare", family="mixtral", overrides=overrides):
        assert max(found["loss"], found["gradient"], found["change"]) < LIMIT, found


@pytest.mark.parametrize("mesh", ["tp 2", "ep 2"])
def test_rank_stabilized(four, mesh):
    body = "    $experts : lora(rank = 3, alpha = 6, init = random, rslora = true)\n"
    arguments = {"family": "mixtral", "overrides": [*MESHES[mesh], *FP32], "body": body}
    right(four.run("expert_adapter_jobs.compare", **arguments), 8)


def test_one_weight_of_experts_and_attention(four):
    body = (
        "    $experts : lora(rank = 5, init = random, parameters = down_proj)\n"
        "    $blocks.self_attn.q_proj : lora(rank = 4, init = random)\n"
    )
    arguments = {"family": "mixtral", "overrides": ["tp=2", *FP32], "body": body}
    right(four.run("expert_adapter_jobs.compare", **arguments), 8)


@pytest.mark.parametrize("mesh", ["tp 2", "ep 2, etp 2"])
def test_the_script_computes_the_same(four, mesh):
    arguments = {"family": "gpt_oss", "overrides": [*MESHES[mesh], *FP32]}
    assert four.run("expert_adapter_jobs.scripted", **arguments) == [True] * 4


# Files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize(("mesh", "others"), [("tp 2", "ep 2"), ("ep 2, etp 2", "dp 4")])
def test_files_of_peft(four, tmp_path, family, mesh, others):
    one, two = ([*MESHES[name], *FP32] for name in (mesh, others))
    arguments = {"family": family, "folder": str(tmp_path), "overrides": one, "others": two}
    for distance, config in four.run("expert_adapter_jobs.files", **arguments):
        assert distance < LIMIT
        ends = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
        assert (config["target_parameters"], config["target_modules"]) == (ends, ["o_proj"])


def test_files_that_do_not_fit(four, tmp_path):
    arguments = {"folder": str(tmp_path), "overrides": ["tp=2", *FP32]}
    assert four.run("expert_adapter_jobs.refused", **arguments) == [["PL496"] * 3] * 4


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_an_export_with_adapters_merged(four, tmp_path, family):
    arguments = {"family": family, "folder": str(tmp_path / "m"), "overrides": ["tp=2", *FP32]}
    for distance, changed in four.run("expert_adapter_jobs.merged", **arguments):
        assert distance < LIMIT < 1e-3 < changed


@pytest.mark.parametrize(("mesh", "others"), [("ep 2, etp 2", "tp 2"), ("dp 4", "ep 4")])
def test_a_run_goes_on_under_another_plan(four, tmp_path, mesh, others):
    one, two = ([*MESHES[name], *FP32] for name in (mesh, others))
    arguments = {"family": "mixtral", "overrides": one, "others": two}
    found = four.run("expert_adapter_jobs.resumed", folder=str(tmp_path / "run"), **arguments)
    assert max(found) < LIMIT


@pytest.mark.parametrize(("mesh", "others"), [("tp 2", "dp 4"), ("ep 2, etp 2", "ep 4")])
def test_values_at_the_start(four, tmp_path, mesh, others):
    one, two = ([*MESHES[name], *FP32] for name in (mesh, others))
    arguments = {"folder": str(tmp_path / "base"), "overrides": one, "others": two}
    assert four.run("expert_adapter_jobs.begins", **arguments) == [(True, True)] * 4
