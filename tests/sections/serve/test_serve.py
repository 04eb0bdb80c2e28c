"""The serve section: what it says of an engine, and which layouts it refuses."""

import pytest
import torch
from console import call
from families import FAMILIES
from tiny_engines import (
    DENSE,
    EXPERTS,
    LLAMA,
    MIXTURE,
    SIZES,
    by_arithmetic,
    compiled,
    files_of,
    fill,
    serve,
    side_of,
)
from transformers import AutoConfig, AutoModelForCausalLM

import planc


@pytest.mark.parametrize(("tp", "kv"), [(1, 4), (2, 4), (4, 2), (8, 1), (8, 8)])
def test_a_dense_model(tp, kv):
    side = side_of({**LLAMA, "num_key_value_heads": kv}, serve(f"on tp = {tp}"))
    files = files_of(side)
    assert side.size == tp and len(files) == 2 * 9 + 3
    for rank in range(tp):
        ours, theirs = fill(side, rank, files), by_arithmetic(files, rank, tp=tp, kv=kv)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("tp", "dp", "ep"), [(2, 2, 2), (4, 1, 4), (2, 1, 1), (1, 4, 4)])
def test_a_mixture(tp, dp, ep):
    rules = DENSE + EXPERTS
    side = side_of(MIXTURE, serve(f"on tp = {tp}, dp = {dp}, ep = {ep}", rules))
    files = files_of(side)
    for rank in range(tp * dp):
        ours = fill(side, rank, files)
        theirs = by_arithmetic(files, rank, tp=tp, kv=4, ep=ep, dp=dp)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_uneven_experts_and_a_stack_in_another_module():
    """The first groups have one expert more; vLLM has the stacks in `routed_experts`."""
    rules = DENSE + EXPERTS.replace("experts.w", "experts.routed_experts.w")
    side = side_of(MIXTURE, serve("on dp = 3, ep = 3", rules))
    name = "model.layers.1.mlp.experts.routed_experts.w13_weight"
    assert [side.tensors_of(rank)[name].shape[0] for rank in range(3)] == [3, 3, 2]


FUSED = """
    self_attn.qkv_proj           : qkv
    mlp.gate_up_proj             : merged
    self_attn.o_proj, mlp.down_proj : row
    embed_tokens, lm_head        : vocab
"""


