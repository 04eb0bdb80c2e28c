"""Scalar parameters under FSDP: torch needs a dim to shard, the model and its files have none."""

import pytest

import planc


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    from scalar_jobs import built

    path = tmp_path_factory.mktemp("clip") / "clip.plan"
    path.write_text(planc.init(built(1)).text)
    return path


FP32 = ["param_dtype=fp32", "reduce_dtype=fp32"]


@pytest.mark.parametrize("overrides", [[], ["tp=2"], ["dp_replicate=2"]], ids=" ".join)
def test_they_train_and_are_saved_as_the_model_has_them(four, plan, tmp_path, overrides):
    for errors in four.run(
        "scalar_jobs.all_ways", plan=str(plan), folder=str(tmp_path), overrides=[*FP32, *overrides]
    ):
        assert len(errors) == 6 and max(errors.values()) < 1e-5, errors


def test_an_emitted_script_computes_the_same(four, plan):
    assert four.run("scalar_jobs.emitted", plan=str(plan), overrides=[*FP32, "tp=2"]) == [True] * 4
