"""What a script does that a plan cannot follow, before or after `apply`, stops at its line."""

import copy
from unittest import mock

import numerics
import own_optimizers
import pytest
import torch
import transformers
from torch.optim.swa_utils import AveragedModel

import planc
from planc.emit.python.script import render
from planc.ops.document import digest
from planc.runtime.safeguards import guards, stage_statistics
from planc.simulate.thread_ranks import run_ranks

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


@pytest.mark.parametrize("sequence", ["true", "false"])
@pytest.mark.parametrize("token", [-1, 127, 128])
def test_a_token_outside_the_vocabulary_is_an_error_on_all_ranks(sequence, token):
    """One process raises too; a lookup in shards would give zeros. 127 is the last token."""
    tokens, _ = numerics.data(128)
    tokens[1, 2] = token

    def script(run):
        try:
            run.model(input_ids=tokens)
        except RuntimeError as error:
            return str(error)
        return None

    found, error = ran(script, "tp=2", f"sequence={sequence}", *FP32)
    text = None if token == 127 else "an id of `model.embed_tokens` is not in [0, 128)"
    assert error is None and found == [text] * 2
    if text:
        with pytest.raises(IndexError):
            numerics.build("llama")(input_ids=tokens)


@pytest.mark.parametrize("token", [127, 128])
def test_an_emitted_script_refuses_a_token_outside_the_vocabulary(token):
    tokens, _ = numerics.data(128)
    tokens[1, 2] = token
    model = numerics.build("llama")
    lowered = planc.lower(model, "llama", world_size=2, overrides=["tp=2", *FP32])
    space, found = {"__name__": "script"}, {}
    exec(compile(render(lowered, digest=digest(lowered)), "script", "exec"), space)
    models = [copy.deepcopy(model) for _ in range(2)]

    def program(rank):
        mesh = space["build_mesh"]("cpu")
        space["parallelize"](models[rank], mesh)
        try:
            models[rank](input_ids=tokens)
        except RuntimeError as error:
            found[rank] = str(error)

    assert run_ranks(2, program, 60) is None
    text = "an id of `model.embed_tokens` is not in [0, 128)"
    assert found == ({} if token == 127 else dict.fromkeys(range(2), text))


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


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (own_optimizers.Adaptive, "Adaptive computes one statistic of all parameters"),
        (lambda own: torch.optim.LBFGS([*own]), "LBFGS computes one statistic of all parameters"),
        (own_optimizers.Lion, ""),
        (own_optimizers.Normalized, ""),
        (lambda own: torch.optim.Muon([p for p in own if p.ndim == 2]), ""),
    ],
    ids=["adaptive", "lbfgs", "lion", "normalized", "muon"],
)
def test_an_optimizer_with_one_statistic_is_refused_under_stages(make, said, prepared):
    def script(run):
        optimizer = make(run.model.parameters())
        if prepared:
            run.optimizer(optimizer)
            return
        step(run.model, run)
        optimizer.step(*[lambda: 0.0] * isinstance(optimizer, torch.optim.LBFGS))

    error = ran(script, *FP32, *STAGES)[1]
    assert (said in str(error) and "test_undone.py" in str(error)) if said else error is None
    assert not said or "PL423" in str(error)


@pytest.mark.parametrize("settings", [[], ["tp=2"]], ids=str)
def test_an_optimizer_with_one_statistic_is_right_on_shards(settings):
    def steps(model, run=None):
        optimizer = own_optimizers.Adaptive(model.parameters())
        if run is not None:
            optimizer = run.optimizer(optimizer)
        for _ in range(4):
            step(model, run)
            optimizer.step()
            optimizer.zero_grad()
        rate = optimizer.param_groups[0]["rate"]
        return rate, {numerics.plain(n): numerics.whole(p) for n, p in model.named_parameters()}

    rate, right = steps(numerics.build("llama"))
    assert rate > 1e-3  # it has grown
    found, error = ran(lambda run: steps(run.model, run), *FP32, *settings)
    assert error is None, error
    for own_rate, own in found:
        assert own_rate == pytest.approx(rate, rel=1e-4)
        assert max(numerics.error(own[name], right[name]) for name in right) < 1e-4


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


