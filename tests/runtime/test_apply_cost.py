"""The time that `apply` takes grows as the model does, and not as its square."""

from collections import Counter

import pytest
import torch
from helpers import compiled_of
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from planc.diagnostics.diagnostic import Sink
from planc.model.load import load_values
from planc.runtime.safeguards import changes


@pytest.mark.parametrize("layers", [2, 6])
def test_the_modules_of_a_model_are_walked_once(layers, monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, num_attention_heads=2)
    values = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    lowered = compiled_of(load_values(values, "small", Sink()), "llama", ["tp=2"], 2).lowered
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    walked, walk = Counter(), nn.Module.named_modules

    def counted(module, *args, **kwargs):
        walked[module] += 1
        return walk(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    features = changes._sharded_features(model, lowered)
    assert {*walked.values()} == {1}
    inner = [*("q_proj", "k_proj", "v_proj"), *("gate_proj", "up_proj", "act_fn")]
    names = [name.rpartition(".")[2] for name, module in walk(model) if module in features]
    assert Counter(names) == dict.fromkeys(inner, layers)
