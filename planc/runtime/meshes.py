"""The device mesh of a run, its submeshes, and the default process group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from weakref import WeakValueDictionary

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planc.diagnostics.diagnostic import one_of
from planc.ir.mesh_axes import DATA, axes_of
from planc.ops.call import MeshOf, Shared, mesh_source
from planc.ops.lowered import Lowered, Stage
from planc.ops.uneven_groups import uneven_groups
from planc.runtime.calls import Values
from planc.runtime.end_of_process import wait_for_threads_at_exit
from planc.runtime.launchers import require_known_to_torch
from planc.runtime.standalone.collectives import all_gather


def device_of(model: nn.Module, asked: str | None) -> str:
    """The type of the device that a model will run on.

    It is `asked`; else CUDA if the process group uses NCCL; else the model's device; for a model
    on meta, CUDA if it is available and the process group does not use gloo, else the CPU.
    """
    if asked:
        return asked
    backend = distributed.get_backend() if distributed.is_initialized() else ""
    if backend == "nccl":
        return "cuda"
    first = next(model.parameters(), None)
    kind = first.device.type if first is not None else "meta"
    if kind != "meta":
        return kind
    return "cuda" if torch.cuda.is_available() and backend != "gloo" else "cpu"


@contextmanager
def no_group_after_an_error() -> Iterator[None]:
    """Destroys the process group that was started in it, if it ends with an error."""
    before = distributed.is_initialized()
    try:
        yield
    except Exception:
        if not before and distributed.is_initialized():
            distributed.destroy_process_group()
        raise


def start(device_type: str) -> None:
    """Starts the default process group if there is none: torchrun's, or a group of one rank."""
    wait_for_threads_at_exit()
    if distributed.is_initialized():
        return
    local = os.environ.get("LOCAL_RANK")
    if device_type == "cuda" and local is not None:
        torch.cuda.set_device(int(local) % max(torch.cuda.device_count(), 1))
    require_known_to_torch()
    backend = distributed.get_default_backend_for_device(device_type)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        distributed.init_process_group(backend)
    else:
        store = distributed.HashStore()
        distributed.init_process_group(backend, rank=0, world_size=1, store=store)


@dataclass(slots=True, weakref_slot=True)
class SharedMesh:
    """A mesh, its default process group, and the submeshes that were requested."""

    group: distributed.ProcessGroup | None
    root: DeviceMesh
    parts: dict[Shared, DeviceMesh] = field(default_factory=dict)


_MADE: WeakValueDictionary[tuple[tuple[tuple[str, int], ...], str], SharedMesh] = (
    WeakValueDictionary()
)
"""Weak, because a mesh holds process groups, which must be freed before the interpreter exits."""


def mesh_in_use(lowered: Lowered, device_type: str) -> SharedMesh | None:
    """The mesh of an earlier plan with these axes, while something on this rank uses it.

    A process group keeps its threads and buffers until it is destroyed. Without sharing, a teacher
    and a student in one process would have two sets of them. Each rank's garbage collector decides
    when a mesh that nothing uses is freed, so ranks share a mesh only if all of them have it.
    """
    shared = _MADE.get((_sizes(lowered), device_type))
    return shared if shared is not None and shared.group is distributed.group.WORLD else None


def _create_mesh(lowered: Lowered, device_type: str) -> SharedMesh:
    sizes = _sizes(lowered)
    root = init_device_mesh(
        device_type, tuple(s for _, s in sizes), mesh_dim_names=tuple(n for n, _ in sizes)
    )
    # init_device_mesh starts a process group if there is none
    shared = _MADE[sizes, device_type] = SharedMesh(distributed.group.WORLD, root)
    return shared


def _sizes(lowered: Lowered) -> tuple[tuple[str, int], ...]:
    return tuple((axis.name, axis.size) for axis in lowered.axes)


class Meshes:
    """The mesh of a lowered plan, and its submeshes.

    The first request for a submesh of several axes creates process groups, so every rank must make
    it. The one that every training loop needs, `dp`, is created at the start.

    Args:
        shared: the mesh of an earlier plan, which all ranks have; by default a new one is made.
    """

    def __init__(
        self, lowered: Lowered, device_type: str, shared: SharedMesh | None = None
    ) -> None:
        self._sizes = dict(_sizes(lowered))
        shared_mesh = shared or _create_mesh(lowered, device_type)
        self._made = shared_mesh
        self.root = shared_mesh.root
        self._values = Values({"mesh": shared_mesh.root}, {}, self.mesh_of, shared_mesh.parts)
        self._data, self._averaged = lowered.data, lowered.averaged_axes
        self._context = lowered.context()
        if lowered.data:
            self.part(*lowered.data)
        for value in uneven_groups(lowered, self._context):
            self._values.evaluate(value)
        pipeline = lowered.pipeline
        place = self.root.get_local_rank(pipeline.axis) if pipeline else 0
        self.stage: Stage = lowered.stages[place]

    def __getitem__(self, name: str) -> DeviceMesh:
        """One dimension by name: an axis, `dp` for the data axes, `loss` for those over which
        gradients are averaged, a derived axis such as `dp_cp` or `ep_shard`, or axes joined by `_`.

        `dp_shard_cp` is `dp_shard` and `cp` flattened to one dimension.

        Raises:
            KeyError: the mesh has no such axes.
        """
        if name in self._sizes:
            return self.root[name]
        if name in self._context.experts:
            return self.mesh_of(MeshOf((name,)))
        if name == DATA and self._data:
            return self.part(*self._data)
        if name == "loss" and self._averaged:
            return self.part(*self._averaged)
        if derived := axes_of(name, self._sizes):
            return self.part(*derived)
        for count in range(2, len(self._sizes) + 1):
            for axes in combinations(self._sizes, count):
                if "_".join(axes) == name:
                    return self.part(*axes)
        raise KeyError(f"the mesh has no {name!r}; its axes are {one_of(self._sizes, last='and')}")

    def part(self, *axes: str) -> DeviceMesh:
        """One dimension: an axis, or several flattened to one, outermost first.

        Raises:
            KeyError: the mesh has no such axis.
        """
        unknown = [a for a in axes if a not in self._sizes]
        if unknown or not axes:
            known = one_of(self._sizes, last="and")
            raise KeyError(f"the mesh has no axis {one_of(unknown)!r}; its axes are {known}")
        return self.mesh_of(MeshOf(axes))

    def mesh_of(self, mesh: MeshOf) -> DeviceMesh:
        """The mesh of some axes, created on the first request."""
        device_mesh: DeviceMesh = self._values.evaluate(mesh_source(mesh, self._context))
        return device_mesh


def rows_of(local_rows: Tensor, mesh: DeviceMesh) -> list[list[int]]:
    """A few integers of every rank of a mesh, by rank.

    One all-gather, and a wait for the device.

    Args:
        local_rows: [n], of one dtype and length on all ranks, on the device of the mesh.
    """
    gathered = local_rows.new_empty(mesh.size() * local_rows.numel())
    all_gather(gathered, local_rows, group=mesh.get_group())
    return gathered.view(mesh.size(), -1).tolist()  # type: ignore[no-any-return]