def step(model, run=None):
    """The gradients of one step, of a model in one process or under a plan."""
    tokens, labels = numerics.data(128)
    model.zero_grad()
    if run is None:
        model(input_ids=tokens, labels=labels).loss.backward()
    else:
        run.forward_backward([{"input_ids": tokens, "labels": labels}])
    named = ((n, p) for n, p in model.named_parameters() if p.grad is not None)
    return {numerics.plain(n): numerics.whole(p.grad) for n, p in named}


def after_change(change, *settings):
    """The largest relative error of a gradient after a change between two steps of a run; what the
    second step raised.
    """
    alone = numerics.build("llama")
    change(alone)
    right = step(alone)

    def script(run):
        step(run.model, run)
        change(run.model)
        gradients = step(run.model, run)
        assert gradients
        return max(numerics.error(gradients[name], right[name]) for name in gradients)

    found, error = ran(script, *FP32, *settings)
    return (None if error else max(found)), error


def eager(model):
    model.config._attn_implementation = "eager"


def mixing_hook(model):
    model.model.layers[0].register_forward_hook(lambda _m, _a, x: x + x.mean(1, keepdim=True))


def mixing_in_place(model):
    model.model.layers[0].register_forward_hook(
        lambda _m, _a, x: None if x.mul_(x.mean()) is x else x
    )


def scaled_features(model):
    hook = model.model.layers[0].mlp.act_fn.register_forward_hook
    hook(lambda _m, _a, x: x / x.norm())


def own_forward(model):
    norm = model.model.layers[0].mlp.act_fn
    norm.forward = torch.nn.functional.relu


def hooked_parameter(model):
    model.lm_head.weight.register_hook(lambda gradient: gradient * 2)


def added_parameter(model):
    width = model.config.hidden_size
    model.model.layers[0].extra = torch.nn.Parameter(torch.zeros(width))


def shared_module(model):
    model.model.layers[1].mlp = model.model.layers[0].mlp


def shared_frozen_module(model):
    for block in model.model.layers:
        block.mlp.requires_grad_(False)
    shared_module(model)


def tied_weight(model):
    model.lm_head.weight = model.model.embed_tokens.weight


STAGES = ["pp=2", "microbatches=2"]


@pytest.mark.parametrize(
    ("change", "settings", "code"),
    [
        (eager, ["cp=2"], "PL454"),
        (mixing_hook, ["cp=2"], "PL454"),
        (mixing_in_place, ["cp=2"], "PL454"),
        (scaled_features, ["tp=2"], "PL454"),
        (own_forward, ["tp=2"], "PL454"),
        (hooked_parameter, [], "PL455"),
        (added_parameter, [], "PL425"),
        (shared_module, [], "PL425"),
        (shared_module, ["tp=2"], "PL425"),
        (shared_frozen_module, [], "PL425"),
        (tied_weight, [], "PL425"),
        (tied_weight, STAGES, "PL425"),
    ],
)
def test_a_change_after_apply_that_the_plan_does_not_include_stops_the_next_pass(
    change, settings, code
):
    _, error = after_change(change, *settings)
    assert isinstance(error, planc.PlanError), error
    assert code in str(error) and "test_undone.py" in str(error)


def scaled_blocks(model):
    for block in model.model.layers:
        block.register_forward_hook(lambda _module, _arguments, output: output * 0.9)


def reading_hook(model):
    for module in model.modules():
        module.register_forward_hook(lambda _module, _arguments, _output: None)


@torch.no_grad()
def other_values(model):
    for parameter in model.parameters():
        parameter.data = parameter.detach().clone() * 1.5


@torch.no_grad()
def exchanged_values(model):
    """An average takes the place of the weights and gives it back, as evaluations do."""
    weights = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data * 3
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.data = weight * 2


