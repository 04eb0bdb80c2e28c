"""Optimizers of a plan's own: read without running anything, right on shards or refuted."""

import ast
import sys

import own_optimizers
import pytest
import torch
from helpers import codes, compiled_of, simulated, slow
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, _redistribute, init_device_mesh

import planc
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import PlanError, Sink
from planc.emit.python.script import render
from planc.emit.text import render as text_of
from planc.ops.document import dumps, loads
from planc.runtime.own_optimizers import made_optimizer
from planc.runtime.standalone.optimizer import optimize, planned_optimizer

PLAN = """plan own for {family}
extend "llama.plan"
optimizer {{
    root                      : {rule}
    model.layers.*.*layernorm : adamw
}}
"""
LION = 'class("own_optimizers:Lion", betas = [0.9, 0.98])'


@pytest.fixture
def plan(tmp_path):
    def write(rule, family="llama"):
        path = tmp_path / "own.plan"
        path.write_text(PLAN.format(family=family, rule=rule))
        return str(path)

    return write


def test_checking_runs_no_code(plan, monkeypatch):
    monkeypatch.delitem(sys.modules, "own_optimizers")
    verdict, found = simulated("llama-3.1-8b", plan(LION))
    assert (verdict.verdict, codes(found)) == ("proved", [])
    assert "optimizer class" in [s.name for s in verdict.sections if s.verdict == "left out"]
    assert "own_optimizers" not in sys.modules


@pytest.mark.parametrize(
    ("rule", "verdict"),
    [
        (LION, "proved"),
        slow('class("own_optimizers:Normalized", weight_decay = 0)', "proved"),
        ('class("own_optimizers:LocalNorm", weight_decay = 0)', "refuted"),
    ],
)
def test_allowed_code_steps_the_small_model(plan, rule, verdict):
    found, findings = simulated("llama-3.1-8b", plan(rule), allow_code=True)
    assert found.verdict == verdict
    errors = [d.code for d in findings if d.severity == "error"]
    assert errors == (["PL509"] if verdict == "refuted" else [])
    lines = [d.labels[0].span.text for d in findings if d.severity == "error"]
    assert all("LocalNorm" in line for line in lines)
    assert "optimizer class" not in [s.name for s in found.sections]


@pytest.mark.slow
def test_signs_of_rounding_are_no_error(plan):
    """The bias of a key has a gradient of nothing but rounding, of which Lion takes the sign."""
    found, _ = simulated("qwen2.5-0.5b", plan(LION, "qwen2"), allow_code=True)
    assert found.verdict == "proved"


@pytest.mark.slow
def test_states_with_no_place_on_another_mesh(plan):
    rule = 'class("own_optimizers:Rows", weight_decay = 0)'
    found, findings = simulated("llama-3.1-8b", plan(rule), allow_code=True)
    assert found.verdict == "refuted"
    assert any("PL592" in fact for d in findings for fact in d.facts)


def test_it_is_in_the_text_the_document_and_the_script(plan):
    lowered = compiled_of("llama-3.1-8b", plan(LION), (), 4).lowered
    assert lowered.code == ("own_optimizers:Lion",)
    assert 'class "own_optimizers:Lion", betas = [0.9, 0.98]' in text_of(lowered, digest="0" * 64)
    assert loads(dumps(lowered), "x", Sink()) == lowered
    source = render(lowered, digest="0" * 64)
    assert 'kind=own_optimizers.Lion, arguments={"betas": [0.9, 0.98]}' in " ".join(source.split())
    assert "import own_optimizers\n" in source
    ast.parse(source)


@pytest.mark.parametrize(
    ("rule", "code", "words"),
    [
        ('class("own/optimizers.py")', "PL171", "names no class"),
        ("class", "PL171", "names no class"),
        ('class("a:B", state = bf16)', "PL012", "takes no argument `state`"),
        ('class("a:B", "c")', "PL012", "without a name"),
        ('class("a:B", lr = -1)', "PL012", "from 0"),
    ],
)
def test_what_a_plan_cannot_say(plan, rule, code, words):
    sink = Sink()
    assert compile_plan("llama-3.1-8b", plan(rule), sink, world_size=4).lowered is None
    assert [(d.code, words in d.message) for d in sink] == [(code, True)]


@pytest.fixture
def fake():
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    distributed.destroy_process_group()


def model_of():
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.AutoConfig.for_model(
        "llama", **sizes, num_attention_heads=4, num_key_value_heads=2
    )
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("rule", "allowed", "code", "words"),
    [
        (LION, False, "PL172", "a custom optimizer, own_optimizers:Lion, which is code"),
        ('class("own_optimizers:Nothing")', True, "PL172", "has no attribute"),
        ('class("own_optimizers:NoOptimizer")', True, "PL172", "not a torch.optim.Optimizer"),
        ('class("own_optimizers:Lion", beta = 1)', True, "PL591", "'beta'"),
    ],
)
def test_apply_refuses(plan, fake, rule, allowed, code, words):
    model = model_of()
    with pytest.raises(PlanError) as caught:
        planc.apply(model, plan(rule), device_type="cpu", allow_code=allowed)
    (found,) = caught.value.diagnostics
    assert (found.code, words in found.message) == (code, True)
    assert type(model.lm_head.weight) is nn.Parameter


