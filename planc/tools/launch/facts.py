"""The facts that a rank reports: its node, its versions, its plan, its files, its memory."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from planc.files.version import VERSION
from planc.model import cache
from planc.runtime.weights.loading import Compared, file_digests


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """
    Args:
        host: the name of the node.
        nvlink: the NVLink domain of several nodes that its GPU is in; empty where the machine tells
            of none.
        local_world_size: by the launcher, None where it says nothing.
        versions: of planc and of what it runs on, and of the device.
        plan: the digest of the lowered plan; empty where it could not be compiled.
        error: why, one line.
        files: digests by path, and the digests of the files of a folder.
        memory, disk: free bytes of this rank's device, and where it saves; None unknown.
        compute: seconds of a small product of matrices.
    """

    host: str
    nvlink: str
    local_world_size: int | None
    versions: dict[str, str]
    plan: str
    error: str
    files: dict[str, str]
    memory: int | None
    disk: int | None
    compute: float

    @property
    def place(self) -> str:
        """The domain of fast links: the NVLink domain, else the node."""
        return self.nvlink or self.host

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
        nvlink=nvlink_domain(_nvidia_smi()) if device() == "cuda" else "",
        local_world_size=int(local) if local.isdecimal() else None,
        versions={"planc": VERSION, **cache.environment(), "device": on},
        plan=plan,
        error=error,
        files=dict(pair for name in files for pair in _digests(Path(name), compare)),
        memory=_free_memory(int(local) if local.isdecimal() else 1),
        disk=shutil.disk_usage(_existing(Path(save))).free if save else None,
        compute=_compute(),
    )


def _nvidia_smi() -> str:
    """The driver's report on the GPU of this rank; empty if it does not answer."""
    gpu = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0"))).uuid
    words = ["nvidia-smi", "-q", "-i", f"GPU-{gpu}"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def nvlink_domain(told: str) -> str:
    """The NVLink domain in the output of `nvidia-smi -q`: the cluster and the clique of its fabric.
    A node whose links end in it has a cluster of zeros, or none.
    """
    fields = dict(re.findall(r"^\s*(CliqueId|ClusterUUID)\s*:\s*(\S+)\s*$", told, re.MULTILINE))
    cluster = fields.get("ClusterUUID", "")
    named = re.fullmatch(r"[0-9a-fA-F-]+", cluster) and re.search(r"[1-9a-fA-F]", cluster)
    return f"{cluster}.{fields.get('CliqueId', '')}" if named else ""


def _digests(path: Path, compare: Compared) -> Iterator[tuple[str, str]]:
    try:
        if path.is_dir():
            digests = [*file_digests(path, compare)]
            yield from ((f"{path}/{name}", digest) for name, digest in digests)
            if not digests:
                yield str(path), "without weights"
        else:
            yield str(path), sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        yield str(path), f"unreadable: {error.strerror}"


def _existing(path: Path) -> Path:
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def _free_memory(ranks: int) -> int | None:
    """The free memory of the device in bytes; on a CPU, each rank's share of the node's."""
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
