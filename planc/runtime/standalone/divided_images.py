"""Images of a batch that several ranks have, divided over them.

A rank runs the tower on a run of the images, and all ranks get the features of all. A
rank without an image runs the tower on the first one and keeps nothing of it: FSDP
gathers the tower's weights on all ranks.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from planc.runtime.standalone.collectives import Sizes, all_gather, exchange_rows
from planc.runtime.standalone.images import (
    OF_IMAGES,
    ImagesError,
    patches,
    some_images,
)
from planc.runtime.standalone.towers import FEATURES, METHODS, read_fields


def runs_of_images(sizes: list[int], ranks: int) -> list[int]:
    """Splits images into one run per rank, with similar numbers of patches: the start
    of each run, and the end of the last one.
    """
    whole = max(sum(sizes), 1)
    ends = accumulate(sizes)
    owners = [
        min((2 * end - size) * ranks // (2 * whole), ranks - 1)
        for end, size in zip(ends, sizes, strict=True)
    ]
    return [sum(owner < rank for owner in owners) for rank in range(ranks + 1)]


class GatherWay:
    """Options of the all-gather of features over a group, and of its backward pass.

    Args:
        group: of the ranks that have the same images.
        parts: whether each rank has a part of the gradient, that of its tokens, and the
            sum goes to the rows' owner; else each has the whole, and takes its rows.
        times: what the gradient is multiplied by.
    """

    def __init__(self, group: Any, parts: bool, times: int) -> None:
        self.group, self.parts, self.times = group, parts, times


class GatherRows(torch.autograd.Function):  # type: ignore[misc]
    """The rows of all ranks, rank by rank, as many of each as `sizes` says."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, sizes: Sizes, way: GatherWay) -> Tensor:
        ctx.sizes, ctx.way = sizes, way
        most = max(sizes)
        padded = own.new_zeros((most, *own.shape[1:]))
        padded[: len(own)] = own
        every = own.new_empty((len(sizes) * most, *own.shape[1:]))
        all_gather(every, padded, group=way.group)
        runs = every.unflatten(0, (len(sizes), most))
        return torch.cat([run[:size] for run, size in zip(runs, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        way, sizes = ctx.way, ctx.sizes
        group, mine = way.group, ctx.sizes[way.group.rank()]
        if way.parts:
            sent = exchange_rows(gradient, sizes, [mine] * len(sizes), group)
            own = sent.unflatten(0, (len(sizes), mine)).sum(0)
        else:
            own = gradient.split(sizes)[group.rank()]
        return own * way.times if way.times > 1 else own, None, None


class Column:
    """Rows of features: of one field of what a tower returns, or of one of its layers.

    Args:
        name: of the field.
        layer: which of its entries; None for all.
        by_image: whether it is a tensor for each image.
        rows: of all images.
        sizes: the rows of each image; of one tensor, those of all.
    """

    def __init__(
        self, name: str, layer: int | None, by_image: bool, rows: Tensor, sizes: Sizes
    ) -> None:
        self.name, self.layer, self.by_image = name, layer, by_image
        self.rows, self.sizes = rows, sizes


class DividedImages:
    """Makes a rank run the tower on its own run of the images.

    Args:
        holder: the module that puts features among the embeddings of tokens.
        mesh: the ranks that have the same images.
        parts, times: as of `GatherWay`.
    """

    def __init__(
        self, holder: nn.Module, mesh: DeviceMesh, parts: bool, times: int
    ) -> None:
        self.holder, self.mesh, self.ranks = holder, mesh, mesh.size()
        self.way = GatherWay(mesh.get_group(), parts, times)
        self.running = False
        for first, name in METHODS.items():
            if hasattr(holder, name):
                divided = self._shard(first, getattr(holder, name))
                setattr(holder, name, torch.compiler.disable(divided))

    def _shard(self, first: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        names = [*inspect.signature(plain).parameters]
        # `image_cu_seqlens` and others that may be computed before a pass
        kind = METHODS[first].split("_")[1] + "_"

        @wraps(plain)
        def encode_shard(*args: Any, **kwargs: Any) -> Any:
            if self.running:  # some models compute videos by their method for images
                return plain(*args, **kwargs)
            self.running = True
            try:
                given = dict(zip(names, args, strict=False)) | kwargs
                for other in given.keys() - names:  # of text, unless of a kind
                    if not other.startswith(kind):
                        given.pop(other)
                start, stop, bounds = self._run(first, given)
                if bounds is None:
                    return plain(*args, **kwargs)
                run = (start, stop) if stop > start else (0, 1)
                own = {**given, **some_images(given, first, *run)}
                mine = [own[name] for name, _ in zip(names, args, strict=False)]
                made = plain(*mine, **{n: own.get(n, v) for n, v in kwargs.items()})
                return self._gather_features(
                    made, run[1] - run[0], start == stop, bounds
                )
            finally:
                self.running = False

        return encode_shard

    def _run(
        self, first: str, given: Mapping[str, Any]
    ) -> tuple[int, int, Sizes | None]:
        """The images of this rank, and where each rank's begin; None without images."""
        known = (first, *OF_IMAGES[first])
        for name, value in given.items():
            if isinstance(value, Tensor) and value.dim() and name not in known:
                raise ImagesError(f"`{name}` cannot be divided with `{first}`")
        sizes = patches(given, first)
        bounds = runs_of_images(sizes, self.ranks)
        start, stop = bounds[self.mesh.get_local_rank() :][:2]
        return start, stop, bounds if sizes else None

    def _gather_features(
        self, made: Any, images: int, empty: bool, bounds: Sizes
    ) -> Any:
        """Replaces the local features in a tower's output by those of the images of all
        ranks.
        """
        if not isinstance(made, dict):
            raise ImagesError(f"features come as {type(made).__name__}, without names")
        fields = read_fields(self.holder, made)
        columns = [c for n in fields for c in columns_of(n, made[n], images)]
        counts = [b - a for a, b in pairwise(bounds)]
        every = self._sizes(columns, empty, max(counts))
        for column, of_ranks in zip(columns, every, strict=True):
            totals = [sum(sizes) for sizes in of_ranks]
            own = column.rows[:0] if empty else column.rows
            rows = GatherRows.apply(own, totals, self.way)
            if column.by_image:
                runs = zip(of_ranks, counts, strict=True)
                rows = rows.split([size for run, n in runs for size in run[:n]])
            if column.layer is None:
                made[column.name] = rows
            else:
                layers = list(made[column.name])
                layers[column.layer] = rows
                made[column.name] = layers
        for name in set(made) - set(fields):
            made[name] = None  # of the own images alone
        return made

    def _sizes(
        self, columns: list[Column], empty: bool, most: int
    ) -> list[list[Sizes]]:
        """The sizes of each column on each rank, filled up with zeros."""
        mine = torch.zeros(len(columns), most, dtype=torch.int64)
        for row, column in zip(mine, columns, strict=True):
            if not empty:
                row[: len(column.sizes)] = torch.tensor(column.sizes)
        mine = mine.to(self.mesh.device_type)
        every = mine.new_empty((self.ranks, *mine.shape))
        all_gather(every.flatten(0, 1), mine, group=self.way.group)
        found: list[list[Sizes]] = every.transpose(0, 1).tolist()
        return found


def columns_of(name: str, value: Any, images: int) -> list[Column]:
    """The columns of a field: a tensor, one for each image, or, of other fields than
    the features that take the places of tokens, such a value for each of some layers.
    """
    if isinstance(value, Tensor) or name == FEATURES:
        return [column_of(name, None, value, images)]
    return [column_of(name, i, layer, images) for i, layer in enumerate(value)]


def column_of(name: str, layer: int | None, value: Any, images: int) -> Column:
    if isinstance(value, Tensor):
        return Column(name, layer, False, value, [len(value)])
    if len(value) != images:
        raise ImagesError(f"`{name}` has {len(value)} tensors for {images} images")
    sizes = [len(one) for one in value]
    return Column(name, layer, True, torch.cat(list(value)), sizes)


def images_by_rank(
    holder: nn.Module, mesh: DeviceMesh, *, parts: bool = False, times: int = 1
) -> None:
    """Arguments as of `DividedImages`."""
    DividedImages(holder, mesh, parts, times)
