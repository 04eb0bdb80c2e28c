"""The structural rules: each fires where it must, with its values, and is silent where it need not.

`tests/test_examples.py` runs one example of every code; here are the edges, and what is not
reported. `tests/dist` holds what was found by running on real processes.
"""

from dataclasses import replace

import pytest

from planc.checks import check
from planc.diagnostic import Sink
from planc.model.facts import Child, Facts, Module, Parameter
from planc.model.indices import Indices
from planc.model.load import load
from planc.model.module_table import facts_of
from planc.plan import elaborate
from planc.source import Source
from planc.syntax import parse
from planc.syntax.plan_files import read

MESH = "mesh {\n dp_shard = auto\n tp = 2\n}\n"
UNITS = "fsdp on dp_shard {\n root : unit\n}\n"


def judged(facts, text, *, world=24, settings=()):
    """The findings of a plan: (plan, diagnostics that are no notes)."""
    sink = Sink()
    file = parse(Source("t.plan", text), sink)
    plan = elaborate([file], facts, sink, world_size=world, settings=settings)
    assert plan is not None and not sink.failed, [d.message for d in sink]
    check(plan, facts, sink)
    return [d for d in sink if d.severity != "info"]


def codes(findings):
    return [d.code for d in findings]


def facts(model="llama-3.1-8b"):
    return load(model, Sink())


def tensor(rules, tp=2, units=UNITS, family="llama"):
    head = f"plan t for {family}\n" + MESH.replace("tp = 2", f"tp = {tp}")
    return f"{head}tensor on tp {{\n{rules}\n}}\n{units}"


# Shipped plans -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "plan", "tp"),
    [
        ("llama-3.1-8b", "llama", 8),
        ("llama-3.1-70b", "llama", 8),
        ("llama-3.1-405b", "llama", 8),
        ("llama-3.2-1b", "llama", 4),
        ("mistral-7b-v0.3", "llama", 4),
        ("qwen2.5-7b", "llama", 4),
        ("qwen2.5-0.5b", "llama", 2),
        ("qwen3-8b", "qwen3", 8),
        ("gemma-3-1b", "gemma3", 1),
        ("phi-4", "phi3", 8),
        ("phi-3-mini", "phi3", 8),
        ("mixtral-8x7b", "mixtral", 8),
        ("deepseek-v2-lite", "deepseek_v3", 4),
        ("gpt-oss-20b", "gpt_oss", 4),
        ("olmoe-1b-7b", "olmoe", 4),
        ("qwen3-30b-a3b", "qwen3_moe", 4),
        ("glm-4-9b", "glm", 2),
    ],
)
@pytest.mark.parametrize("sequence_parallel", ["true", "false"])
def test_shipped_plans_are_clean(model, plan, tp, sequence_parallel):
    sink = Sink()
    known = load(model, sink)
    settings = [f"tp={tp}", f"sequence_parallel={sequence_parallel}"]
    ir = elaborate(read(plan, sink), known, sink, world_size=16, settings=settings)
    check(ir, known, sink)
    assert [d.message for d in sink if d.severity != "info"] == []


# Heads -------------------------------------------------------------------------------------------


def test_key_value_heads_decide():
    rules = " model.layers.*.self_attn {\n  {q,k,v}_proj : colwise\n  o_proj : rowwise\n }"
    [found] = judged(facts(), tensor(rules, tp=12))
    assert found.code == "PL201"
    assert "8 key/value heads" in found.message and "tp = 12" in found.message
    assert found.help == "tp can be 1, 2, 4 or 8 for this model"
    assert any("num_key_value_heads = 8" in fact for fact in found.facts)
    assert [label.text for label in found.labels][-1] == "tp is 12"
    assert judged(facts(), tensor(rules, tp=8)) == []


