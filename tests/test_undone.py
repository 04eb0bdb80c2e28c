"""What a script does that a plan cannot follow, before or after `apply`, stops at its line."""

import copy
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "processes"))
import numerics

import planc
from planc.trial.thread_ranks import run_ranks


def raised(script, *settings, before=None):
    """What a script raises after `apply`, with two threads as ranks; None if nothing."""
    built = numerics.build("llama")
    made = [copy.deepcopy(built) for _ in range(2)]

    def program(rank):
        if before is not None:
            before(made[rank])
        options = {"device_type": "cpu", "require": "nothing"}
        script(planc.apply(made[rank], "llama", overrides=settings, **options).model)

    failure = run_ranks(2, program, 60)
    return failure and failure.error


@pytest.mark.parametrize(
    ("script", "settings"),
    [
        (lambda model: model.set_attn_implementation("sdpa"), ["cp=2"]),
        (lambda model: model.gradient_checkpointing_enable(), []),
        (lambda model: model.resize_token_embeddings(256), ["tp=2"]),
    ],
)
def test_what_the_plan_relies_on_is_not_undone(script, settings):
    error = raised(script, *settings)
    assert isinstance(error, planc.PlanError)
    assert "PL454" in str(error) and "test_undone.py" in str(error)


def test_what_a_plan_leaves_to_the_script_is_allowed():
    assert raised(lambda model: model.tie_weights()) is None
    off = "recompute=false"
    assert raised(lambda model: model.gradient_checkpointing_enable(), off) is None


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_not_lost(name):
    error = raised(print, before=lambda model: getattr(model.lm_head.weight, name)(print))
    assert isinstance(error, planc.PlanError) and "PL455" in str(error)
