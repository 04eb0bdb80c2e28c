"""Experts on ranks of their own on four processes, beside the single process."""

from pathlib import Path

import pytest
from numerics import build
from test_plans import right, settings

import planc
from planc.ops.document import dumps

pytestmark = pytest.mark.slow

FAMILIES = [
    ("mixtral", "mixtral"),
    ("qwen3_moe", "qwen3_moe"),
    ("deepseek_v3", "deepseek_v3"),
    ("gpt_oss", "gpt_oss"),
    ("llama4", "llama4"),
]
WAYS = {
    "beside tensor ranks inside each expert": dict(tp=2, ep=2, etp=2),
    "within tensor ranks": dict(tp=2, ep=2),
    "over tensor and data ranks": dict(tp=2, ep=4),
    "over data ranks": dict(tp=1, ep=2),
    "over a part of the tensor ranks": dict(tp=4, ep=2),
}


def compared(four, model, plan, *more, **arguments):
    overrides = [*settings(param_dtype="fp32"), *more]
    return four.run("numerics.compare", model=model, plan=plan, overrides=overrides, **arguments)


def given(way):
    return [f"{name}={size}" for name, size in WAYS[way].items()]


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_divide(four, way):
    changes = {"num_key_value_heads": 4, "num_local_experts": 8}
    right(compared(four, "mixtral", "mixtral", *given(way), changes=changes))


@pytest.mark.parametrize(
    "way", ["over tensor and data ranks", "beside tensor ranks inside each expert"]
)
@pytest.mark.parametrize(("model", "plan"), FAMILIES)
def test_families(four, model, plan, way):
    right(compared(four, model, plan, *given(way)))


@pytest.mark.parametrize("way", list(WAYS)[:3])
def test_the_script_has_the_same_bits(four, way):
    mine = compared(four, "mixtral", "mixtral", *given(way))
    script = compared(four, "mixtral", "mixtral", *given(way), script=True)
    right(script)
    assert [r["bits"] for r in mine] == [r["bits"] for r in script]


CHUNKS = """plan chunks for any

extend "PLAN"

override expert on ep {
    $experts : dispatch(all_to_all, chunks = 3)
}
"""


@pytest.mark.parametrize(
    ("model", "plan", "way"),
    [
        ("qwen3_moe", "qwen3_moe", "over tensor and data ranks"),
        ("llama4", "llama4", "over data ranks"),
        ("mixtral", "mixtral", "beside tensor ranks inside each expert"),
    ],
)
def test_tokens_in_chunks(four, tmp_path, model, plan, way):
    """Each is sent while another one is computed, in both directions."""
    path = tmp_path / "chunks.plan"
    path.write_text(CHUNKS.replace("PLAN", plan))
    mine = compared(four, model, str(path), *given(way))
    right(mine)
    script = compared(four, model, str(path), *given(way), script=True)
    assert [r["bits"] for r in mine] == [r["bits"] for r in script]


def test_chunks_of_compiled_blocks(four, tmp_path):
    """The graph of a block breaks where its tokens are sent."""
    path = tmp_path / "chunks.plan"
    path.write_text(CHUNKS.replace("PLAN", "qwen3_moe") + "compile {\n    $blocks : block\n}\n")
    right(compared(four, "qwen3_moe", str(path), *given("over data ranks")))


LIMITED = """plan limited for any

extend "PLAN"

override expert on ep {
    $experts : dispatch(all_to_all, capacity = 0.75, drop = DROP)
}
"""


def limited(folder, plan, drop):
    path = folder / "limited.plan"
    path.write_text(LIMITED.replace("PLAN", plan).replace("DROP", drop))
    return str(path)