def test_gathered_projections_may_have_any_heads():
    rules = " model.layers.*.self_attn {\n  {q,k,v}_proj : colwise(-> replicate)\n"
    rules += "  o_proj : rowwise(replicate -> replicate)\n }"
    assert "PL201" not in codes(judged(facts(), tensor(rules, tp=12)))


def layered(*heads):
    """A model whose layers differ in their heads, 8 features a head."""

    def layer(count):
        def linear(rows, columns):
            weight = Parameter("weight", (rows, columns))
            return Module(cls="Linear", kind="linear", parameters=(weight,))

        names = [("q_proj", linear(count * 8, 64)), ("o_proj", linear(64, count * 8))]
        attention = Module(
            cls="Attention",
            kind="other",
            facts=(("head_dim", 8),),
            children=tuple(Child(m, n) for n, m in names),
        )
        return Module(cls="Layer", kind="other", children=(Child(attention, "attn"),))

    groups = {}
    for i, count in enumerate(heads):
        groups[count] = groups.get(count, 0) | 1 << i
    entries = tuple(Child(layer(c), indices=Indices(bits)) for c, bits in groups.items())
    layers = Module(cls="ModuleList", kind="list", children=entries)
    root = Module(cls="Own", kind="other", children=(Child(layers, "layers"),))
    return Facts(name="Own", family="own", config={}, config_name="own", root=root)


def test_layers_are_judged_by_their_own_heads():
    rules = " layers.*.attn {\n  q_proj : colwise\n  o_proj : rowwise\n }"
    text = tensor(rules, tp=4, family="own")
    assert judged(layered(8, 4, 8), text) == []
    [found] = judged(layered(8, 6, 8, 6), text)
    assert found.code == "PL201" and "`layers[1,3].attn`" in found.message
    assert found.help == "tp can be 1, 2, 3 or 6 for this model"


# Splits that do not divide -----------------------------------------------------------------------

MLP = " model.layers.*.mlp {{\n  {{gate,up}}_proj : colwise{0}\n  down_proj : rowwise\n }}"


def test_an_uneven_intermediate_size():
    """14,336 over 6: right with DTensors in between, a crash with local tensors."""
    found = judged(facts(), tensor(MLP.format(""), tp=6))
    assert codes(found) == ["PL202", "PL202", "PL203"]
    assert "local = false" in found[0].help
    found = judged(facts(), tensor(MLP.format("(local = false)"), tp=6))
    assert set(codes(found)) == {"PL203"} and all(d.severity == "warning" for d in found)


def test_an_uneven_vocabulary_is_right_and_an_empty_part_is_not():
    rules = " model.embed_tokens : rowwise\n lm_head : colwise(-> replicate)"
    text = tensor(rules, tp=4, units="fsdp on dp_shard {\n root : unit\n}\n")
    small = replace(facts(), root=resized(facts().root, 128_256, 131))
    found = judged(small, text)
    assert codes(found) == ["PL203", "PL203"] and "33, the last 32" in found[0].message
    empty = replace(facts(), root=resized(facts().root, 128_256, 9))
    assert codes(judged(empty, text)) == ["PL202", "PL202"]


def resized(module, old, new):
    """A module table with one size replaced by another."""
    return replace(
        module,
        parameters=tuple(
            replace(p, shape=tuple(new if s == old else s for s in p.shape))
            for p in module.parameters
        ),
        children=tuple(replace(c, module=resized(c.module, old, new)) for c in module.children),
    )


