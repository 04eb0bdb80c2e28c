"""planc inside transformers' `Trainer`.

    from planc.integrations.trainer import PlancTrainer

    PlancTrainer(model, arguments, plan="llama", overrides=["tp=2"], train_dataset=data).train()

The hooks are those that `Trainer` has for models that transformers itself distributes
(`DistributedConfig`): it neither moves nor wraps such a model, and it counts the ranks that read
the same rows once.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import transformers
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from transformers.trainer_pt_utils import BatchRebalanceSampler

import planc
from planc.integrations.loops import (
    load_weights,
    of_data_ranks,
    ranks_of_data,
    require_served,
    save_weights,
)
from planc.ops.styles import Sequence
from planc.runtime.counted_labels import labels_of
from planc.runtime.run import Run

_Trainer: Any = transformers.Trainer if TYPE_CHECKING else object
_STATE = "planc"
"""The folder of a checkpoint for what every plan can resume from."""
_DECIDED = {
    "fsdp": "its `fsdp` section",
    "deepspeed": "its `fsdp` section",
    "parallelism_config": "its mesh",
    "activation_checkpointing": "its `checkpoint` section",
    "gradient_checkpointing": "its `checkpoint` section",
    "activation_offloading": "its `checkpoint` section",
    "bf16": "`precision` in its `fsdp` section",
    "fp16": "`precision` in its `fsdp` section",
    "bf16_full_eval": "`precision` in its `fsdp` section",
    "fp16_full_eval": "`precision` in its `fsdp` section",
    "torch_compile": "its `compile` section",
    "peft_config": "its `adapters` section",
}
"""Arguments that would change what the plan says, by what says it there."""
_REFUSED = {
    "auto_find_batch_size": "halves the batch of the rank that ran out of memory, while the others "
    "wait for it in a collective: choose a batch size, by `planc estimate`",
    "enable_jit_checkpoint": "saves when a signal reaches a rank, which others may get in another "
    "step, and all ranks save together: leave it off, and set save_steps",
    "save_on_each_node": "writes on each node, and planc writes once, to a folder that all ranks "
    "share: leave it off",
    "use_vllm": "sends vLLM the weights of one process: leave it off, and the model generates",
    "sync_ref_model": "copies whole weights into the reference model: leave it off",
    "cast_lm_head_to_fp32": "casts a weight that the plan has split: leave it off",
    "use_transformers_paged": "generates with whole weights: leave it off",
    "use_transformers_continuous_batching": "generates with whole weights: leave it off",
    "use_liger_kernel": "replaces the modules that the plan was proved for: leave it off",
}
"""Arguments that a plan rules out, by what they do and what to do instead: they decide on one rank
alone, or need all weights, or the modules as they were.
"""
_IN_BACKWARD = ("lomo", "layerwise")
"""In the names of optimizers that step parameters in the backward pass, before planc reduces their
gradients.
"""
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
    _weighs = False
    _weighed: list[Any] | None = None  # the batches of a step
    _prepared: torch.optim.Optimizer | None = None

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
        _require_whole_embeddings(args, run)
        self.planc_run = run
        model._is_distributed_loading_by_transformers = True
        model._is_fsdp_managed_module = True
        wanted, args.save_only_model = args.save_only_model, True  # it refuses to resume otherwise
        try:
            super().__init__(*given, **named)
        finally:
            args.save_only_model = wanted
        self._decide_weights()

    def _decide_weights(self) -> None:
        """Whether the losses of passes are weighed by their labels here, as Trainer gives the model
        no number of labels to divide by.
        """
        counts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        self._weighs = not counts and self.loss_is_scaled_for_ga is None
        if self._weighs and self.label_smoother is not None:
            raise ValueError(
                "label_smoothing_factor takes a mean over the labels of a pass, as "
                f"{type(self.model).__name__} takes no number of them: leave it off"
            )
        if self._weighs or _trl_classes(type(self)):
            self.planc_run.first.labels_counted()  # TRL's trainers divide by them outside the model

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        run = self.planc_run
        self.accelerator: Any
        self.accelerator.state.device_mesh = run.mesh
        run.model._tp_size = run.lowered.world_size // run.data_size
        self.accelerator.gather_for_metrics = _gather_each_row_once(self.accelerator, run)
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

    def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
        with _evaluation_steps(self.args, self.planc_run):
            metrics: dict[str, float] = super().evaluate(*given, **named)
        return metrics

    def predict(self, *given: Any, **named: Any) -> Any:
        with _evaluation_steps(self.args, self.planc_run):
            return super().predict(*given, **named)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        with _gathering_once(self.accelerator, self.planc_run):
            super()._track_num_input_tokens(inputs)

    def store_flos(self) -> None:
        run = self.planc_run
        self.current_flos *= run.data_size / run.lowered.world_size  # summed over all ranks
        super().store_flos()

    # data

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)
        if not isinstance(sampler, BatchRebalanceSampler):
            return sampler
        run = self.planc_run
        return BatchRebalanceSampler(
            sampler.lengths,
            self.get_total_train_batch_size(self.args),
            dp_size=run.data_size,
            grad_accum=sampler.grad_accum,
            rank=run.data_rank,
            drop_last=sampler.drop_last,
        )

    # loss

    def get_batch_samples(self, *given: Any, **named: Any) -> tuple[list[Any], Any]:
        batches, items = super().get_batch_samples(*given, **named)
        if self._weighs:
            labeled = bool(batches) and all(_has_labels(batch) for batch in batches)
            self._weighed = batches if labeled else None
            self.loss_is_scaled_for_ga = labeled or None
            if labeled:
                self.planc_run.steps.begin(self.planc_run, batches)
        return batches, items

    def _get_num_items_in_batch(self, *given: Any, **named: Any) -> Any:
        """The number by which a model divides the sum of its losses, or None.

        Trainer gives the number of labels of all data ranks, and multiplies the loss by the number
        of ranks, as gradients are averaged over them. This is the quotient, so that terms that are
        not divided by it, such as the auxiliary loss of routers, are not multiplied either.
        """
        items = super()._get_num_items_in_batch(*given, **named)
        return items if items is None else items / self.planc_run.data_size

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **named: Any
    ) -> Any:
        """The loss of a pass. Where Trainer does not give the model the number of labels of a step,
        the mean over the labels of a pass is weighed by their number.
        """
        args, steps = self.args, self.planc_run.steps
        weighed = self._weighed if model.training else None
        batch = dict(inputs) if weighed else {}
        averages, args.average_tokens_across_devices = args.average_tokens_across_devices, False
        try:
            with steps.observe(self.planc_run) if weighed else nullcontext():
                result = super().compute_loss(model, inputs, return_outputs, **named)
        finally:
            args.average_tokens_across_devices = averages
        if not weighed:
            return result
        loss, *outputs = result if return_outputs else (result,)
        loss = steps.weigh(self.planc_run, loss, batch, weighed)
        return (loss, *outputs) if return_outputs else loss

    # gradients

    def create_optimizer(self, *given: Any, **named: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super().create_optimizer(*given, **named)
        plain = self._plain_optimizer()
        if plain is not self._prepared:
            self.optimizer = self._prepared = optimizer = self.planc_run.optimizer(plain)
        return optimizer

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
    signatures = (
        inspect.signature(attributes["__init__"])
        for attributes in map(vars, behind)
        if "__init__" in attributes
    )
    named = next(s for s in signatures if {"model", "args"} <= _names(s))
    return named.replace(parameters=list(named.parameters.values())[1:])  # without self


def _names(signature: inspect.Signature) -> set[str]:
    return {n for n, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}


def _has_labels(batch: Any) -> bool:
    return isinstance(batch, Mapping) and labels_of(batch) is not None


def _require_undecided(args: Any, call: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments that decide what the plan does, or that it rules out."""
    optim = str(getattr(args.optim, "value", args.optim))
    if "adafactor" in optim:
        raise ValueError('Adafactor takes no sharded parameters: pass optim="adamw_torch"')
    given = {**vars(args), **call}
    for name, section in _DECIDED.items():
        if given.get(name):
            raise ValueError(f"the plan decides {name}, by {section}: leave it off")
    for name, why in _REFUSED.items():
        if given.get(name):
            raise ValueError(f"{name} {why}")
    template = given.get("chat_template_path")
    if template and not str(template).endswith((".jinja", ".j2")):
        raise ValueError(
            "chat_template_path adds tokens of another tokenizer to the embeddings, which are "
            "shards: pass a .jinja file, or resize the model before"
        )
    if any(part in optim for part in _IN_BACKWARD):
        raise ValueError(f'{optim} steps in the backward pass: pass optim="adamw_torch"')
    if args.world_size > 1:
        _require_same_on_all_ranks(args)
    if given.get("precompute_ref_log_probs") and given.get("ref_model") is None:
        raise ValueError("precompute_ref_log_probs hashes all weights: pass a ref_model beside it")


