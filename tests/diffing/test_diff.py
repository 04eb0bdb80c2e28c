"""What changes between two lowered plans, as data, as text and as JSON."""

import dataclasses
import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered import any_op, llama, modules, moved, plans, rule, unit, with_fields, with_ops

from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Span
from planc.diffing.compare import compare
from planc.diffing.render import document, render
from planc.files.resources import GRAMMARS
from planc.ops.activation_checkpoint import Checkpoint, Save
from planc.ops.backend import Backend
from planc.ops.base import Shape
from planc.ops.configure import Configure
from planc.ops.document import digest, dumps, loads
from planc.ops.load import Load
from planc.ops.lowered import MeshAxis
from planc.ops.registry import kinds
from planc.ops.styles import (
    Colwise,
    Input,
    Output,
    Redistribution,
    Replicate,
    Rowwise,
    Sequence,
    Shard,
)
from planc.ops.tensor_parallel import Tie

SCHEMA = json.loads((GRAMMARS / "diff.schema.json").read_text())


def test_the_schema_has_every_kind_of_operation():
    stated = SCHEMA["$defs"]["change"]["properties"]["kind"]["enum"]
    words = {op.WORD for op in kinds()} - {Backend.WORD} | {
        op.WORD for op in Backend.all_installed()
    }
    assert words <= {*stated}


def difference(old, new):
    """The lines between two lists of operations, without the last, which counts."""
    delta = compare(with_ops(llama(), *old), with_ops(llama(), *new))
    *lines, last = render(delta).splitlines()
    counts = [sum(line.startswith(f"  {s} ") for line in lines) for s in "+-~"]
    if lines:
        assert last == "{} to add, {} to remove, {} to change".format(*counts)
    else:
        assert last == "No changes."
    return lines


def checkpoint(path, line=0):
    return Checkpoint(
        modules=modules(path), origin=Span.from_place(f"a.plan:{line}" if line else "")
    )


# Whole plans -------------------------------------------------------------------------------------


def test_tp_4_to_8(golden):
    golden("tp-4-to-8.diff", render(compare(llama(tp=4), llama(tp=8))))


def test_tp_1_to_8(golden):
    golden("tp-1-to-8.diff", render(compare(llama(tp=1), llama(tp=8))))


def test_an_edit_of_the_plan(golden):
    """The example of the design: what is computed again changes, at tp 4 -> 8."""
    old = llama(tp=4, checkpoint=False)
    inner = Checkpoint(
        modules=modules("model.layers[0:32].mlp"), origin=Span.from_place("plans/llama.plan:31")
    )
    delta = compare(with_ops(old, *old.ops, inner), llama(tp=8))
    golden("edit.diff", render(delta))
    assert render(delta).splitlines()[-1] == "1 to add, 1 to remove, 11 to change"


def test_another_model(golden):
    new = with_fields(
        llama(layers=36), model="Qwen3ForCausalLM", family="qwen3", parameters=1, gathered=2
    )
    norms = rule("model.layers[0:36].self_attn.q_norm", Sequence(dim=2, local=True), line=8)
    golden("models.diff", render(compare(llama(), with_ops(new, *new.ops, norms))))


def test_the_document(golden):
    golden("tp-4-to-8.diff.json", json.dumps(document(compare(llama(tp=4), llama())), indent=2))


def test_the_same():
    delta = compare(llama(), llama())
    assert delta.same
    assert render(delta) == "No changes.\n"


def test_lines_that_moved_are_no_change():
    delta = compare(llama(), moved(llama()))
    assert delta.same
    assert render(delta) == "No changes.\n"


def test_a_plan_read_back_is_the_same():
    assert compare(llama(), loads(dumps(llama()), "x", Sink())).same


# Sets of modules ---------------------------------------------------------------------------------


def test_fewer_layers_are_a_removal_of_the_rest():
    assert difference([checkpoint("b[0:32]", 3)], [checkpoint("b[0:16]", 3)]) == [
        "  - checkpoint b[16:32]  full  a.plan:3 (old)",
    ]


def test_every_second_layer():
    assert difference([checkpoint("b[0:32:2]")], [checkpoint("b[0:32]")]) == [
        "  + checkpoint b[1:32:2]  full",
    ]


