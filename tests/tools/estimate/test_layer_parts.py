"""Models whose equal layers are counted in several parts: each layer has its own parameters."""

from collections import Counter

import pytest
from measured_tables import stack

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.model.layer_kinds import block_kinds
from planc.model.load import load
from planc.proxy.depth import Depth
from planc.tools.estimate.counted import Counted, Part
from planc.tools.estimate.from_plan import Batch, PlanWork
from planc.tools.estimate.kept_tensors import _layers, _with_few_layers

MODELS = (
    "qwen3-vl-8b",
    "qwen3-vl-30b-a3b",
    "qwen2.5-vl-7b",
    "qwen3.5-9b",
    "gemma-3-4b",
    "gemma-4-e4b",
    "internvl3.5-8b",
    "llama-4-scout",
    "llava-1.5-7b",
    "gemma-2-9b",
    "gpt-oss-20b",
    "zamba2-2.7b",
)
"""Multimodal shapes, and some whose layers differ in their attention alone."""


def bare_parts(facts):
    """The parts that are counted for a model, without what is counted."""
    depth = Depth(1, block_kinds(facts), {})
    _with_few_layers(facts.config, depth)
    return [Part(at=at, like=like) for at, like in _layers(facts, depth.kept).items()]


def elements(facts, like):
    """The mean number of parameters of layers, without those that earlier layers share."""
    names = Counter()
    for modules in facts.model.below():
        for name in modules.names():
            parts = name.split(".")
            for parameter in modules.module.parameters:
                path = f"{name}.{parameter.name}"
                if not any(path in group[1:] for group in facts.ties):
                    heads = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
                    names.update(dict.fromkeys(heads, parameter.numel))
    return sum(names[name] for name in like) // len(like)


@pytest.mark.parametrize("model", MODELS)
def test_each_part_has_the_parameters_of_its_layers(model):
    """qwen3-vl-8b had those of all 36 layers in three of them."""
    facts = load(model, Sink())
    compiled = compile_plan(model, None, Sink(), world_size=8, settings=())
    parts = bare_parts(facts)
    work = PlanWork(*compiled.applied, Batch(global_batch=8, sequence=64), stack("torch"))
    counted = Counted(parts=(*parts, Part(at="", like=("",))), logits=1)
    found = Counter()
    for stage in work.stages(counted):
        for layer, n in stage:
            if layer.name.endswith(".*") and n:
                found[layer.name, layer.parameters] += n
    expected = Counter()
    for part in parts:
        expected[f"{part.at.rpartition('.')[0]}.*", elements(facts, part.like)] += len(part.like)
    assert len(parts) > 1 and found == expected
