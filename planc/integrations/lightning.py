"""planc inside Lightning's `Trainer`.

    strategy = PlancStrategy("llama", overrides=["tp=2"])
    Trainer(strategy=strategy, devices=8).fit(module, loader)

It stands where Lightning has its own strategy for models that DTensors and FSDP2 parallelize.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import strategies
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, distributed, nn

import planc
from planc.integrations.loops import require_served
from planc.runtime.run import Run

_Strategy: Any = strategies.ModelParallelStrategy if TYPE_CHECKING else object


class PlancStrategyMixin(_Strategy):  # type: ignore[misc]
    """Applies a plan to a model inside a LightningModule, instead of its `configure_model`.

    Lightning's own sampler gives the ranks of a tensor axis the same rows, gradients are clipped
    by the norm of the whole model, and checkpoints are folders that any plan can resume from.

    Args:
        plan: as of `planc.apply`; by default the plan of the model's family.
        overrides: as of `planc.apply`.
        attribute: the name of the model in the LightningModule.

    Attributes:
        planc_run: the handle of the run, once the model is set up.

    Raises:
        PlanError: the plan has errors.
        ValueError: the plan has axes that the loop cannot serve, such as a pipeline; the
            LightningModule has no module of that name; or a precision is asked for, which the plan
            decides.
    """

    planc_run: Run
    model: Any

    def __init__(
        self,
        plan: str | os.PathLike[str] | None = None,
        *,
        overrides: Any = (),
        attribute: str = "model",
        **more: Any,
    ) -> None:
        super().__init__(**more)
        self._planned = plan, overrides, attribute

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.planc_run.data_size, "rank": self.planc_run.data_rank}

    def setup_environment(self) -> None:
        self.accelerator.setup_device(self.root_device)
        self._setup_distributed()

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        plan, overrides, attribute = self._planned
        precision = self.precision_plugin.precision
        if precision != "32-true":
            raise ValueError(
                f"the plan's `precision` is that of the run: pass no precision, not {precision!r}"
            )
        if not hasattr(self, "planc_run"):
            model = getattr(self.lightning_module, attribute, None)
            if not isinstance(model, nn.Module):
                inside = ", ".join(name for name, _ in self.lightning_module.named_children())
                raise ValueError(
                    f"{type(self.lightning_module).__name__} has no module {attribute!r}: pass "
                    f"PlancStrategy(attribute=...), one of {inside or '(none)'}"
                )
            kind = self.root_device.type
            run = planc.apply(model, plan, overrides=overrides, device_type=kind)
            require_served(run.lowered, "Lightning's loop")
            self.planc_run = run
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip

    def model_to_device(self) -> None:
        """Moves what is beside the planned model, which is there, or has no values until it loads
        them.
        """
        planned, modules_around = self.planc_run.model, [*self.lightning_module.modules()]
        places = [
            (m._modules, n) for m in modules_around for n, c in m._modules.items() if c is planned
        ]
        for modules, name in places:
            modules[name] = nn.Module()
        try:
            super().model_to_device()
        finally:
            for modules, name in places:
                modules[name] = planned

    def _clip(self, optimizer: Any, clip_val: float) -> Tensor:
        return self.planc_run.clip_grad_norm_(clip_val)

    # checkpoints: what Lightning keeps is an `extra` of `Run.save`

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        folder, kept = self.broadcast(str(filepath)), _Kept(checkpoint)
        self.planc_run.save(folder, optimizer=self._plain(), extra={"lightning": kept})

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        folder, kept = self.broadcast(str(checkpoint_path)), _Kept({})
        self.planc_run.load(folder, optimizer=self._plain(), extra={"lightning": kept})
        return kept.state

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            shutil.rmtree(Path(filepath), ignore_errors=True)
        distributed.barrier()

    def _plain(self) -> Any:
        if len(self.optimizers) > 1:
            raise ValueError("a plan's checkpoint has the state of one optimizer")
        return self.optimizers[0] if self.optimizers else None


class _Kept:
    """A state as `Run.save` takes it."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class PlancStrategy(PlancStrategyMixin, strategies.ModelParallelStrategy):  # type: ignore[misc]
    """Lightning's strategy for a model under a plan."""
