"""What planc does where torch is not installed: what needs none, and what a pack brings along."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from console import call
from modelfolder import BROKEN_QWEN3, QWEN3

import planc
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import PlanError, Sink
from planc.model import cache
from planc.model.load import load
from planc.proof import pack

RUN = ("model", "qwen3", "--world-size", "4", "--set", "tp=2")
TARGET = """[[tool.planc.targets]]
model      = "model"
plan       = "qwen3"
world-size = [4, 2]
set        = ["tp=2"]
"""
"""Of which the first world size is that of RUN."""
SHARED = ("pyproject.toml", "planc-pack.json")
WITHOUT = (
    "import sys\n"
    "for name in sys.argv.pop(1).split(','): sys.modules[name] = None\n"
    "from planc.cli import main\n"
    "sys.exit(main())"
)
"""The command in a process in which some libraries cannot be imported."""
MISSING = "torch,transformers,numpy,safetensors,huggingface_hub,yaml,diffusers,peft,accelerate"


def without(folder, *words, missing=MISSING):
    """(exit code, standard output, standard error) of a command where libraries are missing."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, missing, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PLANC_CACHE_DIR": str(folder / "other"), "COLUMNS": "200"},
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


EXTRAS = "peft,diffusers,bitsandbytes,accelerate,trl,lightning,pygls,megatron_fsdp"


