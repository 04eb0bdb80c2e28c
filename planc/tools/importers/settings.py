"""The settings that peers have in common, and how their values are read."""

import re
from typing import Any

_UNSET: tuple[Any, ...] = (None, "", "none", "null", "auto", "default", -1, {})
_SETTINGS = {
    "size": "tp_size cp_size pp_size ep_size etp_size data_size shard_size replicate_size world "
    "nodes gpus rows all_rows layers microbatch_rows microbatches virtual virtual_layers "
    "inner_size mics_size prefetch_forward prefetch_backward lora_rank",
    "truth": "sequence_parallel compile bf16 fp16 offload from_rank0 lora_all "
    "double_quantized distributed_optimizer full_sharding chunked_loss loss_over_tp "
    "activation_offload frozen_embeddings frozen_vision frozen_projector frozen_language "
    "rank_stabilized dora no_loss_over_tp no_compile reduce_as_param reduce_bf16 "
    "casts expert_parallel adapter_on checkpoint_off reduce_fp32 fp8 fp8_gather",
    "strategy": "sharding_strategy",
    "dtype": "param_dtype reduce_dtype output_dtype load_dtype",
    "number": "lora_alpha lora_dropout alpha_of_rank capacity",
    "names": "lora_targets lora_parameters trained_too",
    "text": "model flavor block_class rule ep_rule fsdp_rule pp_rule",
}
"""Settings by the kind of their values; each setting that is not here is a kind of its own."""

_WORDS = {
    "truth": "True: true yes on 1 legacy hiddenstates cpuoffloadpolicy; False: false no off 0",
    "dtype": "bf16: bf16 bfloat16 bf16mixed; fp16: fp16 float16 half fp16mixed; "
    "fp32: fp32 float32 no false",
    "mixed": "bf16: bf16; fp16: fp16; fp32: no fp32; fp8: fp8",
    "fp8_backend": "ao: ao torchao; other: te msamp transformerengine",
    "fp8_recipe": "tensorwise: tensorwise; rowwise: rowwise; high: rowwisewithgwhp",
    "offload_device": "True: cpu; False: none no",
    "reshard": "True: always true fullshard; False: never false shardgradop",
    "four_bits": "True: true 4; False: false 0 no",
    "finetuning": "lora: lora; full: full none",
    "checkpoint": "full: true 1 full fullac config uniform block; none: false none no off; "
    "ops: selective selectiveac op; offload: offload offloaddisk unsloth disk legacy",
    "schedule": "gpipe: gpipe; 1f1b: 1f1b; interleaved_1f1b: interleaved1f1b; zbv: zbvzerobubble; "
    "zero_bubble: interleavedzerobubble; dualpipe_v: dualpipev",
    "strategy": "shard: fullshard fsdp fsdp2 true 1 3 zero3 deepspeed megatronfsdp "
    "optimgradsparams; grad: shardgradop 2 zero1 zero2 optim optimgrads; "
    "hybrid: hybridshard 4 hybridshardzero2 5; "
    "copy: noshard ddp 0 zero0 multigpu multixpu multicpu multinpu multimlu no false",
    "zero_stage": "shard: 3; grad: 1 2; copy: 0",
    "attention": "all_gather: allgather varlenllama3; ulysses: a2a ulysses deepspeed; "
    "ring: p2p ring alltoall batchring batchzigzag batchstripe",
    "adapter": "lora: lora peftconfig; qlora: qlora",
    "ep_implementation": "all_to_all: auto alltoall; all_reduce: allreduce; "
    "megamoe: deepgemmmegamoe",
    "drop": "probs: probs; position: position",
}
"""The words of each kind in lower case, without punctuation, after what they mean."""

_LOSSES = {
    "FusedLinearCrossEntropy": 8,
    "ChunkedCrossEntropy": 8,
    "ChunkedLossWrapper": 8,
    "TEParallelCrossEntropy": 1,
}
"""Classes of losses that compute logits in parts, and the parts; others compute whole logits."""


class Unknown(ValueError):
    """A value that a setting of this name is not known to have; its text says what is known."""


def value_of(setting: str, value: Any) -> Any:
    """The value of a setting; None where the peer decides, as without the key.

    Args:
        setting: a word of the tables.
        value: what the file has.

    Raises:
        Unknown: the value has no meaning that planc knows.
    """
    kind = next((k for k, names in _SETTINGS.items() if setting in names.split()), setting)
    unset = (
        not isinstance(value, bool)
        and (value.lower() if isinstance(value, str) else value) in _UNSET
    )
    match kind:
        case "loss":
            name = str(value).removesuffix("()").removesuffix(".Config")
            return next((n for ending, n in _LOSSES.items() if name.endswith(ending)), 0)
        case "converters":  # the last word of each
            named = value if isinstance(value, list) else str(value).split(",")
            words = {str(v).strip().rpartition(".")[2] for v in named if str(v).strip()}
            if other := words - {"float8", "mx"}:
                raise Unknown(f"float8 and mx, not {', '.join(sorted(other))}")
            return ("mx" if "mx" in words else "fp8") if words else None
        case "fp8_skip":
            return tuple(map(str, value)) if isinstance(value, list) else (str(value),)
        case "chunk_tokens":
            return isinstance(value, int) or str(value) == "auto"
        case "truth" if unset:
            return (setting == "bf16" or None) if value in ("auto", -1) else False
        case _ if kind in _WORDS:
            return _word(kind, value, unset)
        case _ if unset:
            return None
        case "size" | "number":
            return _number(kind, value)
        case "names":
            written = value if isinstance(value, list) else str(value).split(",")
            written = ["*" if str(v).lower() in ("all", "all-linear") else v for v in written]
            names = tuple(re.sub(r"^\*?\.", "", str(v)).strip() for v in written)
            if not names or not all(re.fullmatch(r"[\w.*]+", name) for name in names):
                reason = "names of modules; a plan has selectors in place of regular expressions"
                raise Unknown(f"{reason}: until you write one, the plan takes all linear layers")
            return names
        case _:
            value = value[0] if isinstance(value, list) and value else value
            return value if isinstance(value, str) else None


def _word(kind: str, value: Any, unset: bool) -> Any:
    if kind == "strategy":  # such as `fsdp: [full_shard, auto_wrap]`, `zero3_offload`
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        named = text.replace("_offload", " offload").replace(",", " ").split()
        if str(value).endswith(".json"):
            raise Unknown("names; it is another file: import that one too")
        if "offload" in named:
            return f"{_word(kind, [w for w in named if w != 'offload'], unset)} offload"
        value = next((v for v in named if v != "auto_wrap"), None)
        unset = unset or value is None
    elif isinstance(value, list):
        value = next(iter(value), None)
    word = re.sub(r"[^a-z0-9]", "", str(value).lower().rpartition(".")[2])
    known: dict[str, Any] = {}
    for each in _WORDS[kind].split("; "):
        meaning, _, words = each.partition(": ")
        known |= dict.fromkeys(words.split(), {"True": True, "False": False}.get(meaning, meaning))
    if word not in known and not unset:
        raise Unknown(", ".join(known))
    return known.get(word)


def _number(kind: str, value: Any) -> float | None:
    try:
        number = float(value)
        if isinstance(value, bool) or number < 0 or (kind == "size" and number % 1):
            raise ValueError
        return int(number) or None if number % 1 == 0 else number
    except (TypeError, ValueError, OverflowError):
        raise Unknown("a positive integer" if kind == "size" else "a positive number") from None
