"""What a terminal shows: colors, widths, progress; and that a pipe gets the plain text."""

import argparse
import ast
import importlib
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

import pytest
from console import call
from folders import ROOT
from hypothesis import given
from hypothesis import strategies as st

from planc.cli import COMMANDS, _options
from planc.commands import help_text, output
from planc.commands.terminal import fold_line
from planc.model.config import shipped_models

RUN = ("llama-3.1-8b", "llama", "--world-size", "64")
DIFF = ("diff", *RUN, "--old-set", "tp=4", "--new-set", "tp=8")
ANSI = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")
VARIABLES = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES")


def environment(**more):
    kept = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    return {**kept, "TERM": "xterm-256color", **more}


def on_terminal(*words, columns=80, program=("-m", "planc"), **more):
    """What a program of Python shows on a terminal of some width, as lines."""
    child, terminal = pty.fork()
    if child == 0:
        time.sleep(0.1)  # until the size is set
        arguments = [sys.executable, *program, *map(str, words)]
        os.execve(sys.executable, arguments, environment(**more))
    try:
        ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        shown, end = b"", time.monotonic() + 300
        while (
            time.monotonic() < end and select.select([terminal], [], [], end - time.monotonic())[0]
        ):
            try:
                read = os.read(terminal, 65536)
            except OSError:  # the program has ended
                break
            if not read:
                break
            shown += read
    finally:
        os.close(terminal)
        os.kill(child, signal.SIGKILL) if os.waitpid(child, os.WNOHANG) == (0, 0) else None
    return shown.decode().replace("\r\n", "\n")


