"""The blocks of each stage, where stages have as much work."""

from itertools import combinations, pairwise

import pytest
from helpers import compiled_of
from hypothesis import given
from hypothesis import strategies as st

from planc.elaborate.sections.stage_sizes import balance_stages
from planc.ops.pipeline import Pipeline


def works(sizes, blocks, first, last):
    """The work of each stage of these sizes."""
    cuts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    found = [sum(blocks[a:b]) for a, b in pairwise(cuts)]
    found[0] += first
    found[-1] += last
    return found


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(0, 20),
    st.integers(0, 20),
    st.integers(1, 5),
)
def test_no_other_cut_has_a_faster_slowest_stage(blocks, first, last, stages):
    sizes = balance_stages(blocks, first, last, stages)
    if stages > len(blocks):
        assert sizes == []
        return
    assert len(sizes) == stages
    assert min(sizes) > 0
    assert sum(sizes) == len(blocks)
    every = (
        [b - a for a, b in zip((0, *cuts), (*cuts, len(blocks)), strict=True)]
        for cuts in combinations(range(1, len(blocks)), stages - 1)
    )
    best = min(max(works(other, blocks, first, last)) for other in every)
    assert max(works(sizes, blocks, first, last)) == best


@pytest.mark.parametrize(
    ("model", "plan", "stages", "settings"),
    [
        ("llama-3.1-8b", "llama", [8, 9, 9, 6], []),
        ("llama-3.1-8b", "llama", [4, 4, 4, 4, 4, 5, 5, 2], ["schedule=interleaved_1f1b"]),
        ("mixtral-8x7b", "mixtral", [8, 8, 8, 8], []),
    ],
)
def test_the_stages_of_models(model, plan, stages, settings):
    """The head of llama-3.1-8b is as much work as 2.4 blocks; mixtral's experts of one token make
    it as much as 0.4.
    """
    given = ["pp=4", "stages=work", *settings]
    lowered = compiled_of(model, plan, given, 8).lowered
    op = next(op for op in lowered.ops if isinstance(op, Pipeline))
    assert [b - a for a, b in pairwise(op.bounds)] == stages
