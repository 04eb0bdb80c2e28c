"""Keeps configurations from doing harm while a model is built: no code, no network, no flood.

A config.json can name kernels and backbones of the hub, which transformers would fetch and run as
it builds the model, and sizes for which building would take hours.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

MAX_PARTS = 250_000
"""Modules and parameters of one model; 60 layers of 384 experts each have fewer than 200,000."""
_EXPERTS = "experts_implementation"
_KERNELS = ("attn_implementation", _EXPERTS)


class TooLargeError(ValueError):
    """A configuration asks for more modules than any model has."""


def without_kernels(values: Any) -> Any:
    """Fields without those that choose kernels, at any depth.

    Kernels decide how a model computes, not what it is, and one named `org/kernel` is code. How
    transformers itself multiplies experts is kept: it decides which sizes can be sharded.
    """
    if isinstance(values, dict):
        return {k: without_kernels(v) for k, v in values.items() if not _kernel(k, v)}
    return [without_kernels(v) for v in values] if isinstance(values, list) else values


def _kernel(field: Any, value: Any) -> bool:
    """Whether a field chooses kernels, other than transformers' own ways to run experts."""
    built_in = field == _EXPERTS and value in ("eager", "batched_mm")
    return not built_in and str(field).lstrip("_").removesuffix("_internal") in _KERNELS


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Holds back what bitsandbytes and torchao warn of when they are imported (kernels that they
    lack, what torch deprecates): peft, diffusers and transformers import them where they are
    installed, also for models that have no use for them.
    """
    loggers = [logging.getLogger(n) for n in ("bitsandbytes", "torchao", "torch.utils._pytree")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def import_bitsandbytes() -> None:
    """Imports bitsandbytes, where it is installed, as `import diffusers` would, but not torch's
    compiler: bitsandbytes hands it four functions as it is imported, that nothing here calls.
    """
    import torch

    with contextlib.suppress(ImportError), mock.patch.object(torch, "compile", _not_compiled):
        import bitsandbytes  # noqa: F401


def _not_compiled(function: Any = None, **_: Any) -> Any:
    return function or _not_compiled


_ONE_AT_A_TIME = threading.RLock()
"""Two threads would each put back what they found, and leave what the other had put there."""


@contextlib.contextmanager
def isolate() -> Iterator[None]:
    """Nothing is fetched from the hub, none of its kernels are loaded, and building is bounded.
    One thread at a time.

    Raises:
        TooLargeError: inside the block, at the module or parameter that is one too many.
    """
    from huggingface_hub import constants
    from torch.nn.modules import module as hooks

    with quiet_imports():
        from planc.compat.transformers_kernels import hub_kernels

    count = 0

    def count_part(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > MAX_PARTS:
            raise TooLargeError(f"the model has more than {MAX_PARTS:,} modules and parameters")

    with _ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(constants, "HF_HUB_OFFLINE", True))
        if hasattr(hub_kernels, "get_kernel_hub"):  # if the package `kernels` is installed
            stack.enter_context(mock.patch.object(hub_kernels, "get_kernel_hub", _refuse_kernel))
        for register in (
            hooks.register_module_module_registration_hook,
            hooks.register_module_parameter_registration_hook,
        ):
            stack.callback(register(count_part).remove)
        yield


def import_models() -> None:
    """Imports `transformers.models` without reading its 1,600 files a second time.

    To list its classes, transformers reads them once for itself and once for `models`: its cache
    does not know the folder again by the path of the folder's `__init__.py`.
    """
    import transformers

    from planc.compat.transformers_imports import import_utils

    read = import_utils.create_import_structure_from_path
    models = Path(transformers.__file__).parent / "models"

    def read_cached(path: Any) -> Any:
        return read(models if Path(path) == models / "__init__.py" else path)

    with mock.patch.object(import_utils, read.__name__, read_cached):
        import transformers.models


def _refuse_kernel(kernel: str, *_: Any, **__: Any) -> Any:
    """Stands for the loader of hub kernels; transformers goes on without one that is not found."""
    raise FileNotFoundError(f"planc loads no kernels from the hub, such as {kernel}")
