"""Recipes for what goes into the towers of a model: images and sound.

Each is read off a tower's configuration alone. Rows of the batch are the outermost dim of every
input, each row with as much as any other, so that a rank of a data axis takes its part of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Inputs = dict[str, Any]
"""The arguments of forward by name."""
MakeInputs = Callable[[Any, int, Any], Inputs]
"""A tower's configuration, the number of rows, a generator -> what goes into the tower."""


GRID = 4
"""Patches of a side of an image, where the configuration does not say its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputKind:
    """A way in which models take something that is no text.

    Args:
        name: of the recipe, such as `patches`.
        what: `images` or `sound`.
        needs: the arguments of forward that it is known by.
        make: the recipe.
        tokens: of a row, by the tower's configuration, for a model that has no function which gives
            what its tower makes.
    """

    name: str
    what: str
    needs: tuple[str, ...]
    make: MakeInputs
    tokens: Callable[[Any], int] | None = None


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
    import torch

    return torch.randn(shape, generator=generator)


def _grid(config: Any, rows: int, generator: Any) -> Inputs:
    """Patches of all images one after the other, and the grid of each."""
    import torch

    merge = _number(config, "spatial_merge_size", "merge_size", "downsample_factor", default=2)
    times = _number(config, "temporal_patch_size", default=1)
    side = 2 * merge
    width = _channels(config) * times * _patch(config) ** 2
    grid = torch.tensor([[1, side, side]] * rows)
    return {
        "pixel_values": _random(generator, rows * side * side, width),
        "image_grid_thw": grid,
    }


def _grid_of_images(config: Any, rows: int, generator: Any) -> Inputs:
    """Patches as small images, and the grid of each image."""
    found = _grid(config, rows, generator)
    flat, patch = found["pixel_values"], _patch(config)
    times = _number(config, "temporal_patch_size", default=1)
    shape = (_channels(config), times, patch, patch) if times > 1 else (-1, patch, patch)
    return {**found, "pixel_values": flat.view(len(flat), *shape)}


def _grid_merged(config: Any, rows: int, generator: Any) -> Inputs:
    """Patches and grids, with how many patches of a side become one token."""
    import torch

    return {
        **_grid(config, rows, generator),
        "image_merge_sizes": torch.tensor([2] * rows),
    }


def _tiles(config: Any, rows: int, generator: Any) -> Inputs:
    """One image a row in one tile of several, with its aspect ratio."""
    import torch

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
    """Patches by image, and the shape of each image in patches."""
    import torch

    side = GRID
    width = _channels(config) * _patch(config) ** 2
    return {
        "pixel_values": _random(generator, rows, side * side, width),
        "spatial_shapes": torch.tensor([[side, side]] * rows),
        "pixel_attention_mask": torch.ones(rows, side * side, dtype=torch.long),
    }


def _places(config: Any, rows: int, generator: Any) -> Inputs:
    """Patches by image, and the place of each patch."""
    import torch

    side = 2 * _number(config, "pooling_kernel_size", default=2)
    width = _channels(config) * _patch(config) ** 2
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)
    return {
        "pixel_values": torch.rand(rows, side * side, width, generator=generator),
        "image_position_ids": places.expand(rows, -1, -1).contiguous(),
    }


def _crops(config: Any, rows: int, generator: Any) -> Inputs:
    """The image as a whole and its parts, with its size before it was cut."""
    import torch

    side, pinpoints = _side(config), getattr(config, "planc_pinpoints", None)
    height, width = min(pinpoints or [(side, 2 * side)], key=prod)
    parts = 1 + (height // side) * (width // side)
    return {
        "pixel_values": _random(generator, rows, parts, _channels(config), side, side),
        "image_sizes": torch.tensor([[height, width]] * rows),
    }


def _sized(config: Any, rows: int, generator: Any) -> Inputs:
    """An image a row, with its size."""
    import torch

    found = _images(config, rows, generator)
    return {**found, "image_sizes": torch.tensor([[_side(config)] * 2] * rows)}


def _images(config: Any, rows: int, generator: Any) -> Inputs:
    """An image a row."""
    side = _side(config)
    return {"pixel_values": _random(generator, rows, _channels(config), side, side)}


def _lists(config: Any, rows: int, generator: Any) -> Inputs:
    """A list of one image a row."""
    return {"pixel_values": _images(config, rows, generator)["pixel_values"][:, None]}


def _spectrum(config: Any, rows: int, generator: Any) -> Inputs:
    """Bands over time, as whisper's encoder takes them: twice the positions that it has."""
    import torch

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
    """Time over bands, with a mask of the frames that are there."""
    import torch

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
    """Samples of sound over time."""
    return {"input_values": _random(generator, rows, 2048)}


INPUT_KINDS = (
    InputKind(name="tiles", what="images", needs=("pixel_values", "aspect_ratio_ids"), make=_tiles),
    InputKind(name="shapes", what="images", needs=("pixel_values", "spatial_shapes"), make=_shapes),
    InputKind(
        name="places", what="images", needs=("pixel_values", "image_position_ids"), make=_places
    ),
    InputKind(
        name="merged grids",
        what="images",
        needs=("pixel_values", "image_merge_sizes"),
        make=_grid_merged,
    ),
    InputKind(name="grids", what="images", needs=("pixel_values", "image_grid_thw"), make=_grid),
    InputKind(
        name="grids of images",
        what="images",
        needs=("pixel_values", "image_grid_thw"),
        make=_grid_of_images,
    ),
    InputKind(name="crops", what="images", needs=("pixel_values", "image_sizes"), make=_crops),
    InputKind(
        name="sized images", what="images", needs=("pixel_values", "image_sizes"), make=_sized
    ),
    InputKind(name="images", what="images", needs=("pixel_values",), make=_images),
    InputKind(name="lists of images", what="images", needs=("pixel_values",), make=_lists),
    InputKind(
        name="spectrum",
        what="sound",
        needs=("input_features",),
        make=_spectrum,
        tokens=lambda config: _number(config, "max_source_positions", default=32) // 2,
    ),
    InputKind(name="frames", what="sound", needs=("input_features",), make=_frames),
    InputKind(name="waves", what="sound", needs=("input_values",), make=_waves),
)
"""The narrowest first: what is known by more arguments, then what is known by fewer."""
