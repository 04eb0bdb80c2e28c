"""The module table: what is one entry and what is not, kinds, facts, ties, totals."""

import dataclasses
import json

import diffused
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from planc.diagnostics.diagnostic import Sink
from planc.model.config import shipped_models
from planc.model.facts import Facts, Modules
from planc.model.load import load, load_values
from planc.model.module_table import already_parallel, facts_of

# The totals that the publishers state; tied parameters count once.
TOTALS = {
    "biogpt": 346_763_264,
    "bloom-7b1": 7_069_016_064,
    "codegen-350m": 356_712_448,
    "command-r": 34_980_831_232,
    "command-r7b": 8_028_033_024,
    "falcon-7b": 6_921_720_704,
    "gemma-2-9b": 9_241_705_984,
    "glm-4-9b": 9_399_951_360,
    "glm-4-9b-0414": 9_400_094_720,
    "gpt-j-6b": 6_050_882_784,
    "minitron-4b": 4_190_509_056,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-v2-lite": 15_706_484_224,
    "mpt-7b": 6_649_286_656,
    "olmo-2-7b": 7_298_617_344,
    "olmo-7b": 6_888_095_744,
    "persimmon-8b": 9_397_175_296,
    "phi-2": 2_779_683_840,
    "pythia-6.9b": 6_857_302_016,
    "stablelm-2-1.6b": 1_644_515_328,
    "starcoder": 15_517_456_384,
    "starcoder2-3b": 3_030_371_328,
    "xglm-564m": 564_463_616,
    "bert-base": 109_514_298,
    "nemotron-h-8b": 8_100_852_736,
    "mamba-codestral-7b": 7_285_403_648,
    "jamba-v0.1": 51_570_323_328,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 4_300_079_472,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen2.5-vl-7b": 8_292_166_656,
    "gpt2": 124_439_808,
    "opt-1.3b": 1_315_758_080,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.3": 7_248_023_552,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "llama-4-scout": 107_769_861_120,
    "llama-4-maverick": 400_711_848_960,
    "ministral-8b": 8_019_808_256,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "gemma-7b": 8_537_680_896,
    "gemma-4-26b-a4b": 25_233_141_760,
    "gemma-4-e4b": 7_463_013_376,
    "phi-3.5-moe": 41_873_153_344,
    "deepseek-v3": 671_026_404_352,
    "glm-4.5-air": 106_852_245_504,
    "granite-3.1-8b": 8_170_848_256,
    "granite-3.1-1b-a400m": 1_334_628_352,
    "bamba-9b": 9_780_235_392,
    "falcon-h1-0.5b": 521_411_104,
    "diffusiongemma-26b-a4b": 25_823_778_864,
    "jetmoe-8b": 8_522_237_952,
    "ctrl": 1_637_964_550,
    "cpm-ant-10b": 9_517_453_312,
    "zamba2-2.7b": 2_662_214_560,
    "minimax-text-01": 456_089_655_296,
    "smollm3-3b": 3_075_098_624,
    "exaone-4.0-32b": 32_003_216_384,
    "ernie-4.5-21b-a3b": 21_825_437_888,
    "ernie-4.5-0.3b": 360_748_032,
    "apertus-8b": 8_053_338_176,
    "hunyuan-7b": 7_504_568_320,
    "diffllama-1b": 1_204_885_504,
    "helium-1-2b": 2_023_868_416,
    "seed-oss-36b": 36_151_104_512,
    "afm-4.5b": 4_619_184_640,
    "olmo-3-7b": 7_298_011_136,
    "llama-3.2-1b-classes": 1_235_818_496,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "kimi-linear-48b-a3b": 49_122_675_072,
    "deepseek-v3.2": 671_877_929_216,
    "glm-5": 743_911_199_232,
    "minimax-m2": 228_689_748_992,
    "lfm2-1.2b": 1_170_340_608,
    "granite-4.0-h-tiny": 6_939_037_248,
    "olmo-hybrid-7b": 7_430_870_688,
    "llava-1.5-7b": 7_063_427_072,
    "llava-v1.6-mistral-7b": 7_566_747_648,
    "llava-onevision-7b": 8_029_890_080,
    "internvl3.5-8b": 8_528_318_464,
    "gemma-4-31b": 31_273_086_512,
    "qwen3.5-27b": 27_356_728_560,
    "qwen3.5-397b-a17b": 396_802_360_816,
    "deepseek-v4-flash": 284_332_230_231,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "kimi-k2": 1_026_408_209_408,
}
TIED = {
    "jetmoe-8b",
    "ctrl",
    "gemma-3-4b",
    "bert-base",
    "biogpt",
    "bloom-7b1",
    "command-r",
    "command-r7b",
    "falcon-7b",
    "gemma-2-9b",
    "gemma-3-1b",
    "gpt2",
    "llama-3.2-1b",
    "mpt-7b",
    "opt-1.3b",
    "qwen2.5-0.5b",
    "starcoder",
    "starcoder2-3b",
    "xglm-564m",
    "gemma-7b",
    "gemma-4-26b-a4b",
    "gemma-4-e4b",
    "gemma-4-31b",
    "granite-3.1-8b",
    "granite-3.1-1b-a400m",
    "zamba2-2.7b",
    "diffusiongemma-26b-a4b",
    "smollm3-3b",
    "ernie-4.5-21b-a3b",
    "ernie-4.5-0.3b",
    "hunyuan-7b",
    "lfm2-1.2b",
    "granite-4.0-h-tiny",
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def built(family, **fields):
    config = AutoConfig.for_model(family, **{**SMALL, **fields})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def table(module, **keywords):
    return facts_of(module, **keywords)


def entries(facts, path):
    """The sets of indices at a list, as text."""
    module = facts.root
    for name in path.split("."):
        module = next(c.module for c in module.children if c.name == name)
    return [str(c.indices) for c in module.children]


def names(facts):
    """Every parameter's torch name and shape, expanded from the table."""
    found = {}
    for modules in Modules((), facts.root).below():
        for prefix in modules.names():
            for p in modules.module.parameters:
                found[f"{prefix}.{p.name}" if prefix else p.name] = p.shape
    return found


def loaded(model, **keywords):
    sink = Sink()
    facts = load(model, sink, cache=False, **keywords)
    assert list(sink) == []
    assert isinstance(facts, Facts)
    return facts


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "phi3", "mixtral"])
def test_the_table_holds_every_parameter(family):
    model = built(family, pad_token_id=0)
    expected = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    assert names(facts_of(model, config=model.config)) == expected


