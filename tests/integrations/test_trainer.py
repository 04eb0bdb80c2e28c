"""The script of docs/trainer.md on four processes, beside transformers' Trainer in one process."""

import ast
import json
import re
import subprocess
import sys

import pytest
import torch
from folders import ROOT
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "trainer.md"
SCRIPT = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)[1]
WHOLE = "model = AutoModelForCausalLM.from_pretrained(options.weights)\n"
FP32 = ["--set", "param_dtype=fp32", "--set", "reduce_dtype=fp32"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=96)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    folder = tmp_path_factory.mktemp("weights")
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    return folder


ARGUMENTS = {
    "use_cpu": True,
    "seed": 1,
    "max_steps": 4,
    "save_steps": 2,
    "eval_steps": 2,
    "eval_strategy": "steps",
    "logging_steps": 1,
    "max_grad_norm": 0.5,
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 2,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "report_to": [],
}


KEPT = ("loss", "grad_norm", "eval_loss", "eval_rows")


def trained(folder, weights, *words, plan=True, rows=4, steps=4, more="", kept=KEPT):
    """(what is logged, the weights) of the script; of transformers' own Trainer without a plan."""
    script = SCRIPT
    command = [sys.executable, "-W", "ignore"]
    if plan:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        words = (*FP32, *words)
        script = script.replace('plan="llama",', f'plan="llama", {more}')
    else:
        script = script.replace("from planc.integrations.trainer import PlancTrainer", "")
        script = script.replace("PlancTrainer(", "Trainer(")
        script = re.sub(r'plan="llama",\s*overrides=options.set,', "", script)
        script = re.sub(r"with torch.device.*\n.*\n", WHOLE, script)
        script = re.sub(r"trainer.planc_run.load.*\n", "", script)
        script = script.replace("import AutoConfig", "import Trainer, AutoConfig")
        assert "planc." not in script.lower() and "plan=" not in script
    (folder / "train.py").write_text(script)
    given = {**ARGUMENTS, "per_device_train_batch_size": rows, "max_steps": steps}
    (folder / "arguments.json").write_text(json.dumps(given))
    done = subprocess.run(
        [*command, "train.py", str(weights), "arguments.json", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "PL478" not in done.stderr  # it counts the labels of all ranks itself
    lines = [ast.literal_eval(text) for text in re.findall(r"^{'.*}$", done.stdout, re.M)]
    log = [{k: float(v) for k, v in line.items() if k in kept} for line in lines]
    return [line for line in log if line], load_file(folder / "runs" / "last" / "model.safetensors")


@pytest.fixture(scope="module")
def alone(weights, tmp_path_factory):
    log, tensors = trained(tmp_path_factory.mktemp("alone"), weights, rows=8, plan=False)
    assert len(log) == 6 and {"grad_norm", "eval_rows"} <= {key for line in log for key in line}
    return log, tensors


def same(found, right):
    assert [line.keys() for line in found] == [line.keys() for line in right]
    for mine, theirs in zip(found, right, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4), (found, right)


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (4, ["tp=2"]),
        (4, ["tp=2", "dp_replicate=2", "dp_shard=1"]),
        (2, ["dp_replicate=2"]),
    ],
)
def test_losses_norms_evaluations_and_weights_are_those_of_one_process(
    alone, weights, tmp_path, rows, settings
):
    words = [word for setting in settings for word in ("--set", setting)]
    found, tensors = trained(tmp_path, weights, *words, rows=rows)
    same(found, alone[0])
    assert tensors.keys() == alone[1].keys()
    for name, value in alone[1].items():
        torch.testing.assert_close(tensors[name], value, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize(("rows", "mesh"), [(4, "tp=2"), (2, "dp_replicate=2")])
def test_logs_have_the_numbers_of_the_run(alone, weights, tmp_path, rows, mesh):
    """Beside a watchdog, which ends with the run and writes nothing."""
    kept = (*KEPT, "seconds_per_step", "tokens_seen", "samples_per_second", "memory/estimated_gib")
    more = "metrics=True, watchdog=300,"
    found, _ = trained(tmp_path, weights, "--set", mesh, rows=rows, steps=3, more=more, kept=kept)
    logs = [line for line in found if "loss" in line]
    assert [line["tokens_seen"] for line in logs] == [8 * 2 * 16 * at for at in (1, 2, 3)]
    for line in logs:
        assert line["samples_per_second"] * line["seconds_per_step"] == pytest.approx(16, rel=1e-3)
    assert [{n: v for n, v in line.items() if n in KEPT} for line in logs] == [
        pytest.approx(line, rel=2e-4) for line in alone[0] if "loss" in line
    ][:3]
    assert not (tmp_path / "planc-hang").exists()


def test_a_run_that_stopped_goes_on_as_if_it_had_not(alone, weights, tmp_path):
    first, _ = trained(tmp_path, weights, "--set", "tp=2", steps=3)
    again, tensors = trained(tmp_path, weights, "--set", "tp=2", "--resume")
    steps = [[line for line in log if "loss" in line] for log in ([*first, *again], alone[0])]
    assert len(steps[1]) == 4
    same(*steps)
    for name, value in alone[1].items():
        torch.testing.assert_close(tensors[name], value, rtol=1e-4, atol=5e-6)


def test_a_plan_that_the_loop_cannot_serve_is_refused(weights, tmp_path):
    words = ["--set", "pp=2", "--set", "microbatches=2"]
    with pytest.raises(AssertionError, match=r"use run\.forward_backward"):
        trained(tmp_path, weights, *words)


@pytest.mark.parametrize(
    ("given", "section"),
    [({"bf16": True}, "precision"), ({"gradient_checkpointing": True}, "checkpoint")],
)
def test_arguments_that_the_plan_decides_are_refused(weights, tmp_path, given, section):
    from transformers import AutoModelForCausalLM, TrainingArguments

    from planc.integrations.trainer import PlancTrainer

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, **given)
    with pytest.raises(ValueError, match=f"the plan decides {next(iter(given))}, by .*`{section}`"):
        PlancTrainer(AutoModelForCausalLM.from_pretrained(weights), arguments, plan="llama")
