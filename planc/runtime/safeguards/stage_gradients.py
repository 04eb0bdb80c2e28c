"""Numbers that a script computes of the gradients of one pipeline stage.

Each rank of a pipeline has the parameters of its stages, so that a norm over `model.parameters()`
is that of these. Between the backward pass and the optimizer's step, functions of gradients are
observed: a script that reduces all of them to numbers, and exchanges nothing with other ranks, has
numbers that differ between the stages.
"""

import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

from planc.diagnostics.diagnostic import Label
from planc.runtime.preconditions import stop, warning
from planc.runtime.script_line import script_line
from planc.runtime.standalone.pipeline import Stages

_READ = torch.Tensor.grad.__get__
_MARK = "_planc_gradient_of"
"""The attribute of a tensor that is computed of gradients: the ids of their parameters."""
_PLANC, _TORCH = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)
_OPEN = threading.local()
_WARNED: WeakSet[nn.Module] = WeakSet()
_HELP = (
    "call `run.clip_grad_norm_(max_norm)`, which returns the norm of the full model; with "
    "`max_norm=inf` it scales nothing. Or sum over the stages, by "
    '`torch.distributed.all_reduce(squares, group=run.meshes["pp"].get_group())`'
)


class StageGradients(TorchFunctionMode):  # type: ignore[misc]
    """Observes functions of the gradients of a rank's stages, until the optimizer steps.

    Args:
        model: of this rank's stages, after a backward pass.
    """

    def __init__(self, model: nn.Module, stages: Stages) -> None:
        super().__init__()
        self.model, self.stages = model, stages
        trained = [p for p in model.parameters() if p.grad is not None]
        self.parameters = {id(p): p for p in trained}
        self.missing = {id(p) for p in trained if p.numel() > 1}
        self.exchanged = not self.missing
        self.place: tuple[Label, ...] | None = None
        self.values: list[tuple[int, int]] = []

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.exchanged:
            return out
        if _of_collectives(func, sys._getframe(1)):
            self.exchanged = True
        elif self.place is not None:
            return out
        elif func == _READ:
            if isinstance(out, Tensor) and id(args[0]) in self.parameters:
                for tensor in (out, getattr(out, "_local_tensor", out)):
                    setattr(tensor, _MARK, frozenset([id(args[0])]))
        else:
            self._note(out, [*_tensors((*args, *(kwargs or {}).values()))])
        return out

    def _note(self, out: Any, given: list[Tensor]) -> None:
        """Marks the tensors of a result, or notes that gradients were reduced to numbers."""
        marked = [tensor for tensor in given if hasattr(tensor, _MARK)]
        results = [*_tensors([out])]
        if not marked or not results:
            return
        owners = frozenset().union(*(getattr(tensor, _MARK) for tensor in marked))
        if any(result.numel() > 1 for result in results):
            for result in results:
                setattr(result, _MARK, owners)
        elif any(tensor.numel() > 1 for tensor in marked) and not _by_planc(sys._getframe(2)):
            self.missing -= owners
            if not self.missing:
                self.place, self.values = script_line("the numbers are computed here"), self._now()

    def _now(self) -> list[tuple[int, int]]:
        """The identities and versions of the gradients, and of their shards."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        shards = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
        return [(id(tensor), tensor._version) for tensor in (*gradients, *shards)]

    def require(self) -> None:
        """Judges the numbers of a script before the optimizer steps.

        Raises:
            PlanError: PL427, they have changed the gradients.
        """
        if self.exchanged or self.place is None:
            return
        text = "this is computed of the gradients of one rank's stages, not of the full model"
        if self._now() != self.values:
            raise stop("PL427", f"{text}, and changes them", *self.place, help=_HELP)
        if self.model not in _WARNED:
            _WARNED.add(self.model)
            warning("PL427", text, *self.place, help=_HELP, stages=self.stages)


def observe_gradients(model: nn.Module, stages: Stages) -> None:
    """Observes what this thread computes of gradients, unless it is inside of another mode, whose
    end would then end this one.
    """
    end_observation()
    if torch._C._len_torch_function_stack() == 0:
        _OPEN.mode = StageGradients(model, stages)
        torch.overrides._push_mode(_OPEN.mode)


def end_observation() -> StageGradients | None:
    """Ends the observation of this thread; None without one."""
    mode, _OPEN.mode = getattr(_OPEN, "mode", None), None
    if mode is None:
        return None
    others = []
    while (top := torch.overrides._pop_mode()) is not mode:
        others.append(top)
    for other in reversed(others):
        torch.overrides._push_mode(other)
    return mode  # type: ignore[no-any-return]


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields tensors, also those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, Tensor))


def _of_collectives(func: Any, frame: Any) -> bool:
    """Whether a function is a collective, or is called by one."""
    own = getattr(func, "__module__", None) == distributed_c10d.__name__
    return own or bool(frame.f_code.co_filename == distributed_c10d.__file__)


def _by_planc(frame: Any) -> bool:
    """Whether planc calls torch here."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_PLANC)
