"""Published tables of training steps, row by row beside `planc estimate` of a plan with the same
mesh and batch.

A row of another stack is estimated with kernels of its own. All else is as in planc's stack, which
has no overlap of a dispatch and no CUDA graphs. `LEFT_OUT` names rows that are not estimated.
"""

import csv
import json
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from measured_tables import DATA, hardware

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.tools.estimate.answer import Request, answer_for
from planc.tools.estimate.formats import NumberFormat
from planc.tools.estimate.from_plan import Batch
from planc.tools.estimate.memory import GIB
from planc.tools.estimate.step import estimate

MODELS = Path(__file__).parents[3] / "plans" / "models"
BRIDGE = "Megatron-Bridge"
FOUNDRY = "llm-foundry"
AUTOMODEL = "NeMo AutoModel"


@dataclass(frozen=True)
class Row:
    """One published step.

    Args:
        model: a shipped configuration, or the changes of one.
        settings: of the plan; `virtual` are chunks of each pipeline rank.
        micro: rows of a micro-batch.
        tokens: published, a second and GPU.
        recompute: whether layers are checkpointed.
        half: whether parameters and states are in 16 bits.
        runs: of the pipeline for a step, which accumulate gradients.
    """

    source: str
    release: str
    name: str
    model: str
    changes: tuple
    plan: str
    hardware: str
    gpus: int
    rows: int
    micro: int
    length: int
    settings: tuple
    virtual: int
    kernels: str
    tokens: float
    low: bool = False
    recompute: bool = False
    half: bool = False
    changed_hardware: tuple = ()
    runs: int = 1

    def ranks(self, axis):
        """The size of an axis."""
        return int(dict(s.split("=") for s in self.settings).get(axis, 1))

    @property
    def data(self):
        """Ranks with rows of their own."""
        return self.gpus // (self.ranks("tp") * self.ranks("pp") * self.ranks("cp"))

    @property
    def kind(self):
        experts = "experts" if self.plan in ("qwen3_moe", "deepseek_v3", "gpt_oss") else "dense"
        return f"{experts}, {'fp8' if self.low else 'bf16'}"

    @property
    def capacity(self):
        """GiB of the accelerator without a context, all of which published runs may fill."""
        changes = dict(change.split("=") for change in self.changed_hardware)
        machine = hardware(self.hardware)
        return float(changes.get("memory_gib", machine.memory_gib)) - machine.context_gib

    @property
    def configuration(self):
        """All that makes a row another configuration than that of another release."""
        machine, mesh = (self.hardware, self.changed_hardware), (self.gpus, self.settings)
        batch = (self.rows, self.micro) if self.source == FOUNDRY else ()
        return self.source, self.name, self.low, self.half, self.length, machine, mesh, batch


LEFT_OUT = {
    "Nemotron_3_Nano": "no shipped shape, and no kernel of its Mamba layers is described",
    "LoRA Performance": "no kernel of its adapters is described",
    "tokendrop": "tokens beyond the experts' capacity are dropped",
}
"""Rows of H100 and A100 that are not estimated, by a part of their name or task."""

BIG = (("num_hidden_layers", 36), ("num_local_experts", 128))
"""gpt-oss-120b, by the changes of gpt-oss-20b."""

SHAPES = {
    "LLAMA3_70B": ("llama-3.1-70b", (), "llama"),
    "LLAMA3.1_405B": ("llama-3.1-405b", (), "llama"),
    "Qwen3_30B_a3B": ("qwen3-30b-a3b", (), "qwen3_moe"),
    "Qwen3_235B_a22B": ("qwen3-235b-a22b", (), "qwen3_moe"),
    "DeepSeekV3 (dropless)": ("deepseek-v3", (), "deepseek_v3"),
    "GPT OSS 120B": ("gpt-oss-20b", BIG, "gpt_oss"),
}
MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}


SMALL_A100 = "memory_gb_s=1220", "memory_gib=39.4"
"""A100 with 40 GB: 1,555 GB/s by its data sheet, where 80 GB have 2,039."""


def bridge(path=DATA / "megatron_bridge_half.csv"):
    """Rows of Megatron-Bridge's table on H100."""
    for row in csv.DictReader(path.open()):
        if row["system"] != "DGX-H100" or any(w in row["model"] + row["task"] for w in LEFT_OUT):
            continue
        model, changes, plan = SHAPES[row["model"]]
        sizes = {a: int(row[a]) for a in ("tp", "pp", "cp", "ep") if row[a].isdigit()}
        yield Row(
            source=BRIDGE,
            release=row["release"],
            name=row["model"],
            model=model,
            changes=changes,
            plan=plan,
            hardware="h100-8x",
            gpus=int(row["gpus"]),
            rows=int(row["gbs"]),
            micro=int(row["mbs"]),
            length=int(row["seq"]),
            settings=tuple(f"{a}={n}" for a, n in sizes.items() if n > 1),
            virtual=int(row["vp"]) if row["vp"].isdigit() else 1,
            kernels="fused",
            tokens=float(row["tok_s_gpu"]),
            low=not row["precision"].startswith("BF16"),
        )


