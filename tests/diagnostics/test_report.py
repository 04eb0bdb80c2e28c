"""How findings look: exact text for each format, and nothing that a terminal would act on."""

import io
import json
import re
from pathlib import Path

import jsonschema
import pytest
from folders import ROOT
from hypothesis import given
from hypothesis import strategies as st

from planc.diagnostics import FORMATS, render, terminal_width, wants_color
from planc.diagnostics.diagnostic import Diagnostic, Label, Severity, Sink
from planc.diagnostics.sorting import summary
from planc.diagnostics.source import Source
from planc.diagnostics.terminal_width import cells, width, wrap

SCHEMA = json.loads((ROOT / "grammars" / "diagnostics.schema.json").read_text())
NOWHERE = Source("", "").span(0, 0)  # of a node that no one wrote
PLAN = Source(
    "plans/llama.plan",
    """\
plan llama for llama

mesh {
    dp_shard = auto
    tp       = 16
}

option fast = true

tensor on tp {
    model.layers.* {
        self_attn.{q,k,v}_proj : colwise
    }
}
""",
)
BASE = Source("plans/base.plan", "plan base for llama\n\ttp = 8\n")
SETTING = Source("--set tp=16", "tp=16", argument=True)
CONTROL = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def at(source, text, label="", *, to=None):
    """A label at the first place of a text, or from there to the last place of another."""
    start = source.text.index(text)
    end = start + len(text) if to is None else source.text.rindex(to) + len(to)
    return Label(span=source.span(start, end), text=label)


def error(message, *labels, code="PL203", severity=Severity.ERROR, facts=(), help=None):
    return Diagnostic(
        code=code, severity=severity, message=message, labels=labels, facts=facts, help=help
    )


def full(*diagnostics, width=100):
    return render(diagnostics, "full", width=width)


HEADS = error(
    "8 key/value heads cannot be split over tp = 16",
    at(PLAN, "self_attn.{q,k,v}_proj", "k_proj is split by head"),
    at(PLAN, "16", "tp is 16"),
    facts=("num_key_value_heads = 8  (config.json)",),
    help="tp can be 1, 2, 4 or 8 for this model",
)


def test_a_block():
    assert (
        full(HEADS)
        == """\
error[PL203]: 8 key/value heads cannot be split over tp = 16
  --> plans/llama.plan:12:9
   |
 5 |     tp       = 16
   |                -- tp is 16
...
12 |         self_attn.{q,k,v}_proj : colwise
   |         ^^^^^^^^^^^^^^^^^^^^^^ k_proj is split by head
   = fact: num_key_value_heads = 8  (config.json)
   = help: tp can be 1, 2, 4 or 8 for this model

1 error
"""
    )


def test_a_single_line_between_two_labels_is_shown():
    text = full(error("x", at(PLAN, "dp_shard", "one"), at(PLAN, "}", "two")))
    assert (
        text
        == """\
error[PL203]: x
 --> plans/llama.plan:4:5
  |
4 |     dp_shard = auto
  |     ^^^^^^^^ one
5 |     tp       = 16
6 | }
  | - two

1 error
"""
    )


def test_several_labels_on_one_line_hang_below_it():
    labels = at(PLAN, "model.layers.*", "the block"), at(PLAN, "model", "a"), at(PLAN, "*", "each")
    assert (
        full(error("x", *labels))
        == """\
error[PL203]: x
  --> plans/llama.plan:11:5
   |
11 |     model.layers.* {
   |     ^^^^^^^^^^^^^^ each
   |     |
   |     the block
   |     a

1 error
"""
    )


def test_labels_beside_each_other():
    labels = at(PLAN, "colwise", "style"), at(PLAN, "self_attn", "parent"), at(PLAN, "_proj")
    assert (
        full(error("x", *labels))
        == """\
error[PL203]: x
  --> plans/llama.plan:12:34
   |
12 |         self_attn.{q,k,v}_proj : colwise
   |         ---------        -----   ^^^^^^^ style
   |         |
   |         parent

1 error
"""
    )


def test_other_sources_and_arguments_have_their_own_excerpts():
    labels = at(SETTING, "16", "given here"), at(BASE, "tp = 8", "replaced"), at(PLAN, "tp")
    assert (
        full(error("x", *labels))
        == """\
error[PL203]: x
 --> the command line
  |
  | --set tp=16
  |          ^^ given here
 ::: plans/base.plan:2:2
  |
2 |     tp = 8
  |     ------ replaced
 ::: plans/llama.plan:5:5
  |
5 |     tp       = 16
  |     --

1 error
"""
    )


