"""Shards as blocks for torch's distributed checkpoint, where torch would misplace them.

torch writes and reads a DTensor as one block at the offset that its placement gives. A
shard with several ranges of the full tensor, or with a wrong offset in torch, is passed
as blocks with offsets: no rank ever holds the full tensor.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from planc.runtime.standalone.shards import (
    Order,
    blocks_of,
    irregular,
    part_of,
    slices_of,
)


class Pieces(torch.Tensor):
    """The blocks of one rank's shard, with the full shape, to save and load.

    `part` is the local shard, `blocks` are slices of it by their offsets in the full
    tensor; `like` has the placements, `order` the order of storage. Source:
    `_Checkpointable` in torch.distributed._checkpointable, which DTensor implements.
    """

    part: Tensor
    blocks: dict[tuple[int, ...], tuple[slice, ...]]
    like: Tensor
    order: Order | None

    @staticmethod
    def from_tensor(
        tensor: Tensor, order: Order | None, dtype: torch.dtype | None = None
    ) -> Pieces:
        """The pieces of a DTensor.

        Args:
            tensor: the DTensor; blocks that are read are written into it.
            order: the order in which it is stored, if that is not the model's.
            dtype: None to use the tensor's memory, else new memory of that dtype.
        """
        part = part_of(tensor)
        part = part if dtype is None else torch.empty_like(part, dtype=dtype)
        blocks = {
            tuple(s.start for s in outer): inner
            for inner, outer in blocks_of(slices_of(tensor, order))
            if all(s.stop > s.start for s in outer)
        }
        return Pieces._create(part, blocks, tensor, order)

    @staticmethod
    def _create(part: Tensor, blocks: Any, like: Tensor, order: Order | None) -> Pieces:
        how = {"dtype": part.dtype, "device": part.device}
        shape = tuple(like.shape)
        pieces: Pieces = torch.Tensor._make_wrapper_subclass(Pieces, shape, **how)
        pieces.part, pieces.blocks, pieces.like, pieces.order = (
            part,
            blocks,
            like,
            order,
        )
        return pieces

    def with_part(self, part: Tensor) -> Pieces:
        """The same blocks in other memory, of any device."""
        return Pieces._create(part, self.blocks, self.like, self.order)

    def __create_write_items__(self, fqn: str, _value: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.part)
        chunks = self.__create_chunk_list__()
        data = [TensorWriteData(chunk, properties, self.size()) for chunk in chunks]
        places = [MetadataIndex(fqn, chunk.offsets) for chunk in chunks]
        kind = WriteItemType.SHARD
        return [
            WriteItem(i, kind, tensor_data=d) for i, d in zip(places, data, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(
                torch.Size(at), torch.Size([s.stop - s.start for s in inner])
            )
            for at, inner in self.blocks.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.part[self.blocks[tuple(index.offset or ())]]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, _types: Any, args: Any = (), _kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of the pieces of a tensor")


def storable(tensor: Tensor, order: Order | None) -> Tensor:
    """A tensor for torch's checkpoints: as blocks if torch would misplace shards.

    torchao's weights for products in mxfp8 are wrappers of tensors, which torch would
    write by pickling them.
    """
    if irregular(tensor, order):
        return Pieces.from_tensor(tensor, order)
    tensor = tensor.detach()
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not isinstance(inner := getattr(local, "_data", None), Tensor):
        return tensor
    if not isinstance(tensor, DTensor):
        return inner
    mesh, placements = tensor.device_mesh, tensor.placements
    sizes = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(inner, mesh, placements, run_check=False, **sizes)
