"""The grammars for editors and for Pygments, held against `grammars/plan.lark`.

Every token of the shipped plans, of the language's documentation and of the specs is what the
parser says that it is, in both.
"""

import json
import re
import tomllib

import pytest
from console import BLOCK
from lark.lexer import PatternStr
from pygments import token as kinds

from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.files.resources import GRAMMARS, PLANS
from planc.integrations.pygments_lexer import PlanLexer
from planc.syntax.formatter.tokens import tokens_of
from planc.syntax.grammar import parser
from planc.syntax.parse import parse

ROOT = PLANS.parent
TEXTMATE = json.loads((GRAMMARS / "vscode/syntaxes/plan.tmLanguage.json").read_text())
PACKAGE = json.loads((GRAMMARS / "vscode/package.json").read_text())

# What each terminal of the grammar is for a reader: (the scope in TextMate, the type in Pygments).
NAMES = ("variable", "entity.name", "constant.language", "constant.other"), (kinds.Name,)
KEYWORD = ("keyword.control", "storage.modifier"), (kinds.Keyword,)
WORD = ("keyword.operator.word",), (kinds.Operator.Word,)
OPERATOR = ("keyword.operator",), (kinds.Operator,)
BRACKET = ("punctuation",), (kinds.Punctuation,)
MEANINGS = {
    "NAME": NAMES,
    "F1B": NAMES,
    "SERVE": NAMES,  # a section's
    "SELECTOR": (("entity.name.tag",), (kinds.Name.Tag,)),
    "CLASS": (("support.class",), (kinds.Name.Class,)),
    "NUMBER": (("constant.numeric",), (kinds.Number,)),
    "STRING": (("string",), (kinds.String,)),
    "COMMENT": (("comment",), (kinds.Comment,)),
    **dict.fromkeys(("AND", "OR", "NOT", "IN"), WORD),
    **dict.fromkeys(("TRUE", "FALSE", "NULL"), (("constant.language",), (kinds.Keyword.Constant,))),
    **dict.fromkeys(("COMPARE", "PLUS", "MINUS", "SLASH", "EQUAL"), OPERATOR),
    "STAR": (("keyword.operator", "variable.parameter"), (kinds.Operator,)),  # of two axes
    "__ANON_0": OPERATOR,  # ->
    **dict.fromkeys(
        ("LBRACE", "RBRACE", "LPAR", "RPAR", "LSQB", "RSQB", "COMMA", "COLON"), BRACKET
    ),
}


def keyword(terminal):
    return isinstance(terminal.pattern, PatternStr) and terminal.pattern.value.isalpha()


def test_every_terminal_has_a_meaning():
    others = {t.name for t in parser().terminals if not keyword(t)}
    assert others - MEANINGS.keys() == {"_NL", "__IGNORE_0"}
    assert MEANINGS.keys() - others == {"AND", "OR", "NOT", "IN", "TRUE", "FALSE", "NULL", "SERVE"}


def texts():
    """(name, text) of every plan that parses: shipped, in the docs and in the specs."""
    for path in sorted(PLANS.glob("*.plan")):
        yield path.name, path.read_text()
    folders = ("docs", "docs/language", "tests/specs", "tests/sections/*")
    for page in sorted(page for folder in folders for page in ROOT.glob(f"{folder}/*.md")):
        for i, (kind, _, body) in enumerate(BLOCK.findall(page.read_text())):
            sink = Sink()
            if kind == "plan" and parse(Source("a.plan", body), sink) and not sink.has_errors:
                yield f"{page.relative_to(ROOT)}:{i}", body


TEXTS = dict(texts())


def parsed(text):
    """(offset, terminal, text) of every token and comment."""
    at = 0
    for found in tokens_of(text):
        at = text.index(found.text, at)
        yield at, "COMMENT" if found.kind == "#" else found.kind, found.text
        at += len(found.text)


def wrong(text, painted, side):
    """Tokens that are painted as something else."""
    for at, terminal, written in parsed(text):
        wanted = MEANINGS.get(terminal, KEYWORD)[side]
        shown = painted[at]
        fits = shown.startswith(wanted) if side == 0 else any(shown in kind for kind in wanted)
        if not fits:
            yield text.count("\n", 0, at) + 1, written, terminal, str(shown)


