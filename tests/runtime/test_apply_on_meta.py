"""`apply` without real ranks: on meta with a fake process group, and alone in one process."""

import subprocess
import sys
import textwrap

HEAD = """
import torch, transformers, planc
from torch import distributed
config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=8, vocab_size=128)
"""


def python(text):
    code = HEAD + textwrap.dedent(text)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_meta_under_a_fake_process_group():
    out = python("""
        from torch.testing._internal.distributed.fake_pg import FakeStore
        distributed.init_process_group("fake", rank=5, world_size=64, store=FakeStore())
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
        run = planc.apply(model, "llama", overrides=["tp=8"], device_type="cpu")
        weight = model.model.layers[0].self_attn.q_proj.weight
        print(run.data_rank, run.data_size, weight.device, tuple(weight.to_local().shape))
    """)
    assert out.split() == ["0", "8", "meta", "(1,", "64)"]


def test_alone_without_a_process_group():
    out = python("""
        model = transformers.LlamaForCausalLM(config)
        run = planc.apply(model, "llama", device_type="cpu")
        loss = model(input_ids=torch.ones(2, 8, dtype=torch.long),
                     labels=torch.ones(2, 8, dtype=torch.long)).loss
        loss.backward()
        print(run.data_rank, run.data_size, distributed.get_world_size(), bool(loss > 0))
        distributed.destroy_process_group()
    """)
    assert out.split() == ["0", "1", "1", "True"]


def test_the_plan_that_is_chosen_is_said_in_one_line():
    out = python("""
        import logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        planc.apply(transformers.LlamaForCausalLM(config), device_type="cpu")
        planc.check(transformers.LlamaForCausalLM(config), world_size=1)
        distributed.destroy_process_group()
    """)
    said = [line for line in out.splitlines() if line.startswith("the plan is")]
    assert said == ["the plan is plans/llama.plan, for llama"]


def test_save_pretrained_of_shards_is_answered_with_export(tmp_path):
    out = python(f"""
        model = transformers.LlamaForCausalLM(config)
        run = planc.apply(model, "llama", device_type="cpu")
        try:
            model.save_pretrained({str(tmp_path)!r})
        except planc.PlanError as error:
            print([d.code for d in error.diagnostics], "run.export" in error.diagnostics[0].help)
        model.save_pretrained({str(tmp_path)!r}, state_dict=run.full_state_dict())
        read = transformers.LlamaForCausalLM.from_pretrained({str(tmp_path)!r})
        print(sorted(read.state_dict()) == sorted(run.full_state_dict()))
        distributed.destroy_process_group()
    """)
    assert out.splitlines()[-2:] == ["['PL477'] True", "True"]


def test_classes_keep_their_names_and_pickle_is_answered_with_export():
    out = python("""
        import io, pickle
        from torch.distributed.fsdp import FSDPModule
        model = transformers.LlamaForCausalLM(config)
        kinds = {type(module) for module in model.modules()}
        before = {(kind.__name__, kind.__qualname__, kind.__module__) for kind in kinds}
        planc.apply(model, "llama", device_type="cpu")
        sharded = {type(m) for m in model.modules() if isinstance(m, FSDPModule)}
        after = {(kind.__name__, kind.__qualname__, kind.__module__) for kind in sharded}
        print(sorted(name for name, _, _ in after - before), len(after & before) >= 2)
        print(isinstance(model, transformers.LlamaForCausalLM), type(model).__name__)
        for write in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
            try:
                write(model)
            except planc.PlanError as error:
                print(error.diagnostics[0].code, "run.export" in error.diagnostics[0].help)
        distributed.destroy_process_group()
    """)
    assert out.splitlines()[-4:] == [
        "['CheckpointWrapper'] True",  # torch's wrapper of a block that is recomputed
        "True LlamaForCausalLM",
        "PL477 True",
        "PL477 True",
    ]


def test_a_smoothed_loss_shifts_its_labels_as_without_a_plan(tmp_path):
    """Trainer looks for the name of the model's class in a list of causal models."""
    out = python(f"""
        from planc.integrations.trainer import PlancTrainer
        arguments = transformers.TrainingArguments(
            {str(tmp_path)!r}, use_cpu=True, max_steps=1, label_smoothing_factor=0.2,
            report_to=[], save_strategy="no", disable_tqdm=True,
        )
        row = torch.arange(12) * 7 % 29
        rows = [dict(input_ids=row + k, labels=row + k) for k in range(8)]
        def loss(trainer, **plan):
            torch.manual_seed(0)
            model = transformers.LlamaForCausalLM(config)
            return trainer(model, arguments, train_dataset=rows, **plan).train().training_loss
        alone = loss(transformers.Trainer)
        fp32 = ["param_dtype=fp32", "reduce_dtype=fp32"]
        print("%.5f %.5f" % (alone, loss(PlancTrainer, plan="llama", overrides=fp32)))
        distributed.destroy_process_group()
    """)
    alone, planned = out.splitlines()[-1].split()
    assert alone == planned


def test_a_model_of_peft_or_torch_compile_is_refused_by_name():
    out = python("""
        import peft
        def refused(model):
            try:
                planc.apply(model, "llama", device_type="cpu")
            except planc.PlanError as error:
                [finding] = error.diagnostics
                return finding.code, finding.help
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
        made = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
        print(*refused(made), *refused(made.base_model.model))
        model = transformers.LlamaForCausalLM(config)
        print(*refused(torch.compile(model)))
        model.compile()
        print(*refused(model))
    """)
    first, *compiled = out.splitlines()
    assert first.count("PL489") == first.count("`adapters` section") == 2
    assert all("PL489" in line and "`compile` section" in line for line in compiled)
    assert len(compiled) == 2
