"""Parts of sequences on the ranks of `cp`, which the script or planc makes."""

import pytest
from helpers import sampled
from state_jobs import limit

pytestmark = pytest.mark.slow

LIMIT = 1e-4

PLAN = """plan t for llama

mesh {
    dp_shard = auto
    cp       = 2
}

context on cp {
    attention = script
}

fsdp on dp_shard_cp {
    model.layers.* : unit
    root           : unit
}
"""


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "t.plan"
    path.write_text(PLAN)
    return str(path)


@pytest.mark.parametrize("mesh", ["loss", "dp_cp", "dp_shard_cp"])
def test_slices_of_the_sequence(four, plan, mesh):
    for result in four.run("context_jobs.judge", path=plan, loss=mesh):
        assert all(error < LIMIT for error in result.values()), result


def test_a_loss_over_data_ranks_alone_is_another(four, plan):
    for result in four.run("context_jobs.judge", path=plan, loss="dp"):
        assert result["loss"] > 10 * LIMIT
        assert result["gradient"] < LIMIT


def test_slices_that_do_not_see_each_other(four, plan):
    assert max(r["gradient"] for r in four.run("context_jobs.judge", path=plan, gather=False)) > 0.1


SPLIT = """plan t for llama, gemma3_text

option attention = "all_gather"

mesh {
    dp_shard = auto
    cp       = 2
    tp       = 1
}

tensor on tp {
    model.layers.* {
        self_attn.{q,k,v}_proj : colwise
        mlp.{gate,up}_proj     : colwise
        {input,post_attention}_layernorm : sequence
        self_attn        : input(hidden_states = shard(1) -> replicate)
        self_attn.o_proj : rowwise(-> shard(1), local = false)
        mlp              : input(shard(1) -> replicate)
        mlp.down_proj    : rowwise(-> shard(1), local = false)
    }
    model.embed_tokens : rowwise(-> shard(1), local = false)
    model.norm         : sequence
    lm_head            : colwise(shard(1) -> replicate)
}

context on cp {
    attention = attention
}

checkpoint {
    model.layers.* : full
}

fsdp on dp_shard * cp {
    model.layers.* : unit
    root           : unit
}
"""
WAYS = {
    "data": [],
    "tensor": ["tp=2"],
    "alone": ["cp=4"],
    "ulysses": ["attention=ulysses"],
    "ring": ["attention=ring"],
    "ring, tensor": ["attention=ring", "tp=2"],
    "ring, alone": ["attention=ring", "cp=4"],
}


@pytest.fixture
def parts(tmp_path):
    path = tmp_path / "parts.plan"
    path.write_text(SPLIT)
    return str(path)


@pytest.mark.parametrize("way", WAYS)
def test_planc_splits_sequences(four, parts, way):
    results = four.run("context_jobs.split", model="llama", plan=parts, overrides=WAYS[way])
    assert max(r["gradient"] for r in results) < LIMIT


@pytest.mark.parametrize("attention", ["ring", "all_gather"])
@pytest.mark.parametrize("compiled", ["", "compile {\n    model.layers.* : block\n}\n"])
def test_neighbours_exchange_heads_and_layers_choose(four, attention, compiled, tmp_path):
    path = tmp_path / "neighbours.plan"
    other = "all_gather" if attention == "ring" else "ring"
    own = f"attention = {attention}(ulysses = 2)\n    model.layers.1.self_attn : {other}"
    text = SPLIT.replace("attention = attention", own).replace("cp       = 2", "cp       = 4")
    path.write_text(text.replace("fsdp on", f"{compiled}\nfsdp on"))
    arguments = dict(model="llama", plan=str(path), overrides=[])
    mine = four.run("context_jobs.split", **arguments)
    script = four.run("context_jobs.split", script=True, **arguments)
    assert max(r["gradient"] for r in mine) < LIMIT
    assert [r["bits"] for r in mine] == [r["bits"] for r in script]


COUNTS = """plan t for roberta, bart, llama4_text, deepseek_v32, gemma3_text, gpt_oss, deepseek_v3

option attention = "all_gather"

mesh {
    cp = 4
}

context on cp {
    attention = attention
}

fsdp on cp {
    root : unit
}
"""


