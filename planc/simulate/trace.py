"""Records inputs and outputs of every module in one run, and the model's line that called it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from planc.model.facts import below
from planc.proxy.stack_frames import of_a_model

_PROGRAM = "planc/simulate/program.py"
"""The file that calls models; frames of its callers are not the model's code."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor that was seen in a run, on the CPU: local, of a DTensor full and with placements."""

    tensor: torch.Tensor
    placements: tuple[Placement, ...] = ()

    @classmethod
    def from_tensor(cls, value: torch.Tensor) -> Seen:
        """Gathers a DTensor: a collective that all ranks join, since they run the same code."""
        if isinstance(value, DTensor):
            return cls(value.detach().full_tensor().cpu(), value.placements)
        return cls(value.detach().cpu())


@dataclass(slots=True)
class ModuleCall:
    """The first call of a module in a run.

    Args:
        line: the line of the model's code that called it, as `modeling_llama.py:281: ...`.
        inputs: its input tensors by position (`0`) or by name, before any hook of a style.
        output: its first output tensor, after all hooks; None until it has ended.
    """

    line: str
    inputs: dict[str, Seen] = field(default_factory=dict)
    output: Seen | None = None


@dataclass(slots=True)
class Trace:
    """The calls of one run in order, the names in the order of ending, those that run (outermost
    first), and whether the run is watched now; without `tensors` neither inputs nor outputs.
    """

    tensors: bool = True
    calls: dict[str, ModuleCall] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    watching: bool = False

    @contextmanager
    def watch(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Watches modules while they run, under these names, outside of all hooks."""
        with ExitStack() as hooks:
            for name, module in modules.items():
                before, after = partial(self._before, name), partial(self._after, name)
                first = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                hooks.callback(first.remove)
                hooks.callback(module.register_forward_hook(after).remove)
            self.watching = True
            hooks.callback(setattr, self, "watching", False)
            yield

    def _before(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self.running.append(name)
        if name in self.calls:
            return
        call = ModuleCall(line=caller() if self.tensors else "")
        if self.tensors:
            given = [*((str(i), v) for i, v in enumerate(args)), *kwargs.items()]
            call.inputs = {k: Seen.from_tensor(v) for k, v in given if isinstance(v, torch.Tensor)}
        self.calls[name] = call

    def _after(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        while self.running and self.running.pop() != name:
            pass
        call = self.calls[name]
        if call.output is None:
            value = main_tensor(output) if self.tensors else None
            call.output = None if value is None else Seen.from_tensor(value)
            self.finished.append(name)

    @property
    def leaf(self) -> str:
        """The leaf module that ended last."""
        leaves = (n for n in reversed(self.finished) if not any(below(o, n) for o in self.calls))
        return next(leaves, "")


def main_tensor(output: Any) -> torch.Tensor | None:
    """The main tensor of a module's output: the hidden states (the first one), or the logits."""
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() else None
    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    values = output.values() if isinstance(output, dict) else output
    if isinstance(values, tuple | list) or isinstance(output, dict):
        return next((tensor for v in values if (tensor := main_tensor(v)) is not None), None)
    return None


def code_line(path: str, number: int, text: str | None = None) -> str:
    """A line of code in the form used in messages."""
    import linecache

    short = path.replace("\\", "/").rpartition("/")[2]
    shown = text if text is not None else linecache.getline(path, number)
    return f"{short}:{number}: {shown.strip()}"


def caller() -> str:
    """The running line of the model's own code; empty if there is none."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(_PROGRAM):
        if of_a_model(path := frame.f_code.co_filename):
            return code_line(path, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def raising_line(error: BaseException) -> str:
    """The innermost line of the model's code that raised an exception; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = (
        code_line(f.filename, f.lineno or 0, f.line)
        for f in reversed(frames)
        if of_a_model(f.filename)
    )
    return next(lines, "")