def test_what_no_one_wrote_has_no_excerpt():
    text = full(error("x", Label(span=NOWHERE, text="by default"), at(PLAN, "llama"), help="do"))
    assert (
        text
        == """\
error[PL203]: x
 --> plans/llama.plan:1:6
  |
1 | plan llama for llama
  |      ^^^^^
  = note: by default
  = help: do

1 error
"""
    )
    assert full(error("x", Label(span=NOWHERE))) == "error[PL203]: x\n\n1 error\n"


def test_spans_of_several_lines_and_of_none():
    end = len(PLAN.text)
    nothing = Label(span=PLAN.span(end, end), text="ends here")
    line = Label(span=PLAN.span(PLAN.text.index("\n"), PLAN.text.index("\n")), text="here")
    assert (
        full(error("x", nothing, at(PLAN, "tensor", to="}"), line))
        == """\
error[PL203]: x
  --> plans/llama.plan:15:1
   |
 1 | plan llama for llama
   |                     - here
...
10 | tensor on tp {
   | --------------
...
15 |
   | ^ ends here

1 error
"""
    )


def test_tabs_wide_and_combining_characters_keep_the_columns():
    source = Source("u.plan", "\t日本.o\u0301_proj\t: colwise  # 名\n")
    labels = at(source, "日本", "two"), at(source, "o\u0301_", "one"), at(source, "colwise", "c")
    text = full(error("x", *labels))
    assert (
        text
        == """\
error[PL203]: x
 --> u.plan:1:2
  |
1 |     日本.o\u0301_proj    : colwise  # 名
  |     ^^^^ --          ------- c
  |     |    |
  |     |    one
  |     two

1 error
"""
    )
    assert width("日本.o\u0301_proj") == 11


def test_long_lines_are_cut_around_the_labels():
    line = "a" * 120 + " : rowwise " + "b" * 120
    source = Source("l.plan", line + "\n")
    assert (
        full(error("x", at(source, "rowwise", "this one")), width=60)
        == f"""\
error[PL203]: x
 --> l.plan:1:124
  |
1 | …{"a" * 20} : rowwise {"b" * 23}…
  |  {" " * 20}   ^^^^^^^ this one

1 error
"""
    )
    first = Label(span=source.span(0, 3), text="far")
    assert (
        full(error("x", at(source, "rowwise", "this one"), first), width=60)
        == f"""\
error[PL203]: x
 --> l.plan:1:124
  |
1 | {"a" * 55}…
  | --- far
1 | …{"a" * 20} : rowwise {"b" * 23}…
  |  {" " * 20}   ^^^^^^^ this one

1 error
"""
    )


def test_text_is_wrapped_to_the_width():
    told = "one two three four five six seven eight"
    label = at(PLAN, "colwise", told)
    text = full(error(told, label, facts=(told,), help=f"{told}\n    code"), width=50)
    assert (
        text
        == """\
error[PL203]: one two three four five six seven
              eight
  --> plans/llama.plan:12:34
   |
12 |         self_attn.{q,k,v}_proj : colwise
   |                                  ^^^^^^^
   |                                  |
   |       one two three four five six seven eight
   = fact: one two three four five six seven eight
   = help: one two three four five six seven eight
               code

1 error
"""
    )


EVIL = "\x1b[31mred\x1b[0m\x07\x9b2J\u202e\u2028\ud800\x7f"


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_steers_the_terminal(format):
    source = Source(f"{EVIL}.plan", f"plan {EVIL} for {EVIL}\r\n")
    whole = error(EVIL, at(source, "plan", EVIL), facts=(EVIL,), help=f"{EVIL}\r\n{EVIL}")
    text = render([whole], format)
    assert not CONTROL.search(text), CONTROL.search(text)
    text.encode("utf-8")
    assert "red" in text
    if format == "full":
        assert text.startswith("error[PL203]: ␛[31mred␛[0m␇<U+009B>2J<U+202E><U+2028><U+D800>␡\n")


@given(st.text(st.characters(exclude_categories=()), max_size=80), st.integers(40, 90))
def test_any_text_stays_within_the_width(text, room):
    source = Source("x.plan", text)
    labels = [Label(span=source.span(i, i + 3), text=text[i:]) for i in range(0, len(text), 30)]
    shown = full(error(text, *labels, facts=(text,), help=text), width=room)
    assert not CONTROL.search(shown.replace("\n", ""))
    for line in shown.split("\n"):
        assert width(line) <= room or "-->" in line, line


@given(st.text(max_size=200), st.integers(5, 40))
def test_wrapping_loses_nothing(text, room):
    lines = wrap(text, room)
    kept = "".join(shown for part in text.split("\n") for shown, _ in cells(part))
    assert "".join("".join(lines).split()) == "".join(kept.split())
    assert all(width(line) <= room for line in lines if len(line) > 8)


