"""The order of suggested plans, and that of the search and of runs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from planc.cli import main
from planc.tools.estimate.memory import GIB
from planc.tools.suggest import suggest as suggesting
from planc.tools.suggest.search import by_slack


def candidate(seconds, gib):
    return SimpleNamespace(seconds=seconds, peak=gib, estimate=SimpleNamespace(usable=71.6 * GIB))


@pytest.mark.parametrize(
    ("plans", "order"),
    [
        ([(1.0, 71.2), (1.003, 67.9)], [1.003, 1.0]),  # cannot be told apart: slack wins
        ([(1.0, 71.2), (1.003, 68.4)], [1.003, 1.0]),  # none has slack: the leanest
        ([(1.0, 71.2), (1.02, 60.0)], [1.0, 1.02]),  # faster than the error of the estimate
        ([(1.0, 65.2), (1.001, 59.6)], [1.0, 1.001]),  # both have slack: the fastest
    ],
)
def test_slack_wins_among_equal_plans(plans, order):
    found = by_slack([candidate(*plan) for plan in plans])
    assert [plan.seconds for plan in found] == order


ASKED = ("suggest", "llama-3.2-1b", "--world-size", "8", "--batch", "8", "--seq", "512")


def report_of_run(run, monkeypatch, capsys, tmp_path, *more):
    """The report before ranks are run, and after; `run` takes the plans and yields those left."""
    before = []

    def run_first(_candidates, best, _request):
        before.append(capsys.readouterr().out)
        yield from run(best)

    monkeypatch.setattr(suggesting, "run_first", run_first)
    code = main([*ASKED, "--set", "tp=1", "-o", str(tmp_path / "a.plan"), *more])
    return code, before, "".join(capsys.readouterr())


def test_the_answer_is_shown_before_a_rank_is_run(monkeypatch, capsys, tmp_path):
    def run(best):
        yield replace(best[0], counted=5 * GIB)
        yield from best[1:]

    code, [before], after = report_of_run(run, monkeypatch, capsys, tmp_path)
    assert code == 0 and "bottleneck of 1: " in before
    assert after.startswith("\n1 holds 5.0 GiB at most when a rank is run\nits estimate in full: ")


def test_a_plan_that_does_not_fit_when_it_is_run_is_not_written(monkeypatch, capsys, tmp_path):
    code, [before], after = report_of_run(lambda best: best[1:], monkeypatch, capsys, tmp_path)
    assert code == 0 and "\n 1  " in before
    assert after.startswith("\n1 does not fit when a rank is run, and is left out\n")
    code, _, after = report_of_run(lambda _: (), monkeypatch, capsys, tmp_path)
    assert code == 1 and "PL712" in after


def test_no_rank_is_run_for_other_kernels(monkeypatch, capsys, tmp_path):
    """It would run the model's own operators, which keep more."""
    more = "--kernels", "fused"
    assert report_of_run(lambda _: (), monkeypatch, capsys, tmp_path, *more)[:2] == (0, [])
