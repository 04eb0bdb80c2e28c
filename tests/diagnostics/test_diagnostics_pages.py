"""Every code has a page, every page has its form, and every example gives the code of its page."""

import ast
import json
import re
import subprocess
import sys
import textwrap
from typing import get_args

import pytest
from folders import ROOT
from helpers import check_each

from planc.cli import main
from planc.diagnostics import codes, explain
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.syntax.parse import parse

PAGES = ROOT / "docs" / "diagnostics"
CODES = sorted(p.stem for p in PAGES.glob("PL*.md"))
FORM = re.compile(
    r"# (?P<code>PL\d{3}): (?P<title>[^\n]*[^\n.])\n"
    r"\n(?P<text>(?!#).+?)\n"
    r"\n## Example\n\n(?P<example> {4}.+?)\n"
    r"\n## How to fix it\n\n(?P<fix>(?!#).+)\n",
    re.S,
)
PARSER = ("PL001", "PL002", "PL003", "PL004", "PL005")


def part(code, name):
    form = FORM.fullmatch((PAGES / f"{code}.md").read_text())
    assert form, f"{code}.md is not in the form that the other pages have"
    return form[name]


def example(code):
    return textwrap.dedent(part(code, "example")) + "\n"


def uses():
    """(code, the function or method that it is given to) for each code in the source."""
    for path in (ROOT / "planc").rglob("*.py"):
        declares = path.name == "__init__.py" and path.parts[-3] == "sections"
        if path.name == "codes.py" or declares:
            continue
        given, compared = {}, set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                given |= {id(a): ast.unparse(node.func).rpartition(".")[2] for a in node.args}
            elif isinstance(node, ast.Compare):  # a comparison reports no code
                compared |= {id(n) for side in node.comparators for n in ast.walk(side)}
            elif id(node) in compared:
                continue
            elif isinstance(node, ast.Constant) and re.fullmatch(r"PL\d{3}", str(node.value)):
                yield node.value, given.get(id(node), f"{path}:{node.lineno}")


def test_the_codes_of_the_source_are_those_with_a_page():
    used = {code for code, _ in uses()}
    assert used - set(CODES) == set(), "these need a page"
    assert set(CODES) - used == set(), "these pages are of no code"
    assert list(codes.CODES) == CODES


def test_findings_have_the_severity_that_the_registry_gives():
    """The calls of a code with two severities decide between them; any other call states one."""
    errors = ("problem", "stop", "show_error", "report_nested", "refuse_call", "_along", "_Found")
    errors += ("_change_error", "Requirement")  # the last is a package that a plan needs
    always = dict.fromkeys(errors, "error")
    found = {}
    for code, call in uses():
        known = codes.CODES[code].severities
        if call == "report":
            assert len(known) == 2, code
            found.setdefault(code, set()).update(known)
        else:
            found.setdefault(code, set()).add(always.get(call, call))
    assert found == {c.name: set(c.severities) for c in codes.CODES.values()}


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([], 0),
        (["PL203"], 1),
        (["PL501", "PL504"], 1),
        (["PL203", "PL600"], 2),
        (["PL006"], 2),
        (["PL675"], 2),
        (["PL676"], 2),
        (["PL900"], 2),
    ],
)
def test_the_exit_code_follows_from_the_phases(errors, expected):
    assert codes.exit_code(errors) == expected


def test_what_is_presumed_is_a_warning_about_a_plan():
    presumed = [codes.CODES[name] for name in codes.PRESUMED]
    assert {(c.phase, c.severities) for c in presumed} == {("plan", ("warning",))}
    assert {c.phase for c in codes.CODES.values()} == set(get_args(codes.Phase))


def test_form():
    check_each(CODES, check_form)


def check_form(code):
    text = (PAGES / f"{code}.md").read_text()
    assert part(code, "code") == code
    assert part(code, "title") == codes.CODES[code].title
    assert text.count("\n## ") == 2
    assert max(map(len, text.splitlines())) <= 160
    for line in part(code, "example").splitlines():
        assert not line or line.startswith("    "), line
    assert code[:3] in explain.GROUPS


@pytest.mark.parametrize("code", PARSER)
def test_the_parser_gives_the_code_of_its_example(code):
    sink = Sink()
    parse(Source("example.plan", example(code)), sink)
    assert [d.code for d in sink] == [code]


def test_the_index_is_fresh():
    assert explain.index() == (PAGES / "README.md").read_text(), "run make pages"
    command = [sys.executable, "-m", "planc.diagnostics.explain"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == explain.index()


def test_the_index_lists_each_code_once_under_its_group():
    text = explain.index()
    assert re.findall(r"^- \[(PL\d{3})\]\(\1\.md\): \S", text, re.M) == CODES
    group = ""
    for line in text.splitlines():
        if line.startswith("## "):
            group = line[3:6]
        elif line.startswith("- "):
            assert line[3:6] == group


def test_explain():
    assert explain.explain("PL004") == (PAGES / "PL004.md").read_text()
    assert explain.explain(" pl004 ") == explain.explain("PL004")
    for nothing in ("PL000", "PL00", "README", "../README", "PL004.md", "../../pyproject", ""):
        assert explain.explain(nothing) is None


def test_a_page_on_a_terminal():
    text = "# PL001: `x` and *y*\n\nUse `a b` or [this](PL002.md).\n\n    `code`\n\n## Example\n"
    assert explain.terminal(text, False) == (
        "PL001: `x` and *y*\n\nUse `a b` or this.\n\n    `code`\n\nExample\n"
    )
    assert explain.terminal(text, True) == (
        "\x1b[1mPL001: `x` and *y*\x1b[0m\n\nUse \x1b[36ma b\x1b[0m or this.\n\n"
        "\x1b[36m    `code`\x1b[0m\n\n\x1b[1mExample\x1b[0m\n"
    )


@pytest.mark.parametrize("width", [60, 80])
def test_a_page_is_wrapped_to_a_terminal(width):
    for name in CODES:
        page = explain.explain(name)
        rows = explain.terminal(page, False, width).splitlines()
        for row in rows:
            long = len(row) > width and not row.startswith("    ")
            assert not long or row.count("`") > 1 or row in explain.terminal(page, False), row
        assert "".join("".join(rows).split()) == "".join(explain.terminal(page, False).split())


def test_the_command(capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["explain", "pl004"]) == 0
    assert capsys.readouterr().out == explain.terminal(explain.explain("PL004"), False)
    assert main(["explain", "PL000"]) == 2
    assert "there is no code PL000" in capsys.readouterr().err


@pytest.mark.parametrize("pasted", ["501", "pl501", "error[PL501]:"])
def test_a_code_as_it_is_pasted(capsys, pasted):
    assert main(["explain", pasted]) == 0
    assert capsys.readouterr().out.startswith("PL501: ")


def test_json_of_the_command_is_one_document_even_where_nothing_could_run(tmp_path, capsys):
    assert main(["check", "llama-3.1-8b", str(tmp_path / "no.plan"), "--format", "json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert [d["code"] for d in document["diagnostics"]] == ["PL006"]
