"""Mistakes in what runs pipelines, split sequences and divided experts: contexts as those of
`silent_faults`. None patches anything inside a rank, whose thread others run beside.
"""

import contextlib
from unittest import mock

import torch
from torch import distributed
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from planc.ops.lowered import Lowered
from planc.runtime import training_step
from planc.runtime.standalone import (
    collectives,
    context,
    context_tokens,
    documents,
    expert_parallel,
    fsdp,
    lora_experts,
    pipeline_schedule,
    pipeline_step,
)
from planc.runtime.standalone.context_images import ContextBehindImages
from planc.runtime.standalone.context_patches import ContextOfPatches
from planc.runtime.standalone.context_states import StateRanks
from planc.runtime.standalone.documents import StateResets
from planc.runtime.standalone.pipeline import Stages
from planc.runtime.standalone.pipeline_images import SentFeatures
from planc.runtime.standalone.shards import fsdp_units, groups_of

# Pipelines ---------------------------------------------------------------------------------------


def stage_without_a_block():
    found = Stages._find_modules

    def lost(self, model, blocks, inputs, outputs):
        places = found(self, model, blocks, inputs, outputs)
        cut = model.get_submodule(blocks)
        module, stage, make = places[cut, "1"]
        places[cut, "1"] = module, self.count if stage == 0 else stage, make
        return places

    return mock.patch.object(Stages, "_find_modules", lost)


def microbatches_with_the_first_mask():
    """Masks and positions stay those of the first rows."""
    cut = pipeline_step.microbatches

    def first(batch, *given):
        parts = cut(batch, *given)
        kept = [n for n in ("attention_mask", "position_ids") if n in batch]
        return [{**part, **{n: parts[0][n] for n in kept}} for part in parts]

    return mock.patch.object(pipeline_step, "microbatches", first)


def microbatches_scale_gradients():
    kind = pipeline_schedule.schedules.Schedule1F1B
    plain = kind.__init__

    def scaled(self, *arguments, **terms):
        plain(self, *arguments, **{**terms, "scale_grads": True})

    return mock.patch.object(kind, "__init__", scaled)


def gradients_times_tokens():
    """Each rank divides its loss by its own number of tokens, and multiplies by those of all."""
    real = training_step._items

    def own(handle, *others):
        return real(handle, *others) / handle.data_size

    return mock.patch.object(training_step, "_items", own)


def gradients_of_the_last_batch():
    real = pipeline_step.Schedule.step

    def forgetful(self, *arguments, **options):
        for unit in fsdp_units(self.parts[0].submod.__dict__["model"]):
            for parameter in (p for group in groups_of(unit) for p in group.fsdp_params):
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
        return real(self, *arguments, **options)

    return mock.patch.object(pipeline_step.Schedule, "step", forgetful)


def ends_apart():
    return mock.patch.object(
        pipeline_step, "ties_summed", lambda stages, model: contextlib.nullcontext()
    )


# Split sequences ---------------------------------------------------------------------------------


def changed_part(change):
    real = context.part_of_batch

    def part_of_batch(*arguments, **options):
        return change(real(*arguments, **options))

    return mock.patch.object(context, "part_of_batch", part_of_batch)


def labels_shifted_late():
    def late(part):
        return {**part, "shift_labels": pad(part["labels"], (0, 1), value=-100)[:, 1:]}

    return changed_part(late)


def positions_from_zero():
    def zero(part):
        own = torch.arange(part["input_ids"].shape[1])
        return {**part, "position_ids": own.expand_as(part["input_ids"]).contiguous()}

    return changed_part(zero)


def documents_see_each_other():
    return tokens_without(documents=None)


def padding_seen():
    return tokens_without(padding=None)


def tokens_without(**values):
    class Lacking(context_tokens.KeyTokens):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            for name, value in values.items():
                setattr(self, name, value)

    return mock.patch.object(context, "KeyTokens", Lacking)


def halved_by_the_other_part():
    """The loss is divided by the labels of all ranks and averaged over those of a sequence too."""
    return mock.patch.object(Lowered, "sequence_parts", 1)


def keys_of_one_rank():
    def backward(ctx, grad):
        return grad.chunk(ctx.group.size(), 2)[ctx.group.rank()].contiguous(), None

    return mock.patch.object(collectives.GatherSequence, "backward", staticmethod(backward))


def patches_without_a_scale():
    """The gradient of the gathered outputs is cut, not summed over the ranks' equal losses."""
    gather = ContextOfPatches._gather

    def of_one_loss(self, module, args, output):
        scaled = output / self.size + (output - output / self.size).detach()
        return gather(self, module, args, scaled)

    return mock.patch.object(ContextOfPatches, "_gather", of_one_loss)


def mask_in_another_order():
    """The mask of a rank's text, and then of its patches, for each rank in turn."""
    of_heads = ContextOfPatches.of_heads

    def other(self, module, joint, all_, mask, rest):
        moved = None if mask is None else mask.roll(joint.text, -1)
        return of_heads(self, module, joint, all_, moved, rest)

    return mock.patch.object(ContextOfPatches, "of_heads", other)


# Divided experts ---------------------------------------------------------------------------------


def experts_without_a_divisor():
    return mock.patch.object(fsdp, "divide_gradients", lambda *_: None)


def dispatch_summed_twice():
    def twice(ctx, gradient):
        return 2 * collectives.exchange_rows(gradient, *ctx.back), None, None, None

    return mock.patch.object(expert_parallel.Exchange, "backward", staticmethod(twice))


def router_without_gradient():
    real = expert_parallel.by_all_to_all

    def unweighted(own, hidden, index, weights):
        return real(own, hidden, index, weights.detach())

    return mock.patch.dict(expert_parallel.KINDS, {("all_to_all", False): unweighted})


# States, images and adapters of experts ----------------------------------------------------------


def on_a_rank():
    """Whether this thread or process is one of several ranks."""
    return distributed.is_initialized() and distributed.get_world_size() > 1


def documents_share_a_state():
    init = StateRanks.__init__

    def one(self, group, tokens, parts, gathers, documents):
        init(self, group, tokens, parts, gathers, None)

    return mock.patch.object(StateRanks, "__init__", one)


def delta_rule_over_documents():
    enter = StateResets.enter

    def entered(self, *given):
        found = enter(self, *given)
        apart = documents.current()[0]
        if apart is not None and on_a_rank():
            apart.parts.discard("torch_chunk_gated_delta_rule")
        return found

    return mock.patch.object(StateResets, "enter", entered)


def images_of_one_part():
    """The other ranks of a sequence send no gradients to the tower."""
    init = ContextBehindImages.__init__

    def without_gradient(value):
        if torch.is_tensor(value) and value.is_floating_point():
            return value.detach() + 0 * value
        return value

    def made(self, *given, **settings):
        init(self, *given, **settings)
        if self.group.rank():
            self.holder.visual.register_forward_hook(
                lambda _module, _given, output: tree_map(without_gradient, output)
            )

    return mock.patch.object(ContextBehindImages, "__init__", made)


def features_not_sent():
    """Features that are 0, and whose gradients are."""

    def nothing(self, whole, places, found):
        return [torch.zeros_like(whole) + 0 * each.sum() for each in found]

    return mock.patch.object(SentFeatures, "dense_of", nothing)


def factors_of_other_experts():
    sides = lora_experts.sides

    def other(module, a, b):
        return sides(module, a, b.roll(1, 0) if on_a_rank() else b)

    return mock.patch.object(lora_experts, "sides", other)
