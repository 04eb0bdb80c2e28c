"""A small configuration keeps what a plan's rightness hangs on, for every family."""

import json
import time

import diffused
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planc.files.resources import PLANS
from planc.proxy.shrink import shrink as shrunk
from planc.proxy.transformers_model import add_denoising_loss

MODELS = sorted({p.stem for p in (PLANS / "models").glob("*.json")} - set(diffused.TOTALS))


def shrink(config, **arguments):
    return shrunk(config, **arguments).values


def shipped(name):
    return json.loads((PLANS / "models" / f"{name}.json").read_text())


def resolved(family, **changes):
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **changes).to_dict()


def trained(config):
    """The small model after one backward pass, and the seconds that all of it took."""
    import torch
    import transformers
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL

    began = time.perf_counter()
    values = dict(config)
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    named = (values.get("architectures") or [""])[0]
    cls = CAUSAL[type(made)] if type(made) in CAUSAL else getattr(transformers, named)
    part = made if isinstance(made, cls.config_class) else made.get_text_config()
    model = cls._from_config(part, attn_implementation="eager").float().train()
    add_denoising_loss(model)
    tokens = torch.randint(8, 64, (2, 16))
    output = model(input_ids=tokens, labels=tokens, use_cache=False)
    output.loss.backward()
    assert torch.isfinite(output.loss)
    return model, time.perf_counter() - began


def test_the_ratio_of_heads_stays():
    small = shrink(shipped("llama-3.1-8b"), ranks={"tensor": 2})
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (8, 2)
    assert small["hidden_size"] == 8 * 16
    assert small["num_hidden_layers"] == 2


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_everything_divides(model, tp):
    config = shipped(model)
    small = shrink(config, ranks=tp)
    assert small["model_type"] == config["model_type"]
    names = ("num_attention_heads", "n_head", "hidden_size", "n_embd", "intermediate_size")
    for name in (*names, "vocab_size"):
        if name in config:
            assert small[name] % tp == 0, name
            assert small[name] <= 1024, name
    before, after = config.get("num_key_value_heads"), small.get("num_key_value_heads")
    if before and before % tp == 0 and before < config["num_attention_heads"]:
        assert after % tp == 0
    assert (after == before) or (after is not None and after > 1) or tp == 1


def test_one_kv_head_stays_one():
    small = shrink(shipped("gemma-3-1b"), ranks=2)
    assert small["num_key_value_heads"] == 1
    assert small["num_attention_heads"] % 2 == 0


def test_as_many_kv_heads_as_queries_stay_so():
    small = shrink(shipped("phi-3-mini"), ranks=4)
    assert small["num_key_value_heads"] == small["num_attention_heads"] == 4


def test_kv_heads_that_do_not_divide_still_do_not():
    config = {"model_type": "llama", "num_attention_heads": 12, "num_key_value_heads": 3}
    assert shrink(config, ranks=2)["num_key_value_heads"] == 3


@pytest.mark.parametrize(
    ("before", "real", "ranks", "after"),
    [
        (8, 4, 4, 4),
        (8, 8, 4, 4),
        (2, 4, 4, 2),
        (2, 4, 2, 1),
        (4, 8, 4, 2),
        (6, 4, 4, 6),
        (6, 4, 2, 3),
    ],
)
def test_kv_heads_are_to_the_ranks_as_in_the_real_run(before, real, ranks, after):
    config = {"model_type": "llama", "num_attention_heads": 24, "num_key_value_heads": before}
    small = shrink(config, ranks=ranks, real=real)
    assert small["num_key_value_heads"] == after
    assert small["num_attention_heads"] % after == small["num_attention_heads"] % ranks == 0


def test_the_last_layer_is_of_the_kind_of_the_real_last_layer():
    """The real last layer is of an earlier kind than the one that began last."""
    kinds = ["sliding_attention", "full_attention", "linear_attention", "full_attention"]
    small = shrunk({"model_type": "t", "num_hidden_layers": 4, "layer_types": kinds}, ranks=2)
    assert small.values["layer_types"] == kinds and small.kept == {4: [(0, 1, 2, 3)]}
    small = shrunk({"model_type": "t", "num_hidden_layers": 3, "layer_types": kinds[:3]}, ranks=2)
    assert small.kept == {3: [(0, 1, 2)]}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("queries", "kv", "real"), [(12, 12, 8), (16, 16, 32), (36, 12, 8)])
