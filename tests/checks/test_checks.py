"""Structural checks on facts that no shipped model has, and shipped plans that pass them all.

What each check finds on a shipped model is in tests/specs.
"""

from dataclasses import replace

import pytest
import torch
from helpers import codes, elaborated, facts, judged

from planc.checks import check
from planc.checks.replicated import unsplit_parameters
from planc.compiler import compile_plan, complete_plan
from planc.diagnostics.diagnostic import Sink
from planc.lowering import lower
from planc.model.facts import Child, Facts, Module, Parameter
from planc.model.indices import Indices
from planc.model.load import load
from planc.model.module_table import facts_of
from planc.syntax.plan_files import read

NEVER = {"PL152", "PL162", "PL350", "PL351", "PL352", "PL418", "PL419"}
NEVER |= {"PL433", "PL434", "PL435"}
PLAN = """
plan t for own, llama, Own

mesh {
    dp_shard = auto
    tp       = 2
}

tensor on tp {
    RULES
}

fsdp on dp_shard {
    root : unit
}
"""


def split(model, rules, tp=2):
    """The findings of a plan that splits a model by some rules, and shards it as one unit."""
    text = PLAN.replace("RULES", rules)
    return judged(text, model=model, world=24, settings=[f"tp={tp}"])[2]


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
    settings = [f"tp={tp}", f"sequence={sequence_parallel}"]
    ir = complete_plan(read(plan, sink), known, sink, world_size=16, settings=settings)
    check(ir, known, sink)
    assert [d.message for d in sink if d.severity != "info"] == []


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("sequence_parallel", ["true", "false"])
@pytest.mark.parametrize(
    ("model", "name"),
    [("llama-3.1-8b", "llama"), ("qwen3-8b", "qwen3"), ("phi-4", "phi3"), ("gemma-3-1b", "gemma3")],
)
def test_shipped_plans_fail_in_none_of_these_ways(model, name, tp, sequence_parallel):
    sink = Sink()
    known = load(model, sink)
    settings = [f"tp={tp}", f"sequence={sequence_parallel}"]
    ir = complete_plan(read(name, sink), known, sink, world_size=16, settings=settings)
    check(ir, known, sink)
    assert not set(codes(sink)) & NEVER


# Heads -------------------------------------------------------------------------------------------


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
            facts=(("head_dim", 8), ("n", count)),
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
    rules = "layers.*.attn.q_proj : colwise\n    layers.*.attn.o_proj : rowwise"
    assert split(layered(8, 4, 8), rules, tp=4) == []
    [found] = split(layered(8, 6, 8, 6), rules, tp=4)
    assert found.code == "PL201" and "`layers[1,3].attn`" in found.message
    assert found.help == "tp can be 1, 2, 3 or 6 for this model"


def test_parts_that_do_not_add_up_are_no_heads():
    rules = "layers.*.attn.q_proj : colwise(parts = [8, 8])\n    layers.*.attn.o_proj : rowwise"
    assert [d.code for d in split(layered(8, 8), rules, tp=2)] == ["PL221"]


def test_integers_of_a_parent_size_the_parts_of_its_children():
    """Layers that differ in them have separate sizes; a name that no parent has is an error."""
    rules = "layers.*.attn.q_proj : colwise(parts = [parent.n * 4, parent.n * 4])"
    text = PLAN.replace("RULES", rules)
    plan, _, sink = elaborated(text, model=layered(8, 6, 8), world=24, settings=["tp=2"])
    parts = {str(rule.modules): rule.style.parts for rule in plan.tensor}
    assert parts == {
        "layers[0,2].attn.q_proj": (32, 32),
        "layers[1].attn.q_proj": (24, 24),
    }, [d.message for d in sink]
    [found] = elaborated(text.replace("parent.n ", "parent.m ", 1), model=layered(8), world=24)[2]
    assert (found.code, found.message) == ("PL100", "`Attention` has no integer `m`")
    assert found.facts == ("its integers: head_dim = 8 and n = 8",)