@pytest.mark.parametrize(("tp", "kv"), [(2, 4), (4, 2), (8, 1)])
def test_files_that_have_weights_fused(tp, kv):
    """Each part is divided, as those of files that have the parts."""
    config = {**SIZES, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
    side = side_of({**config, "num_key_value_heads": kv}, serve(f"on tp = {tp}", FUSED))
    files, apart = files_of(side), {}
    for name, tensor in files.items():
        stem = name.rpartition(".")[0].rpartition(".")[0]
        if "qkv_proj" in name:
            sizes = [64, 8 * kv, 8 * kv]
            parts = zip("qkv", tensor.split(sizes), strict=True)
            apart |= {f"{stem}.{part}_proj.weight": rows for part, rows in parts}
        elif "gate_up_proj" in name:
            parts = zip(("gate", "up"), tensor.chunk(2), strict=True)
            apart |= {f"{stem}.{part}_proj.weight": rows for part, rows in parts}
        else:
            apart[name] = tensor
    for rank in range(tp):
        ours, theirs = fill(side, rank, files), by_arithmetic(apart, rank, tp=tp, kv=kv)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


GPT_OSS = """
    attn               : renames(self_attn)
    self_attn.qkv_proj : qkv(q_proj, k_proj, v_proj)
    self_attn.o_proj   : row
    self_attn.sinks    : column
    mlp.experts.routed_experts.w13_weight : experts_column(gate_up_proj, transposed = true)
    mlp.experts.routed_experts.w13_bias   : experts_column(gate_up_proj_bias)
    mlp.experts.routed_experts.w2_weight  : experts_row(down_proj, transposed = true)
    mlp.experts.routed_experts.w2_bias    : experts_row(down_proj_bias)
    embed_tokens, lm_head : vocab
"""


@pytest.mark.parametrize(("tp", "dp", "ep"), [(2, 1, 1), (2, 2, 2), (1, 3, 3)])
def test_stacks_of_the_files(tp, dp, ep):
    """By the arithmetic of `_load_weights_other` in vLLM's gpt_oss.py."""
    config = {**FAMILIES["gpt_oss"], "architectures": ["GptOssForCausalLM"]}
    side = side_of(config, serve(f"on tp = {tp}, dp = {dp}, ep = {ep}", GPT_OSS))
    files, inside = files_of(side), tp * dp // ep
    for rank in range(tp * dp):
        group, at = divmod(rank, inside)
        fewest, more = divmod(4, ep)
        mine = range(4)[group * fewest + min(group, more) :][: fewest + (group < more)]
        mine = slice(mine.start, mine.stop)
        ours = fill(side, rank, files)
        there, here = "model.layers.1.mlp.experts.", "model.layers.1.mlp.experts.routed_experts."
        up, down = (files[f"{there}{name}_proj"][mine] for name in ("gate_up", "down"))
        assert torch.equal(ours[f"{here}w13_weight"], up.chunk(inside, 2)[at].mT)
        assert torch.equal(ours[f"{here}w2_weight"], down.chunk(inside, 1)[at].mT)
        biases = [files[f"{there}{name}_proj_bias"][mine] for name in ("gate_up", "down")]
        assert torch.equal(ours[f"{here}w13_bias"], biases[0].chunk(inside, 1)[at])
        assert torch.equal(ours[f"{here}w2_bias"], biases[1] * (at == 0))
        sinks = files["model.layers.1.self_attn.sinks"].chunk(tp)[rank % tp]
        assert torch.equal(ours["model.layers.1.attn.sinks"], sinks)
        assert not any("self_attn" in name for name in ours)


def test_stacks_of_two_parts():
    """By the arithmetic of granitemoe.py: the first half of the rows is the gate."""
    config = {**FAMILIES["granitemoe"], "architectures": ["GraniteMoeForCausalLM"]}
    rules = """
    block_sparse_moe.experts.w13_weight : experts_merged(input_linear)
    block_sparse_moe.experts.w2_weight  : experts_row(output_linear)
    """
    side = side_of(config, serve("on tp = 2", rules))
    files = files_of(side)
    stem = "model.layers.0.block_sparse_moe."
    gate, up = files[f"{stem}input_linear.weight"].chunk(2, 1)
    for rank in range(2):
        ours = fill(side, rank, files)
        wanted = torch.cat([gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]], 1)
        assert torch.equal(ours[f"{stem}experts.w13_weight"], wanted)
        wanted = files[f"{stem}output_linear.weight"].chunk(2, 2)[rank]
        assert torch.equal(ours[f"{stem}experts.w2_weight"], wanted)


def test_dtypes_and_settings():
    side = side_of(LLAMA, serve("on tp = 2, dtype bf16"), "tp=4", "dtype=fp16")
    assert side.size == 4
    assert {tensor.dtype for tensor in side.tensors_of(0).values()} == {"float16"}


def test_fp8_in_blocks():
    """Linear weights are in fp8, and their scales are divided like them."""
    side = side_of(LLAMA, serve("on tp = 2, fp8 = 16, dtype bf16"))
    tensors = side.tensors_of(1)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert (tensors[name].shape, tensors[name].dtype) == ((64, 64), "float8_e4m3fn")
    scales = tensors[f"{name}_scale_inv"]
    assert (scales.shape, scales.dtype) == ((4, 4), "float32")
    assert tensors["model.norm.weight"].dtype == tensors["lm_head.weight"].dtype == "bfloat16"
    files = files_of(side)
    grid = {n.removesuffix("_scale_inv"): t for n, t in files.items() if n.endswith("_scale_inv")}
    ours, theirs = fill(side, 1, files), by_arithmetic(grid, 1, tp=2, kv=4)
    assert len(theirs) == 8
    assert all(torch.equal(ours[f"{n}_scale_inv"], tensor) for n, tensor in theirs.items())


