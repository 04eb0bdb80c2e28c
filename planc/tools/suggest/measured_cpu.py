"""This machine's CPU as a hardware profile: products, memory, and gloo between two processes.

Each number is that of the fastest of some repeats: other work on the machine only slows them. This
module imports torch.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from planc.runtime.standalone.collectives import all_gather
from planc.tools.estimate.memory import GIB
from planc.tools.estimate.profiles import Hardware

SIZES = (64, 128, 256, 512, 1024)
"""Rows and columns of the products."""

LARGE = 2**24
"""The number of elements that memory and gloo move: 64 MiB in float32, more than caches hold."""

SECONDS = 600
"""The most seconds that the two processes may take, imports included."""


def profile(name: str) -> Hardware:
    """The profile, with the rate of each size of products among its sources."""
    rates = {n: _product(n) for n in SIZES}
    best, latency, gathered, reduced = max(rates.values()), *_gloo()
    small = 2.0 * SIZES[0] ** 3
    shares = ", ".join(f"{n}: {rate / best:.0%}" for n, rate in rates.items())
    source, scalar = torch.ones(LARGE), torch.ones(1)
    target = torch.empty_like(source)
    bandwidth = 8 * LARGE / _fastest(lambda: target.copy_(source))
    sent = {"gb_s": gathered, "reduce_gb_s": reduced, "latency_us": latency}
    links: dict[str, Any] = {
        f"{at}_{kind}": n for at in ("node", "network") for kind, n in sent.items()
    }
    return Hardware(
        name=name,
        ranks_per_node=max(2, os.cpu_count() or 2),
        processors=torch.get_num_threads(),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        context_gib=0.0,
        matmul_tflops=best / 1e12,
        kernel_us=max(0.0, small / rates[SIZES[0]] - small / best) * 1e6,
        attention_fraction=min(1.0, max(0.01, _attention() / best)),
        memory_gb_s=bandwidth / 1e9,
        launch_us=_fastest(lambda: scalar.add_(1), times=1000) * 1e6,
        peak_tflops=best / 1e12,
        **links,
        sources={
            "matmul_tflops": f"measured: float32, the best of {SIZES}; their shares of it {shares}",
            "kernel_us": f"measured: a product of {SIZES[0]}, above the best rate",
            "memory_gb_s": "measured: a copy of 64 MiB, read and written",
            "launch_us": "measured: an addition of one number",
            "node_gb_s": "measured: gloo's all-gather of 64 MiB on two processes",
            "node_reduce_gb_s": "measured: gloo's all-reduce of 64 MiB on two processes",
            "node_latency_us": "measured: gloo's all-reduce of one number on two processes",
            "network_gb_s": "that of the node: one machine was measured",
        },
    )


def _fastest(call: Callable[[], Any], times: int = 5) -> float:
    """Seconds of the fastest of some calls; the first does not count."""
    call()
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def _product(n: int) -> float:
    """FLOPs a second of a product of two square matrices."""
    left, right = torch.rand(n, n), torch.rand(n, n)
    return 2.0 * n**3 / _fastest(lambda: left @ right)


def _attention() -> float:
    """FLOPs a second of causal attention, which computes half of the square."""
    heads, tokens, dim = 4, 512, 64
    query = torch.rand(1, heads, tokens, dim)
    attend = torch.nn.functional.scaled_dot_product_attention
    seconds = _fastest(lambda: attend(query, query, query, is_causal=True))
    return 2.0 * heads * tokens**2 * dim / seconds


def _gloo() -> tuple[float, float, float]:
    """Microseconds of a step of a ring, and GB/s of gathers and of sums, as nccl-tests counts."""
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [context.Process(target=_rank, args=(r, store, results)) for r in range(2)]
        for process in ranks:
            process.start()
        both = [results.get(timeout=SECONDS) for _ in ranks]
        for process in ranks:
            process.join()
    step, gather, reduce = (max(times) for times in zip(*both, strict=True))
    return step * 1e6, 4 * LARGE / 2 / gather / 1e9, 4 * LARGE / reduce / 1e9


def _rank(rank: int, store: str, results: Any) -> None:
    """Seconds of an all-reduce of one number, a gather and a sum of `LARGE` ones."""
    file = distributed.FileStore(store, 2)
    distributed.init_process_group("gloo", rank=rank, world_size=2, store=file)
    scalar, many, part = torch.ones(1), torch.ones(LARGE), torch.ones(LARGE // 2)
    results.put(
        (
            _fastest(lambda: distributed.all_reduce(scalar), times=100),
            _fastest(lambda: all_gather(many, part, None)),
            _fastest(lambda: distributed.all_reduce(many)),
        )
    )
    distributed.destroy_process_group()
