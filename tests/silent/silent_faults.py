"""Mistakes in the runtime, each as a context in which planc or torch has it.

A context works in the process of `planc check`, whose ranks are threads, and on real ranks.
"""

import contextlib
import threading
from dataclasses import replace
from functools import partial
from unittest import mock

import silent_axis_faults
import silent_eight_bit_faults
import silent_mended_faults
import silent_update_faults
import torch
from torch import distributed
from torch.distributed import _functional_collectives
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.utils import checkpoint

from planc.ops.styles import Experts
from planc.ops.tensor_parallel import Parallelize, Tie
from planc.runtime import executor, gradients
from planc.runtime.run import Run
from planc.runtime.standalone import clipping, loss, tensor_styles
from planc.runtime.standalone.fsdp import divide_gradients


def installed(name):
    """The context of a fault; of none for an empty name."""
    return fault(name)() if name else contextlib.nullcontext()


def fault(name):
    """The function of a fault, of this file or of the other ones."""
    axes, updates = silent_axis_faults, silent_update_faults
    others = (axes, updates, silent_mended_faults, silent_eight_bit_faults)
    return globals().get(name) or next(getattr(o, name) for o in others if hasattr(o, name))


PLACES = ("planc.simulate.simulate", "planc.simulate.prove", "silent_jobs")
"""The modules that call `apply_lowered`."""


@contextlib.contextmanager
def applied(wrong):
    """`wrong(real, model, lowered, **arguments)` in place of `apply_lowered`."""
    import silent_jobs  # noqa: F401

    def instead(model, lowered, **arguments):
        return wrong(executor.apply_lowered, model, lowered, **arguments)

    with contextlib.ExitStack() as stack:
        for place in PLACES:
            stack.enter_context(mock.patch(f"{place}.apply_lowered", instead))
        yield


def after(change):
    """`change(run)` once a plan is applied."""

    def wrong(real, model, lowered, **arguments):
        run = real(model, lowered, **arguments)
        change(run)
        return run

    return applied(wrong)


def without(dropped):
    """The operations of a plan without those that `dropped` picks."""

    def wrong(real, model, lowered, **arguments):
        kept = lowered.map_ops(lambda ops: (op for op in ops if not dropped(op)))
        assert len(kept.ops) < len(lowered.ops)
        return real(model, kept, **arguments)

    return applied(wrong)


def units(run):
    return [m for m in run.model.modules() if isinstance(m, FSDPModule)]


# Norms and clipping ------------------------------------------------------------------------------


def norm_of_own_shards():
    def own(parts, axes, norm_type, device):
        norms = torch._foreach_norm(parts, norm_type) if parts else []
        return sum((n**norm_type for n in norms), torch.zeros(()))

    return mock.patch.object(clipping, "power_over", own)


def norm_counts_replicas():
    real = clipping.share_of_gradient

    def every_axis(parameter):
        axes, part = real(parameter)
        mesh = getattr(parameter, "device_mesh", None)
        dims = range(mesh.ndim) if mesh is not None else ()
        return tuple((mesh, i) for i in dims if mesh.size(i) > 1) or axes, part

    return mock.patch.object(clipping, "share_of_gradient", every_axis)


def norm_without_reducing_experts():
    real = clipping.share_of_gradient

    def dense_only(parameter):
        axes, part = real(parameter)
        return (axes if parameter.ndim < 3 else ()), part

    return mock.patch.object(clipping, "share_of_gradient", dense_only)


def norm_over_one_axis():
    """Reduces over the first axis of each mesh only."""
    real = clipping.share_of_gradient

    def one_axis(parameter):
        axes, part = real(parameter)
        return axes[:1], part

    return mock.patch.object(clipping, "share_of_gradient", one_axis)


def never_clipped():
    real = clipping.clip_grad_norm

    def measured(model, max_norm, **options):
        return real(model, float("inf"), **options)

    return mock.patch("planc.runtime.run.clip_grad_norm", measured)


# The loss over a split vocabulary ----------------------------------------------------------------


def gradient_of_labels_only():
    """The gradient of the logits is that of the labels' logits: the softmax has none."""
    real = loss._logit_gradients

    def labels_only(logits, *others):
        return real(torch.full_like(logits, float("-inf")), *others)

    return mock.patch.object(loss, "_logit_gradients", labels_only)


def smoothing_by_local_vocabulary():
    real = loss.HeadPart.__init__

    def local(self, weight):
        real(self, weight)
        self.vocabulary = len(weight.to_local() if isinstance(weight, DTensor) else weight)

    return mock.patch.object(loss.HeadPart, "__init__", local)


def softmax_of_own_entries():
    return mock.patch.object(loss.HeadPart, "gather_ranks", lambda self, own: own[None])


# Normalizers and gradients over the data axes ----------------------------------------------------


def tokens_of_one_rank():
    def own(counts, mesh):
        return torch.stack(counts).sum().float()

    return mock.patch.object(gradients, "num_items_in_batch", own)


def tokens_of_all_processes():
    """Counts over the global group, so tensor ranks' copies of a row count too."""

    def everywhere(counts, mesh):
        count = torch.stack(counts).sum().float()
        distributed.all_reduce(count)
        return count / (mesh.size() if mesh is not None else 1)

    return mock.patch.object(gradients, "num_items_in_batch", everywhere)


def divided_by_all_processes():
    return after(lambda run: divide_gradients(run.model, run.lowered.world_size, "cpu"))


def replicas_not_reduced():
    """FSDP reduces gradients over the shards, and not over the replicas."""

    class ShardsAlone:
        def __getattr__(self, name):
            return getattr(distributed, name)

        def all_reduce(self, *arguments, **options):
            return None

    return mock.patch.object(_fsdp_collectives, "dist", ShardsAlone())