def test_a_later_section_replaces_sizes():
    text = serve("on tp = 2, dtype bf16") + "\nserve vllm on tp = 4 {\n}\n"
    side = side_of(LLAMA, text)
    assert side.size == 4
    assert {tensor.dtype for tensor in side.tensors_of(0).values()} == {"bfloat16"}


def test_a_tied_head_is_not_sent_twice():
    side = side_of({**LLAMA, "tie_word_embeddings": True}, serve("on tp = 2"))
    assert "model.embed_tokens.weight" in side.tensors_of(0)
    assert "lm_head.weight" not in side.tensors_of(0)


def test_left_out():
    side = side_of(
        LLAMA, serve("on tp = 2", DENSE.replace(", lm_head", "") + "lm_head : left_out\n")
    )
    assert "lm_head.weight" not in side.tensors_of(0) | files_of(side)


def test_a_padded_vocabulary_grows_for_sglang():
    side = side_of(
        {**LLAMA, "num_attention_heads": 15, "num_key_value_heads": 5, "hidden_size": 120},
        serve("on tp = 5", "embed_tokens, lm_head : vocab\n", engine="sglang"),
    )
    assert side.tensors_of(4)["lm_head.weight"].shape == (64, 120)  # 131 to 320 rows
    assert fill(side, 4, files_of(side))["lm_head.weight"].eq(0).all()


REFUSED = {
    "8 heads": (LLAMA, "on tp = 3", DENSE, "PL692"),
    "ranks of tp for": (
        {**LLAMA, "num_attention_heads": 12, "hidden_size": 96},
        "on tp = 6",
        DENSE,
        "PL692",
    ),
    "192 padded rows": (
        {**LLAMA, "num_attention_heads": 15, "num_key_value_heads": 5, "hidden_size": 120},
        "on tp = 5",
        DENSE,
        "PL692",
    ),
    "rows of an expert": (MIXTURE, "on dp = 6, ep = 2", EXPERTS, "PL692"),
    "mlp.gate_proj on a rank": (LLAMA, "on fp8 = 64", DENSE, "PL692"),
    "expert's gate_proj on a rank": (MIXTURE, "on fp8 = 64", EXPERTS, "PL692"),
    "blocks of 32 rows": (LLAMA, "on tp = 4, fp8 = 32", DENSE, "PL692"),
    "ranks for groups": (MIXTURE, "on dp = 4, ep = 3", EXPERTS, "PL692"),
    "lacks model.layers.*.mlp.gate_proj": (
        {**LLAMA, "model_type": "nemotron", "architectures": ["NemotronForCausalLM"]},
        "",
        "mlp.gate_up_proj : merged(gate_proj, up_proj)\n",
        "PL693",
    ),
    "no tensor of LlamaForCausalLM belongs to `self_attn.qkv_proj`": (
        LLAMA,
        "",
        "self_attn.qkv_proj : qkv\n",
        "PL693",
    ),
    "no tensor of LlamaForCausalLM belongs to `attention`": (
        LLAMA,
        "",
        "attn : renames(attention)\n",
        "PL693",
    ),
    "no tensor of": (LLAMA, "", "lm_heads : vocab\n", "PL693"),
    "two rules decide lm_head.weight": (LLAMA, "", "lm_head : vocab\nlm_head : column\n", "PL102"),
    "is a stack of experts, which is not sent in fp8": (
        {**FAMILIES["gpt_oss"], "architectures": ["GptOssForCausalLM"]},
        "on fp8 = 16",
        "mlp.experts.w2_weight : experts_row(down_proj, transposed = true)\n",
        "PL699",
    ),
    "rows of the experts in": (
        {**FAMILIES["granitemoe"], "architectures": ["GraniteMoeForCausalLM"]},
        "on tp = 5",
        "block_sparse_moe.experts.w13_weight : experts_merged(input_linear)\n",
        "PL692",
    ),
    "there is no layer": (LLAMA, "", "lm_head : rows\n", "PL105"),
    "takes no argument": (LLAMA, "", "lm_head : vocab(embed_tokens)\n", "PL012"),
    "names the layers of queries": (LLAMA, "", "a.b : qkv(q_proj, k_proj)\n", "PL012"),
    "a positive integer": (LLAMA, "on tp = 0", DENSE, "PL012"),
    "bf16, fp16 or fp32": (LLAMA, "on dtype int3", DENSE, "PL012"),
    "no size `pp`": (LLAMA, "on pp = 2", DENSE, "PL011"),
    "contains layers": (LLAMA, "", "tp = 4\n", "PL011"),
}


