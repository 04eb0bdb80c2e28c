"""Axes that follow from the mesh's, and units that lie on tensor ranks too."""

import pytest
from test_checks import facts
from test_fsdp import judged, lowered

from planc.checks import check
from planc.diagnostic import Sink
from planc.diffing.compare import compare
from planc.diffing.render import render as diff_text
from planc.emit.python.script import render as script
from planc.emit.text import render as text_of
from planc.ops.base import AxisRole
from planc.ops.document import digest, dumps, loads
from planc.ops.fsdp import Divide, FullyShard
from planc.plan import elaborate
from planc.plan.mesh_axes import axes_of, known, role_of
from planc.source import Source
from planc.syntax import parse

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


def test_checkpoint_conversion():
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


def test_what_tensor_parallelism_leaves_is_what_is_split():
    style = "tensor on tp {\n model.layers.*.mlp.experts : experts(gate_up_proj = "
    style += "shard(1, parts = 2), down_proj = shard(2))\n}\n"
    own = section(f"{EXPERTS} : unit(shard_dim = auto)", on="dp_shard")
    mesh = MESH.replace(" dp_replicate = 2\n", "").replace(" cp = 1", " cp = 1")
    assert judged(mesh + style + own, "mixtral-8x7b", world=64)[2] == []
    findings = judged(mesh + style + own, "mixtral-8x7b", world=66)[2]
    assert [(d.code, d.labels[0].span.line) for d in findings] == [("PL382", 15)]
    assert "[8, 14336, 4096]" in findings[0].facts[0]


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
    assert "HSDPMeshInfo(" in source and "shard_placement_fn=spread(lying)" in source


def test_a_spread_in_a_diff():
    text = MESH + section(f"{EXPERTS} : spread(on = ep_shard)")
    old, new = mixtral(text, world=16), mixtral(text.replace("ep_shard", "dp_shard"), world=16)
    delta = compare(old, new)
    kinds = [c.kind for c in delta.changed]
    assert kinds == ["fsdp", "spread"]
    assert "over dp_shard * tp -> dp_shard" in diff_text(delta)
    gone = compare(old, mixtral(MESH + section(), world=16))
    said = diff_text(gone)
    assert "- spread" in said and "over dp_shard * tp, replicated over dp_replicate" in said


def test_fewer_rows_than_ranks_are_told():
    text = MESH + section(f"{EXPERTS} : unit")
    said = [d.message for d in _infos(text) if d.code == "PL383"]
    assert "32 ranks: 24 of them hold nothing, and 4 times" in said[0]
    auto = text.replace(": unit", ": unit(shard_dim = auto)", 1)
    assert "PL383" not in [d.code for d in _infos(auto)]


def _infos(text):
    known, sink = facts("mixtral-8x7b"), Sink()
    plan = elaborate([parse(Source("t.plan", text), sink)], known, sink, world_size=128)
    check(plan, known, sink)
    return list(sink)


SPREAD = f"{EXPERTS} : spread(on = ep_shard)"
MISTAKES = {
    "no dim that divides": (
        MESH.replace("auto", "12") + section(f"{EXPERTS} : unit(on = ep_shard, shard_dim = auto)"),
        [("PL382", 13)],
        48,
    ),
    "a dim that leaves out what needs it": (
        MESH.replace("tp = 2", "tp = 1") + section(f"{EXPERTS} : unit(shard_dim = 1)"),
        [("PL382", 13)],
        28,
    ),
    "a spread of a unit": (
        MESH + section(f"{EXPERTS} : unit", SPREAD),
        [("PL384", 14)],
        16,
    ),
    "a spread and a factor": (
        MESH + section("divide = 4", SPREAD),
        [("PL384", 14)],
        16,
    ),
    "a spread of nothing": (MESH + section(f"{EXPERTS} : spread"), [("PL012", 13)], 16),
    "a spread of a group": (
        MESH + section("group(model.norm, lm_head) : spread(shard_dim = 1)"),
        [("PL012", 13)],
        16,
    ),
    "two spreads": (MESH + section(SPREAD, SPREAD), [("PL102", 14)], 16),
    "a spread over a style": (
        MESH + section("model.layers.*.self_attn : spread(on = ep_shard)"),
        [("PL381", 13)],
        16,
    ),
    "a spread of copies": (
        MESH.replace("dp_replicate = 2\n", "")
        + "replicate on dp_shard {\n "
        + SPREAD
        + "\n model.layers.* : unit\n root : unit\n}\n",
        [("PL450", 12)],
        8,
    ),
    "a reshard that a spread can't": (
        MESH.replace("auto", "4").replace("tp = 2", "tp = 1").replace(" cp = 1", " b = 3")
        + "fsdp on dp_shard * b, replicate on dp_replicate {\n"
        + f" {EXPERTS} : spread(on = b)\n model.layers.* : unit(reshard = 6)\n root : unit\n}}\n",
        [("PL417", 14)],
        24,
    ),
    "a dim before the first": (
        MESH + section(f"{EXPERTS} : unit(shard_dim = -2)"),
        [("PL012", 13)],
        16,
    ),
    "ep of several ranks": (
        MESH.replace(" cp = 1", " ep = 2") + section(on="dp_shard * ep"),
        [("PL380", 5), ("PL306", 3)],
    ),
    "a style on the axis": (
        MESH + section("model.layers.*.self_attn : unit(on = ep_shard)"),
        [("PL381", 13)],
    ),
    "no axis of a section": (
        MESH.replace(" cp = 1", " gpu = 2") + section(f"{EXPERTS} : unit(on = gpu * tp)"),
        [("PL442", 13), ("PL306", 5)],
    ),
    "context ranks of no section": (
        MESH.replace("cp = 1", "cp = 2") + section(f"{EXPERTS} : unit(on = ep_shard)", on="dp"),
        [("PL442", 13), ("PL306", 5)],
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
    text, right, *world = MISTAKES[name]
    findings = judged(text, "mixtral-8x7b", world=world[0] if world else 16)[2]
    assert sorted((d.code, d.labels[0].span.line) for d in findings) == sorted(right)


def test_a_name_may_be_near():
    findings = judged(MESH + section(on="dp_shard_cpp"), "mixtral-8x7b", world=16)[2]
    assert "did you mean `dp_shard_cp`" in findings[0].help


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
