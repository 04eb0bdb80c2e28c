"""Complete default configurations of transformers' model types."""

import json
from collections.abc import Callable
from typing import Any

_DEFAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "head_dim": lambda c: c["hidden_size"] // c["num_attention_heads"],
    "num_key_value_heads": lambda c: c["num_attention_heads"],
    "n_routed_experts": lambda c: 8,
    "n_shared_experts": lambda c: 1,
    "num_experts_per_tok": lambda c: 2,
    "moe_topk": lambda c: 2,
    "topk_group": lambda c: 1,
    "n_group": lambda c: 1,
    "norm_topk_prob": lambda c: True,
}
"""Fields that some default configurations leave open, and every real one has."""

_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}

_OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    "deepseek_v2": {"moe_intermediate_size": 1408},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 4, "clip_qkv": 8.0}},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "qwen4_exp_text": _INDEXER,
    "qwen4_exp": {"text_config": _INDEXER},
    "xmod": {"default_language": "en_XX"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}
"""Further fields, for one type."""


def default_config(name: str) -> dict[str, Any]:
    """The default configuration of a type as JSON, with values for fields that it leaves open."""
    from transformers import AutoConfig

    values = AutoConfig.for_model(name).to_dict()
    for field, default in _DEFAULTS.items():
        if field in values and values[field] is None:
            values[field] = default(values)
    values = json.loads(json.dumps({**values, **_OWN.get(name, {})}, default=str))
    return dict(values)


def model_types() -> list[str]:
    """All types of the installed transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def types_with_plans() -> list[str]:
    """The types with a language model that ship a plan for tensor or expert parallelism."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    plans = ("base_model_tp_plan", "base_model_ep_plan")
    return sorted(n for n in NAMES if any(getattr(CONFIG_MAPPING[n], p, None) for p in plans))
