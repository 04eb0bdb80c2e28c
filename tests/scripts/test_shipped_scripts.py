"""Sequences of what scripts do between passes, on gloo processes; `make scripts` has more."""

import random

import playing
import pytest
import script_jobs

pytestmark = pytest.mark.slow

FAULTS = {  # what once trained another model, in its shortest form
    "fsdp": "forward:0 no_grad:0 clip:1",
    "sequence": "inference:0 scale_head:0 train:0 step:0",
    "tp-fsdp": "logged:0 scale:0 train:0 zero_model:1 train:0 clip:1",
    "reshard": "logged:0 swap:0 average:0 step:0 train:0 step:0 swap:0 evaluate:1",
    "replicate": "abandoned:0 forward:0",
    "hsdp": "train:0 zero_model:0 between:1 pair:0 interrupted:0 step:0 accumulate:0",
    "pp": "evaluate:0 scale:0 train:1",
    "pp-tied": "train:0 train:1 zero_model:1 train_two:0 clip:0 step:0",
    "lora": "evaluate:0 scale_head:0 forward:1 step:0",
    "bf16": "own_head:0 step:0 own_head:1 train:2 step:0",
    "ep": "train:0 generate:0 clip:0 freeze:0 train:1 thaw:0 step:0",
}


@pytest.mark.parametrize("plan", FAULTS)
def test_faults_of_before(plan, four):
    script = playing.read(FAULTS[plan])
    assert not playing.difference(plan, script, playing.OnProcesses(four))


@pytest.mark.parametrize("plan", script_jobs.PLANS)
def test_a_random_script(plan, four):
    script = playing.drawn(plan, random.Random(plan))
    assert not playing.difference(plan, script, playing.OnProcesses(four)), script


REFUSALS = {  # changes after apply, where the script ends
    "cp": "train:0 attention:1 train:0",
    "fsdp": "train:0 gradient_hook:0 train:0",
    "pp": "train:0 step:0 share:0 train:0",
    "tp-fsdp": "functional:0 train:0",
}


@pytest.mark.parametrize("plan", REFUSALS)
def test_all_ranks_refuse_a_change(plan, four):
    found, on = [], playing.OnProcesses(four)

    def ranks(*arguments):
        found[:] = on(*arguments)
        return found

    assert not playing.difference(plan, playing.read(REFUSALS[plan]), ranks)
    assert playing.ends(found) is not None
