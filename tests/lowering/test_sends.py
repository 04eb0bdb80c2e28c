"""What `planc lower` says that a step sends, beside what is counted on real processes."""

from collections import Counter

import diffused
import pytest
from numerics import MODELS

pytestmark = pytest.mark.slow

CASES = {
    "tp": ("Llama", "llama", ["tp=4", "sequence=false", "recompute=false"]),
    "tp and checkpoints": ("Llama", "llama", ["tp=2", "sequence=false"]),
    "sp": ("Llama", "llama", ["tp=2"]),
    "sp and a chunked loss": ("Llama", "llama", ["tp=2", "loss_chunks=2"]),
    "fsdp": ("Llama", "llama", []),
    "hsdp": ("Llama", "llama", ["dp_replicate=2"]),
    "cp": ("Llama", "cp.plan", []),
    "ulysses": ("Llama", "cp.plan", ["attention=ulysses"]),
    "ring": ("Llama", "cp.plan", ["attention=ring"]),
    "ring of four and checkpoints": ("Llama", "cp.plan", ["attention=ring", "cp=4", "full=true"]),
    "ulysses among two, and a ring": ("Llama", "ring of heads.plan", ["cp=4"]),
    "ulysses among two, and checkpoints": ("Llama", "heads.plan", ["cp=4", "full=true"]),
    "experts and tp": (
        "Mixtral",
        "mixtral",
        ["tp=2", "sequence=false", "recompute=false"],
    ),
    "experts, sp and checkpoints": ("Mixtral", "mixtral", ["tp=2"]),
    "ep": ("Mixtral", "mixtral", ["ep=4", "recompute=false"]),
    "ep and tp": ("Mixtral", "mixtral", ["ep=4", "tp=2", "recompute=false"]),
    "ep, sp and checkpoints": ("Mixtral", "mixtral", ["ep=2", "tp=2"]),
    "ep and checkpoints": ("Mixtral", "mixtral", ["ep=2"]),
    "ep in chunks and checkpoints": ("Mixtral", "chunks.plan", ["ep=2"]),
    "ep in chunks and tp": ("Mixtral", "chunks.plan", ["ep=4", "tp=2", "recompute=false"]),
    "ep with a capacity and cp": ("Mixtral", "limited.plan", ["ep=4", "cp=2"]),
    "capacity and cp": ("Mixtral", "limited.plan", ["cp=4", "recompute=false"]),
    "frozen blocks": ("Llama", "early.plan", ["recompute=false"]),
    "frozen blocks and sp": ("Llama", "early.plan", ["tp=2", "recompute=false"]),
    "frozen blocks, tp and checkpoints": (
        "Llama",
        "early.plan",
        ["tp=2", "sequence=false"],
    ),
    "frozen last blocks": ("Llama", "late.plan", ["tp=2"]),
    "frozen norms": ("Llama", "norms.plan", ["tp=2"]),
    "adapters": ("Llama", "lora.plan", ["recompute=false"]),
    "adapters and tp": (
        "Llama",
        "lora.plan",
        ["tp=2", "sequence=false", "recompute=false"],
    ),
    "adapters and sp": ("Llama", "lora.plan", ["tp=2", "recompute=false"]),
    "adapters, tp and checkpoints": ("Llama", "lora.plan", ["tp=2", "sequence=false"]),
    "adapters, sp and checkpoints": ("Llama", "lora.plan", ["tp=2"]),
    "dora and tp": ("Llama", "dora.plan", ["tp=2", "sequence=false", "recompute=false"]),
    "dora, sp and checkpoints": ("Llama", "dora.plan", ["tp=2"]),
    "dora with dropout, and tp": (
        "Llama",
        "dropped.plan",
        ["tp=2", "sequence=false", "recompute=false"],
    ),
    "dora with dropout, sp and checkpoints": ("Llama", "dropped.plan", ["tp=2"]),
    "adapters of experts and tp": (
        "Mixtral",
        "experts.plan",
        ["tp=2", "sequence=false", "recompute=false"],
    ),
    "ep, tp inside and adapters of experts": (
        "Mixtral",
        "experts.plan",
        ["tp=2", "ep=2", "etp=2", "recompute=false"],
    ),
    "inputs once for all projections": ("Llama", "input.plan", []),
    "whole inputs of rowwise layers": (
        "Bloom",
        "bloom",
        ["tp=2", "sequence=false", "recompute=false"],
    ),
    "whole inputs of rowwise layers and sp": ("GPTJ", "gptj", ["tp=2", "recompute=false"]),
    "packed projections": ("Phi3", "phi3", ["tp=2", "sequence=false"]),
    "muon": ("Llama", "muon.plan", ["recompute=false"]),
    "muon and tp": ("Llama", "muon.plan", ["tp=2", "recompute=false"]),
    "muon and hsdp": ("Llama", "muon.plan", ["dp_replicate=2", "recompute=false"]),
    "muon, ep and tp inside": (
        "Mixtral",
        "muon_of_experts.plan",
        ["tp=2", "ep=2", "etp=2", "recompute=false"],
    ),
}
PARTS = """plan cp for CLASS

option attention = "all_gather"
option full      = false

mesh {
    dp_shard = auto
    cp       = 2
}

context on cp {
    attention = attention
}

when full {
    checkpoint {
        LIST.* : full
    }
}

fsdp on dp_shard * cp {
    precision(param = fp32, reduce = fp32)
    LIST.* : unit
    root   : unit
}
"""
"""Of a class with a list of blocks; the ranks of cp have parts of its tokens."""
PLANS = {
    "early": "train {\n    model.embed_tokens : frozen\n    model.layers[0:2]  : frozen\n}",
    "late": "train {\n    model.layers[2:4] : frozen\n}",
    "norms": """train {
    model.layers.*.input_layernorm : frozen
    model.norm                     : frozen
}""",
    "lora": """adapters {
    $blocks.self_attn.{q,k,v,o}_proj : lora(rank = 4, alpha = 8, init = random)
    $blocks.mlp.{gate,up,down}_proj  : lora(rank = 4, init = random)
}""",
    "dora": """adapters {
    $blocks.self_attn.{q,o}_proj  : lora(rank = 4, dora = true, init = random)
    $blocks.mlp.{gate,down}_proj  : lora(rank = 4, dora = true, init = random)
    lm_head                       : lora(rank = 4, dora = true, init = random)
}""",
    "dropped": """adapters {
    $blocks.self_attn.{q,o}_proj  : lora(rank = 4, dora = true, init = random, dropout = 0.1)
    $blocks.mlp.down_proj         : lora(rank = 4, dora = true, init = random, dropout = 0.1)
}""",
    "muon": """optimizer {
    root                             : adamw
    $blocks.self_attn.{q,k,v}_proj   : muon(per = head)
    $blocks.{self_attn.o_proj,mlp.*} : muon
}""",
}
EXPERTS = """plan experts for mixtral

extend "mixtral.plan"

adapters {
    $experts : lora(rank = 4, init = random)
}
"""
MUON_OF_EXPERTS = """plan muon for mixtral

extend "mixtral.plan"

optimizer {
    root                             : adamw
    $blocks.self_attn.{q,k,v,o}_proj : muon
    $experts                         : muon
}
"""
DISPATCH = """plan t for mixtral

extend "mixtral.plan"

override expert on ep {
    $experts : dispatch(all_to_all, HOW)
}
"""
INPUT = """plan input for llama

mesh {
    dp_shard = auto
    tp       = 2
}

tensor on tp {
    model.layers.* {
        self_attn              : input(hidden_states = replicate -> replicate)
        mlp                    : input(replicate -> replicate)
        self_attn.{q,k,v}_proj : colwise
        mlp.{gate,up}_proj     : colwise
        self_attn.o_proj       : rowwise
        mlp.down_proj          : rowwise
    }
    model.embed_tokens : rowwise
    lm_head            : colwise(-> replicate)
}

fsdp on dp_shard {
    precision(param = fp32, reduce = fp32)
    model.layers.* : unit
    root           : unit
}
"""
CHANGES = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Phi3": {"pad_token_id": 0},
    "GPTJ": {
        "rotary_dim": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
    },
}


