"""What tests/processes/test_towers.py runs on every rank: rows with other numbers of images."""

import contextlib
import functools

import torch
from numerics import MODELS, build, emitted, error, gradients_of, whole
from state_jobs import doubled, float64, functions_kept
from torch import distributed

import planc
from planc.model.small.input_search import BatchShape
from planc.model.small.transformers_model import TransformersBuilder
from planc.ops.context import ContextParallel
from planc.runtime.standalone.images import placeholders
from planc.runtime.standalone.pipeline import stages_of
from planc.trial.batches import TrialPass

ROWS = 4


def made(model, changes=()):
    """A small model; `changes` may have the depths of the tower and of the decoder."""
    values = dict(changes)
    parts = {}
    if "depth" in values:
        deepstack = list(range(values["depth"]))
        tower = {"depth": values.pop("depth"), "deepstack_visual_indexes": deepstack}
        parts["vision_config"] = {**MODELS[model]["vision_config"], **tower}
        parts["text_config"] = {**MODELS[model]["text_config"], **values}
    return build(model, **parts)


def batch_of(model, images, seed=5, padded=True):
    """A batch whose rows have so many images each, padded on the right, for a model of
    `numerics.MODELS`; and the tokens that images take the place of.
    """
    config = build(model).config
    builder = TransformersBuilder(config.to_dict())
    found = builder.sample(BatchShape(rows=len(images), length=32, seed=seed, images=images))
    generator = torch.Generator().manual_seed(seed)
    found["labels"][torch.rand(found["labels"].shape, generator=generator) < 0.3] = -100
    if padded:
        mask = torch.ones_like(found["input_ids"])
        mask[1::2, -3:] = 0
        found["labels"][mask == 0] = -100
        found["attention_mask"] = mask
    return TrialPass(inputs=found, tokens=placeholders(config))


def valid(inputs):
    return (inputs["labels"][:, 1:] != -100).sum()


@functools.cache
def reference(images, padded, model, changes, double):
    """The loss, the loss without gradients, and gradients of one process; rows without images are
    in one batch with others.
    """
    single = doubled(made(model, changes)) if double else made(model, changes)
    inputs = batch_of(model, images, padded=padded).inputs
    count = valid(inputs)
    loss = single(**inputs, num_items_in_batch=count, use_cache=False).loss
    loss.backward()
    gradients = {n: p.grad for n, p in single.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def judge(model, plan, overrides=(), changes=(), double=False, **case):
    """Errors of the loss, in training and evaluation, and of the worst gradient.

    Args:
        double: whether all is computed in float64, in which models with states are judged.
        case: the arguments of `_judge`.
    """
    world = distributed.get_world_size()
    first = made(model, changes)
    lowered = planc.lower(first, plan, world_size=world, overrides=overrides)
    wanted = model, changes, double
    with float64() if double else contextlib.nullcontext():  # in which other weights are drawn
        spread = doubled(made(model, changes)) if double else first
        return _judge(spread, lowered, wanted, **case)


def _judge(spread, lowered, wanted, images=(1, 2, 0, 0), script=False, padded=True, broken=""):
    """Errors of a model that is spread by a plan.

    Args:
        wanted: the model, its changes, and whether in float64, of `reference`.
        images: of each row; the rows are divided over the data ranks in order.
        script: whether the emitted Python spreads the model and runs the step.
        broken: what is wrong on purpose: `features`, which go to other places than their own, or
            are `unsent` to later stages.
    """
    batch = batch_of(wanted[0], images, padded=padded)
    loss, gradients = reference(images, padded, *wanted)
    if script:
        with functions_kept(spread):
            found = _scripted(spread, lowered, batch)
    else:
        run = planc.apply(spread, lowered, device_type="cpu")
        if broken == "unsent" and (stages := stages_of(spread)).features is not None:
            stages.features.dense_of = _nothing
        if broken == "features":
            spread.model.language_model.register_forward_pre_hook(_first_ones, with_kwargs=True)
        own = batch.of_rank(run.data_rank, run.data_size)
        evaluated = run.evaluate([own])
        spread.zero_grad()
        found = run.forward_backward([own]), evaluated
    own = gradients_of(spread, gradients)
    least = 1e-3 * max(g.abs().max().item() for g in gradients.values())
    errors = {n: error(g, gradients[n], least) for n, g in own.items() if n in gradients}
    extra = [n for n, g in own.items() if n not in gradients and whole(g).abs().max() > 0]
    worst = max(errors, key=errors.get)
    return {
        "loss": max(error(one, loss) for one in found),
        "gradient": errors[worst],
        "worst": worst,
        "extra": extra,
        "count": len(errors),
    }


def _nothing(whole, _places, found):
    """Features that are 0, and whose gradients are."""
    return [torch.zeros_like(whole) + 0 * each.sum() for each in found]


def _first_ones(_module, args, kwargs):
    """As many features as before, but the first ones of the batch."""
    if (features := kwargs.get("deepstack_visual_embeds")) is not None:
        kwargs["deepstack_visual_embeds"] = [each.roll(1, 0) for each in features]
    return args, kwargs


def _scripted(made, lowered, batch):
    """The losses of the emitted script's step, the mean over all ranks; none for early stages."""
    rank, size, names = emitted(made, lowered)
    own = batch.of_rank(rank, size)
    parts = lowered.axis_size("cp") if lowered.has(ContextParallel) else 1
    own["num_items_in_batch"] = valid(batch.inputs) / size / parts
    if parts > 1:
        own = made.context_parallel.batch(own)
    if lowered.pipeline:
        mesh = names["build_mesh"]("cpu")
        total = sum(names["forward_backward"](made, mesh, [own]), torch.zeros(()))
    else:
        total = made(**own).loss
        total.backward()
    total = whole(total).clone()
    distributed.all_reduce(total)
    stages = lowered.axis_size(lowered.pipeline.axis) if lowered.pipeline else 1
    return [total * stages / distributed.get_world_size()]