@pytest.mark.parametrize(
    ("sizes", "rules", "help"),
    [
        ("on dtype bf61", DENSE, "did you mean `bf16`?"),
        ("", "self_attn.qkv_proj : qkv(q_proj)\n", "write `qkv(q_proj, k_proj, v_proj)`"),
        ("", "mlp.gate_up_proj : merged(2)\n", "write `merged(gate_proj, up_proj)`"),
        ("", "mlp.experts : experts_row\n", "write `experts_row(down_proj)`"),
        ("", "attn : renames(a, b)\n", "write `renames(self_attn)`"),
        ("", "model.layers.*.mlp.down_proj : row\n", "write `self_attn.o_proj : row`"),
    ],
)
def test_help(sizes, rules, help):
    _, _, sink = compiled(LLAMA, serve(sizes, rules))
    assert any(d.code == "PL012" and (d.help or "").startswith(help) for d in sink), [*sink]


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words):
    config, sizes, rules, code = REFUSED[words]
    _, done, sink = compiled(config, serve(sizes, rules))
    assert done.lowered is None
    assert any(d.code == code and words in d.message for d in sink), [*sink]
    assert all(d.labels for d in sink)


def test_an_override_wins():
    rules = DENSE + "override lm_head : column\n"
    config = {**LLAMA, "vocab_size": 132}
    assert side_of(config, serve("on tp = 2", rules)).tensors_of(0)["lm_head.weight"].shape == (
        66,
        64,
    )


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("serve", "names its engine"),
        ("serve tgi", "no serving engine `tgi`"),
        ("matmul vllm", "unexpected `vllm`"),
        ("matmul on tp = 2", "unexpected `=`"),
    ],
)
def test_heads(head, words):
    _, _, sink = compiled(LLAMA, f'plan p for any\nextend "llama"\n{head} {{\n}}\n')
    assert any(words in d.message for d in sink), [*sink]


def test_two_engines():
    _, _, sink = compiled(LLAMA, serve() + serve(engine="sglang").partition("\n\n")[2])
    assert [d.message for d in sink] == ["a plan serves with one engine, not with vllm and sglang"]


def test_a_model_that_no_configuration_builds(tmp_path, monkeypatch):
    (tmp_path / "own_decoder.py").write_text(
        "import torch\n\n\ndef build():\n    return torch.nn.Sequential(torch.nn.Linear(8, 8))\n"
    )
    (tmp_path / "rollout.plan").write_text(serve("on tp = 2", ""))
    monkeypatch.chdir(tmp_path)
    words = ("own_decoder:build", "rollout.plan", "--allow-code", "--level", "structure")
    code, text, _ = call("check", *words)
    assert code == 1 and "PL694" in text and "has no configuration" in text


def test_a_plan_of_an_engine_is_not_applied(tmp_path):
    plan = tmp_path / "rollout.plan"
    plan.write_text(serve("on tp = 2"))
    values = {k: v for k, v in LLAMA.items() if k != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **values))
    with pytest.raises(planc.PlanError, match="its ranks are those of an engine"):
        planc.apply(model, plan, device_type="cpu")


def test_commands(tmp_path):
    """A plan of an engine is formatted, checked without a mesh, and sized by `--set`."""
    plan = tmp_path / "rollout.plan"
    plan.write_text(serve("on   tp=2,dtype   bf16"))
    assert call("fmt", plan)[0] == 0
    assert "serve vllm on tp = 2, dtype bf16 {" in plan.read_text()
    words = ("check", "llama-3.2-1b", plan, "--level", "structure")
    assert call(*words)[0] == 0
    code, text, _ = call(*words, "--set", "tp=3")
    assert code == 1 and "PL692" in text and "--set tp=3" in text
    code, text, _ = call(*words, "--set", "pp=3")
    assert code == 1 and "PL106" in text
