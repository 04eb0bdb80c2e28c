"""What `planc.apply` holds the ranks to: a verdict, equal weights, and equal inputs where layers
are split."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

JOBS = Path(__file__).parent / "safeguard_jobs.py"
FP32 = ["param_dtype=fp32", "reduce_dtype=fp32"]
TP2 = [*FP32, "tp=2"]
TP4 = [*FP32, "tp=4"]


@pytest.mark.parametrize(
    "overrides", [[*FP32, "dp_replicate=4"], [*FP32], TP2, [*FP32, "tp=2", "dp_replicate=2"]]
)
def test_ranks_with_other_weights_stop_in_their_first_pass(four, overrides):
    results = four.run("safeguard_jobs.other_seeds", overrides=overrides)
    for _, first, again in results:
        assert "PL484" in first and first == again
        assert called(first) == "run = planc.apply(model, "
        assert "model.embed_tokens.weight is the first of 21 that differ" in first
        assert "0, 1, 2 and 3" in first
    warned = [[text for level, text in lines if level == "WARNING"] for lines, _, _ in results]
    assert any("different weights" in text for text in warned[0])
    assert not any("different weights" in text for texts in warned[1:] for text in texts)


def test_weights_are_not_compared_where_nothing_is(four):
    for lines, first, _ in four.run("safeguard_jobs.other_seeds", overrides=FP32, compare=0):
        assert first == "" and "weights" not in str(lines)


def test_one_value_on_one_rank_is_seen(four):
    for raised in four.run("safeguard_jobs.one_other_value", overrides=FP32):
        assert "PL484" in raised
        assert "the ranks 0, 1, 3 and 2 have built different weights" in raised
        assert "model.layers.1.mlp.down_proj.weight is the first of 1 " in raised


def called(text):
    """The call at the line of the script that a finding names."""
    place, number = re.match(r"(\S+):(\d+): \w+\[PL\d+\]: ", text).groups()
    assert place == str(JOBS.relative_to(Path.cwd()) if JOBS.is_relative_to(Path.cwd()) else JOBS)
    line = JOBS.read_text().splitlines()[int(number) - 1]
    return re.match(r"[^(]*\((?:\w+, )?", line.strip())[0]


@pytest.mark.parametrize("how", ["run", "torch"])
def test_weights_that_are_loaded_are_equal_again(four, tmp_path, how):
    arguments = {"folder": str(tmp_path), "overrides": TP2, "how": how}
    assert four.run("safeguard_jobs.loaded", **arguments) == [("", True)] * 4


@pytest.mark.parametrize(
    ("overrides", "how", "told"),
    [
        (FP32, "one rank", "on some of them alone"),
        (TP2, "one rank", "on some of them alone"),
        (TP2, "values", "to different values"),
        ([*FP32, "dp_replicate=2"], "values", "to different values"),
        (FP32, "buffer", "on some of them alone"),
        (FP32, "loaded then one rank", "on some of them alone"),
    ],
)
def test_weights_that_a_script_changes_differently(four, tmp_path, overrides, how, told):
    results = four.run(
        "safeguard_jobs.changed", overrides=overrides, how=how, folder=str(tmp_path), timeout=60
    )
    for first, again in results:
        assert "PL484" in first and told in first and first == again
        assert called(first) == "model("


@pytest.mark.parametrize("overrides", [FP32, TP2, [*FP32, "dp_replicate=4"]])
@pytest.mark.parametrize("how", ["all", "none"])
def test_weights_that_all_ranks_change_alike(four, overrides, how):
    results = four.run("safeguard_jobs.changed", overrides=overrides, how=how, timeout=60)
    assert results == [["", ""]] * 4


RANK0 = """plan own for llama

extend "llama"