def other_parameters(model):
    for module in model.modules():
        for name, parameter in [*module._parameters.items()]:
            if parameter is not None:
                setattr(module, name, torch.nn.Parameter(parameter.detach() * 1.5))


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (scaled_blocks, []),
        (scaled_blocks, STAGES),
        (mixing_hook, ["tp=2"]),
        (reading_hook, ["cp=2"]),
        (reading_hook, ["tp=2"]),
        (eager, ["tp=2"]),
        (own_forward, []),
        (other_values, []),
        (other_values, ["tp=2"]),
        (other_values, STAGES),
        (exchanged_values, []),
        (exchanged_values, ["tp=2"]),
        (other_parameters, ["recompute=false"]),
        (lambda model: model.tie_weights(), []),
        (lambda model: setattr(model.model.layers[0], "mlp", model.model.layers[0].mlp), []),
    ],
)
def test_other_changes_after_apply_are_those_of_one_process(change, settings):
    error, raised = after_change(change, *settings)
    assert raised is None, raised
    assert error < 1e-4


def test_data_of_another_shape_is_refused():
    def script(model):
        model.lm_head.weight.data = torch.zeros(3, 3)

    assert "write the values with `copy_`" in str(raised(script))


def test_hooks_after_gradients_are_called_as_the_help_says():
    seen = {}

    def script(run):
        weight = run.model.lm_head.weight
        noted = seen.setdefault(id(run), [])
        weight.register_post_accumulate_grad_hook(lambda p: noted.append(p.grad.to_local().clone()))
        step(run.model, run)
        assert len(noted) == 1 and torch.equal(noted[0], weight.grad.to_local())

    assert ran(script, *FP32)[1] is None


def loss_of(model):
    tokens, labels = numerics.data(128)
    return model(input_ids=tokens, labels=labels).loss


def gradient_penalty(run):
    options = {"allow_unused": True, "create_graph": True}
    grad = torch.autograd.grad
    return grad(loss_of(run.model), [*run.model.parameters()], **options)


def backward_of_some(run):
    loss_of(run.model).backward(inputs=[run.model.lm_head.weight])


def functional_call(run):
    tokens, labels = numerics.data(128)
    values = {name: p * 1.5 for name, p in run.model.named_parameters()}
    given = {"input_ids": tokens, "labels": labels}
    return torch.func.functional_call(run.model, values, (), given)


@pytest.mark.parametrize("settings", [[], ["tp=2"]], ids=str)
@pytest.mark.parametrize(
    ("script", "code"),
    [(gradient_penalty, "PL426"), (backward_of_some, "PL426"), (functional_call, "PL425")],
)
def test_gradients_and_values_that_bypass_fsdp_are_refused_at_the_line(script, code, settings):
    _, error = ran(script, *FP32, *settings)
    assert isinstance(error, planc.PlanError), error
    assert code in str(error) and "test_undone.py" in str(error)


def test_gradients_of_inputs_are_those_of_one_process():
    def gradient(model):
        tokens, _ = numerics.data(128)
        table = torch.linspace(-1, 1, 128 * 64).view(128, 64)
        given = table[tokens]
        given.requires_grad_()
        output = model(inputs_embeds=given)
        return torch.autograd.grad(output.logits.square().mean(), [given])[0]

    right = gradient(numerics.build("llama"))
    found, error = ran(lambda run: numerics.error(gradient(run.model), right), *FP32)
    assert error is None and max(found) < 1e-4


@pytest.mark.parametrize("norm", ["clip_grad_norm_", "get_total_norm"])
def test_a_norm_of_one_stage_is_refused(norm):
    """Without stages it is that of the full model; `run.clip_grad_norm_` is right under both."""

    def script(run):
        step(run.model, run)
        right = run.clip_grad_norm_(float("inf"))
        parameters = [p for p in run.model.parameters() if p.grad is not None]
        if norm == "get_total_norm":
            own = torch.nn.utils.get_total_norm(p.grad for p in parameters)
        else:
            own = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        return float(right), float(numerics.whole(own))

    found, error = ran(script, *FP32)
    assert error is None
    assert all(own == pytest.approx(right, rel=1e-5) for right, own in found)
    _, error = ran(script, *FP32, *STAGES)
    assert isinstance(error, planc.PlanError), error
    assert "PL427" in str(error) and "test_undone.py" in str(error)


