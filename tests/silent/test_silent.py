"""Silent errors that others have reported: a sample of `make silent`, and its page."""

import re

import pytest
import replay
import silent_faults
import silent_jobs
import silent_page
import silent_scripts
from folders import ROOT

PAGE = silent_page.committed()
CASES = {case.name: case for case in replay.CASES}
WRONG_ONES = [found for found in PAGE.values() if not found.startswith(silent_page.RIGHT)]
NAMED = sum(map(bool, WRONG_ONES))
SAMPLE = (
    "final norm",
    "positions of a shard",
    "frozen head",
    "keys without a prefix",
    "norm of own shards",
    "tokens of one rank",
    "shards of FSDP",
    "embedding as a matrix",
    "parts of another weight",
    "sum of gradients",
    "router in fp8",
)
RIGHT = dict.fromkeys(replay.LIMITS, 1e-6)
WRONG = {**RIGHT, "gradients": 0.5}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_silent_error_is_found_at_the_line_that_the_page_has(name, tmp_path):
    made, _, _ = replay.judged(CASES[name], tmp_path)
    assert made.twin == ()
    assert silent_page.row(made).split(" | ")[5] == PAGE[name]


def test_the_page_has_every_case_once():
    assert list(PAGE) == [c.name for k in kinds() for c in replay.CASES if c.kind == k]
    rows = [line for line in silent_page.PAGE.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == len(PAGE) + len(replay.WAITING) + 2 * (len(kinds()) + 1)  # and the heads


def test_the_totals_are_those_of_the_rows(tmp_path, monkeypatch):
    text = silent_page.PAGE.read_text()
    rows = [line for line in text.splitlines() if silent_page._cells(line)]
    assert f"\n{silent_page.summary(rows)} (torch " in text
    made = replay.Replay(case=CASES["mean of means"], truth=WRONG, right=RIGHT)
    changed = {**silent_page.rows(), "mean of means": silent_page.row(made)}
    monkeypatch.setattr(silent_page, "PAGE", tmp_path / "page.md")
    silent_page.write(replay.CASES, changed, replay.WAITING)
    found = silent_page.committed()
    assert found["mean of means"] == "" and {**found, "mean of means": 0} == {
        **PAGE,
        "mean of means": 0,
    }
    assert f" Of the other {len(WRONG_ONES)}, {NAMED - 1} are named" in silent_page.PAGE.read_text()


def test_the_page_is_what_its_rows_give(tmp_path, monkeypatch):
    text, rows = silent_page.PAGE.read_text(), silent_page.rows()
    monkeypatch.setattr(silent_page, "PAGE", tmp_path / "page.md")
    silent_page.write(replay.CASES, rows, replay.WAITING)
    assert silent_page.PAGE.read_text() == text


def test_the_readme_has_the_totals():
    readme = (ROOT / "README.md").read_text()
    assert f"- {NAMED} of [{len(WRONG_ONES)} silent errors" in readme


def test_what_a_run_logs_is_read_with_the_line_of_the_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import planc\n    model(**batch)\n")
    lines = [
        "plan llama (0123): proved",
        "own.plan:3:5: warning[PL104]: option `a` is never used",
        f"{script}:2: warning[PL487]: the 2 ranks: all: the same (help)",
        "warning[PL478]: means",
    ]
    assert list(silent_jobs.warned(lines)) == [
        ("PL487", "model(**batch)", "the 2 ranks: all: the same (help)"),
        ("PL478", "", "means"),
    ]


def kinds():
    return list(dict.fromkeys(case.kind for case in replay.CASES))


def test_at_least_forty_cases_and_95_percent_are_found():
    assert len(replay.CASES) == len(CASES) >= 40 and len(WRONG_ONES) >= 100
    assert NAMED / len(WRONG_ONES) >= 0.95
    assert sum("`" in found for found in WRONG_ONES) / len(WRONG_ONES) >= 0.95


def test_a_case_that_is_computed_as_in_one_process_was_wrong_once():
    """Without the safeguards of `planc.apply`, or in planc itself."""
    for name, found in PAGE.items():
        if found.startswith(silent_page.RIGHT):
            assert CASES[name].script or CASES[name].before
            assert float(found.removeprefix(silent_page.RIGHT)) < 1e-3


def test_every_case_names_a_report_and_breaks_something():
    for case in replay.CASES:
        assert case.public and all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", p) for p in case.public)
        assert not case.how.endswith(".")
        assert (case.right != case.wrong) + bool(case.fault) + bool(case.script) <= 1
        assert not case.before or callable(silent_faults.fault(case.before))
        assert case.where != "options" or case.right_changes is not None
        assert not case.fault or callable(silent_faults.fault(case.fault))
        for script in filter(None, (case.script, case.twin)):
            assert issubclass(silent_jobs.script_class(script), silent_scripts.Script)


@pytest.mark.parametrize(
    ("given", "committed", "says"),
    [
        ({"truth": WRONG, "right": RIGHT}, "check PL502", "accepted, and silent-errors.md says"),
        ({"truth": WRONG, "right": RIGHT}, "", ""),
        ({"truth": WRONG, "right": RIGHT, "twin": ("PL501",)}, "", "the right twin is refuted"),
        ({"truth": WRONG, "right": WRONG}, "", "the right twin trains another model"),
        ({"truth": RIGHT, "right": RIGHT}, "", "the truth is not what the case says"),
    ],
)
def test_what_makes_the_target_fail(given, committed, says):
    made = replay.Replay(case=CASES["final norm"], **given)
    found = list(replay.problems(made, committed))
    assert len(found) == bool(says) and all(says in line for line in found)


def test_a_setting_without_effect_trains_the_same_model():
    made = replay.Replay(case=CASES["keys without a prefix"], truth=WRONG, right=RIGHT)
    assert len(list(replay.problems(made, ""))) == 1
    made.truth = RIGHT
    assert list(replay.problems(made, "")) == []
