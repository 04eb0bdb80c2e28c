"""The handle of a run, for training scripts."""

import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from planc.files.version import VERSION
from planc.model import cache
from planc.ops.lowered import Lowered
from planc.runtime import gradients
from planc.runtime.accumulation import Accumulation, accumulation
from planc.runtime.context import rank_part
from planc.runtime.counted_labels import rule_of
from planc.runtime.expert_bias import balance
from planc.runtime.known_verdict import KnownVerdict
from planc.runtime.meshes import Meshes
from planc.runtime.metrics import Meter
from planc.runtime.own_optimizers import made_optimizer
from planc.runtime.preconditions import stop
from planc.runtime.profile import StepProfile, profiling
from planc.runtime.safeguards.changes import ModelChanges
from planc.runtime.safeguards.inputs import PassComparison, SameRows
from planc.runtime.safeguards.stage_statistics import unobserved_norm
from planc.runtime.sends_weights import SendsWeights
from planc.runtime.sharded_tensors import SHARDED_BY
from planc.runtime.standalone.clipping import clip_grad_norm
from planc.runtime.training_step import Batch, TrainingStep
from planc.runtime.weights import peft_files, resuming, saving
from planc.runtime.weights.background import Background
from planc.runtime.weights.extras import Extra
from planc.runtime.weights.left_out import frozen_by
from planc.runtime.weights.loading import Compared, Excused, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(SendsWeights):
    """A model that a plan was applied to.

    Args:
        model: the model, changed in place.
        lowered: the operations that were run.
        digest: the digest of the lowered plan, equal on every rank.
        meshes: one-dimensional parts of the mesh by name: `meshes["tp"]`, `meshes["dp"]` for the
            ranks that read different data, `meshes["loss"]` for those that a loss is averaged over,
            `meshes["dp_shard_cp"]` for axes flattened to one, `meshes["dp_cp"]` and
            `meshes["ep_shard"]` for other derived axes. The first request for several axes that no
            operation uses creates process groups, so every rank must make it.
        known: what proofs say of the plan, all ranks together.
        sets: the overrides that `apply` was given.
        plan_digest: the sha256 of the plan's text and of those that it extends; None for a plan
            that was lowered already.
    """

    model: nn.Module
    lowered: Lowered
    digest: str
    meshes: Meshes = field(repr=False)
    first: PassComparison = field(default_factory=PassComparison, repr=False)
    batches: SameRows | None = field(default=None, repr=False)
    replaced: tuple[weakref.ref[nn.Parameter], ...] = field(default=(), repr=False)
    known: KnownVerdict | None = None
    changes: ModelChanges | None = field(default=None, repr=False)
    sets: tuple[str, ...] = ()
    plan_digest: str | None = None
    steps: TrainingStep = field(default_factory=TrainingStep, repr=False)
    background: Background = field(default_factory=Background, repr=False)

    @property
    def mesh(self) -> DeviceMesh:
        """The whole device mesh, axes outermost first."""
        return self.meshes.root

    def submesh(self, *axes: str) -> DeviceMesh:
        """One dimension of the mesh: an axis, or several flattened to one, outermost first.

        The first request for several axes creates a process group, so every rank must make it.

        Raises:
            KeyError: the mesh has no such axis.
        """
        return self.meshes.part(*axes)

    @property
    def data_mesh(self) -> DeviceMesh | None:
        """The ranks that read different data, as one dimension; None without any."""
        return self.meshes.part(*self.lowered.data) if self.lowered.data else None

    @property
    def loss_mesh(self) -> DeviceMesh | None:
        """The ranks over which gradients, and so a loss, are averaged: those that read different
        data, and those that share the sequence of a sample. None without any.

        The first request creates a process group, so every rank must make it.
        """
        return self.meshes.part(*self.lowered.averaged_axes) if self.lowered.averaged_axes else None

    @property
    def data_size(self) -> int:
        """The number of different batches in a step: `num_replicas` of a sampler."""
        return self.lowered.axis_size(*self.lowered.data)

    @property
    def data_rank(self) -> int:
        """The index of this rank's batch: `rank` of a sampler."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None  # the mesh holds every rank
        rank = 0  # `data_mesh` may create a process group, and a rank may ask for this alone
        for axis, position in zip(self.lowered.axes, coordinate, strict=True):
            if axis.name in self.lowered.data:
                rank = rank * axis.size + position
        return rank

    def describe(self) -> str:
        """The lowered plan, as `planc lower` prints it."""
        from planc.emit.text import render  # no proof depends on it

        return render(self.lowered, digest=self.digest)

    def summary(self) -> dict[str, Any]:
        """The run as JSON values, equal on every rank, for the configuration of a tracked run.

        `digest` names all that was applied: two runs with one digest made the same torch calls.
        """
        return {
            "digest": self.digest,
            "plan": self.lowered.plan,
            "plan_digest": self.plan_digest,
            "model": self.lowered.model,
            "world_size": self.lowered.world_size,
            "mesh": {axis.name: axis.size for axis in self.lowered.axes},
            "sets": dict(text.partition("=")[::2] for text in self.sets),
            "verdict": self.known.level if self.known else "unproved",
            "versions": {"planc": VERSION, **cache.versions({})},
        }

    # training: planc/runtime/gradients.py

    @property
    def _backend(self) -> Any:
        """The runtime of the backend that shards the model; None for torch's FSDP."""
        return SHARDED_BY.get(self.model)

    def optimizer(
        self,
        optimizer: Optimizer | None = None,
        *,
        lr: float | None = None,
        weight_decay: float = 0.0,
    ) -> Optimizer:
        """The optimizer that the plan describes, or one of the script's, prepared for the plan.

        Every rank calls it. With torch's FSDP, the optimizer's `zero_grad` then also clears what
        `no_sync` has not reduced yet. A backend may keep separate parameters for the optimizer,
        and copy them to the model after each step: an optimizer that was not prepared then raises
        at its first step.

        Args:
            optimizer: of the model's parameters, where the plan has no optimizer section.
            lr, weight_decay: where it has one: what the factors of its rules multiply.

        Raises:
            PlanError: PL464, PL465, the optimizer cannot step what the plan has made; PL486, it was
                created before the plan was applied; PL580, the plan has an optimizer section and
                an optimizer is given, or it has none and none is.
        """
        planned = bool(self.lowered.optimizer_rules)
        if optimizer is None or planned:
            rate = gradients.required_rate(optimizer, lr, planned=planned)
            optimizer = made_optimizer(self.model, rate, weight_decay)
        else:
            gradients.require_current(self.model, optimizer, self.replaced)
            if self.steps.meter:
                self.steps.meter.steps_with(optimizer)
            if self._backend:
                prepared: Optimizer = self._backend.optimizer(optimizer)
                return prepared
        gradients.clear_unreduced(optimizer, self.model)
        return optimizer

    def no_sync(self, *, whole: bool = False) -> AbstractContextManager[None]:
        """Backward passes inside accumulate gradients; the next one after reduces the rest.

        Sharded gradients are reduced in each pass and accumulate in shards, so that no rank holds
        whole ones; those of replicated units stay on the rank until then.

        Args:
            whole: whether sharded gradients too stay unsharded on the rank until then: fewer
                collectives, and a full gradient of each parameter. Other backends ignore it.
        """
        if self._backend:
            unreduced: AbstractContextManager[None] = self._backend.no_sync(self.model)
            return unreduced
        return gradients.no_sync(self.model, whole=whole)

    def batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a batch, on its device: its tokens, where the plan splits sequences;
        else all.

        The ranks of a context axis read the same rows, as those of a tensor axis do. Their parts
        have positions of their own and the labels of the next tokens (`shift_labels`), so that the
        model computes on them what it computes on the whole.

        Args:
            batch: the arguments of the model by name: `input_ids` or `inputs_embeds`,
                `attention_mask`, `position_ids`, `labels`, [rows, length]; and numbers.

        Raises:
            PlanError: PL544, the batch cannot be split; PL545, the ranks have read different
                batches. On every rank of the axis.
        """
        device = self.mesh.device_type
        moved = {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        return rank_part(self.model, moved, self.batches)

    def num_items_in_batch(self, *labels: Tensor | Batch) -> Tensor:
        """Returns the divisor of the loss of each accumulated pass. The gradients of a step are
        then those of the mean over all its tokens, however unevenly ignored labels are spread over
        ranks and passes.

        It is transformers' argument of that name: `model(..., num_items_in_batch=n).loss` is then
        the sum over a pass's tokens over n, and each pass's backward adds to the gradients as it
        is. The number is that of the valid labels of all data ranks over the number of ranks that
        gradients are averaged over: these, and those that split a sequence. Every rank calls it,
        once a step.

        Args:
            labels: each accumulated pass's batch as it was read, before `run.batch`, whose
                `shift_labels` count where the loss takes them; or its labels, [rows, length]. -100
                is ignored, and so is the first of a row, which a causal model does not predict. A
                model of your own that predicts all of them passes them flat, [tokens].
        """
        self.first.labels_counted()
        batches = [{"labels": one} if isinstance(one, Tensor) else one for one in labels]
        counts = map(rule_of(self.model).count, batches)
        return gradients.num_items_in_batch([*counts], self.data_mesh) / self.lowered.sequence_parts

    def accumulation(self, global_batch: int, *, rows: int | None = None) -> Accumulation:
        """The rows of a step that this rank reads, so that all ranks together read the same ones
        under any plan, and on any number of ranks.

            share = run.accumulation(64, rows=2)
            sampler = [part for step in range(start, steps) for part in share.batches(step)]
            loader = iter(DataLoader(data, batch_sampler=sampler))
            for step in range(start, steps):
                batches = list(islice(loader, len(share.parts)))
                loss = run.forward_backward(batches, passes=share.passes)

        Data ranks that do not divide the global batch have unequal numbers of rows, which
        `forward_backward` weighs by their labels. An auxiliary loss, which is a mean of each pass,
        depends on the ranks.

        Args:
            global_batch: the rows of a step, of all ranks and passes.
            rows: the most rows of a rank in a forward pass, of a pipeline in that of a microbatch;
                None for all in one.

        Raises:
            PlanError: PL619, there are fewer rows than data ranks, or the microbatches of the
                pipeline do not divide them.
            ValueError: a number of rows is not positive.
        """
        return accumulation(self.lowered, global_batch, rows, self.data_rank)

    def forward_backward(self, batches: Sequence[Batch], *, passes: int | None = None) -> Tensor:
        """Runs the gradient accumulation steps of a step, under any plan; every rank calls it.

        Gradients accumulate, as those of the mean loss over all tokens of the step: those of all
        batches, of their microbatches in a pipeline, and of all data ranks.

        Args:
            batches: those of this rank that one optimizer step accumulates, each a dictionary of
                the arguments of the model's forward, with labels, as they were read: `run.batch`
                is called here. The ranks of a pipeline, of a context axis and of a tensor axis have
                the same ones.
            passes: the number of passes of every rank, as `accumulation` gives it. A rank with
                fewer batches runs its last one again, with weight 0. None for one a batch.

        Returns:
            The mean loss over all tokens of all ranks, a scalar of float32, on every rank.

        Raises:
            PlanError: PL469, another rank passes another number of batches, or one passes none of
                its own, more than `passes`, or a batch without rows; PL488, a batch cannot be cut
                into the microbatches of the pipeline.
            ValueError: there is no batch, or the model returns no loss.
        """
        return self.steps.run(self, batches, trains=True, passes=passes)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def evaluate(self, batches: Sequence[Batch], *, passes: int | None = None) -> Tensor:
        """The mean loss over all tokens of some batches, without gradients or dropout.

        Arguments, result and errors are those of `forward_backward`.
        """
        trained = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            return self.steps.run(self, batches, trains=False, passes=passes)
        finally:
            for module in trained:
                module.training = True

    def metrics(self, *, per_expert: bool = False) -> dict[str, float]:
        """Numbers of the training steps since the last call, for any logger; empty without a step.

        Steps sum over the ranks what they count, so a rank may call it alone. The time runs from
        call to call, with all that happens between; a call after an evaluation leaves that out.

        Returns:
            `seconds_per_step`; `samples_per_second`, `tokens_per_second` of all ranks, tokens
            without padding where a batch has an `attention_mask` of two dims,
            `tokens_per_second_per_device` and `tokens_seen` since `apply`; `tflops_per_device` and
            `mfu` as planc's estimate counts the model's FLOPs, padding included, the latter of the
            device's peak where planc knows that; `memory/allocated_gib`, `memory/reserved_gib`, the
            peaks of this rank since the last call, on CUDA; `memory/estimated_gib` where batches
            have one shape; for a mixture `experts/imbalance/NAME`, tokens of the busiest expert
            over the mean, with a capacity `experts/dropped/NAME`, the share without a slot, both of
            the worst module without a name; `per_expert`: `experts/tokens/NAME/NUMBER`, of each.

        Raises:
            ValueError: `apply` was not asked for metrics.
        """
        return self._meter.read(per_expert=per_expert)

    def tokens_per_expert(self) -> dict[str, list[int]]:
        """The tokens that each expert got in the training steps since `apply`, over all ranks, by
        the name of the module that holds the experts.

        Empty for a model without fused experts that a router chooses by their index, and under a
        plan that compiles blocks. A rank may call it alone.

        Raises:
            ValueError: `apply` was not asked for metrics.
        """
        return self._meter.tokens_per_expert()

    def balance_experts(self, rate: float = 1e-3) -> None:
        """Moves the biases by which routers choose experts towards equal loads, as in DeepSeek-V3,
        without an auxiliary loss. Call it after each step of the optimizer, on every rank.

        Args:
            rate: what an expert gains that got fewer tokens than the mean since the last call, over
                all ranks and passes, and one that got more loses.

        Raises:
            ValueError: `apply` was not asked for metrics, or no router has such a bias.
        """
        balance(self.model, self._meter.new_loads(), rate)

    def profile(
        self,
        folder: str | os.PathLike[str] = "planc-trace",
        *,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        ranks: Literal["all", "first"] = "all",
        **options: Any,
    ) -> AbstractContextManager[StepProfile]:
        """Traces some steps with torch's profiler, in ranges that have the plan's lines.

        What runs inside calls the `step()` of the object that it is given after each training step.
        A module's forward and recomputation, and each collective, are in a range such as
        `plans/llama.plan:12 model.layers.0.self_attn.o_proj rowwise`. Numbers do not change. Steps
        that are recorded are slower: each operator passes Python.

        Args:
            folder: receives `rank_3.json`, a Chrome trace, which Perfetto opens; created if needed.
            wait, warmup, active: the numbers of steps that pass, warm the profiler up, and are
                recorded, once.
            ranks: `all` write a file each, or the `first` alone, while the others run as usual.
            options: further arguments of `torch.profiler.profile`, such as `with_stack=True`.

        Raises:
            ValueError: no step is recorded, or there is no such choice of ranks.
        """
        steps = (wait, warmup, active)
        if min(steps) < 0 or active < 1 or ranks not in ("all", "first"):
            raise ValueError(f"no profile has steps {steps} of {ranks!r} ranks: all or first")
        return profiling(
            self.model,
            self.lowered,
            self.mesh.device_type,
            Path(folder),
            steps=steps,
            every_rank=ranks == "all",
            options=options,
        )

    @property
    def _meter(self) -> Meter:
        if self.steps.meter is None:
            raise ValueError("nothing is counted: planc.apply(..., metrics=True)")
        return self.steps.meter

    def unshard(self) -> AbstractContextManager[None]:
        """Keeps all parameters unsharded, for inference: forward passes inside do not all-gather.

        Raises:
            PlanError: PL499, a backend other than torch's FSDP shards the model.
        """
        if backend := self.lowered.backend:
            message = f"`run.unshard` is not supported for a model that {backend.TITLE} shards"
            raise stop("PL499", message, help="it all-gathers in each pass: remove the call")
        return gradients.unshard(self.model)

    @unobserved_norm()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` over every mesh; returns the full model's norm."""
        return clip_grad_norm(
            self.model, max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def full_state_dict(self, *, every_rank: bool = False) -> dict[str, Tensor]:
        """The full state dict with the model's original names, on rank 0 or on all ranks.

        Every rank calls it. Compressed weights are left out.
        """
        return gradients.full_state_dict(self.model, every_rank=every_rank)

    # weights: planc/runtime/weights/loading.py, saving.py

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        weights: Weights | None = None,
        optimizer: Optimizer | None = None,
        extra: Extra | None = None,
        compare: Compared = "samples",
        new: Sequence[str] = (),
        unused: Sequence[str] = (),
    ) -> int | None:
        """Loads the model from a folder of safetensors, or from a checkpoint with an optimizer.

        A model on meta is allocated here. Every rank calls it, after `apply`.

        Args:
            path: a folder of safetensors, or a torch.distributed.checkpoint, such as `save` writes.
            weights: for safetensors, `slices` if each rank reads its own slices, or `rank0` if rank
                0 reads all and sends them. By default the setting of the plan's load section, else
                `slices`.
            optimizer: an optimizer of the model's parameters, to load the checkpoint's state into.
            extra: the objects that `save` was given, by name, to load their states into.
            compare: how the ranks compare the files that they read: `samples`, by sizes, headers
                and a block of each tensor, or `files`, by all bytes.
            new: modules or parameters that a folder of safetensors lacks, such as a new head: the
                model's own code initializes them, equally on every rank.
            unused: modules or parameters of the folder that the model has no use for.

        Returns:
            The step that was passed to `save`, None without one.

        Raises:
            PlanError: PL461, the ranks have different files; PL467, the checkpoint leaves out what
                this model lacks or has otherwise; PL468, `new` or `unused` is not true of the model
                and the folder; PL475, the plan has another setting;
                PL496, all missing names, unexpected
                names and wrong shapes at once, before anything is loaded; PL497, missing or broken
                files; PL567, `rank0` with a pipeline; PL687, compressed weights from a checkpoint.
        """
        self.finish_save()
        step = resuming.load(
            self.model,
            self.lowered,
            Path(path),
            weights=weights,
            optimizer=optimizer,
            extra=extra or {},
            compare=compare,
            excused=Excused(tuple(new), tuple(unused)),
            data=(self.data_size, self.data_rank),
            device=self.mesh.device_type,
        )
        self.first.weights.note(self.model)
        if self._backend:
            self._backend.copy_to_forward_weights(self.model)
        return step

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        optimizer: Optimizer | None = None,
        step: int | None = None,
        extra: Extra | None = None,
        frozen: bool = True,
        asynchronous: bool = False,
    ) -> None:
        """Writes a checkpoint that any plan can resume from; the previous one is replaced last.

        Args:
            path: a folder, created or replaced if it holds a checkpoint.
            optimizer: an optimizer of the model's parameters, whose state is saved too.
            step: a number that `load` returns.
            extra: other objects with `state_dict` and `load_state_dict`, by name, such as a second
                optimizer, an average of the weights, a learning rate scheduler and a stateful data
                loader. Each data rank's is saved, and tensors of the model's layout as the model's.
            frozen: whether what the plan freezes is saved too, such as the base model of adapters.
                Without it, `load` requires a model that has these weights, and compares them.
            asynchronous: whether it returns once the values are copied to memory of the CPU, and a
                thread writes them; `finish_save` waits for it, and so do the next `save` and
                `load`.

        Raises:
            PlanError: PL459, one of the other objects has tensors that could not be loaded; PL483,
                PL545, the ranks have read different rows in the last pass; PL497, the folder holds
                something else, or it, or the previous one in the background, could not be written.
            TypeError: one of the other objects has no state.
        """
        self.finish_save()
        for rows in (self.first.rows, self.batches):
            if rows is not None:
                rows.settle()
        saving.save(
            self.model,
            Path(path),
            optimizer=optimizer,
            step=step,
            extra=extra or {},
            data_rank=self.data_rank,
            left_out=frozenset() if frozen else frozen_by(self.model, self.lowered),
            background=self.background if asynchronous else None,
        )

    def finish_save(self) -> None:
        """Waits until a checkpoint that is written in the background is complete, if there is one.

        Every rank calls it, before the script ends.

        Raises:
            PlanError: PL497, it could not be written.
        """
        self.background.finish()

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        shard_size: int = 5 * 10**9,
        adapters: peft_files.Tuned | None = None,
        replace: bool = False,
    ) -> None:
        """Writes the full weights as safetensors that transformers' `from_pretrained` reads.

        Args:
            path: a folder, created if it does not exist.
            shard_size: the maximum size of a file in bytes, unless a single tensor is larger.
            adapters: `merged` into the weights, or `left_out`; required if the plan has adapters.
            replace: whether weights in the folder are replaced, once all new ones are written.

        Raises:
            PlanError: PL189, the plan has adapters and `adapters` is None, or merging would untie
                weights; PL686, compressed weights; PL497, the folder holds weights already, or
                it could not be written.
        """
        saving.export(
            self.model,
            self.lowered,
            Path(path),
            shard_size=shard_size,
            adapters=adapters,
            replace=replace,
        )

    # adapters: planc/runtime/weights/peft_files.py

    def save_adapters(self, path: str | os.PathLike[str]) -> None:
        """Writes the adapters and other trainable modules for peft's `PeftModel.from_pretrained`.

        Raises:
            PlanError: PL189, the plan has no adapters; PL497, the folder could not be written;
                PL688, a layer with an adapter is itself trainable.
        """
        peft_files.save(self.model, self.lowered, Path(path))

    def load_adapters(self, path: str | os.PathLike[str]) -> None:
        """Loads the adapters from a folder that `save_adapters` or peft wrote.

        Raises:
            PlanError: PL189, the plan has no adapters, or the model is on meta; PL461, the ranks
                have different files; PL496, names, shapes or scales that do not fit, before
                anything is loaded; PL497, missing or broken files.
        """
        peft_files.load(self.model, self.lowered, Path(path))
