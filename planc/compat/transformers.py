"""transformers: masks, and the names of checkpoint tensors."""

from planc.compat.names import private_names, require

with private_names("transformers"):
    from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        rename_source_key,
        revert_weight_conversion,
    )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

require(
    *("transformers", masking_utils, "ALL_MASK_ATTENTION_FUNCTIONS"),
    *("chunked_causal_mask_function", "find_packed_sequence_indices"),
)
require(
    *("transformers", PreTrainedModel, "_can_set_attn_implementation"),
    *("_from_config", "_init_weights", "_is_stateful"),
)
require("transformers", PreTrainedConfig, "_attn_implementation", "_experts_implementation")

__all__ = [
    "ALL_ATTENTION_FUNCTIONS",
    "WeightConverter",
    "get_model_conversion_mapping",
    "masking_utils",
    "rename_source_key",
    "revert_weight_conversion",
]
