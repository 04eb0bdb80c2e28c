"""Seconds of kernels on one accelerator: matmuls by shape, attention, memory-bound kernels."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, sqrt

from planc.estimate.profiles import Hardware, Stack
from planc.estimate.workload import Attention, Layer, Matmul

TILES = ((256, 128, 1.0), (128, 256, 1.0), (192, 128, 0.96), (128, 128, 0.9), (128, 64, 0.7))
"""Tiles that one multiprocessor computes at a time, with the share of its rate they reach: a
smaller tile reads its operands more often (CUTLASS, "Efficient GEMM in CUDA")."""

SPLIT = 1024
"""How long a piece of k is at least, when tiles are too few for all multiprocessors."""


def matmul(product: Matmul, hardware: Hardware) -> float:
    """Of `count` products.

    The roofline of compute and memory, where compute is quantized: tiles go to multiprocessors in
    waves, and products of few tiles are split along k. The library takes the best tile. Each kernel
    adds a constant for filling and draining its pipeline.
    """
    compute = _quantized(product.m, product.n, product.k, hardware.processors)
    compute /= hardware.matmul_tflops * 1e12
    bytes_moved = 2.0 * (product.m * product.k + product.k * product.n + product.m * product.n)
    memory = bytes_moved / (hardware.memory_gb_s * 1e9)
    return product.count * (max(compute, memory) + hardware.kernel_us * 1e-6)


@lru_cache(maxsize=65536)  # a search asks for the same products many times
def _quantized(m: int, n: int, k: int, processors: int) -> float:
    """FLOPs that all multiprocessors could do in the time that a product takes them."""

    def waves(rows: int, columns: int, rate: float) -> float:
        tiles = ceil(m / rows) * ceil(n / columns)
        pieces = max(1, min(k // SPLIT, processors // tiles))
        count = ceil(tiles * pieces / processors)
        return 2.0 * k / pieces * rows * columns * count * processors / rate

    return min(waves(*tile) for tile in TILES)


def attention(part: Attention, hardware: Hardware, pace: float = 1.0) -> float:
    """Of one forward; a flash kernel computes the causal half, with a mask the whole square, as
    matmuls do.

    A kernel for short heads spends more of its time on the softmax (measured: 64 reaches two
    thirds of 128).

    Args:
        pace: the stack's flash kernel relative to the best one.
    """
    if not part.fused:
        count = part.batch * part.heads
        shape = (part.queries, part.keys, part.head_dim)
        scores = Matmul(m=shape[0] * count, n=shape[1], k=shape[2])
        values = Matmul(m=shape[0] * count, n=shape[2], k=shape[1])
        return matmul(scores, hardware) + matmul(values, hardware)
    short = sqrt(min(1.0, part.head_dim / 128))
    reached = hardware.matmul_tflops * hardware.attention_fraction * pace * short * 1e12
    return (
        part.flops / (1 if part.masked or part.linear else 2) / reached + hardware.kernel_us * 1e-6
    )


def moved(size: float, kernels: float, hardware: Hardware) -> float:
    """Of memory-bound kernels that read and write `size` bytes together."""
    return size / (hardware.memory_gb_s * 1e9) + kernels * 1.5e-6


def forward(layer: Layer, hardware: Hardware, stack: Stack) -> tuple[float, float, float]:
    """Seconds of matmuls, attention and memory-bound kernels of one forward."""
    products = sum(matmul(m, hardware) for m in layer.matmuls) / stack.matmul_pace
    attended = sum(attention(a, hardware, stack.attention_pace) for a in layer.attention)
    rest = max(0, layer.kernels - len(layer.matmuls) - len(layer.attention))
    return products, attended, moved(layer.moved, rest, hardware)


def backward(layer: Layer, hardware: Hardware, stack: Stack) -> tuple[float, float, float]:
    """The same of one backward: two products for each, attention's five for two, two passes."""
    products = 0.0
    for m in layer.matmuls:
        products += matmul(Matmul(m=m.m, n=m.k, k=m.n, count=m.count), hardware)
        products += matmul(Matmul(m=m.n, n=m.k, k=m.m, count=m.count), hardware)
    products /= stack.matmul_pace
    attended = sum(
        attention(a, hardware, stack.attention_pace) * (3 if a.fused else 2)
        for a in layer.attention
    )
    rest = max(0, layer.kernels - len(layer.matmuls) - len(layer.attention))
    return products, attended, moved(2 * layer.moved, 2 * rest, hardware)
