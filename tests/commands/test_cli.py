"""The command line, as a user meets it: exit codes, streams, formats, and bad input."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from console import call
from folders import ROOT

import planc
from planc.ops.document import digest

GOOD = ["llama-3.1-8b", "llama", "--world-size", "64", "--set", "tp=8"]
PLANS = ROOT / "plans"


def test_check_says_what_it_did_not_check(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))  # no certificate of another test
    assert "not checked: mixed precision, real processes" in call("check", *GOOD)[1]


def test_a_diff_of_two_settings_reads_standard_input_once():
    text = (PLANS / "llama.plan").read_text()
    words = ("--world-size", "64", "--old-set", "tp=4", "--new-set", "tp=8")
    code, out, err = call("diff", "llama-3.1-8b", "-", *words, stdin=text)
    assert (code, err) == (1, "") and "tp" in out


@pytest.mark.parametrize("format", ["full", "concise", "json", "github", "sarif"])
def test_formats(format):
    code, out, err = call(
        "check", "llama-3.1-8b", "llama", "--world-size", "3", "--set", "tp=2", "--format", format
    )
    assert code == 1 and err == "" and "PL303" in out
    if format == "json":
        assert json.loads(out)["diagnostics"][0]["code"] == "PL303"
    if format == "github":
        assert out.startswith("::error ")
    if format == "sarif":
        assert json.loads(out)["runs"][0]["results"][0]["ruleId"] == "PL303"


def test_lower_is_text_json_and_python(golden):
    for format, suffix in (("text", "txt"), ("json", "json"), ("python", "py")):
        code, out, err = call("lower", *GOOD, "--format", format)
        assert code == 0 and err == ""
        assert call("lower", *GOOD, "--format", format)[1] == out  # the same bytes
        golden(f"llama-3.1-8b.tp8.{suffix}", out)


def test_output_to_a_file_is_whole_or_nothing(tmp_path):
    file = tmp_path / "lowered.json"
    assert call("lower", *GOOD, "--format", "json", "-o", file)[:2] == (0, "")
    whole = file.read_text()
    assert json.loads(whole)["format_version"] == 2
    assert call("lower", "llama-3.1-8b", "llama", "--set", "tp=0", "-o", file)[0] == 1
    assert file.read_text() == whole  # an error leaves the file as it was
    assert call("lower", *GOOD, "-o", tmp_path / "no" / "folder")[0] == 2
    assert list(tmp_path.iterdir()) == [file]


def test_diff_of_git_revisions(tmp_path, monkeypatch):
    def git(*words):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        subprocess.run(["git", *identity, *words], check=True, capture_output=True, cwd=tmp_path)

    monkeypatch.chdir(tmp_path)
    plan = tmp_path / "p.plan"
    plan.write_text('plan p for llama\nextend "base.plan"\n')
    (tmp_path / "base.plan").write_text((PLANS / "llama.plan").read_text())
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    (tmp_path / "base.plan").write_text(
        "# moved by a comment\n" + (PLANS / "llama.plan").read_text()
    )
    assert call("diff", "llama-3.1-8b", "HEAD:p.plan", "p.plan")[:2] == (0, "No changes.\n")
    plan.write_text('plan p for llama\nextend "base.plan"\noverride option recompute = false\n')
    code, out, _ = call("diff", "llama-3.1-8b", "HEAD:p.plan", "p.plan")
    assert code == 1 and "checkpoint" in out and "1 to remove" in out


def test_a_shipped_plan_is_extended_at_a_revision_too(tmp_path, monkeypatch):
    """What git has at the revision is taken; where it has nothing, the plan that ships."""

    def git(*words):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        subprocess.run(["git", *identity, *words], check=True, capture_output=True, cwd=tmp_path)

    monkeypatch.chdir(tmp_path)
    Path("p.plan").write_text('plan p for llama\nextend "llama.plan"\n')
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    run = ["--world-size", "8", "--level", "structure"]
    assert call("check", "llama-3.1-8b", "HEAD:p.plan", *run)[0] == 0
    Path("llama.plan").write_text("plan mine for llama\nmesh {\n    slip = auto\n}\n")
    assert call("check", "llama-3.1-8b", "HEAD:p.plan", *run)[0] == 0, "not at that revision"
    git("add", ".")
    git("commit", "-qm", "two")
    code, out, _ = call("check", "llama-3.1-8b", "HEAD:p.plan", *run)
    assert code == 1 and "HEAD:llama.plan:3" in out
    assert call("lower", "llama-3.1-8b", "HEAD~1:p.plan", "--world-size", "8")[0] == 0
    assert call("check", "llama-3.1-8b", "HEAD~9:p.plan", *run)[0] == 2


# Bad input: a diagnostic and exit code 1 or 2, never a traceback ---------------------------------

PLAN_TEXTS = {
    "empty": b"",
    "spaces": b"\n \n\t\n# nothing\n",
    "binary": bytes(range(256)) * 8,
    "braces": b"{" * 10_000_000,
    "brackets": b"(" * 10_000,
    "nested": b"plan p for llama\nmesh { a = " + b"(" * 500 + b"1" + b")" * 500 + b" }\n",
    "nots": b"plan p for llama\nrequire " + b"not " * 3_000 + b'true ""\n',
    "string": b'plan p for llama\nextend "base\n',
    "utf16": "plan p for llama\n".encode("utf-16"),
    "five": b"plan p fro llama\nmesh {\n tp = = 1\n}\n"
    b"tensor onn tp {\n a colwise\n}\nfsdp on {\n}\n",
    "long extend": b'plan p for llama\nextend "' + b"x" * 300 + b'"\n',
    "header bracket": b"plan p{ for llama\nmesh {\n tp = 1\n}\n",
    "huge number": b"plan p for llama\nmesh {\n tp = " + b"9" * 5_000 + b"\n}\n",
}


@pytest.mark.parametrize("name", PLAN_TEXTS)
def test_a_plan_that_is_none(tmp_path, name):
    plan = tmp_path / "p.plan"
    plan.write_bytes(PLAN_TEXTS[name])
    code, out, err = call("check", "llama-3.1-8b", plan)
    assert code in (1, 2) and "error[PL0" in out, out[:500]
    assert "Traceback" not in out + err and "PL900" not in out + err
    if name == "five":
        assert out.count("error[") == 5


def test_an_index_of_thousands_of_digits_is_in_no_list(tmp_path):
    plan = tmp_path / "p.plan"
    for pick in ("9" * 5_000, "-" + "9" * 5_000, "0:" + "9" * 5_000):
        rule = f"fsdp on dp {{\n model.layers[{pick}] : unit\n}}\n"
        plan.write_text(f"plan p for llama\nmesh {{\n dp = 2\n}}\n{rule}")
        code, out, _ = call("check", "llama-3.1-8b", plan, "--level", "structure")
        assert code == 1 and "error[PL101]" in out


MODEL_TEXTS = {
    "not json": "{",
    "empty": "",
    "a list": "[]",
    "no type": "{}",
    "null type": '{"model_type": null}',
    "unknown": '{"model_type": "lama"}',
    "heads": '{"model_type": "llama", "num_attention_heads": "32"}',
    "true": '{"model_type": "llama", "num_attention_heads": true}',
    "zero": '{"model_type": "llama", "hidden_size": 0}',
    "null": '{"model_type": "llama", "hidden_size": null}',
    "contradiction": '{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7}',
    "deep": "[" * 100_000,
    "own code": '{"model_type": "mine", "auto_map": {"AutoModel": "modeling.Mine"}}',
}


@pytest.mark.parametrize("name", MODEL_TEXTS)
def test_a_model_that_is_none(tmp_path, name):
    (tmp_path / "config.json").write_text(MODEL_TEXTS[name])
    code, out, err = call("check", tmp_path, "llama")
    assert code == 2 and "error[PL6" in out, out[:500]
    assert "Traceback" not in out + err


def test_files_that_cannot_be_read(tmp_path):
    for plan in (tmp_path, tmp_path / "no.plan", "/dev/null"):
        assert call("check", "llama-3.1-8b", plan)[0] in (1, 2)
    closed = tmp_path / "closed.plan"
    closed.write_text("plan p for llama\n")
    closed.chmod(0)
    if not os.access(closed, os.R_OK):  # root reads everything
        assert call("check", "llama-3.1-8b", closed)[0] == 2


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format_version": 1}', '{"format_version": 2}', "{" * 9]
)
def test_a_lowered_plan_that_is_none(tmp_path, text):
    file = tmp_path / "p.json"
    file.write_text(text)
    code, _, err = call("diff", "llama-3.1-8b", file, "llama")
    assert code == 2 and "PL007" in err


def test_a_failure_of_planc_itself_is_told_apart(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("boom")

    monkeypatch.setattr("planc.answers.target.compile_plan", broken)
    code, out, err = call("check", *GOOD)
    assert code == 2 and out == "" and "PL900" in err and "boom" in err


def test_a_real_process():
    """Installed as a command: output to a pipe that closes early is no error."""
    command = [sys.executable, "-m", "planc.cli", "lower", *GOOD, "--format", "json"]
    done = subprocess.run(
        f"{' '.join(command)} | head -1", shell=True, capture_output=True, text=True, check=False
    )
    assert done.stdout == "{\n" and done.stderr == ""


def test_a_warm_check_imports_no_torch(tmp_path):
    """The promise of a fast check: from the cache, nothing heavy is imported."""
    call("check", *GOOD)  # fills the cache
    code = "import sys; from planc.cli import main; code = main(sys.argv[1:]); "
    code += "print(code, [m for m in ('torch', 'transformers', 'jsonschema') if m in sys.modules])"
    words = [sys.executable, "-c", code, "check", *GOOD, "--format", "concise"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def modules_after(*words):
    """What a process of its own printed, and the modules that the command had imported."""
    code = (
        "import json, sys\nfrom planc.cli import main\ntry: main(sys.argv[1:])\n"
        "except SystemExit: pass\nprint(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=True
    )
    *printed, modules = done.stdout.splitlines()
    return printed, set(json.loads(modules))


def test_help_imports_no_command():
    printed, modules = modules_after("--help")
    assert printed[0].startswith("usage: planc")
    ours = {m for m in modules if m.startswith("planc")}
    assert ours == {"planc", "planc.cli", "planc.files", "planc.files.version"}
    assert not modules & {"dataclasses", "asyncio", "lark", "jsonschema", "torch", "transformers"}


def test_fmt_imports_no_stage_behind_the_syntax(tmp_path):
    plan = tmp_path / "a.plan"
    plan.write_bytes((PLANS / "qwen3.plan").read_bytes())
    printed, modules = modules_after("fmt", "--check", plan)
    assert printed == []
    stages = {m.split(".")[1] for m in modules if m.startswith("planc.")}
    assert stages == {
        "cli",
        "commands",
        "diagnostics",
        "files",
        "syntax",
    }


def test_a_warm_check_imports_no_parser(tmp_path):
    plan = tmp_path / "a.plan"
    plan.write_bytes((PLANS / "llama.plan").read_bytes())
    words = "check", "llama-3.1-8b", plan, "--world-size", "8"
    first, again = modules_after(*words), modules_after(*words)
    assert first[0] == again[0]
    assert "lark" in first[1]
    parsers = {"lark", "pickle", "jsonschema"}
    slow = {"asyncio", "importlib.metadata", "subprocess", "tempfile", "unittest"}
    assert not again[1] & {*parsers, *slow, "torch", "transformers"}


def test_what_python_passes_is_what_the_command_line_takes(tmp_path, monkeypatch):
    """Paths, one override as a text, a mapping of values; and the plan of the family."""
    monkeypatch.chdir(tmp_path)
    plan = tmp_path / "own.plan"
    plan.write_text((PLANS / "llama.plan").read_text())
    words = ["tp=4", "sequence=false"]
    want = planc.lower("llama-3.1-8b", "llama", world_size=8, overrides=words)
    as_mapping = {"tp": 4, "sequence": False}
    model = PLANS / "models" / "llama-3.1-8b.json"
    for given in (words, tuple(words), as_mapping):
        found = planc.lower(model, plan, world_size=8, overrides=given)
        assert digest(found) == digest(want)
    assert digest(planc.lower(model, world_size=8, overrides=as_mapping)) == digest(want)
    one = planc.lower(model, world_size=8, overrides="tp=4")
    assert one.axis_size("tp") == 4 and digest(one) != digest(want)
    (tmp_path / "pyproject.toml").write_text("[tool.planc]\nplans = ['.']\n")
    unit = "fsdp on dp_shard {\n root : unit\n}\n"
    plan.write_text(f"plan own for llama\nmesh {{\n dp_shard = auto\n}}\n{unit}")
    assert planc.lower(model, world_size=8).plan == "own"


def test_python_runs_the_package_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "planc", "fmt", "--check", str(PLANS / "qwen3.plan")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    failed = subprocess.run(
        [sys.executable, "-m", "planc", "explain", "PL000"], capture_output=True, check=False
    )
    assert failed.returncode == 2 and b"no code PL000" in failed.stderr


def test_folders_of_plans(tmp_path, monkeypatch):
    """One that is not there is a mistake, for a shipped plan would be taken in its place."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "old.plan").mkdir(parents=True)
    (tmp_path / "own" / "house.plan").write_text("plan house for llama\n")
    monkeypatch.setenv("PLANC_PATH", "own")
    code, text, _ = call("list", "plans")
    assert code == 0 and text.startswith("own/house.plan") and "old.plan" not in text
    for missing in ("nowhere", "own/house.plan"):
        monkeypatch.setenv("PLANC_PATH", os.pathsep.join(["own", missing]))
        code, text, _ = call("check", "llama-3.1-8b", "--level", "structure")
        assert code == 2 and text.startswith(f"error[PL021]: PLANC_PATH: {missing} is not a folder")
    monkeypatch.delenv("PLANC_PATH")
    (tmp_path / "pyproject.toml").write_bytes(b"[tool.planc] # \xff")
    code, _, errors = call("list", "plans")
    assert code == 2 and "pyproject.toml is not UTF-8 text" in errors
    (tmp_path / "pyproject.toml").write_text("tool = 3  # planc\n")
    assert call("list", "plans")[0] == 0


