"""transformers: its own parallelism, as `from_pretrained(distributed_config=...)` applies it."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from planc.compat.names import private_names, require

with private_names("transformers"):
    from transformers import PreTrainedModel
    from transformers.distributed import DistributedConfig
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.utils import logging

require("transformers", logging, "_tqdm_active")
require("transformers", PreTrainedModel, "_resolve_parallel_plans")
require("transformers", PreTrainedModel, "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan")

__all__ = ["ALL_PARALLEL_STYLES", "DistributedConfig", "loading_on_threads", "with_plan"]


_INITIALIZING = threading.RLock()
"""Held by the rank that constructs or initializes a model, for which transformers patches torch and
its own classes in all threads."""


def with_plan(cls: Any, kind: str, rules: Mapping[str, Any]) -> Any:
    """A class like `cls`, for ranks that are threads, whose models have these rules as their plan
    of a kind, and no others.
    """

    def resolve(self: Any, config: Any) -> Any:
        setattr(self, f"_{kind}", dict(rules))
        return cls._resolve_parallel_plans(self, config)

    def contexts(_: Any, *args: Any, **more: Any) -> list[Any]:
        return [_INITIALIZING, *cls.get_init_context(*args, **more)]

    def initialize(self: Any) -> None:
        with _INITIALIZING:
            cls.initialize_weights(self)

    body = {
        "_resolve_parallel_plans": resolve,
        "get_init_context": classmethod(contexts),
        "initialize_weights": initialize,
        "__module__": cls.__module__,
    }
    return type(cls.__name__, (cls,), body)


@contextmanager
def loading_on_threads() -> Iterator[None]:
    """Lets ranks that are threads load weights: on the CPU, and in no threads of their own, which
    would be of no rank; without progress bars.
    """
    cpu = torch.device("cpu")
    with (
        mock.patch.object(logging, "_tqdm_active", False),
        mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}),
        mock.patch.object(torch._C, "_get_accelerator", lambda *_: cpu),
    ):
        yield
