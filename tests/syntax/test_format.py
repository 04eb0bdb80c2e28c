"""`planc fmt`: one layout for each plan, whatever it was laid out like; nothing is lost."""

import re
import stat
import textwrap
from itertools import pairwise

import pytest
from console import call
from folders import ROOT
from helpers import check_each
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planc.cli import main
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.files import atomic_write
from planc.syntax.formatter import layout
from planc.syntax.formatter.tokens import tokens_of
from planc.syntax.parse import parse

BLOCK = re.compile(r"^```plan\n(.*?)^```$", re.M | re.S)
SLOW = settings(max_examples=80, deadline=5000, suppress_health_check=[HealthCheck.too_slow])


def examples():
    found = {}
    for path in [*sorted(ROOT.glob("plans/*.plan")), *sorted(ROOT.glob("docs/**/*.plan"))]:
        found[str(path.relative_to(ROOT))] = path.read_text()
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found[f"{page.relative_to(ROOT)}:{line}"] = match[1]
    return found


EXAMPLES = examples()
TEXTS = list(EXAMPLES.values())


def formatted(text):
    sink = Sink()
    result = layout.format_plan(Source("p.plan", text), sink)
    assert (result is None) == sink.has_errors, [d.message for d in sink]
    return result


def tree(text):
    sink = Sink()
    file = parse(Source("p.plan", text), sink)
    assert not sink.has_errors, [d.message for d in sink]
    return file


def comments(text):
    """By a look at the text alone: what follows a `#` that is not in a string."""
    found = re.findall(r'"(?:\\.|[^"\\\n])*"|#[^\n]*', text)
    return sorted(c.rstrip() for c in found if c.startswith("#"))


def whole_and_stable(text):
    result = formatted(text)
    assert result is not None
    assert tree(result) == tree(text)
    assert comments(result) == comments(text)
    assert formatted(result) == result
    assert not re.search(r"[ \t]\n|\n\n\n|\t|^\n|[^\n]\Z", result)
    return result


def test_every_plan_of_the_repository_is_laid_out():
    def check(name):
        assert formatted(EXAMPLES[name]) == EXAMPLES[name]

    check_each(EXAMPLES, check)


def test_there_are_examples():
    assert len(EXAMPLES) > 40 and any(":" in name for name in EXAMPLES)


# Whatever the text looks like --------------------------------------------------------------------


@st.composite
def respaced(draw, comment=False):
    """(a plan of the repository, the same with other white space and perhaps more comments)."""
    text = draw(st.sampled_from(TEXTS))
    given = list(tokens_of(text + "\n"))
    spaces = st.sampled_from([" ", "  ", "\t", " " * 30])
    lines = st.sampled_from(["\n", "\r\n", " \n"])
    out = [given[0].text]
    depth = 0
    for before, piece in pairwise(given):
        depth += (before.kind in ("LPAR", "LSQB")) - (before.kind in ("RPAR", "RSQB"))
        ends = before.kind == "#"
        if comment and not ends and (depth or piece.starts_line) and draw(st.integers(0, 9)) == 0:
            out.append(draw(spaces) + f'# "{len(out)}{draw(lines)}')
            out += [f"# {len(out)}\n"] * draw(st.integers(0, 1))
        elif ends or (piece.starts_line and piece.kind == "#"):
            out.append(draw(lines) * (3 if piece.blank else 1))
        elif piece.kind == "#":
            out.append(draw(spaces))
        elif depth or before.kind == "LBRACE" or piece.kind == "RBRACE":
            out.append(draw(spaces | lines.map(lambda n: n * 2)))
        elif piece.starts_line:
            out.append(draw(lines) * (2 if piece.blank else 1))
        else:
            out.append(draw(spaces))
        out.append(piece.text)
    return text, "".join(out)


@SLOW
@given(respaced())
def test_the_layout_does_not_depend_on_white_space(pair):
    text, other = pair
    assert formatted(other).replace("\r\n", "\n") == text


@SLOW
@given(respaced(comment=True))
def test_comments_anywhere_are_kept_once(pair):
    whole_and_stable(pair[1].replace("\r\n", "\n"))


ATOMS = ["a", "config.b", "1", "2.5e3", "100M", '"t # t"', "true", "null", "$x", "m.*", "m[0:4]"]
ATOMS += ["m.{a,b}_p", "m.*<C>", "m has n<D>", "-3"]
OPERATORS = ["+", "-", "*", "/", "//", "%", "<", "==", "in", "not in", "and", "or"]


def larger(inner):
    lists = st.lists(inner, max_size=6).map(", ".join)
    return st.one_of(
        st.tuples(inner, st.sampled_from(OPERATORS), inner).map(lambda t: f"({' '.join(t)})"),
        inner.map(lambda e: f"(-{e})"),
        inner.map(lambda e: f"(not {e})"),
        st.tuples(inner, inner, inner).map(lambda t: "(when {} then {} else {})".format(*t)),
        lists.map(lambda items: f"[{items}]"),
        lists.map(lambda items: f"len({items})"),
        inner.map(lambda e: f"f(x = {e}, {e} -> {e}, -> {e},)"),
    )


