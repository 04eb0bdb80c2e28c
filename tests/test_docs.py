"""Every example in the docs is run: its commands must print what the page says.

A ```plan block is written to `example.plan`; the commands of a ```console block run beside it, in
an empty folder. `pytest --update` writes the true output into the page.
"""

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

import pytest

from planc.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DEMO = re.compile(r"^\$ (planc [^\n]*)\n.*?(?=\n\n(?:== |\$ )|\n```)", re.M | re.S)
BLOCK = re.compile(r"^```(plan|console)\n(.*?)^```$", re.M | re.S)


def run(command):
    words = shlex.split(command)
    assert words[0] == "planc", f"an example runs planc: {command}"
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        main(words[1:])
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    return "".join(f"{line}\n" for line in lines)


def played(text, folder):
    """The page with the true output in its console blocks."""

    def replace(match):
        kind, body = match.groups()
        if kind == "plan":
            (folder / "example.plan").write_text(body)
            return match[0]
        commands = [line[2:] for line in body.splitlines() if line.startswith("$ planc ")]
        if not commands:
            return match[0]
        return "```console\n" + "".join(f"$ {c}\n{run(c)}" for c in commands) + "```"

    return BLOCK.sub(replace, text)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_page(page, tmp_path, monkeypatch, request):
    if page.name == "diffusion.md":
        pytest.importorskip("diffusers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "cache"))
    text = page.read_text()
    new = played(text, tmp_path)
    if request.config.getoption("--update"):
        page.write_text(new)
        return
    assert new == text, f"run pytest {os.path.relpath(__file__, ROOT)} --update and read the change"


def test_the_demo_as_it_ran(tmp_path, monkeypatch, request):
    """What docs/demo/transcript.md shows of `make demo`: planc's commands, not the training."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    page = ROOT / "docs" / "demo" / "transcript.md"
    before, fence, demo = page.read_text().partition("```text\n== ")
    new = DEMO.sub(lambda match: f"$ {match[1]}\n{run(match[1]).rstrip()}", demo)
    assert len(DEMO.findall(demo)) > 5
    if request.config.getoption("--update"):
        page.write_text(f"{before}{fence}{new}")
        return
    assert new == demo, f"run pytest {os.path.relpath(__file__, ROOT)} --update and read the change"


def test_the_language_page_shows_every_construct():
    """A construct of the grammar that no example uses is one that the reference forgot."""
    text = (ROOT / "docs" / "language.md").read_text()
    plans = "\n".join(body for kind, body in BLOCK.findall(text) if kind == "plan")
    words = "plan for mesh auto option let require when else then extend override optional has none"
    words += " load init meta weights slices ops save offload every"
    words += " tensor checkpoint compile fsdp colwise rowwise sequence input unit group root full"
    words += " precision reshard except_last never block fullgraph local replicate min max len in"
    missing = [w for w in words.split() if not re.search(rf"\b{w}\b", plans)]
    assert missing == []
