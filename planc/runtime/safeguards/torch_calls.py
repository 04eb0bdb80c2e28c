"""Makes torch's functions correct for models under a plan, or refuses them at the script's line.

torch has no hooks for these calls. Each function is replaced once for the process, where torch
itself looks it up, so that names which a script imported earlier are covered too.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from planc.runtime.preconditions import stop
from planc.runtime.safeguards.loss_graph import observe_backward
from planc.runtime.safeguards.stage_statistics import (
    GRADIENTS,
    WEIGHTS,
    StageStatistics,
    end_observation,
    observe_statistics,
)
from planc.runtime.script_line import script_line
from planc.runtime.script_optimizers import require_uncoupled
from planc.runtime.standalone.pipeline import stages_of
from planc.runtime.standalone.shards import fsdp_units, groups_of, redistribute

_MODELS: WeakSet[nn.Module] = WeakSet()


def cover(model: nn.Module) -> None:
    """Covers a model that a plan was applied to."""
    end_observation()  # of a model before it
    _MODELS.add(model)
    _replace_functions()
    if (stages := stages_of(model)) is not None:
        observe_statistics(model, stages, WEIGHTS)


@functools.cache
def _replace_functions() -> None:
    torch.autograd._engine_run_backward = _refusing(
        torch.autograd._engine_run_backward, _before_backward
    )
    clip_grad._get_total_norm = _total_norm(clip_grad._get_total_norm)
    clip_grad._clip_grads_with_norm_ = _scaling(clip_grad._clip_grads_with_norm_)
    nn.utils.get_total_norm = clip_grad._get_total_norm
    nn.utils.clip_grads_with_norm_ = clip_grad._clip_grads_with_norm_
    DTensor.data = property(_get_data, _set_data)
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _refusing(function: Callable[..., Any], require: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        require(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def _before_backward(outputs: Any, *args: Any, **kwargs: Any) -> None:
    _require_no_shards(outputs, *args, **kwargs)
    observe_backward(outputs)


def _require_no_shards(
    _outputs: Any,
    _gradients: Any = None,
    _retain: Any = None,
    _create: Any = None,
    inputs: Iterable[Tensor] = (),
    *_args: Any,
    **_kwargs: Any,
) -> None:
    """Refuses `torch.autograd.grad` and `backward(inputs=...)` of parameters in FSDP units: the
    graph contains unsharded copies, so the gradient of a shard is None.

    Raises:
        PlanError: PL426.
    """
    wanted = {id(tensor) for tensor in inputs if isinstance(tensor, DTensor)}
    if not wanted:
        return
    units = (unit for model in [*_MODELS] for unit in fsdp_units(model))
    shards = (each.sharded_param for u in units for g in groups_of(u) for each in g.fsdp_params)
    if count := len(wanted & {id(shard) for shard in shards}):
        raise stop(
            "PL426",
            f"{count} of {len(wanted)} inputs are parameters in FSDP units: autograd computes the "
            "gradients of unsharded copies, so the result would be None",
            *script_line("the gradients are requested here"),
            help="call `loss.backward()` and read `parameter.grad`; a penalty of these gradients "
            "needs a plan without FSDP",
        )


# optimizers --------------------------------------------------------------------------------------

_STEPPED: WeakSet[Optimizer] = WeakSet()
_OBSERVED: WeakKeyDictionary[Optimizer, StageStatistics] = WeakKeyDictionary()
"""The observations that ended before a step which runs."""


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Refuses numbers of one stage's gradients or weights, and an optimizer that `run.optimizer`
    has not seen and that couples parameters of different stages.

    Raises:
        PlanError: PL423, PL427.
    """
    observed = end_observation()
    if observed is not None:
        observed.require(GRADIENTS, WEIGHTS)
        _OBSERVED[optimizer] = observed
    if optimizer in _STEPPED:
        return
    _STEPPED.add(optimizer)
    staged = (model for model in [*_MODELS] if stages_of(model) is not None)
    owned = {id(p) for model in staged for p in model.parameters()}
    if any(id(p) in owned for group in optimizer.param_groups for p in group["params"]):
        require_uncoupled(optimizer)


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Observes weights again."""
    observed = _OBSERVED.pop(optimizer, None)
    if observed is not None:
        observed.observe_weights()


# torch computes with lists of tensors on one mesh -------------------------------------------------


def _total_norm(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch's norm of several tensors, which may be on several meshes."""

    @functools.wraps(function)
    def call(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        _require_all_stages(given)
        if len({_mesh(tensor) for tensor in given}) > 1:
            norms = [torch.linalg.vector_norm(tensor.detach(), norm_type) for tensor in given]
            given = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        return function(given, norm_type, *args, **kwargs)

    return call


def _scaling(function: Callable[..., None]) -> Callable[..., None]:
    """torch's scaling of gradients by their norm, once for the parameters of each mesh."""

    @functools.wraps(function)
    def call(parameters: Any, *args: Any, **kwargs: Any) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for mesh in {_mesh(parameter): None for parameter in given}:
            function([p for p in given if _mesh(p) == mesh], *args, **kwargs)

    return call


def _mesh(tensor: Tensor) -> DeviceMesh | None:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _require_all_stages(tensors: Iterable[Tensor]) -> None:
    """Refuses torch's norm of gradients under pipeline stages: a rank has those of its stages.

    Raises:
        PlanError: PL427.
    """
    given = set(map(id, tensors))
    staged = (model for model in [*_MODELS] if stages_of(model) is not None)
    parameters = (p for model in staged for p in model.parameters())
    if sum(id(p.grad) in given or id(p) in given for p in parameters) > 1:  # one alone is right
        raise stop(
            "PL427",
            "each rank of a pipeline has the gradients of its stages, so this is not the norm of "
            "the full model",
            *script_line("the norm is computed here"),
            help="call `run.clip_grad_norm_(max_norm)`, which returns the norm of the full model; "
            "with `max_norm=inf` it scales nothing",
        )


# torch ignores `parameter.data = value` of a DTensor, whose local tensor is an attribute ----------


def _get_data(tensor: DTensor) -> Any:
    return Tensor.data.__get__(tensor)


def _set_data(tensor: DTensor, value: Tensor) -> None:
    """Gives a DTensor the local tensor of another one, as `Tensor.data` does for storages.

    Raises:
        ValueError: the shapes or meshes differ, or the value is not a DTensor.
    """
    meshes = [getattr(each, "device_mesh", None) for each in (tensor, value)]
    if meshes[0] != meshes[1] or tensor.shape != value.shape:
        raise ValueError(
            f"`data` of a DTensor {tuple(tensor.shape)} on {meshes[0]} was set to a tensor "
            f"{tuple(value.shape)} on {meshes[1]}; write the values with `copy_`"
        )
    with torch.no_grad():
        placed = redistribute(value.detach(), tensor.placements)
    tensor._local_tensor = placed._local_tensor
