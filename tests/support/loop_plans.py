"""The scripts of docs/training.md, and the plans of every axis that they run under unchanged."""

import re

import torch
from folders import ROOT

TEXTS = ROOT / "docs"
"""What is trained on: half a megabyte of Markdown."""
SCRIPT, ROWS = re.findall(
    r"```python\n(# (?:train|rows)\.py.*?)```", (TEXTS / "training.md").read_text(), re.S
)
LONG = """plan long for llama

extend "llama"

mesh {
    cp = 2
}

context on cp {
    attention = all_gather
}

override fsdp on dp_shard * cp {
    precision(param = fp32, reduce = fp32)
    model.layers.* : unit
    root           : unit
}
"""
PLANS = {
    "fsdp": (2, "llama", []),
    "hsdp": (4, "llama", ["dp_replicate=2"]),
    "tp": (4, "llama", ["tp=2"]),
    "pp": (2, "llama", ["pp=2", "microbatches=4"]),
    "pp and fsdp": (4, "llama", ["pp=2", "microbatches=2"]),
    "pp and tp": (4, "llama", ["pp=2", "tp=2", "microbatches=8"]),
    "zbv": (2, "llama", ["pp=2", "microbatches=4", "schedule=zbv"]),
    "loss on tp": (4, "llama", ["pp=2", "tp=2", "microbatches=2", "loss_chunks=2"]),
    "pp, tp and fsdp": (8, "llama", ["pp=2", "tp=2", "microbatches=2"]),
    "cp": (2, "long.plan", []),
    "cp, tp and fsdp": (8, "long.plan", ["tp=2"]),
    "pp and cp": (4, "long.plan", ["pp=2", "microbatches=2"]),
}
MIXTURES = {
    "ep": (2, "mixtral", ["ep=2"]),
    "ep and tp": (4, "mixtral", ["ep=4", "tp=2"]),
    "ep and pp": (4, "mixtral", ["ep=2", "pp=2", "microbatches=2"]),
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def saved(folder, kind, **more):
    """A folder of weights that are nowhere 0 or 1."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    model.save_pretrained(folder)
    return folder


def arguments(folder, plan, settings, weights):
    """The command line of train.py for three steps."""
    precise = [] if plan.endswith(".plan") else ["param_dtype=fp32"]
    given = [part for text in [*precise, *settings] for part in ("--set", text)]
    where = ["--save", str(folder / "last"), "--steps", "3"]
    return ["train.py", str(weights), str(TEXTS), plan, *where, *given]


def steps_of(printed):
    """(loss, norm) of each step that train.py printed."""
    lines = re.findall(r"^step \d, loss ([\d.]+), norm ([\d.]+)$", printed, re.M)
    return [[*map(float, line)] for line in lines]


def weights_of(folder):
    """What train.py exported."""
    from safetensors.torch import load_file

    return load_file(folder / "export" / "model.safetensors")
