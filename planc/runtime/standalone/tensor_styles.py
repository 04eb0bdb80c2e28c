"""Tensor-parallel styles that torch does not have, in the form of torch's own.

Emitted scripts inline these definitions without their types.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
)
from torch.distributed.tensor.placement_types import Placement

Parts = int | Sequence[int]
"""A number of equal parts that lie side by side along a dim, or the size of each."""


def rank_order(size: int, parts: Parts, ranks: int) -> list[tuple[int, int]]:
    """The ranges of a dim in order, when each rank holds a slice of each part.

    Args:
        size: of the dim.
        parts: a number of equal parts, or the size of each.
        ranks: how many share it.

    Returns:
        (start, stop) of each range, rank by rank.
    """
    sizes = [size // parts] * parts if isinstance(parts, int) else list(parts)
    if sum(sizes) != size or any(own % ranks for own in sizes):
        raise ValueError(f"{size} in parts of {sizes} do not split over {ranks} ranks")
    ranges: list[tuple[int, int]] = []
    for rank in range(ranks):
        start = 0
        for own in sizes:
            first = start + rank * (own // ranks)
            ranges.append((first, first + own // ranks))
            start += own
    return ranges


def repack(module: nn.Module, name: str, dim: int, parts: Parts, ranks: int) -> None:
    """Puts a parameter in rank order, and notes on the module what its order is.

    A checkpoint has the model's own order: `module._rank_order[name]` is (dim, ranges),
    the ranges of the whole dim in the order in which they lie here.
    """
    whole = module._parameters.get(name)
    if whole is None:
        return
    ranges = rank_order(whole.shape[dim], parts, ranks)
    pieces = [whole.detach().narrow(dim, a, b - a) for a, b in ranges]
    made = nn.Parameter(torch.cat(pieces, dim), requires_grad=whole.requires_grad)
    module.register_parameter(name, made)
    if "_rank_order" not in module.__dict__:
        module._rank_order = {}
    module._rank_order[name] = (dim, ranges)


def distribute(
    module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement
) -> None:
    """Makes a parameter a DTensor."""
    whole = module._parameters[name]
    split = distribute_tensor(whole, mesh, [placement])
    made = nn.Parameter(split, requires_grad=whole.requires_grad)
    module.register_parameter(name, made)


def with_views(module: nn.Module, views: Mapping[str, Callable[[Any], Tensor]]) -> None:
    """Lets a module's forward see what `views[name]` makes of a parameter.

    The forward is wrapped and not hooked, so that one that is cut short, as recomputing
    is, leaves the parameters in their place.
    """
    forward = module.forward

    @wraps(forward)
    def local(*args: Any, **kwargs: Any) -> Any:
        held = {name: module._parameters[name] for name in views}
        seen = {name: views[name](parameter) for name, parameter in held.items()}
        module._parameters.update(seen)
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(held)

    module.forward = local


def rank_part(parameter: DTensor) -> Tensor:
    """A rank's shard."""
    return parameter.to_local()


def summed(parameter: DTensor) -> Tensor:
    """The whole of a parameter whose gradient is a part of a sum."""
    return parameter.to_local(grad_placements=[Partial()])


def shared(parameter: DTensor) -> Tensor:
    """What one rank adds of a parameter that the sum over the ranks is to hold once."""
    return summed(parameter) / parameter.device_mesh.size()


def gathered(value: Any, mesh: DeviceMesh) -> Any:
    """A whole tensor whose gradient is a part of a sum; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        value = value.redistribute(placements=[Replicate()])
    elif value.is_floating_point():
        value = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    else:
        return value
    return value.to_local(grad_placements=[Partial()])


class PackedParallel(ParallelStyle):
    """ColwiseParallel or RowwiseParallel of a linear that holds several projections.

    Each of them is split, and a rank holds its slice of every one, so that it can cut
    its local output (or make its local input) as the whole model does.
    """

    def __init__(self, style: Any, *, parts: Parts) -> None:
        self.style = style
        self.parts = parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise NotImplementedError(f"{type(module).__name__} is no nn.Linear")
        dims = {"weight": 1}
        if isinstance(self.style, ColwiseParallel):
            dims = {"weight": 0, "bias": 0}
        for name, dim in dims.items():
            repack(module, name, dim, self.parts, device_mesh.size())
        return self.style._apply(module, device_mesh)


class TransposedParallel(ParallelStyle):
    """ColwiseParallel or RowwiseParallel of a linear whose weight is [in, out]."""

    def __init__(self, style: Any, *, parts: Parts = 1) -> None:
        self.style = style
        self.parts = parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = self.style
        dims = {"weight": 0}
        wanted: tuple[Placement, ...] = (Shard(-1),)
        if isinstance(style, ColwiseParallel):
            dims, wanted = {"weight": 1, "bias": 0}, (Replicate(),)
        if self.parts != 1:
            for name, dim in dims.items():
                repack(module, name, dim, self.parts, device_mesh.size())
        for name in list(module._parameters):
            place = Shard(dims[name]) if name in dims else Replicate()
            if module._parameters[name] is not None:
                distribute(module, name, device_mesh, place)
        enter = partial(style._prepare_input_fn, style.input_layouts, wanted)
        leave = partial(
            style._prepare_output_fn,
            style.output_layouts,
            style.use_local_output,
        )
        return distribute_module(module, device_mesh, None, enter, leave)


class SummedGradient(ParallelStyle):
    """Whole parameters, in a module and below, whose gradients are parts of a sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for inner in module.modules():
            names = [n for n, p in inner._parameters.items() if p is not None]
            for name in names:
                distribute(inner, name, device_mesh, Replicate())
            if names:
                with_views(inner, dict.fromkeys(names, summed))
        return module


