"""Tensor-parallel styles that torch lacks, as subclasses of torch's `ParallelStyle`."""

# mypy: allow-subclassing-any

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import Placement

from planc.compat.dtensor import ColwiseParallel, ParallelStyle
from planc.compat.meshes import DeviceMesh

Parts = int | Sequence[int]
"""The number of equal parts that are concatenated along a dim, or the size of each."""


def rank_order(size: int, parts: Parts, ranks: int) -> list[tuple[int, int]]:
    """The ranges of a dim, rank by rank, where each rank holds a slice of each part.

    Args:
        size: the size of the dim.
        parts: the number of equal parts, or the size of each.
        ranks: the number of ranks that shard the dim.

    Returns:
        (start, stop) of each range, rank by rank.
    """
    sizes = [size // parts] * parts if isinstance(parts, int) else list(parts)
    if sum(sizes) != size or any(size_of_part % ranks for size_of_part in sizes):
        raise ValueError(f"{sizes} is not divisible by {ranks} ranks")
    ranges: list[tuple[int, int]] = []
    for rank in range(ranks):
        start = 0
        for size_of_part in sizes:
            first = start + rank * (size_of_part // ranks)
            ranges.append((first, first + size_of_part // ranks))
            start += size_of_part
    return ranges


def repack(module: nn.Module, name: str, dim: int, parts: Parts, ranks: int) -> None:
    """Reorders a parameter by ranks, and stores the order on the module.

    `module._rank_order[name]` is (dim, ranges): the ranges of the full dim in their
    order here. Checkpoints and full tensors have the model's order.
    """
    whole = module._parameters.get(name)
    if whole is None:
        return
    ranges = rank_order(whole.shape[dim], parts, ranks)
    pieces = [whole.detach().narrow(dim, a, b - a) for a, b in ranges]
    parameter = nn.Parameter(torch.cat(pieces, dim), requires_grad=whole.requires_grad)
    module.register_parameter(name, parameter)
    if "_rank_order" not in module.__dict__:
        module._rank_order = {}
    module._rank_order[name] = (dim, ranges)


def distribute(
    module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement
) -> None:
    """Makes a parameter a DTensor, or splits its shards along one more mesh."""
    whole = module._parameters[name]
    if isinstance(whole, DTensor):
        local_shard = whole.detach().to_local()
        local = distribute_tensor(local_shard, mesh, [placement]).to_local()
        split = DTensor.from_local(
            local,
            DeviceMesh._concatenate([whole.device_mesh, mesh]),
            [*whole.placements, placement],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    else:
        split = distribute_tensor(whole, mesh, [placement])
    parameter = nn.Parameter(split, requires_grad=whole.requires_grad)
    module.register_parameter(name, parameter)


class SeparateGradient(torch.autograd.Function):
    """The identity, whose gradient is a copy.

    Gradients of several tensors may share memory (of `cat` and `+`, for example).
    torch copies it before another pass is added to a gradient in place, but not if it
    belongs to the local tensor of a DTensor: the other gradients would change too.
    """

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


def separate(value: Any) -> Any:
    """A tensor with a gradient of its own; a low-rank sum is no tensor, and stays."""
    return SeparateGradient.apply(value) if isinstance(value, Tensor) else value


def with_views(module: nn.Module, views: Mapping[str, Callable[[Any], Tensor]]) -> None:
    """Makes a module's forward use the result of `views[name]` for each parameter.

    The forward is wrapped rather than hooked, so that parameters are restored even if
    it is stopped early, as in recomputation.
    """
    forward = module.forward

    @wraps(forward)
    def local(*args: Any, **kwargs: Any) -> Any:
        held = {name: module._parameters[name] for name in views}
        seen = {name: separate(views[name](p)) for name, p in held.items()}
        module._parameters.update(seen)
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(held)

    module.forward = local


def rank_part(parameter: Tensor) -> Tensor:
    """A rank's shard, which may be given as such."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def local_with_partial_gradient(parameter: DTensor) -> Tensor:
    """The full tensor of a parameter that is replicated along the last dim of its mesh,
    with a gradient that is partial there.
    """
    return parameter.to_local(grad_placements=[*parameter.placements[:-1], Partial()])


def shared(parameter: DTensor) -> Tensor:
    """A rank's equal share of a replicated parameter, for an output that is summed."""
    return local_with_partial_gradient(parameter) / parameter.device_mesh.shape[-1]


def replicate_with_partial_gradient(value: Any, mesh: DeviceMesh) -> Any:
    """A full tensor whose gradient is partial; a value of another type is unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        value = value.redistribute(placements=[Replicate()])
    elif value.is_floating_point():
        value = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    else:
        return value
    return value.to_local(grad_placements=[Partial()])


def contiguous_input(_module: nn.Module, inputs: Any) -> Any:
    """The inputs of a linear layer: torch gives uneven shards as views without their
    padding, which its product of a DTensor and a weight cannot flatten.
    """
    return (contiguous(inputs[0]), *inputs[1:])


def contiguous_gradient(_module: nn.Module, _inputs: Any, output: Any) -> None:
    """The same for the gradient of the output of a linear layer."""
    if isinstance(output, DTensor) and output.requires_grad:
        output.register_hook(contiguous)


def contiguous(value: Any) -> Any:
    """A DTensor whose shard is contiguous; other values are unchanged."""
    if isinstance(value, DTensor) and not value.to_local().is_contiguous():
        return value.clone(memory_format=torch.contiguous_format)
    return value


class PackedParallel(ParallelStyle):
    """ColwiseParallel or RowwiseParallel of a linear layer with several projections.

    Each projection is sharded, and a rank has a slice of every one, so that the model's
    code can split the local output (or concatenate the local input) as without shards.
    """

    def __init__(self, style: Any, *, parts: Parts) -> None:
        self.style = style
        self.parts = parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise NotImplementedError(f"{type(module).__name__} is not an nn.Linear")
        dims = {"weight": 1}
        if isinstance(self.style, ColwiseParallel):
            dims = {"weight": 0, "bias": 0}
        for name, dim in dims.items():
            repack(module, name, dim, self.parts, device_mesh.size())
        return self.style._apply(module, device_mesh)


class TransposedParallel(ParallelStyle):
    """ColwiseParallel or RowwiseParallel of a linear layer with weight [in, out]."""

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
            style._prepare_output_fn, style.output_layouts, style.use_local_output
        )
        return distribute_module(module, device_mesh, None, enter, leave)


class ContiguousInput(ParallelStyle):
    """A style that shards the features of a sequence's shards, by an all-to-all."""

    def __init__(self, style: Any) -> None:
        self.style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = self.style._apply(module, device_mesh)
        module.register_forward_pre_hook(contiguous_input)
        return module


class SummedGradient(ParallelStyle):
    """Replicated parameters of a module and its submodules, with summed gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for inner in module.modules():
            names = [n for n, p in inner._parameters.items() if p is not None]
            for name in names:
                distribute(inner, name, device_mesh, Replicate())
            if names:
                with_views(inner, dict.fromkeys(names, local_with_partial_gradient))
        return module


class RotaryGradient(ParallelStyle):
    """Sums the gradient of the last `features`, which no projection follows."""

    def __init__(self, features: int) -> None:
        self.features = features

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def leave(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            rest = output.shape[-1] - self.features
            first, last = output.split([rest, self.features], dim=-1)
            return torch.cat(
                [first, replicate_with_partial_gradient(last, device_mesh)], dim=-1
            )

        module.register_forward_hook(leave)
        return module


class DividedAttributes(ParallelStyle):
    """Divides integer attributes of a module by the number of ranks, such as heads."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.names:
            whole, ranks = getattr(module, name), device_mesh.size()
            if whole % ranks:
                raise ValueError(f"{name} = {whole} is not divisible by {ranks} ranks")
            setattr(module, name, whole // ranks)
        return module


class BareParallel(ParallelStyle):
    """A module's direct parameters, of which its forward uses the local tensors.

    Args:
        held: by name, `Shard`; `Replicate`, replicated with a partial gradient; or
            `Partial`, replicated, and each rank uses an equal share of the values.
        parts: by name, if several tensors are concatenated along the sharded dim.
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
            views[name] = rank_part if place.is_shard() else local_with_partial_gradient
            if place.is_partial():
                views[name] = shared
            layout = place if place.is_shard() else Replicate()
            distribute(module, name, device_mesh, layout)
        with_views(module, views)
        return module


class FeaturesParallel(BareParallel):
    """An RMS norm over sharded features, with a sharded weight.

    The module's code divides by the mean over the local features; its output is
    corrected with the mean over all ranks.
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
            local_mean = hidden.float().square().mean(-1, keepdim=True)
            sums = DTensor.from_local(
                local_mean, device_mesh, [Partial()], run_check=False
            )
            mean = (
                replicate_with_partial_gradient(sums, device_mesh) / device_mesh.size()
            )
            least = torch.finfo(hidden.dtype).eps if eps is None else eps
            factor = ((local_mean + least) / (mean + least)).sqrt()
            output = forward(hidden)
            return (output.float() * factor).to(output.dtype)

        module.forward = over_all
        return module


class ExpertsParallel(BareParallel):
    """Expert tensors that are sharded within each expert.

    Args:
        held, parts: as for BareParallel.
        input_layout: for `Replicate`, the gradients of all inputs are summed.
        output_layout: the layout of the sum over the ranks; None leaves it partial.
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
                args = tuple(
                    replicate_with_partial_gradient(value, device_mesh)
                    for value in args
                )
                kwargs = {
                    n: replicate_with_partial_gradient(v, device_mesh)
                    for n, v in kwargs.items()
                }
            output = forward(*args, **kwargs)
            if self.output_layout is None:
                return output
            sums = [Partial()]
            parts = DTensor.from_local(output, device_mesh, sums, run_check=False)
            output = parts.redistribute(placements=[self.output_layout])
            return output.to_local() if self.use_local_output else output

        module.forward = spread
        return module


def check_ids(module: nn.Embedding, name: str) -> None:
    """Raises on ids outside an embedding that is split by the vocabulary.

    Its lookup masks ids of other ranks, and thus an id that no rank holds gives zeros.
    """

    def check(module: nn.Embedding, args: tuple[Tensor, ...]) -> None:
        ids = args[0].to_local() if isinstance(args[0], DTensor) else args[0]
        # a later stage has no weight
        rows = len(module.weight) or module.num_embeddings
        known = ((ids >= 0) & (ids < rows)).all()
        torch._assert_async(known, f"an id of `{name}` is not in [0, {rows})")

    module.register_forward_pre_hook(check)


def enable_async_tp(mesh: DeviceMesh) -> None:
    """Makes the compiler cut all-gathers and reduce-scatters of an axis into parts, and
    run each beside the matrix product of another, in modules compiled from now on.

    As torchtitan does it: torch's name for the pass is micro-pipeline tensor
    parallelism, and it moves the parts through symmetric memory.

    Raises:
        ValueError: the device is not CUDA.
    """
    if mesh.device_type != "cuda":
        text = "asynchronous tensor parallelism needs CUDA: symmetric memory is on GPUs"
        raise ValueError(f"{text}, and the device is {mesh.device_type}")
    from planc.compat.compiler import _symmetric_memory, inductor_config

    inductor_config._micro_pipeline_tp = True
    _symmetric_memory.enable_symm_mem_for_group(mesh.get_group().group_name)