def piped(*words, **more):
    done = subprocess.run(
        [sys.executable, "-m", "planc", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(**more),
    )
    assert done.stderr == "", done.stderr
    return done.stdout


def after_progress(shown):
    """The text without what a spinner drew and erased, for a machine that is slow."""
    return shown.rpartition("\x1b[2K")[2]


# Colors ------------------------------------------------------------------------------------------


def test_a_diff_is_colored_as_terraform_does():
    shown = after_progress(on_terminal(*DIFF, columns=120))
    assert "\x1b[33m  ~ lm_head\x1b[0m" in shown
    shown = after_progress(on_terminal("diff", *RUN, "--new-set", "recompute=false"))
    assert "\x1b[31m  - checkpoint model.layers[0:32]\x1b[0m" in shown
    shown = after_progress(on_terminal("diff", *RUN, "--old-set", "recompute=false"))
    assert "\x1b[32m  + checkpoint model.layers[0:32]\x1b[0m" in shown


@pytest.mark.parametrize(
    ("words", "colored"),
    [
        (("lower", *RUN, "--set", "tp=8"), "\x1b[1mtensor\x1b[0m      on tp = 8"),
        (("why", *RUN, "--set", "tp=8", "lm_head.weight"), "\x1b[1mlm_head.weight\x1b[0m  a "),
    ],
)
def test_colors_and_pipes(words, colored):
    plain = piped(*words)
    assert "\x1b" not in plain and plain == call(*words)[1]
    wide = after_progress(on_terminal(*words, columns=400))
    assert colored in wide
    assert re.search(r"\x1b\[36m\[\d[\d, ]+\]\x1b\[0m", wide), "shapes have a color"
    assert not re.search(r"\w\x1b\[36m\[", wide), "an index is no shape"
    assert ANSI.sub("", wide) == plain  # wide enough: nothing but colors is added
    assert piped(*words, FORCE_COLOR="1").replace(wide, "") == ""
    assert after_progress(on_terminal(*words, columns=400, NO_COLOR="1")) == plain


def test_a_file_gets_the_plain_text(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    call("lower", *RUN, "-o", tmp_path / "a.txt")
    assert "\x1b" in call("lower", *RUN)[1]
    monkeypatch.delenv("FORCE_COLOR")
    assert (tmp_path / "a.txt").read_text() == call("lower", *RUN)[1]


# Widths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [70, 80])
@pytest.mark.parametrize(
    "words",
    [
        ("lower", *RUN, "--set", "tp=8"),
        DIFF,
        ("why", *RUN, "--set", "tp=8", "model.layers.0.mlp"),
        ("check", *RUN, "--set", "tp=8", "--level", "structure"),
        ("estimate", *RUN, "--set", "tp=8", "--batch", "64", "--seq", "4096"),
    ],
    ids=lambda words: words[0],
)
def test_nothing_is_wider_than_the_terminal(words, columns):
    shown = ANSI.sub("", after_progress(on_terminal(*words, columns=columns)))
    plain = call(*words)[1]
    assert shown.split() == plain.split(), "a word is torn, or lost"
    assert max(map(len, shown.splitlines())) <= columns
    assert max(map(len, plain.splitlines())) > columns or words[0] == "why"
    for shape in re.findall(r"\[[\d, ]+\]", plain):
        assert shape in shown, "a shape folds as a whole"


def test_findings_fit_a_narrow_terminal():
    shown = ANSI.sub("", on_terminal("check", *RUN, "--set", "tp=3", columns=40))
    assert "PL303" in shown and max(map(len, after_progress(shown).splitlines())) <= 40


def goldens():
    pages = (*ROOT.glob("tests/specs/*.md"), *ROOT.glob("tests/sections/*/*.md"))
    found = [*ROOT.glob("tests/goldens/*.txt"), *pages]
    return sorted({line for f in found for line in f.read_text().splitlines() if len(line) > 60})


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_folding_tears_no_word(width):
    for line in goldens():
        rows = fold_line(line, width)
        assert " ".join(rows).split() == line.split()
        for row in rows:
            assert len(row) <= width or len(max(row.split(), key=len)) > width - len(line) // 2 - 8
            assert row == row.rstrip()
    assert fold_line("a  b", width) == ["a  b"]


def test_a_name_stays_with_its_sizes_and_an_equation_is_whole():
    sizes = "down_proj:    56.0 MiB at rest, [2, 1024, 14336] bf16; 224.0 MiB gathered"
    assert fold_line(f"per rank    {sizes}", 70)[0].startswith("per rank    down_proj: 56.0 MiB")
    assert (
        fold_line("tensor      in mlp: output, local, dtensor, on tp = 2", 50)[1].strip()
        == "tp = 2"
    )


@given(st.text("ab[(]) ,.->x1", max_size=120), st.integers(20, 60))
def test_folding_keeps_every_word(text, width):
    line = text.strip()
    assert " ".join(fold_line(line, width)).split() == line.split()


# Progress ----------------------------------------------------------------------------------------

WAIT = """
import sys, time
from planc.commands.output import waiting
before, after = map(float, sys.argv[1:])
with waiting("reading [a] model") as progress:
    time.sleep(before)
    progress(3, 9)
    time.sleep(after)
print("done")
"""


def test_a_long_wait_shows_progress_on_a_terminal_alone():
    """The bar is there after a second, with what is done by then or what is done later."""
    assert "reading [a] model: 3 of 9" in on_terminal(0, 1.5, program=("-c", WAIT))
    assert "reading [a] model: 3 of 9" in on_terminal(1.5, 0.3, program=("-c", WAIT))
    assert "reading" not in on_terminal(0.1, 0, program=("-c", WAIT))
    words = [sys.executable, "-c", WAIT, "0", "1.5"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment())
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_every_wait_is_announced(monkeypatch, tmp_path):
    """What reads a model or runs one does it inside `waiting`."""
    said = []

    class Waiting:
        def __init__(self, text):
            said.append(text)

        def __enter__(self):
            return None

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(output, "waiting", Waiting)
    monkeypatch.setattr("planc.proof.verify.verify", _never)
    monkeypatch.setattr("planc.commands.init.draft_text", _never)
    monkeypatch.setattr("planc.commands.suggest.suggest", lambda *_: None)
    step = ("--batch", "64", "--seq", "2048")
    for words in (
        ("check", *RUN, "--level", "structure"),
        ("lower", *RUN),
        ("why", *RUN, "lm_head"),
        ("estimate", *RUN, *step),
        ("diff", *RUN),
        ("init", "llama-3.1-8b"),
        ("suggest", "llama-3.1-8b", "--no-run", "--world-size", "64", *step),
    ):
        said.clear()
        call(*words)
        assert any("llama-3.1-8b" in text for text in said), words
    said.clear()
    call("verify", *RUN)
    assert said == ["training a proxy model on 4 processes"]


def _never(*_, **__):
    raise KeyboardInterrupt


# Help and mistakes -------------------------------------------------------------------------------


def test_planc_alone_prints_help():
    code, out, err = call()
    assert out == "" or out.startswith("usage: planc")
    assert call("--help")[1] == out and err == ""
    assert all(f"    {name}" in out for name in COMMANDS) and code in (0, None)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_parse(command):
    code, out, _ = call(command, "--help")
    page, *examples = help_text.EXAMPLES[command]
    assert code == 0 and f"read on: docs/{page}" in out
    assert (ROOT / "docs" / page).is_file() and examples
    assert f"exit code: {help_text.EXITS.get(command, '0 done, 1')}" in out
    parser = argparse.ArgumentParser(exit_on_error=False)
    help_text.fill(parser, command)
    for example in examples:
        assert f"\n  planc {command} {example}".rstrip() in out
        _options([command, *example.partition(" > ")[0].split()])
    for action in parser._actions:
        assert action.help, f"{action.dest} of {command} has no help"
        shown = action.default not in (None, False, [], argparse.SUPPRESS)
        assert (
            not shown
            or f"default: {action.default}" in " ".join(out.split())
            or "default" in action.help
        )


def test_a_misspelled_command():
    code, out, err = call("chek", "llama")
    assert (code, out) == (2, "")
    assert err == "planc: error: there is no command `chek`; did you mean `check` or `cache`?\n"
    assert "`planc --help` lists" in call("zzzzz")[2]
    code, _, err = call("check", "--wrold-size", "8", "llama-3.1-8b", "llama")
    assert code == 2 and err.startswith("usage: planc check")
    assert err.endswith("there is no option `--wrold-size`; did you mean `--world-size`?\n")


@pytest.mark.parametrize("command", ["check", "lower", "estimate", "diff", "verify", "why"])
def test_a_plan_in_the_place_of_the_model(command):
    more = {"estimate": ("--batch", "8", "--seq", "8"), "why": ("lm_head",)}.get(command, ())
    code, out, err = call(command, "llama", "llama-3.1-8b", *more)
    told = " ".join((out + err).split())
    assert code == 2 and "MODEL comes before PLAN" in told
    assert "write llama-3.1-8b llama" in told


def test_a_plan_file_in_the_place_of_the_model():
    mine = "docs/demo/mine.plan"
    for words in (("check", mine, "llama-3.1-8b"), ("diff", mine, "llama", "llama-3.1-8b")):
        told = " ".join("".join(call(*words)[1:]).split())
        assert f"write llama-3.1-8b {mine}" in told
    for words in (("check", mine), ("check", mine, mine), ("init", "llama")):
        code, out, err = call(*words)
        assert code == 2 and f"{words[1]} is a plan, not a model" in out + err


def test_a_hub_model_that_is_not_here():
    code, out, _ = call("check", "some-one/some-model", "llama")
    assert code == 2 and "PL600" in out
    assert "hf download some-one/some-model config.json" in " ".join(out.split())
    told = " ".join(call("check", "meta-llama/Llama-3.1-8B")[1].split())
    assert "did you mean `llama-3.1-8b`?" in told and "hf download meta-llama/Llama-3.1-8B" in told
    assert "hf download" not in call("check", "some-one/../a b;ls", "llama")[1]


# Completion --------------------------------------------------------------------------------------


def completed(script, *words):
    """What bash offers for the last word."""
    code = (
        'source "$1"; shift; COMP_WORDS=(planc "$@"); COMP_CWORD=$#; _planc; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", code, "bash", script, *words], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes(tmp_path):
    script = tmp_path / "planc.bash"
    script.write_text(call("completion", "bash")[1])
    assert completed(script, "che") == {"check"}
    assert completed(script, "") == set(COMMANDS)
    assert completed(script, "check", "--w") == {"--world-size", "--watch"}
    assert completed(script, "check", "--format", "") >= {"full", "sarif"}
    assert completed(script, "check", "--format", "s") == {"sarif"}
    assert completed(script, "check", "llama-3.1-8") == {"llama-3.1-8b"}
    assert completed(script, "check", "llama-3.1-8b", "qwen3_m") == {"qwen3_moe"}
    assert completed(script, "diff", "--new-model", "") == set(shipped_models())
    assert completed(script, "explain", "PL60") >= {"PL600", "PL601"}
    assert completed(script, "check", "--world-size", "") == set()  # then bash offers files
    assert completed(script, "list", "") == {"plans", "models", "settings"}


def test_zsh_and_fish(tmp_path):
    zsh, fish = call("completion", "zsh")[1], call("completion", "fish")[1]
    assert "bashcompinit" in zsh and call("completion", "bash")[1].partition("_planc()")[2] in zsh
    for command in COMMANDS:
        assert f"-a {command} -d " in fish
    assert "-l world-size -r -d 'the number of ranks'" in fish
    assert "-a 'full concise json github sarif'" in fish
    for shell, text in (("zsh", zsh), ("fish", fish)):
        if shutil.which(shell):
            (tmp_path / shell).write_text(text)
            subprocess.run([shell, "-n", tmp_path / shell], check=True)
    if shutil.which("fish"):  # a format is one of these, and no file
        asked = f"source {tmp_path / 'fish'}; complete -C 'planc lower --format '"
        found = subprocess.run(["fish", "-c", asked], capture_output=True, text=True, check=True)
        words = {line.partition("\t")[0] for line in found.stdout.splitlines()}
        assert words == {"text", "json", "python", "tp-plan"}
    assert call("completion", "tcsh")[0] == 2


def test_every_command_that_prints_a_plan_uses_the_terminal():
    """A command that prints what `render` makes would tear its words."""
    for name in ("lower", "diff", "why"):
        module = importlib.import_module(f"planc.commands.{name}")
        calls = [ast.unparse(n) for n in ast.walk(ast.parse(Path(module.__file__).read_text()))]
        assert any(c.startswith("terminal.show(") for c in calls)
