"""Optimizers that a script brings: tried once on small shards, beside whole parameters, before the
first step of a run would show what they cannot do.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, distributed, nn, optim
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from planc.diagnostics.diagnostic import Diagnostic, first_line
from planc.model.randomness import random_numbers_kept
from planc.runtime.preconditions import problem, stop, warning
from planc.runtime.script_line import script_line
from planc.runtime.standalone.optimizer import PlannedOptimizer
from planc.runtime.standalone.shards import splits, whole_of
from planc.runtime.weights.loading import raise_on_all_ranks

_ELEMENTWISE = (
    *(optim.AdamW, optim.Adam, optim.SGD, optim.Adagrad, optim.Adadelta, optim.Adamax),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.ASGD),
)
"""Classes of torch whose steps of shards are those of whole parameters."""
_STEPS = 2
_MOST = 0.15
"""The largest error of a change that may be rounding: of torch's Muon, which iterates in bf16. What
takes the norm of one of two shards for the whole is off by 0.3.
"""

_Layout = tuple[Any, tuple[Placement, ...], int]


def require_whole_steps(optimizer: Optimizer) -> None:
    """Checks that an optimizer steps shards as whole parameters. Every rank calls it, as its steps
    may be collectives; nothing of the optimizer changes.

    Raises:
        PlanError: PL465.
    """
    if type(optimizer) not in _ELEMENTWISE and distributed.get_backend() != "fake":
        raise_on_all_ranks(_compare_steps(optimizer))


def _compare_steps(optimizer: Optimizer) -> list[Diagnostic]:
    """PL465 where small shards are stepped otherwise than whole parameters, or not at all."""
    groups = [_layouts(group["params"]) for group in optimizer.param_groups]
    if not any(mesh is not None for layouts in groups for mesh, _, _ in layouts):
        return []
    whole = _step_copies(optimizer, groups, lambda value, _: value)
    if isinstance(whole, str):  # it wants a closure, or a device, or other parameters
        return []
    parts = _step_copies(optimizer, groups, _distribute)
    name = type(optimizer).__name__
    if isinstance(parts, str):
        return [_finding(f"{name} cannot step shards: {parts}")]
    worst = max(map(_error, parts, whole), default=0.0)
    if worst <= _MOST:
        return []
    wrong = f"steps shards otherwise than whole parameters, by {worst:.2g} of a step"
    return [_finding(f"{name} {wrong}")]


def _finding(message: str) -> Diagnostic:
    help = (
        "write `optimizer { root : adafactor }` in the plan, which steps shards alike; AdamW does "
        "too, and `muon` has one state for each matrix"
    )
    return problem("PL465", message, *script_line("the optimizer arrives here"), help=help)


def _layouts(parameters: Sequence[Tensor]) -> list[_Layout]:
    """The meshes, placements and numbers of dims of some parameters, each once; parts in another
    order are as those in this one.
    """
    layouts: dict[_Layout, None] = {}
    for p in parameters:
        mesh, placements = None, list[Placement]()
        if isinstance(p, DTensor):
            mesh, plain = p.device_mesh, p.placements
            placements = [Shard(q.dim) if splits(q) else Replicate() for q in plain]
        layouts[mesh, tuple(placements), p.dim()] = None
    return [*layouts]


def _distribute(value: Tensor, layout: _Layout) -> Tensor:
    mesh, placements, _ = layout
    if mesh is None:
        return value
    return distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None)


def require_uncoupled(optimizer: Optimizer) -> None:
    """Checks that an optimizer computes the change of a parameter from its own gradients. One that
    has a statistic of all parameters would have another one on each stage of a pipeline.

    Raises:
        PlanError: PL423.
    """
    if type(optimizer) in _ELEMENTWISE or isinstance(optimizer, PlannedOptimizer):
        return
    name, help = type(optimizer).__name__, "write `pp = 1`, or take AdamW or another optimizer "
    help += "whose state is of single parameters"
    dims = ({p.dim() for p in group["params"]} for group in optimizer.param_groups)
    groups = [[(None, (), n) for n in sorted(lengths)] * 2 for lengths in dims]
    first, second = (_first_changed(optimizer, groups, other) for other in _OTHERS)
    text = f"{name} computes one statistic of all parameters, and each stage has its own ones"
    place = script_line("the optimizer arrives here")
    if isinstance(optimizer, optim.LBFGS) or (first is not None and not _equal(first, second)):
        raise stop("PL423", text, *place, help=help)
    if first is None:
        text = f"{name} cannot be tried, and may compute a statistic of all parameters"
        warning("PL423", text, *place, help=help)


_OTHERS = (lambda _step: 1.0, lambda step: 10.0 * (-1) ** step)
"""The factors of other parameters' gradients by step, of two runs."""
_COUPLED_STEPS = 12  # estimates of a rate grow after some steps


