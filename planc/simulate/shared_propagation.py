"""Ranks that are threads of one process propagate the sharding of each operation once for all.

DTensor derives the placements of an operation's output, and those that it needs of the inputs, from
the operation, the placements and global shapes of its inputs, and the shape of the mesh. Every rank
comes to the same result. Processes work it out one by one, and torch keeps it for each thread; that
is a third of a simulation, so here the first rank's result serves all. What may differ between
ranks (sizes of local shards, masks of an embedding) is not shared.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from planc.compat.dtensor import DTensorSpec, OpSchema, OutputSharding, _StridedShard

_STATELESS = {Shard, Replicate, Partial, _StridedShard}
_PLAIN = {
    *(type(None), bool, int, float, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}


class _PrivateError(Exception):
    """A rank's own value, which is not shared."""


@contextmanager
def shared_propagation() -> Iterator[None]:
    """Makes all threads use what one of them has propagated."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    name = "propagate_op_sharding_non_cached"
    with mock.patch.object(propagator, name, _Shared(getattr(propagator, name))):
        yield


class _Shared:
    """torch's function, whose results are kept for other ranks."""

    def __init__(self, propagate: Callable[[OpSchema], OutputSharding]) -> None:
        self._propagate = propagate
        self._known: dict[object, tuple[OutputSharding, list[DeviceMesh]]] = {}
        # torch's fake tensors are not safe for threads; one operation may be decomposed into others
        self._one_at_a_time = threading.RLock()

    def __call__(self, schema: OpSchema) -> OutputSharding:
        meshes: list[DeviceMesh] = []
        try:
            key = _key([schema.op, schema.args_schema, schema.kwargs_schema], meshes)
        except _PrivateError:
            with self._one_at_a_time:
                return self._propagate(schema)
        key = (key, *((m.device_type, m.shape, m.mesh_dim_names) for m in meshes))
        with self._one_at_a_time:
            if key not in self._known:
                self._known[key] = self._propagate(schema), meshes
            sharding, theirs = self._known[key]
            try:
                return _on_meshes(dict(zip(theirs, meshes, strict=True)), sharding)
            except _PrivateError:
                return sharding if theirs is meshes else self._propagate(schema)


def _key(value: Any, meshes: list[DeviceMesh]) -> object:
    """A value without its meshes, which are numbered and put into `meshes`."""
    match value:
        case DTensorSpec():
            if value.mesh not in meshes:
                meshes.append(value.mesh)
            order = _placement_fields(value)
            return meshes.index(value.mesh), value.placements, value.tensor_meta, *order.values()
        case list() | tuple():
            return type(value), *(_key(item, meshes) for item in value)
        case dict():
            return dict, *((name, _key(item, meshes)) for name, item in value.items())
        case torch._ops.OpOverload():
            return value
    if type(value) not in _PLAIN:
        raise _PrivateError
    return type(value), value


def _placement_fields(spec: DTensorSpec) -> dict[str, Any]:
    """The order of shards, which a spec with strided shards derives itself."""
    if any(type(placement) not in _STATELESS for placement in spec.placements):
        raise _PrivateError
    strided = spec.use_strided_shard_as_shard_order
    return {
        "shard_order": None if strided else spec.shard_order,
        "use_strided_shard_as_shard_order": strided,
    }


def _on_meshes(meshes: Mapping[DeviceMesh, DeviceMesh], value: Any) -> Any:
    """A propagated value on the meshes of another rank."""
    match value:
        case OutputSharding():
            output, inputs = _on_meshes(meshes, [value.output_spec, value.redistribute_schema])
            sized = value.use_val_from_redistribute_schema  # with sizes of local shards
            if sized and not all(map(_even, [output, *inputs.args_spec])):
                raise _PrivateError
            return OutputSharding(output, inputs, value.needs_redistribute, sized)
        case OpSchema():
            given, named = _on_meshes(meshes, [value.args_schema, value.kwargs_schema])
            return OpSchema(value.op, given, named, value.schema_info)
        case DTensorSpec():
            if value.mesh not in meshes:
                raise _PrivateError
            mesh, order = meshes[value.mesh], _placement_fields(value)
            return DTensorSpec(mesh, value.placements, value.tensor_meta, **order)
        case list() | tuple():
            return type(value)([_on_meshes(meshes, item) for item in value])
        case dict():
            return {name: _on_meshes(meshes, item) for name, item in value.items()}
    return value


def _even(spec: object) -> bool:
    """Whether the shards of all ranks have the same size."""
    if not isinstance(spec, DTensorSpec) or spec.tensor_meta is None:
        return False
    shards = (p for p in spec.placements if isinstance(p, Shard | _StridedShard))
    return all(spec.tensor_meta.shape[p.dim] % spec.mesh.size() == 0 for p in shards)