def test_query_heads_that_do_not_divide_still_do_not(queries, kv, real, ranks):
    """Nor do they where their features do: 16 heads of 128 on 32 ranks."""
    config = {"model_type": "llama", "num_attention_heads": queries, "num_key_value_heads": kv}
    small = shrink({**config, "hidden_size": 128 * queries}, ranks=ranks, real=real)
    heads, groups = small["num_attention_heads"], small["num_key_value_heads"]
    assert heads % ranks and heads % groups == 0 and (heads == groups) == (queries == kv)
    assert small["hidden_size"] % ranks == 0


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_vocabulary_divides_where_the_real_one_does(ranks):
    for size, real in ((50257, 2), (32002, 4), (32000, 8), (31998, 6), (32001, 3)):
        small = shrink({"model_type": "llama", "vocab_size": size}, ranks=ranks, real=real)
        assert (small["vocab_size"] % ranks == 0) == (size % real == 0)


def test_ties_biases_and_norms_stay():
    config = {**shipped("qwen2.5-0.5b"), "attention_bias": True, "use_qk_norm": True}
    small = shrink(config, ranks=2)
    kept = ("tie_word_embeddings", "attention_bias", "use_qk_norm", "rms_norm_eps", "hidden_act")
    for name in kept:
        assert small.get(name) == config.get(name), name


def test_dropout_is_off():
    names = (
        "resid_pdrop",
        "attention_dropout",
        "hidden_dropout_prob",
        "layerdrop",
        "drop_path_rate",
        "router_jitter_noise",
    )
    small = shrink({"model_type": "gpt2", **dict.fromkeys(names, 0.1)}, ranks=1)
    assert [small[n] for n in names] == [0.0] * len(names)


def test_each_kind_of_layer_is_there_once():
    kinds = [*["sliding_attention"] * 5, "full_attention"] * 4
    config = {"model_type": "gemma3_text", "num_hidden_layers": 24, "layer_types": kinds}
    small = shrink(config, ranks=2)
    assert small["layer_types"] == ["sliding_attention", "full_attention"]
    assert small["num_hidden_layers"] == 2


def test_a_list_of_kinds_alone_is_the_depth():
    """nemotron_h has no number of layers; neighbors stay neighbors."""
    kinds = [*["mamba", "mlp"] * 3, "mamba", "attention", *["mlp", "mamba"] * 22]
    small = shrink({"model_type": "nemotron_h", "layers_block_type": kinds}, ranks=2)
    assert small["layers_block_type"] == ["mlp", "mamba", "attention"]
    few = {"model_type": "nemotron_h", "layers_block_type": ["mlp"] * 9}
    assert shrink(few, ranks=2)["layers_block_type"] == ["mlp", "mlp"]


@settings(deadline=None)  # no test is timed
@given(st.integers(2, 9), st.integers(1, 9), st.integers(0, 8), st.integers(0, 8))
def test_periods_with_offsets_keep_every_kind_in_a_run_of_neighbors(attention, expert, at, on):
    """jamba: attention once in a period, experts once in another."""
    config = {
        "model_type": "jamba",
        "num_hidden_layers": 72,
        "attn_layer_period": attention,
        "attn_layer_offset": at % attention,
        "expert_layer_period": expert,
        "expert_layer_offset": on % expert,
    }

    def layers(values):
        return [
            (
                i % values["attn_layer_period"] == values["attn_layer_offset"],
                i % values["expert_layer_period"] == values["expert_layer_offset"],
            )
            for i in range(values["num_hidden_layers"])
        ]

    full, small = layers(config), layers(shrink(config, ranks=2))
    assert set(small) == set(full)
    runs = [full[i : i + len(small)] for i in range(len(full) - len(small) + 1)]
    assert small in runs
    shorter = [run[:-1] for run in runs]
    assert len(small) == 2 or not any(set(run) == set(full) for run in shorter)


def test_a_period_without_an_offset_stays_whole():
    config = {"model_type": "x", "num_hidden_layers": 24, "moe_layer_interval": 3}
    assert shrink(config, ranks=2)["num_hidden_layers"] == 3
    jamba = {**config, "attn_layer_period": 2, "attn_layer_offset": 1}
    assert shrink(jamba, ranks=2)["num_hidden_layers"] == 6