# Kinds, pairs, norms -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "family", "rule", "word"),
    [
        ("gpt2", "gpt2", "transformer.h.*.attn.c_attn : sequence", "not a norm"),
        ("llama-3.1-8b", "llama", "model.layers.*.mlp : mla_kv(rope = 8)", "no linear layer"),
        ("llama-3.1-8b", "llama", "lm_head : mla_kv(rope = 1M)", "takes 1,000,000 of them"),
        ("llama-3.1-8b", "llama", "model.embed_tokens : colwise(parts = 2)", "no projections"),
        ("llama-3.1-8b", "llama", "model.rotary_emb : replicate(gradient = sum)", "no parameters"),
        ("llama-3.1-8b", "llama", "model.norm : colwise", "neither"),
        ("llama-3.1-8b", "llama", "model.layers.*.mlp : rowwise", "neither"),
        ("llama-3.1-8b", "llama", "model.layers.* : sequence", "modules inside"),
        ("llama-3.1-8b", "llama", "model.embed_tokens : sequence", "not a norm"),
        (
            "llama-3.1-8b",
            "llama",
            "model.embed_tokens : rowwise(shard(-1) -> replicate)",
            "whole token ids",
        ),
    ],
)
def test_kinds(model, family, rule, word):
    found = judged(facts(model), tensor(f" {rule}", family=family))
    assert found[0].code == "PL150" and word in found[0].message


def test_pairs_are_within_one_parent():
    found = judged(facts(), tensor(" model.layers.*.mlp.down_proj : rowwise"))
    assert codes(found) == ["PL160"] and "takes its whole input" in found[0].facts[0]
    assert judged(facts(), tensor(MLP.format(""))) == []
    assert judged(facts(), tensor(" lm_head : colwise(-> replicate)")) == []


def test_pairs_may_be_next_door():
    table, family = facts("bert-base"), "bert"
    alone = " bert.encoder.layer.*.intermediate.dense : colwise"
    both = f"{alone}\n bert.encoder.layer.*.output.dense : rowwise"
    assert judged(table, tensor(both, family=family)) == []
    assert codes(judged(table, tensor(alone, family=family))) == ["PL160"]


def test_norms_inside_split_attention():
    rules = " model.layers.*.self_attn {\n  {q,k,v}_proj : colwise\n  o_proj : rowwise\n"
    found = judged(facts("qwen3-8b"), tensor(rules + " }", family="qwen3"))
    assert codes(found) == ["PL161", "PL161"]
    more = "  {q,k}_norm : sequence(dim = 2, local = true)\n }"
    assert judged(facts("qwen3-8b"), tensor(rules + more, family="qwen3")) == []


def test_a_norm_before_what_is_split_sees_no_heads():
    rules = " model.visual.merger {\n  linear_fc1 : colwise\n  linear_fc2 : rowwise\n }"
    assert judged(facts("qwen3-vl-8b"), tensor(rules, family="qwen3_vl")) == []


def test_norms_beside_split_linears_of_the_block():
    """OPT has no module for its MLP: what stands beside fc1 works on the stream."""
    rules = " model.decoder.layers.* {\n  fc1 : colwise\n  fc2 : rowwise\n }"
    assert judged(facts("opt-1.3b"), tensor(rules, family="opt")) == []


# Ties and units ----------------------------------------------------------------------------------


def units(rules, family="gpt2"):
    return f"plan t for {family}\nmesh {{\n dp_shard = auto\n}}\nfsdp on dp_shard {{\n{rules}\n}}\n"


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (" root : unit", []),
        (" group(transformer.wte, lm_head) : unit\n root : unit", []),
        (" transformer.wte : unit\n root : unit", ["PL402"]),
        (" transformer.wte : unit\n lm_head : unit\n root : unit", ["PL402"]),
        (" transformer.h.* : unit", ["PL413"]),
        (" transformer.h[1:] : unit\n root : unit", ["PL412"]),
        (" transformer.h.*.{ln_1,attn,ln_2,mlp} : unit\n root : unit", []),
        (" transformer.h.*.mlp.act : unit\n root : unit", ["PL411"]),
        (" group(transformer, transformer.ln_f) : unit\n root : unit", ["PL410", "PL402"]),
        (" root : unit(reshard = 4)", []),
        (" root : unit(reshard = 24)", ["PL417"]),
        (" precision(param = bf16)\n root : unit(precision(param = bf16))", ["PL416"]),
    ],
)
def test_units(rules, expected):
    assert sorted(codes(judged(facts("gpt2"), units(rules)))) == sorted(expected)