class _Ended(KeyboardInterrupt):
    pass


def test_watching_goes_on_after_a_state_that_cannot_be_read(tmp_path, monkeypatch, capsys):
    """A mistake, a plan that is gone, a base that comes later: each change is noticed."""
    from planc.commands import watch

    monkeypatch.chdir(tmp_path)
    good, plan = 'plan w for llama\nextend "llama"\n', tmp_path / "w.plan"
    base = good.replace('"llama"', '"base.plan"')
    steps = [
        lambda: plan.write_text("plan w for llama\ntensor on {"),
        plan.unlink,
        lambda: plan.write_text(good),
        lambda: plan.write_text(base),
        lambda: (tmp_path / "base.plan").write_text(good),
    ]
    clock = iter(range(1, 1_000_000))

    def next_step(_):
        if not steps:
            raise _Ended
        steps.pop(0)()
        for path in tmp_path.glob("*.plan"):  # changes within one tick of the clock
            os.utime(path, (next(clock), next(clock)))

    monkeypatch.setattr(watch.time, "sleep", next_step)
    plan.write_text("plan w for llama\nmesh {")
    words = ["w.plan", "--world-size", "8", "--level", "structure", "--format", "concise"]
    code, text, _ = call("check", "llama-3.1-8b", *words, "--watch")
    assert code == 0
    rounds = text.split("waiting for a change (Ctrl-C ends)")[:-1]
    codes = [re.findall(r"error\[(PL\d+)\]", each) for each in rounds]
    assert codes == [["PL004"], ["PL004", "PL001"], ["PL006"], [], ["PL006"], []], text


