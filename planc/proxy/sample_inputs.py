"""Sample inputs for the towers of a model: images and audio.

Each is derived from the tower's configuration alone. Rows of the batch are the outermost dim of
every input and have equal sizes, so that a rank of a data axis takes its slice of each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

Inputs = dict[str, Any]
"""Arguments of a forward by name."""
MakeInputs = Callable[[Any, int, Any], Inputs]
"""Maps a tower's configuration, the number of rows and a generator to inputs."""


GRID = 4
"""Patches per side of an image, if the configuration does not state its size."""


@dataclass(frozen=True, slots=True)
class InputKind:
    """One format in which models take images or audio, as `make` makes it.

    Args:
        needs: the arguments of forward that identify the format.
        tokens: the placeholder tokens per row, from the tower's configuration, for a model without
            a function that returns its tower's output.
    """

    name: str
    needs: tuple[str, ...]
    make: MakeInputs
    tokens: Callable[[Any], int] | None = None

    @property
    def what(self) -> str:
        """`images` or `sound`."""
        return "images" if "pixel_values" in self.needs else "sound"


def _number(config: Any, *names: str, default: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple) and value:
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return default


def _channels(config: Any) -> int:
    return _number(config, "num_channels", "in_channels", "in_chans", default=3)


def _patch(config: Any) -> int:
    return _number(config, "patch_size", "spatial_patch_size", default=14)


def _side(config: Any) -> int:
    return _number(config, "image_size", "input_size", default=GRID * _patch(config))


def _random(generator: Any, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _grid(config: Any, rows: int, generator: Any) -> Inputs:
    """Flattened patches of all images, concatenated, and the grid of each image."""
    merge = _number(config, "spatial_merge_size", "merge_size", "downsample_factor", default=2)
    times = _number(config, "temporal_patch_size", default=1)
    side = 2 * merge
    width = _channels(config) * times * _patch(config) ** 2
    grid = torch.tensor([[1, side, side]] * rows)
    return {"pixel_values": _random(generator, rows * side * side, width), "image_grid_thw": grid}


def _grid_of_images(config: Any, rows: int, generator: Any) -> Inputs:
    """Patches as small images, and the grid of each image."""
    inputs = _grid(config, rows, generator)
    flat, patch = inputs["pixel_values"], _patch(config)
    times = _number(config, "temporal_patch_size", default=1)
    shape = (_channels(config), times, patch, patch) if times > 1 else (-1, patch, patch)
    return {**inputs, "pixel_values": flat.view(len(flat), *shape)}


def _grid_merged(config: Any, rows: int, generator: Any) -> Inputs:
    """Patches and grids, and how many patches per side are merged into one token."""
    return {**_grid(config, rows, generator), "image_merge_sizes": torch.tensor([2] * rows)}


def _tiles(config: Any, rows: int, generator: Any) -> Inputs:
    """One image per row in one of several tiles, with its aspect ratio."""
    tiles = _number(config, "max_num_tiles", default=1)
    mask = torch.zeros(rows, 1, tiles, dtype=torch.long)
    mask[:, :, 0] = 1
    side = _side(config)
    return {
        "pixel_values": _random(generator, rows, 1, tiles, _channels(config), side, side),
        "aspect_ratio_ids": torch.ones(rows, 1, dtype=torch.long),
        "aspect_ratio_mask": mask,
    }


def _shapes(config: Any, rows: int, generator: Any) -> Inputs:
    """Patches per image, and the shape of each image in patches."""
    side = GRID
    width = _channels(config) * _patch(config) ** 2
    return {
        "pixel_values": _random(generator, rows, side * side, width),
        "spatial_shapes": torch.tensor([[side, side]] * rows),
        "pixel_attention_mask": torch.ones(rows, side * side, dtype=torch.long),
    }


def _places(config: Any, rows: int, generator: Any) -> Inputs:
    """Patches per image, and the position of each patch."""
    side = 2 * _number(config, "pooling_kernel_size", default=2)
    width = _channels(config) * _patch(config) ** 2
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)
    return {
        "pixel_values": torch.rand(rows, side * side, width, generator=generator),
        "image_position_ids": places.expand(rows, -1, -1).contiguous(),
    }


