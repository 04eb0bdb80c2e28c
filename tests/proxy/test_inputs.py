"""Samples for models that take more than text reach the towers, and layout flow judges them."""

import json

import pytest
import torch
from helpers import mutant, sampled, simulated

from planc.diagnostics.diagnostic import Sink
from planc.model.layer_kinds import block_kinds
from planc.model.load import load, load_values
from planc.proxy.input_search import InputChoice, rank_slice
from planc.proxy.sample_inputs import INPUT_KINDS
from planc.proxy.shrink import shrink
from planc.proxy.transformers_model import TransformersBuilder

MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}
FAMILIES = {
    # model type: (class, changes to transformers' defaults, the kinds that win, tokens of a row)
    "llava": ("LlavaForConditionalGeneration", {}, ["images"], 16),
    "llava_next": ("LlavaNextForConditionalGeneration", {}, ["crops"], 52),
    "mistral3": ("Mistral3ForConditionalGeneration", {}, ["sized images"], 4),
    "idefics3": ("Idefics3ForConditionalGeneration", {}, ["lists of images"], 4),
    "mllama": ("MllamaForConditionalGeneration", {}, ["tiles"], 0),
    "lfm2_vl": ("Lfm2VlForConditionalGeneration", {}, ["shapes"], 4),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {"text_config": {"rope_parameters": MROPE}, "vision_config": {"hidden_size": 8192}},
        ["grids"],
        4,
    ),
    "whisper": ("WhisperForConditionalGeneration", {}, ["spectrum"], 0),
}


def small(family):
    """What builds the small model of a family, from transformers' defaults."""
    from transformers import AutoConfig

    name, changes, *_ = FAMILIES[family]
    values = json.loads(json.dumps(AutoConfig.for_model(family).to_dict(), default=str))
    for part, fields in changes.items():
        values[part] |= fields
    values["architectures"] = [name]
    facts = load_values(values, family, Sink())
    less = shrink(facts.config, ranks={"tensor": 2}, blocks=block_kinds(facts)).values
    return TransformersBuilder(
        {**json.loads(json.dumps(less, default=str)), "architectures": [name]}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_reaches_the_towers(family):
    *_, kinds, tokens = FAMILIES[family]
    builder = small(family)
    choice = builder.choice
    assert ([c.kind.name for c in choice.chosen], choice.missing) == (kinds, "")
    assert choice.tokens == tokens
    sample, model = builder.sample(), builder.build(0)
    model(**sample).loss.backward()
    names = [n for n, p in model.named_parameters() if p.grad is not None]
    assert any("vis" in n or "encoder" in n for n in names)
    assert sum(p.grad is not None for p in model.parameters()) > 0.7 * len(list(model.parameters()))
    if tokens:
        stand = sample["input_ids"] == choice.chosen[0].token
        assert stand.sum(1).tolist() == [tokens] * 4


def test_a_model_of_text_alone_is_not_run_to_find_out():
    builder = TransformersBuilder(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "vocab_size": 128,
            "intermediate_size": 64,
        }
    )
    builder.build = None  # whoever builds it fails
    assert builder.choice == InputChoice()
    assert {n: list(v.shape) for n, v in builder.sample().items()} == {
        "input_ids": [4, 16],
        "labels": [4, 16],
    }


def test_a_rank_reads_its_rows_of_every_input():
    inputs = {"input_ids": torch.arange(4), "pixel_values": torch.arange(16)}
    parts = [rank_slice(inputs, rank, 2) for rank in range(2)]
    assert [p["input_ids"].tolist() for p in parts] == [[0, 1], [2, 3]]
    assert torch.equal(torch.cat([p["pixel_values"] for p in parts]), inputs["pixel_values"])


# Layout flow -------------------------------------------------------------------------------------

SHIPPED = [
    ("gemma-3-4b", "gemma3_vision", "model.vision_tower.encoder.layers[0:27]", []),
    ("qwen3-vl-8b", "qwen3_vl", "model.visual.blocks[0:27]", []),
    # it makes three rows of positions of one, and its mask reads them in a fourth
    ("qwen2.5-vl-7b", "qwen2_5_vl", "model.visual.blocks[0:32]", ["PL517"]),
    ("llava-1.5-7b", "llava", "model.vision_tower.encoder.layers[0:24]", []),
    ("internvl3.5-8b", "internvl", "model.vision_tower.encoder.layer[0:24]", []),
    ("gemma-4-31b", "gemma4_vision", "model.vision_tower.encoder.layers[0:27]", []),
    ("qwen3.5-27b", "qwen3_5", "model.visual.blocks[0:27]", []),
]


@pytest.mark.parametrize(("model", "plan", "tower", "told"), sampled(SHIPPED, 2))
def test_shipped_plans_are_proved_with_their_towers(model, plan, tower, told):
    verdict, findings = simulated(model, plan)
    assert (verdict.verdict, [d.code for d in findings]) == ("proved", told)
    [kind] = [k for k in verdict.layers if k.modules == tower]
    assert kind.verdict == "proved" and 0 < kind.error < 5e-5


