"""Every example in the docs is run: its commands must print what the page says.

Each page runs in an empty folder, by the rules of tests/support/console.py. `pytest --update`
writes the true output into the page.
"""

import os
import re

import pytest
from console import BLOCK, played, run, with_rounding_of
from folders import ROOT
from helpers import slow

from planc.cli import COMMANDS
from planc.files.resources import PLANS
from planc.syntax.plan_files import families

DOCS = ROOT / "docs"
FOLDERS = (".", "how-to", "language", "generated")
PAGES = [ROOT / "README.md", *(p for name in FOLDERS for p in sorted((DOCS / name).glob("*.md")))]
LONG = ("estimate.md", "hang.md", "more-gpus.md")
"""Pages whose commands take a minute; `make processes` runs them."""
HOW_TOS = [page for page in sorted((DOCS / "how-to").glob("*.md")) if page.name != "README.md"]
DEMO = re.compile(r"^\$ (planc [^\n]*)\n.*?(?=\n\n(?:== |\$ )|\n```)", re.M | re.S)


@pytest.mark.parametrize(
    "page",
    [slow(page) if page.name in LONG else page for page in PAGES],
    ids=[str(page.relative_to(ROOT)) for page in PAGES],
)
def test_page(page, tmp_path, monkeypatch, request):
    if page.name == "diffusion.md":
        pytest.importorskip("diffusers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    text = page.read_text()
    if "planc cache" in text:  # which shows what is in it
        monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path / "cache"))
    else:
        request.getfixturevalue("no_verdicts")
    (tmp_path / "pictures").mkdir()
    new = played(text, tmp_path)
    drawn = {file.name: file.read_text() for file in (tmp_path / "pictures").iterdir()}
    if request.config.getoption("--update"):
        page.write_text(new)
        for name, picture in drawn.items():
            (DOCS / "pictures" / name).write_text(picture)
        return
    kept = {name: (DOCS / "pictures" / name).read_text() for name in drawn}
    assert drawn == kept, f"run pytest {os.path.relpath(__file__, ROOT)} --update and look at it"
    assert new == text, f"run pytest {os.path.relpath(__file__, ROOT)} --update and read the change"


def test_scripts_of_trainers_are_short():
    scripts = re.findall(r"```python\n(# \w+\.py.*?)```", (DOCS / "trainer.md").read_text(), re.S)
    assert len(scripts) == 4
    assert max(len(script.splitlines()) for script in scripts) <= 66


def numbers(page, pattern):
    """The groups of a pattern in a page, whose line breaks count as spaces."""
    found = re.search(pattern, " ".join((ROOT / page).read_text().split()))
    assert found, f"{page} has no {pattern!r}"
    return found.groups()


def test_numbers_of_pages_are_those_of_generated_pages():
    page = "docs/generated/silent-errors.md"
    (cases,) = numbers(page, r"Of (\d+) cases")
    wrong, named = numbers(page, r"Of the other (\d+), (\d+) are named")
    line = r"- (\d+) of \[(\d+) silent errors\]\(docs/generated/silent-errors.md\)"
    assert numbers("README.md", line) == (named, wrong)
    replayed = numbers("docs/coming-from.md", r"\[(\d+) errors\]\(generated/silent-errors.md\)")
    assert replayed == (cases,)

    coverage = "docs/generated/coverage.md"
    all_types, built = numbers(coverage, r"Of (\d+) types, (\d+) can be built")
    (proved,) = numbers(coverage, r"\*\*(\d+) are proved\*\*")
    line = r"\[(\d+) of the (\d+) causal-LM families\]\(docs/generated/coverage.md\)"
    assert numbers("README.md", line) == (proved, all_types)
    of, theirs = numbers(coverage, r"Of (\d+) types, (\d+) have a plan of their own")
    line = r"(\d+) of the (\d+) causal-LM families of transformers [\d.]+ that can be built have no"
    assert numbers("docs/coming-from.md", line) == (str(int(of) - int(theirs)), built)
    assert numbers("docs/generated/drafts.md", r"\| can be built \| (\d+) \|") == (theirs,)


