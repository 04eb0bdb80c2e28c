"""What the handle offers a training loop equals the single process, and costs what it says."""

import pytest

pytestmark = pytest.mark.slow

FP32 = ["param_dtype=fp32", "recompute=false"]
LIMIT = 1e-4


UNITS = 4  # two blocks, the embedding, the norm with the head; the root has nothing of its own


@pytest.mark.parametrize(
    ("mesh", "sums"), [(["tp=1"], 0), (["tp=2"], None), (["tp=1", "dp_replicate=2"], UNITS)]
)
def test_no_sync_reduces_once(four, mesh, sums):
    results = four.run(
        "training_jobs.accumulate", model="llama", plan="llama", overrides=[*FP32, *mesh]
    )
    for result in results:
        before, last = result["before"], result["last"]
        if sums is None:  # tensor parallelism has collectives of its own in every pass
            own = before["reduce_scatter"] / 2
        else:
            own = 0
            assert before["reduce_scatter"] == before["all_reduce"] == 0
            assert last["all_reduce"] == sums
        assert last["reduce_scatter"] - own == UNITS
        assert result["error"] < LIMIT


@pytest.mark.parametrize("mesh", [["tp=1"], ["tp=1", "dp_replicate=2"], ["dp_replicate=4"]])
def test_no_sync_accumulates_in_shards(four, mesh):
    """Each pass reduces as if it were alone, but for what no axis shards, which is reduced once."""
    options = {"model": "llama", "plan": "llama", "overrides": [*FP32, *mesh], "whole": False}
    for result in four.run("training_jobs.accumulate", **options):
        before, last = result["before"], result["last"]
        assert before["reduce_scatter"] == 2 * last["reduce_scatter"]
        assert last["reduce_scatter"] == (0 if mesh == ["dp_replicate=4"] else UNITS)
        assert before["all_reduce"] == (2 * UNITS if "dp_replicate=2" in mesh else 0)
        assert last["all_reduce"] == (0 if mesh == ["tp=1"] else UNITS)
        assert result["error"] < LIMIT


TENSOR = """
plan narrow for llama

mesh {
    tp = 4
}

tensor on tp {
    model.layers.* {
        self_attn.{q,k,v}_proj : colwise
        mlp.{gate,up}_proj     : colwise
        self_attn.o_proj       : rowwise
        mlp.down_proj          : rowwise
    }
}
"""


def test_without_units_there_is_nothing_to_hold_back(four, tmp_path):
    plan = tmp_path / "narrow.plan"
    plan.write_text(TENSOR)
    changes = {"num_key_value_heads": 4}
    arguments = {"model": "llama", "plan": str(plan), "overrides": [], "changes": changes}
    for result in four.run("training_jobs.accumulate", **arguments):
        assert result["before"]["all_reduce"] == 2 * result["last"]["all_reduce"] > 0
        assert result["error"] < LIMIT


@pytest.mark.parametrize("mesh", ["tp=1", "tp=2"])
def test_unshard_gathers_once(four, mesh):
    arguments = {"model": "llama", "plan": "llama"}
    overrides = [*FP32, mesh, "sequence=false"]
    for result in four.run("training_jobs.infer", overrides=overrides, **arguments):
        first, wrong = result["first"]
        assert first > 0
        assert wrong < LIMIT
        assert result["after"] == result["first"]
        inside, wrong = result["inside"]
        own = 0 if mesh == "tp=1" else inside  # tensor parallelism gathers the logits
        assert inside - own == 0
        assert inside < 3 * first
        assert wrong < LIMIT
        sharded, gathered, closed = result["numbers"]
        assert gathered > sharded == closed or gathered > closed
        assert result["gradient"] < LIMIT


def test_unshard_before_the_first_pass(four):
    results = four.run(
        "training_jobs.early", model="llama", plan="llama", overrides=[*FP32, "tp=2"]
    )
    for wrong, gradient in results:
        assert wrong < LIMIT
        assert gradient < LIMIT


CLIPS = [
    ("llama", ["tp=1"], "dp_shard"),
    ("llama", ["tp=2"], "dp_shard tp"),
    ("llama", ["dp_replicate=2"], "dp_replicate dp_shard"),
    ("llama", ["tp=2", "dp_replicate=2", "dp_shard=1"], "tp"),
    ("llama-tied", ["tp=2"], "dp_shard tp"),
    ("gemma3", ["tp=2", "sequence=false"], "dp_shard tp"),
]


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize(("model", "mesh", "layout"), CLIPS)
def test_clipping(four, model, mesh, layout, norm_type):
    plan = "gemma3" if model == "gemma3" else "llama"
    overrides = [*FP32, *mesh]
    results = four.run(
        "training_jobs.clip",
        model=model,
        plan=plan,
        overrides=overrides,
        norm_type=norm_type,
        fraction=0.5,
    )
    for result in results:
        assert result["norm"] == pytest.approx(result["right"], rel=1e-5)
        assert result["error"] < LIMIT
        assert any(layout in found for found in result["layouts"]), result["layouts"]
    assert len({result["norm"] for result in results}) == 1


def test_a_small_gradient_is_left_alone(four):
    results = four.run(
        "training_jobs.clip",
        model="llama",
        plan="llama",
        overrides=[*FP32, "tp=2"],
        norm_type=2.0,
        fraction=2.0,
    )
    for result in results:
        assert result["error"] < LIMIT


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("float64", 1e-12)])
def test_clipping_over_layouts_of_every_kind(four, dtype, most):
    for total, right, worst in four.run("training_jobs.clip_by_hand", dtype=dtype):
        assert total == pytest.approx(right, rel=most)
        assert worst < 1e-5  # torch's scale has 1e-6 under it


@pytest.mark.parametrize("every_rank", [False, True])
@pytest.mark.parametrize("model", ["llama", "llama-tied"])
def test_the_full_state_dict(four, model, every_rank):
    results = four.run(
        "training_jobs.full",
        model=model,
        plan="llama",
        overrides=["param_dtype=fp32", "tp=2"],
        every_rank=every_rank,
        changes={"vocab_size": 131},
    )
    tied = 2 if model == "llama-tied" else 1
    assert results == [tied] * 4 if every_rank else [tied, "empty", "empty", "empty"]