def _crops(config: Any, rows: int, generator: Any) -> Inputs:
    """The whole image and its crops, and its size before cropping."""
    side, pinpoints = _side(config), getattr(config, "planc_pinpoints", None)
    height, width = min(pinpoints or [(side, 2 * side)], key=prod)
    parts = 1 + (height // side) * (width // side)
    return {
        "pixel_values": _random(generator, rows, parts, _channels(config), side, side),
        "image_sizes": torch.tensor([[height, width]] * rows),
    }


def _sized_images(config: Any, rows: int, generator: Any) -> Inputs:
    """One image per row, with its size."""
    inputs = _images(config, rows, generator)
    return {**inputs, "image_sizes": torch.tensor([[_side(config)] * 2] * rows)}


def _images(config: Any, rows: int, generator: Any) -> Inputs:
    """One image per row."""
    side = _side(config)
    return {"pixel_values": _random(generator, rows, _channels(config), side, side)}


def _lists(config: Any, rows: int, generator: Any) -> Inputs:
    """A list of one image per row."""
    return {"pixel_values": _images(config, rows, generator)["pixel_values"][:, None]}


def _spectrum(config: Any, rows: int, generator: Any) -> Inputs:
    """Mel bands over time, as whisper's encoder takes them: twice its number of positions."""
    bands = _number(config, "num_mel_bins", "input_size", "feature_size", default=80)
    time = 2 * _number(config, "max_source_positions", "max_position_embeddings", default=32)
    if window := 2 * _number(config, "n_window", default=0):
        time = window * max(2, time // window)
    mask = torch.ones(rows, time, dtype=torch.long)
    return {
        "input_features": _random(generator, rows, bands, time),
        "feature_attention_mask": mask,
        "input_features_mask": mask,
    }


def _frames(config: Any, rows: int, generator: Any) -> Inputs:
    """Time steps over mel bands, with a mask of the valid frames."""
    bands = _number(
        config,
        "input_feat_size",
        "input_feat_per_channel",
        "num_mel_bins",
        "input_dim",
        "feature_size",
        default=128,
    )
    return {
        "input_features": _random(generator, rows, 64, bands),
        "input_features_mask": torch.ones(rows, 64, dtype=torch.bool),
    }


def _waves(config: Any, rows: int, generator: Any) -> Inputs:
    """Audio samples over time."""
    return {"input_values": _random(generator, rows, 2048)}


def _half_of_the_positions(config: Any) -> int:
    return _number(config, "max_source_positions", default=32) // 2


INPUT_KINDS = (
    InputKind("tiles", ("pixel_values", "aspect_ratio_ids"), _tiles),
    InputKind("shapes", ("pixel_values", "spatial_shapes"), _shapes),
    InputKind("places", ("pixel_values", "image_position_ids"), _places),
    InputKind("merged grids", ("pixel_values", "image_merge_sizes"), _grid_merged),
    InputKind("grids", ("pixel_values", "image_grid_thw"), _grid),
    InputKind("grids of images", ("pixel_values", "image_grid_thw"), _grid_of_images),
    InputKind("crops", ("pixel_values", "image_sizes"), _crops),
    InputKind("sized images", ("pixel_values", "image_sizes"), _sized_images),
    InputKind("images", ("pixel_values",), _images),
    InputKind("lists of images", ("pixel_values",), _lists),
    InputKind("spectrum", ("input_features",), _spectrum, _half_of_the_positions),
    InputKind("frames", ("input_features",), _frames),
    InputKind("waves", ("input_values",), _waves),
)
"""Ordered by the number of identifying arguments, most first."""