def test_how_weights_arrive():
    old = Load(weights="rank0", dtype="bfloat16", origin=Span.from_place("a.plan:3"))
    new = Load(weights="slices", dtype="bfloat16", meta=True, origin=Span.from_place("a.plan:4"))
    assert difference([], [old]) == ["  + load  rank 0 reads and sends, kept in bf16  a.plan:3"]
    assert difference([old], [new]) == [
        "  ~ load  meta false -> true, weights rank0 -> slices  a.plan:3 -> :4"
    ]


def test_how_modules_are_checkpointed():
    saves = (Save(name="attention", ops=("a.b.c",)), Save(name="matmul", every=2, ops=("d.e.f",)))
    ops = dataclasses.replace(checkpoint("b[0:32]", 3), save=saves)
    away = dataclasses.replace(checkpoint("b[0:32]", 3), offload=True, pin=False)
    said = "ops(save = [attention, matmul(every = 2)])"
    assert difference([], [ops]) == [f"  + checkpoint b[0:32]  {said}  a.plan:3"]
    assert difference([], [away]) == [
        "  + checkpoint b[0:32]  full(offload = cpu, pin = false)  a.plan:3"
    ]
    assert difference([checkpoint("b[0:32]", 2)], [ops]) == [
        "  ~ checkpoint b[0:32]  save none -> [attention, matmul(every = 2)]  a.plan:2 -> :3"
    ]
    assert difference([away], [checkpoint("b[0:32]", 3)]) == [
        "  ~ checkpoint b[0:32]  offload cpu -> none, pinned false -> true  a.plan:3"
    ]


def test_two_halves_are_the_whole():
    halves = [checkpoint("b[0:16]"), checkpoint("b[16:32]")]
    assert difference(halves, [checkpoint("b[0:32]")]) == []


def test_ranges_that_changed_alike_are_one():
    old = [unit("b[0:31]"), unit("b[31]", reshard=False)]
    new = [unit("b[0:31]", reshard=4), unit("b[31]", reshard=4)]
    assert difference(old, new) == [
        "  ~ fsdp b[0:31]  reshard after forward -> reshard to 4 after forward",
        "  ~ fsdp b[31]    keep -> reshard to 4 after forward",
    ]
    assert difference([unit("b[0:31]"), unit("b[31]")], [unit("b[0:32]", reshard=4)]) == [
        "  ~ fsdp b[0:32]  reshard after forward -> reshard to 4 after forward",
    ]


def test_only_the_overlap_changes():
    old = [rule("b[0:4].a", Colwise()), rule("b[4:8].a", Rowwise())]
    assert difference(old, [rule("b[2:6].a", Rowwise())]) == [
        "  ~ b[2:4].a  colwise -> rowwise",
        "  - b[0:2].a  colwise on tp",
        "  - b[6:8].a  rowwise on tp",
    ]


def test_sets_in_two_lists_are_boxes():
    old = [checkpoint("b[0:4].experts[0:8]")]
    assert difference(old, [checkpoint("b[1:3].experts[2:8]")]) == [
        "  - checkpoint b[0,3].experts[0:8]  full",
        "  - checkpoint b[1:3].experts[0:2]  full",
    ]


def test_names_that_changed_alike_share_a_line_in_the_order_of_the_plan():
    names = ["attn.q_proj", "attn.k_proj", "mlp.up_proj"]
    old = [rule(f"b[0:4].{n}", Colwise()) for n in names]
    assert difference(old, [rule(f"b[0:4].{n}", Rowwise()) for n in names]) == [
        "  ~ b[0:4].mlp.up_proj      colwise -> rowwise",
        "  ~ b[0:4].attn.{q,k}_proj  colwise -> rowwise",
    ]


def test_names_at_other_lines_do_not_share_one():
    new = [rule("a.q_proj", Colwise(), line=1), rule("a.k_proj", Colwise(), line=2)]
    assert difference([], new) == [
        "  + a.q_proj  colwise on tp  plans/llama.plan:1",
        "  + a.k_proj  colwise on tp  plans/llama.plan:2",
    ]


# Each kind of operation --------------------------------------------------------------------------


