"""Images for a rank that is run: as many of each row as asked for, of the configuration's size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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


def said(count: int, config: Mapping[str, Any]) -> str:
    """Describes the images of a step."""
    shape = image_shape(config)
    size = f" of {shape[1]} x {shape[2]} pixels" if shape else ""
    return f"{count} image{'s' * (count > 1)}{size} a row"
