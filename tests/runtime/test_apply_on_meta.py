"""`apply` without real ranks: on meta with a fake process group, and alone in one process."""

import io
import json
import logging
import pickle
import subprocess
import sys
from unittest import mock

import pytest
import torch
import transformers
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import planc
from planc.emit.python.script import render
from planc.integrations.trainer import PlancTrainer

pytestmark = pytest.mark.usefixtures("ends_its_group")

ALONE = """
import torch, transformers, planc
from torch import distributed
config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=8, vocab_size=128)
model = transformers.LlamaForCausalLM(config)
run = planc.apply(model, "llama", device_type="cpu")
loss = model(input_ids=torch.ones(2, 8, dtype=torch.long),
             labels=torch.ones(2, 8, dtype=torch.long)).loss
loss.backward()
print(run.data_rank, run.data_size, distributed.get_world_size(), bool(loss > 0))
distributed.destroy_process_group()
"""


def small(**fields):
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=128,
        **fields,
    )
    return transformers.LlamaForCausalLM(config)


def test_meta_under_a_fake_process_group():
    distributed.init_process_group("fake", rank=5, world_size=64, store=FakeStore())
    with torch.device("meta"):
        model = small()
    run = planc.apply(model, "llama", overrides=["tp=8"], device_type="cpu")
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert (run.data_rank, run.data_size, weight.device.type) == (0, 8, "meta")
    assert weight.to_local().shape == (1, 64)


def test_alone_without_a_process_group():
    """In a process of its own, as a script runs."""
    command = [sys.executable, "-W", "ignore", "-c", ALONE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1", "1", "True"]


def test_the_plan_that_is_chosen_is_said_in_one_line(caplog):
    planc.apply(small(), device_type="cpu")
    planc.check(small(), world_size=1)
    said = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert [line for line in said if line.startswith("the plan is")] == [
        "the plan is plans/llama.plan, for llama"
    ]


def test_save_pretrained_of_shards_is_answered_with_export(tmp_path):
    model = small()
    run = planc.apply(model, "llama", device_type="cpu")
    with pytest.raises(planc.PlanError) as refused:
        model.save_pretrained(tmp_path)
    [finding] = refused.value.diagnostics
    assert finding.code == "PL477" and "run.export" in finding.help
    model.save_pretrained(tmp_path, state_dict=run.full_state_dict())
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert sorted(read.state_dict()) == sorted(run.full_state_dict())


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_says_whether_the_script_has_tied_the_head(tmp_path, tied):
    """The configuration states the opposite, as it did before the script changed the model."""
    model = small(tie_word_embeddings=not tied)
    embedding = model.get_input_embeddings().weight
    model.lm_head.weight = embedding if tied else torch.nn.Parameter(embedding.detach().flip(0))
    tokens = torch.arange(12)[None]
    right = model(tokens).logits
    run = planc.apply(model, "llama", device_type="cpu")
    run.export(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is tied
    read, told = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values())
    assert torch.equal(read(tokens).logits, right)
    assert (read.lm_head.weight is read.get_input_embeddings().weight) is tied


def test_classes_keep_their_names_and_pickle_is_answered_with_export():
    model = small()
    before = names_of(type(module) for module in model.modules())
    planc.apply(model, "llama", device_type="cpu")
    sharded = names_of(type(m) for m in model.modules() if isinstance(m, FSDPModule))
    # torch's wrapper of a block that is recomputed
    assert sorted(name for name, _, _ in sharded - before) == ["CheckpointWrapper"]
    assert len(sharded & before) >= 2
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM"
    for write in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(planc.PlanError) as refused:
            write(model)
        [finding] = refused.value.diagnostics
        assert finding.code == "PL477" and "run.export" in finding.help


def names_of(kinds):
    return {(kind.__name__, kind.__qualname__, kind.__module__) for kind in kinds}


def test_a_script_keeps_the_names_of_classes():
    """In the emitted Python, which `planc lower --format python` prints, as after `planc.apply`."""
    script = {"__name__": "emitted"}
    model = small()
    lowered = planc.lower(model, "llama", world_size=1)
    exec(render(lowered, digest="0" * 64), script)
    store = distributed.HashStore()
    distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    before = names_of(type(module) for module in model.modules())
    with mock.patch.dict(_fully_shard.cls_to_fsdp_cls, clear=True):  # earlier tests renamed others
        script["parallelize"](model, script["build_mesh"]("cpu"))
    sharded = names_of(type(m) for m in model.modules() if isinstance(m, FSDPModule))
    assert [name for name, _, _ in sharded - before] == ["CheckpointWrapper"]
    assert type(model).__name__ == "LlamaForCausalLM" and len(sharded & before) >= 2


def test_a_smoothed_loss_shifts_its_labels_as_without_a_plan(tmp_path):
    """Trainer looks for the name of the model's class in a list of causal models."""
    arguments = transformers.TrainingArguments(
        tmp_path,
        use_cpu=True,
        max_steps=1,
        label_smoothing_factor=0.2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    row = torch.arange(12) * 7 % 29
    rows = [dict(input_ids=row + k, labels=row + k) for k in range(8)]

    def loss(trainer, **plan):
        torch.manual_seed(0)
        return trainer(small(), arguments, train_dataset=rows, **plan).train().training_loss

    alone = loss(transformers.Trainer)
    planned = loss(PlancTrainer, plan="llama", overrides=["param_dtype=fp32", "reduce_dtype=fp32"])
    assert f"{alone:.5f}" == f"{planned:.5f}"


def test_a_model_of_peft_or_torch_compile_is_refused_by_name():
    peft = pytest.importorskip("peft")

    def refused(model):
        with pytest.raises(planc.PlanError) as caught:
            planc.apply(model, "llama", device_type="cpu")
        [finding] = caught.value.diagnostics
        assert finding.code == "PL489"
        return finding.help

    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    adapted = peft.get_peft_model(small(), lora)
    for model in (adapted, adapted.base_model.model):
        assert "`adapters` section" in refused(model)
    assert "`compile` section" in refused(torch.compile(small()))
    model = small()
    model.compile()
    assert "`compile` section" in refused(model)
