"""Reads from a configuration how a causal language model scales and caps its logits."""

from collections.abc import Mapping
from typing import Any

from planc.model.config import text_of

SOFTCAP = "final_logit_softcapping"
"""gemma's: `softcap * tanh(logits / softcap)`."""
FACTORS = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
"""Fields that multiply the logits (cohere, falcon_h1), or divide them (granite): the exponent."""


def scale_of(config: Mapping[str, Any]) -> float:
    """The factor of the model's logits."""
    scale = 1.0
    for name, exponent in FACTORS.items():
        value = _field(config, name)
        if value is not None:
            scale *= value**exponent
    return scale


def softcap_of(config: Mapping[str, Any]) -> float | None:
    """The cap of the model's logits (its soft-capping value); None for no cap."""
    return _field(config, SOFTCAP)


def _field(config: Mapping[str, Any], name: str) -> float | None:
    """A positive number of the configuration, or of its part for text."""
    for part in (config, text_of(config)):
        value = part.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return value
    return None
