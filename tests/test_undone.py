"""What a script does that a plan cannot follow, before or after `apply`, stops at its line."""

import copy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

sys.path.append(str(Path(__file__).parent / "processes"))
import numerics
import own_optimizers
import transformers

import planc
from planc.runtime.safeguards import guards
from planc.trial.thread_ranks import run_ranks

FP32 = ["param_dtype=fp32", "reduce_dtype=fp32"]


def ran(script, *settings, before=lambda model: model, compare=2):
    """What a script gives for the run of each of two threads as ranks, and what one raised."""
    built = numerics.build("llama")
    made = [before(copy.deepcopy(built)) for _ in range(2)]
    found = [None, None]

    def program(rank):
        options = {"device_type": "cpu", "require": "nothing", "compare": compare}
        found[rank] = script(planc.apply(made[rank], "llama", overrides=settings, **options))

    failure = run_ranks(2, program, 60)
    return found, failure and failure.error


def raised(script, *settings, before=lambda model: model):
    """What a script raises after `apply`; None if nothing."""
    return ran(lambda run: script(run.model), *settings, before=before)[1]


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
    def before(model):
        getattr(model.lm_head.weight, name)(print)
        return model

    error = raised(print, before=before)
    assert isinstance(error, planc.PlanError) and "PL455" in str(error)


def gradients(model, loss):
    loss(model).backward()
    return {numerics.plain(n): numerics.whole(p.grad) for n, p in model.named_parameters()}


def far(loss, *settings):
    """How far the gradients of a loss are from those of one process; what was raised."""
    right = gradients(numerics.build("llama"), loss)

    def script(run):
        mine = gradients(run.model, loss)
        return max(numerics.error(mine[n], right[n]) for n in right)

    found, error = ran(script, *FP32, *settings)
    assert error is None, error
    return max(found)


def cached(model):
    model.config.use_cache = True
    tokens, labels = numerics.data(128)
    return model(input_ids=tokens, labels=labels).loss


@pytest.mark.parametrize("settings", [["tp=2"], ["tp=2", "recompute=false"]])
def test_a_cache_in_training_changes_nothing(settings):
    with mock.patch.object(guards, "warning") as warned:
        assert far(cached, *settings) < 1e-4
    assert {call.args[0] for call in warned.call_args_list} == (
        set() if settings[1:] else {"PL462"}
    )
    with torch.no_grad():
        assert ran(lambda run: cached(run.model), *FP32, *settings)[1] is None


def of_hidden_states(model):
    tokens, _ = numerics.data(128)
    output = model(input_ids=tokens, output_hidden_states=True)
    weight = torch.linspace(0, 1, tokens.shape[1])[None, :, None]
    first, last = output.hidden_states[1], output.hidden_states[-1]
    return (weight * last).square().mean() + (weight * first).mean() + output.logits.mean()


@pytest.mark.parametrize("sequence", ["true", "false"])
def test_a_loss_of_hidden_states_is_that_of_the_whole_sequence(sequence):
    assert far(of_hidden_states, "tp=2", f"sequence={sequence}") < 1e-4


def test_a_model_under_a_plan_is_not_copied():
    error = raised(AveragedModel)
    assert isinstance(error, planc.PlanError)
    assert "PL463" in str(error) and "test_undone.py" in str(error)
    named = str(error.diagnostics[0].help)
    assert "_foreach_lerp_" in named

    def averaged(run):  # as the help says
        average = [p.detach().clone() for p in run.model.parameters()]
        for parameter in run.model.parameters():
            parameter.data.add_(1)
        torch._foreach_lerp_(average, [*run.model.parameters()], 1 - 0.75)
        pairs = zip(average, run.model.parameters(), strict=True)
        return max((numerics.whole(p) - numerics.whole(a) - 0.75).abs().max() for a, p in pairs)

    found, error = ran(averaged, *FP32, "tp=2")
    assert error is None and max(found) < 1e-5


@pytest.mark.parametrize(
    ("code", "make", "before"),
    [
        ("PL464", torch.optim.Adagrad, lambda model: model.to("meta")),
        ("PL465", torch.optim.Adafactor, lambda model: model),
    ],
)
def test_an_optimizer_that_cannot_step_is_refused(code, make, before):
    _, error = ran(lambda run: run.optimizer(make(run.model.parameters())), before=before)
    assert isinstance(error, planc.PlanError)
    assert code in str(error) and "test_undone.py" in str(error)
    assert ran(lambda run: run.optimizer(torch.optim.Adagrad(run.model.parameters())))[1] is None


@pytest.mark.parametrize("settings", [[], ["tp=2"]], ids=str)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (own_optimizers.Lion, ""),
        (own_optimizers.Normalized, ""),
        (own_optimizers.LocalNorm, "LocalNorm steps shards otherwise than whole parameters, by 0."),
        (torch.optim.Adafactor, "Adafactor cannot step shards: RuntimeError: "),
        (transformers.Adafactor, "Adafactor cannot step shards: RuntimeError: "),
        (lambda own: torch.optim.Muon([p for p in own if p.ndim == 2]), ""),
        (lambda own: torch.optim.LBFGS([*own]), ""),
    ],
    ids=["lion", "normalized", "local", "adafactor", "transformers", "muon", "closure"],
)
def test_an_optimizer_of_the_script_is_tried_on_small_shards(make, said, settings):
    """Whatever its name is; its parameters and states stay as they are."""

    def script(run):
        made = make(run.model.parameters())
        given = [(p, p.detach().clone()) for group in made.param_groups for p in group["params"]]
        run.optimizer(made)
        assert not made.state
        assert all(torch.equal(numerics.whole(p), numerics.whole(was)) for p, was in given)

    _, error = ran(script, *FP32, *settings)
    assert (said in str(error) and "test_undone.py" in str(error)) if said else error is None
    assert not said or "PL465" in str(error)


def test_torch_still_has_no_adafactor_of_shards():
    def script(run):
        optimizer = torch.optim.Adafactor(run.model.parameters())
        of_hidden_states(run.model).backward()
        optimizer.step()

    assert "in-place operations that require placement changes" in str(ran(script, *FP32)[1])


@pytest.mark.parametrize("how", ["loop", "own"])
def test_rows_of_a_later_pass_are_compared_one_pass_after(how):
    def script(run):
        passed = 0
        for number in range(5):
            tokens, labels = numerics.data(128, seed=number)
            if number == 2 and run.meshes["tp"].get_local_rank() == 1:
                tokens = tokens.flip(0)
            given = {"input_ids": tokens, "labels": labels}
            try:
                if how == "loop":
                    run.forward_backward([given])
                else:
                    run.model(**given).loss.backward()
            except planc.PlanError as error:
                return passed, str(error)
            passed += 1
        return passed, ""

    found, error = ran(script, *FP32, "tp=2", compare=1)
    assert error is None
    for passed, told in found:
        assert passed == 3 and "PL483" in told and "the ranks 0 and 1 of tp" in told
        assert "in forward pass 3: `input_ids` differs" in told and "test_undone.py" in told
