"""Reads the dumps of ranks that hang: torch's flight recorder, and the additions of planc's
watchdog.

Two kinds of files are read: those of `planc.apply(..., watchdog=...)`, `rank_3.json` and
`rank_3.pickle`; and torch's own, which have another prefix before the rank and no `.json` (NCCL's
say which ranks a group has; gloo's do not).
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_KINDS = {
    "_allgather_base": "all_gather",
    "_all_gather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "allgather": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce_barrier": "barrier",
    "alltoall_base": "all_to_all",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
}
"""The kinds of what the recorder has other names for."""
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Byte": "uint8",
    "Char": "int8",
    "Bool": "bool",
}


_CONNECTION = re.compile(r"gloo|nccl|[Cc]onnection|[Tt]imed out|Timeout|^Dist\w*Error", re.I)
"""Errors that a rank gets inside a collective, as from a rank that has ended."""


class DumpError(Exception):
    """Why a file cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """A call that a rank has made.

    Args:
        kind: `all_reduce`, ...; of gloo, a reduce-scatter is an `all_reduce`.
        ranks: of its group; empty where the file does not say.
        group: its name.
        sequence: its number on the group.
        numel, dtype: of its input.
        done: whether it has ended.
        peer: the other end of a message; -1 without one.
        frames: where it was called, innermost first.
    """

    kind: str
    ranks: tuple[int, ...] = ()
    group: str = ""
    sequence: int = 0
    numel: int = 0
    dtype: str = ""
    done: bool = True
    peer: int = -1
    frames: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDump:
    """
    Args:
        rank: that wrote it.
        entries: its last calls, oldest first.
        about: what planc's watchdog wrote beside it; empty for a file of torch alone.
        gloo: whether gloo carried them.
    """

    rank: int
    entries: tuple[RecordedCall, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    gloo: bool = False

    @property
    def waits(self) -> RecordedCall | None:
        """The call that the rank waits in: the first that has not ended; a message after them. All
        of gloo's end if a connection is lost: then the last one is where the rank was. None for a
        rank that has ended with an error of its own.
        """
        lost = bool(_CONNECTION.search(self.error))
        if self.error and not lost and not self.was_stopped:
            return None
        waits = next((call for call in self.entries if not call.done), None)
        if waits is None and lost:
            waits = next((call for call in reversed(self.entries) if call.peer < 0), None)
        return waits

    @property
    def was_stopped(self) -> bool:
        """Whether SIGTERM ended the rank: torchrun stops the other ranks if one dies."""
        return self.error == "SIGTERM"

    @property
    def error(self) -> str:
        """The error that the rank has ended with; empty if it runs."""
        return str(self.about.get("error", "")).partition("\n")[0]

    @property
    def code(self) -> str:
        """The line of the script that the rank is at; empty where no file says it."""
        call = self.waits
        # over NCCL the process runs ahead of the call that its device waits in
        for stack in (call.frames[::-1] if call else (), self.about.get("stack") or ()):
            user_frames = [frame for frame in stack if not _of_a_library(frame)]
            if user_frames:
                return Path(user_frames[-1].partition(" ")[0]).name
        return ""


_PACKAGE = Path(__file__).parents[2]


def _of_a_library(frame: str) -> bool:
    """Whether a frame, `path:line name`, is of torch or of planc; a script's own folder may have
    that name too.
    """
    path = frame.partition(" ")[0].rpartition(":")[0].replace("\\", "/")
    _, ours, inner = path.rpartition("/planc/")
    return "/torch/" in path or (bool(ours) and (_PACKAGE / inner).is_file())


class _Plain(pickle.Unpickler):
    """Reads plain data, and no code that a file could name."""

    def find_class(self, module: str, name: str) -> Any:
        raise DumpError(f"it holds {module}.{name}, which torch's recorder does not write")


def read(folder: Path) -> dict[int, RankDump]:
    """The dumps of a folder by rank.

    Raises:
        DumpError: there is none, or one cannot be read.
    """
    dumps: dict[int, RankDump] = {}
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in paths:
        number = re.search(r"(\d+)(\.pickle)?$", path.name)
        if number is None or path.suffix == ".json":
            continue
        rank = int(number[1])
        if rank in dumps:
            raise DumpError(f"{folder} has two files of rank {rank}")
        try:
            dumps[rank] = _dump(rank, path)
        except DumpError as error:
            raise DumpError(f"{path}: {error}") from None
        except Exception as error:
            raise DumpError(f"{path} is no file of torch's recorder: {error!r}") from error
    if not dumps:
        raise DumpError(f"{folder} has no files of torch's recorder, such as rank_0.pickle")
    return dumps


def _dump(rank: int, path: Path) -> RankDump:
    data = _Plain(io.BytesIO(path.read_bytes())).load()
    beside = path.with_suffix(".json")
    about = json.loads(beside.read_text()) if path.suffix and beside.exists() else {}
    groups = {name: tuple(ranks) for name, ranks in about.get("groups", {}).items()}
    for name, config in data.get("pg_config", {}).items():
        if name and name not in groups:
            groups[name] = tuple(map(int, re.findall(r"\d+", str(config["ranks"]))))
    entries = [*_entries(data.get("entries", []), groups, rank)]
    gloo = any(entry["profiling_name"].startswith("gloo:") for entry in data.get("entries", []))
    entries += _messages(about.get("messages", []))
    return RankDump(rank=rank, entries=tuple(entries), about=about, gloo=gloo)


def _entries(
    entries: Sequence[Mapping[str, Any]], groups: Mapping[str, tuple[int, ...]], rank: int
) -> Iterator[RecordedCall]:
    for entry in entries:
        name = entry["profiling_name"].partition(":")[2].partition(" ")[0]
        group = entry["process_group"][0]
        ranks = groups.get(group, ())
        ends = re.search(r"(\d+)(?:->|<-)(\d+)$", entry["profiling_name"])
        peer = -1
        if ends:
            index = ranks.index(rank) if rank in ranks else -1
            other = next((int(e) for e in ends.groups() if int(e) != index), index)
            peer = ranks[other] if other < len(ranks) else other
        sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
        numel = 0
        if sizes:
            numel = 1
            for size in sizes[0]:
                numel *= size
        yield RecordedCall(
            kind=_KINDS.get(name, name),
            ranks=ranks,
            group=group,
            sequence=entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"],
            numel=numel,
            dtype=_DTYPES.get(dtypes[0], dtypes[0]) if dtypes else "",
            done=bool(entry["retired"]) or entry["state"] == "completed",
            peer=peer,
            frames=tuple(
                f"{f['filename']}:{f['line']} {f['name']}" for f in entry.get("frames", [])
            ),
        )


def _messages(messages: Sequence[Mapping[str, Any]]) -> Iterator[RecordedCall]:
    """The messages that planc has noted: one that is awaited is where the rank waits."""
    for message in messages:
        yield RecordedCall(
            kind=message["kind"],
            ranks=tuple(message["ranks"]),
            numel=message["numel"],
            dtype=message["dtype"],
            done=message["state"] != "awaited",
            peer=message["peer"],
        )
