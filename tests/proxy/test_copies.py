"""A small model that is built again by the same seed is a copy: equal, and with its own weights."""

import pytest
import torch

from planc.proxy.transformers_model import TransformersBuilder

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    **{"n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 64, "n_positions": 32},
}


@pytest.fixture
def builder(monkeypatch):
    """A builder that counts how often transformers builds its model."""
    made = TransformersBuilder(GPT2)
    build, made.calls = made._cls._from_config, 0

    def counted(*args, **kwargs):
        made.calls += 1
        return build(*args, **kwargs)

    monkeypatch.setattr(made._cls, "_from_config", counted)
    return made


def state():
    return torch.random.default_generator.get_state()


def test_the_same_seed_gives_the_same_model_and_numbers(builder):
    one, after = builder.build(3), state()
    torch.rand(5)
    two, again = builder.build(3), state()
    assert builder.calls == 1 and torch.equal(after, again)
    for (name, mine), (other, theirs) in zip(
        one.named_parameters(), two.named_parameters(), strict=True
    ):
        assert name == other and torch.equal(mine, theirs) and mine is not theirs
    assert two.lm_head.weight is two.transformer.wte.weight is not one.lm_head.weight
    assert one.training and two.training


def test_what_a_plan_changes_stays_in_its_copy(builder):
    one = builder.build(0)
    one.config.n_embd = 64
    with torch.no_grad():
        one.lm_head.weight.zero_()
    two = builder.build(0)
    assert one.transformer.config.n_embd == 64 and two.config.n_embd == 32
    assert two.lm_head.weight.abs().sum() > 0
    sample = builder.sample()
    two(**sample).loss.backward()
    assert all(p.grad is not None for p in two.parameters())
    assert builder.build(0).lm_head.weight.grad is None


def test_another_seed_gives_another_model(builder):
    first, second = (builder.build(seed).lm_head.weight for seed in (0, 1))
    assert builder.calls == 2 and not torch.equal(first, second)
    assert torch.equal(builder.build(0).lm_head.weight, first)
