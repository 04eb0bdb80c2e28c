"""The weights that ranks have built, compared before the plan distributes them.

Each rank keeps its part of what it has built itself. Where the ranks have built different weights,
from another seed, the parts are of different models: copies are never equal again, and shards do
not belong together.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from planc.diagnostic import PlanError, one_of
from planc.ops.load import Load
from planc.ops.lowered import Lowered
from planc.runtime.preconditions import of_all_ranks, stop
from planc.runtime.script_line import script_line

_log = logging.getLogger("planc")

_CHUNK = 1 << 20
"""The bytes that are hashed at once: they take twice as much memory."""
_MULTIPLIER = 6364136223846793005
"""Of the MMIX generator: odd, with bits in all places (Knuth, The Art of Computer Programming,
volume 2, 3.3.4)."""


def text_sum(text: str) -> int:
    """A text as an int64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], signed=True)


def plain(tensor: Tensor) -> bool:
    """Whether the tensor has bytes of its own here: not on meta, no subclass such as DTensor."""
    own = type(tensor) in (Tensor, nn.Parameter)
    return own and not tensor.is_meta and tensor.layout is torch.strided


@torch.no_grad()  # type: ignore[untyped-decorator]
def tensor_sum(tensor: Tensor) -> Tensor:
    """A checksum of the bytes of a plain tensor, in order: a scalar of int64 on its device.

    Each word is multiplied by an odd number that depends on its place, modulo 2 ** 64, so values
    that change places change the sum. Nothing waits for the device.
    """
    data = tensor.detach()
    flat = (torch.view_as_real(data) if data.is_complex() else data).contiguous().view(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    most = min(_CHUNK, flat.numel() * flat.element_size()) // 8 + 8
    places = torch.arange(most, dtype=torch.int64, device=flat.device) * _MULTIPLIER | 1
    for chunk in flat.view(torch.uint8).split(_CHUNK):
        whole = chunk.numel() // 8 * 8
        words = chunk[:whole] if chunk.storage_offset() % 8 == 0 else chunk[:whole].clone()
        total = total * _MULTIPLIER + (words.view(torch.int64) * places[: whole // 8]).sum()
        if rest := chunk.numel() - whole:
            total = total + (chunk[whole:].to(torch.int64) * places[-8:][:rest]).sum()
    return total


def model_sums(model: nn.Module) -> dict[str, int]:
    """A checksum of each parameter and buffer by name; tied ones count once.

    One that is on meta counts as such, so a rank with weights and a rank without differ.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    sums = {n: tensor_sum(t) for n, t in named if plain(t)}
    kinds = {n: "meta" if t.is_meta else type(t).__name__ for n, t in named}
    marks = {n: text_sum(f"{kinds[n]} {t.dtype} {tuple(t.shape)}") for n, t in named}
    by_device: dict[torch.device, list[str]] = {}
    for name, total in sums.items():
        by_device.setdefault(total.device, []).append(name)
    for names in by_device.values():  # one transfer for each device
        values = torch.stack([sums[n] for n in names]).tolist()
        marks |= {n: marks[n] ^ value for n, value in zip(names, values, strict=True)}
    return marks


@dataclass(frozen=True, slots=True)
class WeightSums:
    """Checksums of what a rank has built, by name and in total; whether some of it is on meta."""

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
) -> PlanError | None:
    """PL484 if the ranks (`totals`) have different weights, to be raised unless weights are loaded;
    a collective then, and a warning on rank 0. Under `load { weights = rank0 }` rank 0 gives all
    its own, and they are equal.
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
    listed = one_of((", ".join(map(str, some[:6])) for some in groups[:6]), last="and")
    many = sum(len({sums.get(n) for sums in every}) > 1 for n in every[0])
    error = stop(
        "PL484",
        f"the ranks {listed} have built different weights: {name} is the first of {many:,} that "
        "differ, and nothing has loaded others",
        *script_line("the model is different before this line"),
        help="call `run.load(folder)`, or `torch.manual_seed` with the same seed on every rank "
        "before the model is built, or say `load { weights = rank0 }` in the plan",
    )
    if distributed.get_rank() == 0:
        told = error.diagnostics[0].message
        _log.warning("%s; `run.load` is to replace them before the first pass", told)
    return error


@torch.no_grad()  # type: ignore[untyped-decorator]
def _send(model: nn.Module, device: str) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        if plain(tensor):
            sent = tensor.detach().to(device).contiguous()
            distributed.broadcast(sent, 0)
            tensor.copy_(sent)
