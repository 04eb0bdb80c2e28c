"""Models whose tokens see other documents or padding are known, and such rows refused."""

import copy
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import simulated
from transformers import AutoConfig, AutoModelForCausalLM

import planc
from planc.diagnostics.diagnostic import Sink
from planc.model.load import load_values
from planc.proof.called_modules import report_leaks
from planc.proxy.transformers_model import TransformersBuilder
from planc.runtime import preconditions
from planc.runtime.leaks import leaks
from planc.runtime.safeguards import leaking_rows
from planc.sections.documents.ops import ResetStates
from planc.simulate.thread_ranks import run_ranks

LENGTH = 12
HYBRID = dict(attn_layer_indices=[1], num_hidden_layers=2)
KNOWN = {
    "llama": ("LlamaForCausalLM", set(), {}),
    "gpt2": ("GPT2LMHeadModel", set(), {}),
    "gpt_oss": ("GptOssForCausalLM", {"documents"}, {}),
    "bamba": ("BambaForCausalLM", {"documents"}, HYBRID),
    "qwen3_next": ("Qwen3NextForCausalLM", {"documents"}, {}),
    "mamba": ("MambaForCausalLM", {"documents"}, {}),
    "rwkv": ("RwkvForCausalLM", {"documents", "padding"}, {}),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", {"documents", "padding"}, {}),
}


@pytest.mark.parametrize("family", KNOWN)
def test_what_a_family_lets_tokens_see(family, tmp_path, monkeypatch):
    name, kinds, fields = KNOWN[family]
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    config = AutoConfig.for_model(family, **fields).to_dict()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = leaks(config, name)
    assert set(found) == kinds and all(value > 1e-3 for value in found.values())
    assert torch.equal(torch.get_rng_state(), before)
    assert leaks(config, name) == found  # from the cache


def test_a_failure_is_unknown_and_not_cached(tmp_path, monkeypatch, caplog):
    """A machine without memory is not a model that isolates documents."""
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    config = AutoConfig.for_model("gpt_oss").to_dict()
    with monkeypatch.context() as broken:
        error = MemoryError("no memory")
        broken.setattr(TransformersBuilder, "build", Mock(side_effect=error))
        assert leaks(config, "GptOssForCausalLM") == "the proxy model does not run: no memory"
        kind = SimpleNamespace(__name__="GptOssForCausalLM")
        broken.setattr(leaking_rows, "class_of", lambda model: kind)
        broken.setattr(preconditions.distributed, "get_rank", lambda: 0)
        model = torch.nn.Module()
        model.config = SimpleNamespace(to_dict=lambda: config)
        assert leaking_rows.refuse(model, rows("alone"))  # later rows are watched
        assert not caplog.records
        assert not leaking_rows.refuse(model, rows("packed"))
        assert "PL558" in caplog.text and "no memory" in caplog.text
        sink, facts = Sink(), load_values(config, "own", Sink())
        report_leaks(facts, planc.lower("gpt-oss-20b", "gpt_oss", world_size=1), sink)
        assert [(d.severity, d.code) for d in sink.diagnostics] == [("info", "PL558")]
    assert "documents" in leaks(config, "GptOssForCausalLM")


def test_a_check_says_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PLANC_CACHE_DIR", str(tmp_path))
    _, found = simulated("gpt-oss-20b", "gpt_oss", ["tp=2"], world=2)
    assert [d.severity for d in found if d.code == "PL517"] == ["info"]
    for model, plan in (("llama-3.2-1b", "llama"), ("bamba-9b", "bamba")):
        _, found = simulated(model, plan, ["tp=2"], world=2)
        assert not {"PL517", "PL518"} & {d.code for d in found}


