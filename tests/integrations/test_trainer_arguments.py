"""Fields of `TrainingArguments` under a plan, beside transformers' Trainer in one process."""

import dataclasses
import re

import pytest
import torch
import trainer_jobs
from accelerate import ParallelismConfig
from folders import ROOT
from transformers import TrainingArguments

PAGE = ROOT / "docs" / "trainer.md"
LOGGED = ("loss", "grad_norm", "num_input_tokens_seen", "eval_loss", "eval_rows", "eval_labels")
REFUSED = {
    "bf16": True,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "activation_checkpointing": True,
    "gradient_checkpointing": True,
    "torch_compile": True,
    "torch_compile_backend": "eager",
    "torch_compile_mode": "default",
    "use_liger_kernel": True,
    "average_tokens_across_devices": False,
    "auto_find_batch_size": True,
    "enable_jit_checkpoint": True,
    "save_on_each_node": True,
    "accelerator_config": {"even_batches": False},
}
SET_LATER = {  # TrainingArguments itself wants a GPU, or another library
    "fp16": True,
    "fsdp": [{"full_shard": True}],
    "deepspeed": {"zero_optimization": {}},
    "parallelism_config": ParallelismConfig(),
}
MESSAGES = {
    "accelerator_config": "even_batches",
    "gradient_checkpointing": "activation_checkpointing",
    "torch_compile_backend": "torch_compile",
    "torch_compile_mode": "torch_compile",
}


def compared(four, plan="llama", alone=None, more=LOGGED, rel=2e-4, **fields):
    """Asserts that a run on four processes, with two data ranks, is that of one process.

    Args:
        alone: what differs in the run of one process.
        more: what is compared of the logs.
        rel: the tolerance; weights are compared if it is that of rounding.
    """
    right, weights = trainer_jobs.trained(8, **{**fields, **(alone or {})})
    given = {"batch": 4, "plan": plan, "overrides": ("tp=2",)}
    for log, tensors in four.run("trainer_jobs.trained", **given, **fields):
        assert len(log) == len(right)
        for mine, theirs in zip(log, right, strict=True):
            shown = {name: value for name, value in theirs.items() if name in more}
            assert {n: mine[n] for n in shown} == pytest.approx(shown, rel=rel)
        for name, value in weights.items() if rel < 1e-3 else ():
            torch.testing.assert_close(tensors[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("counted", "logged"),
    [("all", ("loss", "grad_norm", "total_flos")), ("non_padding", LOGGED)],  # padding is by rank
)
@pytest.mark.slow
def test_tokens_and_flops_count_once_for_each_data_rank(four, counted, logged):
    fields = {"train_sampling_strategy": "sequential", "include_num_input_tokens_seen": counted}
    compared(four, more=logged, **fields)


@pytest.mark.parametrize(
    ("kind", "plan", "passes"), [("classes", "classifier", 1), ("regression", "classifier", 2)]
)
@pytest.mark.slow
def test_a_loss_that_is_not_divided_by_the_labels_is_that_of_one_process(four, kind, plan, passes):
    compared(four, kind=kind, plan=plan, gradient_accumulation_steps=passes)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.slow
def test_the_auxiliary_loss_of_routers_counts_once(four, passes):
    """It is no mean over rows, so that its value in each pass depends on the ranks, by 0.2 %."""
    compared(four, kind="router", plan="mixtral", rel=5e-3, gradient_accumulation_steps=passes)


@pytest.mark.slow
def test_a_mean_over_the_labels_of_a_pass_is_weighed_by_their_number(four):
    """One process takes the mean over the labels of all its passes."""
    alone = {"kind": "causal"}
    compared(four, kind="own loss", alone=alone, gradient_accumulation_steps=2)


@pytest.mark.slow
def test_smoothed_labels_are_those_of_one_process(four):
    compared(four, label_smoothing_factor=0.2, gradient_accumulation_steps=2)


@pytest.mark.slow
def test_batches_of_balanced_lengths_are_those_of_the_data_ranks(four):
    compared(four, train_sampling_strategy="batch_rebalance")


UPDATE = {
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "adam_epsilon": 1e-6,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr": 1e-4},
    "warmup_steps": 1,
    "max_steps": 3,
}
ROWS = {"seed": 2, "data_seed": 3, "label_names": ["labels"], "remove_unused_columns": False}
EPOCH = {"max_steps": -1, "num_train_epochs": 0.5, "dataloader_drop_last": True}


@pytest.mark.parametrize(
    "fields",
    [
        {**UPDATE, "max_grad_norm": 0.05},
        {**ROWS, "max_grad_norm": 0.0, "optim": "sgd", "optim_args": "momentum=0.5"},
        {**EPOCH, "logging_nan_inf_filter": False},
    ],
    ids=["update", "rows", "epoch"],
)
@pytest.mark.slow
def test_updates_and_rows_are_those_of_one_process(four, fields):
    compared(four, **fields)


@pytest.mark.parametrize("axis", [["pp=2", "microbatches=2"], ["cp=2"]], ids=str)
def test_no_field_is_taken_with_axes_that_the_loop_does_not_serve(four, axis):
    name = axis[0].partition("=")[0]
    with pytest.raises(AssertionError, match=rf"this one has [^:]*\b{name}\b.*forward_backward"):
        four.run("trainer_jobs.trained", batch=4, plan="llama", overrides=axis)


@pytest.mark.slow
def test_an_evaluation_in_parts_counts_each_row_once(four):
    fields = {"eval_on_start": True, "eval_accumulation_steps": 1, "eval_delay": 1}
    alone = {"per_device_eval_batch_size": 4}
    compared(four, evaluates=True, alone=alone, per_device_eval_batch_size=2, **fields)


@pytest.mark.parametrize("objects", [False, True])
@pytest.mark.slow
def test_an_evaluation_counts_each_row_once(four, objects):
    alone = {"per_device_eval_batch_size": 4, "eval_use_gather_object": False}
    fields = {"per_device_eval_batch_size": 2, "eval_use_gather_object": objects}
    compared(four, evaluates=True, alone=alone, **fields)


@pytest.mark.parametrize(("plan", "rows"), [("tp=2", 2), ("tp=1", 1)])
def test_a_step_of_an_evaluation_has_the_batches_of_all_data_ranks(four, plan, rows):
    given = {"batch": rows, "plan": "llama", "overrides": (plan,), "evaluates": True}
    for log, _ in four.run("trainer_jobs.trained", **given, per_device_eval_batch_size=rows):
        [found] = [one for one in log if "eval_loss" in one]
        assert round(found["eval_steps_per_second"] * found["eval_runtime"]) == 2


def test_planc_calls_nothing_that_torch_warns_of(four):
    given = {"batch": 2, "plan": "llama", "overrides": ("tp=2",), "evaluates": True}
    assert four.run("trainer_jobs.warned", **given) == [([], 0)] * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha scales its noise"),
        ({"optim": "lion_32bit"}, "PL465"),
        (
            {"label_smoothing_factor": 0.2, "kind": "own loss"},
            "label_smoothing_factor takes a mean",
        ),
    ],
)
@pytest.mark.slow
def test_an_argument_that_shards_rule_out_is_refused(four, fields, message):
    with pytest.raises(AssertionError, match=message):
        four.run("trainer_jobs.trained", batch=4, plan="llama", overrides=("tp=2",), **fields)


