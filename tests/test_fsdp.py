"""The fsdp, replicate and train sections: what they mean, and every mistake with its line."""

import pytest
from test_checks import facts

from planc.checks import check
from planc.diagnostic import Sink
from planc.emit.python.script import render as script
from planc.emit.text import render as text_of
from planc.lowering import lower
from planc.model.facts import Child, Facts, Module, Parameter
from planc.model.indices import Indices
from planc.ops.document import digest, dumps, loads
from planc.ops.fsdp import FullyShard, Prefetch
from planc.plan import elaborate
from planc.source import Source
from planc.syntax import parse

HEAD = "plan t for llama\nmesh {\n dp_shard = auto\n}\n"  # the section begins in line 5
ROOT = " root : unit\n}\n"


def judged(text, model="llama-3.1-8b", *, world=8, known=None):
    """What a plan means, and its findings that are no notes."""
    known = known or facts(model)
    sink = Sink()
    plan = elaborate([parse(Source("t.plan", text), sink)], known, sink, world_size=world)
    if plan is not None:
        check(plan, known, sink)
    return plan, known, [d for d in sink if d.severity != "info"]


def lowered(text, model="llama-3.1-8b", *, world=8):
    plan, known, findings = judged(text, model, world=world)
    assert [d.message for d in findings] == []
    return lower(plan, known)


def units(plan):
    return {str(m): unit for unit in plan.fsdp.units for m in unit.members}


def fsdp(*lines, on="dp_shard", root=True):
    return (
        f"fsdp on {on} {{\n" + "".join(f" {line}\n" for line in lines) + (ROOT if root else "}\n")
    )


# Every mistake -----------------------------------------------------------------------------------

