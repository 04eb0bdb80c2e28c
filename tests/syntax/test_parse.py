"""Syntax: the gallery parses, and every mistake of a file is reported once, at its line."""

import json

import pytest
from helpers import check_each

from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.files.resources import GRAMMARS, PLANS
from planc.syntax import ast, grammar, parsed_files
from planc.syntax.grammar import parser
from planc.syntax.parse import parse
from planc.syntax.plan_files import families
from planc.syntax.syntax_errors import terminal_text

PLAN = """\
plan llama for llama, mistral
let block = model.layers.*

mesh {
    dp_shard = auto
    tp       = 1
}

tensor on tp {
    $block {
        self_attn.{q,k,v}_proj : colwise
        self_attn              : input(hidden_states = shard(1) -> replicate)
        mlp.down_proj          : rowwise(-> shard(1), local = false)
    }
}

fsdp on dp_shard * cp, replicate on dp_replicate {
    precision(param = bf16, reduce = fp32)
    group(model.norm, lm_head) : unit(reshard = never)
}
"""


def read(text):
    sink = Sink()
    return parse(Source("t.plan", text), sink), sink


def found(sink):
    return [(d.labels[0].span.line, d.code, d.message) for d in sink]


def test_a_plan_parses_with_spans():
    file, sink = read(PLAN)
    assert list(sink) == []
    header, let, mesh, tensor, fsdp = file.statements
    assert isinstance(header, ast.Header) and [f.path for f in header.families] == [
        "llama",
        "mistral",
    ]
    assert let.value.path == "model.layers.*"
    assert [s.name for s in mesh.items] == ["dp_shard", "tp"]
    rule = tensor.items[0].items[0]
    assert rule.target.path == "self_attn.{q,k,v}_proj" and rule.origin.line == 11
    assert [a.path for a in fsdp.axes] == ["dp_shard", "cp"]


def test_five_errors_give_five_diagnostics():
    text = PLAN.replace("tp       = 1", "tp       = = 1")
    text = text.replace("plan llama for", "plan llama fro")
    text = text.replace("_proj : colwise", "_proj colwise")
    text = text.replace("param = bf16,", "param == bf16 bf16,")
    text = text.replace("fsdp on dp_shard * cp", "fsdp onn dp_shard * cp")
    _, sink = read(text)
    assert found(sink) == [
        (1, "PL001", "unexpected `fro`: expected `for`"),
        (6, "PL001", "unexpected `=`: expected a value"),
        (11, "PL001", "unexpected `colwise`: expected `,`, `:`, `has`, `{` or a class"),
        (17, "PL001", "unexpected `dp_shard`: expected `*`, `,` or `{`"),
        (18, "PL001", "unexpected `bf16`: expected an operator or `,`"),
    ]


CLOSES = "no bracket is open that this `{}` could close"
LONELY = "this `{` is never closed"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("tp       = 1\n}", "tp       = 1", [(4, "PL004", LONELY)]),
        ("local = false)\n    }\n}", "local = false)\n}", [(10, "PL004", LONELY)]),
        ("reshard = never)\n}", "reshard = never)", [(17, "PL004", LONELY)]),
        ("{q,k,v}_proj", "{q,k,v_proj", [(11, "PL004", LONELY)]),
        ("colwise", "colwise(", [(11, "PL004", "this `(` is never closed")]),
        ("layers.*", "layers[0:4", [(2, "PL004", "this `[` is never closed")]),
        ("reshard = never)", "reshard = never))", [(19, "PL004", CLOSES.format(")"))]),
        ("1\n}", "1\n}\n}", [(8, "PL004", CLOSES.format("}"))]),
    ],
)
def test_a_bracket_without_a_partner_is_one_error(old, new, expected):
    assert old in PLAN
    file, sink = read(PLAN.replace(old, new))
    assert found(sink) == expected
    assert len(file.statements) >= 4


def test_an_unclosed_block_keeps_its_rules_and_what_follows():
    file, sink = read(PLAN.replace("tp       = 1\n}", "tp       = 1"))
    assert file.statements == read(PLAN)[0].statements
    assert [m.span.line for d in sink for m in d.labels] == [4, 8]


def test_one_brace_too_few_and_one_too_many():
    file, sink = read(PLAN.replace("tp       = 1\n}", "tp       = 1") + "}\n")
    assert sorted(found(sink)) == [(4, "PL004", LONELY), (20, "PL004", CLOSES.format("}"))]
    assert file.statements == read(PLAN)[0].statements