EXPRESSIONS = st.recursive(st.sampled_from(ATOMS), larger, max_leaves=40)


@SLOW
@given(EXPRESSIONS)
def test_any_expression(value):
    text = f"plan a for b\nlet v = {value}\nmesh {{\n    x = {value}\n    longer = 1\n}}\n"
    text += f'require {value} "m"\ntensor on x {{\n    a : f({value})\n}}\n'
    if len(text) > 9_000:  # a line of a plan has at most 10,000 characters
        return
    for line in whole_and_stable(text).splitlines():
        if len(line) > layout.WIDTH:  # only where nothing is left to break
            assert not re.search(r"[(\[][^()\[\]]+[)\]]", re.sub(r"m\[0:4\]|\"t # t\"", "", line))


def test_a_brace_that_opens_a_block_belongs_to_no_name():
    """`x{` is a name and a brace, as `x {` is; only `x{a,b}` is a selector."""
    block = (
        "plan a for b\noption x = true\ntensor on tp {\n    when x{\n        m.{a,b} : colwise\n"
    )
    text = f"{block}    }}\n}}\n"
    laid = whole_and_stable(text)
    assert "    when x {\n" in laid
    one, two = (parse(Source("p.plan", t), Sink()) for t in (text, laid))
    assert one == two


@SLOW
@given(st.sampled_from(TEXTS), st.integers(0, 10_000), st.integers(0, 3))
def test_what_does_not_parse_has_no_layout(text, at, length):
    at %= len(text)
    broken = text[:at] + text[at + length :]
    sink = Sink()
    result = layout.format_plan(Source("p.plan", broken), sink)
    assert (result is None) == sink.has_errors
    if result is not None:
        whole_and_stable(broken)


def test_a_layout_that_would_change_the_plan_is_not_given(monkeypatch):
    monkeypatch.setattr(layout, "laid_out", lambda text: "plan a for c\n")
    with pytest.raises(RuntimeError, match="would change its meaning"):
        formatted("plan a for b\n")
    monkeypatch.setattr(layout, "laid_out", lambda text: "plan a for b\n")
    with pytest.raises(RuntimeError):
        formatted("plan a for b # lost\n")


# Pairs: as written, as laid out ------------------------------------------------------------------

