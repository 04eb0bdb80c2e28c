"""The steps of h100.json and h200.json beside the estimate of the same plans.

The estimate goes the way of `planc estimate`. No constant was fitted to h200.json.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from measured_tables import DATA, accelerator, hardware, runner, stack

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.simulate.rank_job import RankStep
from planc.tools.estimate.answer import Request, answer
from planc.tools.estimate.from_plan import Batch, PlanWork
from planc.tools.estimate.kept_tensors import count
from planc.tools.estimate.kernels import matmul
from planc.tools.estimate.memory import GIB
from planc.tools.estimate.step import estimate
from planc.tools.estimate.workload import Matmul
from planc.tools.measure.count import count as run_ranks

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 32}
_QWEN_MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MODELS = {
    "llama-8b": _LLAMA
    | dict(hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, vocab_size=128256),
    "llama-1b": _LLAMA
    | dict(hidden_size=2048, intermediate_size=8192, num_key_value_heads=8, vocab_size=128256)
    | {"tie_word_embeddings": True},
    "llama-3.6b": _LLAMA
    | dict(hidden_size=3072, intermediate_size=8192, num_key_value_heads=32, vocab_size=131072)
    | {"tie_word_embeddings": True},
    "qwen3-4b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    | dict(n_embd=768, n_head=12, vocab_size=50257, n_positions=1024),
    "gpt2-xl": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    | dict(n_embd=1600, n_head=25, vocab_size=50257, n_positions=1024),
    "qwen3-moe-30b": _QWEN_MOE,
    "mixtral": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    | dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32)
    | dict(num_key_value_heads=8, vocab_size=32000),
}
PLAN = """plan measured for {family}

let block = {block}.*

mesh {{
    dp = auto
}}
{checkpoint}{fsdp}"""
CHECKPOINT = {
    "none": "",
    "full": "\ncheckpoint {\n    $block : full\n}\n",
    "selective": "\ncheckpoint {\n    $block : ops(save = [attention, matmul(every = 2)])\n}\n",
}
FSDP = """
fsdp on dp {
    precision(param = bf16, reduce = fp32)
    $block : unit
    root   : unit(reshard = never)
}
"""


def written(row, folder):
    """A model's folder and a plan that make the same calls as the measured step."""
    config = MODELS[row["model"]] | {"dtype": "float32" if row["mode"] == "fsdp" else "bfloat16"}
    config["n_layer" if row["model"].startswith("gpt2") else "num_hidden_layers"] = row["layers"]
    (folder / "config.json").write_text(json.dumps(config))
    plan = folder / "measured.plan"
    plan.write_text(
        PLAN.format(
            family=config["model_type"],
            block="transformer.h" if row["model"].startswith("gpt2") else "model.layers",
            checkpoint=CHECKPOINT[row["ac"]],
            fsdp=FSDP if row["mode"] == "fsdp" else "",
        )
    )
    return str(folder), str(plan)


def compiled_row(row, world_size=1):
    sink = Sink()
    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_plan(*written(row, Path(folder)), sink, world_size=world_size)
    assert compiled.applied, sink.diagnostics
    return compiled


def counted_row(row):
    """Bytes of the peak of a rank that is run."""
    step = RankStep(
        rows=row["batch"],
        tokens=row["seq"],
        micro_batches=1,
        dtype="float32" if row["mode"] == "fsdp" else "bfloat16",
        attention=row["attn"],
    )
    return run_ranks(compiled_row(row), step, runner())[0].peak


def estimated(row, machine, software, world_size=1):
    sink, (plan, facts) = Sink(), compiled_row(row, world_size).applied
    work = PlanWork(
        plan,
        replace(facts, built=True),  # the measured script steps what `from_config` gives
        Batch(global_batch=row["batch"] * world_size, sequence=row["seq"]),
        software,
    )
    counted = count(facts, sink, work.micro_batch, attention=row["attn"])
    assert counted, sink.diagnostics
    return estimate(work.workload(counted), machine, software)


LAUNCH_US = 50
"""Of the virtual machines that h100.json and h200.json were measured on: llama-1b without FSDP, 16
layers of 38 operators, takes 91 ms forward and backward, whatever the tokens."""


def choices():
    """Steps of one model on one H100 that differ by what a plan can choose."""
    return json.loads((DATA / "h100_choices.json").read_text())


CHOICE = """plan choice for llama

mesh {{
    dp = auto
}}

checkpoint {{
    model.layers.* : {checkpoint}
}}

fsdp on dp {{
    precision(param = bf16, reduce = fp32)
    model.layers.* : unit(reshard = {reshard})
    root           : unit(reshard = never)
}}
"""
CHUNKED = "\nloss {{\n    lm_head : cross_entropy(chunks = {chunks})\n}}\n"


def chosen(row, folder):
    """The estimate of a row of `choices`: four layers of llama 8B, 8,192 tokens a micro-batch."""
    config = MODELS["llama-8b"] | {"dtype": "float32", "num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(config))
    row = {"reshard": "always", "micro": 1} | row
    text = (CHOICE + CHUNKED * ("chunks" in row)).format(**row)
    (folder / "choice.plan").write_text(text)
    sink = Sink()
    compiled = compile_plan(str(folder), str(folder / "choice.plan"), sink, world_size=1)
    batch = Batch(global_batch=row["micro"], sequence=8192, micro_batches=row["micro"])
    found = answer(*compiled.applied, Request(batch=batch), sink)
    profile = replace(hardware("h100-8x"), launch_us=25)
    return estimate(found.work, profile, stack("torch"))


def machine(name):
    return replace(hardware(f"{name}-8x"), launch_us=LAUNCH_US)


def judge(name):
    profile, software = machine(name), stack("torch")
    found = list(matmul_errors(name, profile))
    print(f"\n## {name}.json: one {name.upper()}, torch 2.11, transformers 5.17\n")
    print(f"- {len(found)} matmuls of over 0.05 ms: time error median {median(found):.1%}\n")
    print("| model | layers | batch | mode | GiB measured | counted | estimated ", end="")
    print("| ms measured | estimated |\n" + "| --- " * 9 + "|")
    memory, time = [], []
    for row in accelerator(name)["steps"]:
        if "error" in row or row["adam"] == "fused":
            continue
        step = estimated(row, profile, software)
        gib, ms = step.fullest.peak / GIB, step.time.seconds * 1e3
        memory.append(abs(gib / row["peak"][1] - 1))
        time.append(abs(ms / row["step_ms"] - 1))
        how = ", ".join(
            w for w in (row["mode"], row["attn"], row["ac"]) if w not in ("sdpa", "none")
        )
        print(
            f"| {row['model']} | {row['layers']} | {row['batch']} x {row['seq']} | {how} "
            f"| {row['peak'][1]:.2f} | {counted_row(row) / GIB:.2f} | {gib:.2f} "
            f"| {row['step_ms']:.0f} | {ms:.0f} |"
        )
    print(
        f"\n- memory error median {median(memory):.1%}, worst {max(memory):.1%}; "
        f"time error median {median(time):.1%}, worst {max(time):.1%}"
    )


def matmul_errors(name, profile):
    """Relative errors of the three products of a linear layer; below 0.05 ms the CPU was timed."""
    for m, n, k, *measured in accelerator(name)["gemm_bf16_ms_forward_dgrad_wgrad"]:
        for (a, b, c), ms in zip(((m, n, k), (m, k, n), (n, k, m)), measured, strict=True):
            if ms > 0.05:
                yield abs(matmul(Matmul(m=a, n=b, k=c), profile) * 1e3 / ms - 1)