def norms(gradients):
    return sum(g.norm() ** 2 for g in gradients) ** 0.5


NORMS = {
    "norms": norms,
    "squares": lambda gradients: sum(g.pow(2).sum().item() for g in gradients) ** 0.5,
    "torch": lambda gradients: torch.norm(torch.stack([torch.norm(g.detach()) for g in gradients])),
    "foreach": lambda gradients: sum(n**2 for n in torch._foreach_norm([*gradients])) ** 0.5,
    "largest": lambda gradients: max(float(g.abs().max()) for g in gradients),
    "joined": lambda gradients: torch.cat([numerics.whole(g).flatten() for g in gradients]).norm(),
}


def gradients_of(run):
    return [p.grad for p in run.model.parameters() if p.grad is not None]


def with_optimizer(script):
    """A step of the optimizer after what a script does with gradients."""

    def program(run):
        optimizer = torch.optim.SGD(run.model.parameters())
        step(run.model, run)
        script(run)
        optimizer.step()

    return program


@pytest.fixture
def observed(monkeypatch):
    """The codes of warnings about gradients of stages; threads log nothing."""
    codes = []
    monkeypatch.setattr(stage_statistics, "warning", lambda code, *_, **__: codes.append(code))
    return codes


@pytest.mark.parametrize("how", NORMS)
def test_a_clip_of_a_script_over_one_stage_is_refused(how, observed):
    def clip(run):
        norm = NORMS[how](gradients_of(run))
        for gradient in gradients_of(run):
            gradient.mul_(1 / (norm + 1e-6))

    error = ran(with_optimizer(clip), *FP32, *STAGES)[1]
    assert isinstance(error, planc.PlanError), error
    assert "PL427" in str(error) and "test_undone.py" in str(error)
    assert observed == []


def test_a_norm_of_one_stage_that_a_script_logs_is_reported_once(observed):
    def logged(run):
        norms(gradients_of(run))

    def twice(run):
        for _ in range(2):
            with_optimizer(logged)(run)

    assert ran(twice, *FP32, *STAGES)[1] is None
    assert observed == ["PL427"] * 2  # of each rank


def over_stages(run):
    squares = sum(numerics.whole(g).pow(2).sum() for g in gradients_of(run))
    torch.distributed.all_reduce(squares, group=run.meshes["pp"].get_group())
    for gradient in gradients_of(run):
        gradient.mul_(squares**-0.5)


def some_norms(run):
    return [g.norm() for g in gradients_of(run)[1:]]


def scaled(run):
    for gradient in gradients_of(run):
        gradient.mul_(0.5).add_(0.1 * gradient.sign())


def clipped(run):
    right = run.clip_grad_norm_(1.0)
    return right, norms(gradients_of(run))


@pytest.mark.parametrize("script", [over_stages, some_norms, scaled, clipped])
def test_what_a_script_may_compute_of_gradients_of_a_stage(script, observed):
    assert ran(with_optimizer(script), *FP32, *STAGES)[1] is None
    assert observed == []


def weights_of(run):
    return [p.detach() for p in run.model.parameters() if p.ndim > 1]


def scaled_weights(run):
    """The weights of the model get a norm of 1."""
    norm = norms(weights_of(run))
    with torch.no_grad():
        for weight in weights_of(run):
            weight.mul_(1 / norm)


def scaled_weights_by_foreach(run):
    total = torch.stack(torch._foreach_norm(weights_of(run))).norm()
    torch._foreach_div_(weights_of(run), total)


@pytest.mark.parametrize("when", ["applied", "before", "after"])
@pytest.mark.parametrize("scale", [scaled_weights, scaled_weights_by_foreach])
def test_weights_that_a_norm_of_one_stage_scales_are_refused(scale, when, observed):
    def script(run):
        optimizer = torch.optim.SGD(run.model.parameters())
        for scales in (when == "applied", when == "before", when == "after"):
            if scales:
                scale(run)
            step(run.model, run)
            optimizer.step()

    error = ran(script, *FP32, *STAGES)[1]
    assert isinstance(error, planc.PlanError), error
    assert "PL427" in str(error) and "test_undone.py" in str(error)
    assert "of the weights of one rank's stages" in str(error)


