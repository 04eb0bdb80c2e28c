"""The rows of versions: their constraints, bounds, pages, and what is said of other versions."""

import json
import logging
import re
import subprocess
import tomllib

import matrix
import numerics
import pytest
import torch
from console import call
from folders import ROOT
from packaging.requirements import Requirement
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

import planc
from planc.compat import rows
from planc.compat.rows import ROWS, untested_versions
from planc.model import cache

HERE = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}


def test_versions_of_a_row_are_tested():
    assert untested_versions(HERE) == []


def test_another_minor_version_is_not():
    assert untested_versions(HERE | {"torch": "2.19.0"}) == ["torch 2.19.0"]
    assert untested_versions({"torch": "2.13.1", "transformers": "5.99.1"}) == [
        "transformers 5.99.1"
    ]


def test_versions_of_a_row_that_did_not_run_are_not():
    assert untested_versions(HERE | {"torch": "2.14.1"}) == ["torch 2.14.1"]


def test_a_library_that_is_not_installed_has_no_version():
    assert untested_versions({"torch": "none"}) == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_constraints_of_a_row_are_written(row):
    text = matrix.constraints_file(row).read_text()
    assert text == matrix.constraints_text(row)
    assert all(f"\n{name}=={version}\n" in text for name, version in row.pins.items())


def test_an_environment_of_core_tests_borrows_what_does_not_differ(tmp_path, monkeypatch):
    installed = {name: matrix.release(name) for name in rows.LIBRARIES}
    row = rows.TestedVersions(**installed, others={"pytest": "0.0.1"})
    monkeypatch.setattr(matrix, "ROWS", (row,))
    asked = []
    monkeypatch.setattr(matrix.subprocess, "run", lambda words, **_: asked.append(words))
    assert matrix.borrows(row)
    matrix.borrow(row, tmp_path / "row")
    [words] = asked
    assert words[-1] == "pytest==0.0.1" and "--no-deps" in words
    monkeypatch.undo()
    code = "import sys, torch; print(torch.__file__); print(sys.prefix)"
    python = tmp_path / "row" / "bin" / "python"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [torch.__file__, str(tmp_path / "row")]
    assert not matrix.borrows(rows.TestedVersions(torch="2.99.0", transformers="5.23.0"))


def test_the_newest_versions_are_free():
    newest = matrix.ALL[-1]
    text = matrix.constraints_file(newest).read_text()
    assert text == matrix.constraints_text(newest)
    assert not re.search(r"^(torch|transformers|huggingface_hub)==", text, re.M)
    assert "\npeft==" in text


def test_bounds_admit_the_rows_and_no_other_minor_version_of_torch():
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = {(r := Requirement(text)).name: r.specifier for text in found}
    assert all(row.pins[name] in bounds[name] for row in ROWS for name in rows.LIBRARIES)
    assert "2.12.1" not in bounds["torch"] and "2.15.0" not in bounds["torch"]
    assert "5.16.0" not in bounds["transformers"]


def test_a_row_counts_as_run_where_the_page_has_its_run():
    ran = json.loads(matrix.RESULTS.read_text())
    assert {row.name for row in ROWS if row.ran} <= ran.keys()
    for row in ROWS:
        if row.name in ran:
            versions = ran[row.name]
            assert rows.minor(versions["torch"]) == rows.minor(row.torch)
            assert rows.minor(versions["transformers"]) == rows.minor(row.transformers)


def test_the_page_is_written_from_the_results():
    assert matrix.PAGE.read_text() == matrix.page(json.loads(matrix.RESULTS.read_text()))


def test_a_report_is_counted(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite><testcase classname='tests.a' name='x'/>"
        "<testcase classname='tests.a' name='y'><failure/></testcase>"
        "<testcase classname='tests.a' name='z'><skipped/></testcase></testsuite></testsuites>"
    )
    assert matrix.counts(report) == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "failures": ["tests.a.y"],
    }
    text = matrix.page({ROWS[0].name: ran_with(matrix.counts(report))})
    assert re.search(r"\| core \| 2026-11-29 \| torch 2\.13\.0.* \| 1 \| 1 \| 1 \| 3 \|", text)
    assert "`tests.a.y`" in text and "| never |" in text


def ran_with(counts):
    of = {"tests": "core", "date": "2026-11-29", "torch": "2.13.0", "transformers": "5.23.0"}
    return {**of, **counts, "minutes": 3}


@pytest.fixture
def later(monkeypatch):
    """A torch that no row has."""
    versions = cache.environment() | {"torch": "2.19.0"}
    monkeypatch.setattr(cache, "environment", lambda: versions)


TOLD = "planc is not tested with torch 2.19.0"
WORDS = ("llama-3.1-8b", "llama", "--world-size", 8, "--level", "structure", "--strict")


def test_check_tells_of_an_untested_version(later):
    code, out, _ = call("check", *WORDS)
    assert code == 0 and f"info[PL744]: {TOLD}" in out
    [finding] = planc.check(*WORDS[:2], world_size=8, level="structure")
    assert finding.code == "PL744" and finding.severity == "info"


def test_check_says_nothing_of_a_tested_one():
    code, out, _ = call("check", *WORDS)
    assert code == 0 and "PL744" not in out


@pytest.mark.parametrize("rank", [0, 1])
def test_apply_warns_once_on_rank_0(later, rank, caplog):
    distributed.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        with torch.device("meta"):
            model = numerics.build("llama")
        with caplog.at_level(logging.WARNING, logger="planc"):
            planc.apply(model, "llama", device_type="cpu", require="nothing")
    finally:
        distributed.destroy_process_group()
    found = [record.message for record in caplog.records if "PL744" in record.message]
    assert len(found) == (rank == 0) and all(TOLD in message for message in found)
