"""Products in 8 bits, emulated on four processes: gradients equal the single process with the same
recipe, in float64. Needs torchao: `make fp8`.
"""

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
FP64 = ["param_dtype=fp64", "reduce_dtype=fp64", "recompute=false"]
ALL, ATTENTION = "$blocks.{self_attn,mlp}.*_proj", "$blocks.self_attn.*_proj"
LIMIT = 1e-5


@pytest.fixture
def plan(tmp_path):
    def write(family, layers, action):
        path = tmp_path / f"{family}.plan"
        head = f'plan t for {family}\nextend "{family}.plan"\n'
        path.write_text(f"{head}matmul {{ {layers} : {action} }}\n")
        return str(path)

    return write


@pytest.mark.parametrize(
    ("family", "layers", "action", "mesh"),
    [
        ("llama", ALL, "fp8", ["tp=2"]),
        ("llama", ALL, "fp8", ["tp=1"]),
        ("llama", ALL, "fp8(recipe = rowwise)", ["tp=2"]),
        ("llama", ALL, "fp8(recipe = rowwise)", ["cp=2"]),
        ("llama", ALL, "fp8(gather = fp8)", ["tp=2"]),
        ("llama", ALL, "fp8(gather = fp8)", ["tp=1"]),
        ("phi3", ALL, "fp8", ["tp=2"]),
        ("qwen3_moe", ATTENTION, "fp8", ["tp=2"]),
        ("qwen3_moe", ATTENTION, "fp8", ["tp=1", "ep=2"]),
    ],
)
def test_gradients(four, plan, family, layers, action, mesh):
    written = plan(family, layers, action)
    job = {"model": family, "plan": written, "overrides": [*FP64, *mesh]}
    for first, *later in four.run("matmul_jobs.train", **job):
        assert first < LIMIT
        if "tp=1" in mesh:  # under tp, numbers on a border fall to other sides after a step
            assert max(later) < LIMIT


@pytest.mark.parametrize(
    ("action", "mesh", "fault"),
    [
        ("fp8", ["tp=2"], "of a rank"),
        ("fp8", ["tp=2"], "of data ranks too"),
        ("fp8(gather = fp8)", ["tp=2"], "not scaled"),
    ],
)
def test_faults(four, plan, action, mesh, fault):
    written, overrides = plan("llama", ALL, action), [*FP64, *mesh]
    job = {"model": "llama", "plan": written, "overrides": overrides, "fault": fault}
    for first, *_ in four.run("matmul_jobs.train", **job):
        assert first > 1e-2