GEMMA = {
    "head_dim": 16,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": 96,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4,
    "laurel_rank": 4,
    "pad_token_id": 0,
}
BESIDE = {
    "Gemma4": GEMMA,
    "Gemma3n": GEMMA,
    "Zamba": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
        "pad_token_id": 0,
        "use_mamba_kernels": False,
    },
    "Zaya": {"pad_token_id": 0},
    "qwen3_vl": {"text_config": {**MODELS["qwen3_vl"]["text_config"], "num_hidden_layers": 4}},
}
STAGES = """plan stages for {family}

option schedule = "1f1b"

mesh {{
    pp       = 2
    dp_shard = auto
}}

pipeline on pp {{
    schedule     = schedule
    microbatches = 4
    stages       = even(model.layers.*)
}}

fsdp on dp_shard {{
    precision(param = fp32, reduce = fp32)
    root : unit
}}
"""


@pytest.fixture
def run(four, tmp_path):
    plans = {n: f'plan {n} for llama\n\nextend "llama.plan"\n\n{p}\n' for n, p in PLANS.items()}
    cp = PARTS.replace("CLASS", "llama").replace("LIST", "model.layers")
    own = {"cp": cp, "input": INPUT, "experts": EXPERTS, "muon_of_experts": MUON_OF_EXPERTS}
    for name, how in (("heads", "all_gather"), ("ring of heads", "ring")):
        both = f"attention = {how}(ulysses = 2)\n    model.layers.1.self_attn : ring"
        own[name] = cp.replace("attention = attention", both)
    own["chunks"] = DISPATCH.replace("HOW", "chunks = 2")
    own["limited"] = DISPATCH.replace("HOW", "capacity = 4")  # which drops nothing
    for name, text in {**plans, **own}.items():
        (tmp_path / f"{name}.plan").write_text(text)

    def counted(kind, plan, settings, changes=None, passes=1):
        own = plan.endswith(".plan")
        precise = (
            []
            if plan in ("cp.plan", "input.plan", "heads.plan", "ring of heads.plan")
            else ["param_dtype=fp32"]
        )
        return four.run(
            "sending_jobs.counted",
            kind=kind,
            plan=str(tmp_path / plan) if own else plan,
            settings=[*precise, *settings],
            rows=8,
            changes=CHANGES.get(kind, changes),
            passes=passes,
        )

    return counted