def _require_same_on_all_ranks(args: Any) -> None:
    """Raises ValueError for arguments that let each rank divide by its own labels, or end its data
    on its own.
    """
    if not args.average_tokens_across_devices:
        raise ValueError(
            "average_tokens_across_devices=False divides by the labels of each rank, so that the "
            "loss depends on the plan: leave it on"
        )
    if not args.accelerator_config.even_batches:
        raise ValueError(
            "even_batches=False lets some ranks read fewer batches, and the others wait for them "
            "in a collective: leave it on, or set dataloader_drop_last"
        )


def _trl_classes(kind: type) -> list[str]:
    """The names of TRL's classes among those that a trainer inherits."""
    return [c.__name__ for c in kind.__mro__ if c.__module__.startswith("trl.")]


def _require_whole_embeddings(args: Any, run: Run) -> None:
    if args.neftune_noise_alpha is not None and run.data_size < run.lowered.world_size:
        raise ValueError(
            "neftune_noise_alpha scales its noise by the size of the embeddings, which tensor "
            "parallelism splits: leave it off, or set tp=1"
        )


def _require_tried(kind: type, run: Run) -> None:
    """Raises ValueError for a trainer of TRL that no test has compared with one process, and for
    one that generates under an axis whose ranks read the same rows.
    """
    theirs = _trl_classes(kind)
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
            f"TRL's {theirs[0]} treats each rank as a data-parallel rank and generates other "
            f"completions on it: the ranks of {', '.join(names)} would train on different ones. "
            f"Set {', '.join(f'{name}=1' for name in names)}, and let dp_shard split the model"
        )


