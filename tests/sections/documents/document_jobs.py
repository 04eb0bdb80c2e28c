"""What test_documents.py runs on every rank."""

import torch
from numerics import build, emitted, error, gradients_of
from torch import distributed
from torch.nn.functional import cross_entropy, pad

import planc
from planc.ops.context import ContextParallel
from planc.proxy.input_search import rank_slice

ROWS, LENGTH = 4, 26
CUTS = ((0, 9, 10, 21), (0, 5, 13, 14), (0, 17), (0, 2, 4, 20))
"""Where the documents of each row begin: at no multiple of a chunk, and of one token too."""


def packed(vocabulary):
    """Rows of several documents, as `rows.py` of docs/training.md makes them."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, vocabulary, (ROWS, LENGTH), generator=generator)
    positions, labels = torch.zeros_like(ids), ids.clone()
    for row, first, end in documents():
        positions[row, first:end] = torch.arange(end - first)
        labels[row, first] = -100
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def documents():
    """The row and the tokens of each document."""
    for row, cuts in enumerate(CUTS):
        for first, end in zip(cuts, (*cuts[1:], LENGTH), strict=True):
            yield row, first, end


def summed(logits, labels):
    shifted = pad(labels, (0, 1), value=-100)[:, 1:]
    return cross_entropy(logits.float().flatten(0, 1), shifted.flatten(), reduction="sum")


def alone(model, batch):
    """The logits and the mean loss of documents that are run by themselves; adds gradients."""
    count = (batch["labels"][:, 1:] != -100).sum()
    logits, total = [], 0.0
    for row, first, end in documents():
        ids, labels = (batch[n][row : row + 1, first:end] for n in ("input_ids", "labels"))
        found = model(input_ids=ids).logits
        loss = summed(found, labels) / count
        loss.backward()
        logits.append(found.detach()[0])
        total += loss.item()
    return torch.cat(logits).view(ROWS, LENGTH, -1), torch.tensor(total)


def compare(model, plan, overrides, script=False, passes=1):
    """Relative errors of this rank's `logits`, of the `loss` and of the worst `gradient`.

    Args:
        passes: into which the rows of a data rank are cut, whose gradients are accumulated.
    """
    single, parallel = build(model), build(model)
    batch = packed(single.config.vocab_size)
    logits, loss = alone(single, batch)
    world = distributed.get_world_size()
    lowered = planc.lower(parallel, plan, world_size=world, overrides=overrides)
    if script:
        rank, size, _ = emitted(parallel, lowered)
    else:
        run = planc.apply(parallel, lowered, device_type="cpu")
        rank, size = run.data_rank, run.data_size
    mine = rank_slice(batch, rank, size)
    found = {"logits": 0.0}
    if lowered.pipeline is None and not lowered.has(ContextParallel):
        output = parallel(**{name: mine[name] for name in ("input_ids", "position_ids")}).logits
        found["logits"] = error(output, logits.chunk(size)[rank])
    if script:
        count = (batch["labels"][:, 1:] != -100).sum()
        (summed(output, mine["labels"]) * size / count).backward()
        found["loss"] = 0.0
    else:
        each = [rank_slice(mine, at, passes) for at in range(passes)]
        found["loss"] = error(run.forward_backward(each), loss)
    right = {name: p.grad for name, p in single.named_parameters()}
    least = 1e-3 * max(grad.abs().max().item() for grad in right.values())
    errors = {n: error(g, right[n], least) for n, g in gradients_of(parallel).items()}
    found["worst"] = max(errors, key=errors.get)
    return {**found, "gradient": errors[found["worst"]]}
