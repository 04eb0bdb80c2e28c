"""LoRA on the weights of fused experts trains as peft does in one process: logits, loss, every
gradient, and the adapters after three steps; wrong plans are seen.
"""

import pytest

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