@pytest.mark.parametrize(
    ("model", "plan", "drop", "mesh"),
    [
        ("qwen3_moe", "qwen3_moe", "probs", ["tp=2", "ep=4"]),
        ("mixtral", "mixtral", "position", ["tp=2", "ep=2", "etp=2"]),
        ("gpt_oss", "gpt_oss", "probs", ["tp=1", "ep=4"]),
        ("deepseek_v3", "deepseek_v3", "probs", ["tp=2"]),
        ("gpt_oss", "gpt_oss", "position", ["tp=2"]),
    ],
)
def test_tokens_that_find_no_slot(four, tmp_path, model, plan, drop, mesh):
    """The single process, whose experts have as many slots in a row, drops the same."""
    path = limited(tmp_path, plan, drop)
    mine = compared(four, model, path, *mesh)
    right(mine)
    script = compared(four, model, path, *mesh, script=True)
    assert [r["bits"] for r in mine] == [r["bits"] for r in script]


@pytest.mark.parametrize("mesh", [["tp=2", "ep=4"], ["tp=2"]])
def test_slots_in_compiled_blocks(four, tmp_path, mesh):
    """The graph of a block breaks where tokens look for a slot; nothing is computed again."""
    path = Path(limited(tmp_path, "qwen3_moe", "probs"))
    path.write_text(path.read_text() + "compile {\n    $blocks : block\n}\n")
    right(compared(four, "qwen3_moe", str(path), *mesh, "recompute=false"))


@pytest.mark.parametrize(
    ("model", "drop", "mesh"),
    [
        ("qwen3_moe", "probs", ["cp=2", "ep=4"]),
        ("mixtral", "position", ["cp=2", "tp=2"]),
        ("qwen3_moe", "position", ["pp=2", "ep=2", "microbatches=2"]),
    ],
)
def test_slots_of_rows_in_parts_and_stages(four, tmp_path, model, drop, mesh):
    """Two steps of AdamW by the trial's program, with padding and packed rows."""
    made = build(model)
    path, overrides = limited(tmp_path, model, drop), settings(param_dtype="fp32")
    plan = planc.lower(made, path, world_size=4, overrides=[*overrides, *mesh])
    small = {**made.config.to_dict(), "architectures": [type(made).__name__]}
    for found in four.run("coverage_jobs.prove", values=small, document=dumps(plan)):
        errors = (found[n] for n in ("logits", "loss", "norm", "gradient", "parameters"))
        assert max(errors) < 1e-4, found
        assert found["padding"]


def test_replicas_of_divided_experts(four):
    right(compared(four, "mixtral", "mixtral", "dp_replicate=2", "dp_shard=2", "ep=2"))


@pytest.mark.parametrize("way", list(WAYS)[:4])
def test_the_handle(four, way):
    """The norm of all gradients, clipping, and full weights."""
    overrides = [*settings(param_dtype="fp32"), *given(way)]
    arguments = dict(model="mixtral", plan="mixtral", overrides=overrides)
    for result in four.run("training_jobs.clip", norm_type=2.0, fraction=0.5, **arguments):
        assert result["norm"] == pytest.approx(result["right"], rel=1e-5)
        assert result["error"] < 1e-4
    assert four.run("training_jobs.full", every_rank=True, **arguments) == [1, 1, 1, 1]


def test_a_rank_holds_its_experts_alone(four):
    overrides = [*settings(param_dtype="fp32"), *given("over tensor and data ranks")]
    for share in four.run(
        "expert_jobs.shares", model="mixtral", path="mixtral", overrides=overrides
    ):
        experts = [pair for name, pair in share.items() if "experts" in name]
        assert experts and all(own * 4 == full for own, full in experts)


@pytest.mark.parametrize("way", list(WAYS)[:3])
def test_resumed(four, tmp_path, way):
    """Saved and loaded by ranks that each have their own experts: weights and losses go on."""
    overrides = [*settings(param_dtype="fp32"), *given(way)]
    arguments = dict(model="mixtral", old="mixtral", new="mixtral", overrides=overrides)
    for result in four.run("expert_jobs.resumed", folder=str(tmp_path / "run"), **arguments):
        assert result["equal"]
        assert result["losses"] == pytest.approx(result["right"], rel=1e-4)
