"""A rank alone, with a fault in its program: `planc.tools.measure.one_rank` as `Faulty` runs it.

The name of a fault stands before the digest of a job, which nothing else reads.
"""

import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

from planc.simulate.rank_job import RankRunner


class Faulty(RankRunner):
    """Runs ranks with a fault in the program of some of them."""

    MODULE = "order_faults"
    fault = ""

    def ask(self, job):
        return super().ask(replace(job, digest=f"{self.fault}:{job.digest}"))


@contextmanager
def no_clip(rank, run):
    """`if rank == 1: run.clip_grad_norm_()`, the wrong way round."""
    with mock.patch.object(type(run), "clip_grad_norm_", lambda *_: None):
        yield


@contextmanager
def longer(rank, run):
    """Rows that a rank pads to another length."""
    plain = type(run).forward_backward

    def doubled(run, batches):
        longer = ({n: v.repeat(1, 2) for n, v in batch.items()} for batch in batches)
        return plain(run, [*longer])

    with mock.patch.object(type(run), "forward_backward", doubled):
        yield


@contextmanager
def skips_layer(rank, run):
    """A layer that a rank passes by, as the layers of images where a batch has none."""
    import torch

    layer = run.model.model.layers[1]

    def call(module, hidden, *args, **kwargs):
        return (
            hidden if module is layer else torch.nn.Module.__call__(module, hidden, *args, **kwargs)
        )

    with mock.patch.object(type(layer), "__call__", call):
        yield


@contextmanager
def sums(rank, run):
    """Gradients that a rank sums where the others average them."""
    for module in run.model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    yield


@contextmanager
def logs(rank, run):
    """A metric that one rank alone reduces."""
    from torch import distributed, zeros

    yield
    distributed.all_reduce(zeros(1), group=run.data_mesh.get_group())


@contextmanager
def prefetches(rank, run):
    """Units of equal sizes that a rank gathers in another order."""
    layers = run.model.model.layers
    layers[0].set_modules_to_forward_prefetch([layers[1]])
    layers[0].set_modules_to_backward_prefetch([])
    run.model.model.embed_tokens.set_modules_to_forward_prefetch([layers[1]])
    yield


@contextmanager
def no_loss(rank, run):
    """The last stage leaves out the sum of the loss over the stages."""
    from torch import distributed

    plain = distributed.all_reduce

    def reduce(tensor, *args, **kwargs):
        if tensor.numel() == 1 and kwargs.get("group") is run.meshes["pp"].get_group():
            return None
        return plain(tensor, *args, **kwargs)

    with mock.patch.object(distributed, "all_reduce", reduce):
        yield


@contextmanager
def keeps_tokens(rank, run):
    """A rank without tokens for its experts leaves out what sends their results back."""
    from planc.runtime.standalone import expert_parallel

    plain, calls = expert_parallel.Exchange, []

    class Exchange:
        @staticmethod
        def apply(rows, *args):
            calls.append(rows)
            return rows if len(calls) % 3 == 0 else plain.apply(rows, *args)

    with mock.patch.object(expert_parallel, "Exchange", Exchange):
        yield


@contextmanager
def gathers_inside(rank, run):
    """A layer whose code gathers something on one rank, as `if rank == 2` in a hook."""
    import torch

    layer, group = run.model.model.layers[1].mlp, run.meshes["tp"].get_group()

    def gather(_module, args):
        value = torch.zeros(2)
        torch.distributed.all_gather_into_tensor(torch.zeros(4), value, group=group)

    handle = layer.register_forward_pre_hook(gather)
    yield
    handle.remove()


@contextmanager
def recomputes_nothing(rank, run):
    """A rank that keeps all activations: it does not gather them again in the backward pass."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    def plain(wrapper, *args, **kwargs):
        return wrapper._checkpoint_wrapped_module(*args, **kwargs)

    with mock.patch.object(checkpoint_wrapper.CheckpointWrapper, "forward", plain):
        yield


@contextmanager
def evaluates(rank, run):
    """A rank that looks at the loss of one more batch."""
    import torch

    yield
    with torch.no_grad():
        run.model(input_ids=torch.zeros((1, 64), dtype=torch.long))


@contextmanager
def sums_later(rank, run):
    """A stage that sums its loss over the stages behind the norm of the gradients, of one size."""
    from torch import distributed

    plain, waiting = distributed.all_reduce, []
    stages = run.meshes["pp"].get_group()

    def reduce(tensor, *args, **kwargs):
        if kwargs.get("group") is stages and tensor.numel() == 1 and not waiting:
            waiting.append((tensor, args, kwargs))
            return None
        return plain(tensor, *args, **kwargs)

    with mock.patch.object(distributed, "all_reduce", reduce):
        yield
    for tensor, args, kwargs in waiting:
        plain(tensor, *args, **kwargs)


@contextmanager
def prefetches_experts(rank, run):
    """A rank that gathers the experts of the next layer before those of this one."""
    layers = run.model.model.layers
    layers[0].set_modules_to_forward_prefetch([layers[1].mlp.experts])
    yield


RANKS = {
    "no_clip": {1},
    "one_clips": {0, 2, 3},
    "longer": {2},
    "skips_layer": {3},
    "sums": {1},
    "logs": {0},
    "prefetches": {1},
    "no_loss": {3},
    "keeps_tokens": {1},
    "gathers_inside": {2},
    "recomputes_nothing": {1},
    "evaluates": {3},
    "sums_later": {2, 3},
    "prefetches_experts": {1},
}
"""The ranks that have each fault."""
one_clips = no_clip


def main():
    from planc.tools.measure import one_rank

    class Rank(one_rank._Rank):
        def __init__(self, job):
            self.fault, _, digest = job.digest.partition(":")
            super().__init__(replace(job, digest=digest))

        def _step(self, run, optimizer, batches):
            has = self.job.rank in RANKS.get(self.fault, ())
            with globals()[self.fault](self, run) if has else nullcontext():
                super()._step(run, optimizer, batches)

    one_rank._Rank = Rank
    return one_rank.main()


if __name__ == "__main__":
    sys.exit(main())
