"""A shard as torch's distributed checkpoint takes it where its own notion of places is wrong.

torch writes and reads a DTensor as one block at the place that its placement gives. A shard that
lies in several ranges of the whole, or elsewhere than torch thinks, is given to it as blocks, each
with its own place: no rank ever holds the whole tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from planc.runtime.sharded_tensors import Order, local, places, runs


class Pieces(torch.Tensor):  # type: ignore[misc]
    """The blocks of one rank's shard, in the shape of the whole; it can be saved and loaded alone.

    Source: `_Checkpointable` in torch.distributed._checkpointable, which DTensor implements too.
    """

    _part: Tensor
    _blocks: dict[tuple[int, ...], tuple[slice, ...]]

    @staticmethod
    def of(tensor: Tensor, order: Order | None, dtype: torch.dtype | None = None) -> Pieces:
        """The pieces of a DTensor.

        Args:
            tensor: what this rank holds; blocks that are read are written into it.
            order: in which it is held, where that is not the model's own.
            dtype: None for its own memory; else fresh memory of that dtype.
        """
        part = local(tensor)
        part = part if dtype is None else torch.empty_like(part, dtype=dtype)
        made: Any = torch.Tensor._make_wrapper_subclass(
            Pieces, tuple(tensor.shape), dtype=part.dtype, device=part.device
        )
        made._part = part
        made._blocks = {}
        for inner, outer in places(runs(tensor, order)):
            if all(s.stop > s.start for s in outer):
                made._blocks[tuple(s.start for s in outer)] = inner
        return made  # type: ignore[no-any-return]

    @property
    def part(self) -> Tensor:
        """What this rank holds."""
        return self._part

    def __create_write_items__(self, fqn: str, _value: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._part)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(
                offsets=torch.Size(offset), sizes=torch.Size(s.stop - s.start for s in inner)
            )
            for offset, inner in self._blocks.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._part[self._blocks[tuple(index.offset or ())]]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of the pieces of a tensor")
