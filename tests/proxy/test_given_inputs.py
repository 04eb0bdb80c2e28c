"""What a forward takes and what the loss is, as a script says it, the model, or its layers."""

import pytest
import torch
from helpers import checked, sampled
from one_block import Block
from test_own_module import PLAN as OWN
from torch import nn

import planc

PLAN = "plan own for Pictures, Paired, Stated\n" + OWN.partition("\n")[2]


class Pictures(nn.Module):
    """As timm's vision transformers: patches of an image of a stated size, and classes."""

    def __init__(self):
        super().__init__()
        self.img_size = 24
        self.patch_embed = nn.Conv2d(3, 32, 8, 8)
        self.pos_embed = nn.Parameter(torch.randn(1, 9, 32))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Paired(nn.Module):
    """Two inputs, one of them the same for all rows."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, states, scale, places):
        x = states * scale[:, None, None] + places
        for block in self.blocks:
            x = block(x)
        return {"states": x}


class Stated(Paired):
    def planc_inputs(self, rows, seed):
        return made(rows, seed)

    def planc_loss(self, output, inputs):
        return loss(output, inputs)


def made(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, 4, 32, generator=generator)
    return {"states": states, "scale": states[:, 0, 0], "places": torch.arange(4.0)[:, None]}


def loss(output, inputs):
    return (output["states"] - inputs["states"]).abs().mean()


WAYS = {
    "images are seen": (Pictures, {}),
    "a function and a loss": (Paired, {"inputs": made, "loss": loss}),
    "an example": (Paired, {"inputs": made(3, 0)}),
    "methods of the model": (Stated, {}),
}


@pytest.mark.parametrize(("kind", "given"), sampled(WAYS.values(), 2), ids=WAYS)
def test_a_right_plan_is_proved_and_a_wrong_one_refuted(tmp_path, kind, given):
    assert checked(kind(), PLAN, tmp_path, **given) == {}
    wrong = PLAN.replace("down : rowwise", "down : rowwise(-> partial)")
    assert {"PL501", "PL503"} & {*checked(kind(), wrong, tmp_path, **given)}


def test_what_is_not_said_or_not_right_is_unknown_with_the_reason(tmp_path):
    assert "PL504" in checked(Paired(), PLAN, tmp_path)
    found = checked(Paired(), PLAN, tmp_path, inputs={"states": torch.zeros(2, 4, 32)})["PL504"]
    assert "missing" in found.message and "scale" in found.message
    found = checked(Paired(), PLAN, tmp_path, loss=loss)["PL504"]
    assert "a loss is given, and not the inputs" in found.message
    for wrong, said in {
        lambda: {}: "`planc_inputs(rows, seed)` fails: TypeError",
        lambda rows, seed: torch.zeros(rows, 4, 32): "`planc_inputs` gives a Tensor",
        lambda rows, seed: {"states": torch.zeros(64, 32)}: "no tensor with `rows` entries",
    }.items():
        assert said in checked(Paired(), PLAN, tmp_path, inputs=wrong)["PL504"].message
    for wrong, said in {
        lambda output: 0: "`planc_loss(output, inputs)` fails: TypeError",
        lambda output, inputs: 0.5: "`planc_loss` gives a float",
        lambda output, inputs: output["states"]: "gives [2, 4, 32] numbers, and not one",
        lambda output, inputs: output["states"].detach().mean(): "without a gradient",
    }.items():
        assert said in checked(Paired(), PLAN, tmp_path, inputs=made, loss=wrong)["PL504"].message
    assert (
        "are a Tensor"
        in checked(Paired(), PLAN, tmp_path, inputs=torch.zeros(2, 4))["PL504"].message
    )
    with pytest.raises(ValueError, match="and not for a name"):
        planc.check("gpt2", "gpt2", inputs=made)
