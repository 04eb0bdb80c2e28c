"""The fsdp section, where its meaning is compared as objects; see tests/specs."""

from helpers import fsdp, judged, lowered

from planc.diagnostics.diagnostic import Sink
from planc.emit.python.script import render as script
from planc.emit.text import render as text_of
from planc.model.facts import Child, Facts, Module, Parameter
from planc.model.indices import Indices
from planc.ops.document import digest, dumps, loads
from planc.ops.fsdp import FullyShard, Prefetch

HEAD = "plan t for llama\nmesh {\n dp_shard = auto\n}\n"  # the section begins in line 5


def units(plan):
    return {str(m): unit for unit in plan.fsdp.units for m in unit.members}


def test_groups_are_of_one_entry_each():
    line = "groups(model.layers.*.mlp, model.layers.*.self_attn) : unit(reshard = except_last)"
    plan = lowered(HEAD + fsdp(line))
    groups = [op for op in plan.ops if isinstance(op, FullyShard) and op.group]
    names = [tuple(map(str, op.members)) for op in groups]
    assert names == [(f"model.layers[{i}].mlp", f"model.layers[{i}].self_attn") for i in range(32)]
    assert [op.reshard for op in groups] == [True] * 31 + [False]
    text = text_of(plan, digest=digest(plan))
    assert text.count("group(") == 2  # 31 that are freed, and the last
    assert "31 x" in text
    assert loads(dumps(plan), "again", Sink()) == plan


def test_prefetch_goes_along_all_of_a_list_and_into_its_blocks():
    lines = ("model.layers.*.mlp : unit", "model.layers.* : unit(reshard = except_last)")
    lines += ("model.layers[0:8].self_attn : unit", "prefetch(forward = 2)")
    (op,) = [o for o in lowered(HEAD + fsdp(*lines)).ops if isinstance(o, Prefetch)]
    names = ["model.layers[0:32]", "model.layers[0:8].self_attn", "model.layers[0:32].mlp"]
    assert [str(m) for m in op.units] == names
    assert [str(m) for m in op.returning] == [names[0], names[2], names[1]]


# Units that are found ----------------------------------------------------------------------------


def mixed():
    """Two blocks of bf16 with a norm of fp32, and a norm of fp32 after them."""
    norm = Module(cls="Norm", kind="norm", parameters=(Parameter("weight", (8,)),))
    linear = Module(
        cls="Linear", kind="linear", parameters=(Parameter("weight", (8, 8), "bfloat16"),)
    )
    block = Module(
        cls="Block",
        kind="other",
        children=(Child(norm, "norm"), Child(linear, "up"), Child(linear, "down")),
    )
    blocks = Module(cls="ModuleList", kind="list", children=(Child(block, indices=Indices.all(2)),))
    root = Module(cls="Net", kind="other", children=(Child(blocks, "blocks"), Child(norm, "norm")))
    return Facts(name="Net", family="Net", config={}, config_name="config.json", root=root)


MIXED = HEAD.replace("llama", "Net")


def test_islands_of_a_dtype():
    lines = ("dtype(fp32) : unit(precision(param = fp32))", "blocks.* : unit")
    plan, _, findings = judged(MIXED + fsdp(*lines), model=mixed())
    assert findings == []
    assert list(units(plan)) == ["blocks[0:2]", "root", "blocks[0:2].norm", "norm"]


def test_a_mix_of_dtypes_in_one_unit():
    _, _, findings = judged(MIXED + fsdp("blocks.* : unit"), model=mixed())
    assert [(d.code, d.labels[0].span.line) for d in findings] == [("PL415", 6)]


# The artifact ------------------------------------------------------------------------------------

ALL = HEAD + fsdp(
    "offload(cpu, pin = false)",
    "divide = 2.5",
    "prefetch(forward = 2)",
    "model.layers.* : unit(shard_dim = 1)",
)


def test_what_is_said_is_in_the_document_and_in_the_digest():
    plan = lowered(ALL)
    again = loads(dumps(plan), "x.json", Sink())
    assert again == plan and digest(again) == digest(plan)
    changes = ("offload(cpu, pin = false)", "divide = 2.5", "prefetch(forward = 2)")
    changes += ("(shard_dim = 1)",)
    digests = {digest(lowered(ALL.replace(change, ""))) for change in changes}
    assert len(digests | {digest(plan)}) == len(changes) + 1


def test_a_plan_without_any_of_it_says_nothing_of_it():
    text = dumps(lowered(HEAD + fsdp("model.layers.* : unit")))
    for word in ("ignored", "shard_dim", "offload", "pin", "divide", "prefetch", "freeze"):
        assert word not in text


def test_the_text_says_it_all():
    text = text_of(lowered(ALL), digest="0" * 64)
    for words in (
        "offloaded to unpinned host memory",
        "split along dim 1",
        "gradients are summed, then divided by 2.5",
        "2 ahead in forward, of model.layers[0:32]",
    ):
        assert words in text


def test_the_script_is_python_without_planc():
    source = script(lowered(ALL), digest="0" * 64)
    compile(source, "emitted.py", "exec")
    assert "planc" not in source.partition('"""\n\n')[2].replace("t.plan", "")
