"""Between passes a model lists the shards that its optimizer steps.

FSDP leaves units with `reshard_after_forward=False` unsharded until a backward pass. If
none follows, the parameters that modules list are copies: what a script does to them is
lost, and gradients of the shards are not among theirs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from planc.compat.fsdp import TrainingState, _fsdp_param_group
from planc.runtime.standalone.shards import fsdp_units, groups_of, reshard_units

JOINED = "_joined_passes"
"""The attribute of a model whose passes are joined."""


def shards_at_rest(model: nn.Module) -> None:
    """Makes modules list shards between passes.

    After a pass without gradients all units are resharded. After one with gradients,
    units that stay unsharded keep what they have gathered for the backward pass, and
    modules list their shards until then. Each pass gathers anew, on all ranks, whatever
    a rank did since the last one.

    Args:
        model: the outermost unit, with all units inside.
    """
    _fsdp_param_group.RegisterPostBackwardFunction = PostBackward
    units = fsdp_units(model)
    for group in [group for unit in units for group in groups_of(unit)]:
        group.pre_backward = once_differentiated(
            listed_again(group, group.pre_backward)
        )
        group.pre_forward = listed_again(group, group.pre_forward)
        if stacks := [each for each in group.fsdp_params if is_stack(each)]:
            group.post_backward = fill_unused_gradients(group, stacks)
        group.post_backward = if_gathered(group, group.post_backward)
    model.register_forward_pre_hook(before_pass, prepend=True)
    model.register_forward_hook(after_pass, always_call=True)
    for part in model.children():
        inner = InnerPass(model)
        part.register_forward_pre_hook(inner.before, prepend=True, with_kwargs=True)
        part.register_forward_hook(inner.after, always_call=True)


class PostBackward(torch.autograd.Function):  # type: ignore[misc]
    """Torch's `RegisterPostBackwardFunction`, except that an input that a unit does not
    use gets no gradient. Torch makes zeros, for a DTensor too a plain tensor, which its
    other gradients can't be added to.
    """

    @staticmethod
    def forward(ctx: Any, group: Any, *inputs: torch.Tensor) -> Any:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.group.post_backward()
        return (None, *gradients)


class InnerPass:
    """Runs the hooks of the outermost unit where a script calls a part of the model by
    itself, as reward and value heads do: torch finds all units by the first call of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.runs = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(self, _part: nn.Module, args: Any, kwargs: Any) -> Any:
        state: Any = self.model._get_fsdp_state()
        self.runs = False
        if state._training_state == TrainingState.PRE_BACKWARD:
            reset_failed_pass(self.model)
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward or state._training_state != TrainingState.IDLE:
            return None
        self.runs = True
        before_pass(self.model, args)
        return state._pre_forward(self.model, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(self, _part: nn.Module, args: Any, output: Any) -> Any:
        if not self.runs:
            return None
        self.runs = False
        state: Any = self.model._get_fsdp_state()
        output = state._post_forward(self.model, args, output)
        after_pass(self.model, args, output)
        return output


@contextmanager
def joined_passes(model: nn.Module) -> Iterator[None]:
    """Passes inside gather what stays unsharded once; after them all is resharded."""
    reset_failed_pass(model)
    reshard_units(model)
    setattr(model, JOINED, True)
    try:
        yield
    finally:
        setattr(model, JOINED, False)
        reset_failed_pass(model)
        reshard_units(model)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def before_pass(model: nn.Module, _args: Any) -> None:
    if getattr(model, JOINED, False):
        return
    reset_failed_pass(model)
    reshard_units(model)
    if torch.is_inference_mode_enabled():
        gathered_once(model)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def after_pass(model: nn.Module, _args: Any, _output: Any) -> None:
    if getattr(model, JOINED, False):
        return
    if model._get_fsdp_state()._training_state == TrainingState.FORWARD:
        reset_failed_pass(model)  # the forward pass raised
    if not torch.is_grad_enabled():
        reshard_units(model)
        return
    for unit in fsdp_units(model):
        for group in groups_of(unit):
            for each in group.fsdp_params if not group.is_sharded else ():
                each._setattr_on_modules(each.sharded_param)


def reset_failed_pass(model: nn.Module) -> None:
    """Resets the units after a forward or backward pass that raised.

    Torch takes the next pass for a part of that one: the gradients of units whose
    backward pass was not complete remain on the rank, and parameters have none. What a
    backward pass that raised has added to gradients is discarded, as `zero_grad` clears
    only gradients of shards.
    """
    if torch._C._current_graph_task_id() != -1:
        return
    units = fsdp_units(model)
    for unit in (unit for unit in units if unit._get_fsdp_state()._is_root):
        state = unit._get_fsdp_state()
        interrupted = state._state_ctx.post_backward_final_callback_queued
        if not interrupted and state._training_state == TrainingState.IDLE:
            continue
        unit.reset_iter_state()
        groups = [group for inner in fsdp_units(unit) for group in groups_of(inner)]
        for each in (p for g in groups for p in g.fsdp_params if interrupted):
            each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None


def listed_again(group: Any, plain: Any) -> Any:
    """A method of a group that first lists what stayed unsharded, for the model's code:
    a block may be recomputed before the backward pass of a unit inside it.
    """

    def call(*args: Any) -> Any:
        for each in group.fsdp_params if group.is_unsharded else ():
            each._setattr_on_modules(each._unsharded_param)
        return plain(*args)

    return call


def once_differentiated(plain: Any) -> Any:
    """A group's `pre_backward` that refuses second derivatives."""

    def pre_backward(*args: Any) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True): FSDP gathers weights and sums gradients "
                "outside of autograd, so second derivatives would be incomplete"
            )
        plain(*args)

    return pre_backward