@pytest.mark.parametrize("when", ["applied", "before", "after"])
@pytest.mark.parametrize("how", NORMS)
def test_a_norm_of_weights_of_one_stage_is_reported_once(how, when, observed):
    def script(run):
        optimizer = torch.optim.SGD(run.model.parameters())
        for _ in range(2):
            if when == "applied":
                NORMS[how](weights_of(run))
            step(run.model, run)
            if when == "before":
                NORMS[how](weights_of(run))
                run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if when == "after":
                NORMS[how](weights_of(run))
        step(run.model, run)

    assert ran(script, *FP32, *STAGES)[1] is None
    assert observed == ["PL427"] * 2  # of each rank


def weights_over_stages(run):
    squares = sum(numerics.whole(w).pow(2).sum() for w in weights_of(run))
    torch.distributed.all_reduce(squares, group=run.meshes["pp"].get_group())
    for weight in weights_of(run):
        weight.mul_(squares**-0.5)


def norm_of_one_weight(run):
    return float(run.model.lm_head.weight.norm())


@torch.no_grad()
def decayed(run):
    for parameter in run.model.parameters():
        parameter.mul_(0.99).add_(parameter, alpha=-1e-3)


@torch.no_grad()
def normalized_alone(run):
    for weight in weights_of(run):
        weight.div_(weight.norm())
        weight.div_(weight.norm(dim=-1, keepdim=True))
    torch._foreach_div_(weights_of(run), torch._foreach_norm(weights_of(run)))


@torch.no_grad()
def averaged_weights(run):
    weights = [*run.model.parameters()]
    average = [p.detach().clone() for p in weights]
    torch._foreach_lerp_(average, weights, 0.25)
    for mean, weight in zip(average, weights, strict=True):
        weight.copy_(mean.lerp_(weight, 0.5))


@torch.no_grad()
def initialized(run):
    for weight in weights_of(run):
        weight.normal_(std=weight.shape[-1] ** -0.5)
        torch.nn.init.trunc_normal_(weight, std=0.02)


def finite(run):
    assert all(weight.isfinite().all() for weight in weights_of(run))
    assert not any((weight.abs().max() > 1e4).item() for weight in weights_of(run))


def trusted(run):
    """A step by the ratio of the norms of each weight and its gradient."""
    with torch.no_grad():
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                ratio = parameter.norm() / parameter.grad.norm()
                parameter.sub_(parameter.grad * ratio, alpha=1e-3)


def flattened(run):
    with torch.no_grad():
        flat = torch.cat([weight.flatten() for weight in weights_of(run)])
        for weight, part in zip(
            weights_of(run), flat.split([w.numel() for w in weights_of(run)]), strict=True
        ):
            weight.copy_(part.view_as(weight) * 0.5)


@pytest.mark.parametrize(
    "script",
    [
        weights_over_stages,
        norm_of_one_weight,
        decayed,
        normalized_alone,
        averaged_weights,
        initialized,
        finite,
        trusted,
        flattened,
        lambda run: torch.nn.utils.clip_grad_norm_([run.model.lm_head.weight], 1.0),
    ],
)
def test_what_a_script_may_compute_of_weights_of_a_stage(script, observed):
    def program(run):
        script(run)
        with_optimizer(script)(run)
        script(run)
        step(run.model, run)

    assert ran(program, *FP32, *STAGES)[1] is None
    assert observed == []