def textmate(text):
    """The scope of each character, as an editor finds it: line by line, the leftmost match of the
    patterns, and the first pattern where two match at one place.
    """
    painted = [""] * len(text)
    patterns = [
        TEXTMATE["repository"].get(p.get("include", "")[1:], p) for p in TEXTMATE["patterns"]
    ]
    start = 0
    for line in text.splitlines(keepends=True):
        at = 0
        while at < len(line):
            tried = [
                (re.compile(p.get("match") or p["begin"]).search(line, at), p) for p in patterns
            ]
            tried = [(m, p) for m, p in tried if m and m.end() > m.start()]
            if not tried:
                break
            match, pattern = min(tried, key=lambda pair: pair[0].start())
            end = match.end()
            if "begin" in pattern:
                end = re.compile(r'(?:\\.|[^"\\\n])*"?').match(line, end).end()
            for i in range(match.start(), end):
                painted[start + i] = pattern.get("name", "")
            for group, capture in pattern.get("captures", {}).items():
                for i in range(*match.span(int(group))):
                    painted[start + i] = capture["name"]
            at = end
        start += len(line)
    return painted


def pygments(text):
    painted = []
    for kind, value in PlanLexer(stripnl=False).get_tokens(text):
        painted += [kind] * len(value)
    return painted


@pytest.mark.parametrize("name", TEXTS)
def test_textmate_sees_what_the_parser_sees(name):
    assert list(wrong(TEXTS[name], textmate(TEXTS[name]), 0)) == []


@pytest.mark.parametrize("name", TEXTS)
def test_pygments_sees_what_the_parser_sees(name):
    painted = pygments(TEXTS[name])
    assert kinds.Error not in painted
    assert list(wrong(TEXTS[name], painted, 1)) == []


def test_a_selector_of_names_alone_looks_like_one():
    text = "plan p for llama\nfsdp on dp_shard {\n    model.norm<Norm> : unit\n    root : unit\n"
    text += "    ignore lm_head\n}\n"
    for painted, tag in (
        (textmate(text), "entity.name.tag.plan"),
        (pygments(text), kinds.Name.Tag),
    ):
        looks = {written for at, _, written in parsed(text) if painted[at] == tag}
        assert looks == {"model.norm", "root"}


def test_every_keyword_occurs_in_a_plan():
    """So the tests above have seen each."""
    seen = {terminal for text in TEXTS.values() for _, terminal, _ in parsed(text)}
    ours = {t.name for t in parser().terminals if keyword(t)}
    assert ours - seen == set()
    assert len(ours) > 15


def test_a_wrong_grammar_is_seen():
    """The comparison can fail: without the pattern for classes, `<Linear>` is an operator."""
    text = "plan p for llama\ncheckpoint {\n    a.*<Linear> : full\n}\n"
    assert list(wrong(text, textmate(text), 0)) == []
    patterns = [p for p in TEXTMATE["patterns"] if p.get("name") != "support.class.plan"]
    kept, TEXTMATE["patterns"] = TEXTMATE["patterns"], patterns
    try:
        assert [found[1] for found in wrong(text, textmate(text), 0)] == ["<Linear>"]
    finally:
        TEXTMATE["patterns"] = kept


def test_pygments_finds_the_lexer_by_its_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["pygments.lexers"]["plan"].partition(":")
    assert (module, name) == (PlanLexer.__module__, PlanLexer.__name__)
    assert PlanLexer.aliases == ["plan"] and PlanLexer.filenames == ["*.plan"]


def test_the_extension_names_files_that_exist():
    folder = GRAMMARS / "vscode"
    contributes = PACKAGE["contributes"]
    [language], [grammar] = contributes["languages"], contributes["grammars"]
    for file in (PACKAGE["main"], language["configuration"], grammar["path"]):
        assert (folder / file).is_file()
    assert grammar["language"] == language["id"] == "plan" and language["extensions"] == [".plan"]
    assert grammar["scopeName"] == TEXTMATE["scopeName"]
    assert contributes["configuration"]["properties"]["planc.command"]["default"] == [
        "planc",
        "lsp",
    ]
    script = (folder / "extension.js").read_text()
    assert '[{ language: "plan" }]' in script and 'get("command")' in script
    json.loads((folder / language["configuration"]).read_text())
