"""Every example of the specifications: a plan, a command, what it prints and the exit code.

Pages that need a section are in `tests/sections/NAME/`, the others here.

Each section (`## `) of a page is a test with a folder of its own, which begins with the files of
the page's introduction. A command that fails ends with its exit code in brackets.
`pytest tests/specs/test_specs.py --update` writes the true output into the pages.
"""

import re
from importlib.util import find_spec

import pytest
from console import played
from folders import TESTS

PAGES = sorted(path for folder in ("specs", "sections/*") for path in TESTS.glob(f"{folder}/*.md"))
SECTION = re.compile(r"^(?=## )", re.M)
LONG = (
    "real-decisions: Rules for some layers",
    "calibrate: Rows that `planc measure` writes",
    "suggest: The table, and why the first is first",
    "order: A rank that sends another length",
    "order: A right plan fits",
)
"""Examples that take a minute; `make processes` runs them."""


def example(page, number, section):
    title = f"{page.stem}: {section.partition(chr(10))[0].strip('# ')}"
    marks = [pytest.mark.slow] if title in LONG else []
    return pytest.param(page, number, id=title, marks=marks)


EXAMPLES = [
    example(page, number, section)
    for page in PAGES
    for number, section in enumerate(SECTION.split(page.read_text()))
    if "```console" in section
]


def play(page, number, folder):
    """The text of a section as it reads with the true output, played in a folder.

    The folder first gets the files of the page's introduction.
    """
    sections = SECTION.split(page.read_text())
    if number:
        played(re.sub(r"^```console.*?^```$", "", sections[0], flags=re.M | re.S), folder)
    return played(sections[number], folder, status=True)


@pytest.mark.parametrize(("page", "number"), EXAMPLES)
def test_example(page, number, tmp_path, monkeypatch, request):
    if page.name == "patches.md" and find_spec("diffusers") is None:
        pytest.skip("needs diffusers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    sections = SECTION.split(page.read_text())
    if "$ planc launch" in sections[number]:  # whose files say what is proved
        request.getfixturevalue("no_verdicts")
    new = play(page, number, tmp_path)
    if request.config.getoption("--update"):
        sections[number] = new
        page.write_text("".join(sections))
        return
    assert new == sections[number], f"read the change; --update writes it into {page.name}"


def test_every_page_has_examples_and_every_example_a_command():
    assert {param.values[0] for param in EXAMPLES} == {*PAGES}
    assert len({page.stem for page in PAGES}) == len(PAGES) > 40
    for param in EXAMPLES:
        page, number = param.values
        section = SECTION.split(page.read_text())[number]
        assert "\n$ planc " in section, param.id
