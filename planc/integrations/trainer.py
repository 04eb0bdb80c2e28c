"""planc inside transformers' `Trainer`.

    from planc.integrations.trainer import PlancTrainer

    PlancTrainer(model, arguments, plan="llama", overrides=["tp=2"], train_dataset=data).train()

The hooks are those that `Trainer` has for models that transformers itself distributes
(`DistributedConfig`): it neither moves nor wraps such a model, and it counts the ranks that read
the same rows once.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

import planc
from planc.integrations.loops import load_weights, of_data_ranks, require_served, save_weights
from planc.ops.styles import Sequence
from planc.runtime.run import Run

_Trainer: Any = transformers.Trainer if TYPE_CHECKING else object
_STATE = "planc"
"""The folder of a checkpoint for what every plan can resume from."""
_DECIDED = {
    "fsdp": "its `fsdp` section",
    "deepspeed": "its `fsdp` section",
    "parallelism_config": "its mesh",
    "gradient_checkpointing": "its `checkpoint` section",
    "activation_offloading": "its `checkpoint` section",
    "bf16": "`precision` in its `fsdp` section",
    "fp16": "`precision` in its `fsdp` section",
    "torch_compile": "its `compile` section",
    "peft_config": "its `adapters` section",
}
"""Arguments that would change what the plan says, by what says it there."""
_WHOLE = {
    "use_vllm": "sends vLLM the weights of one process: leave it off, and the model generates",
    "sync_ref_model": "copies whole weights into the reference model: leave it off",
    "use_liger_kernel": "replaces the modules that the plan was proved for: leave it off",
}
"""Arguments that need all weights, or the modules as they were, on one rank, by what to do."""
_GENERATE = ("GRPOTrainer", "RLOOTrainer")
_TRIED = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", *_GENERATE)
"""TRL's trainers that tests compare with one process; those that generate count ranks as rows."""


