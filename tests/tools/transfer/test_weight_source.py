"""`run.weight_source()`: full tensors of the files, by the protocol of vLLM's trainer side."""

import ast
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_engines import LLAMA, MIXTURE
from transfer_jobs import ADAPTED

from planc.runtime.weight_source import WeightMeta, WeightSource

CASES = {
    "tp 2, fsdp 2": (LLAMA, ["tp=2"], None),
    "pp 2, fsdp 2": (LLAMA, ["pp=2", "microbatches=2"], None),
    "tied, pp 2": ({**LLAMA, "tie_word_embeddings": True}, ["pp=2", "microbatches=2"], None),
    "ep 2, fsdp 2": (MIXTURE, ["ep=2"], None),
    "merged adapters": (LLAMA, ["tp=2"], ADAPTED),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tensors_are_those_of_the_export(four, tmp_path, case):
    config, sets, plan = CASES[case]
    (tmp_path / "own.plan").write_text(plan or "")
    results = four.run(
        "transfer_jobs.full_weights",
        config=config, sets=sets, folder=str(tmp_path),
        plan=str(tmp_path / "own.plan") if plan else None, adapters="merged" if plan else None,
    )  # fmt: skip
    metadata = results[0][0]
    assert all(other == metadata for other, _ in results)
    seen = set()
    for rank, (_, found) in enumerate(results):
        owned = {name: shape for name, _, shape, owners, *_ in metadata if rank in owners}
        for time, tensors in enumerate(found):
            files = load_file(tmp_path / f"{time}/model.safetensors")
            assert files.keys() == {name for name, *_ in metadata}
            assert [*tensors] == [*owned]
            for name, tensor in tensors.items():
                assert tuple(tensor.shape) == owned[name]
                assert torch.equal(tensor, files[name]), name
        seen |= {*owned}
    assert seen == {name for name, *_ in metadata}
    if "pp" in case:
        both = {(0, 1, 2, 3)} if "tied" in case else set()  # each stage has the tied weight
        assert {owners for *_, owners, _, _ in metadata} == {(0, 1), (2, 3)} | both


FOLDER = os.environ.get("PLANC_ENGINES", "")


@pytest.mark.skipif(not FOLDER, reason="PLANC_ENGINES names no folder with vLLM's Python files")
def test_the_protocol_is_that_of_vllm():
    """All methods and fields that vLLM's own class declares."""
    text = (Path(FOLDER) / "vllm/distributed/weight_transfer/base.py").read_text()
    classes = {n.name: n for n in ast.parse(text).body if isinstance(n, ast.ClassDef)}
    methods = {n.name for n in classes["WeightSource"].body if isinstance(n, ast.FunctionDef)}
    assert {n for n in methods if not n.startswith("__")} - {"iter_local"} <= {*dir(WeightSource)}
    fields = {n.target.id for n in classes["ParamMeta"].body if isinstance(n, ast.AnnAssign)}
    assert fields == {*WeightMeta.__dataclass_fields__}
