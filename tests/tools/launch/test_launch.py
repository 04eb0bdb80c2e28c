"""What `planc launch` writes, run with programs that stand for each engine's: the script gets its
words as they were given, and preflight comes first.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from console import call

WORDS = ["two words", "it's", '"x" $HOME', "a\nrm -rf b # c", "\U0001f642", "*", ""]
RECORDS = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["SEEN"], "a") as file:
    print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=file)
"""
FINDS = "#!/bin/bash\necho finding >> $SEEN\nexit 1\n"
FAILS = "#!/bin/bash\necho trained >> $SEEN\nexit 7\n"
OF_RAY = """
class Task:
    def __init__(self, function):
        self.function = function
    def options(self, **_):
        return self
    def remote(self, *args):
        try:
            return lambda value=self.function(*args): value
        except Exception as error:
            return error
def remote(**_):
    return Task
def get(tasks):
    if isinstance(tasks, list):
        return [get(task) for task in tasks]
    if isinstance(tasks, Exception):
        raise exceptions.RayError(str(tasks))
    return tasks()
def init():
    pass
class exceptions:
    class RayError(Exception):
        pass
from . import util
"""
OF_RAYS_UTIL = """
def get_node_ip_address():
    return "127.0.0.1"
class Group:
    def ready(self):
        return lambda: True
def placement_group(bundles, strategy):
    return Group()
def remove_placement_group(group):
    pass
def PlacementGroupSchedulingStrategy(group, at):
    return at
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


def ran(folder, text, programs):
    """A text run by bash with these programs, and the lines that they left."""
    for name, program in programs.items():
        (folder / name).write_text(program)
        (folder / name).chmod(0o755)
    seen, given = folder / "seen", folder / "preflight"
    given.touch()
    places = folder, Path(sys.executable).parent, os.environ["PATH"]
    variables = {"PATH": ":".join(map(str, places)), "SEEN": str(seen)}
    variables |= {"PREFLIGHT": str(given), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node0"}
    variables |= {"TMPDIR": str(folder)}
    done = subprocess.run(
        ["bash", "-euc", text],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )
    return done, seen.read_text().splitlines()


TARGETS = ["torchrun", "slurm", "kubeflow", "skypilot", "ray"]


@pytest.mark.parametrize("target", TARGETS)
def test_the_words_of_the_script(target, tmp_path):
    text = command(target, written(tmp_path, target, "train.py", *WORDS))
    done, seen = ran(tmp_path, text, PROGRAMS)
    assert done.returncode == 0 and not done.stderr, done
    preflight, script = map(json.loads, seen)
    assert preflight[:3] == ["planc", "preflight", "llama-3.1-8b"]
    assert preflight[-2:] == ["--file", "train.py"]
    assert script == ["python", "train.py", *WORDS]


@pytest.mark.parametrize("target", TARGETS)
def test_a_finding_ends_the_job(target, tmp_path):
    text = command(target, written(tmp_path, target, "train.py"))
    done, seen = ran(tmp_path, text, {**PROGRAMS, "planc": FINDS, "python": FAILS})
    assert seen == ["finding"]
    if target == "ray":  # the script of Python reads the file
        assert (done.returncode, (tmp_path / "preflight").read_text()) == (0, "1\n")
    else:
        assert done.returncode == 1


def test_rays_script_starts_again_what_fails_and_no_finding(tmp_path):
    """By modules that stand for Ray's, which run a task where it is called."""
    text = written(tmp_path, "ray", "train.py")
    (tmp_path / "ray" / "util").mkdir(parents=True)
    (tmp_path / "ray" / "__init__.py").write_text(OF_RAY)
    for name in ("__init__", "scheduling_strategies"):
        (tmp_path / "ray" / "util" / f"{name}.py").write_text(OF_RAYS_UTIL)
    (tmp_path / "job.py").write_text(text)
    start = f"PYTHONPATH={tmp_path} exec {sys.executable} {tmp_path}/job.py"
    programs = {**PROGRAMS, "planc": FINDS, "python": FAILS}
    done, seen = ran(tmp_path, start, programs)
    assert (done.returncode, seen) == (1, ["finding"]), done
    (tmp_path / "seen").unlink()
    done, seen = ran(tmp_path, start, {**programs, "planc": "#!/bin/bash\n"})
    assert (done.returncode, seen) == (1, ["trained"] * 4), done


@pytest.mark.parametrize("target", ["torchrun", "kubeflow", "skypilot"])
def test_torchrun_starts_again_what_fails_and_no_finding(target, tmp_path):
    """By torch's own torchrun: two ranks here."""
    text = command(target, written(tmp_path, target, "train.py"))
    text = text.replace("--nproc-per-node=8", "--nproc-per-node=2")
    text = text.replace("torchrun --max", "torchrun --standalone --nproc-per-node=2 --max")
    programs = {"planc": FINDS, "python": FAILS}
    done, seen = ran(tmp_path, text, programs)
    assert (done.returncode, seen) == (1, ["finding"] * 2), done
    (tmp_path / "seen").unlink()
    done, seen = ran(tmp_path, text, {**programs, "planc": "#!/bin/bash\n"})
    assert done.returncode == 1 and 4 <= len(seen) <= 2 * 4, (done, seen)


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
