"""The pool itself: an error of any rank reaches the test, and nothing outlives it."""

import re
import time

import pytest
from handwritten_plans import llama
from idle_groups import measured
from pool import Pool, RankError

pytestmark = pytest.mark.slow


def test_results_come_by_rank_and_errors_with_their_traceback(four):
    assert four.run("torch.distributed.get_rank") == [0, 1, 2, 3]
    with pytest.raises(RankError, match=r"rank 1:\n(.|\n)*rank one is not well") as caught:
        four.run("failing_models.fails")
    assert "rank 0" not in str(caught.value)
    assert four.run("torch.distributed.get_world_size") == [4] * 4  # the pool goes on


def test_a_rank_that_dies_and_one_that_hangs():
    pool = Pool(world=2)
    processes = pool._processes
    with pytest.raises(RankError, match="rank 1:\nthe process ended with exit code 7"):
        pool.run("failing_models.dies")
    assert not any(p.is_alive() for p in processes)
    pool = Pool(world=2)
    pool.run("torch.distributed.get_rank")
    began = time.monotonic()
    with pytest.raises(RankError, match=r"failing_models\.hangs did not end on every") as caught:
        pool.run("failing_models.hangs", timeout=5)
    assert re.search(r"rank 1:\n(.|\n)*failing_models\.py\", line \d+ in hangs", str(caught.value))
    assert time.monotonic() - began < 30
    assert not any(p.is_alive() for p in pool._processes)


def test_no_process_group_outlives_its_job(four):
    """Idle groups of gloo take a core between them, which starves ranks that work."""
    four.run("idle_groups.threads")  # destroys the groups of the jobs before
    before = four.run("idle_groups.threads")
    four.run("numerics.compare", model="llama", plan=llama({"dp_shard": 2, "tp": 2}))
    four.run("idle_groups.threads")
    assert four.run("idle_groups.threads") == before


def test_torch_keeps_the_threads_of_idle_groups_until_they_are_destroyed():
    """The reason for the test above. It needs torch alone; where it fails, torch has changed."""
    for default, more, destroyed in measured(20):
        assert more >= default + 20
        assert destroyed == default
