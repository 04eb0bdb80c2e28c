"""Runs what `planc launch` writes on real engines, with a rank that is killed once: torchrun, Slurm
of one node and of two, a local Ray; SkyPilot and Kubeflow parse theirs. `make cluster` calls it.

The losses of each must be those of a run that nobody kills. A run of all of them writes
docs/generated/engines.md.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
ENGINES = Path(os.path.abspath(sys.argv[1]))  # noqa: PTH100, the Python of a venv is a link
WANTED = sys.argv[2:]
"""Names of `WHAT`; without any, all."""
sys.path.insert(0, str(HERE.parent / "support"))

from modelfolder import QWEN3  # noqa: E402

SETS = ["--set", "param_dtype=fp32"]
PLAN = ["--world-size", "2", *SETS, "--set", "tp=2", "--gpus-per-node", "H100:2"]
ELASTIC = ["--world-size", "2,1", *SETS, "--gpus-per-node", "H100:1"]
STEPS = 6
CONF = """ClusterName=one
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmUser={user}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/%n.log
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
NodeName=DEFAULT CPUs=2 Gres=gpu:H100:2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
DEVICES = "Name=gpu Type=H100 File=/dev/null\nName=gpu Type=H100 File=/dev/zero\n"
"""Devices that stand for GPUs; the script trains on the CPU."""
SKYPILOT = "import sky, sys; print(sky.Task.from_yaml(sys.argv[1]).num_nodes)"
KUBEFLOW = """import sys, yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
text = yaml.safe_load(open(sys.argv[1]))
job = TrainerV1alpha1TrainJob.from_dict(text)
assert job.to_dict() == text, "a field is not known"
print(job.spec.trainer.num_nodes)
"""


WHAT = {
    "torchrun": "one node, two ranks, of which one is killed and all are started again",
    "fewer": "two nodes of one rank, of which one is killed with its torchrun; on with the other",
    "slurm": "one node, two tasks, of which one is killed; the job is requeued once",
    "slurm_fewer": "two nodes of one task, of which one is killed; requeued on the other",
    "ray": "torchrun on a local cluster, two ranks, of which one is killed and all start again",
    "ray_train": "Ray Train, four workers, of which one is killed; then three",
    "skypilot": "the file is parsed by its own package",
    "kubeflow": "the file is parsed by its own package",
}
PAGE = """# What planc launch writes, on real engines

Written by `make cluster`; [how-to/cluster.md](../how-to/cluster.md) says what the files contain.
All ran on one machine, on CPUs. Each step has the loss of a run that nobody killed.

| engine | version | what ran | steps on ranks | seconds |
| --- | --- | --- | --- | --- |
"""


def say(*words, **options):
    return subprocess.run(words, check=True, capture_output=True, text=True, **options).stdout


def written(target, plan, *script):
    """The file of a target."""
    file = Path(f"{target}_job.{'py' if target == 'ray' else 'sh'}")
    command = ["planc", "launch", "model", "qwen3", *plan, "--to", target, "-o", str(file)]
    say(*command, "--", "train.py", *script)
    return str(file)


def killed(target):
    """The file of a target, for a script that is killed once."""
    script = ["--set", "tp=2", "--dies-at", "3", "--losses", f"{target}.jsonl"]
    return written(target, PLAN, *script)


def torchrun():
    subprocess.run(["bash", killed("torchrun")], check=True)


def fewer():
    """Two nodes of one rank, each a torchrun on this machine, one of which is killed."""
    job = written("torchrun", ELASTIC, "--node-dies-at", "3", "--losses", "fewer.jsonl")
    nodes = [
        subprocess.Popen(["bash", job], env={**os.environ, "HEAD": "localhost", "NODE": number})
        for number in "01"
    ]
    try:
        assert nodes[0].wait(timeout=600) == 0 and nodes[1].wait(timeout=60) != 0
    finally:
        for node in nodes:
            node.kill()
    assert [ranks for *_, ranks in lines("fewer")] == [2, 2, 2, 1, 1, 1]


@contextmanager
def slurm_of(count):
    """Slurm's daemons, of one node or of two that are both this machine."""
    home = Path(f"slurm{count}").absolute()
    for name in ("munge", "state"):
        (home / name).mkdir(parents=True)
    (home / "munge" / "key").write_bytes(os.urandom(1024))
    (home / "munge" / "key").chmod(0o400)
    host, user = socket.gethostname().partition(".")[0], say("id", "-un").strip()
    nodes = [host, "localhost"][:count]  # names that this machine finds itself by
    text = CONF.format(host=host, home=home, user=user)
    for at, node in enumerate(nodes):
        text += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={17000 + at}\n"
    (home / "slurm.conf").write_text(text)
    (home / "gres.conf").write_text(DEVICES)
    os.environ["SLURM_CONF"] = str(home / "slurm.conf")
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
    names["seed-file"] = "seed"
    try:
        subprocess.run(
            ["munged", *(f"--{option}={home}/munge/{name}" for option, name in names.items())],
            check=True,
        )
        subprocess.run(["slurmctld"], check=True)
        for node in nodes:
            subprocess.run(["slurmd", "-N", node], check=True)
        until(lambda: f"{count} idle" in say("sinfo", "--noheader", "--format=%D %T"), 60)
        yield
    finally:
        for pid in (*(f"{node}.pid" for node in nodes), "slurmctld.pid", "munge/pid"):
            if (home / pid).exists():
                os.kill(int((home / pid).read_text()), 15)


