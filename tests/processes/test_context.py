"""Gradients over `dp_shard * cp`, with slices of the sequence on the ranks of `cp`."""

import pytest

LIMIT = 1e-4

PLAN = """plan t for llama

mesh {
    dp_shard = auto
    cp       = 2
}

context on cp {
    attention = script
}

fsdp on dp_shard_cp {
    model.layers.* : unit
    root           : unit
}
"""


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "t.plan"
    path.write_text(PLAN)
    return str(path)


@pytest.mark.parametrize("mesh", ["loss", "dp_cp", "dp_shard_cp"])
def test_slices_of_the_sequence(four, plan, mesh):
    for result in four.run("context_jobs.judge", path=plan, loss=mesh):
        assert all(error < LIMIT for error in result.values()), result


def test_a_loss_over_data_ranks_alone_is_another(four, plan):
    for result in four.run("context_jobs.judge", path=plan, loss="dp"):
        assert result["loss"] > 10 * LIMIT
        assert result["gradient"] < LIMIT


def test_slices_that_do_not_see_each_other(four, plan):
    assert max(r["gradient"] for r in four.run("context_jobs.judge", path=plan, gather=False)) > 0.1
