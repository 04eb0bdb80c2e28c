"""A parameter that tensor sections over two axes split: shapes and bytes, as data.

`check` refuses such a plan (PL352), for torch 2.13 cannot run it; it is lowered here all the same.
"""

import json

import pytest
from helpers import judged
from lowered import llama, rule, with_ops

from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.emit.python.script import render as script
from planc.emit.text import render as text_of
from planc.ir.local_shapes import local_shape, split_by_rules
from planc.ir.nodes import Mesh, Plan, TensorRule
from planc.lowering import lower
from planc.ops.document import dumps, loads
from planc.ops.fsdp import FullyShard
from planc.ops.lowered import MeshAxis
from planc.ops.styles import Colwise, ParameterLayout, Parameters, Shard
from planc.ops.tensor_parallel import Parallelize

MESH = "plan t for llama\nmesh {\n dp_shard = auto\n tp = 2\n tq = 2\n}\n"
UNITS = "fsdp on dp_shard {\n model.layers.* : unit\n lm_head : unit\n root : unit\n}\n"
DOWN = "model.layers.*.mlp.down_proj"


def lowered(on_tp, on_tq):
    """The lowered plan of two tensor sections, and the codes that refuse it."""
    sections = "".join(
        f"tensor on {axis} {{\n layouts = stated\n {rule}\n}}\n"
        for axis, rule in (("tp", on_tp), ("tq", on_tq))
    )
    plan, known, findings = judged(MESH + sections + UNITS)
    return lower(plan, known), {d.code for d in findings}


def shapes(plan):
    return [
        (str(op.modules), op.axes, s.shape, s.local)
        for op in plan.ops
        if isinstance(op, Parallelize)
        for s in op.shapes
    ]


@pytest.mark.parametrize(
    ("second", "local"),
    [("colwise(-> replicate)", (32064, 4096)), ("rowwise(replicate -> replicate)", (64128, 2048))],
)
def test_each_operation_splits_what_the_one_before_leaves(second, local):
    plan, codes = lowered("lm_head : colwise(-> replicate)", f"lm_head : {second}")
    assert "PL352" in codes
    assert shapes(plan) == [
        ("lm_head", ("tp",), (128256, 4096), (64128, 4096)),
        ("lm_head", ("tq",), (64128, 4096), local),
    ]


def test_memory_counts_every_split():
    """8 ranks: 2 of tp, 2 of tq, and 2 that FSDP shards over."""
    plan, _ = lowered("lm_head : colwise(-> replicate)", "lm_head : colwise(-> replicate)")
    unit = next(o for o in plan.ops if isinstance(o, FullyShard) and str(o.members[0]) == "lm_head")
    assert unit.gathered == 128256 * 4096 * 2 // 4
    assert unit.nbytes == unit.gathered // 2


def test_rules_that_share_a_part_of_their_modules():
    plan, _ = lowered(f"{DOWN} : rowwise", "model.layers[0:16].mlp.down_proj : rowwise")
    assert shapes(plan) == [
        ("model.layers[0:32].mlp.down_proj", ("tp",), (4096, 14336), (4096, 7168)),
        ("model.layers[0:16].mlp.down_proj", ("tq",), (4096, 7168), (4096, 3584)),
    ]


def test_rules_over_one_axis_still_conflict():
    *_, findings = judged(
        MESH + "tensor on tp {\n lm_head : colwise\n lm_head : rowwise\n}\n" + UNITS
    )
    assert "PL102" in {d.code for d in findings}


def test_the_parts_of_a_packed_dim_are_split_in_turn():
    """Two parts of 6 and 10 rows over 4 and then over 2 ranks: 1 and 2 rows."""
    _, known, _ = judged(MESH + UNITS)
    head = next(m for m in known.model.below() if str(m) == "lm_head")
    span = Source("t.plan", "x").span(0, 1)
    axes = tuple(MeshAxis(name=n, size=s, origin=span) for n, s in (("a", 4), ("b", 2), ("c", 1)))
    plan = Plan(name="t", families=(), options={}, mesh=Mesh(axes=axes, origin=span), origin=span)
    style = Parameters(layouts=(("weight", ParameterLayout(layout=Shard(0), parts=(6, 10))),))
    rules = [TensorRule(modules=head, axis=a, style=style, origin=span) for a in "abc"]
    weight = type(head.module.parameters[0])(name="weight", shape=(16, 3), dtype="float32")
    assert local_shape(weight, rules[:1], plan) == (2 + 3, 3)
    assert local_shape(weight, rules, plan) == (1 + 2, 3)
    assert split_by_rules(head, rules) == [(head, tuple(rules))]
    assert local_shape(weight, (), plan) == (16, 3)


def test_text_and_script_name_both_axes():
    plan, _ = lowered("lm_head : colwise(-> replicate)", f"{DOWN} : rowwise")
    text = text_of(plan, digest="0" * 64)
    assert "tensor      on tp = 2" in text and "tensor      on tq = 2" in text
    assert 'mesh["tp"]' in (source := script(plan, digest="0" * 64)) and 'mesh["tq"]' in source


def test_a_document_whose_style_takes_fewer_axes():
    plan = with_ops(llama(), rule("lm_head", Colwise()))
    data = json.loads(dumps(plan))
    data["stages"][0]["ops"][0]["axes"] = ["dp_shard", "tp"]
    sink = Sink()
    assert loads(json.dumps(data), "x.json", sink) is None
    assert [d.message for d in sink] == [
        "x.json, at stages[0].ops[0].axes: colwise takes 1 axis, not 2"
    ]
