"""`planc lsp`, asked by pygls' own client over standard input and output."""

import asyncio
import os
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
from console import call
from lsprotocol import types as lsp
from pygls.lsp.client import LanguageClient

from planc.diagnostics.codes import CODES
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.elaborate.elaborate import SECTIONS
from planc.files.resources import GRAMMARS, PLANS
from planc.ops.pipeline import SCHEDULES
from planc.sections import IMPLIED, NAMES
from planc.syntax.formatter.layout import format_plan
from planc.tools.editor.cursor import cursor
from planc.tools.editor.hover import meanings

TEXT = """\
# planc: llama-3.1-8b --world-size 64 --set tp=8
plan p for llama

extend "llama.plan"

option layers = 4    # that stay whole
let first = model.layers[0:layers_]
override option param_dtype = "fp32"

style own = python "here:Own"

override checkpoint {
    model.layers.* : full
}

tensor on tp {
    model.layers.* {
        when sequence and layers > 1 {
            override self_attn.{q,k}_proj : colwise(parts = config.num_key_value_heads)
        }
        override mlp.gate_proj<Linear> : own
    }
}
""".replace("[0:layers_]", "[0:4]")


class Editor:
    """An editor with one folder, and a server of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.loop = asyncio.new_event_loop()
        self.client = LanguageClient("a test", "1")
        self.published, self.versions = {}, {}
        self.client.feature("textDocument/publishDiagnostics")(partial(self._published))
        self.run(self.client.start_io(sys.executable, "-m", "planc", "lsp", "--stdio"))
        capabilities = lsp.ClientCapabilities()
        params = lsp.InitializeParams(capabilities=capabilities, root_uri=folder.as_uri())
        self.capabilities = self.run(self.client.initialize_async(params)).capabilities
        self.client.initialized(lsp.InitializedParams())

    def run(self, answer):
        return self.loop.run_until_complete(asyncio.wait_for(answer, 120))

    def _published(self, params):
        self.published[params.uri, params.version] = params.diagnostics

    def close(self):
        self.run(self.client.shutdown_async(None))
        self.client.exit(None)
        self.run(self.client.stop())

    def write(self, text, name="p.plan"):
        """Opens a plan, or changes it as a whole."""
        uri = (self.folder / name).as_uri()
        version = self.versions[uri] = self.versions.get(uri, 0) + 1
        if version == 1:
            item = lsp.TextDocumentItem(uri, "plan", version, text)
            self.client.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
        else:
            document = lsp.VersionedTextDocumentIdentifier(version, uri)
            change = [lsp.TextDocumentContentChangeWholeDocument(text)]
            params = lsp.DidChangeTextDocumentParams(document, change)
            self.client.text_document_did_change(params)
        self.text, self.uri = text, uri

    def found(self, text, name="p.plan"):
        """What is published after a change."""
        self.write(text, name)
        this = self.uri, self.versions[self.uri]

        async def published():
            while this not in self.published:
                await asyncio.sleep(0.02)
            return self.published[this]

        return self.run(published())

    def at(self, mark, plus=0):
        offset = self.text.index(mark) + plus
        before = self.text[:offset].split("\n")
        return lsp.Position(len(before) - 1, len(before[-1].encode("utf-16-le")) // 2)

    def ask(self, method, mark="", plus=0, **more):
        document = lsp.TextDocumentIdentifier(self.uri)
        kinds = {
            "hover": lsp.HoverParams,
            "completion": lsp.CompletionParams,
            "definition": lsp.DefinitionParams,
        }
        params = kinds[method](document, self.at(mark, plus), **more)
        return self.run(getattr(self.client, f"text_document_{method}_async")(params))

    def hover(self, mark, plus=0):
        found = self.ask("hover", mark, plus)
        return found.contents.value if found else None

    def completed(self, text, mark="@"):
        """The words that can stand at a mark, with what they are."""
        self.write(text.replace(mark, "", 1))
        offset = text.index(mark)
        before = text[:offset].split("\n")
        position = lsp.Position(len(before) - 1, len(before[-1]))
        params = lsp.CompletionParams(lsp.TextDocumentIdentifier(self.uri), position)
        found = self.run(self.client.text_document_completion_async(params))
        return {item.label: item for item in found}

    def defined(self, mark, plus=0):
        """(file, the line there) of a definition."""
        found = self.ask("definition", mark, plus)
        if found is None:
            return None
        path = Path(found.uri.removeprefix("file://"))
        text = self.text if path.as_uri() == self.uri else path.read_text()
        return path.name, text.splitlines()[found.range.start.line].strip()


@pytest.fixture(scope="module")
def editor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    made = Editor(folder)
    yield made
    made.close()


def shown(found):
    return [(d.code, d.range.start.line, d.message.splitlines()[0]) for d in found]


# Findings ----------------------------------------------------------------------------------------


def test_findings_as_you_type(editor):
    right = TEXT.replace("    override mlp.gate_proj<Linear> : own\n", "").replace("style own", "#")
    codes = [d.code for d in editor.found(right)]
    assert "PL104" in codes  # of the let, which nothing uses
    [syntax] = editor.found(TEXT.replace("checkpoint {", "checkpoint on {"))
    assert (syntax.code, syntax.severity) == ("PL001", lsp.DiagnosticSeverity.Error)
    assert syntax.range.start == lsp.Position(11, 23)
    found = editor.found(TEXT.replace(": full", ": ful"))
    assert ("PL105", 12, "there is no way to checkpoint `ful`") in shown(found)
    [wrong] = [d for d in found if d.code == "PL105"]
    assert wrong.source == "planc" and "help: did you mean `full`?" in wrong.message
    assert wrong.range == lsp.Range(lsp.Position(12, 21), lsp.Position(12, 24))


def test_a_finding_in_another_plan_is_shown_where_it_is_extended(editor):
    text = (PLANS / "llama.plan").read_text().replace("q,k,v", "q,k,w", 1)
    (editor.folder / "base.plan").write_text(text)
    found = editor.found('plan q for llama\n\nextend "base.plan"\n', "q.plan")
    [missing, *_] = [d for d in found if d.code == "PL101"]
    assert missing.range.start.line == 2
    [place] = [r.location for r in missing.related_information]
    assert place.uri == (editor.folder / "base.plan").as_uri() and place.range.start.line > 2
    editor.write(text.replace("q,k,w", "q,k,v"), "base.plan")  # open, and not saved
    found = editor.found('plan q for llama\n\nextend "base.plan"\n# changed\n', "q.plan")
    assert "PL101" not in {d.code for d in found}
    closed = lsp.DidCloseTextDocumentParams(lsp.TextDocumentIdentifier(editor.uri))
    editor.client.text_document_did_close(closed)


@pytest.mark.parametrize("name", ["a b.plan", "\u00e9.plan", "x(1)+y@2.plan", "x%41.plan"])
def test_paths_with_other_letters(editor, name):
    found = editor.found(TEXT.replace(": full", ": ful").partition("tensor on")[0], name)
    assert ("PL105", 12, "there is no way to checkpoint `ful`") in shown(found)


def test_documents_without_files_are_told_apart(editor):
    texts = {f"untitled:Untitled-{n}": f"plan   t{n} for llama\n" for n in (1, 2)}
    for uri, text in texts.items():
        item = lsp.TextDocumentItem(uri, "plan", 1, text)
        editor.client.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
    for uri, text in texts.items():
        params = lsp.DocumentFormattingParams(
            lsp.TextDocumentIdentifier(uri), lsp.FormattingOptions(tab_size=2, insert_spaces=True)
        )
        [edit] = editor.run(editor.client.text_document_formatting_async(params))
        assert edit.new_text == text.replace("   ", " ")
        closed = lsp.DidCloseTextDocumentParams(lsp.TextDocumentIdentifier(uri))
        editor.client.text_document_did_close(closed)


def test_a_position_or_a_file_that_is_not_there_is_no_error(editor):
    editor.write(TEXT)
    far = lsp.Position(10_000, 3)
    for uri, said in ((editor.uri, None), ((editor.folder / "no.plan").as_uri(), "PL002")):
        params = lsp.HoverParams(lsp.TextDocumentIdentifier(uri), far)
        found = editor.run(editor.client.text_document_hover_async(params))
        assert (found is None) if said is None else said in found.contents.value


def test_columns_are_utf16(editor):
    found = editor.found(TEXT.replace("    model.layers.* : full", "    model.😀layers.* : full"))
    [first, *_] = [d for d in found if d.code == "PL001"]
    assert first.range.start.line == 12 and first.range.end.character <= 12
    line = 'option x = ["😀😀", nothing_]\n'
    [unknown] = [d for d in editor.found(TEXT + line) if d.code == "PL100"]
    start, end = unknown.range.start.character, unknown.range.end.character
    assert line.encode("utf-16-le")[2 * start : 2 * end].decode("utf-16-le") == "nothing_"
    wide = TEXT.replace("for llama\n", 'for llama, "😀😀", typo_\n')
    editor.write(wide)
    assert "--world-size 64" in editor.hover("typo_", 2)


# What a plan is judged for -----------------------------------------------------------------------


def test_a_byte_order_mark_means_nothing(editor):
    """Where an editor keeps it: as for `planc check`, but columns of the first line count it."""
    wrong = TEXT.replace(": full", ": ful")
    found = shown(editor.found(wrong, "mark.plan"))
    assert found and shown(editor.found(f"\ufeff{wrong}", "mark.plan")) == found
    [syntax, *_] = editor.found("\ufeffplan p fro llama\n", "mark.plan")
    assert (syntax.code, syntax.range.start) == ("PL001", lsp.Position(0, 8))
    assert "llama" in editor.completed("\ufeffplan p for lla@")
    assert "extend" in editor.completed("\ufeffex@")
    text = (PLANS / "llama.plan").read_text()
    editor.write(f"\ufeff{text}", "marked.plan")
    params = lsp.DocumentFormattingParams(
        lsp.TextDocumentIdentifier(editor.uri),
        lsp.FormattingOptions(tab_size=2, insert_spaces=True),
    )
    assert editor.run(editor.client.text_document_formatting_async(params)) is None
    extending = editor.found('plan q for llama\n\nextend "marked.plan"\n', "extending.plan")
    assert "PL009" not in {d.code for d in extending}


def test_the_comment_names_the_target(editor):
    editor.write(TEXT)
    assert "`llama-3.1-8b --world-size 64 --set tp=8`" in editor.hover("p for")
    [wrong] = [
        d for d in editor.found(TEXT.replace("--world-size 64", "--world 64")) if d.code[2] == "7"
    ]
    assert (wrong.code, wrong.range.start.line) == ("PL740", 0)
    found = editor.found(TEXT.replace("--world-size 64", "--world-size 0"))
    said = "this comment names no target: `--world-size` is a number of ranks, not `0`"
    assert ("PL740", 0, said) in shown(found)
    [missing, *_] = editor.found(TEXT.replace("llama-3.1-8b", "llama-3.1-9b"))
    assert (missing.code, missing.range.start.line) == ("PL600", 0)
    bare = editor.found(
        TEXT.replace("# planc: llama-3.1-8b --world-size 64 --set tp=8", "# planc:")
    )
    assert "PL740" in {d.code for d in bare}


def test_without_a_comment_the_family_decides(editor):
    editor.write(TEXT.replace("# planc:", "#"))
    assert "`llama-3.2-1b`: it is the smallest shape" in editor.hover("p for")
    found = editor.found("plan p for nothing_known\n")
    assert shown(found) == [
        ("PL741", 0, "the plan is not judged: no model is known for its family")
    ]
    assert "Not judged" in editor.hover("p for")


@pytest.mark.parametrize("name", ["classifier", "llama", "mixtral"])
def test_a_shipped_plan_has_no_errors(editor, name):
    found = editor.found((PLANS / f"{name}.plan").read_text(), f"{name}.plan")
    assert {d.code for d in found} <= {"PL307", "PL204"}


def test_a_target_of_the_project(editor):
    project = editor.folder / "pyproject.toml"
    target = "[[tool.planc.targets]]\nmodel = 'qwen3-8b'\nplan = 'top.plan'\nworld-size = 64\n"
    project.write_text(target)
    (editor.folder / "top.plan").write_text('plan top for qwen3\nextend "part.plan"\n')
    part = 'plan part for qwen3\nextend "qwen3.plan"\noverride tensor on tp {\n    # @\n}\n'
    try:
        editor.write(part, "part.plan")
        assert "`qwen3-8b top.plan --world-size 64`: a target in pyproject" in editor.hover("part")
        assert "q_norm" in editor.completed(part.replace("# @", "model.layers.*.self_attn.@"))
        project.write_text(target.replace("plan =", "plam ="))
        saved = lsp.DidSaveTextDocumentParams(lsp.TextDocumentIdentifier(editor.uri))
        editor.client.text_document_did_save(saved)
        codes = {d.code for d in editor.found(part + "\n", "part.plan")}
        assert "PL021" in codes
    finally:
        project.unlink()
    closed = lsp.DidCloseTextDocumentParams(lsp.TextDocumentIdentifier(editor.uri))
    editor.client.text_document_did_close(closed)


# Hover -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mark", "plus", "wanted"),
    [
        ("{q,k}", 1, "64 modules"),
        (
            "{q,k}",
            1,
            "`model.layers[0:32].self_attn.k_proj`: 32 x Linear, weight [1024, 4096] bf16",
        ),
        ("model.layers.* : full", 0, "32 modules"),
        ("mlp.gate_proj", 0, "weight [14336, 4096]"),
        ("config.num", 3, "= 8, plans/models/llama-3.1-8b.json"),
        ("tp {", 0, "`tp` = 8 ranks"),
        ("sequence", 2, '= "auto"'),
        ("sequence", 2, "are sharded on the sequence dim"),  # the table of settings
        ("layers =", 1, "`layers` = 4\n\nthat stay whole"),
        ("first", 1, "4 modules"),
        ("colwise", 1, "sharded on the output features"),
        ("full", 1, "saves only the inputs"),
        ("checkpoint", 1, "Activation checkpointing"),
    ],
)
def test_hover(editor, mark, plus, wanted):
    editor.write(TEXT)
    assert wanted in editor.hover(mark, plus)


def test_hover_on_a_finding_has_its_page(editor):
    editor.found(TEXT.replace(": full", ": ful"))
    text = editor.hover("ful\n", 1)
    assert text.startswith(f"**PL105: {CODES['PL105'].title}**") and "How to fix it" in text
    assert editor.hover("}\n", 0) is None


# Completion --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "wanted", "unwanted"),
    [
        ("tensor on tp {\n    @\n}", {"model", "lm_head", "override", "when"}, {"unit"}),
        ("tensor on tp {\n    model.@\n}", {"layers", "norm", "embed_tokens"}, {"when", "lm_head"}),
        ("tensor on tp {\n    model.layers.@\n}", {"*"}, {"self_attn"}),
        ("tensor on tp {\n  model.layers.* {\n    mlp.@\n", {"down_proj", "act_fn"}, {"mlp"}),
        ("tensor on tp {\n  model.layers.* {\n    self_attn.{q_proj,@", {"k_proj"}, {"mlp"}),
        ("tensor on tp {\n model.layers.* {\n  mlp.{gate,up}_proj : own\n  @", {"mlp"}, {"model"}),
        ("tensor on tp {\n  when tp > 1 {\n  } else {\n    model.@", {"layers"}, set()),
        ("tensor on tp {\n    lm_head : @", {"colwise", "rowwise", "own"}, {"unit", "full"}),
        ("checkpoint {\n    $@\n}", {"blocks", "first"}, {"layers", "tp"}),
        ("checkpoint {\n    $blocks.@\n}", {"mlp", "self_attn"}, set()),
        ("checkpoint {\n    model.layers.* : @\n}", {"full", "ops", "none"}, {"colwise"}),
        ("fsdp on @", {"dp_shard", "dp_replicate", "tp", "dp"}, {"model"}),
        ("fsdp on dp_shard {\n    @", {"root", "precision", "ignore"}, set()),
        ("fsdp on dp_shard {\n    group(model.@", {"norm"}, set()),
        ("mesh {\n    tp = @", {"auto", "layers", "config"}, {"model"}),
        ("mesh {\n    tp = config.@", {"hidden_size", "num_key_value_heads"}, {"tp"}),
        ("checkpoint {\n    model.layers.*<@", {"LlamaDecoderLayer"}, {"Linear"}),
        ("load {\n    weights = @", {"slices", "rank0"}, {"colwise"}),
        ("mesh {\n    @", {"tp", "dp_shard"}, {"model", "lm_head"}),
        ("@", {"tensor", "fsdp", "option", "when"}, {"colwise"}),
        ("plan mine for llama, @", {"qwen3", "mistral"}, {"tp", "model"}),
        ("let inner = model.@", {"layers"}, set()),
        ("extend \"@", {"llama", "mixtral"}, {"model"}),
        ("# planc: @", {"llama-3.1-8b"}, {"model"}),
        ("# any @", set(), {"model", "tensor"}),
    ],
)  # fmt: skip
def test_completion(editor, typed, wanted, unwanted):
    found = editor.completed(f"{TEXT}\n{typed}\n")
    assert wanted <= found.keys() and not unwanted & found.keys()


def test_a_completion_says_what_it_is_and_what_it_replaces(editor):
    found = editor.completed(f"{TEXT}\ntensor on tp {{\n    model.layers.*.mlp.gate@\n")
    gate = found["gate_proj"]
    assert gate.detail == "32 x Linear, weight [14336, 4096] bf16"
    assert gate.text_edit.range.start.character == len("    model.layers.*.mlp.")
    found = editor.completed(f"{TEXT}\nmesh {{\n    tp = config.num_@\n")
    assert found["num_key_value_heads"].detail == "8"


def test_the_cursor_is_where_the_braces_say():
    text = "tensor on tp {\n a.{b,c} : colwise(\n  parts = [1,\n"
    at = cursor(text, len(text))
    assert (at.section, at.blocks, at.before) == (
        "tensor",
        (),
        "a.{b,c} : colwise(\n  parts = [1,\n",
    )
    text = "override fsdp on dp {\n optional a.*<B> {\n when x {\n c : unit\n } else {\n d"
    at = cursor(text, len(text))
    assert (at.section, at.typed) == ("fsdp", "d")
    assert [(b.path, b.cls) for b in at.blocks] == [("a.*", "B")]
    assert cursor(text + "\n }\n }\n}\nlet y = ", len(text) + 19).section == ""


# Definitions, outline, layout, corrections -------------------------------------------------------


def test_definitions(editor):
    editor.write(TEXT)
    assert editor.defined("llama.plan") == (
        "llama.plan",
        (PLANS / "llama.plan").read_text().splitlines()[0],
    )
    assert editor.defined("layers > 1") == ("p.plan", "option layers = 4    # that stay whole")
    assert editor.defined("sequence") is None  # in no plan, but in the table of settings
    file, line = editor.defined("tp {")
    assert file == "blocks.plan" and line.startswith("tp ")
    assert editor.defined(": own", 3) == ("p.plan", 'style own = python "here:Own"')
    assert editor.defined("layers = 4") is None
    editor.write(TEXT + "\ncheckpoint {\n    $first.mlp : none\n}\n")
    assert editor.defined("$first", 2) == ("p.plan", "let first = model.layers[0:4]")


def test_outline(editor):
    editor.write(TEXT)
    document = lsp.TextDocumentIdentifier(editor.uri)
    params = lsp.DocumentSymbolParams(document)
    found = editor.run(editor.client.text_document_document_symbol_async(params))
    heads = [line.rstrip("{ ") for line in TEXT.splitlines() if line[:1] not in ("", " ", "#", "}")]
    assert [s.name for s in found] == [head.partition("  #")[0].rstrip() for head in heads]
    [block] = found[-1].children
    assert [s.name for s in block.children] == [
        "when sequence and layers > 1",
        "override mlp.gate_proj<Linear> : own",
    ]
    assert found[-1].range.start.line == 15 and found[-1].range.end.line == 22


def test_formatting_is_that_of_fmt(editor):
    untidy = TEXT.replace("    model", "  model").replace("tensor on", "tensor    on")
    params = lsp.DocumentFormattingParams(
        lsp.TextDocumentIdentifier((editor.folder / "p.plan").as_uri()),
        lsp.FormattingOptions(tab_size=2, insert_spaces=True),
    )
    editor.write(untidy)
    [edit] = editor.run(editor.client.text_document_formatting_async(params))
    assert edit.new_text == format_plan(Source("p.plan", untidy), Sink()) != untidy
    assert edit.range.start == lsp.Position(0, 0) and edit.range.end.line == untidy.count("\n")
    for nothing in (edit.new_text, TEXT.replace("tensor on", "tensor onn")):
        editor.write(nothing)
        assert editor.run(editor.client.text_document_formatting_async(params)) is None


def test_a_correction_is_that_of_fix(editor, tmp_path, monkeypatch):
    wrong = TEXT.replace(": full", ": ful").partition("tensor on")[0]
    editor.write(wrong)
    here = editor.at(": ful", 3)

    def actions(at):
        params = lsp.CodeActionParams(
            lsp.TextDocumentIdentifier(editor.uri), lsp.Range(at, at), lsp.CodeActionContext([])
        )
        return editor.run(editor.client.text_document_code_action_async(params))

    [action] = actions(here)
    assert action.title == "change `ful` to `full`"
    [edit] = action.edit.changes[editor.uri]
    lines = wrong.splitlines(keepends=True)
    line = lines[edit.range.start.line]
    start, end = edit.range.start.character, edit.range.end.character
    lines[edit.range.start.line] = line[:start] + edit.new_text + line[end:]
    (tmp_path / "p.plan").write_text(wrong)
    monkeypatch.chdir(tmp_path)
    call("check", "llama-3.1-8b", "p.plan", "--world-size", 64, "--set", "tp=8", "--fix")
    assert (tmp_path / "p.plan").read_text() == "".join(lines) != wrong
    assert not actions(lsp.Position(0, 0))


# The server itself -------------------------------------------------------------------------------


def test_without_pygls_the_extra_is_named(tmp_path):
    (tmp_path / "nothing.py").touch()
    code = (
        "import sys; from importlib.machinery import PathFinder as P; find = P.find_spec\n"
        "P.find_spec = lambda n, *a: None if n.split('.')[0] == 'pygls' else find(n, *a)\n"
        "from planc.cli import main; sys.exit(main(['lsp']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert "error[PL742]" in done.stderr and "planc[lsp]" in done.stderr


def test_a_server_imports_no_torch():
    code = "import sys, planc.tools.editor.server; print([m for m in sys.modules if m == 'torch'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", IMPLIED)
def test_the_word_of_a_section_without_lines_means_nothing_in_a_plan(name):
    assert meanings(name) == {}


def test_every_word_means_something_to_the_compiler():
    """Hover and completion say of each section what the compiler reads there, and no more."""
    table = tomllib.loads((GRAMMARS / "words.toml").read_text())
    assert set(table) == {*SECTIONS, "keywords", "layouts"} - {*NAMES}
    terminals = (GRAMMARS / "plan.lark").read_text()
    assert all(f'"{word}"' in terminals for word in table["keywords"])
    assert set(SCHEDULES) == set(meanings("pipeline", "values")) - {
        "even",
        "balanced",
        "weighted",
        "file",
    }
    for section in SECTIONS:
        assert meanings(section)["about"].endswith(".")
        for word in meanings(section, "actions"):
            assert not _unknown(section, f"lm_head : {word}"), (section, word)
        for word in meanings(section, "items"):
            lines = (f"{word} = 1", f"{word}(1)", f"{word} : unit", f"{word}(1) : unit")
            assert any(not _unknown(section, line) for line in lines), (section, word)
    assert _unknown("checkpoint", "lm_head : colwise") and _unknown("load", "when_ = 1")


def _unknown(section, line):
    """Whether the compiler says that a word does not exist there."""
    on = {"tensor": " on tp", "fsdp": " on dp", "replicate": " on dp", "pipeline": " on pp"}
    text = f"plan p for llama\n{section}{on.get(section, '')} {{\n    {line}\n}}\n"
    from helpers import judged

    _, _, found = judged(text + ("" if section == "mesh" else "mesh {\n    dp = auto\n}\n"))
    said = ("there is no", "has no place", "it can set")
    return any(d.code in ("PL105", "PL011") and any(s in d.message for s in said) for d in found)