def test_a_string_that_takes_a_bracket_in_is_one_error():
    _, sink = read(PLAN.replace("reshard = never)", 'reshard = "never)'))
    assert found(sink) == [(19, "PL005", "this string is not closed on its line")]
    assert sink.diagnostics[0].labels[0].span.text == '"never)'


def test_where_the_indentation_says_nothing_the_innermost_brace_is_named():
    _, sink = read("plan a for llama\ntensor on tp {\nlm_head : colwise\n")
    assert found(sink) == [(2, "PL004", LONELY)]


def test_an_error_in_a_call_of_several_lines_is_one():
    text = "fsdp on dp {\n    group(\n        a b,\n        c\n    ) : unit\n    root : unit\n}\n"
    file, sink = read(text)
    assert found(sink) == [(3, "PL001", "unexpected `b`: expected an operator, `,` or `=`")]
    assert len(file.statements[0].items) == 1


def test_an_error_before_a_closing_brace_does_not_lose_the_brace():
    file, sink = read("mesh {\n    tp = }\nfsdp on dp {\n    root : unit\n}\n")
    assert found(sink) == [(2, "PL001", "unexpected `}`: expected a value")]
    assert len(file.statements) == 2


def test_terminals_are_named_as_they_are_written():
    names = {t.name: terminal_text(t.name) for t in parser().terminals}
    signs = {"STAR": "`*`", "SLASH": "`/`", "PLUS": "`+`", "LBRACE": "`{`", "COLON": "`:`"}
    assert signs.items() <= names.items()
    assert {"`->`", "`for`", "`]`", "a comparison"} <= set(names.values())
    text = (GRAMMARS / "plan.lark").read_text()
    silent = {"COMMENT", "_NL", *grammar._build(text).ignore_tokens}
    named = {words for name, words in names.items() if name not in silent}
    assert [words for words in named if not words.startswith(("`", "a "))] == []


def test_what_is_no_value_is_named_with_its_place():
    _, sink = read("let x = 1 1\nlet y = a *\nlet z = [1, 2\n")
    assert sorted(found(sink)) == [
        (1, "PL001", "unexpected `1`: expected an operator"),
        (2, "PL001", "the line ends too early: expected a value"),
        (3, "PL004", "this `[` is never closed"),
    ]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "PL002"),
        ("# nothing\n", "PL002"),
        ("{" * 10_000_000, "PL003"),
        ("(" * 500, "PL003"),
        ("a {\n" * 70, "PL003"),
        ("\x00\x01", "PL003"),
        ("plan\ufffd", "PL003"),
        ('let x = "\ud800"', "PL003"),
        ("plan a for llama\rmesh {\r}", "PL003"),
        ("let x = " + "not " * 2000 + "true", "PL003"),
        ("let x = " + "-" * 9000 + "1", "PL003"),
        ("let x = [\n" + "1 +\n" * 10_000 + "1]", "PL003"),
        ("let x = " + "when a then b else " * 400 + "c", "PL003"),
        ("let x = " + "f(" * 60 + "-" * 60 + "1" + ")" * 60, "PL003"),
        ("let x = " + "9" * 5000, "PL003"),
        ("let x = 999999999999999999T", "PL003"),
        ("let x = 1e999K", "PL001"),
        ("x" * 20_000, "PL003"),
        ('extend "abc', "PL005"),
        ("mesh {\n tp = 1\n", "PL004"),
    ],
    ids=lambda value: ascii(value[:16]),
)
def test_hopeless_input_is_one_diagnostic(text, code):
    _, sink = read(text)
    assert [d.code for d in sink] == [code]


def test_after_twenty_errors_the_rest_is_not_shown():
    _, sink = read("x y z\n" * 200)
    messages = [d.message for d in sink]
    assert messages[-1] == "t.plan has more than 20 syntax errors; the rest is not shown"
    assert len(messages) == 21


@pytest.mark.parametrize("change", [("\n", "\r\n"), ("    ", "\t"), ("plan l", "\ufeffplan l")])
def test_line_ends_tabs_and_a_byte_order_mark_mean_nothing(change):
    file, sink = read(PLAN.replace(*change))
    assert list(sink) == []
    assert file == read(PLAN)[0]
    _, sink = read(PLAN.replace("tp       = 1", "tp = = 1").replace(*change))
    assert found(sink) == [(6, "PL001", "unexpected `=`: expected a value")]


