"""Counts by arithmetic are those of running the layers."""

from dataclasses import replace

import pytest

from planc.diagnostic import Sink
from planc.estimate.counted import Counted, DerivedCounts, MicroBatch, Part, Product, Saved
from planc.estimate.kept_tensors import count
from planc.model.load import load

WHOLE = "", 1


def work(rows, tokens, exchange=WHOLE):
    return MicroBatch(rows, tokens, "bfloat16", exchange)


def counts_of(model):
    sink = Sink()
    facts = load(model, sink)

    def run(job):
        ran.append((job.rows, job.tokens))
        return count(facts, sink, job)

    ran = []
    return DerivedCounts(run), ran


@pytest.mark.parametrize(
    "model",
    [
        "llama-3.2-1b",
        "qwen3-30b-a3b",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("deepseek-v3", "gpt2", "gemma-2-9b", "gpt-oss-20b", "phi-3.5-moe")
        ),
    ],
)
def test_rows_are_derived_from_two_numbers_of_them(model):
    counts, ran = counts_of(model)
    for rows in (3, 8, 64):
        derived = counts.derived(work(rows, 1024))
        assert (rows, 1024) not in ran
        assert derived == counts.counted(work(rows, 1024))
        assert ran[-1] == (rows, 1024)


@pytest.mark.parametrize(
    "model", ["llama-3.2-1b", pytest.param("deepseek-v3", marks=pytest.mark.slow)]
)
def test_parts_of_a_sequence_are_derived_from_a_few_of_them(model):
    counts, ran = counts_of(model)
    total = 2048

    def part(rows, ranks):
        return work(rows, total // ranks, ("all_gather", ranks))

    for rows, ranks in ((1, 16), (3, 4), (16, 16), (2, 32)):
        derived = counts.derived(part(rows, ranks))
        assert (rows, total // ranks) not in ran
        assert derived == counts.run(part(rows, ranks))
        ran.pop()
    assert len(ran) == 6


def test_what_is_on_no_line_is_counted():
    """Half a byte a row is not, and neither are other modules from some number of rows on."""

    def rounded(job):
        part = Part(at="", like=("",), saved=(Saved(module="a", size=job.rows // 3),))
        return Counted(parts=(part,), logits=job.rows)

    def padded(job):
        many = (Saved(module="a", size=8),) * (2 if job.rows > 3 else 1)
        return Counted(parts=(Part(at="", like=("",), saved=many),), logits=job.rows)

    for counted in (rounded, padded):
        counts = DerivedCounts(counted)
        for rows in (2, 5, 9):
            assert counts.derived(work(rows, 64)) == counted(work(rows, 64))


def test_rows_that_products_divide_are_not_rounded_before():
    """Ten rows among four experts are three each; thrice as many are eight, not nine."""
    ten = Product(module="experts", m=10, n=1, k=1, count=4, divided=True)
    assert (ten.rows, replace(ten, m=30).rows, replace(ten, divided=False).rows) == (3, 8, 10)


def test_counts_are_on_a_line_through_two_of_them():
    ran = []
    counts = DerivedCounts(lambda job: ran.append(job) or Counted(parts=(), logits=2 * job.rows))
    assert counts.derived(work(64, 8)).logits == 128
    assert counts.derived(work(7, 8)).logits == 14
    assert ran == [work(2, 8), work(4, 8)]  # without runs of their own
    assert counts.counted(work(64, 8)).logits == 128 and ran[2:] == [work(64, 8)]