@pytest.mark.parametrize(
    ("model", "attention"),
    [
        *((name, "all_gather") for name in ("roberta", "bart", "llama4", "deepseek_v32")),
        *((name, "ring") for name in ("roberta", "gemma3", "gpt_oss", "deepseek_v3")),
    ],
)
def test_families(four, model, attention, tmp_path):
    path = tmp_path / "counts.plan"
    path.write_text(COUNTS)
    arguments = dict(model=model, plan=str(path), overrides=[f"attention={attention}"])
    mine = four.run("context_jobs.split", **arguments)
    script = four.run("context_jobs.split", script=True, **arguments)
    assert max(r["gradient"] for r in mine) < LIMIT
    assert [r["bits"] for r in mine] == [r["bits"] for r in script]


@pytest.mark.parametrize("way", ["tensor", "ring, tensor"])
def test_the_script_has_the_same_bits(four, parts, way):
    arguments = dict(model="llama", plan=parts, overrides=WAYS[way])
    mine = four.run("context_jobs.split", **arguments)
    script = four.run("context_jobs.split", script=True, **arguments)
    assert max(r["gradient"] for r in script) < LIMIT
    assert [r["bits"] for r in mine] == [r["bits"] for r in script]


@pytest.mark.parametrize("attention", ["all_gather", "ring"])
def test_compiled_blocks(four, parts, attention, tmp_path):
    path = tmp_path / "compiled.plan"
    blocks = "compile {\n    model.layers.* : block\n}\n"
    path.write_text(SPLIT.replace("fsdp on", f"{blocks}\nfsdp on"))
    overrides = [f"attention={attention}"]
    results = four.run("context_jobs.split", model="llama", plan=str(path), overrides=overrides)
    assert max(r["gradient"] for r in results) < LIMIT


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("bloom", ["cp=4"]),
        ("codegen", ["cp=2"]),
        ("deepseek_v4", ["cp=2", "ep=2"]),
        ("falcon", ["cp=2", "tp=2"]),
        ("gptj", ["cp=2", "tp=2", "sequence=false"]),
        ("mpt", ["cp=2", "dp_replicate=2"]),
        ("xglm", ["cp=2", "tp=2"]),
    ],
)
def test_attention_of_a_familys_own(four, model, overrides):
    arguments = dict(model=model, plan=model, overrides=[*overrides, "param_dtype=fp32"])
    mine = four.run("context_jobs.split", **arguments)
    script = four.run("context_jobs.split", script=True, **arguments)
    assert max(r["gradient"] for r in mine) < LIMIT
    assert [r["bits"] for r in mine] == [r["bits"] for r in script]


# states that go from token to token ---------------------------------------------------------------

FAMILIES = ("qwen3_next", "bamba", "mamba", "recurrent_gemma", "rwkv", "zaya", "minimax", "lfm2")


@pytest.mark.parametrize(
    ("family", "kind", "balance", "exchange", "reentrant"),
    sampled(
        [
            *((f, "plain", "none", "state", None) for f in FAMILIES),
            *((f, "mixed", "head_tail", "state", False) for f in FAMILIES),
            *((f, "packed", "head_tail", "state", True) for f in FAMILIES),
            *((f, "aligned", "per_document", "state", None) for f in FAMILIES[:3]),
            *((f, "mixed", "none", "gather", True) for f in FAMILIES),
        ],
        every=5,
    ),
)
def test_states_of_families(four, family, kind, balance, exchange, reentrant):
    settings = dict(attention="all_gather", balance=balance, exchange=exchange)
    found = four.run("state_jobs.judge", family=family, kind=kind, reentrant=reentrant, **settings)
    assert max(found) < limit(family)


STATES = {
    "qwen3_next": "qwen3_next",
    "bamba": "falcon_h1",
    "jamba": "jamba",
    "mamba2": "mamba2",
    "minimax": "minimax",
    "nemotron_h": "nemotron_h",
}
MESHES = {"alone": ["cp=4"], "data": ["cp=2"], "tensor": ["cp=2", "tp=2"]}
DOUBLE = ["param_dtype=fp64", "reduce_dtype=fp64"]


@pytest.mark.parametrize(("model", "mesh"), sampled([(m, w) for m in STATES for w in MESHES], 5))
def test_states_under_plans_of_the_library(four, model, mesh):
    """Under FSDP and checkpoints, and beside tensor parallelism."""
    overrides = [*MESHES[mesh], *DOUBLE]
    arguments = dict(model=model, plan=STATES[model], overrides=overrides, double=True)
    mine = four.run("context_jobs.split", **arguments)
    script = four.run("context_jobs.split", script=True, **arguments)
    assert max(r["gradient"] for r in mine) < limit(model)
    assert [r["bits"] for r in mine] == [r["bits"] for r in script]