@pytest.mark.parametrize("name", ["adafactor", "lomo", "adalomo", "galore_adamw_layerwise"])
def test_an_optimizer_that_cannot_step_shards_is_refused_by_name(tmp_path, name):
    from planc.integrations import trainer

    with pytest.raises(ValueError, match=f"(?i){name}"):
        trainer._require_undecided(TrainingArguments(str(tmp_path), use_cpu=True, optim=name), {})


@pytest.mark.slow
def test_a_plan_with_an_optimizer_is_refused(four, tmp_path):
    plan = tmp_path / "own.plan"
    lines = ["plan own for llama", 'extend "llama.plan"', "optimizer {\n    root : adamw\n}"]
    plan.write_text("\n\n".join(lines) + "\n")
    with pytest.raises(AssertionError, match="PL580"):
        four.run("trainer_jobs.trained", batch=4, plan=str(plan), overrides=("tp=2",))


@pytest.mark.parametrize("name", [*REFUSED, *SET_LATER])
def test_an_argument_that_a_plan_rules_out_is_refused_by_name(monkeypatch, tmp_path, name):
    from planc.integrations import trainer

    given = {name: REFUSED[name]} if name in REFUSED else {}
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, **given)
    monkeypatch.setattr(TrainingArguments, "world_size", 4)
    trainer._require_undecided(TrainingArguments(str(tmp_path), use_cpu=True), {})
    if name in SET_LATER:
        setattr(arguments, name, SET_LATER[name])
    with pytest.raises(ValueError, match=MESSAGES.get(name, name)):
        trainer._require_undecided(arguments, {})


def test_the_page_has_each_field_once():
    table = re.search(r"\| arguments \| under a plan \|\n(.*?)\n\n", PAGE.read_text(), re.S)[1]
    rows = [line.split(" | ") for line in table.splitlines()[1:]]
    names = [(name, row[1]) for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    fields = [field.name for field in dataclasses.fields(TrainingArguments)]
    assert sorted(name for name, _ in names) == sorted(fields)
    refused = {name for name, text in names if text.startswith("refused")}
    assert refused == {*REFUSED, *SET_LATER, "neftune_noise_alpha"} - {"accelerator_config"}
