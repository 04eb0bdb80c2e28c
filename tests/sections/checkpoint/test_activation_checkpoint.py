"""Checkpointing on four processes: right gradients; what runs again and is kept, counted."""

import pytest
from test_plans import right

pytestmark = pytest.mark.slow

HEAD = """plan r for FAMILY
mesh {
    dp_shard = auto
    tp       = 1
}
tensor on tp {
    optional model.embed_tokens : rowwise(-> shard(1), local = false)
    optional model.layers.* {
        {input,post_attention}_layernorm : sequence
        self_attn              : input(hidden_states = shard(1) -> replicate)
        self_attn.{q,k,v}_proj : colwise
        self_attn.o_proj       : rowwise(-> shard(1), local = false)
        mlp                    : input(shard(1) -> replicate)
        mlp.{gate,up}_proj     : colwise
        mlp.down_proj          : rowwise(-> shard(1), local = false)
    }
    model.norm : sequence
    lm_head    : colwise(shard(1) -> replicate)
}
fsdp on dp_shard {
    model.layers.* : unit
    root           : unit
}
"""
MATMULS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
LAYERS, PER_LAYER = 2, 9  # seven linears, and two products of eager attention


@pytest.fixture
def plan(tmp_path):
    def write(rules, family="llama", head=HEAD, more=""):
        path = tmp_path / "r.plan"
        section = f"checkpoint {{\n    {rules}\n}}\n" if rules else ""
        path.write_text(head.replace("FAMILY", family) + section + more)
        return str(path)

    return write


RULES = {
    "by op": "model.layers.* : ops(save = [attention, matmul(every = 2), reduce])",
    "one operator": 'model.layers.* : ops(save = ["aten.mm.default"])',
    "collectives": "model.layers.* : ops(save = [reduce, gather, exchange])",
    "full on the CPU": "model.layers.* : full(offload = cpu)",
    "by op on the CPU": "model.layers.* : ops(save = [matmul(every = 3), reduce], offload = cpu)",
    "unpinned": "model.layers.* : full(offload = cpu, pin = false)",
    "options": "model.layers.* : full(preserve_rng = false, early_stop = false)",
    "mlp alone": "model.layers.*.mlp : full",
    "attention alone": "model.layers.*.self_attn : ops(save = [matmul])",
    "every second block": "model.layers[::2] : full",
    "each half in its way": "model.layers[0] : full\n model.layers[1] : ops(save = [matmul])",
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_gradients_are_right(four, plan, name, tp):
    arguments = {"model": "llama", "plan": plan(RULES[name]), "overrides": [f"tp={tp}"]}
    results = four.run("numerics.compare", **arguments)
    right(results)
    assert four.run("numerics.compare", script=True, **arguments) == results


def test_compiled_blocks(four, plan):
    compiled = "compile {\n model.layers.* : block\n}\n"
    rules = plan("model.layers.* : ops(save = [attention, matmul(every = 2)])", more=compiled)
    right(four.run("numerics.compare", model="llama", plan=rules))


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        ("model.layers.* : full", "saved_with_vc_check to be Tensors"),
        ("model.layers.* : ops(save = [matmul])", "saved_with_vc_check to be Tensors"),
        ("model.layers.* : ops(save = [attention])", ""),
        ("model.layers.*.mlp : full", ""),
    ],
)
def test_compiled_attention_that_is_recomputed(four, plan, rules, found):
    """What torch raises in the first forward is what PL485 refuses before it."""
    more = "compile {\n model.layers.* : block\n}\n"
    path = plan(rules, more=more)
    (refused, raised), *others = four.run("activation_checkpoint_jobs.partitioned", plan=path)
    assert found in raised and bool(raised) == bool(found)
    assert ("PL485" in refused) == bool(found)
    assert others == [(refused, raised)] * 3


# What is computed again --------------------------------------------------------------------------


def recomputed(four, plan, rules, **arguments):
    """Matrix products that the backward pass computes again, of one rank."""
    plain = four.run(
        "activation_checkpoint_jobs.counted", plan=plan(""), names=MATMULS, **arguments
    )
    counts = four.run(
        "activation_checkpoint_jobs.counted", plan=plan(rules), names=MATMULS, **arguments
    )
    assert {c[0] for c in counts} == {p[0] for p in plain}
    (extra,) = {c[1] - p[1] for c, p in zip(counts, plain, strict=True)}
    return extra


EVERY = "model.layers.* : ops(save = [matmul(every = N)], early_stop = false)"


