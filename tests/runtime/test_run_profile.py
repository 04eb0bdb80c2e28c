"""The ranges of `run.profile()` on four gloo processes are those of the recorded order."""

import json
from collections import Counter

import pytest
from numerics import MODELS

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.lowering.rank_calls import WAIT
from planc.runtime.profile import label
from planc.simulate.rank_job import RankRunner
from planc.tools.order.record import record_ranks

pytestmark = pytest.mark.slow

MESHES = [
    ("llama", "llama", ["tp=2"]),
    ("llama", "llama", ["cp=2", "recompute=false"]),
    ("llama", "llama", ["pp=2", "microbatches=2"]),
    ("mixtral", "mixtral", ["ep=2"]),
]


def planned(folder, model, plan, mesh):
    """The collectives of a later step of each rank, as `planc hang` knows them."""
    sink = Sink()
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    settings = ["param_dtype=fp32", *mesh]
    compiled = compile_plan(str(folder), plan, sink, world_size=4, settings=settings)
    assert compiled.lowered, sink.diagnostics
    with RankRunner() as runner:
        order = record_ranks(
            compiled, range(4), runner, real="cp=2" not in mesh and "pp=2" not in mesh
        )
    return {
        rank: Counter(label(call) for call in calls if call.kind != WAIT)
        for rank, calls in order.later.items()
    }


@pytest.mark.parametrize(("model", "plan", "mesh"), MESHES)
def test_each_collective_has_its_line_and_numbers_are_the_same(four, tmp_path, model, plan, mesh):
    right = planned(tmp_path, model, plan, mesh)
    folder = str(tmp_path / "traces")
    results = four.run(
        "profile_jobs.profiled", model=model, plan=plan, overrides=mesh, folder=folder
    )
    for rank, (equal, same, ranges) in enumerate(results):
        assert equal
        assert same
        called = {name: count for name, count in ranges.items() if " over " in name}
        own = {n: c for n, c in right[rank].items() if not n.startswith("no line")}
        assert own
        assert {n: c for n, c in called.items() if not n.startswith("no line")} == own
        assert any(name.endswith(" model.layers.0 fsdp") for name in ranges) or rank > 1


def test_one_rank_alone_may_write(four, tmp_path):
    arguments = {"model": "llama", "plan": "llama", "overrides": ["tp=2"], "ranks": "first"}
    results = four.run("profile_jobs.profiled", folder=str(tmp_path), **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0.json"]
    assert [ranges is not None for *_, ranges in results] == [True, False, False, False]
    assert all(equal and same for equal, same, _ in results)