class PlancTrainerMixin(_Trainer):  # type: ignore[misc]
    """Mixed into `Trainer` or a subclass of it, in front.

    Args:
        given, named: the arguments of the class behind. Its `model` is not parallel yet, and a plan
            is applied to it; gradients are clipped, and states saved, by planc.
        plan: as of `planc.apply`; by default the plan of the model's family.
        overrides, watchdog: as of `planc.apply`.
        metrics: whether training logs have the numbers of `Run.metrics`.

    Attributes:
        planc_run: the handle of the run.

    Raises:
        PlanError: the plan has errors.
        ValueError: the model is given by its name or a function, the optimizer is Adafactor, the
            arguments decide what the plan decides, such as `bf16`, or the plan has axes that the
            loop cannot serve, such as a pipeline.
    """

    planc_run: Run

    def __init__(
        self,
        *given: Any,
        plan: str | os.PathLike[str] | None = None,
        overrides: Any = (),
        watchdog: float | None = None,
        metrics: bool = False,
        **named: Any,
    ) -> None:
        call = _signature(type(self)).bind_partial(*given, **named).arguments
        model, args = call.get("model"), call.get("args")
        if not isinstance(model, nn.Module) or args is None:
            raise ValueError("PlancTrainer takes a model, not its name, and its TrainingArguments")
        _require_undecided(args, call)
        run = planc.apply(
            model,
            plan,
            overrides=overrides,
            device_type=args.device.type,
            watchdog=watchdog,
            metrics=metrics,
        )
        require_served(run.lowered, "Trainer's loop")
        _require_tried(type(self), run)
        self.planc_run = run
        model._is_distributed_loading_by_transformers = True
        model._is_fsdp_managed_module = True
        wanted, args.save_only_model = args.save_only_model, True  # it refuses to resume otherwise
        try:
            super().__init__(*given, **named)
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

    # metrics

    def training_step(self, model: nn.Module, inputs: Any, *given: Any, **named: Any) -> Tensor:
        meter = self.planc_run.steps.meter
        if meter and not meter.since:
            meter.begin()
            self._logged = self.state.global_step
        loss: Tensor = super().training_step(model, inputs, *given, **named)
        if meter and isinstance(inputs, Mapping):  # GRPO's are texts
            meter.count([inputs], self.args.gradient_accumulation_steps)
        return loss

    def log(self, logs: dict[str, float], *given: Any, **named: Any) -> None:
        meter = self.planc_run.steps.meter
        if meter and "loss" in logs:  # a training log, which every rank comes to
            meter.settle(self.state.global_step - self._logged)
            self._logged = self.state.global_step
            logs |= meter.read()
        super().log(logs, *given, **named)

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
        """Weights and configuration for `from_pretrained`, or adapters for peft, and the
        tokenizer.
        """
        folder = Path(output_dir or self.args.output_dir)
        save_weights(self.planc_run, folder)
        tokenizer = getattr(self, "processing_class", None)
        if tokenizer is not None and self.args.should_save:
            tokenizer.save_pretrained(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        schedule = {"scheduler": self.lr_scheduler}
        folder = Path(output_dir) / _STATE
        plain = self._plain_optimizer()
        self.planc_run.save(folder, optimizer=plain, extra=schedule, frozen=False)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_weights(self.planc_run, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / _STATE).is_dir():
            return
        schedule = {"scheduler": self.lr_scheduler}
        folder = Path(checkpoint) / _STATE
        self.planc_run.load(folder, optimizer=self._plain_optimizer(), extra=schedule)

    def _load_best_model(self) -> None:
        load_weights(self.planc_run, self.state.best_model_checkpoint)

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.optimizer
        inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        return inner


def _signature(kind: type) -> inspect.Signature:
    """The signature of the first class behind the mixin which names its model and arguments: one
    that hands on `*args` says nothing of them.
    """
    behind = kind.__mro__[kind.__mro__.index(PlancTrainerMixin) + 1 :]
    every = (inspect.signature(own["__init__"]) for own in map(vars, behind) if "__init__" in own)
    named = next(s for s in every if {"model", "args"} <= _names(s))
    return named.replace(parameters=list(named.parameters.values())[1:])  # without self


def _names(signature: inspect.Signature) -> set[str]:
    return {n for n, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}


def _require_undecided(args: Any, call: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments that decide what the plan does, or that it rules out."""
    if "adafactor" in str(args.optim):
        raise ValueError('Adafactor takes no sharded parameters: pass optim="adamw_torch"')
    given = {**vars(args), **call}
    for name, section in _DECIDED.items():
        if given.get(name):
            raise ValueError(f"the plan decides {name}, by {section}: leave it off")
    for name, why in _WHOLE.items():
        if given.get(name):
            raise ValueError(f"{name} {why}")
    if given.get("precompute_ref_log_probs") and given.get("ref_model") is None:
        raise ValueError("precompute_ref_log_probs hashes all weights: pass a ref_model beside it")


def _require_tried(kind: type, run: Run) -> None:
    """Raises ValueError for a trainer of TRL that no test has compared with one process, and for
    one that generates under an axis whose ranks read the same rows.
    """
    theirs = [c.__name__ for c in kind.__mro__ if c.__module__.startswith("trl.")]
    if not theirs:
        return
    if theirs[0] not in _TRIED:
        raise ValueError(
            f"TRL's {theirs[0]} was not compared with one process under a plan: those that were "
            f"are {', '.join(_TRIED)}; write its loss into a loop of your own, as docs/training.md "
            "shows"
        )
    sharded = any(isinstance(op.style, Sequence) for op in run.lowered.styles)
    if theirs[0] != "RewardTrainer" and sharded:
        raise ValueError(
            f"TRL's {theirs[0]} multiplies the last hidden state by the head's weight itself, and "
            "sequence parallelism shards that state: set sequence=false"
        )
    if theirs[0] in _GENERATE and run.data_size < run.lowered.world_size:
        names = [a.name for a in run.lowered.axes if a.size > 1 and a.name not in run.lowered.data]
        raise ValueError(
            f"TRL's {theirs[0]} counts each rank as rows of its own and draws on each other "
            f"completions: the ranks of {', '.join(names)} would train on different ones. Set "
            f"{', '.join(f'{name}=1' for name in names)}, and let dp_shard split the model"
        )


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
