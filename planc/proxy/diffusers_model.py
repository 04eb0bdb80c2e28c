"""Builds a small diffusion transformer with weights and inputs, to be run in a proof."""

from collections.abc import Callable, Mapping
from math import lcm
from typing import Any

import torch
from torch import nn

from planc.diagnostics.diagnostic import PlanError, Sink
from planc.model.config import CLASS, config_of
from planc.model.sources.diffusers import build, class_of, quiet
from planc.model.sources.isolation import isolate
from planc.proxy.input_search import BatchShape, InputChoice
from planc.proxy.output_loss import causal_output
from planc.proxy.sample_inputs import Inputs
from planc.proxy.transformers_model import seed_cpu, spread_weights

HEAD = 16
"""The width of a head."""
_TEXT = 8
_IMAGE = 5
"""Tokens of the text and of the conditioning image."""
_WAN_TEXT = 512
"""Text tokens of Wan's image-to-video models: their attention assumes this number."""

_LIMITS = {
    "text_dim": 40,
    "freq_dim": 32,
    "image_dim": 24,
    "joint_attention_dim": 40,
    "pooled_projection_dim": 24,
    "in_channels": 16,
    "out_channels": 16,
    "rope_max_seq_len": 64,
    "text_embed_dim": 40,
    "sample_size": 16,
    "pos_embed_max_size": 16,
}
"""Sizes that need not be divisible by anything, and their largest value in a proxy model."""
_DEPTHS = ("num_layers", "num_single_layers", "num_refiner_layers")

DiffusersFields = Mapping[str, Any]


def shrink(config: DiffusersFields, *, tp: int, layers: int) -> dict[str, Any]:
    """A small configuration of the class of resolved fields: heads and widths divide by `tp`, and
    each list of blocks has `layers`.
    """
    small = shallow(config, layers=layers)
    for name, most in _LIMITS.items():
        if isinstance(small.get(name), int):
            small[name] = min(small[name], most)
    heads = config["num_attention_heads"]
    least = lcm(4, tp) if heads % tp == 0 else next(n for n in range(3, tp + 4) if n % tp)
    small["num_attention_heads"] = least
    small["attention_head_dim"] = HEAD
    width = least * HEAD
    if isinstance(config.get("ffn_dim"), int):
        small["ffn_dim"] = lcm(8, tp) * 12
    if isinstance(config.get("added_kv_proj_dim"), int):
        small["added_kv_proj_dim"] = width
    for name in ("axes_dims_rope", "rope_axes_dim"):
        if isinstance(config.get(name), list | tuple):
            small[name] = [4, 6, 6]
    if isinstance(config.get("caption_projection_dim"), int):
        small["caption_projection_dim"] = width
    if isinstance(config.get("pos_embed_seq_len"), int):
        small["pos_embed_seq_len"] = 2 * _IMAGE
    return small