@pytest.mark.parametrize(
    ("model", "plan", "tp", "heads"),
    [
        ("bert-base", "bert", 8, "12 attention heads"),
        ("pythia-6.9b", "gpt_neox", 64, "32 attention heads"),
        ("deepseek-v2-lite", "deepseek_v3", 32, "16 attention heads"),
        ("deepseek-v3.2", "deepseek_v3", 256, "128 attention heads"),
        ("glm-5", "deepseek_v3", 128, "64 attention heads"),
        ("kimi-linear-48b-a3b", "kimi_linear", 64, "32 attention heads"),
    ],
)
def test_features_that_divide_where_heads_do_not(model, plan, tp, heads):
    """Each projection's features divide by these ranks."""
    for over, refused in ((tp, True), (4, False)):
        sink = Sink()
        compile_plan(model, plan, sink, world_size=tp, settings=[f"tp={over}"])
        found = [d for d in sink if d.code == "PL201"]
        assert bool(found) == refused, [d.message for d in found]
        for finding in found:
            assert finding.message.startswith(f"{heads} of `")
            assert finding.message.endswith(f"cannot be split over tp = {over}")


# Splits that do not divide -----------------------------------------------------------------------


def test_an_uneven_vocabulary_is_right_and_an_empty_part_is_not():
    rules = "model.embed_tokens : rowwise\n    lm_head : colwise(-> replicate)"
    small = replace(facts(), root=resized(facts().root, 128_256, 131))
    found = split(small, rules, tp=4)
    assert codes(found) == ["PL203", "PL203"] and "33, the last 32" in found[0].message
    empty = replace(facts(), root=resized(facts().root, 128_256, 9))
    assert codes(split(empty, rules, tp=4)) == ["PL202", "PL202"]


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


@pytest.mark.parametrize(("columns", "said"), [(6336, True), (6337, False)])
def test_replicated_parameters_are_reported_from_one_percent(columns, said):
    """64 of 6,400 parameters, and of 6,401."""

    def leaf(name, size):
        weight = Parameter("weight", (size, 1))
        return Child(Module(cls="Linear", kind="linear", parameters=(weight,)), name)

    root = Module(cls="Own", kind="other", children=(leaf("split", columns), leaf("whole", 64)))
    model = Facts(name="Own", family="own", config={}, config_name="own", root=root)
    text = PLAN.replace("RULES", "split : colwise")
    plan, _, sink = elaborated(text, model=model, world=24, settings=["tp=2"])
    unsplit_parameters(plan, model, sink)
    found = [d.message for d in sink if d.code == "PL204"]
    assert found == ["1% of the parameters are replicated over tp = 2"] * said


# Ties and units ----------------------------------------------------------------------------------


UNITS = """
plan t for Own

mesh {
    dp_shard = auto
}

fsdp on dp_shard {
    INNER
    blocks.* : unit
    root     : unit
}
"""


def test_a_unit_of_several_dtypes():
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

    text = UNITS.replace("INNER", "")
    [found] = judged(text, model=facts_of(Own()), world=24)[2]
    assert found.code == "PL415" and "bfloat16 and float32" in found.message
    assert judged(text, model=facts_of(Own(frozen=True)), world=24)[2] == []
    apart = UNITS.replace("INNER", "blocks.*.norm : unit")
    assert judged(apart, model=facts_of(Own()), world=24)[2] == []


# Order and optimizers ----------------------------------------------------------------------------


def test_a_cache_inside_the_configuration_of_a_tower_is_switched_off():
    llama = facts()
    towers = replace(llama, config={"text_config": {"use_cache": True}, "vision_config": {}})
    for known, names in ((llama, ["use_cache"]), (towers, ["text_config.use_cache"])):
        plan, *_ = elaborated(PLAN.replace("RULES", ""), model=known, world=24, settings=["tp=1"])
        ops = lower(plan, known).ops
        assert [op.name for op in ops if type(op).__name__ == "Configure"] == names
