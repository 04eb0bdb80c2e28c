"""Tensors that a checkpoint stores in another form than the model, and slices of them.

Only `Run.load` reads these, because transformers defines the conversions and emitted scripts
do not import it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from safetensors import safe_open
from torch import Tensor

from planc.model.checkpoint_conversion import Recipe
from planc.runtime.standalone.safetensors_files import FLOATS, StoredTensor
from planc.runtime.standalone.shards import Runs, block_in, blocks_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A tensor of a file that is a block of a tensor of the model, at `start`, of a size by its
    dims.

    Args:
        dims: for each dim of the model's tensor, the dim of the file's tensor; None if the file's
            tensor lacks it, and then the block has size 1.
    """

    entry: StoredTensor
    start: tuple[int, ...]
    size: tuple[int, ...]
    dims: tuple[int | None, ...]


class ConvertedTensor(StoredTensor):
    """A tensor of the model of this full shape, put together from pieces that cover it."""

    def __init__(self, pieces: Iterable[Piece], shape: tuple[int, ...]) -> None:
        self.pieces = tuple(pieces)
        first = self.pieces[0].entry
        kinds = dict.fromkeys(piece.entry.dtype for piece in self.pieces)
        dtype = next((kind for kind in kinds if kind not in FLOATS), first.dtype)
        super().__init__(first.file, first.name, shape, dtype)

    def copy_to(self, target: Tensor, ranges: Sequence[Runs]) -> None:
        if not target.numel():
            return
        for file, pieces in groupby(self.pieces, key=lambda piece: piece.entry.file):
            with safe_open(file, framework="pt") as opened:
                for piece in pieces:
                    _copy(target, opened, piece, ranges)


def _copy(target: Tensor, opened: Any, piece: Piece, ranges: Sequence[Runs]) -> None:
    window = [range(at, at + size) for at, size in zip(piece.start, piece.size, strict=True)]
    for block in blocks_of(ranges):
        if (part := block_in(block, window)) is not None:
            into, of_piece = part
            target[into].copy_(_read(opened, piece, of_piece))


def _read(opened: Any, piece: Piece, of_piece: Sequence[slice]) -> Tensor:
    own = {dim: part for dim, part in zip(piece.dims, of_piece, strict=True) if dim is not None}
    values = piece.entry.part(opened, [own[dim] for dim in sorted(own)])
    values = values.permute([dim for dim in piece.dims if dim is not None])
    for position, dim in enumerate(piece.dims):
        if dim is None:
            values = values.unsqueeze(position)
    return values


# Conversions -------------------------------------------------------------------------------------


def _one(entry: StoredTensor) -> ConvertedTensor:
    dims = tuple(range(len(entry.shape)))
    piece = Piece(entry=entry, start=(0,) * len(dims), size=entry.shape, dims=dims)
    return ConvertedTensor((piece,), entry.shape)


def made(recipe: Recipe, entries: Mapping[str, StoredTensor]) -> ConvertedTensor | str:
    """The tensor that a recipe assembles, or the reason why it cannot."""
    parts = [[_one(entries[name]) for name in names] for names in recipe.parts]
    for name, first, second in recipe.steps:
        match name:
            case "stack":
                if any(len({s.shape for s in part}) > 1 for part in parts):
                    return "its parts have different shapes"
                parts = [[_stack(part, first)] for part in parts]
            case "join":
                several = [stored for part in parts for stored in part]
                rests = {(*s.shape[:first], *s.shape[first + 1 :]) for s in several}
                if len(rests) > 1:
                    return "the shapes of its parts cannot be concatenated"
                parts = [[_join(several, first)]]
            case "swap":
                parts = [[_swap(s, first, second) for s in part] for part in parts]
            case _:
                return f"planc does not know the conversion `{name}`"
    if len(parts) > 1 or len(parts[0]) > 1:
        names = [s.pieces[0].entry.name for part in parts for s in part]
        return f"several tensors match it: {', '.join(names[:3])}"
    return parts[0][0]


def _stack(several: Sequence[ConvertedTensor], dim: int) -> ConvertedTensor:
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
    return ConvertedTensor(pieces, _with(several[0].shape, dim, len(several)))


def _join(several: Iterable[ConvertedTensor], dim: int) -> ConvertedTensor:
    pieces: list[Piece] = []
    at = 0
    shape: tuple[int, ...] = ()
    for stored in several:
        for piece in stored.pieces:
            start = (*piece.start[:dim], piece.start[dim] + at, *piece.start[dim + 1 :])
            pieces.append(replace(piece, start=start))
        at += stored.shape[dim]
        shape = stored.shape
    return ConvertedTensor(pieces, (*shape[:dim], at, *shape[dim + 1 :]))


def _swap(stored: ConvertedTensor, one: int, two: int) -> ConvertedTensor:
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
    return ConvertedTensor(pieces, tuple(stored.shape[d] for d in order))


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at:])
