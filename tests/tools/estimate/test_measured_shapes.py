"""A sample of the shipped shapes on three meshes: the estimate beside a rank that is run."""

from dataclasses import replace

import pytest
from helpers import slow
from measured_shapes import MESHES, difference

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.tools.estimate.answer import Request
from planc.tools.estimate.from_plan import Batch
from planc.tools.suggest.measured import measure, plain

PLAIN, TENSOR, STAGES = MESHES


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("llama-3.2-1b", TENSOR),
        slow("llama-3.1-8b", PLAIN),
        slow("llama-3.1-70b", STAGES),
        slow("qwen3-30b-a3b", PLAIN),
        slow("gemma-2-9b", TENSOR),
        slow("bloom-7b1", PLAIN),
    ],
)
def test_the_estimate_is_within_a_twentieth_of_a_rank_that_is_run(model, settings):
    assert abs(difference(model, settings)) < 0.05


def test_a_run_says_that_the_estimate_is_off():
    settings = ("recompute=false",)
    compiled = compile_plan("llama-3.2-1b", None, Sink(), world_size=8, settings=settings)
    request = Request(batch=Batch(global_batch=8, sequence=64))
    made = measure(compiled, request, Sink())
    assert not made.estimate_is_off and "warning" not in str(made)
    [rank] = made.counted.ranks
    [moment] = [m for m in rank.moments if m.name == rank.largest.name]
    more = replace(moment.items[0], size=rank.peak * 0.2)
    larger = replace(rank, moments=(*rank.moments, replace(moment, items=(*moment.items, more))))
    off = replace(made, counted=replace(made.counted, ranks=(larger,)))
    assert "warning: the estimate is more than 10% off; believe the run" in str(off)
    assert plain(off)["estimate_is_off"] and not plain(made)["estimate_is_off"]