def test_a_layout_that_changes_is_named():
    old = rule("a", Rowwise(input=Replicate(), output=Shard(1), local=False), line=31)
    assert difference([old], [rule("a", Rowwise(), line=35)]) == [
        "  ~ a  input replicate -> shard(-1), output shard(1) -> replicate, dtensor -> local"
        "  plans/llama.plan:31 -> :35",
    ]


def test_an_argument_that_changes_is_named():
    def style(source, target, **more):
        return Input(named=(("x", Redistribution(source, target)),), **more)

    old = [rule("a", style(Shard(1), Replicate())), rule("b", style(Shard(1), Replicate()))]
    new = [rule("a", style(Shard(0), Replicate())), rule("b", Output(positional=(None,)))]
    assert difference(old, new) == [
        "  ~ a  x source shard(1) -> shard(0)",
        "  - b  input(x = shard(1) -> replicate) on tp",
        "  + b  output(null) on tp",
    ]


def test_an_axis_that_changes_is_another_operation():
    assert difference([rule("a", Colwise())], [rule("a", Colwise(), axis="pp")]) == [
        "  - a  colwise on tp",
        "  + a  colwise on pp",
    ]


def test_a_bias_that_comes():
    op = rule("a", Colwise(), 8, 4, split=0)
    more = dataclasses.replace(op, shapes=(*op.shapes, Shape(name="bias", shape=(8,), local=(1,))))
    assert difference([op], [more]) == ["  ~ a  bias shape none -> [8], bias local none -> [1]"]


def test_a_shape_that_is_split_otherwise_shows_both():
    old, new = rule("a", Colwise(), 8, 4, split=0, tp=4), rule("a", Colwise(), 16, 4, split=0, tp=8)
    assert difference([old], [new]) == ["  ~ a  shape [8, 4] -> [16, 4]"]
    new = rule("a", Colwise(), 32, 4, split=0, tp=8)
    assert difference([old], [new]) == ["  ~ a  shape [8, 4] -> [32, 4], local [2, 4] -> [4, 4]"]


def test_precision_and_sizes():
    new = unit("a", nbytes=2**20, gathered=2**22, line=3)
    old = dataclasses.replace(new, param=None, reduce="bfloat16", gathered=2**23, cast_inputs=False)
    assert difference([old], [new]) == [
        "  ~ fsdp a  parameters none -> bf16, gradients bf16 -> fp32, cast inputs false -> true, "
        "gathered 8.0 MiB -> 4.0 MiB  plans/llama.plan:3",
    ]


def test_bytes_that_read_the_same_are_told_only_alone():
    old, new = unit("a", nbytes=2**20), unit("a", nbytes=2**20 + 1)
    assert difference([old], [new]) == ["  ~ fsdp a  per rank 1,048,576 B -> 1,048,577 B"]
    assert difference([old], [dataclasses.replace(new, reshard=False)]) == [
        "  ~ fsdp a  reshard after forward -> keep"
    ]


def test_to_reshard_to_one_rank_is_not_to_reshard():
    assert difference([unit("a", reshard=True)], [unit("a", reshard=1)]) == [
        "  ~ fsdp a  reshard after forward -> reshard to 1 after forward"
    ]


def test_units_that_become_a_group_are_told_member_by_member():
    old = [unit("m.norm"), unit("m.embed")]
    assert difference(old, [unit("m.norm", "m.embed", "m.head")]) == [
        "  ~ fsdp m.{norm,embed}  unit alone -> group(m.{norm,embed,head})",
        "  + fsdp m.head          "
        "in group(m.{norm,embed,head}), reshard after forward, 0 B per rank",
    ]


def test_a_group_in_another_order_is_the_same():
    assert difference([unit("m.norm", "head")], [unit("head", "m.norm")]) == []


def test_the_rest():
    old = [
        Configure(name="use_cache", value=False),
        Tie(parameter="a.weight", source="b.weight"),
    ]
    new = [
        Configure(name="use_cache", value=True),
        Tie(parameter="a.weight", source="c.weight"),
        checkpoint("b[0:4]", 7),
    ]
    assert difference(old, new) == [
        "  ~ configure use_cache  false -> true",
        "  ~ tie a.weight         b.weight -> c.weight",
        "  + checkpoint b[0:4]    full  a.plan:7",
    ]
    assert difference([], old) == [
        "  + configure use_cache  = false",
        "  + tie a.weight         = b.weight",
    ]


