"""Counts by arithmetic are those of running the layers."""

from dataclasses import replace

import pytest

from planc.diagnostic import Sink
from planc.estimate.counted import Counted, MicroBatch, Part, Product, Saved
from planc.estimate.derived_counts import DerivedCounts, first_jobs
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
    for rows in (2, 4, 1):
        assert counts.derived(work(rows, 1024))
    assert ran == [(2, 1024), (4, 1024), (1, 1024)]
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

    for rows, _, _, (_, ranks) in first_jobs("bfloat16", total, "all_gather")[3:]:
        assert counts.derived(part(rows, ranks))
    first = [*ran]
    assert len(first) == 6
    for rows, ranks in ((1, 16), (3, 4), (16, 16), (2, 32)):
        derived = counts.derived(part(rows, ranks))
        assert ran == first
        assert derived == counts.run(part(rows, ranks))
        ran.pop()


def test_what_is_no_sum_of_multiples_is_counted():
    """Padding to whole blocks is not, and neither are other modules from some number on."""

    def padded(job):
        rows = job[0]
        size = -(-rows // 8) * 8
        part = Part(
            at="", like=("",), saved=(Saved(module="a", size=size),) * (2 if rows > 8 else 1)
        )
        return Counted(parts=(part,), logits=rows * 3)

    counts = DerivedCounts(padded)
    assert counts.derived(work(2, 64)) == padded((2,))
    assert counts.derived(work(9, 64)) == padded((9,))
    assert counts.derived(work(5, 64)) == padded((5,))


def test_rows_that_products_divide_are_not_rounded_before():
    """Ten rows among four experts are three each; thrice as many are eight, not nine."""
    ten = Product(module="experts", m=10, n=1, k=1, count=4, divided=True)
    assert (ten.rows, replace(ten, m=30).rows, replace(ten, divided=False).rows) == (3, 8, 10)


def doubled(job):
    return Counted(parts=(), logits=2 * job[0])


def jobs(*rows):
    return [work(n, 8) for n in rows]


def test_the_first_jobs_are_counted_until_others_follow():
    ran = []
    counts = DerivedCounts(lambda job: ran.append(job) or doubled(job), jobs(1, 2, 4))
    assert counts.derived(work(64, 8)).logits == 128  # of three, and without a run of its own
    assert ran == jobs(1, 2, 4)
    assert [counts.counted(job).logits for job in jobs(4, 1, 2)] == [8, 2, 4]
    assert ran == jobs(1, 2, 4) and not counts.first
    unlike = DerivedCounts(doubled, [work(1, 8)._replace(dtype="float16")])
    assert unlike.counted(work(8, 8)).logits == 16
