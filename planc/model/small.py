"""A small real model of a configuration, on the CPU, for proofs: same code, random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BATCH, _LENGTH = 4, 16


def build(values: Mapping[str, Any], name: str, *, seed: int = 0) -> Any:
    """A model in float32 with eager attention and weights that are nowhere 0 or 1.

    A norm's weight of 1 or a bias of 0 would hide a plan that treats it wrongly.

    Args:
        values: a small configuration (`planc.model.shrink`).
        name: the class, of transformers.
        seed: of the weights, the same on every rank that builds the model.
    """
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**values)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, name)(config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.float())
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.config.use_cache = False
    return model.float().train()


def sample(values: Mapping[str, Any], *, seed: int = 3) -> dict[str, Any]:
    """Token ids and labels, [batch, sequence], that the model can take."""
    import torch

    text = values.get("text_config") or values
    vocabulary = int(text.get("vocab_size") or values.get("vocab_size") or 32)
    generator = torch.Generator().manual_seed(seed)
    shape = (_BATCH, _LENGTH)
    return {
        "input_ids": torch.randint(1, vocabulary, shape, generator=generator),
        "labels": torch.randint(1, vocabulary, shape, generator=generator),
    }
