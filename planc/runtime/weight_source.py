"""The weights of a run as tensors of the model's files, for the trainer side of vLLM."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, distributed, nn

from planc.ir.patches import HeldPatch
from planc.runtime.sharded_tensors import reshard
from planc.runtime.standalone import shards
from planc.runtime.transfer_messages import in_hub_order
from planc.runtime.weights.peft_files import changes


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMeta:
    """A tensor of the files; the fields are those of vLLM's `ParamMeta`.

    Attributes:
        owners: the ranks that hold a part of it, which yield it.
        mesh_shape, placements: none: the tensors of `iter_full` are complete.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...]
    mesh_shape: None = None
    placements: None = None


class WeightSource:
    """The weights of all ranks, by the methods of vLLM's `WeightSource` (0.33).

    Args:
        model: that a plan was applied to.
        held: its tensors as blocks of the full tensors of the model.
        merged: whether changes by adapters are added.
    """

    def __init__(self, model: nn.Module, held: Sequence[HeldPatch], *, merged: bool) -> None:
        self.model, self.held, self.merged = model, held, merged

    @cached_property
    def metadata(self) -> list[WeightMeta]:
        """All tensors of the model's files, equal on all ranks."""
        return [
            WeightMeta(
                name=held.patch.hub.format(*held.indices[0]),
                dtype=getattr(torch, held.dtype),
                shape=tuple(stop - start for start, stop in held.patch.box),
                owners=held.ranks,
            )
            for held in self.held
        ]

    def owned_names(self, rank: int) -> list[str]:
        """The tensors that a rank yields, in order."""
        return [meta.name for meta in self.metadata if rank in meta.owners]

    def implements_iter_full(self) -> bool:
        return True

    def implements_iter_local(self) -> bool:
        return False

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the full tensors of this rank's part of the model, one after another.

        A collective of the owners of each tensor: all of them iterate to the end. A tensor of the
        model is gathered over its own mesh once, and is kept until the next one is asked for.
        """
        reshard(self.model)
        full = _FullTensors(self.model, merged=self.merged)
        rank = distributed.get_rank()
        for meta, held in zip(self.metadata, self.held, strict=True):
            if rank in meta.owners:
                yield meta.name, full.block(held)


class _FullTensors:
    """Gathers the tensors of a model; keeps the last one."""

    def __init__(self, model: nn.Module, *, merged: bool) -> None:
        self.tensors = dict(shards.named_tensors(model))
        self.orders = shards.rank_orders(model)
        self.scalars = shards.scalars_of(model)
        self.changes = changes(model) if merged else {}
        self.last: tuple[str, Tensor] | None = None

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def block(self, held: HeldPatch) -> Tensor:
        """A tensor of the files."""
        name = held.patch.key.format(*held.indices[0])
        if self.last is None or self.last[0] != name:
            self.last = None  # one tensor at a time
            full = shards.whole_of(
                self.tensors[name], self.orders.get(name), scalar=name in self.scalars
            )
            self.last = name, full + self.changes[name]() if name in self.changes else full
        where = tuple(slice(start, stop) for start, stop in held.patch.local)
        return in_hub_order(self.last[1][where], held.patch).contiguous()
