"""The elements of the files' tensors that ranks hold, in the coordinates of the files.

Both sides of a transfer have this form: the ranks of a training plan and those of an engine.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

Range = tuple[int, int]
Box = tuple[Range, ...]
"""A range [start, stop) of each dim."""
BUCKET = 256 << 20
"""The bytes that a rank sends or receives at once in a transfer, by default."""
FP8 = "float8_e4m3fn"
Index = tuple[int, ...]
"""The indices of lists, such as the number of a layer, that a name has for its `{}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A block of a tensor of the files, and the same elements in a tensor of a rank.

    Args:
        hub, box: the tensor of the files, with `{}` for the indices of layers, and the block.
        key, local: the tensor of the rank, with the same `{}`, and the block in it.
        dims: for each dim of the rank's tensor that of the file's; None where the file has none.
    """

    hub: str
    box: Box
    key: str
    local: Box
    dims: tuple[int | None, ...]

    def part(self, box: Box) -> Box:
        """The place of a smaller block of the file's tensor in the rank's tensor."""
        ranges = []
        for (start, stop), dim in zip(self.local, self.dims, strict=True):
            if dim is None:
                ranges.append((start, stop))
            else:
                first = start + box[dim][0] - self.box[dim][0]
                ranges.append((first, first + box[dim][1] - box[dim][0]))
        return tuple(ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPatch:
    """A patch of like layers, and the ranks that hold it: replicas of each other.

    Args:
        indices: of the layers.
        ranks: in order.
        dtype: torch's name of the dtype in which the ranks hold it, or make it for a transfer.
        scales: whether it is the scales of blocks of a weight in fp8.
    """

    patch: Patch
    indices: tuple[Index, ...]
    ranks: tuple[int, ...]
    dtype: str
    scales: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTensor:
    """A tensor of some ranks, with `{}` for the indices of layers in its name.

    Args:
        ranges: of a shard, its ranges of each dim of the model's tensor.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    indices: tuple[Index, ...]
    ranks: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSide:
    """All that the ranks of one side of a transfer hold.

    Args:
        size: the number of ranks.
        held: their patches.
        tensors: their tensors.
    """

    size: int
    held: tuple[HeldPatch, ...]
    tensors: tuple[RankTensor, ...] = ()

    def tensors_of(self, rank: int) -> dict[str, RankTensor]:
        """The tensors of a rank, by their names."""
        tensors = (tensor for tensor in self.tensors if rank in tensor.ranks)
        return {tensor.key.format(*index): tensor for tensor in tensors for index in tensor.indices}


def scale_name(weight: str) -> str:
    """The name of the scales of a weight in fp8, as files of the hub have it."""
    return f"{weight}_scale_inv"


def volume(box: Box) -> int:
    """The number of elements of a block."""
    return prod(stop - start for start, stop in box)


def overlap(first: Box, other: Box) -> Box | None:
    """The common elements of two blocks; None if there are none."""
    bounds = []
    for (a, b), (c, d) in zip(first, other, strict=True):
        start, stop = max(a, c), min(b, d)
        if start >= stop:
            return None
        bounds.append((start, stop))
    return tuple(bounds)


def subtract(box: Box, block: Box) -> Iterator[Box]:
    """The rest of a box without a block in it, as disjoint boxes."""
    for dim, ((a, b), (c, d)) in enumerate(zip(box, block, strict=True)):
        for start, stop in ((a, c), (d, b)):
            if start < stop:
                yield (*block[:dim], (start, stop), *box[dim + 1 :])


def cover(boxes: Iterable[Box], box: Box) -> tuple[list[tuple[int, Box]], list[Box]]:
    """The blocks of a box that others cover, each once, with the number of the other box; and the
    rest that none covers.
    """
    blocks: list[tuple[int, Box]] = []
    rest = [box]
    for number, other in enumerate(boxes):
        if overlap(other, box) is None:
            continue
        left: list[Box] = []
        for part in rest:
            if (block := overlap(part, other)) is None:
                left.append(part)
            else:
                blocks.append((number, block))
                left += subtract(part, block)
        rest = left
        if not rest:
            break
    return blocks, rest


def group_by_hub(held: Iterable[HeldPatch]) -> Mapping[str, list[HeldPatch]]:
    """The patches by the name of the file's tensor."""
    patches: dict[str, list[HeldPatch]] = {}
    for patch in held:
        patches.setdefault(patch.patch.hub, []).append(patch)
    return patches