MUTANTS = [
    # (plan, what is replaced, by what, code, what is in the line that is marked)
    ("gemma3_vision", "self_attn.out_proj : rowwise", "", "PL503", "{q,k,v}_proj"),
    ("gemma3_vision", "mlp.fc2 : rowwise", "", "PL503", "mlp.fc1"),
    (
        "gemma3_vision",
        "self_attn.out_proj : rowwise",
        "self_attn.out_proj : rowwise(-> partial)",
        "PL501",
        "self_attn.out_proj",
    ),
    (
        "gemma3_vision",
        "mlp.fc1 : colwise",
        "layer_norm1 : sequence\n        mlp.fc1 : colwise",
        "PL505",
        "{q,k,v}_proj",
    ),
    ("qwen3_vl", "attn.qkv : colwise(-> replicate)", "attn.qkv : colwise", "PL503", "attn."),
    (
        "qwen3_vl",
        "mlp.linear_fc2 : rowwise",
        "mlp.linear_fc2 : rowwise(-> partial)",
        "PL501",
        "mlp.linear_fc2",
    ),
]
MODELS = {"gemma3_vision": "gemma-3-4b", "qwen3_vl": "qwen3-vl-8b"}


@pytest.mark.parametrize(
    "case", sampled([(case,) for case in MUTANTS], 2), ids=lambda m: f"{m[0]}: {m[2] or m[1]}"
)
def test_a_rule_broken_in_a_tower_is_refuted_at_its_line(tmp_path, case):
    plan, old, new, code, line = case
    path = mutant(tmp_path, plan, old, new, after="tensor on tp {\n    $tower")
    verdict, findings = simulated(MODELS[plan], path)
    assert verdict.verdict == "refuted", findings
    [found] = [d for d in findings if d.code == code]
    marked = [x.span.text for x in found.labels if x.span.source.name == str(path)]
    assert any(line in text for text in marked), marked


def test_a_tower_without_input_is_unknown_and_says_what_was_tried(tmp_path, monkeypatch):
    """With no recipe that fits, the tower's rules are unknown, as are those of its projector."""
    from planc.proof import judge as module
    from planc.proxy import input_search as inputs

    monkeypatch.setattr(
        inputs,
        "INPUT_KINDS",
        [k for k in inputs.INPUT_KINDS if k.name == "tiles"]
        + [k for k in inputs.INPUT_KINDS if k.name == "lists of images"],
    )
    monkeypatch.setattr(module, "_FORMAT", "test")
    verdict, findings = simulated("gemma-3-4b", "gemma3_vision")
    assert verdict.verdict == "unknown"
    [kind] = verdict.unknown_layers
    assert kind.modules == "model.vision_tower.encoder.layers[0:27]"
    assert "no input was found for its images: tried lists of images (" in kind.reason
    assert [d.code for d in findings] == ["PL504"]


def test_init_says_what_was_tried_for_a_tower(tmp_path, monkeypatch):
    from planc.proof import judge as module
    from planc.proxy import input_search as inputs
    from planc.tools.init.init import draft

    monkeypatch.setattr(
        inputs, "INPUT_KINDS", [k for k in INPUT_KINDS if k.name == "lists of images"]
    )
    monkeypatch.setattr(module, "_FORMAT", "test")
    sink = Sink()
    made = draft(load("gemma-3-4b", Sink()), sink)
    told = " ".join(line.removeprefix("#").strip() for line in made.text.splitlines())
    assert "it cannot be proved: model.vision_tower.encoder.layers." in told
    assert "The run had no images, as no such input was found" in told
    assert "Error" not in told  # what the model raised is no comment of a plan
    [said] = [d.message for d in sink if d.code == "PL612"]
    assert "images: tried lists of images (" in said
    assert "$tower {" not in made.text.partition("mesh {")[2].partition("checkpoint")[0]
    assert made.outcome.verdict == "proved"
    (tmp_path / "draft.plan").write_text(made.text)
    flow, _ = simulated("gemma-3-4b", str(tmp_path / "draft.plan"))
    assert flow.verdict == "proved"
    assert "not reached and not split: model.vision_tower.encoder.layers[0:27]" in flow.text


def test_blocks_that_drop_paths_are_of_one_kind():
    """A block that drops none holds an Identity in the place of a DropPath."""
    from torch import nn

    from planc.model.layer_kinds import signature
    from planc.model.module_table import facts_of

    def block(drop):
        made = nn.Module()
        made.fc, made.drop_path1 = nn.Linear(4, 4), drop
        return facts_of(made).root

    same, other = block(nn.Identity()), block(nn.Dropout(0.1))
    assert signature(same) == signature(other)
    assert signature(same) != signature(block(nn.Linear(4, 4)))
