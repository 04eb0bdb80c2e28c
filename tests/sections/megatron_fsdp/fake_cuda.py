"""The real megatron_fsdp on processes without CUDA.

Its code asks `torch.cuda` for a device, streams and events everywhere, which it orders copies and
collectives with. On the CPU all of these run at once and in order, so there is nothing to order:
here they are nothing, for as long as a test runs, and `Tensor.cuda` gives the tensor itself. One
more thing is set: gradients are scaled before the reduction and not in it (a switch of the package,
`gradient_reduce_div_fusion`), as gloo has no reduction that scales. All else is the package's own.
"""

import contextlib
from unittest import mock

import torch


class Nothing:
    """A stream or an event whose work is done."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: None

    def record_event(self, *_):
        return Nothing()


class Event(Nothing):
    """A class of its own: torch.compile knows events and streams by theirs."""


@contextlib.contextmanager
def without_cuda():
    """Runs the package on the CPU, and lets planc try."""
    from megatron_fsdp import param_and_grad_buffer as buffers

    from planc.sections.megatron_fsdp import runtime as megatron_fsdp

    scaled = buffers.gradient_reduce_preprocessing

    def unfused(gradient, factor, config):
        config.gradient_reduce_div_fusion = False
        return scaled(gradient, factor, config)

    with contextlib.ExitStack() as stack:
        for name, value in {
            "current_device": lambda: 0,
            "Stream": Nothing,
            "Event": Event,
            "current_stream": lambda *_: Nothing(),
            "stream": lambda _: contextlib.nullcontext(),
            "synchronize": lambda *_: None,
            "empty_cache": lambda *_: None,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self))
        stack.enter_context(mock.patch.object(buffers, "gradient_reduce_preprocessing", unfused))
        stack.enter_context(mock.patch.object(megatron_fsdp, "DEVICES", ("cpu",)))
        yield
