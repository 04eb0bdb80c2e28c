"""The combinations of models, plans and batches that gloo_peaks.py measures."""

import json
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path

from measured_tables import runner

from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.ops.base import AxisRole
from planc.simulate.rank_job import RankStep
from planc.tools.estimate.answer import Request, answer
from planc.tools.estimate.from_plan import Batch
from planc.tools.measure.count import count

RANKS = 4
DECODER = {
    "dtype": "float32",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUTED = DECODER | {"num_experts_per_tok": 2, "num_local_experts": 8, "num_experts": 8}
MODELS = {
    "llama": DECODER | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "tied llama": DECODER
    | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "qwen3": DECODER
    | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "gemma2": DECODER
    | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 32}
    | {"query_pre_attn_scalar": 32, "sliding_window": 64},
    "olmo2": DECODER | {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]},
    "phi3": DECODER | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]},
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "dtype": "float32",
        "vocab_size": 2048,
        "n_embd": 128,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 256,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "mixtral": ROUTED | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
    "qwen3_moe": ROUTED
    | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32}
    | {"moe_intermediate_size": 176, "decoder_sparse_step": 1, "mlp_only_layers": []},
}
MODELS["bamba"] = DECODER | {
    "model_type": "bamba",
    "architectures": ["BambaForCausalLM"],
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 16,
    "mamba_chunk_size": 32,
}
FINE = "fine qwen3_moe"
"""Rows of experts are most of what it holds."""
MODELS[FINE] = MODELS["qwen3_moe"] | {
    "vocab_size": 64,
    "hidden_size": 256,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "num_local_experts": 16,
    "num_experts_per_tok": 8,
}
LORA = """plan lora for {family}

extend "{family}.plan"

adapters {{
    model.layers.*.self_attn.{{q,k,v,o}}_proj : lora(rank = 8, alpha = 16)
}}
"""
SELECTIVE = """plan selective for {family}

extend "{family}.plan"

override checkpoint {{
    model.layers.* : ops(save = [attention, matmul(every = 2)])
}}
"""
RING = """plan ring for {family}

extend "{family}.plan"

override context on cp {{ attention = ring }}
"""
PLANS = {"lora": LORA, "selective": SELECTIVE, "ring": RING}
"""What a plan adds to that of a family."""
WHOLE = "recompute=false"


@dataclass(frozen=True)
class Combination:
    """
    Args:
        model: a name of `MODELS`.
        settings: of the plan, besides that models without experts compute in float32.
        rows, tokens: of a step, over all ranks.
        batches: that accumulate gradients.
        extends: a name of `PLANS`; empty for the plan of the family.
    """

    model: str
    settings: tuple[str, ...] = ()
    rows: int = 16
    tokens: int = 128
    batches: int = 1
    extends: str = ""

    def written(self, folder):
        """A model's folder, a plan and settings."""
        config = MODELS[self.model]
        (folder / "config.json").write_text(json.dumps(config))
        plan = config["model_type"]
        if self.extends:
            text = PLANS[self.extends].format(family=plan)
            plan = str(folder / "own.plan")
            Path(plan).write_text(text)
        routed = "num_experts" in config  # grouped products run in bf16 alone on fake tensors
        given = routed or any("param_dtype" in s for s in self.settings)
        precise = [] if given else ["param_dtype=fp32"]
        return str(folder), plan, [*precise, *self.settings]

    def compiled(self):
        sink = Sink()
        with tempfile.TemporaryDirectory() as folder:
            model, plan, settings = self.written(Path(folder))
            compiled = compile_plan(model, plan, sink, world_size=RANKS, settings=settings)
        assert compiled.applied, sink.diagnostics
        return compiled

    def estimated(self):
        sink = Sink()
        batch = Batch(global_batch=self.rows, sequence=self.tokens, micro_batches=self.batches)
        request = Request(batch=batch, kernels=False)  # on CPUs
        found = answer(*self.compiled().applied, request, sink)
        assert found, sink.diagnostics
        return found

    def counted(self, device=""):
        """What a rank of each place of the pipeline holds when it is run."""
        compiled = self.compiled()
        ways = prod(axis.size for axis in compiled.plan.mesh.of_role(AxisRole.DATA))
        rows = self.rows // ways // self.batches
        batches = {"micro_batches": self.batches, "dtype": "float32"}
        step = RankStep(rows=rows, tokens=self.tokens, **batches)
        return count(compiled, step, runner(), device=device)


