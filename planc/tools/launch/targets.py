"""The files that start a job: one readable text for each engine."""

import json
import shlex
from collections.abc import Callable

from planc.tools.launch.job import ENVIRONMENT, RESTARTS, ClusterJob

_EXPORTS = "\n".join(f"export {name}={value}" for name, value in ENVIRONMENT.items())


def _quote(text: str) -> str:
    """Text as Python reads it: JSON, but that writes an emoji as two halves."""
    return json.dumps(text, ensure_ascii=False)


def _ended_once(torchrun: str) -> str:
    """The lines of bash that run torchrun on a node. It starts again what fails, which mends
    nothing of what preflight finds: then ranks end as if all were done, and the node with its code.
    """
    return f"""export PREFLIGHT=$(mktemp)  # the exit code of one that fails
{torchrun} &
trap "kill $!" INT TERM
wait $! || wait $!  # a signal ends the first
exit $(<"$PREFLIGHT")"""


def _meeting(job: ClusterJob, head: str, number: str) -> str:
    """The command of torchrun for all ranks of one node.

    Args:
        head: the host where the nodes meet, in bash.
        number: the variable with the number of the node; torchrun does not always find out by
            the name of the host that it is the first.
    """
    meet = (
        f'--rdzv-backend=c10d --rdzv-endpoint="{head}:29500" --rdzv-id={job.digest[:12]}'
        f" --rdzv-conf=is_host=$(({number} == 0))"
    )
    meet = meet if job.nodes > 1 else "--standalone"
    return (
        f"torchrun --nnodes={job.counts(':')} --nproc-per-node={job.per_node}"
        f" --max-restarts={RESTARTS} \\\n    {meet} \\\n    --no-python bash -c {job.rank}"
    )


def torchrun(job: ClusterJob) -> str:
    """A script of bash, for one machine, or for each of several."""
    each = f"on each of {job.counts(' to ')} nodes: HEAD=name-of-node-0 NODE=0-to-{job.nodes - 1}"
    how = each if job.nodes > 1 else "on this machine:"
    return f"""#!/bin/bash
{job.header}
# {how} bash FILE; what fails is started again {RESTARTS} times, and resumes from its checkpoint
set -eu
{_EXPORTS}
{_ended_once(_meeting(job, "$HEAD", "NODE"))}
"""


def slurm(job: ClusterJob) -> str:
    """A script for sbatch: a task is a rank.

    With a range of nodes and `--ntasks-per-node` Slurm takes the fewest, so that srun says it then.
    """
    gpus = f"{job.gpu}:{job.per_node}" if job.gpu else job.per_node
    each = f"--ntasks-per-node={job.per_node}"
    asked, started = ("--cpus-per-gpu=1", f" {each}") if job.fewer else (each, "")
    return f"""#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.counts("-")}
#SBATCH {asked}
#SBATCH --gpus-per-node={gpus}
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
{job.header}
# sbatch FILE, with the partition, account and time that your cluster wants
{_EXPORTS}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
# srun does not take over what sbatch was given
[ -z "${{SLURM_CPUS_PER_TASK:-}}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

ranks() {{  # each task gets the variables by which torch finds the others
    srun --kill-on-bad-exit=1{started} bash -c 'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
        export LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE={job.per_node}; exec "$@"' - "$@" &
    wait $!
}}
again() {{  # the same job once more, at most {RESTARTS} times; it resumes from its checkpoint
    ((${{SLURM_RESTART_COUNT:-0}} < {RESTARTS})) && scontrol requeue "$SLURM_JOB_ID"
    exit 1
}}
trap again USR1  # two minutes before the time limit

# what preflight finds is not mended by starting again
ranks {shlex.join(job.preflight)} || exit
ranks {shlex.join(job.script)} || again
"""


