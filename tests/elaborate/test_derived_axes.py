"""Axes that follow from the mesh's, and units that lie on tensor ranks too."""

import pytest
from helpers import fsdp, judged, lowered

from planc.diagnostics.diagnostic import Sink
from planc.diffing.compare import compare
from planc.diffing.render import render as diff_text
from planc.emit.python.script import render as script
from planc.emit.text import render as text_of
from planc.ir.mesh_axes import axes_of, role_of, valid_axes
from planc.ops.base import AxisRole
from planc.ops.document import digest, dumps, loads
from planc.ops.fsdp import Divide, FullyShard

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
    return fsdp(*lines, "model.layers.* : unit", on=on)


def mixtral(text, **keywords):
    return lowered(text, model="mixtral-8x7b", **keywords)


def test_the_axes_of_a_name():
    mesh = ("dp_replicate", "dp_shard", "tp")
    assert axes_of("dp", mesh) == ("dp_replicate", "dp_shard")
    assert axes_of("dp_shard_cp", mesh) == ("dp_shard",)
    assert axes_of("ep_shard", mesh) == ("dp_shard", "tp")
    assert axes_of("tp", mesh) == ("tp",)
    assert axes_of("loss", mesh) == ()
    assert axes_of("dp", ("dp", "dp_shard")) == ("dp",)  # an axis of that name goes before
    assert axes_of("dp_cp", ("node", "gpu")) == ()
    assert valid_axes(("gpu",)) == ("gpu",)
    assert valid_axes(("dp_shard",)) == ("dp_shard", "dp", "dp_shard_cp", "dp_cp", "ep_shard")


def test_experts_on_ep_shard():
    plan = mixtral(MESH + section(f"{EXPERTS} : unit(on = ep_shard)"), world=16)
    unit = next(op for op in plan.ops if isinstance(op, FullyShard))
    assert (unit.shard, unit.replicate) == (("dp_shard", "tp"), ("dp_replicate",))
    apart = mixtral(MESH + section(f"{EXPERTS} : unit"), world=16)
    whole = next(op for op in apart.ops if isinstance(op, FullyShard))
    assert unit.nbytes * 2 == whole.nbytes and unit.gathered == whole.gathered
    assert plan.averaged_axes == apart.averaged_axes == ("dp_replicate", "dp_shard")  # and never tp
    assert plan.data == apart.data
    assert "on dp_shard * tp = 8, replicated over dp_replicate = 2" in text_of(plan, digest="0")


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


def test_a_dim_by_itself():
    """8 experts of [8, 28672, 4096]: along dim 0 up to 8 ranks, beyond along dim 1."""
    for text in (
        "unit(on = ep_shard, shard_dim = auto)",
        "spread(on = ep_shard, shard_dim = auto)",
    ):
        for world, dim in ((16, 0), (32, 1), (64, 1)):
            plan = mixtral(MESH + section(f"{EXPERTS} : {text}"), world=world)
            units = [op for op in plan.ops if isinstance(op, FullyShard)]
            found = [*units, *(s for op in units for s in op.spreads)]
            dims = {p.shard for p in found if p.shard_dim == dim and "tp" in p.shard}
            assert dims == {("dp_shard", "tp")}, (text, world)
            again = loads(dumps(plan), "x.json", Sink())
            assert again == plan and digest(again) == digest(plan)


def test_a_spread_is_no_unit():
    spread = f"{EXPERTS} : spread(on = ep_shard)"
    plan = mixtral(MESH + section(spread), world=16)
    own = [op for op in plan.ops if isinstance(op, FullyShard)]
    assert [str(op.members[0]) for op in own] == ["model.layers[0:32]", "root"]
    apart = mixtral(MESH + section(f"{EXPERTS} : unit(on = ep_shard)"), world=16)
    assert plan.parameters == apart.parameters
    assert own[0].gathered > max(o.gathered for o in apart.ops if isinstance(o, FullyShard))
    text = text_of(plan, digest="0")
    assert "spread      model.layers[0:32].mlp.experts  on dp_shard * tp = 8" in text
    source = script(plan, digest="0" * 64)
    compile(source, "emitted.py", "exec")
    assert "HSDPMeshInfo(" in source and "shard_placement_fn=spread(spreads)" in source


def test_a_spread_in_a_diff():
    text = MESH + section(f"{EXPERTS} : spread(on = ep_shard)")
    old, new = mixtral(text, world=16), mixtral(text.replace("ep_shard", "dp_shard"), world=16)
    delta = compare(old, new)
    kinds = [c.kind for c in delta.changed]
    assert kinds == ["fsdp", "spread"]
    assert "over dp_shard * tp -> dp_shard" in diff_text(delta)
    gone = compare(old, mixtral(MESH + section(), world=16))
    said = diff_text(gone)
    assert "- spread" in said and "on dp_shard * tp, replicated over dp_replicate" in said


@pytest.mark.parametrize(
    ("name", "tensor", "data", "role"),
    [
        ("pp", (), (), AxisRole.STAGE),
        ("cp", (), ("cp",), AxisRole.SEQUENCE),
        ("ep", (), (), AxisRole.EXPERT),
        ("tp", (), (), AxisRole.TENSOR),
        ("tp", (), ("tp",), AxisRole.DATA),
        ("gpu", ("gpu",), (), AxisRole.TENSOR),
        ("node", ("gpu",), ("node",), AxisRole.DATA),
        ("dp_shard", (), (), AxisRole.DATA),
    ],
)
def test_what_an_axis_is_for(name, tensor, data, role):
    assert role_of(name, tensor=tensor, data=data) is role


def test_a_plan_gives_its_axes_their_roles():
    """By the sections that work over them, where the name says nothing."""
    mesh = "mesh {\n node = auto\n gpu = 4\n pp = 1\n cp = 1\n}\n"
    tensor = "tensor on gpu {\n lm_head : colwise(-> replicate)\n}\n"
    plan, _, _ = judged(f"plan t for llama\n{mesh}{tensor}fsdp on node * cp {{\n root : unit\n}}\n")
    assert {a.name: a.role.value for a in plan.mesh.axes} == {
        "node": "data",
        "gpu": "tensor",
        "pp": "stage",
        "cp": "sequence",
    }
