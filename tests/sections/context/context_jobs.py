"""What test_context.py runs: ranks of `cp` that each have a slice of the sequence.

`judge` is a loop that slices sequences itself (`attention = script`), with attention that gathers
keys and values along `cp`; in `split`, planc does both.
"""

import torch
import transformers
from numerics import (
    BATCH,
    LENGTH,
    bits,
    build,
    by_planc,
    by_script,
    data,
    error,
    gradients_of,
    plain,
    whole,
)
from state_jobs import doubled, float64, functions_kept
from torch import distributed

import planc


def judge(path, gather=True, loss="loss"):
    """Errors of logits, loss and the worst gradient against one process with whole sequences.

    Args:
        gather: whether attention sees the keys and values of all ranks of `cp`.
        loss: the mesh that the loss is averaged over.
    """
    single = build("llama")
    tokens, labels = data(single.config.vocab_size)
    right = single(input_ids=tokens, use_cache=False).logits
    expected = _loss(right, labels)
    expected.backward()
    made = build("llama")
    run = planc.apply(made, path, device_type="cpu")
    group, own = run.meshes["cp"].get_group(), LENGTH // run.meshes["cp"].size()
    first = run.meshes["cp"].get_local_rank() * own
    rows = slice(
        run.data_rank * BATCH // run.data_size, (run.data_rank + 1) * BATCH // run.data_size
    )
    columns = slice(first, first + own)
    transformers.AttentionInterface.register("gathered", _attention(group, first, gather))
    made.config._attn_implementation = "gathered"
    positions = torch.arange(LENGTH)[columns].unsqueeze(0)
    logits = made(input_ids=tokens[rows, columns], position_ids=positions, use_cache=False).logits
    mine = _loss(logits, labels[rows, columns])
    mine.backward()
    mean = mine.detach().clone()
    distributed.all_reduce(mean, group=run.meshes[loss].get_group())
    gradients = {n: p.grad for n, p in single.named_parameters()}
    least = 1e-3 * max(g.abs().max().item() for g in gradients.values())
    return {
        "logits": error(logits, right[rows, columns].detach()),
        "loss": error(mean / run.meshes[loss].size(), expected.detach()),
        "gradient": max(
            error(whole(p.grad), gradients[plain(n)], least) for n, p in made.named_parameters()
        ),
    }


def _loss(logits, labels):
    """Every rank has as many tokens, so that the mean of their means is the mean."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class _Gathered(torch.autograd.Function):
    """The slices of all ranks, side by side; every rank adds to the gradient of each."""

    @staticmethod
    def forward(context, part, group):
        context.group, context.own = group, part.shape[2]
        parts = [torch.empty_like(part) for _ in range(group.size())]
        distributed.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.contiguous()
        distributed.all_reduce(gradient, group=context.group)
        return gradient.narrow(2, context.group.rank() * context.own, context.own), None


def _attention(group, first, gather):
    """Queries of a slice that begins at `first`, on the keys and values of the whole sequence."""

    def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
        if gather:
            key, value = (_Gathered.apply(t, group) for t in (key, value))
        times = module.num_key_value_groups
        key, value = (t.repeat_interleave(times, dim=1) for t in (key, value))
        start = first if gather else 0
        asking = torch.arange(start, start + query.shape[2])[:, None]
        hidden = torch.arange(key.shape[2])[None] > asking
        scores = (query @ key.transpose(2, 3) * scaling).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    return attention


def split(model, plan, overrides=(), script=False, double=False):
    """The worst gradient's error against one process with whole sequences, padded and with labels
    that are ignored unevenly; and `bits`, a digest of this rank's numbers.

    Args:
        script: whether the emitted Python spreads the model, instead of planc's own apply.
        double: whether all is computed in float64.
    """
    single, made = build(model), build(model)
    world = distributed.get_world_size()
    lowered = planc.lower(made, plan, world_size=world, overrides=overrides)
    with functions_kept(made):
        if not double:
            return _split(single, made, lowered, script)
        with float64():
            return _split(doubled(single), doubled(made), lowered, script)


def _split(single, made, lowered, script):
    tokens, labels = data(single.config.vocab_size)
    labels[0, :-3] = -100
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    inputs = {"input_ids": tokens, "labels": labels, "attention_mask": mask}
    valid = (labels[:, 1:] != -100).sum()
    single(**inputs, num_items_in_batch=valid, use_cache=False).loss.backward()
    wanted = {n: p.grad for n, p in single.named_parameters() if p.grad is not None}
    rank, size = (by_script if script else by_planc)(made, lowered)
    own = {n: v[rank * BATCH // size :][: BATCH // size] for n, v in inputs.items()}
    part = made.context_parallel.batch(own)
    output = made(**part, num_items_in_batch=valid / size / lowered.axis_size("cp"))
    output.loss.backward()
    gradients = gradients_of(made, wanted)
    least = 1e-3 * max(g.abs().max().item() for g in wanted.values())
    return {
        "gradient": max(error(gradients[n], g, least) for n, g in wanted.items()),
        "bits": bits(output.loss, *gradients.values()),
    }
