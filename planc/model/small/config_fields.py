"""What the fields of configurations mean, under the names that the families give them."""

from __future__ import annotations

import re

LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_blocks",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "num_layers_per_stack",
    "depth",
)
HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "attention_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "num_encoder_attention_heads",
    "num_decoder_attention_heads",
    "swa_num_attention_heads",
)
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_query_groups")
HEAD_DIM = (
    "head_dim",
    "global_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "swa_head_dim",
    "index_head_dim",
    "kv_channels",
    "dim_head",
    "d_head",
    "d_kv",
    "query_pre_attn_scalar",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_head_dim",
    "attention_head_size",
    "rotary_dim",
)
QK = ("qk_nope_head_dim", "qk_rope_head_dim")
HIDDEN = (
    "hidden_size",
    "n_embd",
    "d_model",
    "emb_dim",
    "embedding_size",
    "embedding_dim",
    "word_embed_proj_dim",
    "input_embedding_size",
    "output_embedding_size",
    "lru_width",
    "attention_hidden_size",
)
WIDE = frozenset(
    {
        "intermediate_size",
        "n_inner",
        "ffn_dim",
        "ffn_hidden_size",
        "ffn_intermediate_size",
        "feed_forward_size",
        "d_ff",
        "dff",
        "dim_ff",
        "d_inner",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_experts_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "expert_ffn_hidden_size",
        "dense_intermediate_size",
        "intermediate_size_mlp",
    }
)
VOCABULARY = frozenset(
    {
        "vocab_size",
        "decoder_vocab_size",
        "unpadded_vocab_size",
        "vocab_size_per_layer_input",
        "audio_vocab_size",
    }
)
EXPERTS = frozenset(
    {
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "zero_expert_num",
    }
)
COUNTS = {
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
}
"""Counts that go with experts or layers, and the most that a small model has of them."""

POSITIONS = frozenset({"max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"})
LIMITS = {
    **dict.fromkeys(POSITIONS, 128),
    "sliding_window": 8,
    "sliding_window_size": 8,
    "attention_window_size": 8,
    "window_size": 8,
    "attention_chunk_size": 8,
    "local_attention": 8,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "o_lora_rank": 32,
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_d_state": 8,
    "time_step_rank": 8,
    "mamba_dt_rank": 8,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 16,
    "index_topk": 8,
    "index_n_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 4,
    "context_length": 128,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "router_hidden_size": 32,
    "encoder_hash_byte_group_vocab": 64,
}
"""Sizes that nothing has to divide by, and their most."""

NESTED = frozenset({"encoder", "decoder", "attn_config", "ffn_config"})
DROPOUT = re.compile(
    r"dropout|_pdrop$|_drop$|drop_rate|drop_path|layerdrop|resid_pdrop|jitter_noise"
)
JITTER = re.compile(r"jitter_(noise|eps)$")
TOKEN = re.compile(r"_token_ids?$|_token_index$|^(un|mas)k_index$|_token_idx$")