def test_averages_of_weights_of_a_stage_are_saved_as_plain_tensors(tmp_path):
    """What observes them leaves no attribute on them, which `torch.load` would refuse."""

    def script(run):
        step(run.model, run)
        path = tmp_path / f"{torch.distributed.get_rank()}.pt"
        torch.save([numerics.whole(2 * p.detach()) for p in run.model.parameters()], path)
        shards = [2 * gradient.to_local() for gradient in gradients_of(run)]
        torch.save(shards, path.with_suffix(".grad"))
        return len(torch.load(path)) and len(torch.load(path.with_suffix(".grad")))

    found, error = ran(script, *FP32, *STAGES)
    assert error is None and all(found)


def test_compiled_functions_of_a_script_are_compiled_beside_the_observation():
    function = torch.compile(lambda x: x.sin() + 1, fullgraph=True, backend="eager")

    def script(run):
        step(run.model, run)
        assert torch._C._len_torch_function_stack() == 1
        return float(function(torch.zeros(3)).sum())

    found, error = ran(script, *FP32, *STAGES)
    assert error is None and found == [3.0, 3.0]


@pytest.mark.parametrize("settings", [[], ["tp=2"]], ids=str)
def test_norms_of_a_script_without_stages_are_those_of_the_full_model(settings, observed):
    def both(run):
        step(run.model, run)
        right = float(run.clip_grad_norm_(float("inf")))
        by_mesh = {}
        for gradient in gradients_of(run):
            by_mesh.setdefault(gradient.device_mesh, []).append(gradient)
        found = [float(numerics.whole(norms(some))) for some in by_mesh.values()]
        return right, sum(norm**2 for norm in found) ** 0.5

    found, error = ran(both, *FP32, *settings)
    assert error is None and observed == []
    assert all(own == pytest.approx(right, rel=1e-5) for right, own in found)


