"""Packed linear layers and experts: how their styles read, and the shapes on a rank."""

import pytest
from helpers import facts

from planc.ir.local_shapes import local_shape
from planc.model.facts import Modules
from planc.ops.styles import Colwise, Experts, ParameterLayout, Rowwise, Shard, style_text


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (Colwise(parts=2), "colwise(parts = 2)"),
        (Rowwise(parts=(4, 2)), "rowwise(parts = [4, 2])"),
        (Colwise(parts=2, interleaved=True, local=False), None),
        (
            Experts(
                layouts=(
                    ("up", ParameterLayout(layout=Shard(1), parts=2)),
                    ("down", ParameterLayout(layout=Shard(2))),
                ),
                output=Shard(0),
            ),
            "experts(up = shard(1, parts = 2), down = shard(2), -> shard(0))",
        ),
    ],
)
def test_a_style_reads_as_it_is_written(style, text):
    text = text or "colwise(parts = 2, interleaved = true, local = false)"
    assert style_text(style) == text


def test_local_shapes():
    known = facts("mixtral-8x7b")
    experts = next(m for m in known.model.below() if m.path and m.path[-1] == "experts")
    shapes = {p.name: p for p in experts.module.parameters}
    held = (
        ("gate_up_proj", ParameterLayout(layout=Shard(1), parts=2)),
        ("down_proj", ParameterLayout(layout=Shard(2))),
    )
    rule, plan = lowered_rule(experts, Experts(layouts=held))
    assert local_shape(shapes["gate_up_proj"], (rule,), plan) == (8, 2 * 14336 // 4, 4096)
    assert local_shape(shapes["down_proj"], (rule,), plan) == (8, 4096, 14336 // 4)


def lowered_rule(modules: Modules, style):
    from planc.diagnostics.source import Source
    from planc.ir.nodes import Mesh, Plan, TensorRule
    from planc.ops.lowered import MeshAxis

    span = Source("t.plan", "x").span(0, 1)
    mesh = Mesh(axes=(MeshAxis(name="tp", size=4, origin=span),), origin=span)
    plan = Plan(name="t", families=(), options={}, mesh=mesh, origin=span)
    return TensorRule(modules=modules, axis="tp", style=style, origin=span), plan
