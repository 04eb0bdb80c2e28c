"""Every code has a page, every page its form, and its example gives its code."""

import contextlib
import io
import re
import shlex
import textwrap
from pathlib import Path

import pytest

from planc.cli import main
from planc.report import explain

ROOT = Path(__file__).parent.parent
MODELS = {
    "llama": "llama-3.1-8b",
    "qwen2": "qwen2.5-0.5b",
    "qwen3": "qwen3-8b",
    "phi3": "phi-4",
    "gpt2": "gpt2",
}
PARTS = re.compile(
    r"# (PL\d{3}): [^\n]+[^.\n]\n\n.+?\n\n## Example\n\n(.+?)\n\n## How to mend it\n\n.+\n", re.S
)
UNREACHED = {
    "PL415": "no shipped model mixes dtypes; tests/test_checks.py has one that does",
    "PL650": "the model of the plan's header is taken; tests/test_elaborate.py gives another",
    "PL900": "a bug in planc; tests/test_cli.py makes one",
}
"""Codes whose example can't be run here, with the reason. PL49x are in tests/dist."""


def codes_in_source():
    found = set()
    for path in (ROOT / "planc").rglob("*.py"):
        found |= set(re.findall(r'"(PL\d{3})"', path.read_text()))
    return found


def test_the_codes_of_the_source_are_the_pages():
    assert codes_in_source() == set(explain.codes())


def test_the_index_is_fresh():
    text = (ROOT / "docs" / "diagnostics" / "README.md").read_text()
    assert text == explain.index(), "run `make pages`"


@pytest.mark.parametrize("code", explain.codes())
def test_page(code, tmp_path, monkeypatch):
    page = explain.explain(code)
    match = PARTS.fullmatch(page)
    assert match, "a page has a title, a text, an example and a remedy"
    assert match[1] == code
    if code in UNREACHED or code.startswith("PL49"):
        return
    example = textwrap.dedent(match[2]).strip() + "\n"
    monkeypatch.chdir(tmp_path)
    assert code in findings(example, tmp_path)


def findings(example, folder):
    """What planc prints of an example: a command, a config.json, or a plan for its family."""
    (folder / "old.json").write_text("{}")
    (folder / "checkpoints" / "run-7").mkdir(parents=True)
    lines = example.splitlines()
    command = next((line.removeprefix("$ ") for line in lines if "planc check" in line), None)
    command = command or next((line for line in lines if line.startswith("planc ")), None)
    if command:
        if lines[0].startswith("# "):  # a file that the command names
            file = folder / lines[0][2:]
            file.parent.mkdir(parents=True)
            file.write_text("\n".join(lines[1 : lines.index("")]) + "\n")
        words = shlex.split(command)[1:]
    elif example.startswith("{"):
        (folder / "config.json").write_text(example)
        words = ["check", ".", "llama"]
    else:
        (folder / "a.plan").write_text(example)
        header = re.search(r"plan \w+ for (\w+)", example)
        model = MODELS.get(header[1] if header else "", "llama-3.1-8b")
        words = ["check", model, "a.plan", "--world-size", "24"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        main([*words, *(["--format", "concise"] if words[0] == "check" else [])])
    return output.getvalue()
