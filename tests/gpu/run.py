"""What only a GPU shows, on one GPU: `python tests/gpu/run.py FOLDER [PARTS] [--seconds N]`.

Parts are `counted` and `measure` (one rank of a plan, on fake tensors and on the GPU), `products`
(in 8 bits), `states` (in 8 bits, on the host), `losses` and `attention` (in a ring), which run
alone, for their times, and, of ranks that share the GPU over NCCL (`shared/`), `verify`
(proofs), `saving`, `hang` and `preflight`. FOLDER gets what commands printed; a line for each is
printed. Results are added to docs/generated/gpu.json, from which gpu.md is written. The ranks that
share the GPU are faster under `nvidia-cuda-mps-control -d`: their kernels then run side by side.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from gpu_page import add_results, results_of  # noqa: E402

PLANC = (sys.executable, "-W", "ignore", "-m", "planc.cli")
RUN = (sys.executable, "-W", "ignore")
RANKS = (*RUN, *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"])
PLANS = {
    "muon": """plan muon for llama
extend "llama"
optimizer {
    root                           : adamw
    $blocks.{self_attn,mlp}.*_proj : muon
}
""",
    "states": """plan states for llama
extend "llama"
optimizer { root : adamw(state = int8, block = 16, offload = states) }
""",
    "fp8": """plan fp8 for llama
extend "llama"
matmul { $blocks.{self_attn,mlp}.*_proj : fp8(recipe = tensorwise) }
""",
    "rowwise": """plan rowwise for llama
extend "llama"
matmul { $blocks.{self_attn,mlp}.*_proj : fp8(recipe = rowwise) }
""",
    "ring": """plan ring for llama
extend "llama"
override context on cp { attention = ring }
""",
    "heads": """plan heads for llama
extend "llama"
override context on cp { attention = ulysses }
""",
    "dispatch": """plan dispatch for qwen3_moe