@pytest.mark.parametrize(
    ("rules", "count"),
    [
        ("model.layers.* : full(early_stop = false)", PER_LAYER),
        ("model.layers.* : full", PER_LAYER - 1),  # the last product is no input of anything
        (EVERY.replace("N", "1"), 0),
        (EVERY.replace("N", "2"), 4),  # of nine, the first, third, ... ninth are kept
        (EVERY.replace("N", "3"), 6),
        (EVERY.replace("N", "100"), PER_LAYER - 1),
        ("model.layers.* : ops(save = [reduce], early_stop = false)", PER_LAYER),
        ("model.layers.* : ops(save = [matmul(every = 2)], offload = cpu, early_stop = false)", 4),
        ("model.layers.*.mlp : full(early_stop = false)", 3),
        ("model.layers.*.self_attn : full(early_stop = false)", 6),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_matrix_products(four, plan, rules, count, tp):
    assert recomputed(four, plan, rules, overrides=[f"tp={tp}"]) == count * LAYERS


def test_every_second_block(four, plan):
    assert recomputed(four, plan, "model.layers[::2] : full(early_stop = false)") == PER_LAYER


def test_attention_kernels_are_kept(four, plan):
    kernel = ("aten._scaled_dot_product_flash_attention_for_cpu.default",)
    counts = {}
    for save in ("reduce", "attention"):
        rules = f"model.layers.* : ops(save = [{save}], early_stop = false)"
        arguments = {"names": kernel, "attention": "sdpa"}
        counts[save] = four.run(
            "activation_checkpoint_jobs.counted", plan=plan(rules), **arguments
        )[0]
    assert counts == {"reduce": (LAYERS, LAYERS), "attention": (LAYERS, 0)}


def test_collectives_are_kept(four, plan):
    """Under sequence parallelism a block has two reduce-scatters."""
    names = ("_c10d_functional.reduce_scatter_tensor.default",)
    counts = {}
    for save in ("attention", "reduce"):
        rules = plan(f"model.layers.* : ops(save = [{save}], early_stop = false)")
        counts[save] = four.run(
            "activation_checkpoint_jobs.counted", plan=rules, names=names, overrides=["tp=2"]
        )[0]
    (forward, again), (same, kept) = counts["attention"], counts["reduce"]
    assert forward == same and again - kept == 2 * LAYERS


# What is kept ------------------------------------------------------------------------------------


def test_bytes(four, plan):
    """`every = 2` keeps about half of what keeping every product costs."""
    sizes = {}
    for name, rules in (
        ("none", ""),
        ("full", "model.layers.* : full"),
        ("all", "model.layers.* : ops(save = [matmul])"),
        ("half", "model.layers.* : ops(save = [matmul(every = 2)])"),
    ):
        sizes[name] = four.run("activation_checkpoint_jobs.kept", plan=plan(rules), overrides=[])[0]
    print(sizes)
    assert sizes["full"] < sizes["half"] < sizes["all"] < sizes["none"]
    share = (sizes["half"] - sizes["full"]) / (sizes["all"] - sizes["full"])
    assert 0.4 < share < 0.65


def test_offload_moves_what_is_kept_and_brings_it_back(four, plan):
    batch = 16 * 64 * 4  # one row of 16 tokens of 64 floats
    for gone, back in four.run(
        "activation_checkpoint_jobs.parked", plan=plan(RULES["full on the CPU"])
    ):
        assert gone == back == [batch] * LAYERS
    for gone, back in four.run(
        "activation_checkpoint_jobs.parked", plan=plan(RULES["by op on the CPU"])
    ):
        assert gone == back and len(gone) == (1 + 3) * LAYERS
    assert (
        four.run("activation_checkpoint_jobs.parked", plan=plan("model.layers.* : full"))
        == [([], [])] * 4
    )


def test_offload_moves_a_ranks_own_part_of_a_dtensor(four, plan):
    """Two rows a rank of two data ranks, half of each row's tokens."""
    jobs = {"plan": plan(RULES["full on the CPU"]), "overrides": ["tp=2"]}
    for gone, back in four.run("activation_checkpoint_jobs.parked", **jobs):
        assert gone == back == [2 * 8 * 64 * 4] * LAYERS


def test_random_numbers_are_drawn_the_same_again(four, plan):
    for way in ("full", "ops(save = [matmul])", "full(offload = cpu)"):
        assert (
            max(
                four.run("activation_checkpoint_jobs.dropped", plan=plan(f"model.layers.* : {way}"))
            )
            < 1e-5
        )
    lax = plan("model.layers.* : full(preserve_rng = false)")
    assert min(four.run("activation_checkpoint_jobs.dropped", plan=lax)) > 1e-4


def test_backward_twice_through_what_was_offloaded(four, plan):
    assert all(four.run("activation_checkpoint_jobs.again", plan=plan(RULES["by op on the CPU"])))


def test_an_operator_that_this_torch_lacks(four, plan):
    from pool import RankError

    with pytest.raises(RankError) as caught:
        rules = plan('model.layers.* : ops(save = ["mylib.attend.default"])')
        four.run("activation_checkpoint_jobs.counted", plan=rules, names=())
    assert "PL492" in str(caught.value) and "mylib.attend.default" in str(caught.value)


# Blocks that are not all alike -------------------------------------------------------------------

PLAIN = """plan r for FAMILY
mesh {
    dp_shard = auto
}
fsdp on dp_shard {
    model.layers.* : unit
    root           : unit
}
"""


@pytest.mark.parametrize("way", ["full", "ops(save = [matmul(every = 2)])", "full(offload = cpu)"])
@pytest.mark.parametrize("blocks", ["model.layers.*", "model.layers[0:4]", "model.layers[4:6]"])
def test_blocks_that_share_keys_and_values(four, plan, blocks, way):
    """Blocks 4 and 5 of this gemma3n read what 2 and 3 put into a dictionary in forward; computed
    again, those put it there again. The gradients are right all the same, whoever is recomputed."""
    rules = plan(f"{blocks} : {way}", family="gemma3n_text", head=PLAIN)
    results = four.run("activation_checkpoint_jobs.compare", model="gemma3n", plan=rules)
    right(results)
    assert (
        four.run("activation_checkpoint_jobs.compare", model="gemma3n", plan=rules, script=True)
        == results
    )


def test_blocks_of_two_kinds_each_in_its_way(four, plan):
    rules = (
        "model.layers.* has conv : full\n"
        "    model.layers.* has self_attn : ops(save = [matmul(every = 2)])"
    )
    path = plan(rules, family="lfm2", head=PLAIN)
    results = four.run("activation_checkpoint_jobs.compare", model="lfm2", plan=path)
    right(results)
    assert (
        four.run("activation_checkpoint_jobs.compare", model="lfm2", plan=path, script=True)
        == results
    )


@pytest.mark.parametrize("way", ["full", "ops(save = [matmul(every = 2)])", "full(offload = cpu)"])
def test_blocks_that_share_keys_and_values_of_gemma4(four, plan, way):
    path = plan(f"model.layers.* : {way}", family="gemma4_text", head=PLAIN)
    results = four.run("activation_checkpoint_jobs.compare", model="gemma4-shared", plan=path)
    right(results)
    assert (
        four.run(
            "activation_checkpoint_jobs.compare", model="gemma4-shared", plan=path, script=True
        )
        == results
    )


SHARED = """plan r for FAMILY
mesh {
    dp_shard = auto
}
fsdp on dp_shard {
    group(model.layers[1].shared_transformer, model.layers[5].shared_transformer) : unit
    group(model.layers[3].shared_transformer, model.layers[7].shared_transformer) : unit
    model.layers.* : unit
    root           : unit
}
"""


def test_hybrid_blocks_that_share_a_transformer(four, plan):
    """zamba2: what two layers share is one unit, and is computed again in both."""
    path = plan("model.layers.* : full", family="zamba2", head=SHARED)
    results = four.run("activation_checkpoint_jobs.compare", model="zamba2", plan=path)
    right(results)
    assert (
        four.run("activation_checkpoint_jobs.compare", model="zamba2", plan=path, script=True)
        == results
    )


TOWERS = """plan r for FAMILY
mesh {
    dp_shard = auto
}
fsdp on dp_shard {
    model.language_model.layers.*      : unit
    model.vision_tower.encoder.layers.* : unit
    root                               : unit
}
"""


@pytest.mark.parametrize("scope", ["model.language_model", "model.vision_tower.encoder"])
def test_one_tower_alone(four, plan, scope):
    """Its layers are computed again, the other tower's are not."""
    path = plan(f"{scope}.layers.* : full(early_stop = false)", family="gemma3", head=TOWERS)
    arguments = {"model": "gemma3-vision", "plan": path}
    results = four.run("activation_checkpoint_jobs.compare", **arguments)
    right(results)
    assert four.run("activation_checkpoint_jobs.compare", script=True, **arguments) == results
    for again in four.run("activation_checkpoint_jobs.twice", scope=scope, **arguments):
        assert again == {f"{scope}.layers.0", f"{scope}.layers.1"}
