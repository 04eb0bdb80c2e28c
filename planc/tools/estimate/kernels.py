"""Seconds of kernels on one accelerator (matmuls by shape, attention, memory-bound kernels), and of
collectives: a latency by their kind, and a bandwidth for each byte.

Both depend on whether the group's ranks are in one node. A group with few ranks a node has the
share of the network that its ranks have; the groups beside it have the rest.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil, log2, sqrt

from planc.lowering.step import EXCHANGE, REDUCE, SEND
from planc.tools.estimate.profiles import EAGER, Hardware, Kernels, Stack
from planc.tools.estimate.workload import Attention, Collective, Group, Layer, Matmul

TILES = ((256, 128, 1.0), (128, 256, 1.0), (192, 128, 0.96), (128, 128, 0.9), (128, 64, 0.7))
"""Tiles that one multiprocessor computes at a time, with the share of its rate they reach: a
smaller tile reads its operands more often (CUTLASS, "Efficient GEMM in CUDA")."""

SPLIT = 1024
"""The least length of a piece of k, when tiles are too few for all multiprocessors."""


def matmul(product: Matmul, hardware: Hardware) -> float:
    """Seconds for `count` matrix products.

    The roofline of compute and memory, where compute is quantized: tiles go to multiprocessors in
    waves, and products of few tiles are split along k. The library takes the best tile. Each kernel
    adds a constant for filling and draining its pipeline. Grouped products are one kernel.
    """
    alike, kernels = (product.count, 1) if product.grouped else (1, product.count)
    kernels *= not product.joined
    shape = product.m, product.n, product.k
    compute = _quantized_flops(*shape, hardware.processors, alike) / alike
    rate = hardware.rate(product.format.recipe) if product.format else 0
    compute /= (rate or hardware.matmul_tflops) * 1e12
    factors = product.m * product.k + product.k * product.n
    bytes_moved = (1.0 if rate else 2.0) * factors + 2.0 * product.m * product.n
    memory = bytes_moved / (hardware.memory_gb_s * 1e9)
    return product.count * max(compute, memory) + kernels * hardware.kernel_us * 1e-6


@lru_cache(maxsize=65536)  # a search asks for the same products many times
def _quantized_flops(m: int, n: int, k: int, processors: int, alike: int) -> float:
    """FLOPs that all multiprocessors could do in the time that `alike` products take them."""

    def waves(rows: int, columns: int, rate: float) -> float:
        tiles = ceil(m / rows) * ceil(n / columns) * alike
        pieces = max(1, min(k // SPLIT, processors // tiles))
        count = ceil(tiles * pieces / processors)
        return 2.0 * k / pieces * rows * columns * count * processors / rate

    return min(waves(*tile) for tile in TILES)


FULL = 15
"""The ratio of the times of products in float32 and in 16 bits, without TF32, which torch leaves
off: by the data sheets of A100 (19.5 of 312 TFLOP/s) and H100 (67 of 989) 16 and 15."""


def orthogonal(rows: int, columns: int, hardware: Hardware, *, full: bool) -> float:
    """Seconds of one Newton-Schulz iteration of a matrix: X X', its square, and their product with
    X.
    """
    short, long = sorted((rows, columns))
    gram, square = Matmul(m=short, n=short, k=long), Matmul(m=short, n=short, k=short)
    products = (gram, square, Matmul(m=short, n=long, k=short))
    return sum(matmul(one, hardware) for one in products) * (FULL if full else 1)


def casts(product: Matmul, hardware: Hardware) -> tuple[float, float]:
    """Bytes that rounding moves in a product's forward and backward pass."""
    if product.format is None or not hardware.rate(product.format.recipe):
        return 0.0, 0.0
    into, again, weight, weight_again, gradient = product.format.casts
    inputs = 0 if product.joined else product.m * product.k
    weights = product.k * product.n
    forward = into * inputs + weight * weights
    backward = again * inputs + weight_again * weights + gradient * product.m * product.n
    return float(product.count * forward), float(product.count * backward)


def attention(
    part: Attention,
    hardware: Hardware,
    pace: float = 1.0,
    layer_kernels: Kernels = EAGER,
    *,
    backward: bool = False,
) -> float:
    """Seconds of a forward or backward pass of attention. A flash kernel computes the causal half,
    with a mask the whole square, as matmuls do.

    A kernel for short heads spends more of its time on the softmax (measured: 64 reaches two
    thirds of 128).

    Args:
        pace: the stack's flash kernel relative to the best one.
        layer_kernels: the profile of kernels.
    """
    if not part.fused:
        count = part.batch * part.heads
        shape = (part.queries, part.keys, part.head_dim)
        scores = Matmul(m=shape[0] * count, n=shape[1], k=shape[2])
        values = Matmul(m=shape[0] * count, n=shape[2], k=shape[1])
        return (matmul(scores, hardware) + matmul(values, hardware)) * (2 if backward else 1)
    short = sqrt(min(1.0, part.head_dim / 128))
    share = layer_kernels.attention_share or hardware.attention_fraction
    reached = hardware.matmul_tflops * share * pace * short * 1e12
    half, times = layer_kernels.attention_keys, 1.0
    if backward:
        half, times = layer_kernels.attention_backward_keys, layer_kernels.attention_backward
    seconds = part.kernel_flops / reached * (1 + half / max(1, part.keys))
    return times * (seconds + hardware.kernel_us * 1e-6)


def memory_seconds(size: float, kernels: float, hardware: Hardware) -> float:
    """Seconds of memory-bound kernels that read and write `size` bytes together."""
    return size / (hardware.memory_gb_s * 1e9) + kernels * 1.5e-6