FROZEN = "train {\n model.embed_tokens : frozen\n model.layers[0:4] : frozen\n}\n"  # lines 5 to 8
BLOCKS = "model.layers.* : unit"
MISTAKES = {
    "a second sharding": (HEAD + fsdp(BLOCKS, BLOCKS), "PL102", [7, 6]),
    "a second sharding of one": (HEAD + fsdp(BLOCKS, "model.layers[3] : unit"), "PL102", [7, 6]),
    "groups of what is no list": (
        HEAD + fsdp("groups(model.norm, model.layers.*) : unit"),
        "PL012",
        [6],
    ),
    "groups of unlike lists": (
        HEAD + fsdp("groups(model.layers[0:4].mlp, model.layers[0:5].self_attn) : unit"),
        "PL012",
        [6],
    ),
    "a second sharding in a group": (
        HEAD + fsdp("lm_head : unit", "group(model.norm, lm_head) : unit"),
        "PL102",
        [7, 6],
    ),
    "twice in a group": (HEAD + fsdp("group(lm_head, lm_head) : unit"), "PL102", [6]),
    "a reshard that does not divide": (
        HEAD + fsdp("model.layers.* : unit(reshard = 3)"),
        "PL417",
        [6, 3],
    ),
    "a unit without parameters": (HEAD + fsdp("model.rotary_emb : unit"), "PL411", [6]),
    "ignored, and trains": (HEAD + fsdp("ignore lm_head"), "PL440", [6]),
    "ignored, and a unit": (
        HEAD + FROZEN + fsdp("ignore model.embed_tokens", "model.embed_tokens : unit"),
        "PL441",
        [10, 11],
    ),
    "ignored, and a style": (
        HEAD.replace("auto", "auto\n tp = 2")
        + FROZEN
        + "tensor on tp {\n model.embed_tokens : rowwise\n}\n"
        + fsdp("ignore model.embed_tokens"),
        "PL441",
        [14, 11],
    ),
    "ignored twice": (
        HEAD + FROZEN + fsdp("ignore model.layers[0:2]", "ignore model.layers[1:3]"),
        "PL102",
        [11, 10],
    ),
    "all of a unit ignored": (
        HEAD + FROZEN + fsdp("model.layers[0].mlp : unit", "ignore model.layers[0].mlp.*"),
        "PL411",
        [10],
    ),
    "other axes": (
        HEAD.replace("auto", "auto\n cp = 1") + fsdp("lm_head : unit(on = cp)"),
        "PL442",
        [7],
    ),
    "an axis twice": (HEAD + fsdp("lm_head : unit(on = dp_shard * dp_shard)"), "PL442", [6]),
    "axes that are numbers": (HEAD + fsdp("lm_head : unit(on = 4)"), "PL012", [6]),
    "a dim that nothing has": (HEAD + fsdp("lm_head : unit(shard_dim = 2)"), "PL443", [6]),
    "a dim that does not divide": (
        HEAD.replace("auto", "12") + fsdp("lm_head : unit(shard_dim = 1)"),
        "PL443",
        [6],
    ),
    "a negative dim": (HEAD + fsdp("lm_head : unit(shard_dim = -1)"), "PL012", [6]),
    "prefetch without a list": (HEAD + fsdp("prefetch(forward = 2)"), "PL444", [6]),
    "prefetch of a group": (
        HEAD + fsdp("prefetch(forward = 2)", "group(model.layers.*) : unit"),
        "PL444",
        [6],
    ),
    "frozen units that backward skips": (
        HEAD + FROZEN + fsdp("prefetch(backward = 1)", BLOCKS),
        "PL445",
        [10, 7],
    ),
    "prefetch past the end": (HEAD + fsdp("prefetch(backward = 32)", BLOCKS), "PL449", [6]),
    "prefetch that says nothing": (HEAD + fsdp("prefetch(forward = 0)", BLOCKS), "PL012", [6]),
    "prefetch into the past": (HEAD + fsdp("prefetch(forward = -1)", BLOCKS), "PL012", [6]),
    "prefetch twice": (
        HEAD + fsdp("prefetch(forward = 1)", "prefetch(forward = 2)", BLOCKS),
        "PL102",
        [7, 6],
    ),
    "two sections": (
        HEAD.replace("auto", "auto\n cp = 1") + fsdp(BLOCKS, on="dp_shard * cp") + fsdp(),
        "PL446",
        [10, 6],
    ),
    "fsdp and replicate": (
        HEAD + fsdp() + "replicate on dp_shard {\n root : unit\n}\n",
        "PL446",
        [8, 5],
    ),
    "offload and never": (
        HEAD + fsdp("offload(cpu)").replace("unit", "unit(reshard = never)"),
        "PL447",
        [6, 7],
    ),
    "offload of copies": (
        HEAD + "replicate on dp_shard {\n offload(cpu)\n root : unit\n}\n",
        "PL447",
        [6, 5],
    ),
    "offload to nowhere": (HEAD + fsdp("offload(disk)"), "PL012", [6]),
    "offload without a place": (HEAD + fsdp("offload()"), "PL012", [6]),
    "divide by nothing": (HEAD + fsdp("divide = 0"), "PL012", [6]),
    "divide by a text": (HEAD + fsdp('divide = "8"'), "PL012", [6]),
    "nothing is so large": (HEAD + fsdp("auto(min_params = 100G) : unit"), "PL448", [6]),
    "auto without a size": (HEAD + fsdp("auto() : unit"), "PL012", [6]),
    "auto for something else": (HEAD + fsdp("auto(min_params = 1M) : full"), "PL105", [6]),
    "all of one dtype": (HEAD + fsdp("dtype(fp32) : unit"), "PL448", [6]),
    "no such dtype": (HEAD + fsdp("dtype(fp31) : unit"), "PL012", [6]),
    "no such search": (HEAD + fsdp("automatic(min_params = 1M) : unit"), "PL105", [6]),
    "reshard of copies": (
        HEAD + "replicate on dp_shard {\n root : unit(reshard = never)\n}\n",
        "PL450",
        [6, 5],
    ),
    "copies over a product": (
        HEAD + "replicate on dp_shard, replicate on dp_shard {\n root : unit\n}\n",
        "PL305",
        [5],
    ),
    "frozen, and has no parameters": (
        HEAD + "train {\n model.rotary_emb : frozen\n}\n" + fsdp(),
        "PL451",
        [6],
    ),
    "all frozen": (
        HEAD + "train {\n model : frozen\n lm_head : frozen\n}\n" + fsdp(),
        "PL452",
        [6, 7],
    ),
    "frozen twice": (
        HEAD + "train {\n lm_head : frozen\n lm_head : trainable\n}\n" + fsdp(),
        "PL102",
        [7, 6],
    ),
    "no such state": (HEAD + "train {\n lm_head : freezed\n}\n" + fsdp(), "PL105", [6]),
    "a section of another language": (HEAD + "prefetch {\n}\n" + fsdp(), "PL011", [5]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake(name):
    text, code, lines = MISTAKES[name]
    _, _, findings = judged(text, world=12 if "12" in text else 8)
    (found,) = [d for d in findings if d.code == code][:1] or [None]
    assert found is not None, [(d.code, d.message) for d in findings]
    at = [label.span.line for label in found.labels]
    assert at == lines


@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "llama-3.2-1b"])
def test_a_tie_is_frozen_and_ignored_whole(model):
    family = {"qwen2.5-0.5b": "qwen2"}.get(model, "llama")
    head = HEAD.replace("llama", family)
    one = "train {\n model.embed_tokens : frozen\n}\n"
    both = one.replace("}", " lm_head : frozen\n}")
    codes = [d.code for d in judged(head + one + fsdp(), model)[2]]
    assert codes == ["PL453"]
    codes = [d.code for d in judged(head + both + fsdp("ignore lm_head"), model)[2]]
    assert codes == ["PL402"]
    ignored = fsdp("ignore lm_head", "ignore model.embed_tokens")
    assert judged(head + both + ignored, model)[2] == []


