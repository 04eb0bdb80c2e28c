"""What rank 0 does for a checkpoint of many ranks: torch's planner, and planc's layout.

    python tests/bench/planning.py torch|planc RANKS TENSORS STATES

Ranks are simulated: what each would send to rank 0 is pickled and unpickled, and nothing is
written. Prints the seconds of rank 0 on a core, and the bytes that it receives and sends.
"""

import io
import json
import pickle
import sys
import time
from dataclasses import replace

import torch
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from planc.runtime.weights.writing import (
    Class,
    RankFile,
    Stored,
    chunks_at,
    describe_files,
    writers,
)

TP = 8
SHAPES = [  # of a block of a llama of 8B, with how tp and FSDP shard them
    ((4096, 4096), (_StridedShard(0, split_factor=TP), Shard(0))),
    ((1024, 4096), (_StridedShard(0, split_factor=TP), Shard(0))),
    ((1024, 4096), (_StridedShard(0, split_factor=TP), Shard(0))),
    ((4096, 4096), (Shard(0), Shard(1))),
    ((14336, 4096), (_StridedShard(0, split_factor=TP), Shard(0))),
    ((14336, 4096), (_StridedShard(0, split_factor=TP), Shard(0))),
    ((4096, 14336), (Shard(0), Shard(1))),
    ((4096,), (Shard(0), Replicate())),
    ((4096,), (Shard(0), Replicate())),
]


def everything(ranks, tensors, states):
    """What each rank of a mesh of ranks / 8 x 8 stores, and the coordinates of the ranks."""
    sizes = (ranks // TP, TP)
    names = ["model.{}", "optimizer.state.{}.exp_avg", "optimizer.state.{}.exp_avg_sq"]
    stored = [
        Stored(key.format(f"model.layers.{n // 9}.{n % 9}.weight"), (), shape, torch.float32)
        for key in names[: 3 if states else 1]
        for n in range(tensors)
        for shape in [SHAPES[n % 9][0]]
    ]
    stored = [
        replace(one, path=(one.key,), mesh=0, sizes=sizes, placements=SHAPES[n % tensors % 9][1])
        for n, one in enumerate(stored)
    ]
    return Class({r: [divmod(r, TP)] for r in range(ranks)}, stored)


def chunks_of(one, place, known):
    """Those of like tensors are computed once."""
    key = one.shape, one.split, one.placements[0], place
    if key not in known:
        known[key] = chunks_at(one, place)
    return known[key]


def items_of(ranks, at, known):
    """What torch's planner has of a rank."""
    for one in ranks.stored:
        place = tuple(at[dim] for dim in one.split)
        for chunk in chunks_of(one, place, known):
            offsets, sizes = map(torch.Size, chunk)
            data = TensorWriteData(
                ChunkStorageMetadata(offsets, sizes),
                TensorProperties(torch.float32),
                torch.Size(one.shape),
            )
            yield WriteItem(MetadataIndex(one.key, offsets), WriteItemType.SHARD, tensor_data=data)


def by_torch(ranks):
    """Its planner, and what its writers report."""
    known = {}
    sent = [
        pickle.dumps(SavePlan([*items_of(ranks, at, known)], planner_data={}))
        for [at] in ranks.ranks.values()
    ]
    start = time.process_time()
    plans = dedup_save_plans([pickle.loads(one) for one in sent])
    plans, metadata = create_default_global_save_plan(plans)
    assert not _validate_global_plan(plans, metadata)
    scattered = [pickle.dumps(plan) for plan in plans]
    own = time.process_time() - start
    results = [
        pickle.dumps(
            [
                WriteResult(i.index, 4096, _StorageInfo(f"__{r}_0.distcp", n * 4096, 4096))
                for n, i in enumerate(plan.items)
            ]
        )
        for r, plan in enumerate(plans)
    ]
    start = time.process_time()
    told = [pickle.loads(one) for one in results]
    metadata.storage_data = {one.index: one.storage_data for some in told for one in some}
    return own, start, metadata, sum(map(len, sent + results)), sum(map(len, scattered))


def reports_of(ranks):
    """What each rank reports, records of 1 KiB more than their values."""
    lengths, ends = [{} for _ in ranks.ranks], [0] * len(ranks.ranks)
    known = {}
    for one, by in writers(ranks):
        for at, rank in by.items():
            for _, sizes in chunks_of(one, at, known):
                length = torch.Size(sizes).numel() * 4 + 1024
                lengths[rank][torch.float32, sizes] = length
                ends[rank] += length
    return [RankFile({}, 0, end, some, {}) for end, some in zip(ends, lengths, strict=True)]


def by_planc(ranks):
    told = [("0" * 64, at, [], False) for at in ranks.ranks.values()]
    sent = [pickle.dumps(one) for one in told]
    reports = [pickle.dumps(one) for one in reports_of(ranks)]
    start = time.process_time()
    told = [pickle.loads(one) for one in sent]
    metadata, [results] = describe_files([ranks], [pickle.loads(one) for one in reports])
    metadata.storage_data = {one.index: one.storage_data for one in results}
    return 0.0, start, metadata, sum(map(len, sent + reports)), sum(map(len, sent))


def main():
    way, *numbers = sys.argv[1:]
    ranks = everything(*map(int, numbers))
    before, start, metadata, received, sent = {"torch": by_torch, "planc": by_planc}[way](ranks)
    file = io.BytesIO()
    pickle.dump(metadata, file)
    chunks = sum(len(one.chunks) for one in metadata.state_dict_metadata.values())
    assert chunks == len(metadata.storage_data)
    seconds = before + time.process_time() - start
    found = {"seconds": seconds, "received": received, "sent": sent}
    print(json.dumps(found | {"file": len(file.getvalue()), "chunks": chunks}))


if __name__ == "__main__":
    main()
