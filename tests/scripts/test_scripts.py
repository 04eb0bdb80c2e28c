"""A sample of `make scripts`: what scripts do between passes, with threads as ranks."""

import random

import playing
import pytest
import script_jobs

from planc.runtime.safeguards import guards
from planc.runtime.standalone import passes


@pytest.mark.parametrize("plan", script_jobs.PLANS)
def test_a_random_script(plan):
    script = playing.drawn(plan, random.Random(plan))
    assert not playing.difference(plan, script, playing.on_threads), playing.told(script)


@pytest.mark.parametrize(
    ("plan", "script"),
    [
        ("fsdp", "train:0 no_grad:0"),
        ("hsdp", "logged:0 scale_head:0"),
        ("tp-fsdp", "no_grad:0 scale:0"),
    ],
)
def test_a_model_that_lists_copies_is_found(plan, script, monkeypatch):
    """Without the hooks, scripts as simple as these fail, and the shortest of them is found."""
    monkeypatch.setattr(passes, "shards_at_rest", lambda _model: None)
    longer = playing.read(f"rate:1 {script} rate:2")
    assert playing.difference(plan, longer, playing.on_threads)
    assert playing.shortest(plan, longer, playing.on_threads) == playing.read(script)


@pytest.mark.parametrize("plan", ["fsdp", "tp-fsdp"])
def test_a_loss_that_reads_the_weight_of_the_head_itself(plan, monkeypatch):
    """Its gradient does not go through the unit of the head, which would average it."""
    script = playing.read("own_head:0 step:0 own_head:1 train:2 step:0")
    assert not playing.difference(plan, script, playing.on_threads)
    monkeypatch.setattr(guards, "average_whole", lambda _model, _experts: None)
    assert playing.difference(plan, script, playing.on_threads)
