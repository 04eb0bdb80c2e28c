"""The files that ranks load from, compared before a value is written.

Each rank reads its own slices, often from a disk of its own. Where one copy is stale, the slices
are of different models, and nothing that follows can tell.
"""

import json
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Literal

from planc.diagnostic import Diagnostic, one_of
from planc.runtime.preconditions import of_all_ranks, problem

Compared = Literal["samples", "files"]

_BLOCK = 4096
_BLOCKS = 64
"""The samples of a file that has no header of tensors."""


def different_files(
    folder: Path, compare: Compared, findings: list[Diagnostic]
) -> list[Diagnostic]:
    """PL461 if the ranks have different files in a folder of weights or a checkpoint; one small
    collective, in which every rank takes part.

    Args:
        folder: the folder that each rank reads.
        compare: `samples`, sizes, headers and a block of each tensor; `files`, all bytes.
        findings: those of this rank; with any, here or elsewhere, nothing is compared.
    """
    own = {} if findings else dict(_digests(folder, compare))
    every = of_all_ranks(own)
    if not all(every):
        return []
    for name in sorted({name for some in every for name in some}):
        values = [some.get(name) for some in every]
        if len(common := Counter(values)) > 1:
            usual = common.most_common(1)[0][0]
            odd = [str(rank) for rank, value in enumerate(values) if value != usual]
            ranks = one_of(odd[:6], last="and") + (", ..." if odd[6:] else "")
            text = f"{folder}/{name} is another file on rank{'s' if odd[1:] else ''} {ranks}"
            help = (
                "copy one folder to all machines; `run.load(folder, weights='rank0')` reads "
                "safetensors on rank 0 alone"
            )
            return [problem("PL461", text, help=help)]
    return []


def _digests(folder: Path, compare: Compared) -> Iterator[tuple[str, str]]:
    files = [folder] if folder.is_file() else folder.iterdir()
    for path in sorted(files):
        if path.suffix in (".safetensors", ".distcp") or path.name == ".metadata":
            size = path.stat().st_size
            total = sha256(str(size).encode())
            with path.open("rb") as file:
                for start, length in _places(file, path, size, compare):
                    file.seek(start)
                    total.update(file.read(length))
            yield path.name, total.hexdigest()


def _places(file: BinaryIO, path: Path, size: int, compare: Compared) -> Iterator[tuple[int, int]]:
    """The start and length of what is read of a file; of each tensor a block in its middle."""
    if compare == "files" or size <= _BLOCK * _BLOCKS:
        yield from ((start, 1 << 24) for start in range(0, size, 1 << 24))
    elif path.suffix == ".safetensors":
        header = int.from_bytes(file.read(8), "little")
        yield 0, 8 + header
        file.seek(8)
        tensors = json.loads(file.read(header))
        for name, tensor in tensors.items():
            if name != "__metadata__":
                start, stop = tensor["data_offsets"]
                first = max(start, (start + stop - _BLOCK) // 2)
                yield 8 + header + first, min(_BLOCK, stop - start)
    else:
        step = (size - _BLOCK) // (_BLOCKS - 1)
        yield from ((number * step, _BLOCK) for number in range(_BLOCKS))
