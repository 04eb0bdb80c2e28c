"""The proxy model is run under the real plan's decisions, and its layers stand for real ones."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from helpers import STATED, elaborated, facts, simulated, slow
from hypothesis import given
from hypothesis import strategies as st
from modelfolder import written

from planc.compiler import compile_plan, complete_plan
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.elaborate.scope import Sizes
from planc.files.resources import PLANS
from planc.ir import stand_in
from planc.ir.stand_in import Unrepresented, variants
from planc.model.layer_kinds import block_lists, entry_kinds
from planc.model.layer_kinds import length as layer_count
from planc.ops.styles import Colwise
from planc.proof import small_case
from planc.proxy import depth
from planc.proxy.depth import edges, neighbors
from planc.syntax.parse import parse

MODELS = [
    (path.stem, plan.stem)
    for path in sorted((PLANS / "models").glob("*.json"))
    for plan in sorted(PLANS.glob("*.plan"))
    if json.loads(path.read_text()).get("model_type")
    in re.split(r"[ ,]+", plan.read_text().partition("\n")[0])
]

# Which layers are kept ---------------------------------------------------------------------------


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=40), st.integers(1, 3))
def test_neighbors_are_those_of_the_whole_model_and_none_is_left_over(letters, least):
    kinds = [(letter,) for letter in letters]
    kept = neighbors(kinds, least)
    assert kept == sorted(set(kept)) and {kept[0], kept[-1]} == {0, len(kinds) - 1}
    assert edges([kinds[i] for i in kept]) == edges(kinds)
    for first in range(1, len(kept) - 1):
        for end in range(first + 1, len(kept)):
            rest = [kinds[i] for i in (*kept[:first], *kept[end:])]
            assert len(rest) < least or edges(rest) != edges(kinds)


@pytest.mark.parametrize(
    ("letters", "kept"),
    [
        ("aabbbbbb", "aabb"),  # the first two
        ("aaaaaaab", "aab"),  # the last
        ("abababab", "abab"),  # every second
        ("aaabaaaa", "abaa"),  # one in the middle
        ("aaaaaaaa", "aa"),
        ("aabcdcdcdcdcdcdcde", "aabcdcde"),  # two that take turns, with other ends
    ],
)
def test_few_layers_are_enough(letters, kept):
    assert "".join(letters[i] for i in neighbors([(c,) for c in letters], 2)) == kept


FIRST_APART = {
    "ctrl": {48: [(0, 2, 47)]},
    "gemma-3-4b": {34: [(0, 4, 5, 6, 33)], 27: [(0, 1)]},
    "gemma-4-31b": {60: [(0, 2, 4, 5, 6, 59)], 27: [(0, 1)]},
    "glm-5": {78: [(0, 1, 2, 4, 77)]},
    "internvl3.5-8b": {36: [(0, 2, 35)], 24: [(0, 1)]},
    "llava-1.5-7b": {32: [(0, 2, 31)], 24: [(0, 1)]},
    "llava-onevision-7b": {28: [(0, 2, 27)], 26: [(0, 1)]},
    "llava-v1.6-mistral-7b": {32: [(0, 2, 31)], 24: [(0, 1)]},
    "qwen2.5-vl-7b": {28: [(0, 2, 27)], 32: [(0, 1)]},
    "qwen3.5-27b": {64: [(0, 1, 2, 3, 4, 63)], 27: [(0, 1)]},
    "qwen3.5-397b-a17b": {60: [(0, 1, 2, 3, 4, 59)], 27: [(0, 1)]},
}
"""Models whose first block alone takes whole hidden states, or no keys that the block before it has
chosen, and the layers that are kept."""


@pytest.mark.parametrize(("model", "plan"), MODELS)
def test_no_shipped_plan_needs_more_layers_than_kinds(model, plan):
    """So the proof of a shipped plan takes as long as it did before rules made kinds of layer."""
    compiled = compile_plan(model, plan, Sink(), world_size=16, settings=["tp=2"])
    if compiled.plan is None:
        return
    found = variants(compiled.plan, compiled.facts)
    if model not in FIRST_APART:
        assert found == {}
        return
    [(length, row)] = found.items()
    [blocks] = [at for at in block_lists(compiled.facts.model) if layer_count(at) == length]
    kinds = list(entry_kinds(blocks, compiled.facts, compiled.facts).values())
    classes = list(zip(kinds, row, strict=True))
    assert classes[0] not in classes[1:] and len({*classes[1:]}) == len({*kinds[1:]})
    made = small_case.small_model(compiled.facts, None, compiled.plan)
    assert made.kept == FIRST_APART[model]


# Numbers and decisions ---------------------------------------------------------------------------

SIZED = """
plan t for llama
option degree = 4
let wide = config.hidden_size > 1000
let part = when wide then config.num_attention_heads else 7
mesh {
    dp_shard = auto
    tp       = when config.hidden_size > 1000 then 2 else 1
}
tensor on tp {
    model.layers.*.self_attn {
        q_proj : colwise(parts = [config.hidden_size, tp], local = tp >= degree)
        k_proj : colwise(parts = when tp > 4 then part else 3, local = not wide)
    }
    when config.num_hidden_layers == 32 {
        model.layers[30:].mlp.up_proj : colwise(-> shard(when tp == 8 then 1 else 2))
    }
}
fsdp on dp_shard {
    auto(min_params = 100M) : unit
    divide = dp_shard * 2
    root : unit
}
"""


def test_only_numbers_are_those_of_the_small_model():
    known, sink = facts(), Sink()
    small = replace(known, config={**known.config, **SMALL})
    sizes = Sizes(facts=small, axes={"dp_shard": 2, "tp": 2})
    texts = [parse(Source("t.plan", SIZED), sink)]
    arguments = {"world_size": 64, "settings": ["tp=8"]}
    real = complete_plan(texts, known, sink, **arguments)
    small = complete_plan(texts, known, sink, **arguments, sizes=sizes)
    assert [d.message for d in sink] == []
    styles = {str(r.modules).rpartition(".")[2]: r.style for r in small.tensor}
    assert styles["q_proj"] == Colwise(parts=(64, 2), local=True)
    assert styles["k_proj"] == Colwise(parts=4, local=False)
    assert (small.fsdp.divide.factor, real.fsdp.divide.factor) == (4, 16)
    assert [(r.modules, type(r.style), r.origin) for r in real.tensor] == [
        (r.modules, type(r.style), r.origin) for r in small.tensor
    ]
    assert small.tensor[2].style == real.tensor[2].style
    assert str(small.tensor[2].modules) == "model.layers[30:32].mlp.up_proj"
    assert small.fsdp.units == real.fsdp.units and len(real.fsdp.units) > 1
    assert small.mesh == real.mesh


SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 128,
}


def test_a_number_that_the_small_model_lacks_is_unknown(tmp_path):
    """An entry of a list that is shorter in the proxy model."""
    path = tmp_path / "t.plan"
    text = "tensor on tp {\n lm_head : colwise(parts = len(config.layer_types) // 30)\n}\n"
    path.write_text(f"plan t for gemma2\nmesh {{ tp = 2 }}\n{text}")
    verdict, [finding] = simulated("gemma-2-9b", path, [], world=2)
    assert verdict.verdict == "unknown" and finding.code == "PL504"
    assert [label.span.line for label in finding.labels] == [4]


# What stands for what ----------------------------------------------------------------------------

SOME = """
plan t for qwen3
extend "{stated}/llama.plan"
tensor on tp {{
    model.layers{picked}.self_attn.{{q,k}}_norm : sequence(dim = 2, local = true)
}}
"""


def stood(tmp_path, picked, model="qwen3-8b"):
    path = tmp_path / "t.plan"
    path.write_text(SOME.format(stated=STATED, picked=picked))
    settings = ["tp=8", "sequence=false"]
    compiled = compile_plan(model, str(path), Sink(), world_size=64, settings=settings)
    found = small_case.small_case(compiled, {"dp_replicate": 1, "dp_shard": 1, "tp": 2})
    return compiled, found


@pytest.mark.parametrize(
    ("picked", "small", "layers"),
    [
        (".*", "[0:2]", 2),
        ("[:]", "[0:2]", 2),
        ("[0:2]", "[0:2]", 4),
        ("[-1]", "[2]", 3),
        ("[::2]", "[0,2]", 4),
        ("[0:12,13:36]", "[0,2:4]", 4),
        ("[35]", "[2]", 3),
    ],
)
def test_rules_keep_their_layers(tmp_path, picked, small, layers):
    _, found = stood(tmp_path, picked)
    [rule] = [r for r in found.compiled.plan.tensor if str(r.modules).endswith("q_norm")]
    assert str(rule.modules) == f"model.layers{small}.self_attn.q_norm"
    assert found.model.values["num_hidden_layers"] == layers


def test_a_small_model_that_lost_a_set_of_rules_is_no_proof(tmp_path, monkeypatch):
    monkeypatch.setattr(depth, "neighbors", lambda kinds, least: [0, 1])
    _, found = stood(tmp_path, "[0:2]")
    assert isinstance(found, Unrepresented)
    assert found.reason == "no layer of the proxy model stands for `model.layers[2]`"
    path = tmp_path / "t.plan"
    _, [finding] = simulated("qwen3-8b", path, ["tp=8", "sequence=false"])
    assert finding.code == "PL504" and "model.layers[2]" in finding.message
    assert [label.span.line for label in finding.labels] == [5]
    _, found = stood(tmp_path, "[2:]")
    assert found.reason == "no layer of the proxy model stands for `model.layers[2]`"
    assert [origin.line for origin in found.origins] == [5]


def test_a_small_model_whose_layers_follow_each_other_otherwise_is_no_proof(tmp_path, monkeypatch):
    monkeypatch.setattr(depth, "neighbors", lambda kinds, least: [0, 34, 35])
    _, found = stood(tmp_path, "[-1]")
    assert found.model.values["num_hidden_layers"] == 3
    monkeypatch.setattr(depth, "neighbors", lambda kinds, least: [0, 35])
    _, found = stood(tmp_path, "[-1]")
    assert (
        found.reason
        == "the blocks of `model.layers` follow each other otherwise in the proxy model"
    )
    assert [origin.line for origin in found.origins][-1] == 5


def test_a_module_that_the_small_model_lacks_is_no_proof(tmp_path):
    """Every line that acts on the real model acts on the small one."""
    compiled, found = stood(tmp_path, ".*")
    small = found.compiled.facts
    bare = replace(small.root, children=tuple(c for c in small.root.children if c.name == "model"))
    lost = stand_in.stand_in(
        compiled.plan,
        compiled.facts,
        replace(small, root=bare),
        kept=found.model.kept,
        sizes={"dp_replicate": 1, "dp_shard": 1, "tp": 2},
    )
    assert lost.reason == "`root` of the proxy model has no `lm_head`"
    assert "$head" in lost.origins[0].text


def test_the_last_unit_stays_the_last(tmp_path):
    """`except_last` decides the last real layer, for which the last small layer stands."""
    _, found = stood(tmp_path, ".*")
    units = [(str(u.members[0]), u.reshard) for u in found.compiled.plan.fsdp.units[:2]]
    assert units == [("model.layers[0]", True), ("model.layers[1]", False)]


@pytest.mark.parametrize(
    ("model", "plan", "reshards"),
    [("nemotron-h-8b", "nemotron_h", {True}), ("zamba2-2.7b", "zamba2", {True, False})],
)
def test_small_layers_stand_for_the_many_units_that_are_resharded(model, plan, reshards):
    """The last real layer alone is not resharded: it is among zamba2's, and not nemotron_h's."""
    compiled = compile_plan(model, plan, Sink(), world_size=8, settings=["tp=2"])
    found = small_case.small_case(compiled, {"dp_replicate": 1, "dp_shard": 2, "tp": 2}).compiled
    lists = {str(at) for at in block_lists(found.facts.model)}

    def resharded(plan):
        units = [u for u in plan.fsdp.units if str(u.members[0]).partition("[")[0] in lists]
        return {u.reshard for u in units}

    assert resharded(compiled.plan) == {True, False}
    assert resharded(found.plan) == reshards


@pytest.mark.parametrize("picked", ["model.layers[0:2]", "model.layers[-1]", "model.layers[3::4]"])
def test_periods_with_offsets_have_a_window_for_rules(picked):
    """jamba's class counts layers, so its proxy model is a run of consecutive layers."""
    text = f"""
plan t for jamba
mesh {{ tp = 2 }}
tensor on tp {{
    {picked}.input_layernorm : replicate(gradient = sum)
}}
"""
    plan, known, sink = elaborated(text, model="jamba-v0.1", world=2)
    assert not sink.has_errors
    made = small_case.small_model(known, None, plan)
    run = made.kept[32][0]
    assert len(run) < 32 and all(two == one + 1 for one, two in pairwise(run))
    small = made.facts(known, Sink())
    found = stand_in.stand_in(plan, known, small, kept=made.kept, sizes={"tp": 2})
    assert not isinstance(found, Unrepresented)
    ruled = [{i for r in p.tensor for i in r.modules.path[2]} for p in (plan, found)]
    assert [i in ruled[0] for i in run] == [i in ruled[1] for i in range(len(run))]