def _first_changed(
    optimizer: Optimizer, groups: Sequence[Sequence[_Layout]], other: Callable[[int], float]
) -> Tensor | None:
    """The first parameter after some steps, next to other parameters with these gradients; None if
    the optimizer cannot be tried.
    """
    with random_numbers_kept():
        torch.random.default_generator.manual_seed(0)
        stepped = _step_copies(optimizer, groups, lambda value, _: value, factor=other)
    return None if isinstance(stepped, str) or not stepped else stepped[0][1]


def _equal(first: Tensor, second: Tensor | None) -> bool:
    return second is not None and torch.equal(first, second)


def _step_copies(
    optimizer: Optimizer,
    groups: Sequence[Sequence[_Layout]],
    convert: Callable[[Tensor, _Layout], Tensor],
    factor: Callable[[int], float] | None = None,
) -> list[tuple[Tensor, Tensor]] | str:
    """Steps a small parameter of each layout several times: its values (before, after), or the
    reason why it fails.

    Args:
        factor: returns the factor of a step for the gradients of all parameters but the first;
            gradients are then equal in all steps. If None, each step has new gradients.
    """
    draw = torch.Generator().manual_seed(0)
    other = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        other.__dict__[key] = copy.copy(value) if isinstance(value, dict | list | set) else value
    for key in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        other.__dict__[key] = OrderedDict()  # the script's own
    other.__dict__.pop("step", None)  # as a scheduler wraps it
    other.state, other.param_groups, parameters = defaultdict(dict), [], []
    for group, layouts in zip(optimizer.param_groups, groups, strict=True):
        values = [torch.randn(_shape(at), generator=draw, dtype=torch.float64) for at in layouts]
        copies = [
            nn.Parameter(convert(v.clone(), at)) for v, at in zip(values, layouts, strict=True)
        ]
        other.param_groups.append({**group, "params": copies})
        parameters += [*zip(values, copies, layouts, strict=True)]
    try:
        for step in range(_STEPS if factor is None else _COUPLED_STEPS):
            for number, (value, p, at) in enumerate(parameters):
                if factor is not None:
                    draw.manual_seed(number)
                gradient = torch.randn(value.shape, generator=draw, dtype=torch.float64)
                if factor is not None and number > 0:
                    gradient *= factor(step)
                p.grad = convert(gradient, at)
            other.step()
        return [(value, _full_tensor(p)) for value, p, _ in parameters]
    except Exception as error:  # whatever the class raises
        return f"{type(error).__name__}: {first_line(error)}"


def _shape(layout: _Layout) -> tuple[int, ...]:
    """Sizes that every rank has a part of."""
    mesh, placements, dims = layout
    ranks = [
        prod(mesh.size(i) for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim == d)
        for d in range(dims)
    ]
    return tuple(2 * over if over > 1 else 6 for over in ranks)


def _full_tensor(parameter: Tensor) -> Tensor:
    return whole_of(parameter).cpu()


def _error(part: tuple[Tensor, Tensor], whole: tuple[Tensor, Tensor]) -> float:
    before, after = whole
    right = after - before
    error = (part[1] - after).norm() / right.norm().clamp(min=1e-30)
    return float(error)
