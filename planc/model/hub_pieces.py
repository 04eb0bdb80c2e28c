"""The pieces that a tensor of a model consists of: blocks that are tensors of the hub's files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from planc.model.checkpoint_conversion import Recipe

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPiece:
    """A tensor of the files that is a block of a tensor of the model.

    Args:
        hub: its name in the files.
        start, size: the block, by the dims of the model's tensor.
        dims: for each dim of the model's tensor, the dim of the file's tensor; None if the file's
            tensor lacks it, and then the block has size 1.
    """

    hub: str
    start: Shape
    size: Shape
    dims: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A tensor of the model of this shape, and the pieces that cover it."""

    pieces: tuple[HubPiece, ...]
    shape: Shape


def whole_tensor(name: str, shape: Shape) -> Assembled:
    """A tensor that the files store as the model has it."""
    dims = tuple(range(len(shape)))
    piece = HubPiece(hub=name, start=(0,) * len(dims), size=shape, dims=dims)
    return Assembled(pieces=(piece,), shape=shape)


def assemble(recipe: Recipe, shapes: Mapping[str, Shape]) -> Assembled | str:
    """The tensor that a recipe makes of tensors of these shapes, or the reason why it cannot."""
    parts = [[whole_tensor(name, shapes[name]) for name in names] for names in recipe.parts]
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
        names = [s.pieces[0].hub for part in parts for s in part]
        return f"several tensors match it: {', '.join(names[:3])}"
    return parts[0][0]


def _stack(several: Sequence[Assembled], dim: int) -> Assembled:
    pieces: list[HubPiece] = []
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
    return Assembled(pieces=tuple(pieces), shape=_with(several[0].shape, dim, len(several)))


def _join(several: Iterable[Assembled], dim: int) -> Assembled:
    pieces: list[HubPiece] = []
    at = 0
    shape: Shape = ()
    for stored in several:
        for piece in stored.pieces:
            start = (*piece.start[:dim], piece.start[dim] + at, *piece.start[dim + 1 :])
            pieces.append(replace(piece, start=start))
        at += stored.shape[dim]
        shape = stored.shape
    return Assembled(pieces=tuple(pieces), shape=(*shape[:dim], at, *shape[dim + 1 :]))


def _swap(stored: Assembled, first: int, second: int) -> Assembled:
    order = list(range(len(stored.shape)))
    order[first], order[second] = order[second], order[first]
    pieces = tuple(
        replace(
            piece,
            start=tuple(piece.start[d] for d in order),
            size=tuple(piece.size[d] for d in order),
            dims=tuple(piece.dims[d] for d in order),
        )
        for piece in stored.pieces
    )
    return Assembled(pieces=pieces, shape=tuple(stored.shape[d] for d in order))


def _with(values: Shape, at: int, value: int) -> Shape:
    return (*values[:at], value, *values[at:])
