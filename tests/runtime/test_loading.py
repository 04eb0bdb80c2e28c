"""Weights from files: bit for bit the single process's, or every wrong name and nothing loaded."""

import itertools
import json
import shutil

import pytest
from test_safeguards import PARTS
from test_training import FP32, LIMIT

pytestmark = pytest.mark.slow

CASES = [
    ("llama", "llama", ["tp=1"]),
    ("llama", "llama", ["tp=2"]),
    ("llama", "llama", ["tp=2", "dp_replicate=2", "dp_shard=1"]),
    ("llama-tied", "llama", ["tp=2"]),
    ("gemma3", "gemma3", ["tp=2"]),
    ("phi3", "phi3", ["tp=1"]),
    ("gpt2", "gpt2", ["dp_replicate=2"]),
    ("phi3", "phi3", ["tp=2"]),
    ("mixtral", "mixtral", ["tp=2"]),
    ("qwen3_moe", "qwen3_moe", ["tp=2"]),
]


@pytest.mark.parametrize("weights", ["slices", "rank0"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([case[0], *case[2]]))
def test_a_model_on_meta_gets_its_weights(four, tmp_path, case, weights):
    model, plan, mesh = case
    results = four.run(
        "loading_jobs.load",
        model=model,
        plan=plan,
        overrides=["param_dtype=fp32", *mesh],
        folder=str(tmp_path),
        weights=weights,
    )
    for different, worst, files in results:
        assert different == []
        assert worst < LIMIT
        assert files > 1


@pytest.mark.parametrize(
    ("model", "how", "mesh", "weights"),
    [
        ("llama", "fp8", ["tp=2"], "slices"),
        ("llama", "fp8", ["tp=1"], "rank0"),
        ("phi3", "fp8", ["tp=2"], "slices"),  # packed projections
        ("mixtral", "fp8", ["tp=1", "ep=2"], "slices"),  # experts that are stored one by one
        ("gpt_oss", "mxfp4", ["tp=2"], "slices"),
        ("gpt_oss", "mxfp4", ["tp=1", "ep=2"], "slices"),
    ],
)
def test_quantized_weights_are_read_by_shard(four, tmp_path, model, how, mesh, weights):
    overrides = ["param_dtype=fp32", *mesh]
    for different, said in four.run(
        "loading_jobs.dequantize",
        model=model,
        overrides=overrides,
        folder=str(tmp_path),
        how=how,
        weights=weights,
    ):
        assert different == []
        assert "PL457" in said, "they were taken for plain weights"


def test_uneven_shards_and_one_file(four, tmp_path):
    results = four.run(
        "loading_jobs.load",
        model="llama",
        plan="llama",
        overrides=["param_dtype=fp32", "tp=2"],
        folder=str(tmp_path),
        changes={"vocab_size": 131, "hidden_size": 68, "head_dim": 16},
        single=True,
    )
    for different, worst, files in results:
        assert different == []
        assert worst < LIMIT
        assert files == 1


@pytest.mark.parametrize("weights", ["slices", "rank0"])
def test_a_model_that_has_weights_gets_others(four, tmp_path, weights):
    results = four.run(
        "loading_jobs.load",
        model="llama-tied",
        plan="llama",
        overrides=["param_dtype=fp32", "tp=2"],
        folder=str(tmp_path),
        weights=weights,
        meta=False,
    )
    for different, worst, _ in results:
        assert different == []
        assert worst < LIMIT


def test_weights_are_cast_to_the_dtype_of_the_parameter(four, tmp_path):
    assert four.run("loading_jobs.cast", folder=str(tmp_path)) == [(True, True)] * 4


def test_where_shards_are(four):
    """Against torch's own split by FSDP after tensor parallelism, in even and uneven sizes."""
    assert four.run("loading_jobs.everywhere") == [24] * 4


def test_shards_over_more_ranks_than_there_are_here():
    """Every rank's ranges, for meshes and sizes where torch's placement is not FSDP's layout."""
    import torch
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    from planc.runtime.standalone.shards import has_wrong_offsets, positions_of

    wrong = 0
    for rows, shard, tp in itertools.product(range(1, 24), (2, 3, 4), (2, 3)):
        placements = (_StridedShard(0, split_factor=tp), Shard(0))
        inner = [list(p) for p in torch.arange(rows).chunk(tp)] + [[]] * tp
        for i, j in itertools.product(range(shard), range(tp)):
            outer = list(torch.tensor(inner[j]).chunk(shard)) if inner[j] else []
            right = outer[i].tolist() if i < len(outer) else []
            [found] = positions_of((rows,), (shard, tp), (i, j), placements)
            assert found.tolist() == right
            told, at = _compute_local_shape_and_global_offset(
                (rows,), (shard, tp), (i, j), placements
            )
            if told != (len(right),) or (right and at != (right[0],)):
                wrong += 1  # torch's own idea of it, which its checkpoints follow
                assert has_wrong_offsets((rows,), (shard, tp), placements)
        if rows % (shard * tp) == 0:
            assert not has_wrong_offsets((rows,), (shard, tp), placements)
    assert wrong > 10
    # packed halves, each split over tp: several ranges, though nothing else splits the dimension
    assert has_wrong_offsets((8,), (2,), (_StridedShard(0, split_factor=2),))


# What is refused ---------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    """A folder of a small llama's weights in several files."""
    from numerics import build

    build("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    return tmp_path


def refused(four, folder, **arguments):
    results = four.run(
        "loading_jobs.refused", model="llama", plan="llama", folder=str(folder), **arguments
    )
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("weights", ["slices", "rank0"])
@pytest.mark.parametrize("meta", [True, False])
def test_all_names_that_do_not_fit_are_listed_at_once(four, checkpoint, weights, meta):
    from safetensors.torch import load_file, save_file

    for file in checkpoint.glob("*.safetensors"):
        tensors = load_file(file)
        for name in list(tensors):
            if name.endswith("mlp.up_proj.weight"):
                tensors[name.replace("up_proj", "upper")] = tensors.pop(name)
            if name == "model.norm.weight":
                tensors[name] = tensors[name][:-1].clone()
        save_file(tensors, file)
    (checkpoint / "model.safetensors.index.json").unlink()
    found = refused(four, checkpoint, weights=weights, meta=meta)
    assert [code for code, _ in found] == ["PL496"] * 3
    missing, extra, shapes = (message for _, message in found)
    assert missing.endswith("lacks model.layers.*.mlp.up_proj.weight (2 of them)")
    assert extra.endswith("names that the model lacks: model.layers.*.mlp.upper.weight (2 of them)")
    assert "model.norm.weight is [63], the model's [64]" in shapes


def test_a_truncated_file(four, checkpoint):
    file = sorted(checkpoint.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-10])
    ((code, message),) = refused(four, checkpoint)
    assert code == "PL497"
    assert file.name in message


def test_a_file_that_the_index_names_is_gone(four, checkpoint):
    file = sorted(checkpoint.glob("*.safetensors"))[1]
    file.unlink()
    found = refused(four, checkpoint)
    assert found == [
        ("PL497", f"model.safetensors.index.json names {file.name}, which is not there")
    ]


def test_an_index_that_says_what_is_not_so(four, checkpoint):
    index = checkpoint / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first, other = sorted(set(content["weight_map"].values()))[:2]
    name = next(n for n, f in content["weight_map"].items() if f == first)
    content["weight_map"][name] = other
    index.write_text(json.dumps(content))
    ((code, message),) = refused(four, checkpoint)
    assert (code, message) == (
        "PL497",
        f"model.safetensors.index.json says {name} is in {other}, it is not",
    )
    index.write_text("{]")
    ((code, message),) = refused(four, checkpoint)
    assert code == "PL497"
    assert "is not an index of safetensors" in message


def test_the_same_name_in_two_files(four, checkpoint):
    (checkpoint / "model.safetensors.index.json").unlink()
    first = sorted(checkpoint.glob("*.safetensors"))[0]
    shutil.copy(first, checkpoint / "again.safetensors")
    found = refused(four, checkpoint)
    assert {code for code, _ in found} == {"PL497"}
    assert all(f"is in two files, again.safetensors and {first.name}" in m for _, m in found)


def test_folders_without_weights(four, tmp_path):
    ((code, message),) = refused(four, tmp_path / "nowhere")
    assert (code, message) == ("PL497", f"{tmp_path / 'nowhere'} is not a folder")
    ((code, message),) = refused(four, tmp_path)
    assert code == "PL497"
    assert "holds neither safetensors nor a distributed checkpoint" in message


def test_safetensors_hold_no_optimizer_state(four, checkpoint):
    ((code, message),) = refused(four, checkpoint, optimizer=True)
    assert code == "PL497"
    assert "is not a checkpoint with the state of a run" in message


def test_a_buffer_that_nothing_computes_again(four, tmp_path):
    for result in four.run("loading_jobs.garbage", folder=str(tmp_path)):
        assert result["Known"] == []
        ((code, message),) = result["Lost"]
        assert code == "PL496"
        assert message == "no file holds and no module can recompute scale"


def test_a_buffer_that_the_ranks_compute_each_its_own_way(four, tmp_path):
    for found in four.run("loading_jobs.own_buffers", folder=str(tmp_path)):
        assert found == [("PL496", "the ranks computed different values of scale")]


# Memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["tp=1", "tp=2"])
@pytest.mark.parametrize("weights", ["slices", "rank0"])
def test_the_peak_of_a_rank_is_its_shard_and_one_tensor(four, tmp_path, mesh, weights):
    results = four.run(
        "loading_jobs.memory",
        plan="llama",
        overrides=[*FP32, mesh],
        folder=str(tmp_path),
        weights=weights,
    )
    for result in results:
        assert result["shard"] <= result["peak"]
        checked = 2 * 2**20 + 2**16  # to hash what was read, which ranks compare before training
        assert result["peak"] <= result["shard"] + result["largest"] + checked, result
        assert result["peak"] < result["whole"]
        if weights == "slices":  # no tensor at all: the slices come out of the mapped file
            assert result["peak"] <= result["shard"] + checked, result


@pytest.mark.parametrize(
    ("model", "how", "mesh"), [("llama", "fp8", "tp=2"), ("gpt_oss", "mxfp4", "ep=2")]
)
def test_quantized_weights_take_the_shard_and_one_tensor(four, tmp_path, model, how, mesh):
    for result in four.run(
        "loading_jobs.quantized_memory",
        model=model,
        how=how,
        overrides=[*FP32, mesh],
        folder=str(tmp_path),
    ):
        checked = 2 * 2**20 + 2**16  # to hash what was read, as above
        assert result["shard"] <= result["peak"], result
        assert result["peak"] <= result["shard"] + result["largest"] + checked, result


@pytest.mark.parametrize("kind", ["files", "checkpoint"])
def test_a_stale_copy_on_one_rank_stops_all(four, tmp_path, kind):
    name = "__0_0.distcp" if kind == "checkpoint" else "model.safetensors"
    for found in four.run("loading_jobs.stale", folder=str(tmp_path), kind=kind):
        [(code, message)] = found
        assert code == "PL461" and message.endswith(f"{name} is another file on rank 2")


def test_samples_and_whole_files(four, tmp_path):
    """A value outside the samples differs: nothing says so until all bytes are compared."""
    samples = {"folder": str(tmp_path / "samples"), "kind": "files", "place": 0.1}
    assert four.run("loading_jobs.stale", **samples) == [[]] * 4
    whole = {**samples, "folder": str(tmp_path / "whole"), "compare": "files"}
    for found in four.run("loading_jobs.stale", **whole):
        assert [code for code, _ in found] == ["PL461"]


@pytest.mark.parametrize("weights", ["slices", "rank0"])
@pytest.mark.parametrize("mesh", [["tp=2"], ["dp_replicate=2"]])
def test_a_new_head_begins_as_the_model_initializes_it(four, tmp_path, mesh, weights):
    four.run("loading_jobs.written", model="llama", folder=str(tmp_path))
    arguments = {"folder": str(tmp_path), "overrides": mesh, "weights": weights}
    assert four.run("loading_jobs.new_head", **arguments) == [True] * 4


def test_what_is_not_new_is_refused(four, tmp_path):
    four.run("loading_jobs.written", model="llama", folder=str(tmp_path))
    every = four.run("loading_jobs.not_new", folder=str(tmp_path))
    lacks = ("PL496", "lacks score.weight")
    assert every == [every[0]] * 4
    assert every[0] == [
        [lacks],
        [("PL468", "new = 'scor': the model has no such parameter"), lacks],
        [("PL468", "new = 'model.norm.weight': holds it")],
        [("PL468", "unused = 'lm': holds no such name")],
        [("PL496", "has names that the model lacks: lm_head.weight")],
    ]


def test_a_mixture_on_meta_under_context_parallelism(four, tmp_path):
    (tmp_path / "parts.plan").write_text(PARTS.replace("for llama", "for mixtral"))
    arguments = {"folder": str(tmp_path / "w"), "plan": str(tmp_path / "parts.plan")}
    for different, loss, right in four.run("loading_jobs.under_context", **arguments):
        assert different == [] and loss == pytest.approx(right, rel=1e-4)


def test_a_stale_copy_of_adapters_on_one_rank_is_refused(four, tmp_path):
    assert four.run("loading_jobs.adapters", folder=str(tmp_path / "good")) == [[]] * 4
    for found in four.run("loading_jobs.adapters", folder=str(tmp_path / "other"), stale=True):
        ((code, message),) = found
        assert code == "PL461" and message.endswith(
            "adapter_model.safetensors is another file on rank 2"
        )
