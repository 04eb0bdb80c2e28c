"""Images for a rank that is run: the requested number in each row, of the size of the configuration
or of the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class ImageGrid(NamedTuple):
    """An image as a grid of patches.

    Attributes:
        rows, columns: patches of the image.
        width: values of a patch.
        tokens: the placeholders of the image in a row of tokens.
        token: the id of a placeholder.
    """

    rows: int
    columns: int
    width: int
    tokens: int
    token: int


def image_shape(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Channels, height and width of an image; None where a configuration does not say them, since
    its images have grids or crops of any size.
    """
    tower = config.get("vision_config")
    if not isinstance(tower, Mapping) or config.get("image_grid_pinpoints"):
        return None
    size, channels = tower.get("image_size"), tower.get("num_channels", 3)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    both = isinstance(height, int) and isinstance(width, int)
    return (channels, height, width) if both else None


def grid_step(config: Mapping[str, Any]) -> int | None:
    """The pixels of which each side of an image is a multiple; None if images are not grids."""
    tower = config.get("vision_config")
    if not isinstance(tower, Mapping):
        return None
    patch, merged = tower.get("patch_size"), tower.get("spatial_merge_size")
    return patch * merged if isinstance(patch, int) and isinstance(merged, int) else None


def image_grid(config: Mapping[str, Any], size: Sequence[int]) -> ImageGrid | None:
    """The grid of an image.

    Args:
        size: height and width in pixels, multiples of `grid_step`; empty for the configuration's.

    Returns:
        None if the configuration states the size, or if images are not grids of patches.
    """
    if not size or image_shape(config) is not None or grid_step(config) is None:
        return None
    tower = config["vision_config"]
    rows, columns = (side // tower["patch_size"] for side in size)
    channels = next((tower[n] for n in _CHANNELS if n in tower), 3)
    width = channels * tower.get("temporal_patch_size", 1) * tower["patch_size"] ** 2
    tokens = rows * columns // tower["spatial_merge_size"] ** 2
    return ImageGrid(rows, columns, width, tokens, config["image_token_id"])


_CHANNELS = ("in_channels", "in_chans", "num_channels")


def describe(count: int, config: Mapping[str, Any], size: Sequence[int]) -> str:
    """Describes the images of a step."""
    shape = image_shape(config)
    height, width = size or (shape[1:] if shape else (0, 0))
    pixels = f" of {height} x {width} pixels" if height else ""
    return f"{count} image{'s' * (count > 1)}{pixels} a row"