extend "qwen3_moe"
override expert on ep { $blocks.mlp.experts : dispatch(all_to_all) }
""",
}
"""By the names that commands below use."""
VERIFIED = {
    "tp": "llama-3.1-8b llama tp=2",
    "fsdp": "llama-3.1-8b llama",
    "tp, fsdp": "llama-3.1-8b llama tp=2 4",
    "tp, fsdp, bf16": "llama-3.1-8b llama tp=2 4 --precision",
    "replicas, fsdp": "llama-3.1-8b llama dp_replicate=2 4",
    "pp": "llama-3.1-8b llama pp=2",
    "pp, zero bubble": "llama-3.1-8b llama pp=2 schedule=zero_bubble",
    "pp, tp": "llama-3.1-8b llama pp=2 tp=2 4",
    "cp, gathered": "llama-3.1-8b llama cp=2",
    "cp, ring": "llama-3.1-8b ring.plan cp=2",
    "cp, ring, bf16": "llama-3.1-8b ring.plan cp=2 --precision",
    "cp, heads": "llama-3.1-8b heads.plan cp=2",
    "loss in chunks": "llama-3.1-8b llama tp=2 loss_chunks=4",
    "Muon": "llama-3.1-8b muon.plan tp=2 4",
    "states in 8 bits, on the host": "llama-3.1-8b states.plan tp=2 4",
    "fp8": "llama-3.1-8b fp8.plan tp=2 4",
    "fp8, rowwise": "llama-3.1-8b rowwise.plan tp=2 4",
    "dropout": "gpt2 gpt2 tp=2",
    "sliding windows": "gemma-3-1b gemma3 cp=2",
    "sinks": "gpt-oss-20b gpt_oss cp=2",
    "experts": "qwen3-30b-a3b qwen3_moe ep=2",
    "experts, dispatched": "qwen3-30b-a3b dispatch.plan ep=2",
    "experts, tp": "mixtral-8x7b mixtral ep=2 tp=2 4",
    "mla, experts": "deepseek-v3 deepseek_v3 ep=2 tp=2 4",
    "images": "qwen3-vl-8b qwen3_vl tp=2",
    "states, delta rule": "qwen3-next-80b-a3b qwen3_next cp=2",
    "states, KDA": "kimi-linear-48b-a3b kimi_linear cp=2",
    "states, Mamba 2": "nemotron-h-8b nemotron_h cp=2",
}
"""MODEL PLAN, settings, the number of processes (2) and other options."""
MEASURED = {
    "llama 8b, dp 8": "llama-3.1-8b llama --world-size 8 --batch 8 --seq 4096",
    "llama 8b, tp 8": "llama-3.1-8b llama --world-size 8 --set tp=8 --batch 8 --seq 4096",
    "llama 8b, cp 2": "llama-3.1-8b llama --world-size 16 --set cp=2 --batch 8 --seq 8192",
    "llama 8b, ring": "llama-3.1-8b ring.plan --world-size 16 --set cp=2 --batch 8 --seq 8192",
    "llama 8b, pp 4": "llama-3.1-8b llama --world-size 16 --set pp=4 --batch 32 --seq 4096",
    "llama 8b, whole": "llama-3.1-8b llama --world-size 16 --set recompute=false --batch 16 --seq 2048",  # noqa: E501
    "llama 70b, tp 8": "llama-3.1-70b llama --world-size 64 --set tp=8 --batch 8 --seq 8192",
    "qwen3 30b, ep 8": "qwen3-30b-a3b qwen3_moe --world-size 16 --set ep=8 --batch 16 --seq 4096",
    "mixtral, ep 8": "mixtral-8x7b mixtral --world-size 32 --set ep=8 --batch 32 --seq 4096",
    "gemma 3 1b": "gemma-3-1b gemma3 --world-size 8 --batch 8 --seq 4096",
    "llama 1b, chunks": "llama-3.2-1b llama --world-size 8 --set loss_chunks=8 --batch 16 --seq 4096",  # noqa: E501
    "llama 8b, Muon": "llama-3.1-8b muon.plan --world-size 8 --set tp=2 --batch 8 --seq 4096",
    "llama 1b, 8 bits": "llama-3.2-1b states.plan --world-size 8 --batch 8 --seq 4096",
}


@dataclass(frozen=True)
class Part:
    name: str
    kind: str
    command: tuple[str, ...]
    seconds: float
    shared: bool = False


def verified(words: str) -> tuple[str, ...]:
    model, plan, *rest = words.split()
    settings = [word for pair in rest if "=" in pair for word in ("--set", pair)]
    ranks = next((word for word in rest if word.isdigit()), "2")
    options = [word for word in rest if word.startswith("--")]
    size = ["--world-size", ranks, "--processes", ranks, "--timeout", "150"]
    return (*PLANC, "verify", model, plan, *size, *settings, *options)


def parts(kind: str, folder: Path) -> Iterable[Part]:
    if kind == "counted":
        for name, words in MEASURED.items():
            yield Part(f"{name}, counted", kind, (*PLANC, "measure", *words.split()), 120)
    elif kind == "measure":
        for name, words in MEASURED.items():
            there = (*PLANC, "measure", *words.split(), "--device", "cuda")
            yield Part(name, kind, (*there, "-o", "rows.csv"), 120)
    elif kind in ("products", "states"):
        yield Part(kind, kind, (*RUN, str(HERE / "training.py"), kind), 200)
    elif kind in ("losses", "attention"):
        yield Part(kind, kind, (*RUN, str(HERE / f"{kind}.py")), 120)
    elif kind == "verify":
        for name, words in VERIFIED.items():
            yield Part(name, kind, verified(words), 170, shared=True)
    elif kind == "hang":
        script = str(ROOT / "tests/tools/order/hanging.py")
        for fault in ("clip", "crossed", "killed"):
            there = folder / f"hang-{fault}"
            there.mkdir(exist_ok=True)
            command = (*RUN, script, fault, str(there), "cuda")
            yield Part(f"hang, {fault}", kind, command, 60, shared=True)
    elif kind == "preflight":
        job = "-m planc.cli preflight llama-3.1-8b llama --world-size 4 --set tp=2"
        yield Part(kind, kind, (*RANKS, *job.split()), 90, shared=True)
    elif kind == "saving":
        yield Part(kind, kind, (*RANKS, str(HERE / "saving.py"), "."), 90, shared=True)


def run(part: Part, folder: Path, until: float) -> dict[str, Any]:
    began = time.monotonic()
    left = min(part.seconds, until - began)
    if left < 5:
        return {"part": part.name, "code": "not run: no time left"}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE / "shared"), *paths] if part.shared else paths)
    log = folder / f"{part.name.replace(', ', '-').replace(' ', '_')}.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            part.command, stdout=out, stderr=out, cwd=folder, env=env, start_new_session=True
        )
        try:
            code: object = process.wait(left)
        except subprocess.TimeoutExpired:
            code = "out of time"
        finally:
            subprocess.run(["pkill", "-9", "-s", str(process.pid)], check=False)
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    said = {"part": part.name, "code": code, "seconds": round(time.monotonic() - began, 1)}
    command = " ".join(part.command).replace(" ".join(PLANC), "planc")
    if code == 0:
        results = results_of(part.name, part.kind, text, folder, command)
    else:
        results = {part.name: {"result": f"failed, exit code {code}"}}
    return {**said, "last": lines[-1:], "log": log.name, "results": results}


def machine() -> str:
    """The GPU, and the versions of torch and transformers."""
    text = "import torch, transformers as t; print(torch.cuda.get_device_name(), "
    text += "f'torch {torch.__version__}', f'transformers {t.__version__}', sep=', ')"
    return subprocess.run([*RUN, "-c", text], capture_output=True, text=True, check=True).stdout[
        :-1
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    kinds = [
        "counted",
        "measure",
        "products",
        "states",
        "losses",
        "attention",
        "saving",
        "preflight",
        "hang",
        "verify",
    ]
    parser.add_argument("parts", nargs="*", default=kinds)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--at-once", type=int, default=3, help="proofs beside each other")
    parser.add_argument("--timed-at-once", type=int, default=1, help="where times do not matter")
    parser.add_argument("--names", nargs="*", default=[""], help="parts of the names of parts")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in PLANS.items():
        (folder / f"{name}.plan").write_text(text)
    results: dict[str, object] = {}
    until = time.monotonic() + given.seconds
    every = [
        part
        for kind in given.parts
        for part in parts(kind, folder)
        if any(name in part.name for name in given.names)
    ]
    for count, shared in ((given.timed_at_once, False), (given.at_once, True)):
        with ThreadPoolExecutor(count) as pool:
            those = [part for part in every if part.shared == shared]
            for found in pool.map(lambda part: run(part, folder, until), those):
                results |= found.pop("results", {})
                print(json.dumps(found), flush=True)
    add_results(machine(), results)


if __name__ == "__main__":
    main()