def test_a_check_needs_no_extra(folder):
    """`pip install planc` without extras: the proof runs, with all that `planc.apply` imports."""
    code, text, errors = without(folder, "check", *RUN, missing=EXTRAS)
    assert (code, errors) == (0, "") and "(proved" in text, text + errors


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder with a model, two lowered plans, and a pack of a machine that has checked it."""
    folder = tmp_path_factory.mktemp("packed")
    before = {name: os.environ.get(name) for name in ("PLANC_CACHE_DIR", "COLUMNS")}
    here = Path.cwd()
    os.environ |= {"PLANC_CACHE_DIR": str(folder / "own"), "COLUMNS": "200"}
    os.chdir(folder)
    try:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(QWEN3))
        (folder / "broken.plan").write_text(BROKEN_QWEN3)
        (folder / "a.plan").write_text("plan a for qwen3\n\nextend   'qwen3'\n".replace("'", '"'))
        (folder / "pyproject.toml").write_text(TARGET)
        assert call("check")[0] == 0
        assert call("check", "model", "broken.plan", *RUN[2:])[0] == 1
        for name, more in (("a", ()), ("b", ("--set", "recompute=false"))):
            lowering = ("lower", *RUN, *more, "--format", "json", "-o", f"{name}.json")
            assert call(*lowering)[0] == 0
        code, text, _ = call("cache", "pack")
        assert code == 0 and text.startswith("packed planc-pack.json: facts of")
    finally:
        os.chdir(here)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return folder


@pytest.fixture
def folder(packed, tmp_path):
    """The same files, where nothing is unpacked yet."""
    for name in ("model", "broken.plan", "a.plan", "a.json", "b.json", *SHARED):
        (tmp_path / name).symlink_to(packed / name)
    return tmp_path


@pytest.fixture
def unpacked(folder):
    assert without(folder, "cache", "unpack")[0] == 0
    return folder


# Without a pack ----------------------------------------------------------------------------------

NEED_NOTHING = [
    (("fmt", "--check", "broken.plan"), 0, ""),
    (("fmt", "--check", "a.plan"), 1, "a.plan is not in the canonical layout"),
    (("explain", "PL501"), 0, "PL501: "),
    (("list", "plans"), 0, "llama"),
    (("list", "models"), 0, "llama-3.1-8b"),
    (("diff", "model", "a.json", "b.json"), 1, "1 to remove"),
    (("diff", "model", "a.json", "a.json"), 0, "No changes."),
    (("diff", "a.json", "b.json"), 2, ""),  # no model, and not "No changes."
    (("completion", "bash"), 0, "_planc()"),
    (("check", "--help"), 0, "--world-size"),
    (("cache", "show"), 0, "facts of 0 models"),
]


@pytest.mark.parametrize(("words", "code", "text"), NEED_NOTHING, ids=lambda x: str(x)[:30])
def test_what_needs_no_library(folder, words, code, text):
    found = without(folder, *words)
    assert (found[0], text in found[1]) == (code, True), found


NEED_THEM = [
    ("check", *RUN),
    ("check", "llama-3.1-8b"),
    ("check", "own:model", "qwen3", "--allow-code"),
    ("lower", *RUN),
    ("why", *RUN, "model.norm"),
    ("diff", "model", "a.plan", "broken.plan"),
    ("diff", "model", "a.json", "broken.plan"),
    ("show", *RUN, "-o", "page.html"),
    ("estimate", *RUN, "--batch", "8", "--seq", "128"),
    ("suggest", "model", "--world-size", "4", "--batch", "8", "--seq", "128"),
    ("verify", *RUN),
    ("init", "model"),
    ("cache", "pack", "new.json"),
]


def test_apply_says_so_too(monkeypatch):
    monkeypatch.setattr(cache, "missing", lambda: ("torch",))
    with pytest.raises(PlanError, match=r"`planc\.apply` needs torch, .*`pip install planc`"):
        planc.apply(None)


@pytest.mark.parametrize("words", NEED_THEM, ids=lambda w: " ".join(w[:2]))
def test_what_needs_torch_says_so(folder, words):
    code, text, errors = without(folder, *words)
    assert code == 2
    said = text + errors
    assert "[PL760]" in said and "torch and transformers are not installed" in said
    assert "pip install planc" in said
    assert not (folder / "new.json").exists() and not (folder / "page.html").exists()


def test_what_needs_another_library_says_so(folder):
    (folder / "a.yaml").write_text("distributed_type: FSDP\n")
    code, _, errors = without(folder, "import", "a.yaml")
    assert code == 2 and "`planc import` needs yaml, which is not installed" in errors


def test_an_estimate_without_activations_does_not_say_that_it_fits(folder):
    without(folder, "cache", "unpack", "planc-pack.json")
    code, text, errors = without(folder, "estimate", *RUN, "--batch", 8, "--seq", 64)
    assert code == 2 and "unknown whether it fits" in text and "PL703" in errors


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_one_of_the_two_is_not_enough(folder, missing):
    code, text, _ = without(folder, "check", *RUN, missing=missing)
    assert code == 2 and f"{missing} is not installed" in text


def test_an_import_that_fails_inside_of_planc_is_a_bug(monkeypatch):
    from planc.commands import explain

    def run(_):
        raise ModuleNotFoundError("No module named 'planc.lost'", name="planc.lost")

    monkeypatch.setattr(explain, "run", run)
    assert "[PL900]" in call("explain", "PL001")[2]


# With a pack -------------------------------------------------------------------------------------


def test_a_proof_says_where_it_was_reached(unpacked):
    code, text, _ = without(unpacked, "check", *RUN)
    made = cache.environment()
    used = {name: cache.version(name) for name in cache.OTHERS}
    made |= {name: version for name, version in used.items() if version != "none"}
    where = f"torch {made['torch']}, transformers {made['transformers']} on the machine that packed"
    assert code == 0
    assert f"layout flow (proved with {where}, largest error" in text
    assert "structure of packed models" in text
    found = json.loads(without(unpacked, "check", *RUN, "--format", "json")[1])
    assert found["flow"]["verdict"] == "proved" and found["flow"]["made_with"] == made


def test_each_world_size_of_a_target_is_packed(unpacked):
    code, text, errors = without(unpacked, "check")
    assert (code, text.count("(proved")) == (0, 2), text + errors
    assert "2 of 2 targets are clean" in text
    code, text, _ = without(unpacked, "check", "--world-size", "6")  # that nobody has checked
    assert "(proved" not in text and "PL504" in text


def test_a_refuted_plan_is_refuted(unpacked):
    code, text, _ = without(unpacked, "check", "model", "broken.plan", *RUN[2:])
    assert code == 1 and "error[PL502]" in text and "q_norm" in text
    assert "layout flow (refuted with torch" in text


@pytest.mark.parametrize(
    "words",
    [
        ("lower", *RUN),
        ("why", *RUN, "model.norm"),
        ("diff", "model", "a.plan", "broken.plan", *RUN[2:]),
        ("show", *RUN, "-o", "page.html"),
    ],
    ids=lambda w: w[0],
)
def test_facts_are_enough_for_what_runs_nothing(unpacked, words):
    code, _, errors = without(unpacked, *words)
    assert code == (words[0] == "diff") and "[PL" not in errors


@pytest.mark.parametrize(
    "words",
    [("verify", *RUN), ("init", "model"), ("cache", "pack", "new.json")],
    ids=lambda w: w[0],
)
def test_what_runs_a_model_still_needs_torch(unpacked, words):
    code, text, errors = without(unpacked, *words)
    assert code == 2 and "[PL760]" in text + errors


def test_another_plan_is_unknown_and_another_model_unread(unpacked):
    """A verdict is found by what the machine itself computes, never by a name."""
    code, text, _ = without(unpacked, "check", *RUN, "--set", "sequence=false")
    assert code == 0 and "[PL504]" in text and "layout flow (unknown)" in text
    assert "the unpacked pack has no verdict on it" in " ".join(text.split())
    strict = ("--set", "sequence=false", "--strict")
    assert without(unpacked, "check", *RUN, *strict)[0] == 1
    (unpacked / "wide").mkdir()
    (unpacked / "wide" / "config.json").write_text(json.dumps({**QWEN3, "hidden_size": 128}))
    code, text, _ = without(unpacked, "check", "wide", *RUN[1:])
    assert code == 2 and "[PL760]" in text


def test_nothing_is_written_beside_the_pack(unpacked):
    """A verdict of another machine never becomes one of this machine, which `apply` would find."""
    before = sorted((unpacked / "other" / "pack").rglob("*"))
    without(unpacked, "check", *RUN)
    assert sorted((unpacked / "other" / "pack").rglob("*")) == before
    # ASTs depend on the text of a plan alone
    assert {p.name for p in (unpacked / "other").iterdir()} <= {"pack", "parsed"}


def test_a_full_install_reads_no_pack(unpacked, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(unpacked / "other"))
    key = cache.key_of(json.loads((unpacked / "model" / "config.json").read_text()))
    assert (unpacked / "other" / "pack" / f"{key}.json").is_file()
    assert cache.recall(key) is None and cache.made_with() == {} and cache.provenance() == ""
    assert "reads no pack" in call("cache", "unpack", unpacked / "planc-pack.json")[2]


def test_verdicts_for_apply_are_not_packed(packed):
    found = json.loads((packed / "planc-pack.json").read_text())
    kinds = {entry["kind"].split()[0] for entry in found["entries"].values()}
    assert kinds == {"dataflow", "facts", "flow"}
    assert any("verdict" in p.read_text() for p in (packed / "own").glob("*.json"))


def test_what_was_found_with_other_versions_is_not_packed(packed, monkeypatch, tmp_path):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(packed / "own"))
    assert pack.collect_pack().document["entries"]
    monkeypatch.setattr(pack, "source_digest", lambda: "0" * 64)
    kinds = {e["kind"].split()[0] for e in pack.collect_pack().document["entries"].values()}
    assert kinds == {"dataflow", "facts"}
    monkeypatch.setattr(cache, "version", lambda name: "9.9.9")
    assert not pack.collect_pack().document["entries"]
    code, _, errors = call("cache", "pack", tmp_path / "none.json")
    assert code == 2 and "[PL761]" in errors and not (tmp_path / "none.json").exists()


def test_an_entry_of_a_pack_names_no_build_of_torch(home):
    made_with = cache.environment() | {"torch": "2.13.0+cpu"}
    entries = {"k": {"kind": "facts 1", "sources": "", "data": 1}}
    document = {"made_with": made_with, "entries": entries, "certificates": {}}
    pack.install(pack.Pack(document=document))
    head = (cache.cache_folder() / cache.PACK / "k.json").read_text().partition("\n")[0]
    assert json.loads(head.partition(" ")[2])["torch"] == "2.13.0"


# A certificate -----------------------------------------------------------------------------------


def test_a_certificate_is_packed_too(packed, home):
    """As `planc verify` writes it, for the plan that was checked."""
    from planc.proof import verify
    from planc.simulate import certificate

    sink = Sink()
    compiled = compile_plan(str(packed / "model"), "qwen3", sink, world_size=4, settings=["tp=2"])
    case = verify._Case(
        facts=compiled.facts,
        lowered=compiled.lowered,
        compiled=compiled,
        processes=4,
        check_codes=(),
    )
    made = verify._certificate(case, "refuted", "the numbers differ")
    key = certificate.key_of(compiled.digest, certificate.identity(compiled.facts))
    certificate.keep(made, key)
    (home / "model").symlink_to(packed / "model")
    assert call("cache", "pack")[0] == 0
    assert "1 refuted" in without(home, "cache", "unpack")[1]
    code, text, _ = without(home, "check", *RUN)
    assert code == 1 and "[PL520]: the numbers differ" in text
    assert "Refuted on 4 processes: the numbers differ with torch" in text


# Damaged and foreign packs -----------------------------------------------------------------------


def changed(text, change):
    document = json.loads(text)
    change(document)
    return json.dumps(document)


def entry(document, kind):
    return next(e for e in document["entries"].values() if e["kind"].startswith(kind))


def set_of(kind, *path):
    *inner, last, value = path

    def change(document):
        at = entry(document, kind)
        for name in inner:
            at = at[name]
        at[last] = value

    return change


def renamed(document, key):
    entries = document["entries"]
    entries[key] = entries.pop(next(iter(entries)))


def tree(document):
    """Facts whose modules are few and whose places are 2**60."""
    modules = [["Linear", "linear", [], [], []]]
    modules += [["Block", "other", [], [], [[i, "a", None], [i, "b", None]]] for i in range(60)]
    entry(document, "facts")["data"] |= {"modules": modules, "root": 60, "ties": []}


DAMAGE = {
    "empty": lambda text: "",
    "half": lambda text: text[: len(text) // 2],
    "another file": lambda text: '{"model_type": "llama"}',
    "a list": lambda text: "[]",
    "null": lambda text: "null",
    "not UTF-8": lambda text: b"\xff\xfe\x00\x01",
    "deep": lambda text: "[" * 100_000,
    "nested": lambda text: changed(
        text, set_of("facts", "data", "config", "x", json.loads("[" * 70 + "]" * 70))
    ),
    "a long number": lambda text: text.replace('"root":', '"root": ' + "9" * 5000 + ', "x":'),
    "another format": lambda text: changed(text, lambda d: d.update(format_version=2)),
    "another field": lambda text: changed(text, lambda d: d.update(run="rm -rf")),
    "a path as a key": lambda text: changed(text, lambda d: renamed(d, "../../escaped")),
    "a path as a version": lambda text: changed(text, lambda d: d["made_with"].update(torch="a/b")),
    "no version": lambda text: changed(text, lambda d: d["made_with"].pop("torch")),
    "another kind": lambda text: changed(text, set_of("flow", "kind", "verdict 1 by processes")),
    "a proof without sources": lambda text: changed(text, set_of("flow", "sources", "")),
    "a wrong verdict": lambda text: changed(text, set_of("flow", "data", "verdict", "certain")),
    "a proof that is none": lambda text: changed(
        text, lambda d: entry(d, "flow")["data"].update(verdict="proved", gradient=0.5)
    ),
    "a proof without numbers": lambda text: changed(
        text, lambda d: entry(d, "flow")["data"].update(verdict="proved", logits=float("nan"))
    ),
    "a proof in words": lambda text: changed(text, set_of("flow", "data", "proved")),
    "a shape of text": lambda text: changed(
        text, set_of("facts", "data", "modules", 0, 2, [["weight", ["x"], "float32", True, ""]])
    ),
    "a child to come": lambda text: changed(
        text, set_of("facts", "data", "modules", 0, 4, [[10_000, "x", None]])
    ),
    "no root": lambda text: changed(text, set_of("facts", "data", "root", 10_000)),
    "a lost tie": lambda text: changed(text, set_of("facts", "data", "ties", [["a.b", "c.d"]])),
    "an endless tree": lambda text: changed(text, tree),
    "an escape": lambda text: changed(text, set_of("facts", "data", "name", "\x1b[2J")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_pack_is_refused_as_a_whole(unpacked, damage, monkeypatch):
    text = (unpacked / "planc-pack.json").read_text()
    before = {p: p.read_bytes() for p in (unpacked / "other").rglob("*.json")}
    new = damage(text)
    (unpacked / "bad.json").write_bytes(new if isinstance(new, bytes) else new.encode())
    monkeypatch.setenv("PLANC_CACHE_DIR", str(unpacked / "other"))
    code, _, errors = call("cache", "unpack", unpacked / "bad.json")
    assert code == 2 and "error[PL761]" in errors
    assert {p: p.read_bytes() for p in (unpacked / "other").rglob("*.json")} == before
    assert call("cache", "show", unpacked / "bad.json")[0] == 2


def test_a_pack_is_bounded(unpacked, monkeypatch):
    monkeypatch.setattr(pack, "MOST_BYTES", 100)
    code, _, errors = call("cache", "unpack", unpacked / "planc-pack.json")
    assert code == 2 and "it is larger than 100 bytes" in errors


def test_a_missing_pack(home):
    code, _, errors = call("cache", "unpack", "lost.json")
    assert code == 2 and "cannot read lost.json: no such file" in errors


def test_a_cache_that_cannot_be_written(folder, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", "/proc/planc")
    code, _, errors = call("cache", "unpack", folder / "planc-pack.json")
    assert code == 2 and "[PL020]" in errors
    assert call("cache", "pack", folder / "new.json")[0] == 2


def test_verdicts_of_another_planc_are_left_out(folder):
    """Facts are read: they do not depend on planc's sources."""

    def change(document):
        document["sources"] = "0" * 64
        for one in document["entries"].values():
            one["sources"] = one["sources"] and "0" * 64

    (folder / "old.json").write_text(changed((folder / "planc-pack.json").read_text(), change))
    code, text, errors = without(folder, "cache", "unpack", "old.json")
    assert code == 0 and "[PL762]" in errors and "runs: none" in text
    code, text, _ = without(folder, "check", *RUN)
    assert code == 0 and "[PL504]" in text