# The plan as a whole -----------------------------------------------------------------------------


def changed(**changes):
    return render(compare(llama(), with_fields(llama(), **changes))).splitlines()


def test_the_order_of_axes():
    assert changed(axes=llama().axes[::-1])[0] == (
        "  ~ mesh  order pp | dp_shard | tp -> tp | dp_shard | pp"
    )


def test_an_axis_that_comes():
    axes = (*llama().axes, MeshAxis(name="cp", size=2, origin=Span.from_place("a.plan:9")))
    assert changed(axes=axes)[0] == "  ~ mesh  cp none -> 2  (64 -> 128 ranks)  a.plan:9"


def test_a_size_that_is_worked_out_is_the_same_as_one_that_is_written():
    axes = tuple(dataclasses.replace(a, inferred=False) for a in llama().axes)
    assert changed(axes=axes) == ["No changes."]


def test_data():
    assert changed(data=("pp", "dp_shard"))[0] == "  ~ data  over dp_shard -> pp * dp_shard"
    assert changed(data=())[0] == "  ~ data  over dp_shard -> no axis"


def test_bytes_that_no_operation_explains():
    assert changed(parameters=2**30) == [
        "  ~ model  parameters 239.3 MiB -> 1.0 GiB",
        "  per rank: parameters 239.3 MiB -> 1.0 GiB",
        "0 to add, 0 to remove, 1 to change",
    ]


# Reasons -----------------------------------------------------------------------------------------


def reasons(old, new):
    delta = compare(old, new)
    every = (*delta.added, *delta.removed, *delta.changed)
    return {(c.kind, c.subject): c.reason for c in every if c.kind != "mesh"}


def test_a_reason_is_given_only_where_axes_explain_it_all():
    found = reasons(llama(tp=4), llama(tp=8))
    assert set(found.values()) == {"tp 4 -> 8"}
    found = reasons(llama(), llama(ranks=128))
    assert set(found.values()) == {"dp_shard 8 -> 16"}


def test_a_shape_that_changed_is_not_explained_by_an_axis():
    new = llama(tp=8)
    ops = [
        dataclasses.replace(
            op, shapes=tuple(dataclasses.replace(s, shape=(1, 2)) for s in op.shapes)
        )
        if hasattr(op, "shapes")
        else op
        for op in new.ops
    ]
    assert set(reasons(llama(tp=4), with_ops(new, *ops)).values()) == {""}


def test_precision_is_not_explained_by_an_axis():
    new = llama(ranks=128)
    ops = [dataclasses.replace(o, param=None) if hasattr(o, "param") else o for o in new.ops]
    found = reasons(llama(), with_ops(new, *ops))
    assert {r for (kind, _), r in found.items() if kind == "fsdp"} == {""}


def test_more_gathered_bytes_are_not_explained_by_the_shard_axis():
    new = llama(ranks=128)
    ops = [
        dataclasses.replace(o, gathered=2 * o.gathered) if hasattr(o, "gathered") else o
        for o in new.ops
    ]
    found = reasons(llama(), with_ops(new, *ops))
    assert {r for (kind, _), r in found.items() if kind == "fsdp"} == {""}


def test_an_axis_of_one_rank_explains_what_comes_and_goes():
    for old, new, reason in ((1, 8, "tp 1 -> 8"), (8, 1, "tp 8 -> 1")):
        found = reasons(llama(tp=old), llama(tp=new))
        assert {r for (kind, _), r in found.items() if kind == "tensor"} == {reason}
    gone = with_ops(llama(), *(op for op in llama().ops if not hasattr(op, "style")))
    assert {r for (kind, _), r in reasons(llama(), gone).items()} == {""}


def test_replicas_that_come_explain_the_axes_of_a_unit():
    old, new = llama(), llama()
    axes = (MeshAxis(name="pp", size=2), *new.axes[1:])
    ops = [dataclasses.replace(o, replicate=("pp",)) if hasattr(o, "shard") else o for o in new.ops]
    found = reasons(old, dataclasses.replace(with_ops(new, *ops), axes=axes))
    assert set(found.values()) == {"pp 1 -> 2"}


