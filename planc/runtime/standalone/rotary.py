"""Rotary embeddings that choose their frequencies by the longest position of a pass."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

LONGEST = "_longest_position"
"""The attribute of a model for its `LongestPosition`."""


class LongestPosition:
    """Makes rotary embeddings see the longest position of all ranks and microbatches.

    transformers takes the largest element of `position_ids`. An additional position at
    the end of each row has that of all ranks, and its output is removed.

    Passes without gradients see the rows of their data rank, because it may make them
    by itself, such as a sample that it generates; `of_all_ranks` includes them.

    Args:
        model: of transformers.
        data: the ranks that read different rows; None if there is one.
        parts: the ranks that have parts of each sequence; None if there is one.
    """

    least: Tensor | None = None
    """The longest position of the batch of which a pass is a microbatch."""

    def __init__(
        self, model: nn.Module, data: DeviceMesh | None, parts: DeviceMesh | None
    ) -> None:
        self.data, self.parts = data, parts
        self.always = self.added = False
        for module in model.modules():
            if depends_on_length(module):
                module.register_forward_pre_hook(self._add_position, with_kwargs=True)
                module.register_forward_hook(self._remove_position)

    @contextmanager
    def of_all_ranks(self) -> Iterator[None]:
        """All ranks make the passes inside, with and without gradients."""
        before, self.always = self.always, True
        try:
            yield
        finally:
            self.always = before

    def meshes(self) -> list[DeviceMesh]:
        """The ranks that this pass shares the longest position with."""
        data = self.data if self.always or torch.is_grad_enabled() else None
        return [mesh for mesh in (data, self.parts) if mesh is not None]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _add_position(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        meshes = self.meshes()
        self.added = bool(meshes) or self.least is not None
        if not self.added:
            return None
        named = "position_ids" in kwargs
        positions: Tensor = kwargs["position_ids"] if named else args[1]
        longest = positions.max()
        if self.least is not None:
            longest = torch.maximum(longest, self.least.to(longest.device))
        for mesh in meshes:
            largest = distributed.ReduceOp.MAX
            distributed.all_reduce(longest, largest, group=mesh.get_group())
        last = longest.expand(*positions.shape[:-1], 1)
        positions = torch.cat([positions, last], -1)
        if named:
            return args, {**kwargs, "position_ids": positions}
        return (args[0], positions, *args[2:]), {**kwargs}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _remove_position(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if not self.added:
            return None
        if isinstance(output, Tensor):
            return output[..., :-1, :].contiguous()
        return tuple(each[..., :-1, :].contiguous() for each in output)


def depends_on_length(module: nn.Module) -> bool:
    """Whether a module is such a rotary embedding, for all or some types of layers."""
    kinds = getattr(module, "rope_type", None)
    values = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    return any("dynamic" in str(kind) or kind == "longrope" for kind in values)


def use_longest_position(
    model: nn.Module, data: DeviceMesh | None, parts: DeviceMesh | None
) -> None:
    """Arguments as of `LongestPosition`."""
    setattr(model, LONGEST, LongestPosition(model, data, parts))
