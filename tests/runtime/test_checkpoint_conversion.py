"""Checkpoints whose names and shapes are not the model's: what each tensor is put together from."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from planc.diagnostics.diagnostic import Diagnostic
from planc.model.checkpoint_conversion import HubNames, Recipe, recipes
from planc.runtime.standalone.safetensors_files import StoredTensor, tensors_in_folder
from planc.runtime.standalone.shards import named_tensors
from planc.runtime.weights.loading import _convert, match_or_report
from planc.runtime.weights.stored_tensors import ConvertedTensor, assemble_tensor

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 12,
    "num_local_experts": 12,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}


def build(family, meta=False):
    config = transformers.AutoConfig.for_model(family, **SMALL)
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        return transformers.AutoModelForCausalLM.from_config(config)


FAMILIES = ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v3", "glm4_moe", "granitemoe"]


@pytest.mark.parametrize("family", [*FAMILIES, "jamba", "phimoe", "minimax", "gpt_oss", "llama"])
def test_what_transformers_writes_is_read_slice_by_slice(family, tmp_path):
    """In three ways: whole, by two halves of dim 0 and by two halves of the last dim."""
    right = build(family)
    right.save_pretrained(tmp_path, max_shard_size="200KB")
    problems: list[str] = []
    entries = tensors_in_folder(tmp_path, problems)
    model = build(family, meta=True)
    findings: list[Diagnostic] = []
    stored = _convert(model, entries, findings)
    assert problems == findings == [] and stored.keys() >= {n for n, _ in model.named_parameters()}
    several = any(len(getattr(s, "pieces", ())) > 1 for s in stored.values())
    assert several == (family not in ("gpt_oss", "llama", "granitemoe"))
    for name, parameter in right.named_parameters():
        for dim, start, stop in ((0, 0, None), (0, 1, None), (-1, 0, -1)):
            part = [slice(None)] * parameter.ndim
            part[dim] = slice(start, stop)
            want = parameter[tuple(part)]
            ranges = tuple(
                ((s.indices(n)[0], s.indices(n)[1]),)
                for s, n in zip(part, parameter.shape, strict=True)
            )
            got = torch.full_like(want, float("nan"))
            stored[name].copy_to(got, ranges)
            assert torch.equal(got, want), name


def test_experts_are_in_the_order_of_their_numbers(tmp_path):
    build("mixtral").save_pretrained(tmp_path)
    model = build("mixtral", meta=True)
    found = recipes(model, tensors_in_folder(tmp_path, []), dict(named_tensors(model)))
    recipe = found["model.layers.0.mlp.experts.gate_up_proj"]
    assert recipe.steps == (("stack", 0, 0), ("join", 1, 0))
    gates, ups = recipe.parts
    assert [n.split(".")[-3:-1] for n in gates] == [[str(i), "w1"] for i in range(12)]
    assert [n.split(".")[-3:-1] for n in ups] == [[str(i), "w3"] for i in range(12)]


def changed(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_an_expert_that_is_missing_is_a_wrong_shape(tmp_path):
    build("mixtral").save_pretrained(tmp_path)
    expert = "model.layers.1.block_sparse_moe.experts.5"
    changed(tmp_path, lambda t: [t.pop(f"{expert}.{w}.weight") for w in ("w1", "w2", "w3")])
    model = build("mixtral", meta=True)
    stored = _convert(model, tensors_in_folder(tmp_path, []), [])
    assert stored["model.layers.1.mlp.experts.gate_up_proj"].shape[0] == 11
    assert stored["model.layers.0.mlp.experts.gate_up_proj"].shape[0] == 12


def test_parts_that_do_not_fit_together_are_findings(tmp_path):
    build("mixtral").save_pretrained(tmp_path)
    expert = "model.layers.1.block_sparse_moe.experts.5"

    def change(tensors):
        tensors.pop(f"{expert}.w1.weight")
        tensors[f"{expert}.w2.weight"] = tensors[f"{expert}.w2.weight"][:1].clone()

    changed(tmp_path, change)
    findings: list[Diagnostic] = []
    _convert(build("mixtral", meta=True), tensors_in_folder(tmp_path, []), findings)
    assert [d.code for d in findings] == ["PL496", "PL496"]
    told = sorted(d.message for d in findings)
    assert "experts.down_proj cannot be assembled: its parts have different shapes" in told[0]
    assert "gate_up_proj cannot be assembled: the shapes of its parts cannot be" in told[1]


def entry(name, *shape, tmp_path=None):
    return StoredTensor(tmp_path, name, shape, "F32")


def test_a_conversion_that_planc_does_not_know(tmp_path):
    entries = {"a": entry("a", 4, 2, tmp_path=tmp_path)}
    steps = (("Interleave", 0, 0),)
    assert "`Interleave`" in assemble_tensor(Recipe(parts=(("a",),), steps=steps), entries)
    assert "several tensors match it" in assemble_tensor(Recipe(parts=(("a", "a"),)), entries)


def test_a_swap_of_dims(tmp_path):
    values = torch.arange(24.0).reshape(2, 3, 4)
    save_file({"a": values}, tmp_path / "x.safetensors")
    entries = tensors_in_folder(tmp_path, [])
    stored = assemble_tensor(Recipe(parts=(("a",),), steps=(("swap", 1, 2),)), entries)
    assert isinstance(stored, ConvertedTensor) and stored.shape == (2, 4, 3)
    got = torch.zeros(2, 2, 3)
    stored.copy_to(got, (((0, 2),), ((1, 2), (3, 4)), ((0, 3),)))
    assert torch.equal(got, values.transpose(1, 2)[:, [1, 3]])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "llama"])
def test_groups_that_are_stored_one_by_one_make_the_whole_checkpoint(family):
    model = build(family)
    names, state = HubNames(model), model.state_dict()
    groups, whole = names.converted_together([*state]), names.to_stored(state)
    assert sorted(name for group in groups for name in group) == sorted(state)
    parts = [names.to_stored({name: state[name] for name in group}) for group in groups]
    assert sum(map(len, parts)) == len(whole)
    for part in parts:
        assert all(torch.equal(value, whole[name]) for name, value in part.items())


def test_a_model_of_ones_own_keeps_its_names(tmp_path):
    model = torch.nn.Linear(2, 2)
    assert recipes(model, ["x"], ["weight"]) == {"x": Recipe(parts=(("x",),))}
    scalar = {"x": entry("x", tmp_path=tmp_path)}
    assert assemble_tensor(Recipe(parts=(("x",),)), scalar).shape == ()


@pytest.mark.parametrize("named", [None, "other.safetensors", "model.safetensors.index.json"])
def test_of_several_copies_the_one_that_from_pretrained_reads(named, tmp_path):
    """A single file precedes shards, and a file that the configuration names precedes both."""
    whole, sharded = build("llama"), build("llama")
    with torch.no_grad():
        [p.add_(1) for p in sharded.parameters()]
    whole.save_pretrained(tmp_path / "whole")
    sharded.save_pretrained(tmp_path / "mixed", max_shard_size="50KB")
    for name in ("model", "other"):
        shutil.copy(tmp_path / "whole/model.safetensors", tmp_path / f"mixed/{name}.safetensors")
    changed(tmp_path / "mixed", lambda tensors: tensors["model.norm.weight"].mul_(3))
    config = json.loads((tmp_path / "mixed/config.json").read_text())
    config |= {"transformers_weights": named} if named else {}
    (tmp_path / "mixed/config.json").write_text(json.dumps(config))
    problems: list[str] = []
    stored = tensors_in_folder(tmp_path / "mixed", problems)
    right = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mixed")
    assert problems == []
    for name, parameter in right.named_parameters():
        read = torch.empty_like(parameter)
        stored[name].copy_to(read, tuple(((0, n),) for n in parameter.shape))
        assert torch.equal(read, parameter), name


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_values_in_8_bits_without_scales_do_not_fit(family, tmp_path):
    """Cast as they are they would be values up to 448."""
    build(family).save_pretrained(tmp_path)
    last = {"llama": "mlp.up_proj.weight", "mixtral": "experts.5.w3.weight"}[family]

    def quantize(tensors):
        [name] = [n for n in tensors if "layers.1." in n and n.endswith(last)]
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    changed(tmp_path, quantize)
    model, findings = build(family, meta=True), []
    stored = _convert(model, tensors_in_folder(tmp_path, []), findings)
    match_or_report(model, stored, tmp_path, findings)
    [finding] = findings
    assert finding.code == "PL496" and "is F8_E4M3 without scales" in finding.message