def test_a_byte_order_mark_hides_no_family(tmp_path):
    (tmp_path / "p.plan").write_text("\ufeffplan p for llama, mistral\n", encoding="utf-8")
    assert families(tmp_path / "p.plan") == ("llama", "mistral")


def test_a_string_means_what_it_says():
    file, sink = read(r'require tp == 1 "a \"b\" \\ c\d"')
    assert list(sink) == []
    assert file.statements[0].message == r'a "b" \ c\d'


def test_numbers():
    file, _ = read("let a = 007\nlet b = 1.5K\nlet c = 2M\nlet d = 1.5\n")
    assert [s.value.value for s in file.statements] == [7, 1500, 2_000_000, 1.5]


def test_a_brace_that_stands_for_a_missing_one_is_not_reported():
    """Found by fuzzing: a head without its brace before a block."""
    text = 'plan q \n q\n\nextend "l.plan"\n\ntensor on tp {\n    a : colwise\n}for'
    _, sink = read(text)
    assert sink.has_errors


def test_the_stored_table_is_that_of_the_grammar():
    """A stale table is not used, only slow; and a fresh one parses what the grammar does. Each
    process writes the same one.
    """
    text = (GRAMMARS / "plan.lark").read_text()
    stored = (GRAMMARS / "plan.table.json").read_text()
    assert stored == grammar.table(text)
    built, loaded = grammar._build(text), grammar._from_table(stored, text)
    for path in PLANS.glob("*.plan"):
        plan = path.read_text() + "\n"
        assert built.parse(plan) == loaded.parse(plan)
    with pytest.raises(ValueError, match="stale"):
        grammar._from_table(stored, text + "// another\n")


def test_a_range_of_giant_numbers_is_a_finding():
    sink = Sink()
    text = f"plan m for llama\ncheckpoint {{\n model.layers.0-{'9' * 6000} : full\n}}\n"
    parse(Source("m.plan", text), sink)
    assert [d.code for d in sink] == ["PL001"]


def parsed_again(path, cache, monkeypatch):
    """The AST of a file, read twice, and what the cache has of it."""
    monkeypatch.setenv("PLANC_CACHE_DIR", str(cache))
    source, sink = Source("t.plan", path.read_text()), Sink()
    once, again = (parsed_files.parse_file(source, sink, str(path)) for _ in range(2))
    return once, again, sorted(cache.rglob("*.json")), sink


def test_a_file_comes_back_from_the_cache_as_it_was_parsed(tmp_path, monkeypatch):
    def check(path):
        once, again, (entry,), sink = parsed_again(path, tmp_path / path.stem, monkeypatch)
        assert list(sink) == []
        assert again is not once
        assert again == once
        body = entry.read_text().partition("\n")[2]  # which has the spans that equality ignores
        assert json.dumps(again, default=parsed_files._plain, separators=(",", ":")) == body
        assert type(again.statements[0].name) is str
        assert again.origin.source == once.origin.source

    check_each(sorted(PLANS.glob("*.plan")), check)


def test_a_damaged_entry_or_another_text_is_parsed(tmp_path, monkeypatch):
    path = tmp_path / "a.plan"
    path.write_text(PLAN)
    once, _, (entry,), _ = parsed_again(path, tmp_path / "cache", monkeypatch)
    entry.write_text(entry.read_text().replace('"colwise"', '"rowwise"'))
    _, again, _, _ = parsed_again(path, tmp_path / "cache", monkeypatch)
    assert again == once
    path.write_text(PLAN.replace("colwise", "rowwise"))
    _, changed, entries, _ = parsed_again(path, tmp_path / "cache", monkeypatch)
    assert entries == [entry]
    assert changed == read(PLAN.replace("colwise", "rowwise"))[0] != once


def test_a_file_with_a_finding_is_not_kept(tmp_path, monkeypatch):
    path = tmp_path / "a.plan"
    path.write_text("mesh {\n tp = = 1\n}\n")
    _, _, entries, sink = parsed_again(path, tmp_path / "cache", monkeypatch)
    assert entries == []
    assert [d.code for d in sink] == ["PL001"]
