"""Loops that transformers' Trainer runs: its own in one process, planc's on ranks."""

import tempfile
from typing import ClassVar

import torch
import transformers
from silent_scripts import Script
from trainer_jobs import forget_processes, join_processes, leave_processes

LARGE = 1e9
ARGUMENTS = {
    "use_cpu": True,
    "max_steps": 2,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-6,
    "lr_scheduler_type": "constant",
    "max_grad_norm": LARGE,  # gradients are compared as they are
    "train_sampling_strategy": "sequential",
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


class FirstGradients(transformers.TrainerCallback):
    """Keeps the gradients of the first step, as a function returns them for the model."""

    def __init__(self, gradients_of):
        self.gradients, self._gradients_of = {}, gradients_of

    def on_pre_optimizer_step(self, _args, state, _control, model=None, **_others):
        if state.global_step == 0:
            self.gradients = self._gradients_of(model)


class OfTrainer(Script):
    """Two steps of one pass each, with two data ranks."""

    fields: ClassVar = {}
    """Arguments of the Trainer besides `ARGUMENTS`."""

    def train(self, model, rows, gradients_of, **plan):
        """The Trainer after its run, and the gradients of the first step.

        Args:
            rows: those of both steps, in their order.
            gradients_of: gives the gradients of a model by name.
            plan: `plan` and `overrides` of planc's Trainer; without them, transformers' own.
        """
        make, size = transformers.Trainer, len(rows) // 2
        leave_processes()
        if plan:
            from planc.integrations.trainer import PlancTrainer

            make, size = PlancTrainer, size // 2
            join_processes()
        record = FirstGradients(gradients_of)
        words = {**plan, "train_dataset": rows, "callbacks": [record]}
        with tempfile.TemporaryDirectory() as folder:
            forget_processes()
            try:
                more = {"per_device_train_batch_size": size, **ARGUMENTS, **self.fields}
                trainer = make(model, transformers.TrainingArguments(folder, **more), **words)
                trainer.train()
            finally:
                forget_processes()
        return trainer, record.gradients


class LabelsOfRank(OfTrainer):
    """Each data rank divides by the number of its own labels."""

    fields: ClassVar = {"average_tokens_across_devices": False}
    refused = "ValueError"


class SmoothedByTrainer(OfTrainer):
    fields: ClassVar = {"label_smoothing_factor": 0.2}


class MeansOfModel(transformers.LlamaForCausalLM):
    """A model whose loss is the mean over the labels of a pass, as of many vision models."""

    accepts_loss_kwargs = False


class MeansOfPasses(OfTrainer):
    def prepare(self, model):
        model.__class__ = MeansOfModel


def logged(trainer, name):
    """What a Trainer has logged of each step."""
    steps = [log for log in trainer.state.log_history if "loss" in log]
    return [torch.tensor(float(log[name])) for log in steps]
