"""Counts by arithmetic are those of running the layers."""

import os
import time
from dataclasses import replace

import pytest

from planc.diagnostic import Sink
from planc.estimate.counted import Counted, MicroBatch, Part, Product, Saved
from planc.estimate.derived_counts import DerivedCounts, first_jobs
from planc.estimate.kept_tensors import count
from planc.estimate.second_process import SecondProcess, both, can_help
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


HERE = os.getpid()


def failing(job):
    """Ends the second process alone."""
    if os.getpid() != HERE:
        os._exit(1)
    return doubled(job)


def jobs(*rows):
    return [work(n, 8) for n in rows]


def test_two_processes_count():
    counts = DerivedCounts(missing, SecondProcess(doubled, jobs(1, 2, 4)))
    assert counts.counting
    assert counts.derived(work(64, 8)).logits == 128  # two of the three are enough
    assert [counts.counted(work(n, 8)).logits for n in (4, 1, 2)] == [8, 2, 4]
    assert not counts.counting
    counts.end()


def missing(job):
    raise AssertionError(f"{job} was counted twice")


def test_what_another_process_does_not_count_is_counted_here():
    counts = DerivedCounts(doubled, SecondProcess(failing, jobs(1, 2, 4)))
    assert [counts.counted(work(n, 8)).logits for n in (4, 1, 2)] == [8, 2, 4]
    unasked = DerivedCounts(doubled, SecondProcess(doubled, jobs(1, 2)))
    assert unasked.counted(work(8, 8)).logits == 16
    unasked.end()
    assert not unasked.counting


def test_each_of_two_processes_takes_the_next_job():
    def run(job):
        time.sleep(0.02)
        return job, os.getpid()

    found = both(run, range(12))
    assert [*found] == [job for job, _ in found.values()] == [*range(12)]
    assert len({process for _, process in found.values()}) == 1 + can_help()
    assert {process for _, process in both(run, range(4), alone=True).values()} == {HERE}
    assert both(failing, jobs(1, 2, 4)) == {job: doubled(job) for job in jobs(1, 2, 4)}