@pytest.mark.parametrize("layers", [1, 2, 37])
def test_identical_layers_are_one_entry(layers):
    facts = table(built("llama", num_hidden_layers=layers))
    assert entries(facts, "model.layers") == ["[0]" if layers == 1 else f"[0:{layers}]"]
    deep = table(built("llama", num_hidden_layers=1))
    assert sum(1 for _ in facts.model.below()) == sum(1 for _ in deep.model.below())


def test_sliding_layers_differ_from_full_ones():
    facts = table(built("gemma3_text", num_hidden_layers=13, sliding_window=8))
    assert entries(facts, "model.layers") == ["[0:5,6:11,12]", "[5,11]"]
    layers = next(m for m in facts.model.below() if str(m) == "model.layers").module
    kinds = [
        next(c.module for c in e.module.children if c.name == "self_attn").fact("is_sliding")
        for e in layers.children
    ]
    assert kinds == [1, 0]


def test_a_layer_type_tells_layers_apart():
    """qwen2 has no `is_sliding`, only the name of the kind."""
    layers = ["full_attention", "sliding_attention"] * 4
    facts = table(built("qwen2", layer_types=layers, use_sliding_window=True, sliding_window=4))
    assert entries(facts, "model.layers") == ["[0:7:2]", "[1:8:2]"]


class Block(nn.Module):
    def __init__(self, width=8, bias=True, heads=2):
        super().__init__()
        self.head_dim = heads
        self.layer_idx = id(self)
        self.up = nn.Linear(4, width, bias=bias)


DIFFERENT = {
    "shape": lambda: Block(width=16),
    "a parameter that is missing": lambda: Block(bias=False),
    "fact": lambda: Block(heads=4),
    "dtype": lambda: Block().to(torch.bfloat16),
    "frozen": lambda: Block().requires_grad_(False),
    "class": type("Other", (Block,), {}),
    "child": lambda: nn.Sequential(Block()),
}


