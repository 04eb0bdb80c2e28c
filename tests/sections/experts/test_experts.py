"""Experts on all ranks but the copies (`ep_shard`): right, and shared by the tensor ranks too."""

import pytest

import planc

pytestmark = pytest.mark.slow

LIMIT = 1e-4

PLAN = """plan t for mixtral, qwen3_moe

option sequence = false

mesh {
    dp_replicate = 1
    dp_shard     = auto
    tp           = 2
}

tensor on tp {
    model.layers.* {
        self_attn.{q,k,v}_proj : colwise
        optional self_attn.{q,k}_norm : sequence(dim = 2, local = true)
        when sequence {
            {input,post_attention}_layernorm : sequence
            self_attn        : input(hidden_states = shard(1) -> replicate)
            self_attn.o_proj : rowwise(-> shard(1), local = false)
            mlp              : input(shard(1) -> replicate, local = true)
            mlp              : output(replicate -> shard(1), local = false)
        } else {
            self_attn.o_proj : rowwise
        }
    }
    when sequence {
        model.embed_tokens : rowwise(-> shard(1), local = false)
        model.norm         : sequence
        lm_head            : colwise(shard(1) -> replicate)
    }
}

fsdp on dp_shard_cp, replicate on dp_replicate {
    model.layers.*.mlp.experts : unit(on = ep_shard)
    model.layers.*             : unit
    root                       : unit(reshard = never)
}
"""
APART = PLAN.replace("unit(on = ep_shard)", "unit")
WAYS = {
    "tp": [],
    "sequence": ["sequence=true"],
    "copies": ["dp_replicate=2", "dp_shard=1"],
    "tensor alone": ["tp=4"],
    "data alone": ["tp=1"],
    "copies of data": ["tp=1", "dp_replicate=2"],
}