def last_unit_not_synchronized():
    """`no_sync` switches the gradients of one unit off, and not on again."""
    real = gradients.no_sync

    @contextlib.contextmanager
    def forgetful(model, *, whole):
        with real(model, whole=whole):
            yield
        last = next(m for m in model.modules() if m is not model and isinstance(m, FSDPModule))
        last.set_requires_gradient_sync(False)

    return mock.patch.object(gradients, "no_sync", forgetful)


def one_unit_divided_again():
    """A group of one rank too many: the gradients of the first block are twice the right ones."""

    def change(run):
        unit = units(run)[1]
        unit.set_gradient_divide_factor(run.data_size / 2)
        unit.set_force_sum_reduction_for_comms(True)

    return after(change)


def rows_by_global_rank():
    def data_rank(run):
        return distributed.get_rank() % run.data_size

    return mock.patch.object(Run, "data_rank", property(data_rank))


# Gradients over a tensor axis --------------------------------------------------------------------


class OtherGradient(torch.autograd.Function):
    """A value whose gradient is another one: `change` of what arrives."""

    @staticmethod
    def forward(ctx, value, made, change):
        ctx.change = change
        return made.detach().view_as(made)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None, None


def gathered_otherwise(change, *, scores=False):
    """The inputs of split experts, with `change(value, gathered, mesh)` of each, or of the router's
    scores alone, which have few features.
    """
    real = tensor_styles.replicate_with_partial_gradient

    def gathered(value, mesh):
        made = real(value, mesh)
        if not torch.is_tensor(made) or not made.is_floating_point():
            return made
        return made if scores and made.shape[-1] > 8 else change(value, made, mesh)

    return mock.patch.object(tensor_styles, "replicate_with_partial_gradient", gathered)


def own_gradient(value, made, mesh):
    return OtherGradient.apply(value, made, lambda gradient: gradient)


def unsummed_inputs():
    """`to_local` without `grad_placements`."""
    return gathered_otherwise(own_gradient)


def unsummed_scores():
    return gathered_otherwise(own_gradient, scores=True)


def gathered_without_autograd():
    return gathered_otherwise(lambda value, made, mesh: made.detach(), scores=True)


def inputs_summed_again():
    def again(value, made, mesh):
        return OtherGradient.apply(made, made, lambda gradient: gradient * mesh.size())

    return gathered_otherwise(again)


def experts_summed_twice():
    return experts_times(lambda mesh: 2)


def experts_times_axis():
    return experts_times(lambda mesh: mesh.size())


def experts_times(factor):
    def part(parameter):
        local, count = parameter.to_local(), factor(parameter.device_mesh)
        return OtherGradient.apply(local, local, lambda gradient: gradient * count)

    return mock.patch.object(tensor_styles, "rank_part", part)


def bias_gradient_divided():
    def shared(parameter):
        return parameter.to_local() / parameter.device_mesh.size()

    return mock.patch.object(tensor_styles, "shared", shared)


def ties_not_restored():
    return without(lambda op: isinstance(op, Tie))


def adapter_a_not_summed():
    """The factor behind A takes its input as it is, so A's gradient is that of the rank's heads."""
    return computed_locally("v_proj.lora_B.default", Shard(-1))


def adapter_b_not_summed():
    return computed_locally("o_proj.lora_B.default", Shard(1))


def computed_locally(name, layout):
    """The linear layers of a name compute on local tensors, of input and weight."""

    def change(run):
        layers = dict(run.model.named_modules())
        for module in [module for path, module in layers.items() if path.endswith(name)]:
            module.forward = partial(on_locals, module)

    def on_locals(module, value):
        local = functional.linear(value.to_local(), module.weight.to_local())
        return DTensor.from_local(local, value.device_mesh, [layout], run_check=False)

    return after(change)


def factors_of_experts_not_summed():
    """Factors that a rank has whole are not said to be replicated."""

    def unstated(op):
        if not isinstance(op, Parallelize) or not isinstance(op.style, Experts):
            return op
        kept = tuple(pair for pair in op.style.layouts if str(pair[1]) != "replicate")
        return replace(op, style=replace(op.style, layouts=kept))

    def wrong(real, model, lowered, **arguments):
        return real(model, lowered.map_ops(lambda ops: map(unstated, ops)), **arguments)

    return applied(wrong)


# Recomputation and inputs ------------------------------------------------------------------------


def recomputed_without_reductions():
    """All-reduces are left out while activations are recomputed."""
    stack, state = contextlib.ExitStack(), threading.local()
    real = _functional_collectives.all_reduce

    class Recomputing(checkpoint._recomputation_hook):
        def __enter__(self):
            state.on = True
            return super().__enter__()

        def __exit__(self, *error):
            state.on = False
            return super().__exit__(*error)

    def all_reduce(tensor, *arguments, **options):
        skipped = getattr(state, "on", False)
        return tensor if skipped else real(tensor, *arguments, **options)

    stack.enter_context(mock.patch.object(_functional_collectives, "all_reduce", all_reduce))
    stack.enter_context(mock.patch.object(checkpoint, "_recomputation_hook", Recomputing))
    return stack


def dropped_argument(name):
    def change(run):
        def hook(module, args, kwargs):
            return args, {n: v for n, v in kwargs.items() if n != name}

        run.model.register_forward_pre_hook(hook, with_kwargs=True)

    return after(change)


def mask_dropped():
    return dropped_argument("attention_mask")


def positions_dropped():
    return dropped_argument("position_ids")