def test_positional_arguments_after_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--world-size", 8, "--level", "structure")
    code, text, _ = call("check", "llama-3.1-8b", *words, "llama")
    assert code == 0 and "llama for LlamaForCausalLM" in text
    code, text, errors = call("check", "llama-3.1-8b", "", *words)
    assert code == 2 and "the name of the plan is empty" in text
    code, _, errors = call("lower", "llama-3.1-8b", "llama", "--world-size", 8, "more")
    assert code == 2 and "unrecognized arguments: more" in errors and "usage: planc lower" in errors
    assert call("diff", "llama-3.1-8b", "llama", "--world-size", 8, "llama")[0] == 0


def test_a_base_of_two_plans_is_corrected_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = 'plan base for llama\nextend "llama"\noverride checkpoint { model.layers.* : ful }\n'
    (tmp_path / "base.plan").write_text(base)
    for name in "ab":
        (tmp_path / f"{name}.plan").write_text(f'plan {name} for llama\nextend "base.plan"\n')
    words = ("--world-size", 8, "--level", "structure", "--fix")
    _, _, errors = call("check", "llama-3.1-8b", "a.plan", "b.plan", *words)
    assert errors == "corrected base.plan:3: ful -> full\n"
    assert (tmp_path / "base.plan").read_text() == base.replace("ful }", "full }")


def test_targets_take_the_options_of_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = Path(PLANS / "models" / "llama-3.1-8b.json").read_text()
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(shape)
    target = '[[tool.planc.targets]]\nmodel = "{}/config.json"\nworld-size = 8\n'
    (tmp_path / "pyproject.toml").write_text(
        '[tool.planc]\nlowered = "low"\n' + "".join(map(target.format, ("small", "large")))
    )
    assert call("lower", "--save")[0] == 0
    assert len([*(tmp_path / "low").iterdir()]) == 2
    assert call("lower", "--check")[0] == 0
    code, text, _ = call("check", "--level", "structure", "--world-size", 7, "--set", "tp=2")
    assert code == 1 and text.count("error[PL303]") == 2
    code, _, errors = call("lower", "--save", "--world-size", 16)
    assert code == 2 and "take no model and no other options" in errors
