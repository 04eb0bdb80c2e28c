"""Weights that a checkpoint stores in 8 or 4 bits with scales, read as plain ones.

Each rank reads the slices of its shard and the scales of the blocks that these touch.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from planc.runtime.standalone.safetensors_files import StoredTensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32  # values that share an exponent in mxfp4
SUFFIXES = {"fp8": ("", "_scale_inv"), "mxfp4": ("_blocks", "_scales")}


class BlockScaled(StoredTensor):
    """A matrix in fp8 with one factor for each square block, as DeepSeek-V3 stores it.

    Source: `weight_scale_inv` of transformers' `Fp8Dequantize`; the last block of a dim
    may be smaller, as the kernels of DeepSeek-V3 have it.
    """

    def __init__(
        self, values: StoredTensor, scales: StoredTensor, blocks: Sequence[int]
    ) -> None:
        super().__init__(values.file, values.name, values.shape, "F32")
        self.scales = scales
        self.blocks = tuple(blocks)

    def part(self, opened: Any, where: Sequence[slice]) -> Tensor:
        values = super().part(opened, where).float()
        touched = [
            slice(s.start // size, -(-s.stop // size))
            for s, size in zip(where, self.blocks, strict=True)
        ]
        scales = block_of(self.scales, touched)
        byte = scales.dtype == torch.uint8  # an exponent, as in mxfp8
        scales = torch.exp2(scales.float() - 127) if byte else scales.float()
        for dim, (s, size) in enumerate(zip(where, self.blocks, strict=True)):
            start = s.start - s.start // size * size
            scales = scales.repeat_interleave(size, dim).narrow(
                dim, start, s.stop - s.start
            )
        return values * scales


class Mxfp4(StoredTensor):
    """Experts in 4 bits with an exponent for 32 values, as gpt_oss stores them.

    The files have [experts, out, in / 32, 16] bytes of two values each, the lower half
    of a byte first, and [experts, out, in / 32] exponents; the model has
    [experts, in, out].

    Source: `convert_moe_packed_tensors` of transformers.
    """

    def __init__(self, name: str, values: StoredTensor, scales: StoredTensor) -> None:
        experts, out, groups = scales.shape
        shape = (experts, groups * GROUP, out)
        super().__init__(values.file, name, shape, "F32")
        self.values = values
        self.scales = scales

    def part(self, opened: Any, where: Sequence[slice]) -> Tensor:
        experts, inner, out = where
        groups = slice(inner.start // GROUP, -(-inner.stop // GROUP))
        packed = self.values.part(opened, (experts, out, groups, slice(None)))
        exponents = block_of(self.scales, (experts, out, groups))
        table = torch.tensor([*FP4, *(-value for value in FP4)])
        pairs = torch.stack(
            (table[(packed & 15).int()], table[(packed >> 4).int()]), -1
        )
        scaled = torch.ldexp(pairs.flatten(-2), exponents.int().unsqueeze(-1) - 127)
        start = inner.start - groups.start * GROUP
        rows = scaled.flatten(-2).narrow(2, start, inner.stop - inner.start)
        return rows.transpose(1, 2)


def block_of(stored: StoredTensor, where: Sequence[slice]) -> Tensor:
    """A block of a tensor from its file, which is opened for it."""
    with safe_open(stored.file, framework="pt") as opened:
        return stored.part(opened, where)


def quantized_weights(
    stored: Mapping[str, StoredTensor], how: str
) -> Iterator[tuple[str, str, str]]:
    """Yields the name of each quantized weight, and those of its values and scales."""
    values, scales = SUFFIXES[how]
    for key in stored:
        name = key.removesuffix(scales)
        if name != key and name + values in stored:
            yield name, name + values, key


def dequantize(
    stored: Mapping[str, StoredTensor],
    problems: list[str],
    how: str,
    block: Sequence[int],
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, those that are quantized as plain ones.

    Args:
        stored: the tensors of its files by name.
        problems: receives scales whose shape is not that of the blocks.
        how: `fp8` or `mxfp4`.
        block: rows and columns of a block of fp8.
    """
    out = dict(stored)
    for name, values, scales in quantized_weights(stored, how):
        weight, factor = out.pop(values), out.pop(scales)
        if how == "mxfp4":
            groups = (*factor.shape, GROUP // 2)
            fits = weight.shape == groups and len(groups) == 4
        else:
            sizes = zip(weight.shape, block, strict=False)
            fits = factor.shape == tuple(-(-size // by) for size, by in sizes)
        if not fits:
            problems.append(
                f"{scales} is {list(factor.shape)}, which is not one for each block of "
                f"{values}, {list(weight.shape)}"
            )
        elif how == "mxfp4":
            out[name] = Mxfp4(name, weight, factor)
        else:
            out[name] = BlockScaled(weight, factor, block)
    return out