class RotaryGradient(ParallelStyle):
    """The gradient of the last `features`, which no projection follows, is summed."""

    def __init__(self, features: int) -> None:
        self.features = features

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def leave(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            rest = output.shape[-1] - self.features
            first, last = output.split([rest, self.features], dim=-1)
            return torch.cat([first, gathered(last, device_mesh)], dim=-1)

        module.register_forward_hook(leave)
        return module


class DividedAttributes(ParallelStyle):
    """Integer attributes of a module that count what the ranks split, such as heads."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.names:
            whole, ranks = getattr(module, name), device_mesh.size()
            if whole % ranks:
                raise ValueError(f"{name} = {whole} does not split over {ranks} ranks")
            setattr(module, name, whole // ranks)
        return module


class BareParallel(ParallelStyle):
    """Parameters of a module's own, of which its forward sees the rank's part.

    Args:
        held: by name, `Shard`; `Replicate`, whole, with a gradient that is a part of a
            sum; or `Partial`, whole, and each rank works with an equal share of it.
        parts: by name, where a split dim holds several tensors side by side.
    """

    def __init__(
        self, held: Mapping[str, Any], *, parts: Mapping[str, Parts] | None = None
    ) -> None:
        self.held = held
        self.parts = parts or {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        views: dict[str, Callable[[Any], Tensor]] = {}
        for name, place in self.held.items():
            if name in self.parts:
                dim = place.dim % module._parameters[name].ndim
                repack(module, name, dim, self.parts[name], device_mesh.size())
            views[name] = rank_part if place.is_shard() else summed
            if place.is_partial():
                views[name] = shared
            layout = place if place.is_shard() else Replicate()
            distribute(module, name, device_mesh, layout)
        with_views(module, views)
        return module


class FeaturesParallel(BareParallel):
    """An RMS norm over features that are split: each rank has its part of the weight.

    The module's own code divides by the mean of what the rank has; what it gives is put
    right by the mean over all ranks.
    """

    def __init__(self) -> None:
        super().__init__({"weight": Shard(0)})

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        if hasattr(module, "normalized_shape"):
            module.normalized_shape = rank_part(module.weight).shape
        forward = module.forward

        @wraps(forward)
        def over_all(hidden: Tensor) -> Tensor:
            eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
            own = hidden.float().square().mean(-1, keepdim=True)
            sums = DTensor.from_local(own, device_mesh, [Partial()], run_check=False)
            mean = gathered(sums, device_mesh) / device_mesh.size()
            least = torch.finfo(hidden.dtype).eps if eps is None else eps
            factor = ((own + least) / (mean + least)).sqrt()
            output = forward(hidden)
            return (output.float() * factor).to(output.dtype)

        module.forward = over_all
        return module


class ExpertsParallel(BareParallel):
    """Expert tensors that are split inside of each expert.

    Args:
        held, parts: as for BareParallel.
        input_layout: `Replicate`: the gradients of all inputs are summed.
        output_layout: of the sum over the ranks; None hands on what each rank has.
    """

    def __init__(
        self,
        held: Mapping[str, Any],
        *,
        input_layout: Placement,
        output_layout: Placement | None,
        parts: Mapping[str, Parts] | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(held, parts=parts)
        self.input_layout = input_layout
        self.output_layout = output_layout
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        forward = module.forward

        @wraps(forward)
        def spread(*args: Any, **kwargs: Any) -> Any:
            if self.input_layout.is_replicate():
                args = tuple(gathered(value, device_mesh) for value in args)
                kwargs = {n: gathered(v, device_mesh) for n, v in kwargs.items()}
            output = forward(*args, **kwargs)
            if self.output_layout is None:
                return output
            sums = [Partial()]
            parts = DTensor.from_local(output, device_mesh, sums, run_check=False)
            output = parts.redistribute(placements=[self.output_layout])
            return output.to_local() if self.use_local_output else output

        module.forward = spread
        return module


__all__ = [
    "BareParallel",
    "DividedAttributes",
    "ExpertsParallel",
    "FeaturesParallel",
    "PackedParallel",
    "RotaryGradient",
    "SummedGradient",
    "TransposedParallel",
    "rank_order",
]
