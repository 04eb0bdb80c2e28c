"""Packed linears, bare parameters and experts: what is refused, and what is said of the rest."""

import pytest
from test_checks import codes, facts, judged, tensor

from planc.model.facts import Modules
from planc.ops.styles import Colwise, Experts, Held, Rowwise, Shard, style_text
from planc.plan.local_shapes import local_shape

MLP = " model.layers.*.mlp {\n  gate_up_proj : %s\n  down_proj : %s\n }"
EXPERTS = " model.layers.*.mlp.experts : experts(%s)"


def phi(up, down="rowwise", tp=2):
    return judged(facts("phi-4"), tensor(MLP % (up, down), tp=tp, family="phi3"))


def mixtral(arguments, tp=2):
    return judged(facts("mixtral-8x7b"), tensor(EXPERTS % arguments, tp=tp, family="mixtral"))


@pytest.mark.parametrize("up", ["parts = 2", "parts = [17920, 17920]"])
def test_parts_are_right(up):
    assert phi(f"colwise({up})") == []


@pytest.mark.parametrize(
    ("up", "down", "tp", "code", "words"),
    [
        ("colwise(parts = 2)", "rowwise", 3, "PL220", "a part of 17,920"),
        ("colwise(parts = 3)", "rowwise", 2, "PL220", "are not 3 equal parts"),
        ("colwise(parts = [17919, 17921])", "rowwise", 2, "PL220", "a part of 17,919"),
        ("colwise(parts = 2, interleaved = true)", "rowwise", 3, "PL220", "17,920 pairs"),
        ("colwise(parts = [4096, 8192])", "rowwise", 2, "PL221", "are 12,288 together"),
        ("colwise(-> replicate, parts = 2)", "rowwise", 2, "PL223", "gathered rank by rank"),
        ("colwise(parts = 2, local = false)", "rowwise", 2, "PL223", "as a DTensor"),
        ("colwise(-> replicate)", "rowwise(replicate -> replicate, parts = 2)", 2, "PL223", "cut"),
    ],
)
def test_parts_are_wrong(up, down, tp, code, words):
    found = [d for d in phi(up, down, tp) if d.code == code]
    assert len(found) == 1 and words in found[0].message


def test_the_help_names_sizes_that_are_right():
    found = phi("colwise(parts = 2)", tp=3)[0]
    assert "1, 2, 4, 5, 7, 8" in found.help and "3" not in found.help.split(", ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("gate_up_proj = shard(1, parts = 2), down_proj = shard(2)", []),
        ("gate_up_proj = shard(-2, parts = 2), down_proj = shard(-1)", []),
        ("gate_up_proj = shard(1, parts = 2), down_proj = shard(3)", ["PL222"]),
        ("gate_up_proj = shard(1, parts = 2), down = shard(2)", ["PL222", "PL225"]),
        ("down_proj = shard(2)", ["PL225"]),
        ("gate_up_proj = shard(1, parts = [1, 2]), down_proj = shard(2)", ["PL221"]),
    ],
)
def test_experts(arguments, expected):
    assert codes(mixtral(arguments)) == expected


def test_experts_that_do_not_divide():
    found = mixtral("gate_up_proj = shard(1, parts = 2), down_proj = shard(2)", tp=3)
    assert codes(found) == ["PL220"]


def test_replicated_modules_hold_no_others():
    rules = (
        " model.layers.*.mlp : replicate(gradient = sum)\n model.layers.*.mlp.gate : replicate\n"
        + EXPERTS % "gate_up_proj = shard(1, parts = 2), down_proj = shard(2)"
    )
    found = judged(facts("mixtral-8x7b"), tensor(rules, family="mixtral"))
    assert codes(found) == ["PL224"]
    assert judged(facts("mixtral-8x7b"), tensor(rules.split("\n")[1], family="mixtral")) == []


def test_each_part_of_attention_is_split_by_heads():
    sizes = "parts = [5120, 1280, 1280]"
    rules = f" model.layers.*.self_attn {{\n  qkv_proj : colwise({sizes})\n  o_proj : rowwise\n }}"
    assert judged(facts("phi-4"), tensor(rules, tp=2, family="phi3")) == []
    found = judged(facts("phi-4"), tensor(rules, tp=4, family="phi3"))
    assert "PL201" in codes(found) and "10 key/value heads" in found[0].message


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (Colwise(parts=2), "colwise(parts = 2)"),
        (Rowwise(parts=(4, 2)), "rowwise(parts = [4, 2])"),
        (Colwise(parts=2, interleaved=True, local=False), None),
        (
            Experts(
                held=(("up", Held(layout=Shard(1), parts=2)), ("down", Held(layout=Shard(2)))),
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
    held = (("gate_up_proj", Held(layout=Shard(1), parts=2)), ("down_proj", Held(layout=Shard(2))))
    rule, plan = lowered_rule(experts, Experts(held=held))
    assert local_shape(shapes["gate_up_proj"], (rule,), plan) == (8, 2 * 14336 // 4, 4096)
    assert local_shape(shapes["down_proj"], (rule,), plan) == (8, 4096, 14336 // 4)


def lowered_rule(modules: Modules, style):
    from planc.plan.ir import Axis, Mesh, Plan, TensorRule
    from planc.source import Source

    span = Source("t.plan", "x").span(0, 1)
    mesh = Mesh(axes=(Axis(name="tp", size=4, origin=span),), origin=span)
    plan = Plan(name="t", families=(), options={}, mesh=mesh, origin=span)
    return TensorRule(modules=modules, axis="tp", style=style, origin=span), plan