def _product_seconds(
    product: Matmul, hardware: Hardware, stack: Stack, shape: Matmul | None = None
) -> float:
    """Seconds of a layer's products, or of the products of `shape` in its backward pass."""
    seconds = matmul(shape or product, hardware)
    if product.grouped:
        seconds *= 1 + stack.kernels.expert_rows / max(1, product.m)
    return seconds / (stack.matmul_pace * stack.kernels.matmul_pace)


def forward(layer: Layer, hardware: Hardware, stack: Stack) -> tuple[float, float, float]:
    """Seconds of matmuls, attention and memory-bound kernels of one forward."""
    products = sum(_product_seconds(m, hardware, stack) for m in layer.matmuls)
    attended = sum(
        attention(a, hardware, stack.attention_pace, stack.kernels) for a in layer.attention
    )
    rest = max(0, layer.kernels - len(layer.matmuls) - len(layer.attention))
    rounded = sum(casts(m, hardware)[0] for m in layer.matmuls)
    return products, attended, memory_seconds(layer.moved + rounded, rest, hardware)


def backward(layer: Layer, hardware: Hardware, stack: Stack) -> tuple[float, float, float]:
    """Backward: 2x the matmul FLOPs, 2.5x attention's, 2x the memory traffic."""
    products = 0.0
    for m in layer.matmuls:
        products += _product_seconds(m, hardware, stack, replace(m, n=m.k, k=m.n))
        products += _product_seconds(m, hardware, stack, replace(m, m=m.n, n=m.k, k=m.m))
    attended = sum(
        attention(a, hardware, stack.attention_pace, stack.kernels, backward=True)
        for a in layer.attention
    )
    rest = max(0, layer.kernels - len(layer.matmuls) - len(layer.attention))
    rounded = sum(casts(m, hardware)[1] for m in layer.matmuls)
    return products, attended, memory_seconds(2 * layer.moved + rounded, 2 * rest, hardware)


# Collectives -------------------------------------------------------------------------------------


def collective(each: Collective, hardware: Hardware) -> float:
    """Seconds of `count` collectives without overlap."""
    group, per_node = each.group, hardware.ranks_per_node
    if group.size == 1:
        return 0.0
    if each.kind == SEND:
        return each.count * point_to_point(each.size, group, hardware)
    if each.kind == EXCHANGE:
        return each.count * _exchange_seconds(each, hardware) + latency(each, hardware)
    reduces = each.kind == REDUCE
    node = hardware.node_reduce_gb_s if reduces else hardware.node_gb_s
    network = hardware.network_reduce_gb_s if reduces else hardware.network_gb_s
    bandwidth = node
    if group.crosses(per_node):
        bandwidth = min(node, network * group.in_node(per_node) / per_node)
    share = (group.size - 1) / group.size * (2 if reduces else 1)
    sent = each.count * each.size * share / (bandwidth * 1e9)
    return sent + latency(each, hardware)


def _exchange_seconds(each: Collective, hardware: Hardware) -> float:
    """Seconds of the messages of an all-to-all: those to other nodes cross one rank's own link."""
    inside = each.group.in_node(hardware.ranks_per_node)
    near, far = _dispatched_bytes(each, inside) if each.choices else _exchanged_bytes(each, inside)
    link = hardware.network_gb_s / hardware.ranks_per_node
    return max(near / (hardware.node_gb_s * 1e9), far / (link * 1e9))


def _exchanged_bytes(each: Collective, inside: int) -> tuple[float, float]:
    """Bytes that a rank sends in its node and to others: an equal part to each rank.

    Args:
        inside: the ranks of the group in a node.
    """
    part = each.size / each.group.size
    return part * (inside - 1), part * (each.group.size - inside)


def _dispatched_bytes(each: Collective, inside: int) -> tuple[float, float]:
    """Bytes that a rank sends in its node and to others, if each node gets a token once and passes
    it on to the ranks with its experts, which are drawn at random.
    """
    ranks, nodes, token = each.group.size, each.group.size / inside, each.size / each.choices
    reached = nodes * (1 - (1 - 1 / nodes) ** each.choices)
    if each.nodes:
        reached = min(each.nodes, reached)
    copies = ranks * (1 - (1 - 1 / ranks) ** each.choices)
    return token * copies * (inside - 1) / inside, token * reached * (nodes - 1) / nodes


def latency(each: Collective, hardware: Hardware) -> float:
    """The part that is not bandwidth: one message of a send or an all-to-all, else the steps of a
    ring, and across nodes those of a tree for an all-reduce.
    """
    group, inside = each.group, each.group.in_node(hardware.ranks_per_node)
    crosses = group.crosses(hardware.ranks_per_node)
    across = hardware.network_latency_us if crosses else hardware.node_latency_us
    if each.kind in (EXCHANGE, SEND):
        one = hardware.exchange_us if each.kind == EXCHANGE else across
        return each.count * one * 1e-6
    if not crosses:
        steps = (group.size - 1) * across
    elif each.kind == REDUCE and hardware.inner_latency_us:
        depth = log2(group.size / inside)
        steps = 2 * ((inside - 1) * hardware.inner_latency_us + depth * across)
    else:
        nodes = -(-group.size // inside)
        inner = hardware.inner_latency_us or across
        steps = (group.size - nodes) * inner + (nodes - 1) * across
    return each.count * (steps + hardware.start_us) * 1e-6


def point_to_point(size: float, group: Group, hardware: Hardware) -> float:
    """Seconds of one send of `size` bytes to the next rank of a group."""
    if not group.crosses(hardware.ranks_per_node) and group.stride < hardware.ranks_per_node:
        return size / (hardware.node_gb_s * 1e9) + hardware.node_latency_us * 1e-6
    share = hardware.network_gb_s / hardware.ranks_per_node
    return size / (share * 1e9) + hardware.network_latency_us * 1e-6
