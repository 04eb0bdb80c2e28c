"""Packed documents in models with a state: what ranks compute is what documents alone give."""

import pytest

pytestmark = pytest.mark.slow

LIMIT = 1e-5
FP32 = ("param_dtype=fp32", "reduce_dtype=fp32")
TP, PP = ("tp=2",), ("pp=2", "tp=2", "microbatches=2")
CASES = [
    ("bamba", "falcon_h1", TP),
    ("bamba", "falcon_h1", ("tp=2", "sequence=false", "recompute=false")),
    ("bamba", "falcon_h1", ("tp=1", "dp_replicate=2")),
    ("bamba", "falcon_h1", PP),
    ("qwen3_next", "qwen3_next", TP),
    ("qwen3_next", "qwen3_next", PP),
    ("falcon_h1", "falcon_h1", TP),
    ("nemotron_h", "nemotron_h", TP),
    ("jamba", "jamba", TP),
    ("mamba2", "mamba2", TP),
    ("mamba2", "mamba2", PP),
    ("zamba2", "zamba2", TP),
    ("minimax", "minimax", TP),
]


@pytest.mark.parametrize(("model", "plan", "settings"), CASES)
def test_documents_are_apart(four, model, plan, settings):
    arguments = {"model": model, "plan": plan, "overrides": [*FP32, *settings]}
    for result in four.run("document_jobs.compare", **arguments):
        assert max(result[name] for name in ("logits", "loss", "gradient")) < LIMIT, result


ALL = ("cp=2", "pp=2", "microbatches=2")


@pytest.mark.parametrize(
    ("model", "plan", "settings", "passes"),
    [
        ("bamba", "falcon_h1", ALL, 2),
        ("qwen3_next", "qwen3_next", ALL, 2),
        ("nemotron_h", "nemotron_h", (*ALL, "schedule=interleaved_1f1b"), 1),
        ("qwen3_next", "qwen3_next", ("cp=2", "tp=2"), 4),
        ("jamba", "jamba", ("cp=2",), 2),
    ],
)
def test_parts_of_rows_in_stages_over_several_passes(four, model, plan, settings, passes):
    """Ranks of `cp` know where documents begin in whole rows, of each microbatch and pass; rounding
    of states that are handed on is a few times that of one process.
    """
    arguments = {"model": model, "plan": plan, "overrides": [*FP32, *settings], "passes": passes}
    for result in four.run("document_jobs.compare", **arguments):
        assert max(result["loss"], result["gradient"]) < 5 * LIMIT, result


@pytest.mark.parametrize("model", ["bamba", "qwen3_next"])
def test_an_emitted_script_keeps_them_apart(four, model):
    plan = {"bamba": "falcon_h1"}.get(model, model)
    arguments = {"model": model, "plan": plan, "overrides": [*FP32, *TP], "script": True}
    for result in four.run("document_jobs.compare", **arguments):
        assert max(result[name] for name in ("logits", "gradient")) < LIMIT, result
