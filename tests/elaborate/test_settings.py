"""The settings of all families, the roles of their models, and the plans that hold both once."""

import re

import pytest

from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.elaborate.settings import SETTINGS
from planc.files.resources import PLANS
from planc.model.load import load
from planc.model.roles import LACKS, roles
from planc.syntax import ast
from planc.syntax.parse import parse
from planc.syntax.plan_files import families

BASES = [p for p in sorted(PLANS.glob("*.plan")) if families(p) == ("any",)]


def base_nodes():
    for path in BASES:
        yield from ast.walk(parse(Source(path.name, path.read_text()), Sink()))


def test_the_bases_use_every_setting_and_state_the_defaults_of_axes():
    nodes = [*base_nodes()]
    used = {node.path for node in nodes if isinstance(node, ast.Name)}
    meshes = [n for n in nodes if isinstance(n, ast.Section) and n.name == "mesh"]
    axes = {item.name: item.value for section in meshes for item in section.items}
    assert {s.word for s in SETTINGS.values() if s.axis} == axes.keys() - {"dp_shard"}
    assert all(axes[s.word].value == s.default for s in SETTINGS.values() if s.axis)
    assert {s.word for s in SETTINGS.values() if not s.axis} <= used


def test_the_bases_name_no_module():
    selectors = [n.path for n in base_nodes() if isinstance(n, ast.Selector)]
    # a plan that extends towers.plan says which modules are `tower`
    assert {path.removeprefix("$") for path in selectors} - {"root", "tower"} == {*LACKS}


def test_every_plan_extends_a_base_and_repeats_none_of_its_sections():
    for path in PLANS.glob("*.plan"):
        text = path.read_text()
        assert path in BASES or re.search(r'^extend "', text, re.M), path.name
        assert path in BASES or not re.search(r"^option |^mesh|^(pipeline|context|expert) on", text)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt2", "transformer.h[0:12] | transformer.wte | transformer.ln_f | lm_head |"),
        ("opt-1.3b", "model.decoder.layers[0:24] | model.decoder.embed_tokens"
         " | model.decoder.final_layer_norm | lm_head |"),  # its norm stands before the layers
        # an embedding for each layer, and a norm for it, behind the last norm
        ("gemma-4-e4b", "model.layers[0:5,6:11,12:17,18:23] model.layers[5:24:6] "
         "model.layers[24:29,30:35,36:41] model.layers[29:42:6] | model.embed_tokens"
         " | model.norm | lm_head |"),
        # more rows than the vocabulary
        ("cpm-ant-10b", "cpmant.encoder.layers[0:48] | cpmant.input_embedding"
         " | cpmant.encoder.output_layernorm | lm_head |"),
        ("qwen3-vl-8b", "model.language_model.layers[0:36] | model.language_model.embed_tokens"
         " | model.language_model.norm | lm_head |"),  # without its tower
        ("bert-base", "bert.encoder.layer[0:12] | bert.embeddings.word_embeddings |"
         " | cls.predictions.decoder |"),
        ("llama-3.2-1b-classes", "model.layers[0:16] | model.embed_tokens | model.norm | |"),
        ("flux.1-dev", "transformer_blocks[0:19] single_transformer_blocks[0:38] | | | |"),
        ("deepseek-v3", "model.layers[0:3] model.layers[3:61] | model.embed_tokens | model.norm"
         " | lm_head | model.layers[3:61].mlp.experts"),
    ],
)  # fmt: skip
def test_roles(model, expected):
    found = roles(load(model, Sink()))
    shown = " | ".join(" ".join(str(m) for m in getattr(found, role)) for role in LACKS)
    assert shown.split() == expected.split()
