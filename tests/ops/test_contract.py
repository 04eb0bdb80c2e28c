"""The contract of each style is complete, and says what torch's own style does."""

from typing import get_args

import pytest
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from planc.ops import styles as ir
from planc.ops.contract import Contract, Grad, Side, contract
from planc.ops.layouts import Partial, Replicate, Shard

LAYOUT = ir.ParameterLayout(layout=Shard(0))
EXAMPLES = {
    ir.Colwise: ir.Colwise(),
    ir.Rowwise: ir.Rowwise(),
    ir.Sequence: ir.Sequence(),
    ir.Input: ir.Input(positional=(ir.Redistribution(Shard(1), Replicate()),)),
    ir.Output: ir.Output(positional=(ir.Redistribution(Replicate(), Shard(1)),)),
    ir.Replicated: ir.Replicated(summed=True),
    ir.MlaKv: ir.MlaKv(rope=8),
    ir.Parameters: ir.Parameters(layouts=(("weight", LAYOUT),)),
    ir.Experts: ir.Experts(layouts=(("weight", LAYOUT),)),
    ir.Features: ir.Features(),
    ir.Attributes: ir.Attributes(names=("num_heads",)),
    ir.Custom: ir.Custom(name="mine", path="styles:Mine"),
}


def test_every_style_has_one():
    assert set(EXAMPLES) == set(get_args(get_args(ir.Style)[0]))
    for style in EXAMPLES.values():
        assert isinstance(contract(style), Contract)


@pytest.mark.parametrize(
    ("style", "torch_style"),
    [(ir.Colwise(), ColwiseParallel()), (ir.Rowwise(), RowwiseParallel())],
)
def test_weighted_styles_are_torchs(style, torch_style):
    made = contract(style)
    [taken], [given] = made.takes, made.gives
    assert str(taken.source) == _plain(torch_style.input_layouts[0])
    assert str(given.target) == _plain(torch_style.output_layouts[0])


def test_sequence_is_torchs():
    [taken] = contract(ir.Sequence()).takes
    assert _plain(SequenceParallel().sequence_sharding[0]) == str(taken.target) == "shard(1)"


def _plain(placement):
    return "replicate" if placement.is_replicate() else f"shard({placement.dim})"


@pytest.mark.parametrize(
    ("style", "kind", "forward", "backward"),
    [
        (ir.Colwise(), "linear", (Replicate(), Replicate()), (Partial(), Replicate())),
        (ir.Colwise(input=Shard(1)), "linear", (Shard(1), Replicate()), (Partial(), Shard(1))),
        (ir.Colwise(), "embedding", (Replicate(), Replicate()), (Replicate(), Replicate())),
        (
            ir.Rowwise(input=Replicate()),
            "linear",
            (Replicate(), Shard(-1)),
            (Shard(-1), Replicate()),
        ),
        (EXAMPLES[ir.Input], "other", (Shard(1), Replicate()), (Partial(), Shard(1))),
    ],
)
def test_inputs(style, kind, forward, backward):
    [flow] = contract(style, kind).takes
    assert (flow.forward, flow.backward) == (forward, backward)


@pytest.mark.parametrize(
    ("style", "forward", "backward"),
    [
        (ir.Rowwise(), (Partial(), Replicate()), (Replicate(), Replicate())),
        (ir.Rowwise(output=Shard(1)), (Partial(), Shard(1)), (Shard(1), Replicate())),
        (ir.Colwise(output=Replicate()), (Shard(-1), Replicate()), (Replicate(), Shard(-1))),
        (EXAMPLES[ir.Output], (Replicate(), Shard(1)), (Shard(1), Replicate())),
    ],
)
def test_outputs(style, forward, backward):
    [flow] = contract(style).gives
    assert (flow.forward, flow.backward) == (forward, backward)


def test_experts_sum_the_gradients_of_states_and_of_routed_weights():
    made = contract(EXAMPLES[ir.Experts])
    assert made.splits is Side.INSIDE
    assert [(f.gradient, f.routed) for f in made.takes] == [
        (Grad.PARTIAL, False),
        (Grad.PARTIAL, True),
    ]
