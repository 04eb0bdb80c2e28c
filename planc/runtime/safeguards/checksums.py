"""Checksums of what ranks hold, and how those of several ranks differ."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from planc.diagnostics.diagnostic import one_of
from planc.runtime.standalone.shards import part_of

_CHUNK = {"cpu": 1 << 20}
"""The bytes that are hashed at once: they take twice as much memory; elsewhere 64 times as many,
for few kernels."""
MULTIPLIER = 6364136223846793005
"""The multiplier of the MMIX generator: odd, with bits in all places (Knuth, The Art of Computer
Programming, volume 2, 3.3.4)."""


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
    size = _CHUNK.get(flat.device.type, 1 << 26)
    most = min(size, flat.numel() * flat.element_size()) // 8 + 8
    places = torch.arange(most, dtype=torch.int64, device=flat.device) * MULTIPLIER | 1
    for chunk in flat.view(torch.uint8).split(size):
        whole = chunk.numel() // 8 * 8
        words = chunk[:whole] if chunk.storage_offset() % 8 == 0 else chunk[:whole].clone()
        total = total * MULTIPLIER + (words.view(torch.int64) * places[: whole // 8]).sum()
        if rest := chunk.numel() - whole:
            total = total + (chunk[whole:].to(torch.int64) * places[-8:][:rest]).sum()
    return total


def model_sums(model: nn.Module) -> dict[str, int]:
    """A checksum of what this rank has of each parameter and buffer, by name; tied ones count once.

    One that is on meta counts as such, so a rank with weights and a rank without differ.
    """
    named = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    parts = {n: part_of(t) for n, t in named.items()}
    sums = {n: tensor_sum(t) for n, t in parts.items() if plain(t)}
    kinds = {n: "meta" if t.is_meta else type(named[n]).__name__ for n, t in parts.items()}
    marks = {n: text_sum(f"{kinds[n]} {t.dtype} {tuple(t.shape)}") for n, t in named.items()}
    by_device: dict[torch.device, list[str]] = {}
    for name, total in sums.items():
        by_device.setdefault(total.device, []).append(name)
    for names in by_device.values():  # one transfer for each device
        values = torch.stack([sums[n] for n in names]).tolist()
        marks |= {n: marks[n] ^ value for n, value in zip(names, values, strict=True)}
    return marks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDifference:
    """The difference between ranks: the names of unequal values, and the ranks that agree, as
    text.
    """

    names: tuple[str, ...]
    ranks: str


def difference(
    every: Sequence[Mapping[str, object]], ranks: Iterable[int]
) -> RankDifference | None:
    """Compares hashes by name between ranks; None if all are equal.

    Args:
        every: of each rank.
        ranks: their numbers.
    """
    names = dict.fromkeys(name for own in every for name in own)
    unlike = tuple(n for n in names if len({own.get(n) for own in every}) > 1)
    if not unlike:
        return None
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, own in zip(ranks, every, strict=True):
        groups.setdefault(tuple(own.get(n) for n in unlike), []).append(rank)
    listed = [
        ", ".join(map(str, some[:6])) + (", ..." if some[6:] else "") for some in groups.values()
    ]
    return RankDifference(names=unlike, ranks=one_of(listed[:6], last="and"))