def test_a_long_word_is_read_a_few_times_and_not_once_a_line(monkeypatch):
    read = []
    monkeypatch.setattr(terminal_width, "cell", lambda char: read.append(char) or (char, 1))
    assert len(wrap("9" * 10_000, 80)) == 125
    assert len(read) < 10 * 10_000


def test_the_order_is_that_of_the_text():
    found = [
        error("share", severity=Severity.INFO),
        error("late", at(PLAN, "tensor")),
        error("base", at(BASE, "tp")),
        error("early", at(PLAN, "plan llama"), severity=Severity.WARNING),
        error("slow", severity=Severity.WARNING),
        error("no model"),
    ]
    shown = [line.rpartition(": ")[2] for line in render(found, "concise").splitlines()]
    assert shown == ["no model", "early", "late", "base", "share", "slow"]
    assert summary(found) == "3 errors, 2 warnings, 1 info"
    assert [d["message"] for d in json.loads(render(found, "json"))["diagnostics"]] == shown


def test_the_same_finding_of_two_readings_is_shown_once():
    again = Source(PLAN.name, PLAN.text)
    found = [
        error("x", at(PLAN, "mesh")),
        error("x", at(again, "mesh")),
        error("x", at(BASE, "tp")),
    ]
    assert summary(found) == "2 errors"
    assert render(found, "concise").count("\n") == 2


def test_concise():
    setting = error("not a size", at(SETTING, "16"), code="PL300")
    aside = error("two\nlines", severity=Severity.INFO)
    assert (
        render([HEADS, setting, aside], "concise")
        == """\
plans/llama.plan:12:9: error[PL203]: 8 key/value heads cannot be split over tp = 16
--set tp=16: error[PL300]: not a size
info[PL203]: two lines
"""
    )
    assert render([], "concise") == ""


def test_json():
    document = json.loads(
        render([HEADS, error("x", at(SETTING, "16"), Label(span=NOWHERE))], "json")
    )
    jsonschema.validate(document, SCHEMA)
    assert document["counts"] == {"error": 2, "warning": 0, "info": 0}
    first, second = document["diagnostics"]
    assert first["labels"][0] == {
        "file": "plans/llama.plan",
        "argument": None,
        "start": {"line": 12, "column": 9, "offset": 134},
        "end": {"line": 12, "column": 31, "offset": 156},
        "text": "k_proj is split by head",
    }
    assert first["facts"] == ["num_key_value_heads = 8  (config.json)"]
    assert second["labels"][0]["file"] is None
    assert second["labels"][0]["argument"] == "--set tp=16"
    assert second["labels"][1]["start"] is None
    jsonschema.validate(json.loads(render([], "json")), SCHEMA)


def test_a_path_for_github_is_that_in_the_checkout(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    sink, source = Sink(), Source("own/a.plan", "plan a\n")
    sink.error("PL002", "empty", source.span(0, 4))
    assert "file=own/a.plan," in render(sink.diagnostics, "github")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    assert "file=sub/own/a.plan," in render(sink.diagnostics, "github")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "elsewhere"))
    assert "file=own/a.plan," in render(sink.diagnostics, "github")


def test_github():
    odd = Source("a,b:c%.plan", "x\ny\n")
    found = [
        HEADS,
        error("100% a:b,\r\nc", at(odd, "x", to="y"), severity=Severity.WARNING),
        error("x", at(SETTING, "16", "this"), severity=Severity.INFO, help="do"),
    ]
    assert render(found, "github") == (
        "::error file=plans/llama.plan,line=12,col=9,endColumn=31,title=PL203::"
        "8 key/value heads cannot be split over tp = 16"
        "%0Aplans/llama.plan:12: k_proj is split by head%0Aplans/llama.plan:5: tp is 16"
        "%0Afact: num_key_value_heads = 8  (config.json)"
        "%0Ahelp: tp can be 1, 2, 4 or 8 for this model\n"
        "::warning file=a%2Cb%3Ac%25.plan,line=1,endLine=2,title=PL203::100%25 a:b,␍%0Ac\n"
        "::notice title=PL203::x%0A--set tp=16: this%0Ahelp: do\n"
    )


SARIF = json.loads((Path(__file__).parent / "sarif.schema.json").read_text())


def sarif(*found):
    document = json.loads(render(found, "sarif"))
    jsonschema.validate(document, SARIF)
    [run] = document["runs"]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        for place in (*result.get("locations", ()), *result.get("relatedLocations", ())):
            region = place["physicalLocation"]["region"]
            start, end = (
                (region[f"{side}Line"], region[f"{side}Column"]) for side in ("start", "end")
            )
            assert start < end, "GitHub refuses an empty region"
    return run


