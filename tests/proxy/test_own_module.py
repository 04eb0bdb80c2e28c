"""`planc.check` of a module of one's own: copies of it are run in this process."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from helpers import checked, slow
from one_block import Block
from torch import nn
from transformers import LlamaForCausalLM

sys.path.append(str(Path(__file__).parent / "processes"))
import numerics

import planc
from planc.model.passed_arguments import name_passed_arguments
from planc.proxy import user_model
from planc.simulate.thread_ranks import run_ranks


class Net(nn.Module):
    """A model that returns logits; its loss is computed outside."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(32, 50)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WithLoss(Net):
    """A model that takes labels, as nanoGPT."""

    def forward(self, tokens, targets=None):
        logits = super().forward(tokens)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class WithBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((32,), 2.0), persistent=False)

    def forward(self, tokens):
        return super().forward(tokens) * self.scale.mean()


class DrawingBlock(Block):
    """Draws in its code: no module and no configuration says it."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class Drawing(Net):
    def __init__(self, block=DrawingBlock):
        super().__init__()
        self.blocks = nn.ModuleList([block(), block()])


class StatedBlock(Block):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(super().forward(x))


class WithoutInputs(Net):
    def forward(self):
        return super().forward(torch.arange(8)[None])


class TwoInputs(Net):
    def forward(self, tokens, *, mood):
        return super().forward(tokens) * mood


PLAN = """plan own for Net, TwoInputs, WithLoss, WithBuffer, WithoutInputs, Drawing

mesh {
    dp_shard = auto
    tp       = 2
}

tensor on tp {
    blocks.* {
        up   : colwise
        down : rowwise
    }
}

fsdp on dp_shard {
    blocks.* : unit
    root     : unit
}
"""
WRONG = PLAN.replace("down : rowwise", "down : rowwise(-> partial)")


@pytest.mark.parametrize(
    ("kind", "device"),
    [(Net, "cpu"), (WithLoss, "meta"), slow(Net, "meta"), slow(WithLoss, "cpu")],
)
def test_a_right_plan_is_proved_and_a_wrong_one_refuted(tmp_path, kind, device):
    with torch.device(device):
        model = kind()
    assert checked(model, PLAN, tmp_path) == {}
    found = checked(model, WRONG, tmp_path)
    assert list(found) == ["PL501"] and "blocks.*" in found["PL501"].message
    assert 11 in {label.span.line for label in found["PL501"].labels}


@pytest.mark.parametrize("block", [DrawingBlock, StatedBlock])
def test_ranks_draw_alike_whoever_draws(tmp_path, block):
    """tests/tools/init/test_init_own.py refutes plans whose ranks do not."""
    assert checked(Drawing(block), PLAN, tmp_path) == {}


def test_the_module_is_left_as_it_was(tmp_path):
    torch.manual_seed(0)
    model = Net().eval()
    model.table.weight.requires_grad_(False)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    assert checked(model, PLAN, tmp_path) == {}
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert not model.training and not model._forward_hooks and not model._forward_pre_hooks
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_run_is_unknown_with_the_reason(tmp_path, monkeypatch):
    with torch.device("meta"):
        lost = WithBuffer()
    assert (
        "its buffer scale is on the meta device" in checked(lost, PLAN, tmp_path)["PL504"].message
    )
    assert checked(WithBuffer(), PLAN, tmp_path) == {}
    found = checked(WithoutInputs(), PLAN, tmp_path)["PL504"]
    assert "its forward takes no argument" in found.message
    assert "`planc verify`" in found.help
    found = checked(TwoInputs(), PLAN, tmp_path)["PL504"]
    assert "missing 1 required" in found.message and "`planc_inputs`" in found.help
    monkeypatch.setattr(user_model, "UNSHRUNK", 1000)
    found = checked(Net(), PLAN, tmp_path)["PL504"]
    assert "parameters: give a smaller model of the same code" in found.message


def test_a_changed_model_of_a_library_is_run_itself(tmp_path):
    """A small model that transformers builds would not have the user's layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)

    class Own(nn.Linear):
        """It adds up its own weight, of which a rank has a part."""

        def forward(self, x):
            weight = getattr(self.weight, "to_local", lambda: self.weight)()
            return super().forward(x) * weight.square().mean()

    plain = LlamaForCausalLM(config)
    options = {"world_size": 4, "overrides": ["tp=2", "sequence=false"]}
    assert not [d for d in planc.check(plain, "llama", **options) if d.severity == "error"]
    for layer in plain.model.layers:
        layer.mlp.down_proj = Own(64, 32, bias=False)
    found = planc.check(plain, "llama", **options)
    assert {d.code for d in found if d.severity == "error"} == {"PL503"}


class Passing(LlamaForCausalLM):
    """A class of a script that passes its arguments on."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class PassingSome(LlamaForCausalLM):
    def forward(self, input_ids, scale=1.0, **kwargs):
        return LlamaForCausalLM.forward(self, input_ids=input_ids, **kwargs)


class PassingNone(LlamaForCausalLM):
    def forward(self, input_ids, labels=None, **kwargs):
        return self.model(input_ids)


def passing(kind):
    model = numerics.build("llama")
    model.__class__ = kind
    return model


def tied():
    model = numerics.build("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def test_the_arguments_that_a_forward_passes_on_are_named():
    base = inspect.signature(LlamaForCausalLM.forward)
    for kind in (Passing, PassingSome, PassingNone):
        name_passed_arguments(passing(kind))
        name_passed_arguments(passing(kind))  # again: nothing changes
    assert inspect.signature(Passing.forward).parameters == base.parameters
    some = inspect.signature(PassingSome.forward).parameters
    assert {*some} == {*base.parameters, "scale"} and [*some][:3] == ["self", "input_ids", "scale"]
    assert some["position_ids"].kind is inspect.Parameter.KEYWORD_ONLY
    assert [*inspect.signature(PassingNone.forward).parameters][1:] == [
        "input_ids",
        "labels",
        "kwargs",
    ]
    passing(PassingSome)(numerics.data(128)[0], scale=2.0, use_cache=False)


@pytest.mark.parametrize("settings", [["tp=2"], ["cp=2"], ["pp=2", "microbatches=2"]], ids=str)
@pytest.mark.parametrize(
    "make",
    [lambda: passing(Passing), lambda: passing(PassingSome), tied],
    ids=["passing", "some", "tied"],
)
def test_a_model_that_a_script_has_changed_before_apply_trains_as_alone(make, settings):
    """Its forward passes arguments on by `**kwargs`; its weights are tied, and its configuration
    does not state it.
    """
    tokens, labels = numerics.data(128)
    single, found = make(), {}
    right = single(input_ids=tokens, labels=labels).loss
    right.backward()
    grads = {name: p.grad for name, p in single.named_parameters()}
    models = [make() for _ in range(2)]

    def rank(number):
        overrides = ["param_dtype=fp32", "reduce_dtype=fp32", *settings]
        run = planc.apply(models[number], "llama", overrides=overrides, device_type="cpu")
        loss = run.forward_backward([{"input_ids": tokens, "labels": labels}])
        named = ((numerics.plain(n), p.grad) for n, p in run.model.named_parameters())
        errors = [numerics.error(numerics.whole(g), grads[n]) for n, g in named if g is not None]
        found[number] = loss, max(errors)

    failure = run_ranks(2, rank, seconds=60)
    assert failure is None, failure and (failure.error or failure.message)
    for loss, error in found.values():
        torch.testing.assert_close(loss, right.detach(), rtol=1e-5, atol=1e-6)
        assert error < 1e-4
