"""What `planc launch` writes, run with programs that stand for each engine's: the script gets its
words as they were given, and preflight comes first.
"""

import ast
import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from console import call

WORDS = ["two words", "it's", '"x" $HOME', "a\nrm -rf b # c", "\U0001f642", "*", ""]
RECORDS = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["SEEN"], "a") as file:
    print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=file)
"""
LAST_WORDS = """#!/bin/bash
while [ "$1" != bash ]; do shift; done
exec "$@"
"""
PROGRAMS = {
    "planc": RECORDS,
    "python": RECORDS,
    "torchrun": LAST_WORDS,
    "srun": LAST_WORDS,
    "scontrol": "#!/bin/bash\necho node0\n",
}


def written(folder, target, *words, sets=()):
    file = folder / "job"
    most = ["llama-3.1-8b", "llama", "--world-size", "8", "--to", target, *sets]
    made = call("launch", *most, "--gpus-per-node", "H100:8", "-o", file, "--", *words)
    assert made == (0, "", "")
    return file.read_text()


def command(target, text):
    """What one node runs, in bash."""
    if target == "kubeflow":
        return yaml.safe_load(text)["spec"]["trainer"]["args"][0]
    if target == "skypilot":
        return yaml.safe_load(text)["run"]
    if target == "ray":
        [line] = re.findall(r"^COMMAND = (.*)$", text, re.M)
        return ast.literal_eval(line)
    return text


@pytest.mark.parametrize("target", ["torchrun", "slurm", "kubeflow", "skypilot", "ray"])
def test_the_words_of_the_script(target, tmp_path):
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    text = command(target, written(tmp_path, target, "train.py", *WORDS))
    seen = tmp_path / "seen"
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SEEN": str(seen)}
    done = subprocess.run(
        ["bash", "-c", text],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **variables, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node0"},
    )
    assert done.returncode == 0 and not done.stderr, done
    preflight, script = map(json.loads, seen.read_text().splitlines())
    assert preflight[:3] == ["planc", "preflight", "llama-3.1-8b"]
    assert preflight[-2:] == ["--file", "train.py"]
    assert script == ["python", "train.py", *WORDS]


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (["train.py", "--lr", "1"], "train.py"),
        (["python", "-u", "train.py", "other.py"], "train.py"),
        (["-m", "trainer"], ""),
        (["./run.sh", "train.py"], ""),
    ],
)
def test_the_file_that_nodes_compare(words, file, tmp_path):
    text = written(tmp_path, "slurm", *words)
    assert (f" --file {file} ||" in text) if file else ("--file" not in text)


def test_a_file_of_another_kind_is_kept(tmp_path):
    script = tmp_path / "job"
    script.write_text("import torch\n")
    words = ["llama-3.1-8b", "llama", "--world-size", "8", "--to", "torchrun", "-o", script]
    code, _, errors = call("launch", *words, "--", script)
    assert code == 2 and "PL020" in errors and "did not write" in errors
    assert script.read_text() == "import torch\n"
    script.unlink()
    for _ in range(2):  # over its own
        written(tmp_path, "torchrun", "train.py")


def test_a_refuted_plan_is_not_started(tmp_path, monkeypatch):
    from planc.commands import launch
    from planc.runtime.known_verdict import KnownVerdict

    said = {8: "proved", 16: "refuted"}

    def known(lowered, *_):
        return KnownVerdict(level=said[lowered.world_size], text=said[lowered.world_size])

    monkeypatch.setattr(launch, "recall", known)
    assert "\n# on 8 ranks: proved\n" in written(tmp_path, "torchrun", "train.py")
    words = ["llama-3.1-8b", "llama", "--world-size", "16,8", "--to", "torchrun", "--", "train.py"]
    code, out, errors = call("launch", *words)
    assert code == 1 and not out and "PL480" in errors