def shallow(config: DiffusersFields, *, layers: int) -> dict[str, Any]:
    """The configuration with `layers` blocks in each list, and a block of each kind."""
    values = dict(config)
    for name in _DEPTHS:
        if isinstance(values.get(name), int):
            values[name] = min(values[name], layers)
    if dual := config.get("dual_attention_layers"):  # a block of each kind, and the last one
        values["dual_attention_layers"] = [i for i in range(layers // 2) if i in dual]
        values["num_layers"] = min(config["num_layers"], max(layers, 3))
    return values


class _RandomInputs:
    """Random tensors for one batch: its rows, and image tokens per row, a multiple of 8."""

    def __init__(self, shape: BatchShape) -> None:
        self.rows, self.length = shape.rows, shape.length
        self._generator = torch.Generator().manual_seed(shape.seed)

    def normal(self, *size: int) -> torch.Tensor:
        """Normally distributed values, [rows, *size]."""
        return torch.randn((self.rows, *size), generator=self._generator)

    def times(self) -> torch.Tensor:
        """Uniform values in [0, 1), [rows]."""
        return torch.rand(self.rows, generator=self._generator)


def _wan(config: DiffusersFields, random: _RandomInputs) -> Inputs:
    """Latents [B, C, F, H, W], timesteps [B], text [B, L, D], and an image for models with one."""
    frames, high, wide = config["patch_size"]
    space = (2 * frames, 2 * high, random.length // 4 * wide)
    text = _WAN_TEXT if config.get("added_kv_proj_dim") else _TEXT
    inputs = {
        "hidden_states": random.normal(config["in_channels"], *space),
        "timestep": (random.times() * 1000).long(),
        "encoder_hidden_states": random.normal(text, config["text_dim"]),
        "target": random.normal(config["out_channels"] or config["in_channels"], *space),
    }
    if config.get("image_dim"):
        image = random.normal(
            *([2] if config.get("pos_embed_seq_len") else []), _IMAGE, config["image_dim"]
        )
        inputs["encoder_hidden_states_image"] = image.flatten(0, -3)  # first and last frame
    return inputs


def _flux(config: DiffusersFields, random: _RandomInputs) -> Inputs:
    """Latents [B, L, C], text [B, T, D], pooled text [B, P], timesteps [B], positions [B, .., 3].

    Positions are the same for all rows, so the model takes those of one row.
    """
    axes = len(config["axes_dims_rope"])
    places = torch.zeros(random.length, axes)
    places[:, 1] = torch.arange(random.length) // 4
    places[:, 2] = torch.arange(random.length) % 4
    out = config["patch_size"] ** 2 * (config["out_channels"] or config["in_channels"])
    inputs = {
        "hidden_states": random.normal(random.length, config["in_channels"]),
        "encoder_hidden_states": random.normal(_TEXT, config["joint_attention_dim"]),
        "pooled_projections": random.normal(config["pooled_projection_dim"]),
        "timestep": random.times(),
        "img_ids": places.expand(random.rows, -1, -1),
        "txt_ids": torch.zeros(random.rows, _TEXT, axes),
        "target": random.normal(random.length, out),
    }
    if config.get("guidance_embeds"):
        inputs["guidance"] = random.times()
    return inputs


def _hunyuan_video(config: DiffusersFields, random: _RandomInputs) -> Inputs:
    """Latents [B, C, F, H, W], timesteps [B], text [B, L, D] of two lengths, pooled text [B, P]."""
    side = config["patch_size"]
    space = (2 * config["patch_size_t"], 2 * side, random.length // 4 * side)
    mask = torch.ones(random.rows, _TEXT, dtype=torch.long)
    mask[::2, _TEXT - 2 :] = 0
    inputs = {
        "hidden_states": random.normal(config["in_channels"], *space),
        "timestep": (random.times() * 1000).long(),
        "encoder_hidden_states": random.normal(_TEXT, config["text_embed_dim"]),
        "encoder_attention_mask": mask,
        "pooled_projections": random.normal(config["pooled_projection_dim"]),
        "target": random.normal(config["out_channels"], *space),
    }
    if config.get("guidance_embeds"):
        inputs["guidance"] = random.times() * 1000
    return inputs


def _sd3(config: DiffusersFields, random: _RandomInputs) -> Inputs:
    """Latents [B, C, H, W], text [B, L, D], pooled text [B, P], timesteps [B]."""
    side = config["patch_size"]
    space = (2 * side, random.length // 2 * side)
    return {
        "hidden_states": random.normal(config["in_channels"], *space),
        "encoder_hidden_states": random.normal(_TEXT, config["joint_attention_dim"]),
        "pooled_projections": random.normal(config["pooled_projection_dim"]),
        "timestep": (random.times() * 1000).long(),
        "target": random.normal(config["out_channels"], *space),
    }


_PLACES = ("img_ids", "txt_ids")
"""Inputs without a row dim in the model's forward."""
_INPUTS: dict[str, Callable[[DiffusersFields, _RandomInputs], Inputs]] = {
    "WanTransformer3DModel": _wan,
    "FluxTransformer2DModel": _flux,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
    "SD3Transformer2DModel": _sd3,
}
"""Makes the inputs of each class; other classes are not supported."""


class DiffusersBuilder:
    """Builds the same diffusers model several times, with the interface of a model with a loss: the
    mean squared error between its output and `target`.

    Raises PlanError (no diffusers, or no such class), and ValueError if its inputs are unknown.
    """

    choice = InputChoice()
    """All inputs of the forward are made by `sample`."""
    token_multiple = 8
    """The number that divides the image tokens of a row."""

    def __init__(self, values: DiffusersFields) -> None:
        sink = Sink()
        kind = class_of(config_of(dict(values), "the proxy model"), sink)
        if kind is None:
            raise PlanError(sink)
        if values[CLASS] not in _INPUTS:
            raise ValueError(f"planc does not know what the forward of {values[CLASS]} takes")
        self._kind, self._values = kind, values

    def build(self, seed: int) -> nn.Module:
        """The model on the CPU in float32, in training mode, without dropout."""
        seed_cpu(seed)
        with quiet(), isolate():
            model: nn.Module = build(self._kind, self._values)
        spread_weights(model, seed + 1)
        return _prepare(model).float().train()

    def build_on_meta(self) -> nn.Module:
        """The model without memory, otherwise as `build` gives it."""
        with quiet(), isolate(), torch.device("meta"):
            model: nn.Module = build(self._kind, self._values)
        return _prepare(model.to("meta")).train()

    def sample(self, shape: BatchShape | None = None) -> Inputs:
        """Random inputs of the forward and a `target`, rows first; image tokens in eights."""
        return _INPUTS[self._values[CLASS]](self._values, _RandomInputs(shape or BatchShape()))


def _prepare(model: nn.Module) -> nn.Module:
    """The model with a loss, in place, without dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    target: list[Any] = []
    model.register_forward_pre_hook(_take_target(target), with_kwargs=True)
    model.register_forward_hook(_compute_loss(target))
    return model


def _take_target(target: list[Any]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    def take(_module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        target[:] = [kwargs["target"]]
        inputs = {n: v for n, v in kwargs.items() if n not in ("target", "use_cache")}
        return args, inputs | {n: inputs[n][0] for n in _PLACES if n in inputs}

    return take


def _compute_loss(target: list[Any]) -> Callable[..., Any]:
    def give(_module: Any, _args: Any, output: Any) -> Any:
        return causal_output((output.sample - target[0]).square().mean(), output.sample)

    return give
