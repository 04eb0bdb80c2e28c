"""A model's folder on the disk, and what planc reads of it."""

import json

from planc.diagnostics.diagnostic import Sink
from planc.files.resources import PAGES
from planc.model.load import load

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}
BROKEN_QWEN3 = """plan broken for qwen3

extend "qwen3"

tensor on tp {
    model.layers.*.self_attn.{q,k}_norm : replicate
}
"""
"""The norms of heads are replicated, and their gradients are not summed: PL502."""


def written(folder, **fields):
    """A model's folder; a field that is `...` is left out."""
    values = {k: v for k, v in {**CONFIG, **fields}.items() if v is not ...}
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def found(model, **keywords):
    """The facts and what was said, as `CODE message` lines."""
    sink = Sink()
    facts = load(str(model), sink, **keywords)
    assert (facts is None) == sink.has_errors
    for d in sink:
        assert (PAGES / f"{d.code}.md").is_file()
        assert "\n" not in d.message
    return facts, [f"{d.code} {d.message}" for d in sink]
