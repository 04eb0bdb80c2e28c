"""Folders of safetensors: the tensors in each file, and slices of them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from planc.runtime.standalone.shards import Runs, blocks_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
FLOATS = ("F64", "F32", "F16", "BF16", "F")
"""The floating-point dtypes whose values need no scales; `F` is any of them."""


class StoredTensor:
    """A tensor of a checkpoint: its file, its name in it, its shape and its dtype.

    The dtype is its name in safetensors, such as BF16.
    """

    def __init__(
        self, file: Path, name: str, shape: tuple[int, ...], dtype: str
    ) -> None:
        self.file = file
        self.name = name
        self.shape = shape
        self.dtype = dtype

    def copy_to(self, target: Tensor, ranges: Sequence[Runs]) -> None:
        """Copies some ranges into a tensor, cast to its dtype.

        Values are copied from the memory-mapped file, without other memory.

        Args:
            target: a tensor with the shape of the concatenated ranges.
            ranges: for each dim, positions in the stored tensor.
        """
        if not target.numel():
            return
        with safe_open(self.file, framework="pt") as opened:
            if not self.shape:
                target.copy_(opened.get_tensor(self.name))
                return
            for inner, outer in blocks_of(ranges):
                target[inner].copy_(self.part(opened, outer))

    def part(self, opened: Any, where: Sequence[slice]) -> Tensor:
        """A block of the tensor from its file, which is open."""
        values: Tensor = opened.get_slice(self.name)[tuple(where)]
        return values


def tensors_in_file(file: Path) -> Iterator[StoredTensor]:
    """The tensors of one file, from its header."""
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            part = opened.get_slice(name)
            yield StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())


def tensors_in_folder(folder: Path, problems: list[str]) -> dict[str, StoredTensor]:
    """The tensors of a folder of safetensors by name, from the headers of its files.

    Args:
        folder: the folder, whose files are chosen as `from_pretrained` chooses them.
        problems: receives each file that is missing, broken or not as indexed.
    """
    if not folder.is_dir():
        problems.append(f"{folder} is not a folder")
        return {}
    entry = entry_of(folder)
    indexed = entry is not None and entry.endswith(".index.json")
    mapping = index_of(folder / str(entry), problems) if indexed else None
    files = files_of(folder, entry, mapping)
    if not files and not problems:
        problems.append(
            f"{folder} holds neither safetensors nor a distributed checkpoint"
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        if not file.is_file():
            source = entry if indexed else CONFIG
            problems.append(f"{source} names {file.name}, which is not there")
            continue
        try:
            inside = list(tensors_in_file(file))
        except (
            Exception
        ) as error:  # safetensors and the file system each have their own
            problems.append(f"{file} can't be read: {error}")
            continue
        for stored in inside:
            if stored.name in tensors and mapping is None:
                two = f"{tensors[stored.name].file.name} and {file.name}"
                problems.append(f"{stored.name} is in two files, {two}")
            if mapping is None or mapping.get(stored.name) == file.name:
                tensors[stored.name] = stored
    for name, where in (mapping or {}).items():
        if name not in tensors and (folder / where).is_file() and not problems:
            problems.append(f"{entry} says {name} is in {where}, it is not")
    return tensors


def entry_of(folder: Path) -> str | None:
    """The file or the index that `from_pretrained` reads; None if the folder has none.

    A single file precedes an index, and a file that the configuration names precedes
    both.
    """
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        chosen = values.get("transformers_weights")
    except (OSError, ValueError, AttributeError):  # a folder may have no configuration
        chosen = None
    if isinstance(chosen, str):
        return chosen
    return next((name for name in (SINGLE, INDEX) if (folder / name).is_file()), None)


def index_of(path: Path, problems: list[str]) -> dict[str, str]:
    """The file of each tensor according to an index."""
    try:
        mapping = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if all(isinstance(file, str) for file in mapping.values()):
            return dict(mapping)
        why = "a file's name is not a string"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
    problems.append(f"{path} is not an index of safetensors: {why}")
    return {}


def files_of(
    folder: Path, entry: str | None, mapping: dict[str, str] | None
) -> list[Path]:
    """The files to read; some folders have the same weights in another form too."""
    if mapping is not None:
        return [folder / name for name in dict.fromkeys(mapping.values())]
    return [folder / entry] if entry else sorted(folder.glob("*.safetensors"))
