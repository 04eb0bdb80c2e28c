"""What a search of plans knows of a batch without counting it: what two others say of its rows."""

from functools import partial

import pytest
from helpers import slow

from planc.diagnostics.diagnostic import Sink
from planc.files.resources import PLANS
from planc.model.load import load
from planc.tools.estimate.counted import Counted, MicroBatch, Part, Saved, by_rows
from planc.tools.estimate.kept_tensors import count

MODELS = sorted(path.stem for path in (PLANS / "models").glob("*.json"))
SOME = ("kimi-linear-48b-a3b", "gemma-4-e4b", "zamba2-2.7b", "mpt-7b", "llama-3.2-1b-classes")
"""With a mixture, states, blocks that share weights, inputs to each layer, and classes."""
UNCOUNTED = {"jetmoe-8b"}
"""Models whose layers cannot be counted (PL703), beside those that are not of transformers."""


@pytest.mark.parametrize("model", [name if name in SOME else slow(name) for name in MODELS])
def test_counts_grow_with_rows_along_a_line(model):
    """Exactly, in each number of each kernel and tensor of every family; from two rows on."""
    facts, sink = load(str(PLANS / "models" / f"{model}.json"), Sink()), Sink()
    counted = partial(count, facts, sink)
    known = by_rows(counted)
    for rows in (2, 3):
        if known(MicroBatch(rows, 64, "bfloat16")) is None:
            assert model in UNCOUNTED or "model_type" not in facts.config, sink.diagnostics
            pytest.skip(sink.diagnostics[0].message)
    for rows in (1, 4, 16):
        job = MicroBatch(rows, 64, "bfloat16")
        assert known(job) == counted(job)


@pytest.mark.parametrize(
    ("exchange", "states"),
    [(("all_gather", 4, 1), ("state", 1)), slow(("ring", 4, 1), ("gather", 1))],
)
@pytest.mark.parametrize("model", ["kimi-linear-48b-a3b", slow("qwen3-next-80b-a3b")])
def test_with_parts_of_sequences_too(model, exchange, states):
    facts = load(str(PLANS / "models" / f"{model}.json"), Sink())
    counted = partial(count, facts, Sink())
    known = by_rows(counted)
    jobs = [MicroBatch(rows, 64, "bfloat16", exchange, states) for rows in (8, 2, 4)]
    assert all(known(job) is not None for job in jobs)
    assert known(jobs[-1]) == counted(jobs[-1])


def test_two_batches_with_several_rows_are_counted_and_what_is_on_no_line():
    asked = []

    def counted(job):
        asked.append((job.rows, job.tokens))
        if job.tokens == 1:
            return None
        size = 7 + job.rows if job.tokens == 64 else 7 + job.rows // 3  # no line
        part = Part(at="", like=("",), saved=(Saved(module="", size=size),))
        return Counted(parts=(part,), logits=0)

    known = by_rows(counted)
    for rows in (1, 8, 2, 8, 5, 16, 1):
        assert known(MicroBatch(rows, 64, "")).parts[0].saved[0].size == 7 + rows
    assert asked == [(1, 64), (8, 64), (2, 64)]
    for rows in (2, 5, 3):
        assert known(MicroBatch(rows, 8, "")).parts[0].saved[0].size == 7 + rows // 3
    assert asked[3:] == [(2, 8), (5, 8), (3, 8)]
    asked.clear()
    for _ in range(3):
        assert known(MicroBatch(1, 1, "")) is None
    assert asked == [(1, 1)]
