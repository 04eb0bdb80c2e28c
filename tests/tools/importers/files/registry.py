"""The shape of a torchtitan registry; `planc import` reads it and never runs it."""

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.trainer import Trainer

from . import model_registry, widen


def llama3_8b() -> Trainer.Config:
    """A small run."""
    spec = model_registry("8B")
    return Trainer.Config(
        model_spec=spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(steps=10, mixed_precision_reduce="float32"),
        parallelism=ParallelismConfig(tensor_parallel_degree=2, data_parallel_shard_degree=-1),
        activation_checkpoint=SelectiveAC.Config(),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()),
    )


def llama3_8b_wide() -> Trainer.Config:
    config = llama3_8b()
    config.parallelism = ParallelismConfig(tensor_parallel_degree=4)
    config.training.steps = 20
    widen(config)
    return config