@pytest.mark.parametrize("inside", [False, True])
def test_modes_of_a_script_stay_as_they_are(inside):
    """One around the pass, and one that begins after it and ends after the step."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def script(run):
        optimizer = torch.optim.SGD(run.model.parameters())
        if inside:
            with Mode():
                step(run.model, run)
        else:
            step(run.model, run)
        mode = Mode().__enter__()
        optimizer.step()
        depth = torch._C._len_torch_function_stack()
        mode.__exit__(None, None, None)
        return depth, torch._C._len_torch_function_stack()

    found, error = ran(script, *FP32, *STAGES)
    assert error is None and found == [(1, 0)] * 2


def out_of_memory(*_arguments):
    raise torch.OutOfMemoryError("out of memory")


def raising_backward(_module, _arguments, output):
    if output.requires_grad:
        output.register_hook(out_of_memory)


def raised_pass(model, batch, hook):
    """A pass of which the second block raises, in its forward or its backward pass."""
    mlp = next(m for n, m in model.named_modules() if numerics.plain(n) == "model.layers.1.mlp")
    handle = mlp.register_forward_hook(hook)
    with pytest.raises(torch.OutOfMemoryError):
        model(**batch).loss.backward()
    handle.remove()


@pytest.mark.parametrize("settings", [[], ["tp=2"], ["cp=2"], ["recompute=false"]], ids=str)
@pytest.mark.parametrize("clears", ["model", "optimizer", "prepared"])
@pytest.mark.parametrize("hook", [out_of_memory, raising_backward])
def test_a_step_after_a_pass_that_raised_is_that_of_one_process(hook, clears, settings):
    """The first pass leaves gradients, the second one raises, and `zero_grad` clears both."""
    right = step(numerics.build("llama"))
    tokens, labels = numerics.data(128)

    def script(run):
        optimizer = torch.optim.SGD(run.model.parameters())
        owner = {"model": run.model, "optimizer": optimizer}.get(clears) or run.optimizer(optimizer)
        batch = run.batch({"input_ids": tokens, "labels": labels})
        run.model(**batch).loss.backward()
        raised_pass(run.model, batch, hook)
        owner.zero_grad()
        run.model(**batch).loss.backward()
        found = {numerics.plain(n): p.grad for n, p in run.model.named_parameters()}
        return max(numerics.error(numerics.whole(found[name]), right[name]) for name in right)

    found, error = ran(script, *FP32, *settings)
    assert error is None, error
    assert max(found) < 1e-4


@pytest.mark.parametrize("whole", [False, True])
def test_a_forward_pass_that_raised_leaves_gradients_of_earlier_passes(whole):
    right = step(numerics.build("llama"))
    tokens, labels = numerics.data(128)
    batch = {"input_ids": tokens, "labels": labels}

    def script(run):
        with run.no_sync(whole=whole):
            run.model(**batch).loss.backward()
            raised_pass(run.model, batch, out_of_memory)
        run.model(**batch).loss.backward()
        found = {numerics.plain(n): p.grad for n, p in run.model.named_parameters()}
        return max(numerics.error(numerics.whole(found[n]) / 2, right[n]) for n in right)

    found, error = ran(script, *FP32)
    assert error is None, error
    assert max(found) < 1e-4


@pytest.mark.parametrize("hook", [out_of_memory, raising_backward])
def test_a_part_of_the_model_is_called_by_itself_after_a_pass_that_raised(hook):
    tokens, labels = numerics.data(128)
    batch = {"input_ids": tokens, "labels": labels}

    def features(model):
        model.model(input_ids=tokens).last_hidden_state.square().mean().backward()
        return {
            numerics.plain(n): numerics.whole(p.grad)
            for n, p in model.named_parameters()
            if p.grad is not None
        }

    right = features(numerics.build("llama"))

    def script(run):
        raised_pass(run.model, batch, hook)
        run.model.zero_grad()
        found = features(run.model)
        return max(numerics.error(found[n], right[n]) for n in right)

    found, error = ran(script, *FP32)
    assert error is None, error
    assert max(found) < 1e-4


def plain_parameter(model):
    weight = numerics.build("llama").lm_head.weight
    model.lm_head.weight = torch.nn.Parameter(weight.detach())


def fewer_blocks(model):
    model.model.layers = model.model.layers[:1]


@pytest.mark.parametrize("settings", [[], ["tp=2"], STAGES], ids=str)
@pytest.mark.parametrize("change", [plain_parameter, fewer_blocks])
def test_plain_parameters_and_fewer_blocks_stop_the_next_pass(change, settings):
    _, error = ran(lambda run: (change(run.model), step(run.model, run)), *FP32, *settings)
    assert isinstance(error, planc.PlanError), error
    assert "PL425" in str(error) and "test_undone.py" in str(error)


@pytest.mark.parametrize("settings", [[], ["tp=2"], STAGES], ids=str)
@pytest.mark.parametrize("part", ["", "model"])
def test_full_tensors_are_not_loaded_into_shards(part, settings):
    """Shards are."""
    state = numerics.build("llama").get_submodule(part).state_dict()

    def script(run):
        loaded = run.model.get_submodule(part)
        with torch.no_grad():
            doubled = {name: 2 * value for name, value in loaded.state_dict().items()}
        loaded.load_state_dict(doubled)
        right = [numerics.whole(value) for value in doubled.values()]
        same = map(torch.equal, right, map(numerics.whole, loaded.state_dict().values()))
        assert all(same)
        loaded.load_state_dict(state)

    _, error = ran(script, *FP32, *settings)
    assert isinstance(error, planc.PlanError), error
    assert "PL437" in str(error) and "test_undone.py" in str(error)


def test_torch_clips_gradients_on_several_meshes():
    """Those of experts are on another mesh than the others; torch stacks no norms of two meshes."""
    built, found = numerics.build("mixtral"), {}
    made = [copy.deepcopy(built) for _ in range(2)]

    def program(rank):
        options = {"device_type": "cpu", "require": "nothing"}
        run = planc.apply(made[rank], "mixtral", overrides=["ep=2", *FP32], **options)
        step(run.model, run)
        right = run.clip_grad_norm_(float("inf"))
        own = torch.nn.utils.clip_grad_norm_(run.model.parameters(), right / 3)
        found[rank] = [float(n) for n in (right, own, 3 * run.clip_grad_norm_(float("inf")))]

    assert run_ranks(2, program, 60) is None
    for right, *others in found.values():
        assert others == pytest.approx([right] * 2, rel=1e-4)
