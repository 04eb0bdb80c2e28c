"""States of a model that end with a document, where a row has several."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from planc.model.facts import Facts
from planc.ops.base import AxisSizes, Name, Op, Phase, Some
from planc.ops.call import MODEL, Context, FunctionCall, Once, ScriptFunction, Step
from planc.ops.context import ContextParallel

_DELTA = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
_KIMI = ("causal_conv1d_fn", "chunk_kimi_delta_attention")
_MAMBA = ("causal_conv1d_fn", "mamba_selective_scan")
_MAMBA_2 = ("causal_conv1d_fn", "mamba2_chunk_scan")
_CONVOLUTION = ("causal_conv1d_fn",)
RESETS: dict[str, tuple[str, ...]] = {
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetStates(Op):
    """Resets recurrent states at each document, in batches that pack several documents in a row.

    Args:
        parts: the functions, methods and modules that update recurrent states.
    """

    parts: Some[Name]

    SCRIPT: ClassVar = ScriptFunction(
        "keep_documents_apart", "Resets recurrent states at documents."
    )

    def calls(self, _context: Context) -> Iterator[Step]:
        call = FunctionCall("standalone.documents:reset_states", (MODEL, *self.parts))
        yield Once(call=call)

    PHASE: ClassVar = Phase.CONTEXT
    WORD: ClassVar = "documents"

    def headline(self, _mesh: AxisSizes | None = None) -> str:
        return f"recurrent states are reset at each: {', '.join(self.parts)}"


def resets(facts: Facts) -> tuple[str, ...]:
    """The functions of a model that update recurrent states, as keys of `TOKENS`."""
    kinds = {modules.module.cls for modules in facts.model.below()}
    return tuple(sorted({part for kind in kinds for part in RESETS.get(kind, ())}))


def parts_reset(ops: Iterable[Op]) -> tuple[str, ...]:
    """The parts that operations reset, on the ranks of all stages."""
    found = {p for op in ops if isinstance(op, ResetStates) for p in op.parts}
    found |= {p for op in ops if isinstance(op, ContextParallel) for p in op.states}
    return tuple(sorted(found))
