"""`planc.apply(model)` for a family without a plan: rank 0 drafts one, and all ranks take it."""

import pytest

pytestmark = pytest.mark.slow


def test_all_ranks_take_the_draft_of_rank_0(four):
    results = four.run("draft_jobs.without_a_plan", tp=2)
    digests, errors, logs, raised = zip(*results, strict=True)
    assert raised == ("",) * 4
    assert len(set(digests)) == 1 and digests[0]
    assert max(errors) < 1e-5
    warned = [[text for level, text in lines if level == "WARNING"] for lines in logs]
    assert "no plan is for vaultgemma, so rank 0 drafts one" in warned[0][0]
    assert not any("drafts" in text for texts in warned[1:] for text in texts)
    assert any(text.endswith(": proved") for _, text in logs[0])


OWN = """plan own for vaultgemma

mesh {
    dp_shard = auto
    tp       = 1
}

option param_dtype  = "bf16"
option reduce_dtype = "fp32"

fsdp on dp_shard {
    precision(param = param_dtype, reduce = reduce_dtype)
    model.layers.* : unit
    root           : unit
}
"""


def test_a_rank_that_finds_a_plan_of_its_own_ends_all(four, tmp_path):
    """It is in another collective than those that wait for a draft; none waits for ever."""
    (tmp_path / "own.plan").write_text(OWN)
    folders = {"1": str(tmp_path)}
    for digest, _, _, raised in four.run("draft_jobs.without_a_plan", tp=1, folders=folders):
        assert digest == "" and "PL491" in raised
        assert "a draft on ranks 0, 2, 3" in raised and "on rank 1" in raised