def _combinations():
    """By name: the model, then what differs from its plan on four data ranks."""
    every = {
        "": {},
        "no checkpoints": {"settings": (WHOLE,)},
        "tp 2": {"settings": ("tp=2",)},
        "tp 2, no sp, no checkpoints": {"settings": ("tp=2", "sequence=false", WHOLE)},
        "hsdp 2": {"settings": ("dp_replicate=2", WHOLE)},
    }
    for model in [*MODELS][:-2]:
        for name, more in every.items():
            yield f"{model}{', ' * bool(name)}{name}", Combination(model, **more)
    for model in ("phi3", "gpt2"):  # the others' two heads of keys cannot be split over four ranks
        yield f"{model}, tp 4, no checkpoints", Combination(model, settings=("tp=4", WHOLE))
    llama = {
        "replicated": {"settings": ("dp_replicate=4", "dp_shard=1", WHOLE)},
        "loss in 4": {"settings": ("loss_chunks=4",)},
        "loss in 4, tp 2": {"settings": ("loss_chunks=4", "tp=2")},
        "selective": {"extends": "selective"},
        "selective, tp 2": {"extends": "selective", "settings": ("tp=2",)},
        "lora": {"extends": "lora", "settings": (WHOLE,)},
        "lora, tp 2": {"extends": "lora", "settings": ("tp=2", WHOLE)},
        "bf16": {"settings": ("param_dtype=bf16",)},
        "bf16, tp 2": {"settings": ("param_dtype=bf16", "tp=2")},
        "4 x 256": {"rows": 4, "tokens": 256, "settings": (WHOLE,)},
        "64 x 64": {"rows": 64, "tokens": 64},
        "2 batches": {"batches": 2},
        "4 batches, no checkpoints": {"batches": 4, "settings": (WHOLE,)},
        "pp 2": {"settings": ("pp=2", "microbatches=4")},
        "pp 4, no checkpoints": {"settings": ("pp=4", "microbatches=8", WHOLE)},
        "pp 2, tp 2": {"settings": ("pp=2", "microbatches=4", "tp=2")},
        "pp 2, gpipe": {"settings": ("pp=2", "microbatches=4", "schedule=gpipe")},
        "cp 2": {"settings": ("cp=2",)},
        "cp 2, no checkpoints": {"settings": ("cp=2", WHOLE)},
        "cp 4": {"settings": ("cp=4", WHOLE)},
        "cp 2, ring": {"extends": "ring", "settings": ("cp=2",)},
        "cp 4, ring, no checkpoints": {"extends": "ring", "settings": ("cp=4", WHOLE)},
    }
    for name, more in llama.items():
        yield f"llama, {name}", Combination("llama", **more)
    for name, settings in (("cp 2", ("cp=2",)), ("cp 4, no checkpoints", ("cp=4", WHOLE))):
        yield f"bamba, {name}", Combination("bamba", settings)
    replicas = ("dp_replicate=2", "dp_shard=1", "tp=2")
    for model in ("llama", "tied llama"):
        yield f"{model}, replicas, tp 2, 2 batches", Combination(model, replicas, batches=2)
    for schedule in ("interleaved_1f1b", "zero_bubble", "zbv", "dualpipe_v"):
        split = ("pp=2", "microbatches=4", f"schedule={schedule}")
        for name, settings in ((schedule, split), (f"{schedule}, no checkpoints", (*split, WHOLE))):
            yield f"llama, pp 2, {name}", Combination("llama", settings)
    for model, schedule in (
        ("gpt2", "zero_bubble"),
        ("gemma2", "zbv"),
        ("qwen3", "dualpipe_v"),
        ("phi3", "zero_bubble"),
        ("mixtral", "zero_bubble"),
    ):
        split = ("pp=2", "microbatches=4", f"schedule={schedule}")
        yield f"{model}, pp 2, {schedule}", Combination(model, split)
    stages = ("pp=2", "microbatches=4", "tp=2")
    yield "tied llama, pp 2, tp 2", Combination("tied llama", stages)
    for model in ("mixtral", "qwen3_moe"):
        for name, settings in (
            ("ep 2", ("ep=2",)),
            ("ep 4, no checkpoints", ("ep=4", WHOLE)),
            ("ep 2, tp 2", ("ep=2", "tp=2", WHOLE)),
        ):
            yield f"{model}, {name}", Combination(model, settings=settings)
    for name, settings in (("", ()), (", no checkpoints", (WHOLE,))):
        for ep, size in (("", ()), (", ep 2", ("ep=2",))):
            yield f"{FINE}{ep}{name}", Combination(FINE, (*size, *settings), tokens=256)


COMBINATIONS = dict(_combinations())