def test_the_readme_counts_the_plans_that_are_for_a_family():
    plans = [path for path in PLANS.glob("*.plan") if families(path) != ("any",)]
    assert numbers("README.md", r"\[(\d+) plans\]\(docs/library.md\)") == (str(len(plans)),)


def test_the_site_has_every_page():
    listed = re.findall(r"^[\w/*-]+$", (DOCS / "index.md").read_text(), re.M)
    for folder in ("how-to", "language", "diagnostics"):
        inner = (DOCS / folder / "README.md").read_text().partition("```{toctree}")[2]
        listed += [f"{folder}/{name}" for name in re.findall(r"^[\w*-]+$", inner, re.M)]
    files = (*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb"))
    pages = {path.relative_to(DOCS).with_suffix("") for path in files}
    left = {str(page) for page in pages if not any(page.match(name) for name in listed)}
    assert left == {"index"}


def test_the_demo_as_it_ran(tmp_path, monkeypatch, request):
    """What docs/generated/demo.md shows of `make demo`: planc's commands, not the training."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    page = ROOT / "docs" / "generated" / "demo.md"
    before, fence, demo = page.read_text().partition("```text\n== ")
    new = DEMO.sub(lambda match: f"$ {match[1]}\n{run(match[1], ROOT).rstrip()}", demo)
    new = with_rounding_of(demo, new)
    assert len(DEMO.findall(demo)) > 5
    if request.config.getoption("--update"):
        page.write_text(f"{before}{fence}{new}")
        return
    assert new == demo, f"run pytest {os.path.relpath(__file__, ROOT)} --update and read the change"


def listed(caption):
    """The pages under a caption of the site's index."""
    part = (DOCS / "index.md").read_text().partition(f":caption: {caption}\n")[2]
    return re.findall(r"^[\w/-]+$", part.partition("```")[0], re.M)


GUIDE = listed("Guide")


def words_of(page):
    return len(page.read_text().split())


def test_pages_are_short():
    """Generated pages and those of diagnostics are looked up, not read from top to bottom.

    The limits only fall.
    """
    left_out = {"diagnostics", "generated", "gallery"}
    read = [page for page in DOCS.rglob("*.md") if not left_out & {*page.parts}]
    assert sum(map(words_of, read)) <= 60_000
    assert sum(words_of(DOCS / f"{name}.md") for name in GUIDE) <= 9_000
    assert not [p.name for p in HOW_TOS if words_of(p) > 900]


def test_pages_begin_with_what_a_reader_can_do_after_them():
    others = [DOCS / f"{name}.md" for name in (*GUIDE, *listed("How-tos")[1:])]
    heads = {page: page.read_text().split("\n\n")[1] for page in (*others, *HOW_TOS)}
    assert [
        page.name for page, head in heads.items() if not head.startswith("After this page ")
    ] == []


def test_start_lists_every_command():
    block = (DOCS / "start.md").read_text().partition("## Commands\n")[2].split("```")[1]
    commands = set(re.findall(r"^planc (\w+)", block, re.M))
    assert commands == COMMANDS.keys()


def test_the_language_pages_show_every_construct():
    """A construct of the grammar that no example uses is one that the reference forgot."""
    text = "\n".join(page.read_text() for page in (DOCS / "language").glob("*.md"))
    plans = "\n".join(body for kind, _, body in BLOCK.findall(text) if kind == "plan")
    words = "plan for mesh auto option let require when else then extend override optional has none"
    words += " load init meta weights slices ops save offload every"
    words += " tensor checkpoint compile fsdp colwise rowwise sequence input unit group root full"
    words += " precision reshard except_last never block fullgraph local replicate min max len in"
    missing = [w for w in words.split() if not re.search(rf"\b{w}\b", plans)]
    assert missing == []
