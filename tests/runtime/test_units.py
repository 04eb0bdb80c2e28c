"""The fsdp section, line by line: what a plan does is what torch does by hand, bit for bit."""

import pytest

pytestmark = pytest.mark.slow

LIMIT = 1e-5

HEAD = "plan t for llama\n\nmesh {\n    dp_shard = auto\n}\n\n"
TENSOR_HEAD = """plan t for llama

mesh {
    dp_shard = auto
    tp       = 2
}

tensor on tp {
    model.layers.* {
        self_attn.{q,k,v}_proj : colwise
        mlp.{gate,up}_proj     : colwise
        self_attn.o_proj       : rowwise
        mlp.down_proj          : rowwise
    }
}

"""
UNITS = "    model.layers.* : unit\n    root : unit\n"

CASES = {
    "ignoring": HEAD
    + """train {
    model.embed_tokens             : frozen
    model.layers.*.input_layernorm : frozen
}

fsdp on dp_shard {
    ignore model.embed_tokens
    ignore model.layers.*.input_layernorm
    model.layers.* : unit
    root           : unit(reshard = never)
}
""",
    "freezing": HEAD
    + """train {
    model.embed_tokens : frozen
    model.layers       : frozen
    model.layers.*.mlp : trainable
}

fsdp on dp_shard {
    precision(reduce = fp64)
    model.layers.* : unit
    root           : unit
}
""",
    "second_dim": HEAD
    + "fsdp on dp_shard {\n    model.layers.* : unit(shard_dim = 1)\n    root : unit\n}\n",
    "second_dim_tensor": TENSOR_HEAD
    + "fsdp on dp_shard {\n    model.layers.* : unit(shard_dim = 1)\n    root : unit\n}\n",
    "own_axes": """plan t for llama

mesh {
    a = 2
    b = 2
}

fsdp on a * b {
    model.layers.*.mlp : unit(on = b)
    model.layers.*     : unit
    root               : unit
}
""",
    "fetched": HEAD
    + """fsdp on dp_shard {
    prefetch(forward = 2, backward = 1)
    model.layers.*.mlp : unit
    model.layers.*     : unit
    root               : unit
}
""",
    "sized": HEAD + "fsdp on dp_shard {\n    auto(min_params = 15K) : unit\n    root : unit\n}\n",
    "classed": HEAD
    + """fsdp on dp_shard {
    **<LlamaMLP>          : unit
    **<LlamaDecoderLayer> : unit
    root                  : unit
}
""",
    "partly": HEAD
    + """fsdp on dp_shard {
    model.layers.* : unit(reshard = 2)
    root           : unit(reshard = never)
}
""",
    "partly_copied": """plan t for llama

mesh {
    dp_replicate = 2
    dp_shard     = auto
}

fsdp on dp_shard, replicate on dp_replicate {
    model.layers.* : unit(shard_dim = 1)
    root           : unit(reshard = never)
}
""",
    "hosted": HEAD + f"fsdp on dp_shard {{\n    offload(cpu)\n{UNITS}}}\n",
    "copied": """plan t for llama

mesh {
    dp = auto
}

replicate on dp {
    model.layers.*             : unit
    group(model.norm, lm_head) : unit
    root                       : unit
}
""",
    "copied_tensor": TENSOR_HEAD.replace("dp_shard", "dp") + f"replicate on dp {{\n{UNITS}}}\n",
}


@pytest.mark.parametrize("name", CASES)
def test_as_torch_by_hand(four, tmp_path, name):
    plan = tmp_path / "t.plan"
    plan.write_text(CASES[name])
    changes = {"num_hidden_layers": 4} if name == "fetched" else None
    results = four.run("unit_jobs.judge", model="llama", path=str(plan), hand=name, changes=changes)
    assert all(r["error"] < LIMIT for r in results), results
    for result in results:
        assert result["applied"] == result["script"] == result["hand"], result


DIVIDED = HEAD + f"fsdp on dp_shard {{\n    divide = 8\n{UNITS}}}\n"


def test_gradients_are_divided_by_what_the_plan_says(four, tmp_path):
    plan = tmp_path / "t.plan"
    plan.write_text(DIVIDED)
    results = four.run("unit_jobs.judge", model="llama", path=str(plan), hand="divided", steps=1)
    for result in results:
        assert result["applied"] == result["script"] == result["hand"]
        assert result["error"] > 0.4  # a sum over 4 ranks divided by 8 is half their mean
    halved = four.run("unit_jobs.halved", model="llama", path=str(plan))
    assert max(halved) < LIMIT


