"""The weights that ranks have built, compared before the plan distributes them.

Each rank keeps its part of what it has built itself. Where the ranks have built different weights,
from another seed, the parts are of different models: copies are never equal again, and shards do
not belong together.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed, nn

from planc.diagnostic import Diagnostic, one_of
from planc.ops.load import Load
from planc.ops.lowered import Lowered
from planc.runtime.checksums import model_sums, plain
from planc.runtime.preconditions import of_all_ranks, problem


@dataclass(frozen=True, slots=True)
class WeightSums:
    """What one rank has built.

    Args:
        by_name: a checksum of each parameter and buffer.
        total: of them all.
        meta: whether one of them is on meta.
    """

    by_name: dict[str, int]
    total: str
    meta: bool


def weight_sums(model: nn.Module) -> WeightSums:
    """The checksums of a model that is not parallel yet."""
    found = model_sums(model)
    total = hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()
    meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return WeightSums(found, total, meta)


def unequal(
    model: nn.Module, lowered: Lowered, own: WeightSums, totals: Sequence[str], device: str
) -> Diagnostic | None:
    """Whether the ranks have different weights; a collective if they have.

    Under a plan with `load { weights = rank0 }` the others get those of rank 0.

    Args:
        model: not parallel yet.
        own: of this rank.
        totals: of all ranks.
        device: the type of the device on which ranks communicate.

    Returns:
        PL484, to be raised unless weights are loaded before the first forward pass; None if the
        weights are equal now.
    """
    if len(set(totals)) == 1:
        return None
    built = of_all_ranks(own)
    sent = any(isinstance(op, Load) and op.weights == "rank0" for op in lowered.ops)
    if sent and not any(sums.meta for sums in built):
        _send(model, device)
        return None
    every = [sums.by_name for sums in built]
    name = next(n for n in every[0] if len({sums.get(n) for sums in every}) > 1)
    values = [sums.get(name) for sums in every]
    groups = [[r for r, v in enumerate(values) if v == value] for value in dict.fromkeys(values)]
    told = one_of((", ".join(map(str, some[:6])) for some in groups[:6]), last="and")
    many = sum(len({sums.get(n) for sums in every}) > 1 for n in every[0])
    return problem(
        "PL484",
        f"the ranks {told} have built different weights: {name} is the first of {many:,} that "
        "differ, and nothing has loaded others",
        help="call `run.load(folder)`, or `torch.manual_seed` with the same seed on every rank "
        "before the model is built, or say `load { weights = rank0 }` in the plan",
    )


@torch.no_grad()  # type: ignore[untyped-decorator]
def _send(model: nn.Module, device: str) -> None:
    """Rank 0 sends each parameter and buffer to all others."""
    for tensor in (*model.parameters(), *model.buffers()):
        if plain(tensor):
            sent = tensor.detach().to(device).contiguous()
            distributed.broadcast(sent, 0)
            tensor.copy_(sent)
