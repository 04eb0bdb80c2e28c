"""Rows of published tables of training steps, with what their recipes say of them."""

import csv
from dataclasses import dataclass, replace

from measured_tables import DATA, hardware

BRIDGE = "Megatron-Bridge"
FOUNDRY = "llm-foundry"
AUTOMODEL = "NeMo AutoModel"
NEMO = "NeMo"
TITAN = "torchtitan"
DEEPSEEK = "DeepSeek-V3's paper"
MEGATRON = str(DATA / "megatron_core.toml")
"""The stack of Megatron-Bridge and NeMo."""


@dataclass(frozen=True)
class Recipe:
    """What the scripts of a published run say besides its table.

    Args:
        stack: the name or path of a stack.
        once: whether parameters are gathered and gradients reduced once a step, by Megatron's
            distributed optimizer, which steps shards of accumulated gradients; else by FSDP.
        overlaps: whether products hide collectives of tensor parallelism.
        exchanged: the share of an all-to-all's time that compute does not hide.
        copies: whether a token is sent once for each expert, by NCCL's all-to-all.
        neighbors: whether the benchmark's gate gives a token experts that are neighbors.
        latents: whether queries, keys and values of latent attention are computed again from their
            latents (`recompute_modules = [mla_up_proj]`).
        casts: `NumberFormat.casts` of products in 8 bits.
    """

    stack: str = "torch"
    once: bool = False
    overlaps: bool = False
    exchanged: float = 1.0
    copies: bool = False
    neighbors: bool = False
    latents: bool = False
    casts: tuple = (4, 0, 0, 0, 6)


@dataclass(frozen=True)
class Row:
    """One published step.

    Args:
        model: a shipped configuration, or the changes of one.
        settings: of the plan; `virtual` are chunks of each pipeline rank.
        micro: rows of a micro-batch.
        tokens: published, a second and GPU.
        recompute: the checkpoints of layers: none, `full`, or `selective`, which saves attention
            and every second product.
        half: whether parameters and states are in 16 bits.
        narrow: whether gradients are reduced in 16 bits.
        runs: of the pipeline for a step, which accumulate gradients.
        schedule: of the pipeline, where it is not 1F1B or interleaved 1F1B.
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
    recompute: str = ""
    half: bool = False
    narrow: bool = False
    changed_hardware: tuple = ()
    runs: int = 1
    schedule: str = ""
    recipe: Recipe = Recipe()

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
    def model_name(self):
        """The name of the model, without how a table spells it: `llama370b`."""
        name = self.name.lower().partition("(")[0].replace("llama3.1", "llama3")
        return "".join(c for c in name.replace("llama-3.1", "llama3") if c.isalnum())

    @property
    def machine(self):
        """The accelerator, and what tells it from others of its name."""
        name = self.hardware.partition("-")[0]
        return {TITAN: f"{name} of torchtitan", DEEPSEEK: "h800"}.get(self.source, name)

    @property
    def judged(self):
        """Whether the goals are for the row: those of H100 and A100 without further differences."""
        return self.machine in ("h100", "a100")

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
        batch = () if self.source == BRIDGE else (self.rows, self.micro)
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
    "LLAMA3_8B": ("llama-3.1-8b", (), "llama"),
    "LLAMA3_70B": ("llama-3.1-70b", (), "llama"),
    "LLAMA3.1_405B": ("llama-3.1-405b", (), "llama"),
    "Qwen3_30B_a3B": ("qwen3-30b-a3b", (), "qwen3_moe"),
    "Qwen3_235B_a22B": ("qwen3-235b-a22b", (), "qwen3_moe"),
    "DeepSeekV3": ("deepseek-v3", (), "deepseek_v3"),
    "Kimi_K2": ("kimi-k2", (), "deepseek_v3"),
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

OVERLAPPED = 0.45
"""The share of an all-to-all that stays visible under `overlap_moe_expert_parallel_comm`: fitted by
the prototype of docs/estimate-trust.md."""

RECIPES = {
    "LLAMA3": Recipe(stack=MEGATRON, once=True, overlaps=True),
    "DeepSeekV3": Recipe(stack=MEGATRON, once=True, exchanged=OVERLAPPED, latents=True),
    "Qwen3_235B": Recipe(stack=MEGATRON, once=True, exchanged=OVERLAPPED, copies=True),
    "GPT OSS": Recipe(stack=MEGATRON, once=True, copies=True),
}
"""By the beginning of a model's name, where it says more; gradients of all are reduced in 16 bits.

