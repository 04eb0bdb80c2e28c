"""planc inside Ray Train.

    def train(run, config):
        optimizer = run.optimizer(torch.optim.AdamW(run.model.parameters(), lr=config["lr"]))
        for step in range(load(run, optimizer=optimizer) or 0, 100):
            ...
            save(run, step + 1, {"loss": loss.item()}, optimizer=optimizer)

    planc_trainer(train, build, "qwen3", world_size=64, overrides=["tp=8"]).fit()

The plan is checked before Ray starts a worker, and says how many there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

import planc
from planc.runtime.run import Run

if TYPE_CHECKING:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer


def planc_trainer(
    train: Callable[[Run, dict[str, Any]], Any],
    build: Callable[[], nn.Module],
    plan: str | os.PathLike[str],
    *,
    overrides: Any = (),
    world_size: int | tuple[int, int] | None = None,
    config: Mapping[str, Any] | None = None,
    scaling_config: ScalingConfig | None = None,
    apply: Mapping[str, Any] | None = None,
    **more: Any,
) -> TorchTrainer:
    """Ray's `TorchTrainer`, whose workers are the ranks of a plan.

    Args:
        train: what each worker calls with the handle of its run and with `config`.
        build: makes the model: here on meta, to read the plan for it, and in each worker.
        plan, overrides: as of `planc.apply`, on every node.
        world_size: the number of workers; the fewest and the most for a run that goes on with
            those that are left; None for that of a mesh whose axes all have sizes.
        config: a dictionary for `train`.
        scaling_config: what a worker needs besides, such as `ScalingConfig(use_gpu=True)`; its
            number of workers is not read.
        apply: other arguments of `planc.apply`.
        more: other arguments of `TorchTrainer`, such as `run_config`, whose `storage_path` is a
            folder that all nodes see, and whose `failure_config` says how often it starts again.

    Raises:
        PlanError: the plan has errors for a number of workers.
    """
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    scaling = scaling_config or ScalingConfig()
    scaling.num_workers = workers(build, plan, overrides=overrides, world_size=world_size)
    arguments = {"device_type": "cuda" if scaling.use_gpu else "cpu", **(apply or {})}

    def work(config: dict[str, Any]) -> None:
        train(planc.apply(build(), plan, overrides=overrides, **arguments), config)

    return TorchTrainer(work, train_loop_config={**(config or {})}, scaling_config=scaling, **more)


def workers(
    build: Callable[[], nn.Module],
    plan: str | os.PathLike[str],
    *,
    overrides: Any = (),
    world_size: int | tuple[int, int] | None = None,
) -> int | tuple[int, int]:
    """The number of ranks of a plan, or the fewest and the most.

    Arguments and errors are those of `planc_trainer`.
    """
    with torch.device("meta"):
        model = build()
    sizes = world_size if isinstance(world_size, tuple) else (world_size,)
    lowered_plans = [planc.lower(model, plan, world_size=n, overrides=overrides) for n in sizes]
    least, most = lowered_plans[0].world_size, lowered_plans[-1].world_size
    return (least, most) if isinstance(world_size, tuple) else most


def save(run: Run, step: int, metrics: Mapping[str, Any], **more: Any) -> None:
    """Writes a checkpoint into the storage of the Ray run, and reports it; every worker calls it.

    Args:
        run: the handle of the run.
        step: the number that `load` returns.
        metrics: numbers that Ray shows, those of rank 0.
        more: other arguments of `Run.save`, such as `optimizer` and `extra`.

    Raises:
        ValueError: the storage of the run is no folder, or the checkpoint would be reported before
            it is written (`asynchronous`).
        PlanError: as `Run.save`.
    """
    from ray import train
    from ray.train import Checkpoint
    from ray.train.v2.api.report_config import CheckpointUploadMode

    if more.get("asynchronous"):
        raise ValueError("a checkpoint is reported when it is written: leave out asynchronous")
    storage = train.get_context().get_storage()
    if storage.storage_filesystem.type_name != "local":
        kind = storage.storage_filesystem.type_name
        raise ValueError(f"all ranks write one folder: `storage_path` is one, not on {kind}")
    folder = Path(storage.experiment_fs_path) / f"checkpoint_{step:09}"
    run.save(folder, step=step, **more)
    train.report(
        dict(metrics),
        Checkpoint.from_directory(folder) if distributed.get_rank() == 0 else None,
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,  # it is where Ray would put it
    )


def load(run: Run, **more: Any) -> int | None:
    """Loads the last checkpoint that was reported; every worker calls it.

    Args:
        run: the handle of the run.
        more: other arguments of `Run.load`, such as `optimizer` and `extra`.

    Returns:
        The step that was passed to `save`; None where nothing was reported yet.

    Raises:
        PlanError: as `Run.load`.
    """
    from ray import train

    checkpoint = train.get_checkpoint()
    return run.load(checkpoint.path, **more) if checkpoint else None