def was_gathered(group: Any) -> bool:
    """Whether a pass has gathered a group's parameters so far."""
    return all(hasattr(each, "_unsharded_param") for each in group.fsdp_params)


def if_gathered(group: Any, plain: Any) -> Any:
    """A group's `post_backward`, but of a group that no pass has gathered so far, as a
    tower's before the first image: torch takes it for gathered in accumulated passes.
    """

    def post_backward(*args: Any) -> None:
        if was_gathered(group):
            plain(*args)

    return post_backward


def is_stack(each: Any) -> bool:
    """Whether a parameter holds the matrices of experts, which rows choose from: its
    module says so by its class or an attribute. A parameter of another module that has
    no gradient on one rank has none on any, as the pooling head of a tower.
    """
    module = each._module_info.module
    names = " ".join([type(module).__name__, *vars(module)])
    return each.sharded_param.ndim > 2 and "expert" in names.lower()


def fill_unused_gradients(group: Any, stacks: list[Any]) -> Any:
    """A group's `post_backward` that first makes the gradients of stacks whose module
    ran, and from which no row of this rank has chosen: torch reduces what a rank has,
    so that ranks would send buffers of different sizes.
    """
    plain = group.post_backward
    used: set[nn.Module] = set()

    def uses(module: nn.Module, _args: Any) -> None:
        if torch.is_grad_enabled():
            used.add(module)

    for module in {each._module_info.module for each in stacks}:
        module.register_forward_pre_hook(uses)

    def post_backward(*args: Any) -> None:
        ran = group._training_state == TrainingState.PRE_BACKWARD
        for each in stacks if ran else ():
            whole = each.unsharded_param
            missing = whole.grad is None and each.unsharded_accumulated_grad is None
            if missing and whole.requires_grad and each._module_info.module in used:
                whole.grad = torch.zeros_like(whole)
        if group.reduce_grads:  # of microbatches the last
            used.clear()
        plain(*args)

    return post_backward


def gathered_once(model: nn.Module) -> None:
    """Gathers units for the first time outside inference mode: torch keeps the tensors
    that it gathers into, and those made in inference mode can never be trained.
    """
    with torch.inference_mode(False):
        for unit in fsdp_units(model):
            if not all(map(was_gathered, groups_of(unit))):
                unit.unshard()
                unit.reshard()