class PlancTrainer(PlancTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers' `Trainer` for a model under a plan."""


@contextmanager
def _evaluation_steps(args: Any, run: Run) -> Iterator[None]:
    """Inside, a step of an evaluation has the batches of all data ranks: Trainer counts one for
    each process, also of those that read the same rows.
    """
    rows, plain = args.eval_batch_size * run.data_size, transformers.trainer.speed_metrics

    def speed_metrics(*given: Any, **named: Any) -> Any:
        if "num_steps" in named:
            named["num_steps"] = math.ceil(named["num_samples"] / rows)
        return plain(*given, **named)

    with mock.patch.object(transformers.trainer, "speed_metrics", speed_metrics):
        yield


@contextmanager
def _gathering_once(accelerator: Any, run: Run) -> Iterator[None]:
    """Inside, `accelerator.gather` takes the rows of one rank of those that read the same ones."""
    if run.data_size == run.lowered.world_size:
        yield
        return
    gather_all = accelerator.gather
    accelerator.gather = lambda data: of_data_ranks(run, gather_all(data))
    try:
        yield
    finally:
        del accelerator.gather  # the method of the class is back


def _gather_each_row_once(accelerator: Any, run: Run) -> Any:
    """`gather_for_metrics` that takes the rows of one rank of those that read the same ones.

    Tensors are gathered as such, also if it is asked to gather objects: accelerate returns these
    row by row, in a list, which Trainer concatenates wrongly.
    """
    gather_for_metrics = accelerator.gather_for_metrics
    first = run.mesh.get_rank() in ranks_of_data(run)

    def gather(data: Any, use_gather_object: bool = False) -> Any:
        if not _all_tensors(data):
            return gather_for_metrics(data if first else [], use_gather_object=True)
        with _gathering_once(accelerator, run):
            return gather_for_metrics(data)

    return gather


def _all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
