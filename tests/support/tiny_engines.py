"""Tiny models, and what the ranks of a serving engine hold of their files."""

import re

import torch
from families import FAMILIES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from planc.compiler import compile
from planc.diagnostics.diagnostic import Sink
from planc.ir.engine_layout import engine_side
from planc.ir.serving import serving_of
from planc.model.load import load_values
from planc.syntax.plan_files import read_text

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES}
MIXTURE = {
    **SIZES,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
DENSE = """
    self_attn.qkv_proj              : qkv(q_proj, k_proj, v_proj)
    optional mlp.gate_up_proj       : merged(gate_proj, up_proj)
    self_attn.o_proj                : row
    optional mlp.down_proj          : row
    embed_tokens, lm_head           : vocab
"""
EXPERTS = """
    mlp.experts.w13_weight : experts(gate_proj, up_proj)
    mlp.experts.w2_weight  : experts(down_proj)
"""


_EXPERTS = {
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
}
_LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
OWN_SIZES = {
    **dict.fromkeys(("exaone_moe", "afmoe", "hy_v3"), _EXPERTS),
    "cohere2_moe": {**_EXPERTS, "tie_word_embeddings": True},
    "glm4_moe_lite": {**_EXPERTS, **_LATENT},
    "minicpm3": _LATENT,
    "granitemoeshared": {"shared_intermediate_size": 96},
}
BY_FAMILY = {config["model_type"]: config for config in FAMILIES.values()}


def tiny_config(family):
    """The configuration of a tiny model of a causal-LM family."""
    config = BY_FAMILY.get(family) or {**LLAMA, "vocab_size": 132, "model_type": family}
    return {
        **config,
        **OWN_SIZES.get(family, {}),
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]],
    }


def facts_of(config):
    facts = load_values(config, "tiny", sink := Sink())
    assert facts is not None, [*sink]
    return facts


def serve(sizes="", rules=DENSE, engine="vllm"):
    """The text of a plan with one serve section."""
    return f"plan rollout for any\n\nserve {engine} {sizes} {{\n{rules}}}\n"


def compiled(config, text, *settings):
    """The facts, the compiled plan and its findings."""
    facts, sink = facts_of(config), Sink()
    files = read_text("rollout.plan", text, sink)
    return facts, compile(files, facts, sink, settings=settings), sink


def side_of(config, text, *settings):
    """What the ranks of an engine hold."""
    facts, done, sink = compiled(config, text, *settings)
    assert not sink.has_errors, [*sink]
    side = engine_side(serving_of(done.plan), facts, sink)
    assert not sink.has_errors
    return side


def files_of(side):
    """Tensors of the files with a different value for each element, by their names."""
    shapes = {}
    for held in side.held:
        for index in held.indices:
            name = held.patch.hub.format(*index)
            old = shapes.get(name, [0] * len(held.patch.box))
            shapes[name] = [max(n, stop) for n, (_, stop) in zip(old, held.patch.box, strict=True)]
    start, files = 1, {}
    for name, shape in sorted(shapes.items()):
        count = torch.Size(shape).numel()
        files[name] = torch.arange(start, start + count).reshape(shape)
        start += count
    return files


def fill(side, rank, files):
    """A rank's tensors, each element written once, and 0 where padding is."""
    made, written = {}, {}
    for name, tensor in side.tensors_of(rank).items():
        made[name] = torch.zeros(tensor.shape, dtype=torch.int64)
        written[name] = torch.zeros(tensor.shape, dtype=torch.int64)
    for held in side.held:
        if rank not in held.ranks:
            continue
        patch = held.patch
        for index in held.indices:
            block = files[patch.hub.format(*index)][tuple(slice(*r) for r in patch.box)]
            where = tuple(slice(*r) for r in patch.local)
            key = patch.key.format(*index)
            kept = [dim for dim in patch.dims if dim is not None]
            place = made[key][where].squeeze([at for at, d in enumerate(patch.dims) if d is None])
            place.permute([kept.index(dim) for dim in sorted(kept)]).copy_(block)
            written[key][where] += 1
    for name, counts in written.items():
        assert ((counts == 1) | (made[name] == 0)).all() and (counts <= 1).all(), name
    return made


def by_arithmetic(files, rank, *, tp, kv, ep=1, dp=1):
    """What a rank of vLLM holds, by the arithmetic of its loaders (layers/linear.py,
    vocab_parallel_embedding.py, fused_moe/layer.py), without the code under test.
    """
    out, at = {}, rank % tp
    inside = tp * dp // ep
    group, part = divmod(rank, inside)
    for name, value in files.items():
        stem, _, last = name.removesuffix(".weight").rpartition(".")
        layer = {p: files.get(f"{stem}.{p}.weight") for p in ("k_proj", "v_proj", "up_proj")}
        if last in ("embed_tokens", "lm_head"):
            padded = torch.zeros(-(-len(value) // 64) * 64, value.shape[1], dtype=value.dtype)
            padded[: len(value)] = value
            out[name] = padded.chunk(tp)[at]
        elif last == "q_proj":
            copies = max(tp // kv, 1)
            some = [layer[p].chunk(min(tp, kv))[at // copies] for p in ("k_proj", "v_proj")]
            out[f"{stem}.qkv_proj.weight"] = torch.cat([value.chunk(tp)[at], *some])
        elif match := re.fullmatch(r"(.*\.experts)\.0\.gate_proj\.weight", name):
            stem, count = match[1], sum("layers.0.mlp.experts" in n for n in files) // 3
            fewest, more = divmod(count, ep)  # `determine_expert_map`: the first have one more
            mine = range(count)[group * fewest + min(group, more) :][: fewest + (group < more)]

            def pieces(p, dim, stem=stem, mine=mine):
                return [files[f"{stem}.{e}.{p}.weight"].chunk(inside, dim)[part] for e in mine]

            pairs = zip(pieces("gate_proj", 0), pieces("up_proj", 0), strict=True)
            out[f"{stem}.w13_weight"] = torch.stack([torch.cat(pair) for pair in pairs])
            out[f"{stem}.w2_weight"] = torch.stack(pieces("down_proj", 1))
        elif ".experts." in name or last in ("k_proj", "v_proj", "up_proj"):
            continue
        elif last == "gate_proj":
            both = (value, layer["up_proj"])
            out[f"{stem}.gate_up_proj.weight"] = torch.cat([v.chunk(tp)[at] for v in both])
        elif last in ("o_proj", "down_proj"):
            out[name] = value.chunk(tp, 1)[at]
        else:
            out[name] = value
    return out