load {
    weights = rank0
}
"""


def test_a_plan_that_says_so_sends_the_weights_of_rank_0(four, tmp_path):
    results = four.run("safeguard_jobs.from_rank0", folder=str(tmp_path), text=RANK0)
    for lines, raised, right in results:
        assert raised == "" and right
        assert "different weights" not in str(lines)


def test_a_rank_on_meta_has_nothing_to_receive_them_with(four, tmp_path):
    arguments = {"folder": str(tmp_path), "text": RANK0, "meta": True}
    for _, raised, _ in four.run("safeguard_jobs.from_rank0", **arguments):
        assert "PL484" in raised and "the ranks 0 and 1, 2, 3" in raised


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("sampler", "`input_ids` and `labels` differ"),
        ("mask", "`attention_mask` differs"),
    ],
)
def test_ranks_of_a_tensor_axis_with_other_rows_stop(four, how, what):
    pairs = [{0, 1}, {0, 1}, {2, 3}, {2, 3}]
    results = four.run("safeguard_jobs.rows", overrides=TP2, how=how)
    for rank, (raised, _) in enumerate(results):
        assert "PL483" in raised[0] and what in raised[0], raised
        assert called(raised[0]) == "model("
        first, second = sorted(pairs[rank])
        assert f"the ranks {first} and {second} of tp " in raised[0]
        assert "forward pass 1" in raised[0]


@pytest.mark.parametrize(
    ("how", "what"),
    [("swapped", "`input_ids` and `labels` differ"), ("length", "types and shapes of these")],
)
def test_one_rank_of_four_is_named(four, how, what):
    arguments = {"overrides": TP4, "changes": {"num_key_value_heads": 4}, "how": how}
    for raised, _ in four.run("safeguard_jobs.rows", **arguments):
        assert "PL483" in raised[0] and what in raised[0], raised
        assert "the ranks 0, 2, 3 and 1 of tp " in raised[0]


def test_right_rows_pass_and_one_hook_stays(four):
    for raised, hooks in four.run("safeguard_jobs.rows", overrides=TP2, passes=4):
        assert raised == [""] * 4
        assert hooks == four.run("safeguard_jobs.rows", overrides=TP2, compare=0)[0][1] + 1
    alone = four.run("safeguard_jobs.rows", overrides=FP32, passes=3)
    assert alone == [([""] * 3, hooks - 1)] * 4


def test_rows_of_the_first_passes_are_compared_before_they_run(four):
    for raised, _ in four.run("safeguard_jobs.rows", overrides=TP2, how="late", passes=3):
        assert raised[0] == "" and "PL483" in raised[1] and "forward pass 2" in raised[1]


HSDP = [*TP2, "dp_replicate=2"]
STAGES = [*FP32, "pp=2", "microbatches=2"]


@pytest.mark.parametrize(
    ("overrides", "how", "code", "axis"),
    [
        (TP2, "loop", "PL483", "tp"),
        (TP2, "own", "PL483", "tp"),
        (TP2, "evaluated", "PL483", "tp"),
        (HSDP, "loop", "PL483", "tp"),
        (STAGES, "loop", "PL545", "pp"),
        (STAGES, "evaluated", "PL545", "pp"),
        ([*STAGES, "tp=2"], "loop", "PL545", "pp"),
    ],
)
def test_rows_of_a_later_pass_are_compared_one_pass_after(four, overrides, how, code, axis):
    ranks = [2, 3] if axis == "pp" else [1, 3]
    arguments = {"overrides": overrides, "how": how, "ranks": ranks, "timeout": 90}
    _later(four.run("safeguard_jobs.later_rows", **arguments), code, axis)


LINES = {"tp": ((0, 1), (2, 3)), "cp": ((0, 1), (2, 3)), "pp": ((0, 2), (1, 3))}


def _later(results, code, axis):
    """All ranks raise it in the fourth pass, for the third."""
    for rank, (raised, *_) in enumerate(results):
        first, second = next(line for line in LINES[axis] if rank in line)
        assert raised[:3] == [""] * 3 and f"[{code}]: the ranks {first} and {second} " in raised[3]
        assert f" of {axis} " in raised[3]
        assert re.search(r"in (forward pass|batch) 3: `input_ids` and `labels` d", raised[3])
        assert called(raised[3]) in ("run.forward_backward(", "run.evaluate(", "model(")


def test_ranks_that_share_sequences_compare_all_batches(four, tmp_path):
    (tmp_path / "parts.plan").write_text(PARTS)
    arguments = {"plan": str(tmp_path / "parts.plan"), "overrides": []}
    for how in ("loop", "own"):
        results = four.run("safeguard_jobs.later_rows", how=how, timeout=60, **arguments)
        _later(results, "PL545", "cp")


def test_no_checkpoint_is_written_after_a_pass_of_other_rows(four, tmp_path):
    arguments = {"how": "saved", "wrong": 2, "folder": str(tmp_path)}
    results = four.run("safeguard_jobs.later_rows", overrides=TP4, timeout=60, **arguments)
    for raised, _, _ in results:
        assert raised[0] == "" and "PL483" in raised[1] and "forward pass 2" in raised[1]
        assert called(raised[1]) == "run.save("


def test_nothing_is_compared_where_nothing_is_asked(four):
    results = four.run("safeguard_jobs.rows", overrides=TP2, how="sampler", compare=0)
    assert [raised for raised, _ in results] == [[""]] * 4


def test_without_a_tensor_axis_every_rank_reads_its_own(four):
    results = four.run("safeguard_jobs.rows", overrides=FP32, how="sampler")
    assert [raised for raised, _ in results] == [[""]] * 4


@pytest.mark.parametrize(
    ("overrides", "told"),
    [(FP32, "the 4 ranks of dp_shard"), (TP2, "the 2 ranks of dp_shard")],
)
def test_data_ranks_that_all_read_the_same_are_told(four, overrides, told):
    results = four.run("safeguard_jobs.same_rows", overrides=overrides, others=[])
    (level, text), *more = results[0][0]
    assert level == "WARNING" and not more
    assert "warning[PL487]: " in text and told in text and "first 2 training passes" in text
    assert called(text) == "model("
    assert [lines for lines, _ in results[1:]] == [[]] * 3
    left = four.run("safeguard_jobs.same_rows", overrides=overrides, others=[], compare=0)
    # one stays: of the rows of tensor ranks, or of documents until a batch has positions
    assert [hooks + 1 for _, hooks in left] == [hooks for _, hooks in results]


@pytest.mark.parametrize("others", [[0], [1]])
def test_one_pass_of_other_rows_is_enough(four, others):
    results = four.run("safeguard_jobs.same_rows", overrides=FP32, others=others)
    assert [lines for lines, _ in results] == [[]] * 4


UNEVEN = [
    ("means", " to 26 labels"),
    ("none", " 0 to 30 labels"),
    ("local count", " to 26 labels"),
    ("given next", " to 26 labels"),
]


@pytest.mark.parametrize("overrides", [FP32, TP2])
@pytest.mark.parametrize(("how", "told"), UNEVEN)
def test_means_over_different_numbers_of_labels_are_told(four, overrides, how, told):
    results = four.run("safeguard_jobs.uneven", overrides=overrides, how=how)
    assert [lines for lines, _ in results[1:]] == [[]] * 3
    (level, text), *more = results[0][0]
    assert level == "WARNING" and not more and "warning[PL478]: " in text
    assert "the ranks of dp_shard take the means of their losses over" in text and told in text
    assert "training pass 1" in text and called(text) == "run.model("
    # no collective of its own: for each axis one a pass, and one for the weights
    assert {count for _, count in results} == {3 if overrides == FP32 else 6}


PARTS = """plan parts for llama

