"""Numbers that a script computes of the gradients or weights of one pipeline stage.

Each rank of a pipeline has the parameters of its stages, so that a norm over `model.parameters()`
is that of these. Between the passes of a run, functions of gradients and weights are observed: a
script that reduces all of them to numbers, and exchanges nothing with other ranks, has numbers that
differ between the stages. Numbers of single parameters are right, and only their total is not.
"""

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from planc.diagnostics.diagnostic import Label
from planc.runtime.preconditions import stop, warning
from planc.runtime.script_line import script_line
from planc.runtime.standalone.pipeline import Stages

GRADIENTS, WEIGHTS = "gradients", "weights"
_READ_GRADIENT = Tensor.grad.__get__
_READ_NUMBER = frozenset(
    ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__format__", "__repr__")
)
"""The names of functions that give Python the value of a tensor."""
_ATTRIBUTES = ("__get__", "__set__")
_PLANC, _TORCH = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)
_OPEN = threading.local()
_WARNED: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
_SUM = (
    "sum over the stages, by "
    '`torch.distributed.all_reduce(squares, group=run.meshes["pp"].get_group())`'
)
_HELP = {
    GRADIENTS: "call `run.clip_grad_norm_(max_norm)`, which returns the norm of the full model; "
    f"with `max_norm=inf` it scales nothing. Or {_SUM}",
    WEIGHTS: _SUM,
}


class Origin(NamedTuple):
    """A parameter whose gradient or weight a tensor is computed of.

    Args:
        reduced: whether it has entered the tensor as a number.
    """

    kind: str
    parameter: int
    reduced: bool = False


class StageStatistics(TorchFunctionMode):  # type: ignore[misc]
    """Observes functions of the gradients and weights of a rank's stages.

    Args:
        model: of this rank's stages.
        kinds: what is observed; gradients after a backward pass.
    """

    def __init__(self, model: nn.Module, stages: Stages, *kinds: str) -> None:
        super().__init__()
        self.model, self.stages = model, stages
        trained = [p for p in model.parameters() if p.requires_grad and p.numel() > 1]
        with_gradient = trained if GRADIENTS in kinds else []
        self.gradients = {id(p): p for p in with_gradient if p.grad is not None}
        # many norms of weights are of matrices alone
        weights = {id(p): p for p in trained if p.ndim > 1}
        # a weak reference to a parameter would refuse `model.to_empty` and `model.to`
        self.weights = weights | {id(getattr(p, "_local_tensor", p)): p for p in weights.values()}
        self.every = {GRADIENTS: frozenset(self.gradients), WEIGHTS: frozenset(weights)}
        self._restart(*kinds)

    def _restart(self, *kinds: str) -> None:
        """Forgets what was observed, and observes these kinds of the same parameters."""
        self.origins: Any = WeakTensorKeyDictionary()
        self.missing = {k: set(self.every[k]) for k in kinds if len(self.every[k]) > 1}
        self.places: dict[str, tuple[Label, ...]] = {}
        self.values: list[tuple[int, int]] = []

    def observe_weights(self) -> None:
        """Observes weights anew, after a step of the optimizer."""
        self.gradients.clear()
        self._restart(WEIGHTS)
        _begin(self)

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling() or not self.missing:
            return out
        if func.__name__ in _ATTRIBUTES and not isinstance(out, Tensor):  # such as a shape
            return out
        if _of_collectives(func, sys._getframe(1)):
            self._exchange(sys._getframe(1))
        elif func == _READ_GRADIENT:
            if isinstance(out, Tensor) and id(args[0]) in self.gradients:
                self._mark(out, frozenset([Origin(GRADIENTS, id(args[0]))]))
        else:
            for inputs, result in _calls(func, (*args, *(kwargs or {}).values()), out):
                self._note(func.__name__, inputs, result)
        return out

    def _weight_of(self, tensor: Tensor) -> nn.Parameter | None:
        """The parameter that a tensor is, or whose shard it is; None for other tensors."""
        parameter = self.weights.get(id(tensor))
        if tensor is parameter or tensor is getattr(parameter, "_local_tensor", None):
            return parameter
        return None

    def _origins_of(self, tensor: Tensor) -> frozenset[Origin]:
        if (parameter := self._weight_of(tensor)) is not None:
            return frozenset([Origin(WEIGHTS, id(parameter))])
        return self.origins.get(tensor) or frozenset()

    def _mark(self, tensor: Tensor, origins: frozenset[Origin]) -> None:
        for part in (tensor, getattr(tensor, "_local_tensor", tensor)):
            if self._weight_of(part) is None:
                self.origins[part] = origins

    def _exchange(self, frame: Any) -> None:
        """Notes that ranks exchange values: planc itself exchanges norms of gradients alone."""
        for kind in [GRADIENTS] if _by_planc(frame) else [*self.missing]:
            self.forget(kind)

    def forget(self, kind: str) -> None:
        """Observes a kind no longer, since ranks have exchanged its numbers."""
        self.missing.pop(kind, None)
        self.places.pop(kind, None)

    def _note(self, name: str, inputs: Sequence[Tensor], out: Any) -> None:
        """Notes of what the results of a call are computed, and whether Python reads a number.

        Raises:
            PlanError: PL427, a number of all weights of the stages changes a weight.
        """
        known = [self._origins_of(tensor) for tensor in inputs]
        origins = frozenset().union(*known)
        if all(tensor.dtype == torch.bool for tensor in inputs):  # whether weights are finite
            origins = frozenset(origin for origin in origins if origin.kind == GRADIENTS)
        if not origins or name.startswith("new_") or name.endswith("_like"):  # of its shape alone
            return
        if name in _READ_NUMBER:
            if all(tensor.numel() == 1 for tensor in inputs):
                self._read(origins)
            return
        in_place = name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))
        if in_place and WEIGHTS in self.missing:
            self._require_alone(known)
        for result in _tensors([out]):
            if result.numel() > 1:
                self._mark(result, origins)
                continue
            reduced = frozenset(origin._replace(reduced=True) for origin in origins)
            self._mark(result, reduced)
            if len({origin.parameter for origin in reduced}) > 1:
                self._read(reduced)

    def _read(self, origins: Iterable[Origin]) -> None:
        """Notes the origins of a number that Python has read, or that has several."""
        if _by_planc(sys._getframe(3)):
            return
        for kind, missing in self.missing.items():
            if kind in self.places:
                continue
            missing -= {origin.parameter for origin in origins if origin.kind == kind}
            if not missing:
                self.places[kind] = script_line("the numbers are computed here")
                self.values = self._now() if kind == GRADIENTS else self.values

    def _require_alone(self, known: Sequence[frozenset[Origin]]) -> None:
        """Refuses a change of a weight by a number of all weights of the stages."""
        others = frozenset().union(*known[1:])
        numbers = {o.parameter for o in others if o.reduced and o.kind == WEIGHTS}
        changed = any(origin.kind == WEIGHTS for origin in known[0])
        if changed and numbers >= self.every[WEIGHTS] and not _by_planc(sys._getframe(3)):
            place = script_line("the weights are changed here")
            raise stop("PL427", f"{_text(WEIGHTS)}, and changes them", *place, help=_HELP[WEIGHTS])

    def _now(self) -> list[tuple[int, int]]:
        """The identities and versions of the gradients, and of their shards."""
        gradients = [p.grad for p in self.gradients.values() if p.grad is not None]
        shards = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
        return [(id(tensor), tensor._version) for tensor in (*gradients, *shards)]

    def require(self, *kinds: str) -> None:
        """Judges what a script has computed of these kinds.

        Raises:
            PlanError: PL427, they have changed the gradients.
        """
        warned = _WARNED.setdefault(self.model, set())
        for kind, place in self.places.items():
            if kind not in kinds:
                continue
            if kind == GRADIENTS and self._now() != self.values:
                text = f"{_text(kind)}, and changes them"
                raise stop("PL427", text, *place, help=_HELP[kind])
            if kind not in warned:
                warned.add(kind)
                warning("PL427", _text(kind), *place, help=_HELP[kind], stages=self.stages)


