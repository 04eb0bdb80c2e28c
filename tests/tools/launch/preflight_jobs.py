"""Runs `planc preflight` as eight gloo processes on what looks like two nodes, with a fault on one
of them. Prints a JSON object by fault: the exit code of rank 0, or of rank 1 where 0 is gone, all
that ranks wrote to standard output, the seconds, and the exit codes of the others. Its arguments
are the format of the report, and faults.
"""

import contextlib
import io
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import distributed

from planc import cli
from planc.tools.launch import facts as of_rank

WORLD, VICTIM = 8, 5
PLAN = ["model", "qwen3", "--world-size", "8", "--set", "tp=2", "--set", "dp_replicate=2"]
MORE = ["--weights", "weights", "--file", "train.py", "--save", "."]
LIMIT = "60"


def all_reduce_that(does):
    """Replaces the all-reduce: `does` is called before each, with its tensor and its group."""
    plain = distributed.all_reduce

    def changed(value, group=None):
        does(value.numel() * 4, distributed.get_process_group_ranks(group))
        plain(value, group=group)

    distributed.all_reduce = changed


def late(nbytes, group):
    time.sleep(0.15)


def dies(nbytes, group):
    if nbytes > 2**10:
        os._exit(9)


def stops(nbytes, group):
    if len(group) == 2 and group[1] - group[0] > 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def finds_little(of_rank):
    """Of memory, which is a finding before the rank dies."""
    of_rank._free_memory = lambda _: 1000
    all_reduce_that(dies)


def slow_link(nbytes, group):
    if group == [4, 5] and nbytes > 2**20:
        time.sleep(0.1)


def install(fault, rank):
    """Makes this rank faulty; the arguments that it has besides."""
    hosts = [f"node{r // 4}" for r in range(WORLD)]
    if fault == "swapped":
        hosts[3], hosts[4] = hosts[4], hosts[3]
    socket.gethostname = lambda: hosts[rank]
    if fault == "written for another plan":
        return ["--digest", "0123456789ab"]
    if fault == "another world size":
        return ["--world-size", "4"]
    if fault == "no script":
        return ["--file", "other.py"]
    if fault == "no weights":
        return ["--weights", "elsewhere"]
    if fault == "slow link" and rank in (4, 5):
        all_reduce_that(slow_link)
    if rank == (0 if fault in OF_FIRST else VICTIM):
        return VICTIMS.get(fault, lambda: None)() or []
    return []


def wrong_sums():
    """A rank whose shards of gradients are a little too large."""
    plain = distributed.reduce_scatter_single

    def larger(output, *args, **kwargs):
        made = plain(output, *args, **kwargs)
        output.mul_(1.01)
        return made

    distributed.reduce_scatter_single = larger


def slow():
    plain = torch.Tensor.sum
    torch.Tensor.sum = lambda value: (time.sleep(0.02), plain(value))[1]


def refused():
    torch.cuda.is_available = lambda: (time.sleep(0.0), False)[1]
    torch.distributed.init_process_group = lambda *_, **__: (_ for _ in ()).throw(
        RuntimeError("no such interface")
    )


VICTIMS = {
    "version": lambda: setattr(of_rank, "VERSION", "0.0.1"),
    "plan": lambda: ["--set", "recompute=false"],
    "no plan": lambda: os.chdir("elsewhere"),
    "stale weights": lambda: os.chdir("stale"),
    "stale script": lambda: os.chdir("script"),
    "local size": lambda: os.environ.update(LOCAL_WORLD_SIZE="8"),
    "disk": lambda: setattr(of_rank.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000)),
    "memory": lambda: setattr(of_rank, "_free_memory", lambda _: 1000),
    "slow": slow,
    "late": lambda: all_reduce_that(late),
    "dies": lambda: all_reduce_that(dies),
    "stops": lambda: all_reduce_that(stops),
    "no network": refused,
    "wrong sums": wrong_sums,
    "absent": lambda: os._exit(0),
    "no rank 0": lambda: os._exit(0),
    "rank 0 dies": lambda: all_reduce_that(dies),
    "rank 0 stops": lambda: all_reduce_that(stops),
    "rank 0 stops beside its store": lambda: all_reduce_that(stops),
    "little memory, and dies": lambda: finds_little(of_rank),
}
BESIDE = "rank 0 stops beside its store"
"""The store is torchrun's, which goes on."""
OF_FIRST = ("no rank 0", "rank 0 dies", "rank 0 stops", BESIDE)
FAULTS = (
    "none",
    "swapped",
    "slow link",
    "written for another plan",
    "another world size",
    "no script",
    "no weights",
    *VICTIMS,
)


def child(rank, fault, port, out, format):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank % 4))
    os.environ.update(LOCAL_WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.stdout, sys.stderr = out.open("w"), out.with_suffix(".err").open("w")
    more = install(fault, rank)
    code = cli.main(["preflight", *PLAN, *MORE, "--timeout", LIMIT, "--format", format, *more])
    sys.stdout.flush()
    os._exit(code)


def run(fault, format):
    port, began = random.randint(20_000, 30_000), time.time()
    outs = [Path(f"out{rank}") for rank in range(WORLD)]
    children = []
    if fault == BESIDE:
        store = torch.distributed.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False
        )
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(store.port == port)
    for rank, out in enumerate(outs):
        if (child_id := os.fork()) == 0:
            try:
                child(rank, fault, port, out, format)
            finally:
                os._exit(99)
        children.append(child_id)
    teller = int(fault in OF_FIRST)
    code = os.waitstatus_to_exitcode(os.waitpid(children[teller], 0)[1])
    seconds = time.time() - began
    others = []
    for rank, child_id in enumerate(children):
        if rank != teller:
            ended = wait(child_id)
            others.append(ended)
    return code, "".join(out.read_text() for out in outs), round(seconds, 1), others


def wait(child_id):
    """The exit code of a child; None of one that had to be killed, as launchers do."""
    for _ in range(400):  # ranks of a busy machine begin seconds apart
        ended, status = os.waitpid(child_id, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child_id, signal.SIGKILL)
    os.waitpid(child_id, 0)
    return None


def folder(qwen3):
    """A model, its weights, a script, and stale copies of the two."""
    for name in (".", "stale", "script", "elsewhere"):
        Path(name, "weights").mkdir(parents=True, exist_ok=True)
        weights = torch.arange(1_000_000.0)
        weights[500_000:510_000] += name == "stale"
        save_file({"w": weights}, Path(name, "weights", "model.safetensors"))
        Path(name, "train.py").write_text(f"print({name == 'script'})\n")
        if name != "elsewhere":
            Path(name, "model").mkdir(exist_ok=True)
            Path(name, "model", "config.json").write_text(json.dumps(qwen3))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
    from modelfolder import QWEN3

    torch.set_num_threads(1)
    os.chdir(tempfile.mkdtemp())
    folder(QWEN3)
    with contextlib.redirect_stdout(io.StringIO()):
        cli.main(["lower", *PLAN])  # so that no child builds the model
    from transformers import Qwen3ForCausalLM  # noqa: F401 (once, not in each child)

    from planc.simulate import worker  # noqa: F401

    format, *faults = sys.argv[1:]
    found = {fault: run(fault, format) for fault in faults or FAULTS}
    print(json.dumps(found))
