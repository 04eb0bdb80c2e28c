"""planc inside transformers' `Trainer`.

    from planc.integrations.trainer import PlancTrainer

    PlancTrainer(model, arguments, plan="llama", overrides=["tp=2"], train_dataset=data).train()

The hooks are those that `Trainer` has for models that transformers itself distributes
(`DistributedConfig`): it neither moves nor wraps such a model, and it counts the ranks that read
the same rows once.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

import planc
from planc.integrations.loops import of_data_ranks, require_served
from planc.runtime.run import Run

_Trainer: Any = transformers.Trainer if TYPE_CHECKING else object
_STATE = "planc"
"""The folder of a checkpoint for what every plan can resume from."""
_DECIDED = {
    "fsdp": "its `fsdp` section",
    "deepspeed": "its `fsdp` section",
    "parallelism_config": "its mesh",
    "gradient_checkpointing": "its `checkpoint` section",
    "bf16": "`precision` in its `fsdp` section",
    "fp16": "`precision` in its `fsdp` section",
    "torch_compile": "its `compile` section",
}
"""Training arguments that would change what the plan says, by what says it there."""


class PlancTrainerMixin(_Trainer):  # type: ignore[misc]
    """Mixed into `Trainer` or a subclass of it, in front.

    Args:
        model: not parallel yet; a plan is applied to it.
        args: the training arguments. Gradients are clipped, and states saved, by planc.
        plan: as of `planc.apply`; by default the plan of the model's family.
        overrides: as of `planc.apply`.

    Attributes:
        planc_run: the handle of the run.

    Raises:
        PlanError: the plan has errors.
        ValueError: the model is given by a function, the optimizer is Adafactor, the arguments
            decide what the plan decides, such as `bf16`, or the plan has axes that `Trainer`'s loop
            cannot serve, such as a pipeline.
    """

    planc_run: Run

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *others: Any,
        plan: str | os.PathLike[str] | None = None,
        overrides: Any = (),
        **more: Any,
    ) -> None:
        if model is None or args is None:
            raise ValueError("PlancTrainer takes a model and its TrainingArguments")
        if "adafactor" in str(args.optim):
            raise ValueError('Adafactor takes no sharded parameters: pass optim="adamw_torch"')
        for name, section in _DECIDED.items():
            if getattr(args, name, None):
                raise ValueError(f"the plan decides {name}, by {section}: leave it off in args")
        run = planc.apply(model, plan, overrides=overrides, device_type=args.device.type)
        require_served(run.lowered, "Trainer's loop")
        self.planc_run = run
        model._is_distributed_loading_by_transformers = True
        model._is_fsdp_managed_module = True
        wanted, args.save_only_model = args.save_only_model, True  # it refuses to resume otherwise
        try:
            super().__init__(model, args, *others, **more)
        finally:
            args.save_only_model = wanted
        counts = self.model_accepts_loss_kwargs or self.compute_loss_func
        if counts and args.average_tokens_across_devices:
            run.first.labels_counted()  # by Trainer; TRL's divides by them outside the model

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        run = self.planc_run
        self.accelerator: Any
        self.accelerator.state.device_mesh = run.mesh
        run.model._tp_size = run.lowered.world_size // run.data_size
        self.accelerator.gather_for_metrics = _gather_each_row_once(
            self.accelerator, self.accelerator.gather_for_metrics, run
        )
        self.gather_function = self.accelerator.gather_for_metrics

    # gradients

    def _defer_fsdp_gradient_reduction(self) -> AbstractContextManager[None]:
        return self.planc_run.no_sync()

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.planc_run.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        if grad_norm is None:
            grad_norm = self.planc_run.clip_grad_norm_(float("inf"))
        norm = grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm
        return float(norm)

    # files

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Weights and configuration for `from_pretrained`, and the tokenizer."""
        folder = Path(output_dir or self.args.output_dir)
        self.planc_run.export(folder, replace=True)
        tokenizer = getattr(self, "processing_class", None)
        if tokenizer is not None and self.args.should_save:
            tokenizer.save_pretrained(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        schedule = {"scheduler": self.lr_scheduler}
        folder = Path(output_dir) / _STATE
        self.planc_run.save(folder, optimizer=self._plain_optimizer(), extra=schedule)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.planc_run.load(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / _STATE).is_dir():
            return
        schedule = {"scheduler": self.lr_scheduler}
        folder = Path(checkpoint) / _STATE
        self.planc_run.load(folder, optimizer=self._plain_optimizer(), extra=schedule)

    def _load_best_model(self) -> None:
        self.planc_run.load(self.state.best_model_checkpoint)

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.optimizer
        inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        return inner


class PlancTrainer(PlancTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers' `Trainer` for a model under a plan."""


def _gather_each_row_once(accelerator: Any, gather_for_metrics: Any, run: Run) -> Any:
    """`gather_for_metrics` that takes the rows of one rank of those that read the same ones."""
    gather_all = accelerator.gather

    def gathered(data: Any, use_gather_object: bool = False) -> Any:
        accelerator.gather = lambda data: of_data_ranks(run, gather_all(data))
        try:
            return gather_for_metrics(data, use_gather_object)
        finally:
            del accelerator.gather  # the method of the class is back

    return gathered
