"""Published results beside the estimate of the same setting."""

from dataclasses import replace

import measured_steps
from decoder import KERNELS, Decoder, Run, workload
from measured_tables import hardware, stack

from planc.tools.estimate.memory import GIB
from planc.tools.estimate.step import estimate
from planc.tools.estimate.workload import ElementSizes, Recompute, Sharding

LLAMA = {
    "8B": Decoder(
        layers=32, hidden=4096, heads=32, ffn=14336, vocabulary=128256, key_value_heads=8
    ),
    "70B": Decoder(
        layers=80, hidden=8192, heads=64, ffn=28672, vocabulary=128256, key_value_heads=8
    ),
    "405B": Decoder(
        layers=126, hidden=16384, heads=128, ffn=53248, vocabulary=128256, key_value_heads=8
    ),
}
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
OLD_TITAN = "torchtitan, docs/performance.md of 2024"
HERD = "The Llama 3 Herd of Models, table 4"
META = dict(
    tensor=8,
    pipeline=16,
    micro_batch=1,
    sharding=Sharding.OPTIMIZER,
    precision=ElementSizes(rest=2, compute=2, reduce=4, states=12),
    schedule="interleaved_1f1b",
    chunks=8,
)
FULL = Recompute.FULL
FORMULA = (
    # source, model, hardware, stack, run, tokens/s/GPU, TFLOPS
    (OLD_TITAN, "70B", "a100-8x", "torch", dict(data=64, sequence=8192, recompute=FULL), 331, 0),
    (
        OLD_TITAN,
        "405B",
        "h100-8x",
        "torch",
        dict(data=16, tensor=8, micro_batch=2, sequence=8192, recompute=FULL),
        109,
        0,
    ),
    (
        HERD,
        "405B",
        "h100-8x",
        "megatron",
        META | dict(data=64, micro_batches=32, sequence=8192),
        0,
        430,
    ),
    (
        HERD,
        "405B",
        "h100-8x",
        "megatron",
        META | dict(data=128, micro_batches=16, sequence=8192),
        0,
        400,
    ),
    (
        HERD,
        "405B",
        "h100-8x",
        "megatron",
        META | dict(data=8, context=16, micro_batches=16, sequence=131072),
        0,
        380,
    ),
)
"""Settings that a plan cannot say yet, or that differ from what transformers' layers keep."""

PLANS = (
    # source, hardware, GPUs, rows of a GPU, tokens/s/GPU, GiB
    (TITAN, "h100-8x", 8, 2, 5762, 82.4),
    (TITAN, "h100-8x", 128, 2, 5605, 67.0),
    (OLD_TITAN, "a100-8x", 64, 1, 2973, 0),
)
"""Llama 3 8B under FSDP2 with selective checkpointing, estimated through a plan."""


def titan_machine(name):
    """torchtitan's H100s have 2.4 TB/s of HBM2e in place of 3.35."""
    found = hardware(name)
    return replace(found, memory_gb_s=found.memory_gb_s * 2.4 / 3.35) if name[0] == "h" else found


def compared():
    """(source, model, ranks, what, published, estimated) of each number."""
    for source, machine, ranks, rows, tokens, gib in PLANS:
        row = dict(model="llama-8b", layers=32, batch=rows, seq=8192, attn="sdpa", mode="fsdp")
        row["ac"] = "selective"
        profile = titan_machine(machine)
        found = measured_steps.estimated(row, profile, stack("torch"), world_size=ranks)
        yield source, "8B", ranks, "tokens/s", tokens, found.time.tokens_per_second
        if gib:
            yield source, "8B", ranks, "GiB", gib, found.fullest.peak / GIB
    for source, name, machine, software, settings, tokens, tflops in FORMULA:
        own, kernels = stack(software), KERNELS[software]
        if source == HERD:  # Meta's kernels: flash attention, as the paper says
            kernels = replace(kernels, fused_attention=True)
        work = workload(LLAMA[name], Run(**settings), own, kernels)
        found = estimate(work, hardware(machine), own)
        if tokens:
            rate = found.time.tokens_per_second
            yield source, name, work.ranks, "tokens/s", tokens, rate
        else:
            reached = found.time.mfu * hardware(machine).peak_tflops
            yield source, name, work.ranks, "TFLOPS", tflops, reached


def judge():
    print("\n## Published results\n")
    print("| source | model | GPUs | what | published | estimated | error |\n" + "| --- " * 7 + "|")
    for source, name, ranks, what, published, found in compared():
        print(
            f"| {source} | {name} | {ranks:,} | {what} | {published:g} | {found:.4g} "
            f"| {found / published - 1:+.0%} |"
        )
