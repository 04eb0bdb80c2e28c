"""Optimizers of a plan's own: whether they can be made, and whether their states can be kept."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from planc.diagnostics.diagnostic import Label, first_line
from planc.ops.optimizer import Optimize, OptimizerClass
from planc.runtime.calls import resolve
from planc.runtime.preconditions import stop
from planc.runtime.script_line import script_line
from planc.runtime.standalone.optimizer import PlannedOptimizer, planned_optimizer
from planc.runtime.standalone.own_optimizer import OwnSteps, instance
from planc.runtime.standalone.shards import named_tensors


def require_arguments(op: Optimize, algorithm: OptimizerClass) -> None:
    """Makes an instance for one number, so that wrong arguments are said before anything is made.

    Raises:
        PlanError: PL591.
    """
    parameters = [nn.Parameter(Tensor([0.0]))]
    try:
        instance(resolve(algorithm.path), parameters, 1e-3 * op.lr, 0.0, dict(algorithm.arguments))
    except Exception as error:
        raise stop(
            "PL591",
            f"{algorithm.path} takes other arguments: {type(error).__name__}: {first_line(error)}",
            Label(span=op.origin, text="given here"),
            help="it is called with the parameters, `lr`, `weight_decay` and what the rule says",
        ) from error


def made_optimizer(model: nn.Module, lr: float, weight_decay: float) -> PlannedOptimizer:
    """The optimizer of the plan; after its first step the states of classes are looked at.

    Raises:
        PlanError: PL591, a class takes no weight decay; PL592, in the first step, a state of it is
            not one that a run can save.
    """
    try:
        optimizer = planned_optimizer(model, lr, weight_decay)
    except TypeError as error:
        raise stop(
            "PL591",
            f"an optimizer of the plan takes other arguments: {first_line(error)}",
            *script_line("the optimizer is asked for here"),
            help="a rule whose class has no weight decay says `weight_decay = 0`",
        ) from error
    all_steps = [steps for bucket in optimizer.buckets.values() for steps in bucket]
    stepped = [p for steps in all_steps if isinstance(steps, OwnSteps) for p in steps.parameters]
    if stepped:
        names = {id(p): name for name, p in named_tensors(model)}

        def look(stepped_optimizer: Optimizer, _arguments: object, _keywords: object) -> None:
            handle.remove()
            for p in stepped:
                for key, value in stepped_optimizer.state.get(p, {}).items():
                    _require_state(names[id(p)], p, key, value)

        handle = optimizer.register_step_post_hook(look)
    return optimizer


def _require_state(name: str, parameter: Tensor, key: str, value: object) -> None:
    """A state is a number, or like its parameter: anything else has no place on another mesh."""
    if not isinstance(value, Tensor):
        if value is None or isinstance(value, bool | int | float | str):
            return
        what = f"a {type(value).__name__}"
    elif value.dim() == 0:
        return
    elif value.shape != parameter.shape:
        what = f"of shape {list(value.shape)}, the parameter is {list(parameter.shape)}"
    elif isinstance(value, DTensor) != isinstance(parameter, DTensor) or (
        isinstance(value, DTensor)
        and isinstance(parameter, DTensor)
        and value.placements != parameter.placements
    ):
        what = "not sharded like the parameter"
    else:
        return
    raise stop(
        "PL592",
        f"the state `{key}` of `{name}` is {what}",
        *script_line("the optimizer steps here"),
        help="states are numbers, or made by `torch.zeros_like(parameter)`: only these can be "
        "saved, and loaded on another mesh",
    )