mesh {
    dp_shard = 2
    cp       = 2
}

context on cp {
    balance = head_tail
}

fsdp on dp_shard * cp {
    root : unit
}
"""


@pytest.mark.parametrize(
    ("how", "told", "ranks"),
    [
        ("means", "24 to 26 labels", 2),
        ("even", "", 2),
        ("loop", "", 2),
        ("divided", "", 2),
        ("local count", "`num_items_in_batch` is 26, the labels of this pass", 2),
        ("local count", "gradients are 1/4 of those of the mean", 4),
    ],
)
def test_means_over_parts_of_sequences(four, tmp_path, how, told, ranks):
    """Each rank has a part of its row's labels; all parts of a row count."""
    text = PARTS.replace("dp_shard = 2", f"dp_shard = {4 // ranks}")
    (tmp_path / "parts.plan").write_text(text.replace("cp       = 2", f"cp       = {ranks}"))
    arguments = {"plan": str(tmp_path / "parts.plan"), "overrides": [], "how": how}
    for rank, (lines, _) in enumerate(four.run("safeguard_jobs.uneven", **arguments)):
        assert len(lines) == (rank == 0 and how in ("means", "local count"))
        assert all("warning[PL478]: " in text and told in text for _, text in lines)


@pytest.mark.parametrize(
    "how",
    [
        *("even", "loop", "loop that weighs", "own counts", "divided", "given"),
        *("without labels", "no gradients", "frozen", "even next"),
    ],
)
def test_nothing_is_told_where_losses_are_weighed_or_no_mean_trains(four, how):
    for lines, _ in four.run("safeguard_jobs.uneven", overrides=FP32, how=how):
        assert lines == []