@pytest.mark.parametrize("name", CASES)
def test_times_and_bytes(run, name):
    """Of every rank; of exchanges, whose parts hang on the router, the sum over the ranks."""
    exchanged = [Counter(), Counter()]
    for counted, told, (calls, seen) in run(*CASES[name]):
        assert calls == seen > 0
        for found, total in zip((counted, told), exchanged, strict=True):
            for kind, ranks, size in [key for key in found if key[0] == "all-to-all"]:
                times = found.pop((kind, ranks, size))
                total["times"] += times
                total["bytes"] += times * size
        assert counted == told
    assert exchanged[0] == exchanged[1]
    assert bool(exchanged[0]) == (name.split()[0].strip(",") in ("ep", "ulysses", "muon"))


@pytest.mark.parametrize(
    ("axis", "kinds"), [("tp", {"all-gather"}), ("cp", {"all-gather", "all-to-all"})]
)
def test_features_of_divided_images(four, axis, kinds):
    """Each image has as many tokens, and each rank one image."""
    arguments = {"name": "gemma3-vision", "plan": "gemma3_vision", "axis": axis}
    settings = [f"{axis}=2", "images=rows", "param_dtype=fp32"]
    for found, told, share in four.run(
        "sending_jobs.counted_features", **arguments, settings=settings
    ):
        assert {kind for kind, _ in told} == kinds
        for (kind, size), times in told.items():
            assert found[kind, round(size * share)] == times


OF_IMAGES = {
    "patches alone": ("wan2.1-t2v-1.3b", "blocks", []),
    "patches alone and checkpoints": ("wan2.1-t2v-1.3b", "blocks", ["full=true"]),
    "heads of patches alone": ("wan2.1-t2v-1.3b", "blocks", ["attention=ulysses", "full=true"]),
    "a ring of patches alone": ("wan2.1-t2v-1.3b", "blocks", ["attention=ring"]),
    "patches and text": ("sd3-medium", "transformer_blocks", ["full=true"]),
    "heads of patches and text": ("sd3-medium", "transformer_blocks", ["attention=ulysses"]),
    "a ring of patches and text": ("sd3-medium", "transformer_blocks", ["attention=ring"]),
}


