"""A thousand of the cases that `make fuzz` runs, and the judge of them."""

import fuzzing
import pytest
from cases import Case, case

SEED = 11
PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_broken_input_ends_with_a_known_exit_code(part):
    """In parts, so that a failure is seen before all have run."""
    numbers = range(part * 100, part * 100 + 100)
    ended = list(fuzzing.run(SEED, numbers))
    wrong = {number: failure for number, _, failure, _ in ended if failure}
    assert wrong == {}, f"python tests/fuzz/fuzzing.py --seed {SEED} --only {next(iter(wrong))}"
    assert len(ended) == 100 and {one.kind for _, one, _, _ in ended} == set(KINDS)


KINDS = ("plan", "config", "lowered")


def test_a_case_is_the_same_whatever_ran_before():
    assert case(SEED, 5) == case(SEED, 5) != case(SEED, 6)
    assert case(SEED, 5) != case(SEED + 1, 5)


def raised():
    raise ValueError("a bug")


@pytest.mark.parametrize(
    ("answer", "fields", "failure"),
    [
        ((1, "1 error", ""), {}, None),
        (raised, {}, "a bug"),
        ((3, "", ""), {}, "exit code 3"),
        ((2, "", "error[PL900]: planc itself"), {}, "PL900"),
        ((0, "Traceback (most recent", ""), {}, "Traceback"),
        ((0, "", ""), {"seconds": -1}, "CPU time"),
        ((0, "{", ""), {"json": True}, "no JSON"),
        ((2, "", ""), {"json": True}, None),
    ],
)
def test_the_judge_sees_what_is_wrong(tmp_path, monkeypatch, answer, fields, failure):
    monkeypatch.setattr(fuzzing, "call", lambda *_: answer() if callable(answer) else answer)
    one = {"kind": "plan", "files": {"p.plan": b""}, "words": (), "json": False, "seconds": 5}
    found = fuzzing.failure(Case(**{**one, **fields}), tmp_path)[0]
    assert found is None if failure is None else failure in found
