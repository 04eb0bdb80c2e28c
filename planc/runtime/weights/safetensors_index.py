"""A folder of safetensors: which file holds which tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from planc.diagnostic import Diagnostic
from planc.runtime.preconditions import problem

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor of a checkpoint: its file, its name there, its shape and its safetensors dtype."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("F", "BF"))


def listing(folder: Path, findings: list[Diagnostic]) -> dict[str, Entry]:
    """What a folder of safetensors holds, by name, from the headers of its files alone.

    Args:
        folder: with `model.safetensors.index.json`, `model.safetensors`, or any `*.safetensors`.
        findings: receives PL497 for a file that is missing, broken or at odds with the index.
    """
    if not folder.is_dir():
        findings.append(problem("PL497", f"{folder} is not a folder"))
        return {}
    mapping = _index(folder, findings)
    files = _files(folder, mapping)
    if not files and not findings:
        text = f"{folder} holds neither safetensors nor a distributed checkpoint"
        findings.append(problem("PL497", text))
    found: dict[str, Entry] = {}
    for file in files:
        if not file.is_file():
            findings.append(problem("PL497", f"{INDEX} names {file.name}, which is not there"))
            continue
        try:
            found_here = list(headers(file))
        except Exception as error:  # safetensors and the file system each have their own
            findings.append(problem("PL497", f"{file} can't be read: {error}"))
            continue
        for entry in found_here:
            if entry.name in found and mapping is None:
                two = f"{found[entry.name].file.name} and {file.name}"
                findings.append(problem("PL497", f"{entry.name} is in two files, {two}"))
            if mapping is None or mapping.get(entry.name) == file.name:
                found[entry.name] = entry
    for name, where in (mapping or {}).items():
        if name not in found and (folder / where).is_file() and not findings:
            findings.append(problem("PL497", f"{INDEX} says {name} is in {where}, it is not"))
    return found


def _index(folder: Path, findings: list[Diagnostic]) -> dict[str, str] | None:
    """The file of each tensor as the index says; None without an index."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        mapping = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if all(isinstance(file, str) for file in mapping.values()):
            return dict(mapping)
        why = "a file's name is not a string"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
    findings.append(problem("PL497", f"{path} is not an index of safetensors: {why}"))
    return {}


def _files(folder: Path, mapping: dict[str, str] | None) -> list[Path]:
    if mapping is not None:
        return [folder / name for name in dict.fromkeys(mapping.values())]
    if (folder / SINGLE).is_file():  # some folders hold the same weights in another layout beside
        return [folder / SINGLE]
    return sorted(folder.glob("*.safetensors"))


def headers(file: Path) -> Iterator[Entry]:
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 not a mapping
            part = opened.get_slice(name)
            shape = tuple(part.get_shape())
            yield Entry(file=file, name=name, shape=shape, dtype=part.get_dtype())


@contextmanager
def reading(file: Path) -> Iterator[Any]:
    """A file, open for as long as its slices are read; its pages are let go with it."""
    with safe_open(file, framework="pt") as opened:
        yield opened