# What is no mistake ------------------------------------------------------------------------------


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


def test_backward_goes_through_frozen_blocks_behind_what_trains():
    text = HEAD + "train {\n model.layers[0:4] : frozen\n}\n"
    assert judged(text + fsdp("prefetch(backward = 1)", BLOCKS))[2] == []


def test_forward_may_prefetch_frozen_blocks():
    assert judged(HEAD + FROZEN + fsdp("prefetch(forward = 1)", BLOCKS))[2] == []


def test_what_is_ignored_on_one_rank_may_train():
    assert judged(HEAD + fsdp("ignore lm_head"), world=1)[2] == []


def test_a_unit_over_some_axes_is_copied_over_the_rest():
    head = "plan t for llama\nmesh {\n r = 2\n a = 2\n b = 2\n}\n"
    section = fsdp("lm_head : unit(on = b)", on="a * b, replicate on r")
    ops = [op for op in lowered(head + section).ops if isinstance(op, FullyShard)]
    assert [(op.shard, op.replicate) for op in ops] == [(("b",), ("r", "a")), (("a", "b"), ("r",))]


def test_a_later_word_overrides_an_earlier_one():
    lines = ("divide = 4", "override divide = 2", "prefetch(forward = 1)")
    plan, _, findings = judged(HEAD + fsdp(*lines, "override prefetch(backward = 3)", BLOCKS))
    assert findings == []
    assert plan.fsdp.divide.factor == 2
    assert (plan.fsdp.prefetch.forward, plan.fsdp.prefetch.backward) == (0, 3)


def test_prefetch_goes_along_all_of_a_list_and_into_its_blocks():
    lines = ("model.layers.*.mlp : unit", "model.layers.* : unit(reshard = except_last)")
    lines += ("model.layers[0:8].self_attn : unit", "prefetch(forward = 2)")
    (op,) = [o for o in lowered(HEAD + fsdp(*lines)).ops if isinstance(o, Prefetch)]
    names = ["model.layers[0:32]", "model.layers[0:8].self_attn", "model.layers[0:32].mlp"]
    assert [str(m) for m in op.units] == names
    assert [str(m) for m in op.returning] == [names[0], names[2], names[1]]


# Units that are found ----------------------------------------------------------------------------


def found(lines, model="llama-3.1-8b", least="100M"):
    plan, _, findings = judged(HEAD + fsdp(f"auto(min_params = {least}) : unit", *lines), model)
    assert [d for d in findings if d.severity == "error"] == []
    return list(units(plan))


def test_the_smallest_modules_that_are_large_enough():
    assert found([]) == ["root", "model.embed_tokens", "model.layers[0:32].mlp", "model", "lm_head"]
    assert found([], least="50M")[2] == "model.layers[0:32].mlp.gate_proj"
    assert found([], least="200M") == [
        "root",
        "model.embed_tokens",
        "model.layers[0:32]",
        "lm_head",
    ]


def test_what_the_plan_names_is_left_alone():
    names = found(["model.layers[0:4] : unit(reshard = never)"], least="200M")
    assert names == [
        "model.layers[0:4]",
        "root",
        "model.embed_tokens",
        "model.layers[4:32]",
        "lm_head",
    ]


