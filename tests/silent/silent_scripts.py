"""The training loop of docs/training.md, and the same with one mistake in it."""

import contextlib

import numerics
import torch
from torch import distributed

from planc.runtime.standalone.images import placeholders
from planc.trial.batches import TrialPass

MAX_NORM = 1.0


class Script:
    """The right loop."""

    def build(self, model, changes):
        return numerics.build(model, **changes)

    def optimizer(self, model):
        """Called before the plan is applied."""
        return None

    def rows(self, run, batch):
        """A data rank's rows, with their images."""
        every = TrialPass(inputs=batch, tokens=placeholders(run.model.config))
        return every.of_rank(run.data_rank, run.data_size)

    def count(self, run, batches):
        return run.num_items_in_batch(*(b["labels"] for b in batches))

    def sync(self, run, last):
        return contextlib.nullcontext() if last else run.no_sync()

    def weight(self, run, passes):
        """What the loss of a pass is multiplied by."""
        return 1.0

    def clip(self, run):
        return run.clip_grad_norm_(MAX_NORM)

    def saved(self, run):
        """The full weights by name."""
        return run.full_state_dict(every_rank=True)


class OwnSampler(Script):
    """Each rank takes rows of its own, as torch's DistributedSampler does without arguments."""

    def rows(self, run, batch):
        rank, world = distributed.get_rank(), distributed.get_world_size()
        return {n: v[rank * len(v) // world :][: len(v) // world] for n, v in batch.items()}


class OwnMask(Script):
    """A collator that draws masks draws others on each rank."""

    def rows(self, run, batch):
        mine = super().rows(run, batch)
        mask = torch.ones_like(mine["input_ids"])
        mask[0, : 1 + distributed.get_rank()] = 0
        return {**mine, "attention_mask": mask}


class OwnSeed(Script):
    """The ranks build their models from different random states."""

    def build(self, model, changes):
        made = super().build(model, changes)
        generator = torch.Generator().manual_seed(distributed.get_rank())
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
        return made


class MeanOfMeans(Script):
    """The loss is the mean of each pass on each rank, however few labels it has."""

    def count(self, run, batches):
        return None

    def weight(self, run, passes):
        return 1.0 / passes


class EarlyOptimizer(Script):
    """The optimizer is created before the plan is applied, which replaces the parameters."""

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, foreach=False)


class SameRows(Script):
    """Every data rank reads the rows of the first."""

    def rows(self, run, batch):
        size = len(batch["input_ids"]) // run.data_size
        return {n: v[:size] for n, v in batch.items()}


class SavedByRank(Script):
    """Saves what `full_tensor` gives, which has packed weights in the order of the ranks."""

    def saved(self, run):
        whole = {numerics.plain(n): numerics.whole(p) for n, p in run.model.named_parameters()}
        return whole
