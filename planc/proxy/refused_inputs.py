"""Exceptions of a model's code that mean that it does not accept its inputs.

Proxy models are tried on inputs of several kinds, and what they refuse is left out. An error of the
machine, or a bug of the code, says nothing of the inputs.
"""

import re

import torch
from torch import distributed

_REFUSALS = (TypeError, ValueError, IndexError, AssertionError)
_OF_THE_MACHINE = (MemoryError, OSError, ImportError, RecursionError)
_RUNTIME_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError, distributed.DistError)
_CPU_ALLOCATOR = "CPUAllocator: "
"""A part of torch's message for a CPU without memory, whose type is `RuntimeError`."""


def of_the_machine(error: Exception) -> bool:
    """Whether an exception comes from the machine or its packages: no memory, a file, a device."""
    return isinstance(error, _OF_THE_MACHINE + _RUNTIME_ERRORS) or _CPU_ALLOCATOR in str(error)


def refuses_inputs(error: Exception) -> bool:
    """Whether a model raises this for inputs that it does not accept: their names, shapes and
    numbers, a missing argument, or a field that its configuration lacks, which code shared by many
    models reads for such inputs.
    """
    if of_the_machine(error):
        return False
    lacks = re.search(r"NoneType|Config' object has no attribute", str(error))
    missing = isinstance(error, AttributeError) and lacks is not None
    return missing or type(error) is RuntimeError or isinstance(error, _REFUSALS)