def slurm():
    with slurm_of(1):
        submitted(killed("slurm"))


def slurm_fewer():
    """Two nodes of one rank, of which one takes no other job after the first start."""
    script = ["--dies-at", "3", "--losses", "slurm_fewer.jsonl"]
    with slurm_of(2):
        lost = ["update", "nodename=localhost", "state=drain", "reason=lost"]
        submitted(written("slurm", ELASTIC, *script), lambda: say("scontrol", *lost))
    assert [ranks for *_, ranks in lines("slurm_fewer")] == [2, 2, 2, 1, 1, 1]


def submitted(file, when_it_runs=lambda: None):
    """Runs a job that is requeued once."""
    job = say("sbatch", "--parsable", file).strip()

    def state():
        return say("scontrol", "show", "job", job)

    until(lambda: "JobState=PENDING" not in state(), 60)
    when_it_runs()
    until(lambda: "JobState=COMPLETED" in state() or "JobState=FAILED" in state(), 600)
    print(Path(f"qwen3-{job}.log").read_text())
    assert "JobState=COMPLETED" in state() and "Restarts=1" in state()


def until(true, seconds):
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"not in {seconds} s")
        time.sleep(2)


def ray():
    cluster = ["--head", "--num-cpus=2", "--num-gpus=2", "--include-dashboard=false"]
    home = Path("ray").absolute()
    command = str(ENGINES.parent / "ray")
    try:
        say(command, "start", *cluster, f"--temp-dir={home}", "--object-store-memory=100000000")
        with_address = {**os.environ, "RAY_ADDRESS": "auto"}
        subprocess.run([str(ENGINES), killed("ray")], check=True, env=with_address)
    finally:
        subprocess.run([command, "stop"], check=False)


def ray_train():
    """`planc.integrations.ray`, which does not need what `planc launch` writes."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [str(ENGINES), "-W", "ignore", str(HERE / "ray_train.py")]
    subprocess.run(command, check=True, env=environment)
    alone = {step: loss for step, loss, _ in lines("ray_alone")}
    told = lines("ray_train")
    assert {step: ranks for step, _, ranks in told} == {**dict.fromkeys(range(5), 4), 5: 3}
    assert len(told) <= len(alone) + 1  # Ray may not have heard of the last step before the kill
    for step, loss, _ in told:
        assert abs(loss - alone[step]) < 1e-4, (told, alone)


def skypilot():
    parsed("skypilot", SKYPILOT)


def kubeflow():
    parsed("kubeflow", KUBEFLOW)


def parsed(target, code):
    assert say(str(ENGINES), "-c", code, killed(target)).split()[-1] == "1"


def lines(name):
    """(step, loss, ranks) of each step."""
    return [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()]


def require_losses(name, expected):
    found = lines(name)
    assert [step for step, *_ in found] == list(range(STEPS)), name
    for (_, loss, _), (_, right, _) in zip(found, expected, strict=True):
        assert abs(loss - right) < 1e-4, (name, found, expected)


def version(name):
    """Of an engine, as it says it itself."""
    if name.startswith("slurm"):
        return say("sinfo", "--version").strip()
    package = {"torchrun": "torch", "fewer": "torch", "kubeflow": "kubeflow-trainer-api"}
    package = package.get(name, name.partition("_")[0])
    python = sys.executable if package == "torch" else str(ENGINES)
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return f"{package} {say(python, '-c', code).strip()}"


def row(name, seconds):
    """The line of the table for what ran."""
    told = Path(f"{name}.jsonl").exists()
    steps = Counter(ranks for *_, ranks in lines(name)) if told else {}
    done = ", ".join(f"{n} on {ranks}" for ranks, n in steps.items())
    return f"| {name} | {version(name)} | {WHAT[name]} | {done} | {seconds:.0f} |\n"


def main():
    os.chdir(folder := tempfile.mkdtemp(prefix="planc-"))
    Path(folder).chmod(0o755)  # munge's clients are of any user
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(QWEN3))
    shutil.copy(HERE / "train.py", "train.py")
    alone = written("torchrun", PLAN, "--set", "tp=2", "--losses", "alone.jsonl")
    subprocess.run(["bash", alone], check=True)
    expected, rows = lines("alone"), []
    for name in WANTED or WHAT:
        begun = time.monotonic()
        globals()[name]()
        if name in ("torchrun", "fewer", "slurm", "slurm_fewer", "ray"):
            require_losses(name, expected)
        rows.append(row(name, time.monotonic() - begun))
        print(f"== {rows[-1]}", flush=True)
    if not WANTED:
        (HERE.parents[1] / "docs/generated/engines.md").write_text(PAGE + "".join(rows))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