def foundry(path=DATA / "llmfoundry_half.csv"):
    """Rows of llm-foundry's tables on H100 and A100 with full sharding."""
    for row in csv.DictReader(path.open()):
        if row["Sharding Strategy"] != "FULL_SHARD":
            continue
        hidden, layers, heads = MPT[row["Model"]]
        length = int(row["SeqLen (T)"])
        changes = {"d_model": hidden, "n_layers": layers, "n_heads": heads, "max_seq_len": length}
        yield Row(
            source=FOUNDRY,
            release="",
            name=row["Model"],
            model="mpt-7b",
            changes=(*changes.items(), ("vocab_size", 50368)),
            plan="mpt",
            hardware="h100-8x" if row["GPU"].startswith("h100") else "a100-8x",
            gpus=int(row["# GPUs"]),
            rows=int(row["GlobalBatchSize"]),
            micro=int(row["MicroBatchSize"]),
            length=length,
            settings=(),
            virtual=1,
            kernels=str(
                DATA / f"llmfoundry{'' if row['GPU'].startswith('h100') else '-a100'}.toml"
            ),
            tokens=float(row["Throughput (T/s/GPU)"]),
            low=row["Precision"] == "amp_fp8",
            recompute=row["Activation Checkpointing"] == "True",
            half=row["MP Mode"] == "PURE",
            changed_hardware=SMALL_A100 if row["GPU"] == "a100_40gb" else (),
        )


_AUTOMODEL = (
    # model, plan, changes, GPUs, rows, micro-batch, tokens, mesh, chunks, runs, recompute, tokens/s
    ("deepseek-v3", "deepseek_v3", (), 1024, 8192, 1, 4096, "pp=4 ep=64", 8, 4, True, 865),
    ("deepseek-v3", "deepseek_v3", (), 256, 512, 1, 4096, "pp=4 ep=64", 8, 1, True, 1002),
    ("kimi-k2", "deepseek_v3", (), 256, 512, 1, 4096, "pp=8 ep=32", 4, 2, True, 924),
    ("qwen3-30b-a3b", "qwen3_moe", (), 8, 512, 4, 4096, "ep=8", 1, 1, True, 12040),
    ("gpt-oss-20b", "gpt_oss", (), 8, 256, 2, 4096, "ep=8", 1, 1, False, 13058),
    ("gpt-oss-20b", "gpt_oss", BIG, 64, 512, 2, 4096, "ep=64", 1, 1, False, 7626),
    ("llama-3.1-70b", "llama", (), 64, 128, 1, 8192, "cp=2", 1, 1, True, 866.77),
)
"""Pretraining on H100 in bf16 by docs/performance-summary.mdx of NeMo AutoModel (Apache-2.0),
without models that planc ships no shape of; checkpoints are those of its examples/llm_benchmark."""


def automodel():
    """Rows of NeMo AutoModel's table."""
    for row in _AUTOMODEL:
        model, plan, changes, gpus, rows, micro, length, sizes, virtual, runs, again, rate = row
        yield Row(
            source=AUTOMODEL,
            release="",
            name="gpt-oss-120b" if changes else model,
            model=model,
            changes=changes,
            plan=plan,
            hardware="h100-8x",
            gpus=gpus,
            rows=rows,
            micro=micro,
            length=length,
            settings=tuple(sizes.split()),
            virtual=virtual,
            kernels="fused",
            tokens=rate,
            recompute=again,
            half=True,
            runs=runs,
        )


def published(rows):
    """The newest release of each configuration."""
    newest = {}
    for row in sorted(rows, key=lambda row: [int(n) for n in row.release.split(".") if n]):
        newest[row.configuration] = row
    return list(newest.values())


def configuration(row):
    """The configuration of a row's model."""
    config = json.loads((MODELS / f"{row.model}.json").read_text()) | dict(row.changes)
    if "layer_types" in config:  # as many as layers, which alternate
        layers = config["num_hidden_layers"]
        config["layer_types"] = [config["layer_types"][i % 2] for i in range(layers)]
    return config


