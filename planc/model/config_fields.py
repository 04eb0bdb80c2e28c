"""Names of configuration fields by meaning, across the families of transformers.

A comment after a row names the families that need it, if known; rows without one are used by most
families.
"""

import re

LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_blocks",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",  # prophetnet
    "num_decoder_layers",
    "num_layers_per_stack",  # hrm_text
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
    "num_encoder_attention_heads",  # prophetnet
    "num_decoder_attention_heads",  # prophetnet
    "swa_num_attention_heads",  # inkling, inkling2
)
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_query_groups")
HEAD_DIM = (
    "head_dim",
    "global_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "swa_head_dim",  # inkling, inkling2
    "index_head_dim",
    "kv_channels",  # jetmoe, zamba2
    "dim_head",  # cpmant, granite_speech, granite_speech_plus
    "d_head",  # funnel, xlnet
    "d_kv",
    "query_pre_attn_scalar",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_head_dim",  # bailing_hybrid, glm5_next, kimi_linear
    "attention_head_size",  # reformer
    "rotary_dim",
)
QK = ("qk_nope_head_dim", "qk_rope_head_dim")
HIDDEN = (
    "hidden_size",
    "n_embd",
    "d_model",
    "emb_dim",  # flaubert, qwen2_5_omni, xlm
    "embedding_size",
    "embedding_dim",
    "word_embed_proj_dim",  # opt
    "input_embedding_size",  # rembert
    "output_embedding_size",  # rembert
    "lru_width",  # recurrent_gemma
    "attention_hidden_size",  # rwkv, zamba, zamba2
)
WIDE = frozenset(
    {
        "intermediate_size",
        "n_inner",
        "ffn_dim",
        "ffn_hidden_size",  # dbrx, falcon, longcat_flash
        "ffn_intermediate_size",
        "feed_forward_size",  # reformer
        "d_ff",
        "dff",  # ctrl
        "dim_ff",  # cpmant
        "d_inner",  # funnel, xlnet
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_experts_intermediate_size",  # dots3_note
        "moe_shared_expert_intermediate_size",  # nemotron_h
        "shared_intermediate_size",
        "expert_ffn_hidden_size",  # longcat_flash
        "dense_intermediate_size",  # minimax_m3_vl
        "intermediate_size_mlp",  # llama4
    }
)
VOCABULARY = frozenset(
    {
        "vocab_size",
        "decoder_vocab_size",  # marian
        "unpadded_vocab_size",  # inkling, inkling2
        "vocab_size_per_layer_input",  # gemma3n, gemma4
        "audio_vocab_size",  # moshi
    }
)
EXPERTS = frozenset(
    {
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "zero_expert_num",  # longcat_flash
    }
)
COUNTS = {
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,  # aria, hunyuan_v1_moe, longcat_flash
    "moe_top_k": 2,  # dbrx
    "moe_k": 2,  # ernie4_5_moe, ernie4_5_vl_moe
    "top_k_experts": 2,  # diffusion_gemma, gemma4
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,  # aria, ernie4_5_moe, ernie4_5_vl_moe
}
"""Counts of experts or groups, and their largest value in a proxy model."""

POSITIONS = frozenset({"max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"})
LIMITS = {
    **dict.fromkeys(POSITIONS, 128),
    "sliding_window": 8,
    "sliding_window_size": 8,  # inkling, inkling2
    "attention_window_size": 8,  # recurrent_gemma
    "window_size": 8,
    "attention_chunk_size": 8,  # gemma4, llama4
    "local_attention": 8,  # modernbert, modernbert_decoder
    "chunk_size": 8,
    "mamba_chunk_size": 8,  # bamba, falcon_h1, granitemoehybrid
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "o_lora_rank": 32,  # deepseek_v4
    "state_size": 8,  # falcon_mamba, mamba, mamba2
    "ssm_state_size": 8,  # nemotron_h
    "mamba_d_state": 8,
    "time_step_rank": 8,  # falcon_mamba, mamba, mamba2
    "mamba_dt_rank": 8,  # jamba, zamba
    "hidden_size_per_layer_input": 16,  # embedding_gemma2, gemma3n, gemma4
    "laurel_rank": 16,  # gemma3n
    "index_topk": 8,
    "index_n_heads": 16,  # with few, scores that are all cut off at 0 are alike
    "floor_scale": 4,  # llama4
    "hc_sinkhorn_iters": 2,  # deepseek_v4, glm5_next: turns of a loop, which all ranks make
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_num_heads": 4,  # bailing_hybrid, glm5_next, kimi_linear
    "linear_conv_kernel_dim": 4,
    "context_length": 128,
    "max_source_positions": 64,
    "max_target_positions": 64,  # speech_to_text, whisper
    "router_hidden_size": 32,  # zaya
    "encoder_hash_byte_group_vocab": 64,  # blt
}
"""Sizes that need not be divisible by anything, and their largest value in a proxy model."""

STAGES = ("stage_names", "out_features", "out_indices")
"""The layers of a backbone by name, and those that it returns."""
NESTED = frozenset({"encoder", "decoder", "attn_config", "ffn_config"})
DROPOUT = re.compile(
    r"dropout|_pdrop$|_drop$|drop_rate|drop_path|layerdrop|resid_pdrop|jitter_noise"
)
SPEC_AUGMENT = re.compile(r"^mask_(time|feature)_prob$")  # wav2vec2, hubert, wavlm, whisper, ...
"""Masks of spectra, which transformers draws with numpy."""
JITTER = re.compile(r"jitter_(noise|eps)$")
TOKEN = re.compile(r"_token_ids?$|_token_index$|^(un|mas)k_index$|_token_idx$")