def test_a_unit_of_several_dtypes():
    import torch

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(4)
            self.proj = torch.nn.Linear(4, 4, dtype=torch.bfloat16)

    class Own(torch.nn.Module):
        def __init__(self, frozen=False):
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
            if frozen:
                for block in self.blocks:
                    block.norm.requires_grad_(False)

    text = units(" blocks.* : unit\n root : unit", family="Own")
    [found] = judged(facts_of(Own()), text)
    assert found.code == "PL415" and "bfloat16 and float32" in found.message
    assert judged(facts_of(Own(frozen=True)), text) == []
    apart = units(" blocks.*.norm : unit\n blocks.* : unit\n root : unit", family="Own")
    assert judged(facts_of(Own()), apart) == []


def test_ties_must_be_split_alike():
    rules = " model.embed_tokens : {0}\n lm_head : {1}"
    right = tensor(rules.format("rowwise", "colwise(-> replicate)"), family="qwen2")
    assert judged(facts("qwen2.5-0.5b"), right) == []
    wrong = tensor(rules.format("rowwise", "rowwise(replicate -> replicate)"), family="qwen2")
    assert codes(judged(facts("qwen2.5-0.5b"), wrong)) == ["PL401"]
    half = tensor(" model.embed_tokens : rowwise", family="qwen2")
    [found] = judged(facts("qwen2.5-0.5b"), half)
    assert found.code == "PL401" and "lm_head.weight stays whole" in found.facts


# Order and optimizers ----------------------------------------------------------------------------


def test_compiled_blocks_behind_a_sum():
    blocks = "compile {\n model.layers.* : block\n}\n"
    rowwise = tensor(" model.embed_tokens : rowwise") + blocks
    assert codes(judged(facts(), rowwise)) == ["PL432"]
    colwise = tensor(" model.embed_tokens : colwise(-> replicate)") + blocks
    assert judged(facts(), colwise) == []


def test_tensor_parallelism_alone():
    text = tensor(MLP.format(""), units="").replace("dp_shard = auto", "dp_shard = 1")
    found = judged(facts(), text, world=2)
    assert codes(found) == ["PL414"] and found[0].severity == "warning"


def test_what_stays_whole_is_a_note():
    sink = Sink()
    file = parse(Source("t.plan", tensor(MLP.format(""))), sink)
    plan = elaborate([file], facts(), sink, world_size=24)
    check(plan, facts(), sink)
    [note] = [d for d in sink if d.code == "PL204"]
    assert note.message.startswith("30% of the parameters stay whole")
    assert any("q_proj.weight 536,870,912" in fact for fact in note.facts)


def test_offload_and_compile():
    def plan(way, what):
        sections = f"checkpoint {{\n model.layers.* : {way}\n}}\ncompile {{\n {what} : block\n}}\n"
        return tensor("", tp=1, units=sections + UNITS)

    offload = "full(offload = cpu)"
    assert codes(judged(facts(), plan(offload, "model.layers.*"))) == ["PL473"]
    assert codes(judged(facts(), plan(offload, "model.layers[3].mlp"))) == ["PL473"]
    assert codes(judged(facts(), plan(offload, "lm_head"))) == []
    assert codes(judged(facts(), plan("ops(save = [matmul])", "model.layers.*"))) == []


def test_a_cache_inside_the_configuration_of_a_tower_is_switched_off():
    from planc.lowering import lower
    from planc.plan import elaborate

    llama = facts()
    towers = replace(llama, config={"text_config": {"use_cache": True}, "vision_config": {}})
    text = tensor("", tp=1)
    for known, names in ((llama, ["use_cache"]), (towers, ["text_config.use_cache"])):
        plan = elaborate([parse(Source("t.plan", text), Sink())], known, Sink(), world_size=24)
        ops = lower(plan, known).ops
        assert [op.name for op in ops if type(op).__name__ == "Configure"] == names