def test_sarif():
    odd = Source("a b:ü%.plan", "x\ny\n")
    run = sarif(
        HEADS,
        error("100%", at(odd, "x", to="y"), severity=Severity.WARNING),
        error("x", at(SETTING, "16", "this"), severity=Severity.INFO, help="do"),
        error("end", Label(span=odd.span(4, 4))),
        error("nowhere", Label(span=Source("/a/b.plan", "é z").span(2, 3)), Label(span=NOWHERE)),
    )
    by_text = {r["message"]["text"].partition("\n")[0]: r for r in run["results"]}
    heads = by_text["8 key/value heads cannot be split over tp = 16"]
    assert (heads["ruleId"], heads["level"]) == ("PL203", "error")
    assert "help: tp can be 1, 2, 4 or 8 for this model" in heads["message"]["text"]
    [place] = heads["locations"]
    assert place == {
        "physicalLocation": {
            "artifactLocation": {"uri": "plans/llama.plan"},
            "region": {"startLine": 12, "startColumn": 9, "endLine": 12, "endColumn": 31},
        },
        "message": {"text": "k_proj is split by head"},
    }
    assert heads["relatedLocations"][0]["physicalLocation"]["region"]["startLine"] == 5
    uri = by_text["100%"]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == "a%20b%3A%C3%BC%25.plan" and by_text["100%"]["level"] == "warning"
    note = by_text["x"]
    assert note["level"] == "note" and "locations" not in note
    assert note["message"]["text"] == "x\n--set tp=16: this\nhelp: do"
    nowhere = by_text["nowhere"]["locations"][0]["physicalLocation"]
    assert nowhere["artifactLocation"]["uri"] == "file:///a/b.plan"
    assert nowhere["region"]["startColumn"] == 3, "code points, as columnKind says"
    assert run["columnKind"] == "unicodeCodePoints"
    [rule] = run["tool"]["driver"]["rules"]
    assert rule["shortDescription"]["text"] and "## " in rule["help"]["markdown"]
    assert sarif()["results"] == [] == sarif()["tool"]["driver"]["rules"]


def test_colors():
    text = render([error("x", at(PLAN, "mesh", "l"), help="h")], "full", color=True)
    assert text == (
        "\x1b[1;31merror[PL203]\x1b[0m\x1b[1m: x\x1b[0m\n"
        "\x1b[34m -->\x1b[0m plans/llama.plan:3:1\n"
        "\x1b[34m  |\x1b[0m\n"
        "\x1b[34m3 | \x1b[0mmesh {\n"
        "\x1b[34m  | \x1b[0m\x1b[1;31m^^^^\x1b[0m \x1b[1;31ml\x1b[0m\n"
        "\x1b[34m  = \x1b[0m\x1b[1mhelp:\x1b[0m h\n"
        "\n"
        "\x1b[1;31m1 error\x1b[0m\n"
    )
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert plain == full(error("x", at(PLAN, "mesh", "l"), help="h"))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "environ", "wanted"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (io.StringIO(), {}, False),
        (object(), {}, False),
        (io.StringIO(), {"FORCE_COLOR": "1"}, True),
        (io.StringIO(), {"CLICOLOR_FORCE": "1", "TERM": "dumb"}, True),
        (io.StringIO(), {"CLICOLOR_FORCE": "0"}, False),
        (io.StringIO(), {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_who_wants_colors(stream, environ, wanted):
    assert wants_color(stream, environ) is wanted


def test_nothing_found():
    assert summary([]) == "no findings"
    assert full() == "no findings\n"
    assert render([], "github") == ""
    with pytest.raises(ValueError, match="no format 'xml'; there are full"):
        render([], "xml")


def test_rendering_leaves_a_sink_as_it_is():
    sink = Sink()
    sink.warning("PL104", "b", at(PLAN, "mesh"))
    sink.error("PL100", "a")
    render(sink, "full")
    assert [d.message for d in sink] == ["b", "a"]


def test_a_sink_keeps_what_it_was_given():
    """Nothing is removed: what a proof overrules is kept apart, and no longer counts."""
    sink = Sink()
    sink.warning("PL160", "presumed")
    sink.error("PL203", "stands")
    sink.error("PL203", "stands")
    assert [d.code for d in sink] == ["PL160", "PL203"] and sink.overruled_findings == ()
    sink.overrule({"PL160"})
    sink.warning("PL160", "presumed, and reported late")
    assert [d.message for d in sink.diagnostics] == ["stands"] and sink.errors == 1
    assert [d.message for d in sink.overruled_findings] == [
        "presumed",
        "presumed, and reported late",
    ]
    assert not hasattr(sink.diagnostics, "append")