@diffused.needed
@pytest.mark.parametrize("name", OF_IMAGES)
def test_parts_of_images(four, tmp_path, name):
    """Bytes of text are not told, since a plan does not know how much there is."""
    model, blocks, settings = OF_IMAGES[name]
    kind = "WanTransformer3DModel" if model.startswith("wan") else "SD3Transformer2DModel"
    path = tmp_path / "t.plan"
    path.write_text(PARTS.replace("CLASS", kind).replace("LIST", blocks))
    arguments = {"name": model, "plan": str(path), "settings": settings}
    for found, told in four.run("sending_jobs.counted_images", **arguments):
        unknown = Counter({kind: times for (kind, size), times in told.items() if size is None})
        assert bool(unknown) == name.startswith(("heads of patches and", "a ring of patches and"))
        left = Counter(found)
        left.subtract({key: times for key, times in told.items() if key[1] is not None})
        assert min(left.values()) >= 0
        of_text = Counter()
        for (kind, _), times in left.items():
            of_text[kind] += times
        assert +of_text == unknown


@pytest.mark.parametrize("settings", [[], ["tp=2"], ["dp_replicate=2"], ["dp_replicate=4"]])
def test_accumulated_passes(run, settings):
    """Each reduces what is sharded; what is replicated is reduced once."""
    for counted, told, _ in run("Llama", "llama", settings, passes=3):
        assert counted == told and counted


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["", "ties"])
@pytest.mark.parametrize("more", [[], ["tp=2"], ["schedule=interleaved_1f1b"]], ids=str)
def test_messages_between_stages(run, more, changes):
    """Those of all ranks, point to point."""
    results = run("Llama", "llama", ["pp=2", "microbatches=2", *more], changes)
    every = [Counter(), Counter()]
    for counted, told, _ in results:
        for found, total in zip((counted, told), every, strict=True):
            for (kind, _, size), times in found.items():
                if kind == "send":
                    total[size] += times
    # what is told of both ends of a pair is sent by one of them
    assert every[0] == {size: times // 2 for size, times in every[1].items()}


@pytest.mark.parametrize(
    ("kind", "family", "settings"),
    [
        ("Gemma4", "gemma4_text", []),
        ("Gemma4", "gemma4_text", ["pp=4"]),
        ("Gemma3n", "gemma3n_text", ["pp=4"]),
        ("Zamba", "zamba", ["schedule=interleaved_1f1b"]),
        ("Zaya", "zaya", []),
        # parts of sequences and of heads, and heads alone
        ("Gemma4", "gemma4", ["tp=2"]),
        ("Gemma4", "gemma4", ["tp=2", "sequence=false"]),
        # features of images that later blocks add: messages have room for them in any pass
        ("qwen3_vl", "qwen3_vl", ["pp=4"]),
    ],
    ids=str,
)
def test_values_beside_hidden_states(four, tmp_path, kind, family, settings):
    """Per-layer inputs, keys and values that blocks share, embeddings, states of routers: the bytes
    of all messages of a step, and of their gradients.
    """
    path = tmp_path / "stages.plan"
    path.write_text(STAGES.format(family=family))
    ours = family in ("gemma4", "qwen3_vl")
    shipped = ["pp=2", "microbatches=4", "param_dtype=fp32"] if ours else []
    results = four.run(
        "sending_jobs.counted",
        kind=kind,
        plan=family if ours else str(path),
        settings=[*shipped, *settings],
        rows=8,
        changes=BESIDE.get(kind),
    )
    every = [Counter(), Counter()]
    for counted, told, _ in results:
        for found, total in zip((counted, told), every, strict=True):
            for (what, _, size), times in found.items():
                if what == "send":
                    total[size] += times
    stages = 4 if "pp=4" in settings else 2
    # all ranks of the pipeline tell of all its messages
    assert every[0] == {size: times // stages for size, times in every[1].items()}
