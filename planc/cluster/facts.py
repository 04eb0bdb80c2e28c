"""What a rank says of itself: its node, its versions, its plan, its files, its memory."""

import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from planc.model import cache
from planc.runtime.weights.loading import Compared, file_digests
from planc.version import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """
    Args:
        host: the name of the node.
        local_world_size: by the launcher, None where it says nothing.
        versions: of planc and of what it runs on, and of the device.
        plan: the digest of the lowered plan; empty where it could not be compiled.
        error: why, one line.
        files: digests by path, and the digests of the files of a folder.
        memory, disk: free bytes of this rank's device, and where it saves; None unknown.
        compute: seconds of a small product of matrices.
    """

    host: str
    local_world_size: int | None
    versions: dict[str, str]
    plan: str
    error: str
    files: dict[str, str]
    memory: int | None
    disk: int | None
    compute: float

    def document(self) -> dict[str, Any]:
        return asdict(self)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def facts(plan: str, error: str, files: Sequence[str], compare: Compared, save: str) -> RankFacts:
    """Reads them; `files` are files and folders, of which `compare` says how much is read."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    on = torch.cuda.get_device_name() if device() == "cuda" else "cpu"
    return RankFacts(
        host=socket.gethostname(),
        local_world_size=int(local) if local.isdecimal() else None,
        versions={"planc": VERSION, **cache.environment(), "device": on},
        plan=plan,
        error=error,
        files=dict(pair for name in files for pair in _digests(Path(name), compare)),
        memory=_free_memory(int(local) if local.isdecimal() else 1),
        disk=shutil.disk_usage(_existing(Path(save))).free if save else None,
        compute=_compute(),
    )


def _digests(path: Path, compare: Compared) -> Iterator[tuple[str, str]]:
    try:
        if path.is_dir():
            found = [*file_digests(path, compare)]
            yield from ((f"{path}/{name}", digest) for name, digest in found)
            if not found:
                yield str(path), "without weights"
        else:
            yield str(path), sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        yield str(path), f"unreadable: {error.strerror}"


def _existing(path: Path) -> Path:
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def _free_memory(ranks: int) -> int | None:
    """Of the device; of a CPU, what each rank of the node can have."""
    if device() == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    [free] = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return free * 1024 // ranks


def _compute() -> float:
    """The least of several short ones: what else runs on the machine does not count."""
    size = 256 if device() == "cpu" else 4096
    value, least = torch.ones(size, size, device=device()), float("inf")
    for _ in range(12):
        began = time.perf_counter()
        (value @ value).sum().item()
        least = min(least, time.perf_counter() - began)
    return least
