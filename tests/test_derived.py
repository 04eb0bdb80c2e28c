"""Axes that follow from the mesh's, and units that lie on tensor ranks too."""

import pytest
from test_fsdp import judged, lowered

from planc.diagnostic import Sink
from planc.emit.script import render as script
from planc.emit.text import render as text_of
from planc.ir.derived import axes_of, known
from planc.lowering.document import digest, dumps, loads
from planc.lowering.ops import Divide, FullyShard

MESH = """plan t for mixtral
mesh {
 dp_replicate = 2
 dp_shard = auto
 cp = 1
 tp = 2
}
tensor on tp {
 model.layers.*.self_attn.{q,k,v}_proj : colwise
 model.layers.*.self_attn.o_proj : rowwise
}
"""  # a section begins in line 12
EXPERTS = "model.layers.*.mlp.experts"


def section(*lines, on="dp_shard_cp, replicate on dp_replicate"):
    body = "".join(f" {line}\n" for line in (*lines, "model.layers.* : unit", "root : unit"))
    return f"fsdp on {on} {{\n{body}}}\n"


def mixtral(text, **keywords):
    return lowered(text, "mixtral-8x7b", **keywords)


def test_names():
    mesh = ("dp_replicate", "dp_shard", "tp")
    assert axes_of("dp", mesh) == ("dp_replicate", "dp_shard")
    assert axes_of("dp_shard_cp", mesh) == ("dp_shard",)
    assert axes_of("ep_shard", mesh) == ("dp_shard", "tp")
    assert axes_of("tp", mesh) == ("tp",)
    assert axes_of("loss", mesh) == ()
    assert axes_of("dp", ("dp", "dp_shard")) == ("dp",)  # an axis of that name goes before
    assert axes_of("dp_cp", ("node", "gpu")) == ()
    assert known(("gpu",)) == ("gpu",)
    assert known(("dp_shard",)) == ("dp_shard", "dp", "dp_shard_cp", "dp_cp", "ep_shard")


def test_a_derived_axis_is_its_axes():
    names = MESH + section(f"{EXPERTS} : unit(on = ep_shard)")
    axes = MESH + section(
        f"{EXPERTS} : unit(on = dp_shard * tp)", on="dp_shard * cp, replicate on dp_replicate"
    )
    assert digest(mixtral(names)) == digest(mixtral(axes))


def test_experts_on_ep_shard():
    plan = mixtral(MESH + section(f"{EXPERTS} : unit(on = ep_shard)"), world=16)
    unit = next(op for op in plan.ops if isinstance(op, FullyShard))
    assert (unit.shard, unit.replicate) == (("dp_shard", "tp"), ("dp_replicate",))
    apart = mixtral(MESH + section(f"{EXPERTS} : unit"), world=16)
    whole = next(op for op in apart.ops if isinstance(op, FullyShard))
    assert unit.nbytes * 2 == whole.nbytes and unit.gathered == whole.gathered
    assert plan.averaged == apart.averaged == ("dp_replicate", "dp_shard")  # and never tp
    assert plan.data == apart.data
    assert "on dp_shard * tp = 8, replicated over dp_replicate = 2" in text_of(plan, digest="0")


def test_sizes_in_expressions():
    text = MESH + 'require ep_shard == dp_shard_cp * tp and dp == dp_cp "sizes"\n'
    assert mixtral(text + section(), world=16)
    wrong = text.replace("ep_shard ==", "ep_shard + 1 ==")
    findings = judged(wrong + section(), "mixtral-8x7b", world=16)[2]
    assert [(d.code, d.labels[0].span.line) for d in findings] == [("PL110", 12)]
    assert "ep_shard = 8" in findings[0].facts


def test_tensor_ranks_add_equal_gradients():
    """Where the plan divides a sum, a unit on tensor ranks has as many times the sum."""
    text = MESH + section("divide = 64", f"{EXPERTS} : unit(on = ep_shard)")
    plan = mixtral(text, world=16)
    divides = [op for op in plan.ops if isinstance(op, Divide)]
    assert [(op.factor, [str(m) for m in op.units]) for op in divides] == [
        (64, []),
        (128, ["model.layers[0:32].mlp.experts"]),
    ]
    again = loads(dumps(plan), "x.json", Sink())
    assert again == plan and digest(again) == digest(plan)
    assert "divided by 128, of model.layers[0:32].mlp.experts" in text_of(plan, digest="0")
    source = script(plan, digest="0" * 64)
    compile(source, "emitted.py", "exec")
    assert ".mlp.experts.set_gradient_divide_factor(128)" in source


MISTAKES = {
    "ep of several ranks": (
        MESH.replace(" cp = 1", " ep = 2") + section(on="dp_shard * ep"),
        [("PL380", 5), ("PL306", 3)],
    ),
    "a style on the axis": (
        MESH + section("model.layers.*.self_attn : unit(on = ep_shard)"),
        [("PL381", 13)],
    ),
    "no axis of a section": (
        MESH.replace(" cp = 1", " gpu = 1") + section(f"{EXPERTS} : unit(on = gpu * tp)"),
        [("PL442", 13)],
    ),
    "a tensor section over several": (
        MESH.replace("tensor on tp", "tensor on dp") + section(on="dp_shard_cp"),
        [("PL305", 8), ("PL306", 6)],
    ),
    "no such name": (MESH + section(on="dp_shrd_cp"), [("PL305", 12), ("PL306", 3), ("PL306", 4)]),
    "an axis twice": (
        MESH + section(on="dp_shard_cp * cp, replicate on dp_replicate"),
        [("PL304", 12)],
    ),
    "both ways": (
        MESH + section(on="dp_shard_cp, replicate on dp"),
        [("PL310", 12)],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    text, right = MISTAKES[name]
    findings = judged(text, "mixtral-8x7b", world=16)[2]
    assert sorted((d.code, d.labels[0].span.line) for d in findings) == sorted(right)


def test_a_name_may_be_near():
    findings = judged(MESH + section(on="dp_shard_cpp"), "mixtral-8x7b", world=16)[2]
    assert "did you mean `dp_shard_cp`" in findings[0].help
