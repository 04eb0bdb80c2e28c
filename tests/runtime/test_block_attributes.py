"""What a script sets on a recomputed block is set on the block, as in one process."""

import copy

import numerics
import pytest
import torch
from torch import nn

import planc
from planc.simulate.thread_ranks import run_ranks

FP32 = ["param_dtype=fp32", "reduce_dtype=fp32"]
GRANITE = {"model_type": "granite", "residual_multiplier": 0.2}


def on_ranks(script, *settings, **changes):
    """What a script returns for the run of each of two threads as ranks."""
    built, found = numerics.build("llama", **changes), {}
    models = [copy.deepcopy(built) for _ in range(2)]

    def program(rank):
        options = {"device_type": "cpu", "require": "nothing"}
        overrides = [*FP32, *settings]
        found[rank] = script(planc.apply(models[rank], "llama", overrides=overrides, **options))

    failure = run_ranks(2, program, 60)
    assert failure is None, failure and (failure.error or failure.message)
    return [found[rank] for rank in range(2)]


def frozen(*shape):
    return nn.Parameter(torch.ones(shape), requires_grad=False)


def frozen_module():
    return nn.Linear(3, 2).requires_grad_(False)


def removed(block):
    block.extra, block.other = frozen(2), frozen(3)
    del block.extra


def replaced(block):
    block.register_buffer("extra", torch.ones(2))
    block.extra = frozen(2)


def emptied(block):
    block.register_buffer("extra", torch.ones(2))
    block.extra = None


CHANGES = {
    "parameter": lambda block: setattr(block, "extra", frozen(2)),
    "register_parameter": lambda block: block.register_parameter("extra", frozen(2)),
    "buffer": lambda block: setattr(block, "extra", nn.Buffer(torch.ones(2))),
    "register_buffer": lambda block: block.register_buffer("extra", torch.ones(2)),
    "not stored": lambda block: block.register_buffer("extra", torch.ones(2), persistent=False),
    "module": lambda block: setattr(block, "extra", frozen_module()),
    "add_module": lambda block: block.add_module("extra", frozen_module()),
    "register_module": lambda block: block.register_module("extra", frozen_module()),
    "removed": removed,
    "replaced": replaced,
    "emptied": emptied,
}


def tensor_names(model):
    """The names of the parameters, of the buffers, and of what is stored."""
    kinds = (model.named_parameters(), model.named_buffers())
    return [sorted(numerics.plain(name) for name, _ in named) for named in kinds] + [
        sorted(model.state_dict())
    ]


@pytest.mark.parametrize("settings", [[], ["tp=2"]], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_names_of_tensors_are_those_of_one_process(change, settings):
    alone = numerics.build("llama")
    CHANGES[change](alone.model.layers[0])
    tokens, labels = numerics.data(128)
    loss = alone(input_ids=tokens, labels=labels).loss.detach()

    def script(run):
        CHANGES[change](run.model.model.layers[0])
        run.model.load_state_dict(run.model.state_dict())
        return tensor_names(run.model), run.evaluate([{"input_ids": tokens, "labels": labels}])

    for names, own in on_ranks(script, *settings):
        assert names == tensor_names(alone)
        torch.testing.assert_close(own, loss, rtol=1e-5, atol=1e-6)


def scaled(model):
    """The forward of a block multiplies by this attribute."""
    for block in model.model.layers:
        block.residual_multiplier = 0.5


def not_trained(model):
    """`training` of a block alone, which its children do not follow."""
    block = model.model.layers[0]
    block.training = False
    return [block.training, block.mlp.training, block.train().training, block.mlp.training]


@pytest.mark.parametrize("settings", [[], ["tp=2"], ["pp=2", "microbatches=2"]], ids=str)
def test_attributes_that_a_forward_reads_are_those_of_one_process(settings):
    tokens, labels = numerics.data(128)
    batch = {"input_ids": tokens, "labels": labels}
    alone = numerics.build("llama", **GRANITE)
    first = alone(**batch).loss.detach()
    scaled(alone)
    right = alone(**batch).loss
    right.backward()
    assert abs(right - first) > 1e-2
    wanted = {name: p.grad for name, p in alone.named_parameters()}

    def script(run):
        scaled(run.model)
        loss = run.forward_backward([batch])
        found = {numerics.plain(n): p.grad for n, p in run.model.named_parameters()}
        return loss, max(numerics.error(numerics.whole(g), wanted[n]) for n, g in found.items())

    for loss, error in on_ranks(script, *settings, **GRANITE):
        torch.testing.assert_close(loss, right.detach(), rtol=1e-5, atol=1e-6)
        assert error < 1e-4


def test_the_mode_of_a_block_is_that_of_one_process():
    right = not_trained(numerics.build("llama"))
    assert on_ranks(lambda run: not_trained(run.model)) == [right] * 2


def test_an_unknown_attribute_is_not_deleted():
    def script(run):
        with pytest.raises(AttributeError, match="nothing"):
            del run.model.model.layers[0].nothing

    on_ranks(script)