def plan_text(row, config):
    """A plan of the same mesh."""
    text = f'plan row for {row.plan}\n\nextend "{row.plan}"\n'
    if row.half:
        text += "\nload {\n    dtype = bf16\n}\n"
    if row.ranks("cp") > 1:
        text += "\ncontext on cp {\n    override attention = ring\n}\n"
    if row.ranks("pp") > 1:
        stages, layers = row.virtual * row.ranks("pp"), config["num_hidden_layers"]
        blocks = [layers * (i + 1) // stages - layers * i // stages for i in range(stages)]
        schedule = "interleaved_1f1b" if row.virtual > 1 else "1f1b"
        rules = f"schedule = {schedule}\n    override stages = weighted($blocks, blocks = {blocks})"
        text += f"\npipeline on pp {{\n    override {rules}\n}}\n"
    return text


def estimated(row):
    """The estimate of a row."""
    sink, config = Sink(), configuration(row)
    passes = row.rows // (row.data * row.micro)
    staged = row.ranks("pp") > 1
    settings = [*row.settings, f"recompute={str(row.recompute).lower()}"]
    settings += [f"microbatches={passes // row.runs}"] if staged else []
    settings += ["reduce_dtype=bf16"] if row.half else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "row.plan").write_text(plan_text(row, config))
        files = str(folder), str(folder / "row.plan")
        compiled = compile_plan(*files, sink, world_size=row.gpus, settings=settings)
    assert compiled.applied, sink.diagnostics
    batch = Batch(
        global_batch=row.rows, sequence=row.length, micro_batches=row.runs if staged else passes
    )
    request = Request(
        batch=batch,
        hardware=row.hardware,
        hardware_changes=row.changed_hardware,
        layer_kernels=row.kernels,
    )
    answer = answer_for(compiled, request, sink)
    assert answer, sink.diagnostics
    work = with_low_products(answer.work) if row.low else answer.work
    return estimate(work, answer.hardware, answer.stack)


CASTS = (4, 0, 0, 0, 6)
"""`NumberFormat.casts` of Megatron: weights are rounded once a step, scales are known before."""


def with_low_products(work):
    """The work with products of layers in 8 bits, as Megatron has them: not the head, and of
    experts too, which a plan cannot say.
    """
    low = NumberFormat(recipe="tensorwise", casts=CASTS)

    def change(layer):
        products = (replace(m, format=low) if min(m.n, m.k) > 256 else m for m in layer.matmuls)
        return layer if layer.loss else replace(layer, matmuls=tuple(products))

    stages = tuple(tuple((change(layer), n) for layer, n in stage) for stage in work.stages)
    return replace(work, stages=stages)


def quantile(values, share):
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


def constant_errors(rows):
    """Errors of one number of tokens a second for each FLOP and kind, the median of the others."""
    by = defaultdict(list)
    for row, found in rows:
        by[row.kind].append((row, row.tokens * found.time.mfu / found.time.tokens_per_second))
    for row, found in rows:
        others = [rate for other, rate in by[row.kind] if other.name != row.name]
        if others:
            own = row.tokens * found.time.mfu / found.time.tokens_per_second
            yield row, abs(median(others) / own - 1)


def compared():
    """(row, estimate) of every published row."""
    return [(row, estimated(row)) for row in published([*bridge(), *automodel(), *foundry()])]


def judge():
    pairs = compared()
    print("\n## Published tables\n")
    print("Halves of the tables of Megatron-Bridge (newest release of each configuration) and")
    print(
        "llm-foundry, and that of NeMo AutoModel: tokens a second, `planc estimate` of a plan with"
    )
    print("the same mesh and kernels of that stack. `one rate`: the median model FLOP/s of other")
    print("models of the kind. `fit`: in all of the memory but a context. Left out:\n")
    print("".join(f"- {name}: {why}\n" for name, why in LEFT_OUT.items()))
    print("| rows | n | median | 90 % | worst | one rate: median | 90 % | worst | fit |")
    print("| --- " * 9 + "|")
    constant = dict(constant_errors(pairs))
    for machine in ("h100", "a100"):
        groups = defaultdict(list)
        for row, found in pairs:
            if row.hardware.startswith(machine):
                groups[row.kind].append((row, found))
        for kind, part in sorted(groups.items()):
            time = [abs(f.time.tokens_per_second / row.tokens - 1) for row, f in part]
            plain = [constant[row] for row, _ in part if row in constant] or [float("nan")]
            cells = [f"{g(v):.1%}" for v in (time, plain) for g in (median, p90, max)]
            fit = sum(f.fullest.peak / GIB <= row.capacity for row, f in part)
            print(
                f"| {machine}, {kind} | {len(part)} | {' | '.join(cells)} | {fit} of {len(part)} |"
            )
    print(
        "\n| source | release | model | GPUs | mesh | rows | published | estimated | error | GiB |"
    )
    print("| --- " * 10 + "|")
    for row, found in pairs:
        rate = found.time.tokens_per_second
        mesh = " ".join((*row.settings, f"vp={row.virtual}" * (row.virtual > 1))) or "fsdp"
        print(
            f"| {row.source} | {row.release} | {row.name}, {row.kind} | {row.gpus:,} | {mesh} "
            f"| {row.rows} x {row.length} | {row.tokens:,.0f} | {rate:,.0f} "
            f"| {rate / row.tokens - 1:+.0%} | {found.fullest.peak / GIB:.1f} |"
        )


def p90(values):
    return quantile(values, 0.9)


if __name__ == "__main__":
    judge()
