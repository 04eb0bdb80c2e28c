"""Runs of transformers' Trainer: under a plan on each rank of a pool, or without one."""

import logging
import os
from contextlib import ExitStack
from tempfile import TemporaryDirectory

import torch
from torch import distributed
from torch._C._distributed_c10d import _get_work_registry_size
from torch.distributed.tensor import _redistribute
from torch.nn.functional import pad
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

FP32 = ["param_dtype=fp32", "reduce_dtype=fp32"]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
STEPS = {
    "use_cpu": True,
    "max_steps": 2,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "seed": 1,
}


class OwnLoss(LlamaForCausalLM):
    """A model whose loss is the mean over the labels of the pass, as of many vision models."""

    accepts_loss_kwargs = False


MODELS = {
    "causal": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "own loss": lambda: OwnLoss(LlamaConfig(**SIZES)),
    "classes": lambda: LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=3)),
    "regression": lambda: LlamaForSequenceClassification(
        LlamaConfig(**SIZES, num_labels=1, problem_type="regression")
    ),
    "router": lambda: MixtralForCausalLM(
        MixtralConfig(
            **SIZES,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
            router_aux_loss_coef=0.5,
        )
    ),
}


def rows(kind, count=64, length=16):
    """Rows of tokens of different lengths, with different numbers of labels of tokens, or one."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 96, (count, length), generator=generator)
    given = []
    for at, full in enumerate(tokens):
        row = full[: length - at % 3]
        labels = row.clone()
        labels[: 5 * at % 11] = -100
        one = {"classes": torch.tensor(at % 3), "regression": torch.tensor(at / count)}
        given.append({"input_ids": row, "labels": one.get(kind, labels)})
    return given


def collated(batch):
    """Rows as one batch, padded to the longest."""
    longest = max(len(row["input_ids"]) for row in batch)

    def padded(name, value):
        each = [row[name] for row in batch]
        return torch.stack(
            [pad(v, (0, longest - len(v)), value=value) if v.dim() else v for v in each]
        )

    tokens = padded("input_ids", 0)
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != 0).long(),
        "labels": padded("labels", -100),
    }


def measured(found):
    """Metrics of an evaluation, which depend on the order of its rows."""
    order = torch.arange(len(found.label_ids))
    return {"rows": len(order), "labels": float((order * found.label_ids[:, 0]).sum())}


def warned(**given):
    """(messages of DTensor, collectives without a wait) of a run whose model is written."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    _redistribute._warned_flatten_issues.clear()
    logger.addHandler(handler)
    before = _get_work_registry_size()
    try:
        trained(**given, saves=True)
    finally:
        logger.removeHandler(handler)
    return messages, _get_work_registry_size() - before


def trained(batch, kind="causal", plan=None, overrides=(), evaluates=False, saves=False, **fields):
    """(logs, weights) of a run of some steps.

    Args:
        batch: the rows of a data rank in a pass.
        kind: of `MODELS`.
        plan: a shipped plan; None for transformers' own Trainer.
        evaluates: whether to evaluate eight rows after the last step.
        saves: whether to write the model then.
        fields: of `TrainingArguments`.
    """
    torch.manual_seed(0)
    make, words = Trainer, {}
    if plan:
        from planc.integrations.trainer import PlancTrainer

        make, words = PlancTrainer, {"plan": plan, "overrides": [*FP32, *overrides]}
        join_processes()
    if evaluates:
        words |= {"eval_dataset": rows(kind)[:8], "compute_metrics": measured}
        fields = {"eval_strategy": "steps", "eval_steps": 2, **fields}
    with ExitStack() as stack:
        stack.callback(forget_processes)
        folder = stack.enter_context(TemporaryDirectory())
        forget_processes()
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=batch, **{**STEPS, **fields}
        )
        data = {"train_dataset": rows(kind), "data_collator": collated}
        trainer = make(MODELS[kind](), arguments, **data, **words)
        trainer.train()
        if saves:
            folders = [folder]
            distributed.broadcast_object_list(folders)
            trainer.save_model(folders[0])
            distributed.barrier()
        state = trainer.model.state_dict()
        if plan:
            state = trainer.planc_run.full_state_dict(every_rank=True)
        return trainer.state.log_history, {n: v.clone() for n, v in state.items()}


def join_processes():
    """Gives this process the environment of a launcher; the pool's process group is there."""
    rank, size = str(distributed.get_rank()), str(distributed.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


def leave_processes():
    """Hides the processes of a pool from a run of this process alone."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


def forget_processes():
    """Lets accelerate look at the processes anew, whose states are of a whole process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
