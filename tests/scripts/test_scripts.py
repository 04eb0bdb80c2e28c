"""A sample of `make scripts`: what scripts do between passes, with threads as ranks."""

import random

import playing
import pytest
import script_changes
import script_jobs

from planc.runtime.safeguards import guards
from planc.runtime.standalone import passes


@pytest.mark.parametrize("plan", script_jobs.PLANS)
def test_a_random_script(plan):
    script = playing.drawn(plan, random.Random(plan))
    assert not playing.difference(plan, script, playing.on_threads), playing.told(script)


@pytest.mark.parametrize(
    ("plan", "operation", "refused"),
    [
        ("cp", "attention:1", True),
        ("fsdp", "gradient_hook:1", True),
        ("pp", "torch_norm:0", True),
        ("pp", "add:0", False),
        ("pp", "block_hook:5", False),
        ("tp-fsdp", "data:1", False),
    ],
)
def test_a_change_after_apply_is_that_of_one_process_or_refused(plan, operation, refused):
    script, found = playing.read(f"train:1 step:0 {operation} train:0"), []

    def ranks(*arguments):
        found[:] = playing.on_threads(*arguments)
        return found

    assert not playing.difference(plan, script, ranks)
    assert playing.ends(found) == (2 if refused else None)


@pytest.mark.parametrize("plan", ["replicate", "tp", "lora"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_parameter_that_is_added_is_stored_or_refused(plan, number):
    script = playing.read(f"average:0 add:{number} stored:0 average:0 swap:0 train:0")
    assert not playing.difference(plan, script, playing.on_threads)


def test_an_export_has_an_added_parameter(monkeypatch):
    script = playing.read("add:0 step:0 export:0")
    assert not playing.difference("pp", script, playing.on_threads)
    monkeypatch.setattr(script_jobs, "load_file", lambda _path: {})
    assert "extra is missing" in playing.difference("pp", script, playing.on_threads)


@pytest.mark.parametrize(
    ("plan", "script"), [("cp", "attention:1"), ("pp", "train:0 torch_norm:0")]
)
def test_another_refusal_than_the_known_one_is_a_difference(plan, script, monkeypatch):
    monkeypatch.setattr(script_changes, "REFUSED", {})
    monkeypatch.setattr(script_jobs, "REFUSED", {})
    assert "PlanError" in playing.difference(plan, playing.read(script), playing.on_threads)


def test_ranks_refuse_the_same_operation():
    refused = {(2, "refused"): "PL454"}
    assert not playing.unlike("fsdp", {}, [refused, refused])
    assert "some ranks" in playing.unlike("fsdp", {}, [refused, {}])
    assert "different operations" in playing.unlike(
        "fsdp", {}, [refused, {(1, "refused"): "PL425"}]
    )


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
