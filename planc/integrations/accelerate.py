"""planc inside a loop of accelerate's `Accelerator`.

    run = planc.apply(model, "llama", overrides=["tp=2"])
    accelerator = PlancAccelerator(run, gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(run.model, optimizer, loader)

The hooks are those of accelerate for models that arrive prepared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate
from torch import Tensor, nn

from planc.integrations.loops import of_data_ranks, require_served, save_weights
from planc.runtime.run import Run

_Accelerator: Any = accelerate.Accelerator if TYPE_CHECKING else object


class PlancAcceleratorMixin(_Accelerator):  # type: ignore[misc]
    """Mixed into `Accelerator` or a subclass of it, in front.

    `prepare` leaves the model of the run as it is. The ranks of a tensor axis read the same rows;
    `gather` and `gather_for_metrics` give each row once.

    Args:
        run: the handle of `planc.apply`.
        arguments: those of `Accelerator`.

    Raises:
        ValueError: the plan has axes that the loop cannot serve, such as a pipeline; or a
            precision is asked for, which the plan decides.
    """

    def __init__(self, run: Run, **arguments: Any) -> None:
        require_served(run.lowered, "accelerate's loop")
        if arguments.get("mixed_precision") not in (None, "no"):
            raise ValueError("the plan's `precision` is that of the run: pass no mixed_precision")
        super().__init__(**arguments)
        self.planc_run = run
        self.state: Any
        self.state.device_mesh = run.mesh
        run.model._is_accelerate_prepared = True

    def gather(self, tensor: Any) -> Any:
        return of_data_ranks(self.planc_run, super().gather(tensor))

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Steps once for each batch that a step reads: as often as there are data ranks."""
        prepared = super().prepare_scheduler(scheduler)
        if not self.split_batches:
            once, times = prepared.step, self.planc_run.data_size
            prepared.split_batches = True
            prepared.step = lambda *args, **more: [once(*args, **more) for _ in range(times)]
        return prepared

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with self.planc_run.no_sync():
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clips by the norm of the whole model, whatever `parameters` are, as FSDP's does."""
        if self.sync_gradients:
            self.unscale_gradients()
            return self.planc_run.clip_grad_norm_(max_norm, norm_type)
        return self.planc_run.clip_grad_norm_(float("inf"), norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        return self.planc_run.full_state_dict()

    def save_model(self, model: nn.Module, save_directory: Any, **more: Any) -> None:
        """Writes the weights for `from_pretrained`, or the plan's adapters for peft."""
        save_weights(self.planc_run, save_directory)

    def save_state(
        self, output_dir: str | os.PathLike[str], *, frozen: bool = True, **more: Any
    ) -> str:
        """Writes a checkpoint that any plan can resume from: the model, its optimizer, the
        schedules, and the objects of `register_for_checkpointing`; `frozen` as of `Run.save`.
        """
        plain, others = self._plain(), self._other_objects()
        self.planc_run.save(output_dir, optimizer=plain, extra=others, frozen=frozen)
        return str(Path(output_dir))

    def load_state(self, input_dir: str | os.PathLike[str], **more: Any) -> None:
        self.planc_run.load(input_dir, optimizer=self._plain(), extra=self._other_objects())

    def _plain(self) -> Any:
        """The optimizer without accelerate's wrapper; None before `prepare`."""
        if len(self._optimizers) > 1:
            raise ValueError("a plan's checkpoint has the state of one optimizer")
        return self._optimizers[0].optimizer if self._optimizers else None

    def _other_objects(self) -> dict[str, Any]:
        schedules = {f"scheduler{i}": each for i, each in enumerate(self._schedulers)}
        return schedules | {f"object{i}": each for i, each in enumerate(self._custom_objects)}


class PlancAccelerator(PlancAcceleratorMixin, accelerate.Accelerator):  # type: ignore[misc]
    """accelerate's `Accelerator` for a model under a plan."""
