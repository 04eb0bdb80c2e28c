"""A tensor that a checkpoint holds in pieces: where in it each lies, and slices read from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planc.model.checkpoint_conversion import Recipe
from planc.runtime.sharded_tensors import Runs, places
from planc.runtime.weights.safetensors_index import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A tensor of a file as a box in a tensor of the model.

    Args:
        entry: the tensor in the file.
        start: where the box begins, for each dim of the model's tensor.
        size: of the box.
        dims: the dim of the file's tensor along each of these; None for one that it lacks, where
            the box is of size 1.
    """

    entry: Entry
    start: tuple[int, ...]
    size: tuple[int, ...]
    dims: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor of the model, as a checkpoint has it.

    Args:
        pieces: which together fill it.
        shape: of the whole.
    """

    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """In the file; of its first piece."""
        return self.pieces[0].entry.name

    @property
    def dtype(self) -> str:
        return self.pieces[0].entry.dtype

    @property
    def floating(self) -> bool:
        return all(piece.entry.floating for piece in self.pieces)

    @property
    def folder(self) -> Path:
        return self.pieces[0].entry.file.parent


def one(entry: Entry) -> Stored:
    """A tensor that is stored as it is."""
    dims = tuple(range(len(entry.shape)))
    piece = Piece(entry=entry, start=(0,) * len(dims), size=entry.shape, dims=dims)
    return Stored(pieces=(piece,), shape=entry.shape)


def made(recipe: Recipe, entries: Mapping[str, Entry]) -> Stored | str:
    """The tensor that a recipe gives, or why it gives none."""
    parts = [[one(entries[name]) for name in names] for names in recipe.parts]
    for name, first, second in recipe.steps:
        match name:
            case "stack":
                if any(len({s.shape for s in part}) > 1 for part in parts):
                    return "its parts are of several shapes"
                parts = [[_stack(part, first)] for part in parts]
            case "join":
                several = [stored for part in parts for stored in part]
                rests = {(*s.shape[:first], *s.shape[first + 1 :]) for s in several}
                if len(rests) > 1:
                    return "its parts are of shapes that cannot be joined"
                parts = [[_join(several, first)]]
            case "swap":
                parts = [[_swap(s, first, second) for s in part] for part in parts]
            case _:
                return f"planc does not know the conversion `{name}`"
    if len(parts) > 1 or len(parts[0]) > 1:
        names = [s.pieces[0].entry.name for part in parts for s in part]
        return f"it is there several times: {', '.join(names[:3])}"
    return parts[0][0]


def _stack(several: Sequence[Stored], dim: int) -> Stored:
    pieces: list[Piece] = []
    for i, stored in enumerate(several):
        pieces += (
            replace(
                piece,
                start=_with(piece.start, dim, i),
                size=_with(piece.size, dim, 1),
                dims=(*piece.dims[:dim], None, *piece.dims[dim:]),
            )
            for piece in stored.pieces
        )
    return Stored(pieces=tuple(pieces), shape=_with(several[0].shape, dim, len(several)))


def _join(several: Iterable[Stored], dim: int) -> Stored:
    pieces: list[Piece] = []
    at = 0
    shape: tuple[int, ...] = ()
    for stored in several:
        for piece in stored.pieces:
            start = (*piece.start[:dim], piece.start[dim] + at, *piece.start[dim + 1 :])
            pieces.append(replace(piece, start=start))
        at += stored.shape[dim]
        shape = stored.shape
    return Stored(pieces=tuple(pieces), shape=(*shape[:dim], at, *shape[dim + 1 :]))


def _swap(stored: Stored, one: int, two: int) -> Stored:
    order = list(range(len(stored.shape)))
    order[one], order[two] = order[two], order[one]
    pieces = tuple(
        replace(
            piece,
            start=tuple(piece.start[d] for d in order),
            size=tuple(piece.size[d] for d in order),
            dims=tuple(piece.dims[d] for d in order),
        )
        for piece in stored.pieces
    )
    return Stored(pieces=pieces, shape=tuple(stored.shape[d] for d in order))


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at:])


# Reading -----------------------------------------------------------------------------------------


def fill(target: Tensor, opened: Any, piece: Piece, ranges: tuple[Runs, ...]) -> None:
    """Copies what a piece gives to some ranges of a tensor, cast to the target's dtype.

    Nothing is read into memory of its own: the file is mapped, and copied from there.

    Args:
        target: receives the values; its shape is that of the ranges put side by side.
        opened: what `files.reading` gives for the piece's file.
        piece: of the whole tensor.
        ranges: for each dimension, positions in the whole tensor.
    """
    if target.numel() == 0:
        return
    if not ranges:
        target.copy_(opened.get_tensor(piece.entry.name))
        return
    source = opened.get_slice(piece.entry.name)
    with torch.no_grad():
        for inner, outer in places(ranges):
            both = [_both(piece, dim, part) for dim, part in enumerate(outer)]
            if any(start >= stop for start, stop in both):
                continue
            into = tuple(
                slice(i.start + start - o.start, i.start + stop - o.start)
                for i, o, (start, stop) in zip(inner, outer, both, strict=True)
            )
            target[into].copy_(_read(source, piece, both))


def _both(piece: Piece, dim: int, part: slice) -> tuple[int, int]:
    """What a range and a piece share along a dim, in positions of the whole."""
    first = piece.start[dim]
    return max(part.start, first), min(part.stop, first + piece.size[dim])


def _read(source: Any, piece: Piece, both: Sequence[tuple[int, int]]) -> Tensor:
    """The values at some positions of the whole, in the dims of the whole."""
    own: dict[int, slice] = {}
    for dim, at, (start, stop) in zip(piece.dims, piece.start, both, strict=True):
        if dim is not None:
            own[dim] = slice(start - at, stop - at)
    values: Tensor = source[tuple(own[dim] for dim in sorted(own))]
    values = values.permute([dim for dim in piece.dims if dim is not None])
    for position, dim in enumerate(piece.dims):
        if dim is None:
            values = values.unsqueeze(position)
    return values