def kubeflow(job: ClusterJob) -> str:
    """A TrainJob of Kubeflow's Trainer, whose runtime sets the nodes and the head for torchrun."""
    variables = "".join(
        f"      - {{name: {name}, value: {json.dumps(value)}}}\n"
        for name, value in ENVIRONMENT.items()
    )
    run = _ended_once(f"torchrun --max-restarts={RESTARTS} --no-python bash -c {job.rank}")
    run = run.replace("\n", "\n        ")
    return f"""{job.header}
# kubectl create -f FILE; the image of the runtime, or of the trainer, has planc and the script
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {job.name}
spec:
  runtimeRef:
    name: torch-distributed
  trainer:
    numNodes: {job.nodes}
    numProcPerNode: {job.per_node}
    resourcesPerNode:
      limits: {{nvidia.com/gpu: {job.per_node}}}
    env:
{variables}    command: [bash, -euc]
    args:
      - |
        {run}
"""


def skypilot(job: ClusterJob) -> str:
    """A task of SkyPilot, which gives each node the addresses of all."""
    variables = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in ENVIRONMENT.items())
    head = '$(head -n 1 <<< "$SKYPILOT_NODE_IPS")'
    run = _ended_once(_meeting(job, head, "SKYPILOT_NODE_RANK")).replace("\n", "\n  ")
    return f"""{job.header}
# sky jobs launch FILE; add a `setup` that installs what the script needs
name: {job.name}
num_nodes: {job.nodes}
workdir: .
resources:
  accelerators: {job.gpu}:{job.per_node}
envs:
{variables}run: |
  set -eu
  {run}
"""


_RAY = """

@ray.remote(num_cpus=0, max_retries=0)
def address():
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=0)
def node(head, nodes, number):
    words = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={PER_NODE}", f"--rdzv-id={PLAN}"]
    words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={head}:29500"]
    words += [f"--rdzv-conf=is_host={number == 0}"]
    words += [f"--local-addr={ray.util.get_node_ip_address()}"]
    words += ["--no-python", "bash", "-c", COMMAND]
    with tempfile.NamedTemporaryFile("r") as preflight:  # the exit code of one that fails
        environment = {**os.environ, **ENVIRONMENT, "PREFLIGHT": preflight.name}
        subprocess.run(words, env=environment, check=True)
        return preflight.read()


def reserved():  # as many nodes as there are within a minute, and waits for the fewest
    for nodes in NODES:
        group = placement_group([{"CPU": 1, "GPU": PER_NODE}] * nodes, strategy="STRICT_SPREAD")
        if nodes == NODES[-1]:
            ray.get(group.ready())
        elif not group.wait(60):
            remove_placement_group(group)
            continue
        return nodes, group


def started():
    nodes, group = reserved()
    on = [PlacementGroupSchedulingStrategy(group, at) for at in range(nodes)]
    try:
        head = ray.get(address.options(scheduling_strategy=on[0]).remote())
        at = [node.options(num_gpus=PER_NODE, scheduling_strategy=each) for each in on]
        found = ray.get([each.remote(head, nodes, number) for number, each in enumerate(at)])
    except ray.exceptions.RayError as error:
        print(error)
        return False
    finally:
        remove_placement_group(group)
    if any(found):
        raise SystemExit(1)
    return True


ray.init()
# what fails is started again, and resumes from its checkpoint; not what preflight finds
raise SystemExit(not any(started() for _ in range(1 + RESTARTS)))
"""


def ray(job: ClusterJob) -> str:
    """A script of Python that runs torchrun on as many nodes of a Ray cluster."""
    return f"""{job.header}
# ray job submit --working-dir . -- python FILE
import os
import subprocess
import tempfile

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

PLAN = {json.dumps(job.digest[:12])}
NODES, PER_NODE, RESTARTS = {(job.nodes, *job.fewer)}, {job.per_node}, {RESTARTS}
ENVIRONMENT = {json.dumps(ENVIRONMENT, indent=4)[:-2]},
}}
COMMAND = {_quote(shlex.split(job.rank)[0])}
{_RAY}"""


TARGETS: dict[str, Callable[[ClusterJob], str]] = {
    "torchrun": torchrun,
    "slurm": slurm,
    "kubeflow": kubeflow,
    "skypilot": skypilot,
    "ray": ray,
}