def test_an_entry_under_another_key_is_never_found(folder):
    """A verdict on one plan does not become one on another by being moved."""

    def change(document):
        for number, key in enumerate(list(document["entries"])):
            if document["entries"][key]["kind"].startswith("flow"):
                document["entries"][f"{number:064x}"] = document["entries"].pop(key)

    (folder / "moved.json").write_text(changed((folder / "planc-pack.json").read_text(), change))
    assert without(folder, "cache", "unpack", "moved.json")[0] == 0
    assert "layout flow (unknown)" in without(folder, "check", *RUN)[1]


def test_an_entry_damaged_after_unpacking_is_missing(unpacked):
    for path in (unpacked / "other" / "pack").glob("*.json"):
        if path.name != cache.MADE_WITH:
            path.write_text(path.read_text().replace("proved", "proven"))
    assert "layout flow (unknown)" in without(unpacked, "check", *RUN)[1]
    (unpacked / "other" / "pack" / cache.MADE_WITH).write_text("{")
    # torch is here and only its import is not: the keys have its versions without the pack's
    assert "(proved" not in without(unpacked, "check", *RUN)[1]


def test_the_same_cache_gives_the_same_pack(packed, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(packed / "own"))
    written = pack.dumps(pack.collect_pack())
    assert written == (packed / "planc-pack.json").read_text()
    sink = Sink()
    read = pack.read(str(packed / "planc-pack.json"), sink)
    assert not list(sink) and pack.dumps(read) == written
    assert load(str(packed / "model"), sink) is not None
