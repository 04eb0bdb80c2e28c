"""The handle of a run: what a training script needs to know of its plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from planc.lowering.ops import Lowered
from planc.runtime import training
from planc.runtime.meshes import Meshes


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A model that a plan was applied to.

    Args:
        model: the model, changed in place.
        lowered: the operations that were run.
        digest: of the lowered plan, the same on every rank.
        meshes: one-dimensional parts of the mesh by name: `meshes["tp"]`, `meshes["dp"]` for the
            ranks that read different data, `meshes["dp_shard_cp"]` for axes flattened to one. A
            part of several axes that no operation used makes process groups when it is first
            asked for, so every rank must ask for it.
    """

    model: nn.Module
    lowered: Lowered
    digest: str
    meshes: Meshes = field(repr=False)
    text: Callable[[], str] = field(repr=False)

    @property
    def mesh(self) -> DeviceMesh:
        """The whole device mesh, axes outermost first."""
        return self.meshes.root

    def submesh(self, *axes: str) -> DeviceMesh:
        """One dimension of the mesh: an axis, or several flattened to one, outermost first.

        Several axes make a process group, so every rank must ask for them.

        Raises:
            KeyError: the mesh has no such axis.
        """
        return self.meshes.part(*axes)

    @property
    def data_mesh(self) -> DeviceMesh | None:
        """The ranks over which gradients are averaged, as one dimension; None without any."""
        return self.meshes.part(*self.lowered.data) if self.lowered.data else None

    @property
    def data_size(self) -> int:
        """The number of different batches a step reads: `num_replicas` of a sampler."""
        return self.lowered.axis_size(*self.lowered.data)

    @property
    def data_rank(self) -> int:
        """Which of them this rank reads: `rank` of a sampler."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None  # the mesh holds every rank
        rank = 0
        for axis, position in zip(self.lowered.axes, coordinate, strict=True):
            if axis.name in self.lowered.data:
                rank = rank * axis.size + position
        return rank

    def describe(self) -> str:
        """The lowered plan, as `planc lower` prints it."""
        return self.text()

    # training: planc/runtime/training.py

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside accumulate and send no gradients; the next one after sends all."""
        return training.no_sync(self.model)

    def unshard(self) -> AbstractContextManager[None]:
        """Keeps all parameters gathered, for inference: forward passes inside gather nothing."""
        return training.unshard(self.model)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` over every mesh: gives the whole model's norm."""
        return training.clip_grad_norm(
            self.model, max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def full_state_dict(self, *, every_rank: bool = False) -> dict[str, Tensor]:
        """The whole weights by their first names, on rank 0 or on all; every rank calls it."""
        return training.full_state_dict(self.model, every_rank=every_rank)
