"""Makes the sizes of a small composite model agree, such as a tower's output width and the text's.

Each part of a configuration (`text_config`, `vision_config`) is shrunk separately; this module
shrinks the sizes that must agree between parts, and those of images.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from planc.model.config_fields import HIDDEN, LAYERS

GRID = 4
"""Patches per side of a small image."""
_OUTPUTS = (
    "out_hidden_size",
    "hidden_size",
    "projection_dim",
    "output_dim",
    "output_hidden_size",
    "vision_output_dim",
    "projector_input_dim",
    "projector_output_dim",
    "projector_hidden_size",
    "text_hidden_size",
    "output_proj_dims",
    "projection_hidden_size",
    "vision_hidden_size",
    "encoder_hidden_size",
)
"""Fields with the width of one part's output for another part."""
_TOWERS = ("vision_config", "audio_config", "high_res_vision_config")


def shrink_multimodal(config: Mapping[str, Any], small: dict[str, Any]) -> None:
    """Makes the parts of a small configuration agree, in place."""
    alone = not any(isinstance(config.get(name), Mapping) for name in _TOWERS)
    if alone and "depths" not in config:  # stages of those halve the image again and again
        _images(config, small)  # of an encoder of images alone
    text = _width(config.get("text_config"))
    new = _width(small.get("text_config"))
    tower = config.get("vision_config")
    for original, reduced in _levels(config, small):
        _images(original, reduced)
        for field in _OUTPUTS:
            value = original.get(field)
            if text and new and value == text and _is_output(field, original):
                reduced[field] = new
            elif field != "hidden_size" and _times(value, original):
                reduced[field] = _times(value, original) * reduced[_width_field(original)]
            elif tower and original is not tower and value and value == tower.get("hidden_size"):
                reduced[field] = small["vision_config"]["hidden_size"]
    compared = config["text_config"].get("projection_size") if text else None  # with images
    if tower and compared and compared == tower.get("hidden_size"):
        small["text_config"]["projection_size"] = small["vision_config"]["hidden_size"]
    for name in _TOWERS:
        if isinstance(config.get(name), Mapping):
            _tower(config[name], small[name])
    _composite(config, small)


def _levels(
    config: Mapping[str, Any], small: dict[str, Any]
) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    """Yields the composite level and its towers, original and small."""
    if not any(isinstance(config.get(name), Mapping) for name in _TOWERS):
        return
    yield config, small
    for name in (*_TOWERS, "qformer_config"):
        if isinstance(config.get(name), Mapping):
            yield config[name], small[name]


def _width(config: Any) -> int:
    if not isinstance(config, Mapping):
        return 0
    return next((config[n] for n in HIDDEN if isinstance(config.get(n), int)), 0)


def _width_field(config: Mapping[str, Any]) -> str:
    return "embed_dim" if "embed_dim" in config else "hidden_size"


def _is_output(field: str, config: Mapping[str, Any]) -> bool:
    """Whether a field is the output width of a tower.

    `hidden_size` is the inner width of a tower, except in towers that state that as `embed_dim`.
    """
    inside = any(n.endswith(("num_hidden_layers", "depth", "num_heads")) for n in config)
    return field != "hidden_size" or "embed_dim" in config or not inside


def _times(value: Any, config: Mapping[str, Any]) -> int:
    """The ratio of a width to the tower's own width; 0 if it is not a whole number up to 16."""
    width = config.get(_width_field(config))
    if not isinstance(value, int) or not isinstance(width, int) or isinstance(value, bool):
        return 0
    return value // width if width and value % width == 0 and value // width <= 16 else 0


def _images(config: Mapping[str, Any], small: dict[str, Any]) -> None:
    size, patch = _one(config.get("image_size")), _one(config.get("patch_size"))
    if not size or not patch:
        return
    side = GRID * patch
    if size > side:
        value = config["image_size"]
        small["image_size"] = [side] * len(value) if isinstance(value, list | tuple) else side


def _one(value: Any) -> int:
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _tower(config: Mapping[str, Any], small: dict[str, Any]) -> None:
    if isinstance(config.get("embed_dim"), int) and config.get("num_heads"):
        small["embed_dim"] = 16 * small["num_heads"]
    merge = _one(config.get("spatial_merge_size"))
    if _one(config.get("window_size")) and merge and _one(config.get("patch_size")):
        small["window_size"] = config["patch_size"] * merge
    if _one(config.get("num_position_embeddings")) > 64:
        small["num_position_embeddings"] = 64
    if times := _times(config.get("intermediate_size"), config):
        # the width of a merged group of patches or frames
        small["intermediate_size"] = times * small[_width_field(config)]
    inner = small.get("intermediate_layers_indices")
    if isinstance(inner, list) and config.get("vision_output_dim"):
        small["vision_output_dim"] = small["hidden_size"] * (len(inner) + 1)


def _composite(config: Mapping[str, Any], small: dict[str, Any]) -> None:
    tower = config.get("vision_config")
    if not isinstance(tower, Mapping):
        return
    depth = next((small["vision_config"][n] for n in LAYERS if n in small["vision_config"]), 1)
    layers = config.get("vision_feature_layer")
    if isinstance(layers, list):  # indices from either end, clamped to the new depth
        small["vision_feature_layer"] = [max(-depth, min(depth, n)) for n in layers]
    size, patch = _one(tower.get("image_size")), _one(tower.get("patch_size"))
    if not size or not patch or size <= GRID * patch:
        return
    tokens = config.get("mm_tokens_per_image")
    if isinstance(tokens, int):  # pooled: proportional to the number of patches
        # at least two a side: in one token nothing would show that those of an image see each other
        small["mm_tokens_per_image"] = max(4, round(tokens * (GRID * patch / size) ** 2))
    points = config.get("image_grid_pinpoints")
    if isinstance(points, list):
        small["image_grid_pinpoints"] = [[n * GRID * patch // size for n in p] for p in points]
