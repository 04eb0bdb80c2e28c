"""`planc.apply` on four real processes: what it gives, and what stops it before it begins."""

import pytest
from helpers import slow
from pool import RankError

OVERRIDES = ["tp=2", "param_dtype=fp32"]


def message(four, function, **arguments):
    """What the ranks raised."""
    with pytest.raises(RankError) as caught:
        four.run(f"apply_jobs.{function}", **arguments)
    return str(caught.value)


def test_the_handle(four):
    again = four.run("apply_jobs.handle", overrides=OVERRIDES)
    for rank, handle in enumerate(four.run("apply_jobs.handle", overrides=OVERRIDES)):
        assert handle["data"] == (rank // 2, 2)
        assert handle["mesh"] == {"dp_replicate": 1, "dp_shard": 2, "tp": 2}
        assert handle["data_mesh"] == 2
        assert "model.layers[0:2]" in handle["text"]
        assert handle["digest"] == again[0]["digest"]


@pytest.mark.parametrize("ranks", [(), (0,), slow((1, 3))])
@pytest.mark.parametrize("overrides", [OVERRIDES, ["param_dtype=fp32"]], ids=["tp=2", "tp=1"])
def test_garbage_that_some_ranks_collect_earlier(four, overrides, ranks):
    """Ranks share the mesh of an earlier run together or not at all: a rank alone would wait for
    the others to make its groups; and of groups of one rank, it would name the next ones otherwise.
    """
    results = four.run("apply_jobs.collected", overrides=overrides, ranks=ranks)
    shared, groups = zip(*results, strict=True)
    assert shared == (not ranks,) * 4
    assert len(set(groups)) == 1


def test_rank_0_logs_the_plan_and_its_verdict_once(four):
    lines = four.run("apply_jobs.logged", overrides=OVERRIDES)
    assert len(lines[0]) == 2 and all("plan llama" in line for line in lines[0])
    assert "applied to" in lines[0][0] and "never proved: run `planc check`" in lines[0][1]
    assert lines[1:] == [[], [], []]


def test_every_way_to_name_a_plan_gives_the_same(four, tmp_path):
    digests = four.run("apply_jobs.named", folder=str(tmp_path), overrides=OVERRIDES)
    assert len({d for rank in digests for d in rank}) == 1


def test_ranks_that_disagree_stop_before_anything_is_touched(four):
    for told, untouched in four.run("apply_jobs.disagree"):
        assert "PL491" in told and told.count(" on rank") == 2
        assert untouched


def test_one_rank_with_another_model_stops_all(four):
    told = four.run("apply_jobs.another_model")
    assert all("PL494" in text for text in told)
    assert "rank 2" in told[0] and "shape" not in told[0].partition("rank 2")[0]


ALONE = {
    "plan": ("PlanError", "PL305", "2.plan:9"),
    "file": ("PlanError", "PL006", "2.plan"),
    "code": ("PlanError", "PL172", "which is code"),
    "model": ("KeyError", "PL900", "its configuration"),
}


@pytest.mark.parametrize("how", ALONE)
def test_an_error_on_one_rank_is_told_to_the_others_at_once(four, tmp_path, how):
    kind, code, words = ALONE[how]
    told = four.run("apply_jobs.wrong_on_one", folder=str(tmp_path), how=how, timeout=20)
    assert all(untouched for _, untouched in told)
    for rank, (text, _) in enumerate(told):
        assert words in text
        if rank == 2:
            assert text.startswith(kind) and "rank 2" not in text
        else:
            assert f"error[{code}]: rank 2 cannot apply the plan: " in text


def test_a_second_plan_is_refused(four):
    assert "PL493" in message(four, "twice", overrides=OVERRIDES)


def test_another_world_size_is_refused(four):
    assert "PL490" in message(four, "wrong_world")


def test_what_torch_refuses_names_the_line(four):
    told = message(four, "refused")
    assert "PL492" in told and "mine.plan:8" in told


def test_embeddings_that_skip_the_rule_of_the_embedding(four):
    for told, error in four.run("apply_jobs.embeddings_given", overrides=OVERRIDES):
        assert "PL476" in told and "`model.embed_tokens`" in told and "plans/decoder.plan:" in told
        assert error < 1e-5


def test_other_libraries_that_wrap_a_model_under_a_plan(four):
    for told, error in four.run("apply_jobs.wrapped_afterwards", overrides=OVERRIDES):
        *adapters, compiled = told
        for text in adapters:
            assert "PL489" in text and "peft has put adapters" in text
            assert "`adapters` section" in text
        assert "PL489" in compiled and "torch.compile cannot trace `model.embed_tokens`" in compiled
        assert "`compile` section" in compiled
        assert error < 1e-5


def test_embeddings_without_sequence_parallelism(four):
    plain = [*OVERRIDES, "sequence=false"]
    for told, error in four.run("apply_jobs.embeddings_alone", overrides=plain):
        assert told == "" and error < 1e-5


def test_a_plan_with_errors_raises_all_of_them(four):
    told = message(four, "wrong_plan")
    assert "PL101" in told and "PL105" in told


@pytest.mark.parametrize(
    ("model", "plan", "without", "sequence_parallel"),
    [
        ("qwen3", "qwen3", "q_norm", True),  # its gradient stays a part of a sum
        slow("llama", "llama", "post_attention_layernorm", True),
        ("llama", "llama", "o_proj", False),
        slow("llama", "llama", "down_proj", False),
        ("llama", "llama", "embed_tokens", True),
        slow("gemma3", "gemma3", "k_norm", False),
        ("phi3", "phi3", "qkv_proj", True),
    ],
)
def test_a_broken_plan_is_seen(four, model, plan, without, sequence_parallel):
    """The comparison that proves the plans can fail: an operation is left out, on purpose."""
    overrides = [*OVERRIDES, f"sequence={str(sequence_parallel).lower()}"]
    arguments = {"model": model, "plan": plan, "overrides": overrides}
    try:
        results = four.run("numerics.compare", without=without, **arguments)
    except RankError:
        return
    assert max(max(r["logits"], r["gradient"]) for r in results) > 1e-4