def _text(kind: str) -> str:
    return f"this is computed of the {kind} of one rank's stages, not of the full model"


def observe_statistics(model: nn.Module, stages: Stages, *kinds: str) -> None:
    """Observes what this thread computes of gradients or weights, unless it is inside of another
    mode, whose end would then end this one.
    """
    end_observation()
    if torch._C._len_torch_function_stack() == 0:
        _begin(StageStatistics(model, stages, *kinds))


def _begin(mode: StageStatistics) -> None:
    if torch._C._len_torch_function_stack() == 0:
        _OPEN.mode = mode
        torch.overrides._push_mode(mode)


@contextmanager
def unobserved_norm() -> Iterator[None]:
    """Does not observe planc's own norm of the gradients, which has those of all stages; a script
    that computes with them afterwards has exchanged them.
    """
    alone = torch._C._len_torch_function_stack() == 1
    observed = end_observation() if alone else None
    try:
        yield
    finally:
        if observed is not None:
            observed.forget(GRADIENTS)
            _begin(observed)


def end_observation() -> StageStatistics | None:
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


def _calls(func: Any, args: Sequence[Any], out: Any) -> Iterator[tuple[list[Tensor], Any]]:
    """Yields the tensors and the result of a call; of each call, for functions of lists that torch
    computes element by element.
    """
    lists = [each for each in args if isinstance(each, list | tuple)]
    if not lists or not getattr(func, "__name__", "").startswith("_foreach_"):
        yield [*_tensors(args)], out
        return
    results = lists[0] if out is None else out
    alone = [*_tensors(each for each in args if not isinstance(each, list | tuple))]
    for number, result in enumerate(results):
        own = [each[number] for each in lists if len(each) == len(results)]
        yield [*_tensors(own), *alone], result


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