def test_prefetch_gathers_ahead(four, tmp_path):
    """The order of the gathers: with the plan's word two blocks early, without it just in time."""
    plan = tmp_path / "t.plan"
    plan.write_text(CASES["fetched"])
    for order in four.run("unit_jobs.gathered", path=str(plan)):
        start = order.index("forward 0")
        assert order[start : start + 6] == [
            "forward 0",
            "gather 0",
            "gather 1",
            "gather 1.mlp",
            "gather 2",
            "gather 2.mlp",
        ]
        back = order.index("backward 3")
        assert order[back + 1 : back + 3] == ["gather 2", "gather 2.mlp"]
    plan.write_text(CASES["fetched"].replace("    prefetch(forward = 2, backward = 1)\n", ""))
    for order in four.run("unit_jobs.gathered", path=str(plan)):
        assert "gather 2" not in order[: order.index("forward 1")]


def test_islands_by_dtype(four, tmp_path):
    plan = tmp_path / "t.plan"
    plan.write_text(
        HEAD
        + """fsdp on dp_shard {
    dtype(fp32)    : unit(precision(param = fp32, output = bf16))
    model.layers.* : unit
    root           : unit
}
"""
    )
    for result in four.run("unit_jobs.islands", path=str(plan)):
        assert result["applied"] == result["script"] == result["hand"]
        assert result["far"] < 0.1


MIXED = """fsdp on dp_shard {
    precision(param = bf16, reduce = fp32)
    model.layers.* : unit
    model.norm     : unit(precision(param = fp32, output = bf16))
    lm_head        : unit(
        precision(param = bf16, reduce = bf16, output = fp32, cast_inputs = false),
    )
    root           : unit
}
"""


def test_each_unit_in_its_own_precision(four, tmp_path):
    """An island by selector; what a unit reduces in, gives out, and whether it casts its inputs."""
    plan = tmp_path / "t.plan"
    plan.write_text(HEAD + MIXED)
    for result in four.run("unit_jobs.judge", model="llama", path=str(plan), hand="mixed"):
        assert result["applied"] == result["script"] == result["hand"]
        assert 1e-4 < result["error"] < 0.2


CONTEXT = """plan t for llama

mesh {
    dp_shard = 2
    cp       = 2
}

context on cp {
    attention = script
}

fsdp on dp_shard * cp {
    model.layers.* : unit
    root           : unit
}
"""


@pytest.mark.parametrize(
    ("text", "data", "loss"),
    [
        (CONTEXT, 2, 4),
        (CASES["copied"], 4, 4),
        (CASES["hosted"], 4, 4),
        (CASES["own_axes"], 4, 4),
        (CASES["second_dim_tensor"], 2, 2),
        (CASES["copied_tensor"], 2, 2),
    ],
    ids=["context", "copied", "hosted", "own_axes", "second_dim_tensor", "copied_tensor"],
)
def test_the_handle(four, tmp_path, text, data, loss):
    plan = tmp_path / "t.plan"
    plan.write_text(text)
    for result in four.run("unit_jobs.handle", path=str(plan)):
        assert set(result["data"]) == {data}
        assert set(result["loss"]) == {loss}
        assert all(error < 1e-4 for error in result["errors"].values()), result


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("hosted", "copied"),
        ("copied", "second_dim"),
        ("second_dim", "own_axes"),
        ("partly_copied", "hosted"),
        ("ignoring", "ignoring"),
    ],
)
def test_resumed_under_another_plan(four, tmp_path, old, new):
    paths = {}
    for name in {old, new}:
        paths[name] = tmp_path / f"{name}.plan"
        paths[name].write_text(CASES[name])
    results = four.run(
        "unit_jobs.resumed", old=str(paths[old]), new=str(paths[new]), folder=str(tmp_path / "run")
    )
    for result in results:
        assert result["equal"]
        assert result["losses"] == pytest.approx(result["right"], rel=1e-5)


def test_an_offloaded_shard_is_made_in_host_memory(four, tmp_path):
    plan = tmp_path / "t.plan"
    plan.write_text(
        CASES["ignoring"].replace("    ignore model.emb", "    offload(cpu)\n    ignore model.emb")
    )
    for homes in four.run("unit_jobs.homes", path=str(plan)):
        ignored = {n for n in homes if "embed_tokens" in n or "input_layernorm" in n}
        assert {homes[n] for n in ignored} == {"meta"}
        assert {homes[n] for n in homes if n not in ignored} == {"cpu"}
