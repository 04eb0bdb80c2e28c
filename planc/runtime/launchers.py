"""Who started this process, and whether torch can find the others: torchrun, Slurm, MPI or Ray."""

import os
import sys
from collections.abc import Iterator

from torch import distributed

from planc.diagnostics.diagnostic import PlanError, Sink, one_of

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables by which torch starts a process group."""
_LAUNCHERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),  # not NTASKS: sbatch has it too
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
)
"""The variables of launchers other than torchrun: the number of processes, and which one this is,
of all and of its node.
"""


def require_known_to_torch() -> None:
    """Raises PL460 in a process that was started beside others, where torch cannot find them: each
    would train alone. A no-op where there is a process group.
    """
    if distributed.is_initialized():
        return
    missing = [name for name in NEEDED if name not in os.environ]
    for text, help in _lone(missing) if missing else _several_torchruns():
        sink = Sink()
        sink.error("PL460", f"{text}: each would train alone", help=help)
        raise PlanError(sink)


def _lone(missing: list[str]) -> Iterator[tuple[str, str]]:
    """Why this is one of several processes, and what to do, by each launcher that says so."""
    beside = f"so this is one of several processes, and {one_of(missing, last='and')}"
    beside += " is not set" if len(missing) == 1 else " are not set"
    for size, rank, local in _LAUNCHERS:
        if rank in os.environ and _several(size):
            sets = f'RANK="${rank}" WORLD_SIZE="${size}" LOCAL_RANK="${local}"'
            text = f"{size} is {os.environ[size]}, {beside}"
            yield (
                text,
                (
                    "start torchrun on each node, or set, in each process, "
                    f"{sets}, MASTER_ADDR and MASTER_PORT; `planc launch` writes a file that does"
                ),
            )
    if _several("WORLD_SIZE"):
        text = f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, {beside}"
        yield text, f"set {one_of(missing, last='and')} in each process, as torchrun does"
    if (workers := _ray_workers()) > 1:
        text = f"Ray Train has {workers} workers, {beside}"
        yield text, "use `ray.train.torch.TorchTrainer`, which starts torch's process group"


def _several_torchruns() -> Iterator[tuple[str, str]]:
    """One torchrun for each of several tasks, none of which knows of another."""
    for size, *_ in _LAUNCHERS if os.environ.get("GROUP_WORLD_SIZE") == "1" else ():
        if _several(size):
            text = f"{size} is {os.environ[size]}, and torchrun knows of one node"
            help = "start one torchrun on each node, with `--nnodes` and the same `--rdzv-endpoint`"
            yield text, help


def _several(size: str) -> bool:
    return os.environ.get(size, "1") not in ("", "1")


def _ray_workers() -> int:
    """The number of workers of Ray Train; 1 in a process that is not a worker."""
    train = sys.modules.get("ray.train")
    try:
        return int(train.get_context().get_world_size()) if train else 1
    except RuntimeError:  # no context: this process is not a worker
        return 1
