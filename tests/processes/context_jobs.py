"""What tests/processes/test_context.py runs: ranks of `cp` that each have a slice of the sequence.

planc splits no sequence yet; this is a loop that does it itself, with attention that gathers keys
and values along `cp`, over a plan that shards parameters over `dp_shard * cp`.
"""

import torch
import transformers
from numerics import BATCH, LENGTH, build, data, error, plain, whole
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
