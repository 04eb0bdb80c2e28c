"""`planc.check` of a module of one's own: copies of it are run in this process."""

import pytest
import torch
from helpers import checked, slow
from one_block import Block
from torch import nn

import planc
from planc.model.small import user_model


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
    assert "parameters: give a small model of the same code" in found.message


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
