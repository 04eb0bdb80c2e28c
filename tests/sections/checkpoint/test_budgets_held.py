"""A budget on four processes: the bytes that it holds are those predicted, and gradients have the
bits of a run without checkpoints, under every way to divide a model.
"""

import pytest
from test_plans import right

pytestmark = pytest.mark.slow

MESHES = {
    "fsdp": ("llama", "llama", [], 1),
    "tp": ("llama", "llama", ["tp=2", "sequence=false"], 2),
    "sequence": ("llama", "llama", ["tp=2", "sequence=true"], 2),
    "mixture": ("qwen3_moe", "qwen3_moe", [], 1),
    "experts": ("mixtral", "mixtral", ["ep=2"], 1),
    "experts and tp": ("qwen3_moe", "qwen3_moe", ["ep=2", "tp=2"], 2),
}
AWAY = ", offload = cpu, host_gb_s = 100000"
"""A link so fast that all results are sooner copied than computed again."""


@pytest.mark.parametrize("more", ["", AWAY], ids=["", "offload"])
@pytest.mark.parametrize("name", MESHES)
def test_what_is_held_is_predicted(four, tmp_path, name, more):
    model, family, mesh, rows = MESHES[name]
    overrides = ["param_dtype=fp32", *mesh]
    results = four.run(
        "budget_jobs.held",
        folder=str(tmp_path),
        model=model,
        family=family,
        overrides=overrides,
        share=0.6,
        rows=rows,
        more=more,
    )
    for measured, predicted, most, same, kept, (away, told) in results:
        assert same
        assert kept
        assert 0 < measured <= most, results
        assert bool(away) == bool(more)
        if "experts" not in name:  # whose tokens are as they are routed
            assert (measured, away) == (predicted, told), results


@pytest.mark.parametrize(
    ("mesh", "rows"), [(["pp=2", "microbatches=2"], 1), (["cp=2"], 2), (["cp=2", "tp=2"], 4)]
)
def test_gradients_of_parts(four, tmp_path, mesh, rows):
    results = four.run(
        "budget_jobs.trained",
        folder=str(tmp_path),
        model="llama",
        family="llama",
        overrides=["param_dtype=fp32", *mesh],
        share=0.4,
        rows=rows,
        changes={"num_hidden_layers": 4},
    )
    assert all(count for count, _ in results)
    assert all(rules > 1 for _, rules in results)


def test_the_script_does_the_same(four, tmp_path):
    path = tmp_path / "b.plan"
    rule = f"budget(0.4, rows = 2, seq = 16{AWAY})"
    path.write_text(
        f'plan b for llama\nextend "llama"\noverride checkpoint {{\n    $blocks : {rule}\n}}\n'
    )
    arguments = {"model": "llama", "plan": str(path), "overrides": ["tp=2", "param_dtype=fp32"]}
    results = four.run("numerics.compare", **arguments)
    right(results)
    assert four.run("numerics.compare", script=True, **arguments) == results
