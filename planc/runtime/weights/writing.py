"""A torch.distributed.checkpoint in which every rank knows from placements what it writes.

torch's planner sends the shards of all ranks to rank 0, which plans for all. Here ranks exchange a
digest of what they hold and their coordinates in its meshes; who writes which shard follows from
these by arithmetic, and so does the metadata, which rank 0 writes as torch does.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planc.compat.checkpoint_files import _StorageInfo, _StoragePrefix, flatten_state_dict
from planc.runtime.garbage import without_collection
from planc.runtime.preconditions import of_all_ranks
from planc.runtime.standalone import shards
from planc.runtime.standalone.dcp_chunks import Pieces

Coordinate = tuple[int, ...]
Chunk = tuple[Coordinate, Coordinate]
"""(offsets, sizes) in the full tensor."""
Told = tuple[str, list[Coordinate | None], list[str], bool]
"""A digest of what is shared, the coordinates in each mesh, the keys of what only some ranks have,
and whether a shard does not follow from placements."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor or an object of a checkpoint, as all ranks of a class hold it.

    Attributes:
        key, path: in the flattened state, and in the nested one.
        shape, dtype: of the full tensor; None for an object.
        mesh: which mesh of its ranks it is on, by number; None for what each rank has whole.
        sizes, placements: of that mesh, and on it.
        order: in which ranks store it, if that is not the model's.
    """

    key: str
    path: tuple[Any, ...]
    shape: Coordinate | None = None
    dtype: torch.dtype | None = None
    mesh: int | None = None
    sizes: Coordinate = ()
    placements: tuple[Any, ...] = ()
    order: Any = None

    @property
    def bytes(self) -> int:
        """The size of the full tensor in bytes; 0 for an object."""
        if self.shape is None or self.dtype is None:
            return 0
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def split(self) -> Coordinate:
        """The dims of the mesh that shard it."""
        return tuple(i for i, placement in enumerate(self.placements) if shards.splits(placement))


@dataclass(frozen=True, slots=True)
class Class:
    """Ranks that hold the same: those of a pipeline stage, or all.

    Attributes:
        ranks: with the coordinates of each in the meshes of what is stored.
        stored: in one order on all of them.
    """

    ranks: Mapping[int, Sequence[Coordinate | None]]
    stored: Sequence[Stored]


@dataclass(frozen=True, slots=True)
class RankFile:
    """The contents of the file that a rank has written: objects, then tensors.

    Attributes:
        objects: (offset, bytes) of each object by its key.
        start, end: of the tensors.
        lengths: in bytes of a tensor's record, by its dtype and sizes.
        own: the keys of objects that only some ranks have, with their paths.
    """

    objects: Mapping[str, tuple[int, int]]
    start: int
    end: int
    lengths: Mapping[tuple[torch.dtype, Coordinate], int]
    own: Mapping[str, tuple[Any, ...]]


class HeldState:
    """The local part of a state to save, and the meshes of its tensors.

    Attributes:
        shared: what all ranks of a class hold.
        own: the objects that other ranks may not have, by key.
        irregular: whether a shard does not follow from placements.
        told: what the other ranks hear of it.
    """

    def __init__(self, state: Mapping[str, Any], own: str) -> None:
        self.flat, paths = flatten_state_dict(dict(state))
        self.own = {key: paths[key] for key in self.flat if key.startswith(own)}
        self.meshes: list[DeviceMesh] = []
        self.irregular = False
        rest = ((key, value) for key, value in self.flat.items() if key not in self.own)
        self.shared = [self._entry(key, paths[key], value) for key, value in rest]
        coordinates_of_meshes = (mesh.get_coordinate() for mesh in self.meshes)
        coordinates = [None if at is None else tuple(at) for at in coordinates_of_meshes]
        digest = hashlib.sha256(repr(self.shared).encode()).hexdigest()
        self.told: Told = (digest, coordinates, [*self.own], self.irregular)

    def _entry(self, key: str, path: Any, value: Any) -> Stored:
        if not isinstance(value, Tensor):
            return Stored(key, path)
        like, order = (value.like, value.order) if isinstance(value, Pieces) else (value, None)
        stored = Stored(key, path, tuple(value.shape), value.dtype, order=order)
        if not isinstance(like, DTensor):
            return stored
        self.irregular |= shards.chunk_positions(like) is not None
        mesh = like.device_mesh
        if mesh not in self.meshes:
            self.meshes.append(mesh)
        number = self.meshes.index(mesh)
        return replace(
            stored, mesh=number, sizes=tuple(mesh.shape), placements=tuple(like.placements)
        )


def write(state: Mapping[str, Any], folder: Path, own: str, group: Any = None) -> None:
    """Writes a state as `torch.distributed.checkpoint.save` does; every rank calls it.

    Args:
        state: nested, as torch's function takes it.
        folder: an empty one, which all ranks see.
        own: the start of the keys of objects that other ranks may not have.
        group: a process group of all ranks; the default one if None.

    Raises:
        CheckpointException: a rank has failed; on every rank.
    """
    held = on_every_rank(partial(HeldState, state, own), group)
    told = of_all_ranks(held.told, group)
    classes = classes_of(held, told, group)
    if classes is None:
        checkpoint.save(dict(state), checkpoint_id=folder, process_group=group)
        return
    me = distributed.get_rank(group)
    writer = checkpoint.FileSystemWriter(folder)
    report = on_every_rank(partial(write_file, held, writer, classes, told, me), group)
    reports: Any = [None] * len(told) if me == 0 else None
    distributed.gather_object(report, reports, group=group, group_dst=0)

    def finish() -> None:
        if reports is not None:
            writer.finish(*describe_files(classes, reports))

    on_every_rank(finish, group)


def on_every_rank(work: Any, group: Any) -> Any:
    """The result of a rank's own work.

    Raises:
        CheckpointException: it has failed on a rank; with the errors of all, on every rank.
    """
    result = failed = None
    try:
        result = work()
    except Exception as error:  # such as a full disk
        failed = error
    told = enumerate(of_all_ranks(failed, group))
    errors: dict[int, Any] = {rank: (error, []) for rank, error in told if error is not None}
    if errors:
        raise checkpoint.CheckpointException("write", errors)
    return result


def classes_of(held: HeldState, told: Sequence[Told], group: Any) -> list[Class] | None:
    """The classes of ranks, by their first rank; None where shards do not follow from placements:
    a library packs them, or the ranks of a mesh hold different things.
    """
    members: dict[str, list[int]] = {}
    for rank, (digest, *_) in enumerate(told):
        members.setdefault(digest, []).append(rank)
    mine = members[held.told[0]]
    closed = all({*mesh.mesh.flatten().tolist()} <= {*mine} for mesh in held.meshes)
    if not all(of_all_ranks(closed, group)) or any(irregular for *_, irregular in told):
        return None
    stored: list[Any] = [held.shared] * len(told)
    if len(members) > 1:
        first = mine[0] == distributed.get_rank(group)
        stored = of_all_ranks(held.shared if first else None, group)
    return [*join_classes(members.values(), stored, told)]


def join_classes(
    members: Iterable[Sequence[int]], stored: Sequence[Any], told: Sequence[Told]
) -> Iterator[Class]:
    """Classes of ranks; what several classes hold is of the first one."""
    known = set[str]()
    for ranks in members:
        new = [entry for entry in stored[ranks[0]] if entry.key not in known]
        known |= {entry.key for entry in new}
        yield Class({rank: told[rank][1] for rank in ranks}, new)


# Who writes what ----------------------------------------------------------------------------------


def writers(ranks: Class) -> Iterator[tuple[Stored, Mapping[Coordinate, int]]]:
    """Everything of a class in the order of its files, with the rank that writes each shard, by its
    place along the dims that shard it: replicas take turns by bytes.
    """
    groups: dict[Any, dict[Coordinate, list[int]]] = {}
    loads: dict[Any, list[int]] = {}
    assignments = []
    for entry in ranks.stored:
        kind = entry.mesh, entry.split
        if kind not in groups:
            groups[kind] = {}
            for rank, coordinates in ranks.ranks.items():
                at = () if entry.mesh is None else coordinates[entry.mesh]
                if at is not None:
                    groups[kind].setdefault(tuple(at[i] for i in entry.split), []).append(rank)
            loads[kind] = [0] * min(map(len, groups[kind].values()))
        load = loads[kind]
        turn = load.index(min(load))
        load[turn] += max(entry.bytes, 1024)
        assignments.append((entry, kind, turn))
    by_size = sorted(assignments, key=lambda each: each[0].bytes)  # as torch writes them
    for entry, kind, turn in by_size:
        yield entry, {at: holders[turn] for at, holders in groups[kind].items()}


def chunks_at(entry: Stored, at: Coordinate) -> list[Chunk]:
    """The chunks of a shard that are not empty.

    Args:
        at: the place along the dims that shard it.
    """
    assert entry.shape is not None
    coordinate = [0] * len(entry.sizes)
    for dim, place in zip(entry.split, at, strict=True):
        coordinate[dim] = place
    positions = shards.positions_of(entry.shape, entry.sizes, tuple(coordinate), entry.placements)
    blocks = (outer for _, outer in shards.blocks_of(shards.model_ranges(positions, entry.order)))
    chunks = (
        (tuple(s.start for s in block), tuple(s.stop - s.start for s in block)) for block in blocks
    )
    return [chunk for chunk in chunks if math.prod(chunk[1])]


def write_file(
    held: HeldState, writer: Any, classes: Sequence[Class], told: Sequence[Told], rank: int
) -> RankFile:
    """Writes the file of a rank, and reports what is where in it."""
    mine = next(each for each in classes if rank in each.ranks)
    wanted: dict[str, list[Chunk]] = {}
    for entry, by in writers(mine):
        for at in (at for at, who in by.items() if who == rank):
            wanted[entry.key] = [] if entry.shape is None else chunks_at(entry, at)
    first: dict[str, int] = {}
    for other, (_, _, keys, _) in enumerate(told):
        first |= {key: other for key in keys if key not in first}
    own_paths = {key: path for key, path in held.own.items() if first[key] == rank}
    planner = checkpoint.DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({key: held.flat[key] for key in (*wanted, *own_paths)}, None, rank == 0)
    items = create_default_local_save_plan(planner.state_dict, rank == 0).items
    tensors = [i for i in items if i.tensor_data and math.prod(i.tensor_data.chunk.sizes)]
    has: dict[str, list[Chunk]] = {key: [] for key in wanted}
    for item in tensors:
        chunk = item.tensor_data.chunk
        has[item.index.fqn].append((tuple(chunk.offsets), tuple(chunk.sizes)))
    if has != wanted:
        raise RuntimeError("the shards of this rank are not those that its placements give")
    objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
    writer.set_up_storage_writer(rank == 0)
    plan = SavePlan([*objects, *tensors], storage_data=_StoragePrefix(f"__{rank}_"))
    plan = planner.finish_plan(writer.prepare_local_plan(plan))
    return rank_report(writer.write_data(plan, planner).value(), plan, own_paths)


def rank_report(
    results: Iterable[WriteResult], plan: SavePlan, own_paths: Mapping[str, Any]
) -> RankFile:
    locations = {result.index: result.storage_data for result in results}
    objects, lengths = dict[str, tuple[int, int]](), dict[Any, int]()
    start = end = 0
    for item in plan.items:
        where = locations[item.index]
        end = max(end, where.offset + where.length)
        if item.tensor_data is None:
            objects[item.index.fqn] = where.offset, where.length
            start = end
            continue
        kind = item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)
        if lengths.setdefault(kind, where.length) != where.length:
            raise RuntimeError(f"records of {kind} have different lengths")
    return RankFile(objects, start, end, lengths, own_paths)


# Metadata -----------------------------------------------------------------------------------------


@without_collection()
def describe_files(
    classes: Sequence[Class], reports: Sequence[RankFile]
) -> tuple[Metadata, list[list[WriteResult]]]:
    """torch's metadata of all files, and where each record is.

    Args:
        classes: as `classes_of` gives them.
        reports: of every rank.

    Raises:
        RuntimeError: the shards are not the whole tensor, or a file has another size.
    """
    known: dict[str, Any] = {}
    files = [f"__{rank}_0.distcp" for rank in range(len(reports))]  # pickled once each
    paths = {key: path for report in reports for key, path in report.own.items()}
    results = [
        WriteResult(MetadataIndex(key), size, _StorageInfo(file, at, size))
        for file, report in zip(files, reports, strict=True)
        for key, (at, size) in report.objects.items()
    ]
    ends = [report.start for report in reports]
    layouts: dict[Any, tuple[list[ChunkStorageMetadata], dict[Coordinate, list[int]]]] = {}
    for each in classes:
        for entry, by in writers(each):
            paths[entry.key] = entry.path
            if entry.shape is None:
                continue
            layout = entry.shape, entry.sizes, str(entry.placements), str(entry.order), tuple(by)
            if layout not in layouts:
                layouts[layout] = _chunks(entry, by)
            chunks, places = layouts[layout]
            known[entry.key] = TensorStorageMetadata(
                TensorProperties(entry.dtype), torch.Size(entry.shape), chunks
            )
            for at, rank in by.items():
                lengths, file = reports[rank].lengths, files[rank]
                for number in places[at]:
                    chunk, start = chunks[number], ends[rank]
                    size = lengths[entry.dtype, chunk.sizes]
                    index = MetadataIndex(entry.key, chunk.offsets, number)
                    results.append(WriteResult(index, size, _StorageInfo(file, start, size)))
                    ends[rank] = start + size
    if wrong := [rank for rank, report in enumerate(reports) if report.end != ends[rank]]:
        raise RuntimeError(f"the file of rank {wrong[0]} has another size than its shards")
    known |= {key: BytesStorageMetadata() for key in paths if key not in known}
    return Metadata(known, planner_data=paths), [results]


def _chunks(
    stored: Stored, places: Iterable[Coordinate]
) -> tuple[list[ChunkStorageMetadata], dict[Coordinate, list[int]]]:
    """The chunks of a tensor, which all of its layout share, and their numbers by place."""
    chunks, numbers = list[ChunkStorageMetadata](), dict[Coordinate, list[int]]()
    for at in places:
        mine = [ChunkStorageMetadata(*map(torch.Size, chunk)) for chunk in chunks_at(stored, at)]
        numbers[at] = [*range(len(chunks), len(chunks) + len(mine))]
        chunks += mine
    held = sum(math.prod(chunk.sizes) for chunk in chunks)
    offsets = {chunk.offsets for chunk in chunks}
    if held != math.prod(stored.shape or ()) or len(offsets) != len(chunks):
        raise RuntimeError(f"the shards of {stored.key} are not the whole tensor")
    return chunks, numbers