# The class of a model's own folder ---------------------------------------------------------------

OWN = """
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as Theirs


def centered(module, inputs):
    return (inputs[0] - inputs[0].mean(-1, keepdim=True),)


class LlamaForCausalLM(Theirs):
    config_class = LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.o_proj.register_forward_pre_hook(centered)
"""


def test_a_class_of_the_folder_is_proved_and_not_the_one_of_its_name(tmp_path, monkeypatch):
    """The mean over a rank's heads is not that over all heads, which only this class takes."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    own = {"AutoModelForCausalLM": "modeling_own.LlamaForCausalLM"}
    folder = written(tmp_path / "own", auto_map=own)
    (folder / "modeling_own.py").write_text(OWN)
    verdicts = {}
    for allowed in (False, True):
        sink, found = Sink(), Sink()
        settings = ["tp=2", "sequence=false"]
        compiled = compile_plan(
            str(folder), "llama", sink, world_size=4, settings=settings, allow_code=allowed
        )
        from planc.proof.layout_flow import flow

        verdicts[allowed] = flow(compiled, found, allow_code=allowed).verdict
        assert [d.code for d in found] == (["PL501"] if allowed else [])
    assert verdicts == {False: "proved", True: "refuted"}


# Assumptions of docs/proof-details.md ------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        slow("nemotron-h-8b", "nemotron_h"),
        ("command-r7b", "cohere2"),
        slow("qwen3-next-80b-a3b", "qwen3_next"),
    ],
)
def test_all_neighbors_of_kinds_are_proved_too(model, plan, monkeypatch):
    """Where the kind alone decides the rules, the proxy model has each kind, not each pair."""

    def by_kind(plan, known):
        found = {}
        for at in block_lists(known.model):
            kinds = list(entry_kinds(at, known, known).values())
            found[len(kinds)] = [str(kinds.index(kind)) for kind in kinds]
        return found

    compiled = compile_plan(model, plan, Sink(), world_size=16, settings=["tp=2"])
    before = small_case.small_model(compiled.facts, None, compiled.plan)
    monkeypatch.setattr(small_case, "variants", by_kind)
    after = small_case.small_model(compiled.facts, None, compiled.plan)
    [length] = after.kept
    assert len(after.kept[length][0]) > len(before.kept[length][0])
    assert simulated(model, plan, ["tp=2"], world=16)[0].verdict == "proved"