@pytest.mark.parametrize("make", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_what_differs_is_an_entry_of_its_own(make):
    model = nn.ModuleList([Block(), make(), Block(), Block()])
    facts = table(nn.ModuleDict({"layers": model}))
    assert entries(facts, "layers") == ["[0,2:4]", "[1]"]


def test_a_sequential_may_name_its_entries():
    facts = table(nn.Sequential(*[nn.Linear(2, 2)] * 2))
    assert [str(c.indices) for c in facts.root.children] == ["[0:2]"]
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    mixed = nn.Sequential()
    mixed.add_module("first", first)
    mixed.add_module("1", second)
    facts = table(mixed)
    assert [(c.name, c.indices) for c in facts.root.children] == [("first", None), ("1", None)]


def test_kinds():
    from transformers.pytorch_utils import Conv1D

    class Mine(nn.Linear):
        pass

    class RMSNorm(nn.Module):
        pass

    kinds = {
        "linear": nn.Linear(2, 2),
        "mine": Mine(2, 2),
        "conv": Conv1D(2, 2),
        "embedding": nn.Embedding(2, 2),
        "norm": nn.LayerNorm(2),
        "rms": RMSNorm(),
        "list": nn.ModuleList(),
        "dict": nn.ModuleDict(),
        "act": nn.GELU(),
    }
    facts = table(nn.ModuleDict(kinds))
    assert {c.name: c.module.kind for c in facts.root.children} == {
        "linear": "linear",
        "mine": "linear",
        "conv": "conv1d",
        "embedding": "embedding",
        "norm": "norm",
        "rms": "norm",
        "list": "list",
        "dict": "dict",
        "act": "other",
    }


def test_head_facts():
    facts = table(built("llama"))
    attention = next(m for m in facts.model.below() if m.path[-1:] == ("self_attn",)).module
    assert dict(attention.facts)["head_dim"] == 16
    assert dict(attention.facts)["num_key_value_groups"] == 2
    assert "layer_idx" not in dict(attention.facts)


@pytest.mark.parametrize("tied", [True, False])
def test_ties(tied):
    facts = table(built("llama", tie_word_embeddings=tied))
    expected = (("model.embed_tokens.weight", "lm_head.weight"),) if tied else ()
    assert facts.ties == expected
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(names(facts))
    assert facts.root.count - facts.count == (128 * 64 if tied else 0)


def test_ties_inside_a_list():
    shared = nn.Linear(4, 4)
    facts = table(nn.ModuleDict({"layers": nn.ModuleList([shared, nn.Linear(4, 4), shared])}))
    assert set(facts.ties) == {
        ("layers.0.weight", "layers.2.weight"),
        ("layers.0.bias", "layers.2.bias"),
    }
    assert (facts.root.count, facts.count) == (60, 40)


def test_a_parameter_by_name():
    facts = table(built("llama"))
    assert facts.find("model.layers.7.mlp.up_proj.weight")[1].shape == (96, 64)
    for wrong in (
        "model.layers.8.mlp.up_proj.weight",
        "model.layers.x.mlp",
        "weight",
        "model.norm",
    ):
        with pytest.raises(KeyError):
            facts.find(wrong)


@dataclasses.dataclass
class Settings:
    n_head: int = 4
    dtype: torch.dtype = torch.bfloat16


class Plain:
    def __init__(self):
        self.n_head = 4
        self.dtype = torch.bfloat16


class Loop(dict):
    def __init__(self):
        super().__init__(n_head=4, dtype="bfloat16")
        self["self"] = self


@pytest.mark.parametrize(
    "config", [Settings(), Plain(), {"n_head": 4, "dtype": torch.bfloat16}, Loop()]
)
def test_any_configuration_becomes_plain_data(config):
    facts = facts_of(nn.Linear(2, 2), config=config)
    assert facts.config == {"n_head": 4, "dtype": "bfloat16"}
    assert facts.family == "Linear"


def test_resolved_configuration():
    """A null field is what the family makes of it, and nested ones stay nested."""
    model = built("llama", num_key_value_heads=None)
    facts = facts_of(model, config=model.config, stated_fields=frozenset({"hidden_size"}))
    assert facts.config["num_key_value_heads"] == 4
    assert facts.source("hidden_size") == "config.json"
    assert facts.source("hidden_act") == "default of llama"
    nested = AutoConfig.for_model("gemma3").to_dict()
    assert facts_of(nn.Linear(2, 2), config=nested).config["text_config"]["head_dim"] == 256
    assert json.loads(json.dumps(facts.config)) == facts.config


def test_devices_agree():
    meta = built("llama")
    assert facts_of(meta.to_empty(device="cpu")) == facts_of(built("llama"))


def test_already_parallel():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = built("llama")
    assert already_parallel(model) is None
    model.model.layers[3] = checkpoint_wrapper(model.model.layers[3])
    assert already_parallel(model) == "model.layers.3 is wrapped for checkpointing"


def test_already_sharded(tmp_path):
    from torch import distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh

    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].bias = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh))
        assert already_parallel(model) == "1.bias is a DTensor"
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        fully_shard(model[1], mesh=mesh)
        assert already_parallel(model) == "1 is sharded (FSDPModule)"
    finally:
        dist.destroy_process_group()


def test_every_shipped_model_has_a_total():
    assert set(shipped_models()) == set(TOTALS) | set(diffused.TOTALS)


@pytest.mark.parametrize("name", TOTALS)
def test_shipped_models(name):
    facts = loaded(name)
    assert facts.count == TOTALS[name]
    assert bool(facts.ties) == (name in TIED)
    assert facts.config_name == f"plans/models/{name}.json"
    assert facts.stated_fields >= {"model_type"}
    assert facts.stated_fields & {"vocab_size", "text_config"}


@pytest.mark.parametrize("family", ["pegasus", "bart"])
def test_a_decoder_alone_says_so(family):
    """Pegasus changes a copy of the configuration that it is given, and bart that one."""
    values = {"model_type": family, "architectures": [f"{family.title()}ForCausalLM"]}
    sizes = dict(d_model=64, vocab_size=128, encoder_layers=1, encoder_attention_heads=4)
    found = load_values({**values, **sizes, "decoder_layers": 2}, "of a test", Sink())
    assert found.name == values["architectures"][0]
    assert found.config["is_encoder_decoder"] is False
