"""Weights that a checkpoint stores in 8 or 4 bits with scales, read as plain ones.

Each rank reads the slices of its shard and the scales of the blocks that these touch.
Emitted scripts inline these definitions without their types.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from planc.runtime.standalone.safetensors_files import StoredTensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32  # values that share an exponent in mxfp4


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
        values = opened.get_slice(self.name)[tuple(where)].float()
        touched = [
            slice(s.start // size, -(-s.stop // size))
            for s, size in zip(where, self.blocks, strict=True)
        ]
        with safe_open(self.scales.file, framework="pt") as other:
            scales = other.get_slice(self.scales.name)[tuple(touched)]
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
        packed = opened.get_slice(self.values.name)[experts, out, groups, :]
        with safe_open(self.scales.file, framework="pt") as other:
            exponents = other.get_slice(self.scales.name)[experts, out, groups]
        table = torch.tensor([*FP4, *(-value for value in FP4)])
        pairs = torch.stack(
            (table[(packed & 15).int()], table[(packed >> 4).int()]), -1
        )
        scaled = torch.ldexp(pairs.flatten(-2), exponents.int().unsqueeze(-1) - 127)
        start = inner.start - groups.start * GROUP
        rows = scaled.flatten(-2).narrow(2, start, inner.stop - inner.start)
        return rows.transpose(1, 2)


def dequantized(
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
    values, scales = ("", "_scale_inv") if how == "fp8" else ("_blocks", "_scales")
    out = dict(stored)
    for key in stored:
        name = key.removesuffix(scales)
        if name == key or name + values not in stored:
            continue
        weight, factor = out.pop(name + values), out.pop(key)
        if how == "mxfp4":
            fits = weight.shape == (*factor.shape, GROUP // 2)
        else:
            sizes = zip(weight.shape, block, strict=False)
            fits = factor.shape == tuple(-(-size // by) for size, by in sizes)
        if not fits:
            problems.append(
                f"{key} is {list(factor.shape)}, which is not one for each block of "
                f"{name + values}, {list(weight.shape)}"
            )
            continue
        made = Mxfp4(name, weight, factor) if how == "mxfp4" else None
        out[name] = made or BlockScaled(weight, factor, block)
    return out