# Any two plans -----------------------------------------------------------------------------------


def plain(changes, *, turned=False):
    """Changes without reasons and order; `turned` as they read from the other side."""
    result = set()
    for c in changes:
        sides = [(p.name, p.new, p.old) if turned else (p.name, p.old, p.new) for p in c.parts]
        places = (c.new, c.old) if turned else (c.old, c.new)
        result.add((c.kind, c.over, c.label, c.modules, frozenset(sides), places))
    return result


@settings(deadline=None)  # machines are busy
@given(plans())
def test_a_plan_is_the_same_as_itself(plan):
    assert compare(plan, plan).same


@settings(deadline=None)  # machines are busy
@given(plans(), plans())
def test_same_digest_same_plan(old, new):
    if digest(old) == digest(new):
        assert compare(old, new).same


@settings(deadline=None)  # machines are busy
@given(st.lists(any_op, max_size=5), st.lists(any_op, max_size=5))
def test_back_is_the_mirror_of_there(one, two):
    old, new = (with_ops(llama(), *disjoint(ops)) for ops in (one, two))
    there, back = compare(old, new), compare(new, old)
    assert plain(there.added) == plain(back.removed, turned=True)
    assert plain(there.removed) == plain(back.added, turned=True)
    assert there.same == back.same
    assert len(there.changed) == len(back.changed)
    assert plain(there.changed) == plain(back.changed, turned=True)


def disjoint(ops):
    """Operations of which no two speak of the same, as those of a plan do."""
    kept = []
    for op in ops:
        if all(not meets(op, other) for other in kept):
            kept.append(op)
    return kept


def meets(one, two):
    if type(one) is not type(two):
        return False
    mine, theirs = (
        getattr(op, "members", None) or ((op.modules,) if hasattr(op, "modules") else ())
        for op in (one, two)
    )
    return not mine or any(a.overlap(b) is not None for a in mine for b in theirs)


@settings(deadline=None)  # machines are busy
@given(st.lists(any_op, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_operations_does_not_matter(ops, random):
    ops = disjoint(ops)
    mixed = list(ops)
    random.shuffle(mixed)
    assert compare(with_ops(llama(), *mixed), llama()) == compare(with_ops(llama(), *ops), llama())
    assert compare(llama(), with_ops(llama(), *mixed)) == compare(llama(), with_ops(llama(), *ops))
    assert compare(with_ops(llama(), *mixed), with_ops(llama(), *ops)).same


@settings(deadline=None)  # machines are busy
@given(plans(), plans())
def test_every_module_is_accounted_for(old, new):
    """What is added or removed is what only one side checkpoints, each module once."""

    def names(side):
        sets = (op.modules for op in side.ops if isinstance(op, Checkpoint))
        return {n for m in sets for n in m.names()}

    old, new = (with_ops(dataclasses.replace(p, layers=10), *disjoint(p.ops)) for p in (old, new))
    delta = compare(old, new)
    for changes, expected in (
        (delta.added, names(new) - names(old)),
        (delta.removed, names(old) - names(new)),
    ):
        sets = [m for c in changes if c.kind == "checkpoint" for m in c.modules]
        told = [name for m in sets for name in m.names()]
        assert sorted(told) == sorted(expected)


@settings(deadline=None)  # machines are busy
@given(plans(), plans())
def test_any_two_plans_print(old, new):
    delta = compare(old, new)
    text = render(delta)
    assert text.endswith("\n")
    assert all(line == line.rstrip() for line in text.split("\n"))
    lines = text.splitlines()
    if not delta.same:
        count = len(delta.added) + len(delta.removed) + len(delta.changed)
        assert sum(line[:4] in ("  + ", "  - ", "  ~ ") for line in lines) == count
    jsonschema.validate(json.loads(json.dumps(document(delta))), SCHEMA)


@pytest.mark.parametrize("missing", ["kind", "parts", "reason"])
def test_the_schema_of_the_document_is_strict(missing):
    data = json.loads(json.dumps(document(compare(llama(tp=4), llama(tp=8)))))
    jsonschema.validate(data, SCHEMA)
    assert data["same"] is False
    del data["changed"][1][missing]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, SCHEMA)