def test_no_half_of_a_tie():
    assert found([], "llama-3.2-1b", least="50M") == ["root", "model.layers[0:16].mlp"]


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
    plan, _, findings = judged(MIXED + fsdp(*lines), known=mixed())
    assert findings == []
    assert list(units(plan)) == ["blocks[0:2]", "root", "blocks[0:2].norm", "norm"]


def test_a_mix_of_dtypes_in_one_unit():
    _, _, findings = judged(MIXED + fsdp("blocks.* : unit"), known=mixed())
    assert [(d.code, d.labels[0].span.line) for d in findings] == [("PL415", 6)]
    frozen = "train {\n blocks.*.norm : frozen\n}\n"  # has no gradient that would be reduced
    assert judged(MIXED + frozen + fsdp("blocks.* : unit"), known=mixed())[2] == []


# The artefact ------------------------------------------------------------------------------------

ALL = (
    HEAD
    + FROZEN
    + fsdp(
        "ignore model.embed_tokens",
        "offload(cpu, pin = false)",
        "divide = 2.5",
        "prefetch(forward = 2)",
        "model.layers.* : unit(shard_dim = 1)",
    )
)


def test_what_is_said_is_in_the_document_and_in_the_digest():
    plan = lowered(ALL)
    again = loads(dumps(plan), "x.json", Sink())
    assert again == plan and digest(again) == digest(plan)
    changes = ("ignore model.embed_tokens", "offload(cpu, pin = false)", "divide = 2.5")
    changes += ("prefetch(forward = 2)", "(shard_dim = 1)", " model.layers[0:4] : frozen\n")
    digests = {digest(lowered(ALL.replace(change, ""))) for change in changes}
    assert len(digests | {digest(plan)}) == len(changes) + 1


def test_a_plan_without_any_of_it_says_nothing_of_it():
    text = dumps(lowered(HEAD + fsdp(BLOCKS)))
    for word in ("ignored", "shard_dim", "offload", "pin", "divide", "prefetch", "freeze"):
        assert word not in text


def test_the_text_says_it_all():
    text = text_of(lowered(ALL), digest="0" * 64)
    for words in (
        "frozen      model.embed_tokens",
        "offloaded to unpinned host memory",
        "split along dim 1",
        "ignored     model.embed_tokens  whole on every rank, in no unit",
        "gradients are summed, then divided by 2.5",
        "2 ahead in forward, of model.layers[0:32]",
    ):
        assert words in text


def test_the_script_is_python_without_planc():
    source = script(lowered(ALL), digest="0" * 64)
    compile(source, "emitted.py", "exec")
    assert "planc" not in source.partition('"""\n\n')[2].replace("t.plan", "")


ZAMBA = {
    "model_type": "zamba2",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "attention_head_dim": 32,
    "n_mamba_heads": 8,
    "mamba_d_state": 16,
    "mamba_ngroups": 1,
    "mamba_headdim": 16,
    "num_mem_blocks": 2,
    "hybrid_layer_ids": [1, 3, 5, 7],
    "layers_block_type": ["mamba", "hybrid"] * 4,
    "adapter_rank": 4,
    "chunk_size": 8,
    "max_position_embeddings": 64,
}


def test_modules_that_are_shared_are_one_finding(tmp_path, capsys):
    """zamba2's layers share a transformer of a dozen parameters: no finding for each of them."""
    import json

    from planc.cli import main

    (tmp_path / "z.json").write_text(json.dumps(ZAMBA))
    (tmp_path / "z.plan").write_text(
        "plan z for zamba2\nmesh {\n dp_shard = auto\n}\n"
        "fsdp on dp_shard {\n model.layers.* : unit\n root : unit\n}\n"
    )
    words = ["check", str(tmp_path / "z.json"), str(tmp_path / "z.plan"), "--world-size", "4"]
    assert main([*words, "--level", "structure", "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)["diagnostics"]
    assert [d["code"] for d in found] == ["PL402"] * 2
    shared = [f"model.layers[{i}].shared_transformer" for i in (1, 5)]
    assert f"`group({', '.join(shared)}) : unit`" in found[0]["help"]
    assert found[0]["labels"][0]["start"]["line"] == 6
