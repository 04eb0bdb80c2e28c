"""Scalar parameters under FSDP: torch needs a dim to shard, the model and its files have none."""

import pytest

import planc

pytestmark = pytest.mark.slow


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
        # the scalar's gradient is a sum whose terms cancel: one process that takes the rows one by
        # one is 1.3e-5 off the same in float64
        assert errors.pop("gradient") < 1e-4, errors
        assert len(errors) == 5 and max(errors.values()) < 1e-5, errors


def test_an_emitted_script_computes_the_same(four, plan):
    assert four.run("scalar_jobs.emitted", plan=str(plan), overrides=[*FP32, "tp=2"]) == [True] * 4


def test_one_that_trains_beside_adapters_is_in_their_file_as_the_model_has_it(four, plan, tmp_path):
    found = four.run("scalar_jobs.beside_adapters", plan=str(plan), folder=str(tmp_path), own=False)
    assert found == [((), 1.0, "")] * 4


def test_one_of_the_model_itself_has_no_place_in_their_file(four, plan, tmp_path):
    job = dict(plan=str(plan), folder=str(tmp_path), own=True)
    for _, _, raised in four.run("scalar_jobs.beside_adapters", **job):
        assert "PL688" in raised and "the model has trainable parameters of its own" in raised
