"""Tensors that a checkpoint stores in another form than the model, and slices of them.

Only `Run.load` reads these, because transformers defines the conversions and emitted scripts
do not import it.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from safetensors import safe_open
from torch import Tensor

from planc.model.checkpoint_conversion import Recipe
from planc.model.hub_pieces import HubPiece, assemble
from planc.runtime.standalone.safetensors_files import FLOATS, StoredTensor
from planc.runtime.standalone.shards import Runs, block_in, blocks_of

Piece = tuple[StoredTensor, HubPiece]
"""A tensor of a file, and the block of the model's tensor that it is."""


class ConvertedTensor(StoredTensor):
    """A tensor of the model of this full shape, put together from pieces that cover it."""

    def __init__(self, pieces: Iterable[Piece], shape: tuple[int, ...]) -> None:
        self.pieces = tuple(pieces)
        first, _ = self.pieces[0]
        kinds = dict.fromkeys(entry.dtype for entry, _ in self.pieces)
        dtype = next((kind for kind in kinds if kind not in FLOATS), first.dtype)
        super().__init__(first.file, first.name, shape, dtype)

    def copy_to(self, target: Tensor, ranges: Sequence[Runs]) -> None:
        if not target.numel():
            return
        for file, pieces in groupby(self.pieces, key=lambda piece: piece[0].file):
            with safe_open(file, framework="pt") as opened:
                for piece in pieces:
                    _copy(target, opened, piece, ranges)


def _copy(target: Tensor, opened: Any, piece: Piece, ranges: Sequence[Runs]) -> None:
    places = zip(piece[1].start, piece[1].size, strict=True)
    window = [range(at, at + size) for at, size in places]
    for block in blocks_of(ranges):
        if (part := block_in(block, window)) is not None:
            into, of_piece = part
            target[into].copy_(_read(opened, piece, of_piece))


def _read(opened: Any, piece: Piece, of_piece: Sequence[slice]) -> Tensor:
    entry, dims = piece[0], piece[1].dims
    slices = {dim: part for dim, part in zip(dims, of_piece, strict=True) if dim is not None}
    values = entry.part(opened, [slices[dim] for dim in sorted(slices)])
    values = values.permute([dim for dim in dims if dim is not None])
    for position, dim in enumerate(dims):
        if dim is None:
            values = values.unsqueeze(position)
    return values


def assemble_tensor(recipe: Recipe, entries: Mapping[str, StoredTensor]) -> ConvertedTensor | str:
    """The tensor that a recipe assembles, or the reason why it cannot."""
    assembled = assemble(recipe, {n: entries[n].shape for part in recipe.parts for n in part})
    if isinstance(assembled, str):
        return assembled
    pieces = ((entries[piece.hub], piece) for piece in assembled.pieces)
    return ConvertedTensor(pieces, assembled.shape)