@pytest.fixture
def written(tmp_path):
    def write(text, name="t.plan"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
def test_experts_train_as_in_one_process(four, written, model, way):
    """Logits, losses, every gradient and the weights of two steps; the script bit for bit."""
    changes = {"num_key_value_heads": 4} if way == "tensor alone" else None
    results = four.run(
        "expert_jobs.judge",
        model=model,
        path=written(PLAN),
        overrides=WAYS[way],
        changes=changes,
        hand="shared" if way == "tp" and model == "mixtral" else None,
    )
    for result in results:
        assert result["error"] < LIMIT, result
        assert result["applied"] == result["script"], result
        assert result.get("hand", result["applied"]) == result["applied"], result


@pytest.mark.parametrize("sequence", [True, False])
def test_the_tensor_ranks_share_the_experts(four, written, sequence):
    overrides = [f"sequence={str(sequence).lower()}"]
    for text, part in ((PLAN, 4), (APART, 2)):
        for share in four.run(
            "expert_jobs.shares", model="mixtral", path=written(text), overrides=overrides
        ):
            experts = [pair for name, pair in share.items() if "experts" in name]
            assert experts and all(own * part == full for own, full in experts)


@pytest.mark.parametrize("way", ["tp", "sequence"])
def test_the_handle(four, written, tmp_path, way):
    path, overrides = written(PLAN), WAYS[way]
    for result in four.run(
        "training_jobs.clip",
        model="mixtral",
        plan=path,
        overrides=overrides,
        norm_type=2.0,
        fraction=0.5,
    ):
        assert result["norm"] == pytest.approx(result["right"], rel=1e-5)
        assert result["error"] < LIMIT
        assert "dp_shard_tp" in result["layouts"]
    assert four.run(
        "training_jobs.full", model="mixtral", plan=path, overrides=overrides, every_rank=True
    ) == [1, 1, 1, 1]
    for result in four.run(
        "training_jobs.accumulate", model="mixtral", plan=path, overrides=overrides
    ):
        assert result["error"] < LIMIT


@pytest.mark.parametrize(("old", "new"), [(PLAN, APART), (APART, PLAN), (PLAN, PLAN)])
def test_resumed(four, written, tmp_path, old, new):
    results = four.run(
        "expert_jobs.resumed",
        model="mixtral",
        old=written(old, "old.plan"),
        new=written(new, "new.plan"),
        folder=str(tmp_path / "run"),
    )
    for result in results:
        assert result["equal"]
        assert result["losses"] == pytest.approx(result["right"], rel=1e-4)


DIVIDED = PLAN.replace("    root  ", "    divide = 8\n    root  ")


def test_what_the_tensor_ranks_add_is_divided_out(four, written):
    """A sum over 2 data ranks, divided by 8, is a quarter of their mean; for experts too."""
    for result in four.run("expert_jobs.divided", model="mixtral", path=written(DIVIDED), by=4):
        assert result["applied"] < LIMIT and result["script"] < LIMIT
        assert result["forgotten"] > 0.4  # without a word on the experts' units: twice as much


OWN_TOKENS = PLAN.replace("input(shard(1) -> replicate, local", "input(shard(1) -> shard(1), local")
OWN_TOKENS = OWN_TOKENS.replace("output(replicate -> shard(1)", "output(shard(1) -> shard(1)")


def test_gradients_that_tensor_ranks_do_not_share(four, written):
    """Where each has tokens of its own the loss is right, and the mean over them is no gradient."""
    path = written(OWN_TOKENS)
    overrides = ["sequence=true"]
    for result in four.run("numerics.compare", model="mixtral", plan=path, overrides=overrides):
        assert result["logits"] < LIMIT and result["loss"] < LIMIT
        assert result["gradient"] > 0.1
    found = planc.check("mixtral-8x7b", path, world_size=4, overrides=overrides)
    assert "PL502" in [d.code for d in found]


MESHES = """plan t for llama

mesh {
    dp_replicate = 2
    dp_shard     = 1
    tp           = 2
}

tensor on tp {
    lm_head : colwise(-> replicate)
}

fsdp on dp_shard_cp, replicate on dp_replicate {
    root : unit
}
"""


def test_meshes_by_name(four, written):
    sizes = {"dp": 2, "dp_cp": 2, "dp_shard_cp": 1, "ep_shard": 2, "loss": 2, "tp": 2}
    results = four.run("expert_jobs.meshes", path=written(MESHES), names=list(sizes))
    assert [found for found, _ in results] == [sizes] * 4
    assert [place for _, place in results] == [(0, 2, 0), (0, 2, 0), (1, 2, 1), (1, 2, 1)]


LYING = PLAN.replace("unit(on = ep_shard)", "spread(on = ep_shard, shard_dim = auto)")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("experts", [4, 2])
def test_experts_in_the_unit_of_their_block(four, written, way, experts):
    """The block's unit gathers two meshes; with fewer experts than ranks, along dim 1."""
    changes = {"num_key_value_heads": 4} if way == "tensor alone" else {}
    changes |= {"num_local_experts": experts}
    results = four.run(
        "expert_jobs.judge",
        model="mixtral",
        path=written(LYING),
        overrides=WAYS[way],
        changes=changes,
        hand={4: "within", 2: "within_along_one"}[experts] if way == "tp" else None,
    )
    for result in results:
        assert result["error"] < LIMIT, result
        assert result["applied"] == result["script"], result
        assert result.get("hand", result["applied"]) == result["applied"], result


def test_experts_fewer_than_ranks_are_split_along_dim_1(four, written):
    auto = PLAN.replace("on = ep_shard", "on = ep_shard, shard_dim = auto")
    for text in (auto, LYING):
        path = written(text)
        changes = {"num_local_experts": 2}
        for result in four.run(
            "expert_jobs.judge", model="mixtral", path=path, changes=changes, hand=None
        ):
            assert result["error"] < LIMIT and result["applied"] == result["script"], result
            assert "Shard(dim=1)" in result["applied"][0]
        for share in four.run("expert_jobs.shares", model="mixtral", path=path, changes=changes):
            experts = [pair for name, pair in share.items() if "experts" in name]
            assert experts and all(own * 4 == full for own, full in experts)


@pytest.mark.parametrize("way", ["tp", "sequence"])
def test_the_handle_of_two_meshes_in_one_unit(four, written, way):
    test_the_handle(four, lambda _: written(LYING), None, way)
    for wrong, gradient in four.run(
        "training_jobs.early", model="mixtral", plan=written(LYING), overrides=WAYS[way]
    ):
        assert wrong < LIMIT and gradient < LIMIT


@pytest.mark.parametrize(("old", "new"), [(LYING, APART), (APART, LYING), (PLAN, LYING)])
def test_resumed_with_two_meshes_in_one_unit(four, written, tmp_path, old, new):
    test_resumed(four, written, tmp_path, old, new)


@pytest.mark.parametrize("text", [PLAN, LYING], ids=["unit", "spread"])
def test_what_transformers_reads_of_it(four, written, tmp_path, text):
    for result in four.run(
        "expert_jobs.export", model="mixtral", path=written(text), folder=str(tmp_path / "out")
    ):
        assert result["different"] == [] and result["problems"] == []
        assert result["error"] < LIMIT


LONGCAT = """plan t for longcat_flash

extend "decoder.plan"

tensor on tp {
    $blocks {
        self_attn.*.{q_b,kv_b}_proj : colwise
        mlps.*.{gate,up}_proj       : colwise
        self_attn.*.o_proj          : rowwise
        mlps.*.down_proj            : rowwise
    }
}
"""


@pytest.mark.parametrize("way", ["tp=2", "dp_shard=4", "dp_replicate=4"])
def test_a_rank_whose_rows_use_no_weight_of_the_experts(four, written, way):
    """Experts that are the identity: ranks would reduce buffers of different sizes."""
    overrides = [way, "param_dtype=fp32"]
    for made in four.run(
        "expert_jobs.no_expert_weight", path=written(LONGCAT), overrides=overrides
    ):
        assert len(set(made["unused"])) > 1
        assert max(made["errors"].values()) < LIMIT, made["errors"]