def made(kind, weight_decay=1.0, **arguments):
    module = nn.Linear(4, 3)
    optimize(module, "class", lr=0.5, weight_decay=weight_decay, kind=kind, arguments=arguments)
    return module


def stepped(module, optimizer, steps):
    for step in range(steps):
        torch.manual_seed(step)
        module(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_it_steps_as_the_class_by_itself():
    mine = made(own_optimizers.Lion, betas=[0.9, 0.98])
    right = made(own_optimizers.Lion)
    right.load_state_dict(mine.state_dict())
    optimizer = planned_optimizer(mine, 0.02, 0.1)
    other = own_optimizers.Lion(right.parameters(), 0.01, (0.9, 0.98), 0.1)
    for schedule in (optimizer, other):
        stepped(mine if schedule is optimizer else right, schedule, 3)
        for group in schedule.param_groups:
            group["lr"] /= 4  # as a scheduler
        stepped(mine if schedule is optimizer else right, schedule, 2)
    assert torch.equal(mine.weight, right.weight)
    resumed = planned_optimizer(mine, 1.0, 0.3)
    resumed.load_state_dict(optimizer.state_dict())
    stepped(mine, resumed, 2)
    stepped(right, other, 2)
    assert torch.equal(mine.weight, right.weight)


@pytest.mark.parametrize(
    ("algorithm", "terms"),
    [
        ("class", {"kind": torch.optim.AdamW, "arguments": {"betas": [0.9, 0.99]}}),
        ("adamw", {"state": torch.float32, "betas": (0.9, 0.999), "eps": 1e-8}),
    ],
)
def test_states_are_loaded_bit_for_bit(algorithm, terms):
    """Also in another dtype than their parameter's, to which torch casts them."""
    module = nn.Linear(4, 3).bfloat16()
    optimize(module, algorithm, lr=1.0, weight_decay=1.0, **terms)
    optimizer = planned_optimizer(module, 0.1)
    torch.manual_seed(0)
    module(torch.randn(5, 4).bfloat16()).square().sum().backward()
    optimizer.step()
    for p in module.parameters():
        optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].float() + 1e-4
    other = planned_optimizer(module, 0.1)
    other.load_state_dict(optimizer.state_dict())
    for p in module.parameters():
        assert other.state[p]["exp_avg"].dtype == torch.float32
        assert torch.equal(other.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])


def test_a_class_without_weight_decay():
    assert made_optimizer(made(own_optimizers.Normalized), 0.1, 0.0).param_groups[0]["lr"] == 0.05
    assert made_optimizer(made(own_optimizers.Normalized, weight_decay=0.0), 0.1, 0.1)
    with pytest.raises(PlanError) as caught:
        made_optimizer(made(own_optimizers.Normalized), 0.1, 0.1)
    assert caught.value.diagnostics[0].code == "PL591"


def test_what_it_holds_is_counted_where_its_code_may_run(plan):
    """Lion has one state, and the estimate says that it took two."""
    step = {"batch": 8, "seq": 64, "world_size": 4}
    found = planc.measure("llama-3.2-1b", plan(LION), allow_code=True, stages=(0,), **step)
    assert "two states for each parameter of own_optimizers:Lion, which was not run" in str(found)
    held = found.ranks[0].moments["optimizer step"]
    assert held["optimizer state"] == pytest.approx(held["parameters"], rel=0.01)
    with pytest.raises(
        PlanError, match=r"PL727.*own_optimizers:Lion is code, imported only with --allow-code"
    ):
        planc.measure("llama-3.2-1b", plan(LION), **step)


def test_partial_gradients_are_summed_without_a_warning_of_torch(fake, caplog):
    """Those of a replicated parameter on a mesh with two axes."""
    _redistribute._warned_flatten_issues.clear()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    module = made(own_optimizers.Lion)
    for name, parameter in [*module.named_parameters()]:
        whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()] * 2)
        module.register_parameter(name, nn.Parameter(whole))
    optimize(module, "class", lr=0.5, weight_decay=1.0, kind=own_optimizers.Lion, arguments={})
    optimizer = planned_optimizer(module, 0.1, 0.0)
    for parameter in module.parameters():
        part = torch.ones(parameter.shape)
        parameter.grad = DTensor.from_local(part, mesh, [Partial()] * 2)
    optimizer.step()
    assert all(p.grad.placements == p.placements for p in module.parameters())
    assert "sequential" not in caplog.text
