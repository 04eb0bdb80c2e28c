"""The functions by which models update recurrent states."""

from planc.model.facts import Facts

_DELTA = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
_KIMI = ("causal_conv1d_fn", "chunk_kimi_delta_attention")
_MAMBA = ("causal_conv1d_fn", "mamba_selective_scan")
_MAMBA_2 = ("causal_conv1d_fn", "mamba2_chunk_scan")
_CONVOLUTION = ("causal_conv1d_fn",)
UPDATES: dict[str, tuple[str, ...]] = {
    "BailingHybridDeltaAttention": _KIMI,
    "BambaMixer": _MAMBA_2,
    "FalconH1Mixer": _MAMBA_2,
    "FalconMambaMixer": _MAMBA,
    "Glm5NextTextLinearAttention": _KIMI,
    "GraniteMoeHybridMambaLayer": _MAMBA_2,
    "Inkling2ShortConvolution": _CONVOLUTION,
    "InklingShortConvolution": _CONVOLUTION,
    "JambaMambaMixer": _MAMBA,
    "KimiLinearDeltaAttention": _KIMI,
    "Lfm2MoeShortConv": _CONVOLUTION,
    "Lfm2ShortConv": _CONVOLUTION,
    "Lfm3ShortConv": _CONVOLUTION,
    "Mamba2Mixer": _MAMBA_2,
    "MambaMixer": _MAMBA,
    "MiniMaxLightningAttention": ("MiniMaxLightningAttention.forward",),
    "NemotronHMamba2Mixer": _MAMBA_2,
    "OlmoHybridGatedDeltaNet": _DELTA,
    "Qwen3NextGatedDeltaNet": _DELTA,
    "Qwen3_5GatedDeltaNet": _DELTA,
    "Qwen3_5MoeGatedDeltaNet": _DELTA,
    "Qwen4ExpTextGatedDeltaNet": _DELTA,
    "RecurrentGemmaRecurrentBlock": (
        "RecurrentGemmaRecurrentBlock.conv_1d",
        "RecurrentGemmaRglru._rnn_scan",
    ),
    "RwkvFeedForward": ("RwkvFeedForward.time_shift",),
    "RwkvSelfAttention": ("RwkvSelfAttention.time_shift", "rwkv_linear_attention"),
    "Zamba2MambaMixer": _MAMBA_2,
    "ZambaMambaMixer": _MAMBA,
    "ZayaCCAProjection": ("ZayaCCAProjection.forward",),
    "xLSTMBackend": ("xLSTMBackend.forward",),
}
"""The functions that update recurrent states, by the class of transformers that calls them.
The keys of `TOKENS` in `standalone/documents.py` are these functions and methods."""


def state_updates(facts: Facts) -> tuple[str, ...]:
    """The functions of a model that update recurrent states, as keys of `TOKENS`."""
    kinds = {modules.module.cls for modules in facts.model.below()}
    return tuple(sorted({part for kind in kinds for part in UPDATES.get(kind, ())}))