def test_dense_and_sparse_layers_are_kinds_and_go_with_the_others():
    config = {
        "model_type": "x",
        "num_hidden_layers": 4,
        "layer_types": ["a", "a", "b", "b"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    }
    small = shrink(config, ranks=1)
    assert small["layer_types"] == ["a", "a", "b"]
    assert small["mlp_layer_types"] == ["dense", "sparse", "sparse"]
    assert small["num_hidden_layers"] == 3


def test_the_first_dense_layers_of_an_moe_leave_room_for_a_sparse_one():
    small = shrink(
        {"model_type": "x", "num_hidden_layers": 61, "first_k_dense_replace": 3}, ranks=1
    )
    assert small["first_k_dense_replace"] < small["num_hidden_layers"] == 2


def test_experts_divide_by_ep():
    config = {"model_type": "x", "num_experts": 128, "num_experts_per_tok": 8}
    small = shrink(config, ranks={"expert": 4})
    assert small["num_experts"] == 8 and small["num_experts_per_tok"] == 2


def test_tokens_are_in_the_vocabulary_and_apart():
    config = {"model_type": "x", "vocab_size": 50000, "pad_token_id": None}
    config |= {"bos_token_id": 49998, "eos_token_id": [49999, 3]}
    small = shrink(config, ranks=2)
    assert small["pad_token_id"] is None
    ids = [small["bos_token_id"], *small["eos_token_id"]]
    assert all(0 <= i < small["vocab_size"] for i in ids) and len(set(ids)) == 3


def test_factors_of_a_long_rope_fit_the_small_head():
    factors = [1.0 + i for i in range(48)]
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    config = {"model_type": "phi3", "num_attention_heads": 32, "rope_scaling": rope}
    small = shrink(config, ranks=2)
    assert small["rope_scaling"]["short_factor"] == factors[:8]


def test_it_changes_nothing_of_what_it_is_given():
    config = resolved("gemma3_text")
    before = json.dumps(config, default=str)
    shrink(config, ranks=2)
    assert json.dumps(config, default=str) == before


@given(
    st.integers(1, 128), st.integers(1, 16), st.integers(1, 200), st.sampled_from([1, 2, 3, 4, 8])
)
def test_any_heads_and_depth(kv, ratio, depth, tp):
    config = {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_attention_heads": kv * ratio,
        "num_key_value_heads": kv,
        "num_hidden_layers": depth,
    }
    small = shrink(config, ranks=tp)
    heads, groups = small["num_attention_heads"], small["num_key_value_heads"]
    assert heads % groups == 0 and heads % tp == 0
    assert small["hidden_size"] == heads * 16
    assert 1 <= small["num_hidden_layers"] <= 2
    assert (kv == 1 and ratio > 1) <= (groups == 1)


def test_a_list_that_names_every_layer_makes_no_kinds():
    config = {"model_type": "x", "num_hidden_layers": 48, "moe_layers": list(range(48))}
    small = shrink(config, ranks=2)
    assert small["num_hidden_layers"] == 2 and small["moe_layers"] == [0, 1]


OTHERS = ("llama4_text", "mixtral", "deepseek_v3", "qwen3_moe", "bamba", "jamba", "gpt_oss")
"""Families without a plan, for what they have of their own: experts, state spaces, kinds."""


def configuration(name):
    if name in OTHERS:
        return resolved(name)
    fields = shipped(name)
    return resolved(fields.pop("model_type"), **fields)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", (*MODELS, *OTHERS))
def test_it_builds_and_trains(name, tp):
    model, seconds = trained(shrink(configuration(name), ranks=tp))
    assert sum(p.numel() for p in model.parameters()) < 16_000_000
    assert seconds < 20  # less than one where nothing else runs
    assert all(p.grad is not None for n, p in model.named_parameters() if "embed_tokens" in n)


def test_a_part_that_says_the_size_of_the_one_beside_it_goes_with_it():
    small = shrink(
        {
            "model_type": "blt",
            "global_config": {"hidden_size": 2048, "num_attention_heads": 16},
            "decoder_config": {
                "hidden_size": 1024,
                "num_attention_heads": 16,
                "hidden_size_global": 2048,
                "hidden_size_other": 2048,
            },
        },
        ranks=2,
    )
    assert small["decoder_config"]["hidden_size_global"] == small["global_config"]["hidden_size"]
    assert small["decoder_config"]["hidden_size_other"] == 2048