def test_an_evaluation_that_counts_labels_hides_nothing(four):
    results = four.run("safeguard_jobs.uneven", overrides=FP32, how="evaluated first")
    assert "PL478" in results[0][0][0][1] and "training pass 1" in results[0][0][0][1]


@pytest.mark.parametrize("overrides", [[*FP32, "dp_replicate=4"], [*TP2, "dp_replicate=2"]])
def test_a_pass_of_one_data_rank_alone_waits_for_no_other(four, overrides):
    """A sample that one rank generates; the training passes after it are compared as ever."""
    results = four.run("safeguard_jobs.evaluated_alone", overrides=overrides, timeout=40)
    assert [hooks for *_, hooks in results] == [results[0][-1]] * 4
    lines, before, after, _ = results[0]
    assert before == 0 < after
    (level, text), *more = lines
    assert level == "WARNING" and not more
    assert "warning[PL487]: " in text and "first 2 training passes" in text


def test_accumulation_and_checkpoints_compute_the_same(four):
    assert four.run("safeguard_jobs.accumulated", overrides=[*TP2, "recompute=true"]) == [True] * 4


@pytest.mark.parametrize("overrides", [FP32, TP2])
def test_an_optimizer_of_replaced_parameters_is_refused(four, overrides):
    for early, late in four.run("safeguard_jobs.optimizers", overrides=overrides):
        assert "PL486" in early and "21 of the 21 parameters" in early
        assert called(early) == "return said("
        assert late == ""


COMPILED = """plan own for llama

extend "llama"

compile {
    model.layers.* : block
}
"""


def test_compiled_blocks_change_nothing(four, tmp_path):
    arguments = {"folder": str(tmp_path), "text": COMPILED}
    for right, wrong, later, graphs in four.run("safeguard_jobs.compiled", **arguments):
        assert right == later == "" and graphs > 0
        assert "PL483" in wrong and "pass 2" in wrong


def test_a_refuted_plan_is_refused_on_every_rank_before_anything_is_touched(four):
    levels = [None, "proved", "refuted", None]  # of each rank's cache
    for raised, _, touched in four.run("safeguard_jobs.known", levels=levels):
        assert "PL480" in raised and "refuted, says rank 2" in raised
        assert not touched
    for raised, lines, touched in four.run(
        "safeguard_jobs.known", levels=levels, require="nothing"
    ):
        assert raised == "" and touched
        assert ("WARNING" in {level for level, _ in lines}) == bool(lines)


@pytest.mark.parametrize(
    ("level", "require", "code"),
    [
        (None, None, ""),
        (None, "proved", "PL481"),
        (None, "verified", "PL482"),
        ("undecided", None, ""),
        ("undecided", "proved", "PL481"),
        ("proved", None, ""),
        ("proved", "proved", ""),
        ("proved", "verified", "PL482"),
    ],
)
def test_what_is_required_of_a_plan(four, level, require, code):
    """The verdict is in the cache of one machine, and holds on all."""
    levels = [None, None, None, level]
    results = four.run("safeguard_jobs.known", levels=levels, require=require)
    for raised, _, touched in results:
        assert code in raised and bool(raised) == bool(code) == (not touched)
    if not code:
        level, text = results[0][1][-1]
        assert level == ("INFO" if levels[3] == "proved" else "WARNING")
        assert ("never proved" if levels[3] is None else "says rank 3") in text
        assert [lines for _, lines, _ in results[1:]] == [[]] * 3
