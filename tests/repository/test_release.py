"""A release: one version in all files, builds of the same bytes, the workflow that publishes."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from folders import ROOT

from planc.compat.rows import ROWS
from planc.files.version import VERSION

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
APART = {"all", "dev", "docs", "fp8"}
"""The extras that `all` leaves out; peft does not run in one environment with torchao."""


def test_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    editor = json.loads((ROOT / "grammars" / "vscode" / "package.json").read_text())
    assert citation["version"] == editor["version"] == VERSION


def test_all_has_every_extra():
    extras = PROJECT["optional-dependencies"]
    [text] = extras["all"]
    named = re.fullmatch(r"planc\[(.*)\]", text)[1].split(",")
    assert set(named) == extras.keys() - APART


def test_classifiers_are_known():
    known = pytest.importorskip("trove_classifiers").classifiers
    assert set(PROJECT["classifiers"]) <= known


def built(folder, moment):
    """The bytes of a wheel and of an archive of the sources, built from a copy of the checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        target = folder / "planc" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
        os.utime(target, (moment, moment))
    command = [sys.executable, "-m", "hatchling", "build", "-d", folder / "dist"]
    subprocess.run(list(map(str, command)), cwd=folder / "planc", check=True, capture_output=True)
    return {path.name: path.read_bytes() for path in (folder / "dist").iterdir()}


@pytest.mark.slow
def test_two_builds_are_the_same_bytes(tmp_path):
    pytest.importorskip("hatchling")
    old = os.umask(0o077)
    try:
        first = built(tmp_path / "a", 1_500_000_000)
    finally:
        os.umask(old)
    assert {Path(name).suffix for name in first} == {".whl", ".gz"}
    assert built(tmp_path / "b", 1_700_000_000) == first


def test_the_workflow_runs_targets_that_are_there():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    words = re.findall(r"\bmake ([^$\n]*)", "\n".join(s.get("run", "") for s in steps))
    named = {word for text in words for word in text.split() if "=" not in word}
    assert named == {"lint", "quick", "wheel", "matrix"} and named <= targets


def test_the_workflow_tests_every_row():
    command = [sys.executable, "tests/compat/matrix.py", "names"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert json.loads(listed.stdout) == [row.name for row in ROWS]
    assert WORKFLOW["jobs"]["publish"]["needs"] == ["build", "row"]
