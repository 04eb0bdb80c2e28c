"""Assigns the images and videos of a batch to its rows, by their placeholder tokens."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

OF_IMAGES = {
    "pixel_values": (
        "image_grid_thw",
        "image_position_ids",
        "image_sizes",
        "image_merge_sizes",
        "pixel_attention_mask",
        "pixel_mask",
        "spatial_shapes",
    ),
    "pixel_values_videos": (
        "video_grid_thw",
        "video_position_ids",
        "video_merge_sizes",
        "second_per_grid_ts",
    ),
}
"""The arguments that have a value for each image, and for each video, with the first of
them: of this one some models concatenate the patches of all.
"""
Tokens = Mapping[str, int]
"""The id of the placeholder token, by the key of `OF_IMAGES`."""


class ImagesError(ValueError):
    """Images that cannot be separated, or that belong to no row."""


def placeholders(config: Any) -> dict[str, int]:
    """The placeholder tokens of a model for images and videos."""
    found = {}
    for first, kind in (("pixel_values", "image"), ("pixel_values_videos", "video")):
        names = (f"{kind}_token_id", f"{kind}_token_index")
        token = next(
            (t for n in names if isinstance(t := _config_value(config, n), int)), None
        )
        if token is not None:
            found[first] = token
    return found


def _config_value(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def patches(batch: Mapping[str, Any], first: str) -> list[int]:
    """The number of patches of each image, if arguments state it; else 1 for each."""
    grid, position = (batch.get(name) for name in OF_IMAGES[first][:2])
    if grid is not None:
        sizes = grid.prod(-1)
    elif isinstance(position, Tensor):
        sizes = (position >= 0).all(-1).sum(-1)  # other patches are padding
    else:
        return [1] * len(batch[first])
    found: list[int] = sizes.tolist()
    return found


def some_images(
    batch: Mapping[str, Any], first: str, start: int, stop: int
) -> dict[str, Any]:
    """Selects images `start` to `stop` from all arguments with a value per image.

    Raises:
        ImagesError: an argument has another number of images.
    """
    sizes = patches(batch, first)
    found = {}
    for name in (first, *OF_IMAGES[first]):
        value = batch.get(name)
        if value is None:
            continue
        if name == first and len(value) == sum(sizes) != len(sizes):
            ends = [0, *accumulate(sizes)]
            found[name] = value[ends[start] : ends[stop]]
        elif len(value) == len(sizes):
            found[name] = value[start:stop]
        else:
            shape = list(getattr(value, "shape", [len(value)]))
            raise ImagesError(f"`{name}` has {shape} for {len(sizes)} images")
    return found


def images_of_rows(batch: Mapping[str, Any], first: str, token: int) -> list[int]:
    """The number of images before each row, followed by the total number.

    The placeholders of an image are proportional to its patches. If no argument states
    the numbers of patches, and there is one run of placeholders for each image, each
    run is an image.

    Raises:
        ImagesError: a row ends within an image.
    """
    places = batch["input_ids"] == token
    begins = places[:, :1].sum(1) + (places[:, 1:] & ~places[:, :-1]).sum(1)
    runs, wanted = begins.tolist(), places.sum(1).tolist()
    sizes = patches(batch, first)
    if sum(runs) == len(sizes) == sum(sizes):
        return [0, *accumulate(runs)]
    total, whole = sum(wanted), sum(sizes)
    ends = {end * total: at for at, end in enumerate([0, *accumulate(sizes)])}
    before = [0, *accumulate(wanted)]
    if not total or any(some * whole not in ends for some in before):
        text = f"rows with {wanted} placeholders"
        raise ImagesError(f"the images of `{first}` are not those of {text}")
    return [ends[some * whole] for some in before]


def rows_of_images(
    batch: Mapping[str, Any], count: int, tokens: Tokens
) -> list[dict[str, Any]]:
    """Splits the image arguments of a batch into parts of equal numbers of rows.

    Args:
        batch: the arguments of the model, with rows on dim 0 of `input_ids`.
        count: the number of parts; it divides the number of rows.
        tokens: the placeholder tokens of the model.

    Returns:
        The image arguments of each part, with values None in a part without images.
        Arguments with a value per row, or without placeholders, are left out.

    Raises:
        ImagesError: images cannot be separated.
    """
    parts: list[dict[str, Any]] = [{} for _ in range(count)]
    ids = batch.get("input_ids")
    for first, token in tokens.items():
        if not isinstance(batch.get(first), Tensor) or ids is None:
            continue
        try:
            before = images_of_rows(batch, first, token)
        except ImagesError:
            if len(batch[first]) == len(ids):
                continue
            raise
        own = len(ids) // count
        for at, part in enumerate(parts):
            start, stop = before[at * own], before[(at + 1) * own]
            part.update(
                dict.fromkeys(n for n in (first, *OF_IMAGES[first]) if n in batch)
            )
            if stop > start:
                part.update(some_images(batch, first, start, stop))
    return parts


def nothing_of(features: list[Tensor]) -> Tensor:
    """Returns a zero that depends on all features, so that their gradients are zero."""
    return torch.stack([feature[:0].sum().float() for feature in features]).sum()