LEAKS = {"PL517", "PL518"}
PLAN = """plan own for {family}

mesh {{
    dp_shard = 2
}}

fsdp on dp_shard {{
    root : unit
}}
"""
SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2)
LLAMA = dict(num_attention_heads=2, num_key_value_heads=2, intermediate_size=64)
BAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, attn_layer_indices=[1])
MODELS = {
    "llama": LLAMA,
    "bamba": {**LLAMA, **BAMBA},
    "rwkv": dict(attention_hidden_size=32, intermediate_size=64),
}


def rows(kind):
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 60 + 1
    batch = {"input_ids": ids, "labels": ids}
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(2, -1)
    mask = torch.ones_like(ids)
    match kind:
        case "packed":
            batch["position_ids"] = positions
        case "stated":
            batch |= {"position_ids": positions, "seq_idx": positions.eq(0).cumsum(-1).int() - 1}
        case "unlike":
            batch |= {"position_ids": positions, "seq_idx": torch.zeros_like(ids)}
        case "alone":
            batch["position_ids"] = torch.arange(LENGTH).expand(2, -1)
        case "left":
            mask[:, :3] = 0
        case "right":
            mask[:, -3:] = 0
    return batch if "position_ids" in batch else {**batch, "attention_mask": mask}


@pytest.mark.parametrize(
    ("family", "kind", "code"),
    [
        *(("llama", kind, None) for kind in ("packed", "alone", "left")),
        ("bamba", "packed", "PL517"),
        *(("bamba", kind, None) for kind in ("alone", "left", "right")),
        ("bamba", "unlike", "PL519"),
        ("rwkv", "left", "PL518"),
        ("rwkv", "right", None),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_rows_that_leak_are_refused(family, kind, code, whole, reset, tmp_path):
    """In a second pass too, on every rank, in planc's step and in a loop of one's own; taken where
    the plan resets states.
    """
    (tmp_path / "own.plan").write_text(PLAN.format(family=family))
    config = AutoConfig.for_model(family, **SIZES, **MODELS[family])
    model = AutoModelForCausalLM.from_config(config)
    models, raised = [copy.deepcopy(model) for _ in range(2)], []
    if code == "PL519" and not reset:
        pytest.skip("transformers refuses `seq_idx` where no kernel reads it")
    code = None if reset and code in LEAKS else code
    lowered = planc.lower(model, tmp_path / "own.plan", world_size=2)
    assert lowered.has(ResetStates) == (family != "llama")
    if not reset:
        kept = tuple(op for op in lowered.ops if not isinstance(op, ResetStates))
        lowered = lowered.map_ops(lambda _: kept)

    def rank(number):
        run = planc.apply(models[number], lowered, device_type="cpu", require="nothing")
        for one in ("alone" if family != "rwkv" else "right", kind):
            try:
                given = {**rows(one)}
                if whole:
                    run.forward_backward([given])
                else:
                    run.model(**run.batch(given)).loss.backward()
            except planc.PlanError as error:
                raised.extend((one, d.code) for d in error.diagnostics)

    failure = run_ranks(2, rank, seconds=60)
    assert failure is None, failure.message
    assert raised == ([(kind, code)] * 2 if code else [])


def test_parts_of_packed_rows_are_taken(tmp_path):
    """Ranks that exchange states keep documents apart without an operation of its own."""
    section = "context on cp {{\n    attention = all_gather\n}}\n\nfsdp on dp_shard * cp {{"
    text = PLAN.replace("dp_shard = 2", "dp_shard = 1\n    cp       = 2")
    text = text.replace("fsdp on dp_shard {{", section)
    (tmp_path / "own.plan").write_text(text.format(family="bamba"))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("bamba", **SIZES, **MODELS["bamba"])
    )
    models = [copy.deepcopy(model) for _ in range(2)]
    lowered = planc.lower(model, tmp_path / "own.plan", world_size=2)
    assert not lowered.has(ResetStates)

    def rank(number):
        run = planc.apply(models[number], lowered, device_type="cpu", require="nothing")
        run.forward_backward([rows("packed")])

    failure = run_ranks(2, rank, seconds=60)
    assert failure is None, failure.message