Source: scripts/performance/configs of Megatron-Bridge: `grad_reduce_in_fp32`, `tp_comm_overlap`,
`moe_a2a_overlap`, `moe_token_dispatcher_type` and `recompute_modules` of H100.
"""


def recipe_of(model):
    """The recipe of a model of Megatron-Bridge."""
    usual = Recipe(stack=MEGATRON, once=True)
    return next((r for name, r in RECIPES.items() if model.startswith(name)), usual)


def bridge(path=DATA / "megatron_bridge_half.csv"):
    """Rows of Megatron-Bridge's table on H100."""
    for row in csv.DictReader(path.open()):
        if row["system"] != "DGX-H100" or any(w in row["model"] + row["task"] for w in LEFT_OUT):
            continue
        model, changes, plan = SHAPES[row["model"].partition(" (")[0]]
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
            narrow=True,
            recipe=replace(recipe_of(row["model"]), once=row["fsdp"] in ("", "0")),
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
            recompute="full" if row["Activation Checkpointing"] == "True" else "",
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
without models that planc ships no shape of; checkpoints are those of its examples/llm_benchmark,
where llama is that of transformers under torch.compile."""


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
            kernels="compiled" if plan == "llama" else str(DATA / "automodel.toml"),
            tokens=rate,
            recompute="full" if again else "",
            half=True,
            runs=runs,
            recipe=Recipe(neighbors=True),
        )


def _shape(**sizes):
    return tuple(sizes.items())


def _llama(hidden, inner, layers, heads, groups=None):
    return _shape(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups or heads,
        vocab_size=32000,
    )


def _gpt(hidden, layers, heads):
    return _shape(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=51200,
        sliding_window=None,
    )


def _nemotron(hidden, layers, heads, groups=None):
    return _shape(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups or heads,
        head_dim=hidden // heads,
    )


NEMO_SHAPES = {
    "GPT3-5B": ("starcoder2-3b", "starcoder2", _gpt(4096, 24, 32)),
    "GPT3-20B": ("starcoder2-3b", "starcoder2", _gpt(6144, 44, 48)),
    "GPT3-175B": ("starcoder2-3b", "starcoder2", _gpt(12288, 96, 96)),
    "LLAMA2-7B": ("llama-3.1-8b", "llama", _llama(4096, 11008, 32, 32)),
    "LLAMA2-13B": ("llama-3.1-8b", "llama", _llama(5120, 13824, 40, 40)),
    "LLAMA2-70B": ("llama-3.1-70b", "llama", _llama(8192, 28672, 80, 64, 8)),
    "LLAMA3-8B": ("llama-3.1-8b", "llama", ()),
    "LLAMA3-70B": ("llama-3.1-70b", "llama", ()),
    "Nemotron-8B": ("minitron-4b", "nemotron", _nemotron(4096, 32, 32)),
    "Nemotron-22B": ("minitron-4b", "nemotron", _nemotron(6144, 40, 48)),
    "Nemotron-340B": ("minitron-4b", "nemotron", _nemotron(18432, 96, 96, 8)),
}
"""Sizes by NeMo's nemo/collections/llm/gpt/model; StarCoder 2 has the operators of its GPT-3, and
rotary embeddings."""

_NEMO = (
    # model, GPUs, rows, micro-batch, tokens, mesh, chunks, tokens/s
    ("GPT3-5B", 64, 2048, 4, 2048, "", 1, 22521),
    ("GPT3-20B", 64, 256, 2, 2048, "tp=2", 1, 5851),
    ("GPT3-175B", 128, 256, 1, 2048, "tp=4 pp=8", 6, 726),
    ("GPT3-175B", 512, 2048, 2, 2048, "tp=4 pp=8", 6, 782),
    ("LLAMA2-7B", 8, 128, 1, 4096, "", 1, 16847),
    ("LLAMA2-13B", 16, 128, 1, 4096, "pp=4", 10, 8646),
    ("LLAMA2-70B", 64, 128, 1, 4096, "tp=4 pp=4", 20, 1707),
    ("Nemotron-8B", 64, 256, 4, 4096, "tp=2", 1, 12701),
    ("Nemotron-22B", 64, 256, 2, 4096, "tp=2 pp=4", 10, 4256),
    ("Nemotron-340B", 128, 32, 1, 4096, "tp=8 pp=8", 12, 322),
    ("LLAMA3-8B", 8, 128, 1, 8192, "cp=2", 1, 12036),
    ("LLAMA3-70B", 64, 128, 1, 8192, "tp=4 pp=4 cp=2", 5, 1533),
    ("LLAMA2-7B", 8, 32, 1, 4096, "", 1, 17120),
    ("LLAMA2-13B", 8, 32, 1, 4096, "pp=4", 10, 9741),
    ("LLAMA2-70B", 16, 32, 1, 4096, "tp=4 pp=4", 20, 1833),
)
"""Pretraining and supervised fine-tuning in fp8 on DGX H100 with the container NeMo 24.07:
docs/source/performance/performance_summary.md of NVIDIA/NeMo (Apache-2.0). Fine-tuning does not say
its chunks, which are taken to be those of pretraining."""


def nemo():
    """Rows of NeMo's table."""
    for name, gpus, rows, micro, length, sizes, virtual, rate in _NEMO:
        model, plan, changes = NEMO_SHAPES[name]
        yield Row(
            source=NEMO,
            release="24.07",
            name=name,
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
            low=True,
            narrow=True,
            recipe=RECIPES["LLAMA3"],
        )


