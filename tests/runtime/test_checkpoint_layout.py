"""Checkpoints whose ranks know from placements what they write: ranks are simulated in turn."""

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from folders import TESTS
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from planc.runtime.standalone import shards
from planc.runtime.standalone.dcp_chunks import storable
from planc.runtime.weights import writing

STRIDED = (_StridedShard(0, split_factor=2), Shard(0))
TENSORS = {  # name: shape, placements on a mesh of 2 x 2, the order in which ranks store it
    "both": ((8, 6), (Shard(0), Shard(1)), None),
    "strided": ((8, 6), STRIDED, None),
    "uneven": ((9, 3), STRIDED, None),  # torch misplaces it
    "few": ((1, 5), (Shard(0), Replicate()), None),  # empty on half of the ranks
    "copied": ((4, 4), (Replicate(), Shard(0)), None),
    "copied too": ((4, 4), (Replicate(), Shard(0)), None),
    "whole": ((5,), (Replicate(), Replicate()), None),
    "packed": ((8, 2), (Replicate(), Shard(0)), (0, [(0, 2), (4, 6), (2, 4), (6, 8)])),
    "number": ((), None, None),
    "plain": ((3, 2), None, None),
}


def full(name):
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(TENSORS[name][0], generator=generator)


@contextmanager
def simulated(rank):
    """The process is a rank of a fake process group."""
    distributed.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def held_by(rank, names, *, whole=False, data_rank=None):
    """What a simulated rank holds."""
    with simulated(rank):
        mesh = None if whole else init_device_mesh("cpu", (2, 2))
        state = {"model": {}, "lr": 0.5}
        for name in names:
            shape, placements, order = TENSORS[name]
            tensor = full(name)
            if placements and mesh:
                at = tuple(mesh.get_coordinate())
                where = shards.model_ranges(
                    shards.positions_of(shape, (2, 2), at, placements), order
                )
                local = shards.select_ranges(tensor, where).contiguous()
                how = {"run_check": False, "shape": shape, "stride": tensor.stride()}
                tensor = DTensor.from_local(local, mesh, placements, **how)
            # torch caches the result of a DTensor's operators with the mesh of the first rank
            blocks = shards.irregular(tensor, order if mesh else None)
            state["model"][name] = storable(tensor, order) if blocks else tensor
        if data_rank is not None:
            state[f"extra.loader.{data_rank}"] = f"rows of {data_rank}"
        return writing.HeldState(state, "extra.")


def file_of(rank, folder, held, classes, told):
    with simulated(rank):
        writer = checkpoint.FileSystemWriter(folder)
        return writing.write_file(held[rank], writer, classes, told, rank)


def written(folder, held):
    """Each rank writes its file; the reports, and torch's metadata of them."""
    told = [one.told for one in held]
    members = {}
    for rank, (digest, *_) in enumerate(told):
        members.setdefault(digest, []).append(rank)
    classes = [*writing.join_classes(members.values(), [one.shared for one in held], told)]
    reports = [file_of(rank, folder, held, classes, told) for rank in range(4)]
    metadata, results = writing.describe_files(classes, reports)
    writer = checkpoint.FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, results)
    return classes, reports, metadata


def test_torch_reads_the_whole_tensors(tmp_path):
    held = [held_by(rank, TENSORS, data_rank=rank // 2) for rank in range(4)]
    classes, _, metadata = written(tmp_path, held)
    target = {f"model.{name}": torch.zeros(TENSORS[name][0]) for name in TENSORS}
    others = ("lr", "extra.loader.0", "extra.loader.1")
    target |= dict.fromkeys(others)
    checkpoint.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(target[f"model.{name}"], full(name)) for name in TENSORS)
    assert [target[key] for key in others] == [0.5, "rows of 0", "rows of 1"]
    assert metadata.planner_data["model.plain"] == ("model", "plain")
    by = {one.key: set(ranks.values()) for one, ranks in writing.writers(classes[0])}
    assert by["model.copied"].isdisjoint(by["model.copied too"]), "one replica writes all"


def test_a_tensor_of_two_stages_is_written_once(tmp_path):
    names = (["plain", "whole"], ["plain", "few"])
    held = [held_by(rank, names[rank // 2], whole=True) for rank in range(4)]
    _, reports, metadata = written(tmp_path, held)
    assert {*metadata.state_dict_metadata} == {
        "lr",
        *(f"model.{n}" for n in {*names[0], *names[1]}),
    }
    assert Counter(key for one in reports for key in one.objects) == {"lr": 1}


def test_shards_that_are_not_the_whole_tensor_are_refused(tmp_path):
    held = [held_by(rank, ["both"]) for rank in range(4)]
    told = [one.told for one in held]
    [half] = writing.join_classes([(0, 1)], [one.shared for one in held], told)
    reports = [file_of(rank, tmp_path, held, [half], told) for rank in (0, 1)]
    with pytest.raises(RuntimeError, match="are not the whole tensor"):
        writing.describe_files([half], reports)


def test_a_rank_whose_shards_are_others_is_refused(tmp_path):
    held = [held_by(rank, ["both"]) for rank in range(4)]
    told = [one.told for one in held]
    told[1], told[2] = told[2], told[1]
    [every] = writing.join_classes([range(4)], [one.shared for one in held], told)
    with pytest.raises(RuntimeError, match="not those that its placements give"):
        file_of(1, tmp_path, held, [every], told)


def test_a_file_of_another_size_is_refused(tmp_path):
    held = [held_by(rank, ["both"]) for rank in range(4)]
    classes, reports, _ = written(tmp_path, held)
    reports[3] = writing.replace(reports[3], end=reports[3].end + 1)
    with pytest.raises(RuntimeError, match="the file of rank 3 has another size"):
        writing.describe_files(classes, reports)


def test_the_chunks_are_those_of_torchs_planner(tmp_path):
    names = [name for name in TENSORS if name not in ("few",)]
    held = [held_by(rank, names) for rank in range(4)]
    _, _, metadata = written(tmp_path, held)
    plans = []
    for rank, one in enumerate(held):
        with simulated(rank):
            plans.append(create_default_local_save_plan(one.flat, rank == 0))
    plans = checkpoint.DefaultSavePlanner()._dedup_save_plans(plans)
    _, theirs = create_default_global_save_plan(plans)
    assert not _validate_global_plan(plans, metadata)
    for name in names:
        mine, other = (m.state_dict_metadata[f"model.{name}"] for m in (metadata, theirs))
        assert (mine.size, mine.properties) == (other.size, other.properties)
        assert sorted(map(str, mine.chunks)) == sorted(map(str, other.chunks))


@pytest.mark.slow
def test_rank_0_of_many_does_less_than_torchs_planner():
    """Bytes are exact; the time of both is of one core, in turn."""
    bench = TESTS / "bench" / "planning.py"
    found = {}
    for way in ("torch", "planc"):
        command = [sys.executable, "-W", "ignore", str(bench), way, "256", "90", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        found[way] = json.loads(done.stdout)
    mine, other = found["planc"], found["torch"]
    assert mine["chunks"] == other["chunks"] > 90 * 128
    assert (mine["received"] + mine["sent"]) * 50 < other["received"] + other["sent"]
    assert mine["seconds"] * 2 < other["seconds"]