PAIRS = {
    "columns": (
        """
        mesh { dp_shard=auto
        tp =1 }
        option a = 1
        override option longer = 2
        let z = 3

        option apart = 4
        tensor on tp {
            a : colwise
            # between
            longer.name : rowwise
            when x { b : colwise } else { c.d : rowwise }
            e : rowwise
        }
        """,
        """
        mesh {
            dp_shard = auto
            tp       = 1
        }
        option a               = 1
        override option longer = 2
        let z = 3

        option apart = 4
        tensor on tp {
            a           : colwise
            # between
            longer.name : rowwise
            when x {
                b : colwise
            } else {
                c.d : rowwise
            }
            e : rowwise
        }
        """,
    ),
    "a long head stands out of the columns": (
        """
        fsdp on dp, replicate on x*y {
            a : unit
            group(model.decoder.embed_tokens, model.decoder.final_layer_norm) : unit
            bcd : unit
        }
        """,
        """
        fsdp on dp, replicate on x * y {
            a   : unit
            group(model.decoder.embed_tokens, model.decoder.final_layer_norm) : unit
            bcd : unit
        }
        """,
    ),
    "comments": (
        """
        # own

        mesh { # head
            a = 1 # one
            bcd = 2     # two

            e = 3 # three

            # last

        }# end
        """,
        """
        # own

        mesh {    # head
            a   = 1    # one
            bcd = 2    # two

            e = 3    # three

            # last
        }    # end
        """,
    ),
    "comments in brackets": (
        """
        let a = f( # first
          1, # one
          # before two
          2
          + 3 # within
          * 4
          # tail
        )
        """,
        """
        let a = f(
            # first
            1,    # one
            # before two
            # within
            2 + 3 * 4,
            # tail
        )
        """,
    ),
    "brackets": (
        """
        let a = [1,2,
            3,]
        let b = f()
        let c = [ ]
        mesh {
        }
        require -1 - -a ==-(2) ""
        """,
        """
        let a = [1, 2, 3]
        let b = f()
        let c = []
        mesh {}
        require -1 - -a == -(2) ""
        """,
    ),
    "too long": (
        """
        require (config.a_long_field_of_a_model == 1 and len(config.another_field) > 2 or not config.third) "m"
        fsdp on dp {
            group(model.language_model.embed_tokens, model.language_model.norm, lm_head) : unit(reshard = never)
        }
        """,  # noqa: E501
        """
        require (
            config.a_long_field_of_a_model == 1
            and len(config.another_field) > 2
            or not config.third
        ) "m"
        fsdp on dp {
            group(
                model.language_model.embed_tokens,
                model.language_model.norm,
                lm_head,
            ) : unit(reshard = never)
        }
        """,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name):
    before, after = (textwrap.dedent(t).lstrip("\n") for t in PAIRS[name])
    assert whole_and_stable(before) == after


def test_line_ends_and_the_byte_order_mark():
    assert formatted("plan a for b  \r\n\r\n\r\n# c \r\n") == "plan a for b\r\n\r\n# c\r\n"
    assert formatted("plan a for b\nmesh {}\r\n") == "plan a for b\nmesh {}\n"
    assert formatted("\ufeffplan  a for b") == "plan a for b\n"


# The command -------------------------------------------------------------------------------------

UGLY = "plan a for llama  # one\nmesh { tp=1 }\n"
NICE = "plan a for llama    # one\nmesh {\n    tp = 1\n}\n"


def planc(*words, stdin=""):
    """Runs the command: (exit code, stdout, stderr)."""
    return call("fmt", *words, stdin=stdin)


def test_files_are_written_in_place(tmp_path):
    ugly, nice, link = tmp_path / "ugly.plan", tmp_path / "nice.plan", tmp_path / "link.plan"
    ugly.write_text(UGLY)
    ugly.chmod(0o640)
    nice.write_text(NICE)
    link.symlink_to("ugly.plan")
    stamp = nice.stat().st_mtime_ns
    assert planc(link, nice) == (0, f"formatted {link}\n", "")
    assert ugly.read_text() == NICE and link.is_symlink()
    assert stat.S_IMODE(ugly.stat().st_mode) == 0o640
    assert nice.stat().st_mtime_ns == stamp, "a file that is laid out is not touched"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.plan", "nice.plan", "ugly.plan"]


def test_check_and_diff_write_nothing(tmp_path):
    ugly, nice = tmp_path / "ugly.plan", tmp_path / "nice.plan"
    ugly.write_text(UGLY)
    nice.write_text(NICE)
    told = f"{ugly} is not in the canonical layout\n"
    assert planc("--check", ugly, nice) == (1, told, "")
    assert planc("--check", nice) == (0, "", "")
    code, out, err = planc("--diff", ugly, nice)
    assert (code, err) == (1, "") and out.startswith(f"--- {ugly}\n+++ {ugly}\n")
    assert "-mesh { tp=1 }\n+plan a for llama    # one\n+mesh {\n+    tp = 1\n+}\n" in out
    assert ugly.read_text() == UGLY


def test_standard_input(tmp_path):
    assert planc("-", stdin=UGLY) == (0, NICE, "")
    assert planc("--check", "-", stdin=UGLY)[:2] == (
        1,
        "<stdin> is not in the canonical layout\n",
    )
    code, out, err = planc("-", stdin="plan a fro b\n")
    assert (code, out) == (2, "") and "PL001" in err and "<stdin>:1" in err


def test_a_file_that_does_not_parse_is_left_alone(tmp_path):
    broken, ugly = tmp_path / "broken.plan", tmp_path / "ugly.plan"
    broken.write_bytes(b"plan a fro b\nmesh {\n")
    ugly.write_text(UGLY)
    code, out, err = planc(broken, ugly)
    assert code == 2 and out == f"formatted {ugly}\n"
    assert "PL001" in err and "PL004" in err and f"{broken}:1" in err
    assert broken.read_bytes() == b"plan a fro b\nmesh {\n" and ugly.read_text() == NICE
    binary = tmp_path / "binary.plan"
    binary.write_bytes(b"plan a for \xff\n")
    assert planc(binary)[0] == 2 and binary.read_bytes() == b"plan a for \xff\n"
    assert planc(tmp_path / "nothere.plan")[0] == 2
    assert planc(tmp_path / "nothere.plan")[2].startswith("error[PL006]")


def test_folders(tmp_path):
    (tmp_path / "deep" / ".venv").mkdir(parents=True)
    for name in ("deep/a.plan", "deep/a.txt", "deep/.venv/b.plan"):
        (tmp_path / name).write_text(UGLY)
    assert planc(tmp_path) == (0, f"formatted {tmp_path}/deep/a.plan\n", "")
    assert (tmp_path / "deep/.venv/b.plan").read_text() == UGLY
    (tmp_path / "deep" / "a.plan").unlink()
    code, _, err = planc(tmp_path)
    assert code == 2 and "holds no .plan file" in " ".join(err.split())


def test_a_disk_that_is_full(tmp_path, monkeypatch, capsys):
    def full(*words):
        raise OSError(28, "No space left on device")

    file = tmp_path / "a.plan"
    file.write_text(UGLY)
    monkeypatch.setattr(atomic_write.os, "fsync", full)
    assert main(["fmt", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "error[PL020]: cannot write" in captured.err
    assert file.read_text() == UGLY and list(tmp_path.iterdir()) == [file]