HBM2E = "memory_gb_s=2006", "memory_gib=94.5"
"""The H100 of torchtitan's pages: 96 GB of HBM2e with 2.4 of 3.35 TB/s. Their limit of 500 W is in
no profile."""
CAST = (6, 0, 5, 3, 6)
"""torchao's recipe `tensorwise`, as in `planc.sections.matmul.estimate`."""
_TITAN_2024 = "benchmarks/llama3_h100_202412_torchtitan.md"
_TITAN_2025 = "benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, as issue 56 quotes it"
_TITAN_H200 = "benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
_TITAN = (
    # page, model, hardware, GPUs, rows of a rank, tokens, mesh, checkpoints, fp8, tokens/s
    (_TITAN_2024, "llama-3.1-8b", "h100", 8, 2, 8192, "", "selective", False, 6667),
    (_TITAN_2024, "llama-3.1-8b", "h100", 128, 2, 8192, "", "selective", False, 6514),
    (_TITAN_2024, "llama-3.1-8b", "h100", 8, 2, 8192, "", "selective", True, 8532),
    (_TITAN_2024, "llama-3.1-8b", "h100", 128, 2, 8192, "", "selective", True, 8380),
    (_TITAN_2024, "llama-3.1-8b", "h100", 8, 1, 32768, "", "full", True, 3890),
    (_TITAN_2024, "llama-3.1-8b", "h100", 8, 1, 65536, "cp=2", "full", True, 2540),
    (_TITAN_2024, "llama-3.1-8b", "h100", 8, 1, 131072, "cp=4", "full", True, 1071),
    (_TITAN_2024, "llama-3.1-8b", "h100", 8, 1, 262144, "cp=8", "full", True, 548),
    (_TITAN_2024, "llama-3.1-70b", "h100", 256, 16, 8192, "tp=8", "full", True, 829),
    (_TITAN_2025, "llama-3.1-70b", "h100", 256, 16, 8192, "tp=8", "full", False, 597),
    (_TITAN_H200, "llama-3.1-8b", "h200", 32, 2, 8192, "", "selective", True, 10938),
    (_TITAN_H200, "llama-3.1-8b", "h200", 64, 2, 8192, "", "selective", True, 10753),
)
"""Runs of torchtitan with FSDP2 and torch.compile (BSD-3-Clause). Left out: pipelines, whose number
of microbatches is not stated, and asynchronous tensor parallelism."""


def titan():
    """Rows of torchtitan's pages."""
    for page, model, machine, gpus, micro, length, sizes, again, low, rate in _TITAN:
        settings = tuple(sizes.split())
        model_ranks = max([1, *(int(one.partition("=")[2]) for one in settings)])
        yield Row(
            source=TITAN,
            release=page,
            name=model,
            model=model,
            changes=(),
            plan="llama",
            hardware=f"{machine}-8x",
            gpus=gpus,
            rows=gpus // model_ranks * micro,
            micro=micro,
            length=length,
            settings=settings,
            virtual=1,
            kernels="compiled",
            tokens=rate,
            low=low,
            recompute=again,
            changed_hardware=HBM2E if machine == "h100" else (),
            recipe=Recipe(casts=CAST),
        )


def papers():
    """The throughput of DeepSeek-V3's pretraining: 180,000 hours of a GPU for 10^12 tokens, 2,048
    H800, pp 16, ep 64, 15,360 rows (arXiv 2412.19437, sections 1, 3.1, 3.2 and 4.2).

    H800 have 160 GB/s of NVLink, as section 3.2 says. DualPipe, estimated as DualPipe-V, hides
    all-to-alls; up-projections of latents are computed again. The papers of Qwen3 and GLM-4.5
    publish no throughput.
    """
    yield Row(
        source=DEEPSEEK,
        release="2412.19437v2",
        name="deepseek-v3",
        model="deepseek-v3",
        changes=(),
        plan="deepseek_v3",
        hardware="h100-8x",
        gpus=2048,
        rows=15360,
        micro=1,
        length=4096,
        settings=("pp=16", "ep=64"),
        virtual=2,
        schedule="dualpipe_v",
        kernels="fused",
        tokens=1e12 / 180_000 / 3600,
        low=True,
        narrow=True,
        changed_hardware=("node_gb_s=160", "node_reduce_gb_s=160"),
        recipe=RECIPES["DeepSeekV3"],
    )
