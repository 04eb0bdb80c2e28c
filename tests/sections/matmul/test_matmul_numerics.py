"""fp8 matmuls, emulated on four processes: gradients equal the single process with the same
recipe, in float64. Needs torchao: `make fp8`.
"""

import importlib.util

import pytest

NEEDED = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
pytestmark = [pytest.mark.slow, NEEDED]
FP64 = ["param_dtype=fp64", "reduce_dtype=fp64", "recompute=false"]
ALL, ATTENTION = "$blocks.{self_attn,mlp}.*_proj", "$blocks.self_attn.*_proj"
LIMIT, ROUNDED = 1e-12, 1e-5
"""Of sums in float64; and of attention to parts of rows, whose softmax is in float32."""
ISLANDS = """
    override model.layers[0].mlp.*_proj : none
    override model.layers[2].{self_attn,mlp}.*_proj : none
"""


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
    for steps in four.run("matmul_jobs.train", **job):
        assert max(steps) < (ROUNDED if "cp=2" in mesh else LIMIT)


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


@pytest.mark.parametrize("mesh", [["tp=1"], ["tp=2"], ["tp=1", "dp_replicate=2"]], ids=str)
@pytest.mark.parametrize("islands", ["", ISLANDS], ids=["all", "islands"])
def test_bytes_sent(four, plan, islands, mesh):
    """Blocks of one rule of which some keep their precision, each with what it gathers."""
    job = {"plan": plan("llama", ALL, f"fp8(gather = fp8){islands}"), "rows": 8}
    settings = ["param_dtype=fp32", *mesh]
    for counted, told, (calls, seen) in four.run(
        "sending_jobs.counted", kind="Llama", settings=settings, **job
    ):
        assert calls == seen > 0
        assert counted == told
