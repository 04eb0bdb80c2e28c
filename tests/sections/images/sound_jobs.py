"""What test_sound.py runs on every rank: data ranks with sound, and without."""

import torch
from families import COMMON, GEMMA4
from numerics import build_values, error, gradients_of
from torch import distributed
from tower_jobs import valid

import planc
from planc.runtime.standalone.towers import TOWER

TOKENS = {"image": 20, "audio": 21, "video": 22}
LENGTH = 32
TEXT = {**COMMON, "head_dim": 16}
VALUES = {
    "voxtral": {
        "model_type": "voxtral",
        "architectures": ["VoxtralForConditionalGeneration"],
        "audio_token_id": TOKENS["audio"],
        "hidden_size": 64,
        "text_config": {"model_type": "llama", **TEXT},
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "vocab_size": 64,
        },
    },
    "gemma4": {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "image_token_id": TOKENS["image"],
        "audio_token_id": TOKENS["audio"],
        "video_token_id": TOKENS["video"],
        "boi_token_id": 23,
        "eoi_token_id": 24,
        "boa_token_id": 25,
        "eoa_token_index": 26,
        "text_config": {
            **GEMMA4,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "global_head_dim": 8,
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "position_embedding_size": 64,
        },
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "output_proj_dims": 32,
            "subsampling_conv_channels": [8, 4],
        },
    },
    "omni": {
        "model_type": "qwen2_5_omni_thinker",
        "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"],
        "image_token_index": TOKENS["image"],
        "audio_token_index": TOKENS["audio"],
        "video_token_index": TOKENS["video"],
        "vision_start_token_id": 23,
        "vision_end_token_id": 24,
        "text_config": {
            **TEXT,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
            },
        },
        "vision_config": {
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "depth": 2,
            "num_heads": 4,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "audio_config": {
            "d_model": 32,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "encoder_layers": 2,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "n_window": 4,
            "output_dim": 64,
        },
    },
}


def build(model):
    return build_values(VALUES[model])


def sounds(model, count, seed):
    """The arguments of some sounds, all but the last of which have padding."""
    generator = torch.Generator().manual_seed(seed)
    length = {"voxtral": 32, "gemma4": 48, "omni": 16}[model]
    shape = (count, length, 8) if model == "gemma4" else (count, 8, length)
    made = {"input_features": torch.randn(shape, generator=generator)}
    mask = torch.ones(count, length, dtype=torch.long)
    mask[:-1, -8:] = 0
    if model == "gemma4":
        made["input_features_mask"] = mask.bool()
    if model == "omni":
        made["feature_attention_mask"] = mask
    return made


def images(model, count, seed):
    generator = torch.Generator().manual_seed(seed)
    if model == "omni":
        grids = torch.tensor([[1, 4, 4]] * count)
        return {
            "pixel_values": torch.randn(count * 16, 3 * 2 * 4 * 4, generator=generator),
            "image_grid_thw": grids,
        }
    at = torch.arange(36)
    places = torch.stack([at % 6, at // 6], -1).repeat(count, 1, 1)
    values = torch.rand(count, 36, 3 * 4 * 4, generator=generator)
    return {"pixel_values": values, "image_position_ids": places}


def batch_of(model, has, seed):
    """Two rows, with an image, and with a sound, each on the second row, as `has` says."""
    generator = torch.Generator().manual_seed(100 + seed)
    ids = torch.randint(30, 120, (2, LENGTH), generator=generator)
    found, single = {}, build(model)
    kinds = {"image": (images, "get_image_features"), "audio": (sounds, "get_audio_features")}
    at = 2
    for kind in has:
        make, method = kinds[kind]
        given = make(model, 1, seed)
        with torch.no_grad():
            features = getattr(single, method, None) or getattr(single.model, method)
            made = features(**given, return_dict=True)
        made = made.pooler_output if getattr(made, "pooler_output", None) is not None else made[0]
        made = torch.cat(list(made)) if isinstance(made, list | tuple) else made
        tokens = made.flatten(0, -2).shape[0]
        ids[1, at : at + tokens] = TOKENS[kind]
        at += tokens + 1
        found |= given
    assert at <= LENGTH + 1
    labels = ids.clone()
    labels[ids < 30] = -100
    labels[0, : 2 + seed] = -100
    found |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    if model == "gemma4":
        kinds = (ids == TOKENS["image"]) + 3 * (ids == TOKENS["audio"])
        found["mm_token_type_ids"] = kinds.long()
    return found


def judge(model, plan, has, broken=""):
    """Errors of the loss, in training and evaluation, and of the worst gradient, beside one process
    that adds what the batches of all ranks give.

    Args:
        has: the kinds of inputs of each rank's batch.
        broken: `order` takes the towers for those of another order, `unmasked` leaves out the mask
            of sound.
    """
    rank, size = distributed.get_rank(), distributed.get_world_size()
    batches = [batch_of(model, kinds, seed) for seed, kinds in enumerate(has)]
    count = sum(valid(one) for one in batches)
    single, total = build(model), 0.0
    for one in batches:
        loss = single(**one, use_cache=False).loss * valid(one) / count
        loss.backward()
        total += loss.item()
    wanted = {n: p.grad for n, p in single.named_parameters() if p.grad is not None}
    spread = build(model)
    lowered = planc.lower(spread, plan, world_size=size)
    run = planc.apply(spread, lowered, device_type="cpu")
    tower = spread.__dict__[TOWER]
    if broken == "unmasked":
        for one in batches:
            one.pop("input_features_mask", None)
    if broken == "order":
        tower.kinds = dict(reversed(tower.kinds.items()))
    found = {"evaluated": abs(float(run.evaluate([batches[rank]])) - total) / total}
    spread.zero_grad()
    loss = run.forward_backward([batches[rank]])
    found["loss"] = abs(float(loss) - total) / total
    own = gradients_of(spread, wanted)
    least = 1e-3 * max(g.abs().max().item() for g in wanted.values())
    errors = {n: error(g, wanted[n], least) for n, g in own.items()}
    found["lacking"] = sorted(wanted.keys() - own.keys())
    found["worst"] = max(errors, key=errors.get)
    found["gradient"] = errors[found["worst"]]
    found["kinds"] = [*tower.kinds]
    return found
