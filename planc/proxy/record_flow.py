"""Records the data flow of a proxy model in one plain forward pass."""

from __future__ import annotations

import linecache
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from planc.compat.trees import tree_leaves, tree_map
from planc.model.dataflow import VIEWS, DataFlow, FlowCall, Line, Operation
from planc.model.randomness import random_numbers_kept
from planc.proxy.input_search import BatchShape
from planc.proxy.refused_inputs import refuses_inputs
from planc.proxy.stack_frames import of_a_model
from planc.proxy.transformers_model import without_cache
from planc.proxy.user_model import ModelBuilder

_SHAPES = (
    BatchShape(rows=3, length=13),
    BatchShape(rows=3, length=26),
    BatchShape(rows=5, length=16),
)
"""The batches that are tried: as many rows and tokens as no width of a proxy model."""

_LONGEST = 100
_MOST_INPUTS = 40


@random_numbers_kept()
def record(builder: ModelBuilder) -> DataFlow:
    """The flow of a model; with padding where it takes a mask, since without it some show no
    product with the mask; without labels, unless the forward needs them. Raises what the model
    raises with the last batch that is tried.
    """
    why: Exception = ValueError("no batch")
    for shape, labeled, padded in product(_SHAPES, (False, True), (True, False)):
        try:
            model = builder.build(0)
            without_cache(model)
            inputs = builder.sample(shape)
            if not labeled:
                inputs.pop("labels", None)
            if padded:
                _pad(inputs, getattr(builder, "names", ()))
            return _Recorder(model, inputs).run()
        except Exception as error:
            why = error
    raise why


def _pad(inputs: dict[str, Any], names: tuple[str, ...]) -> None:
    if "attention_mask" in names and "input_ids" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, :2] = 0  # images begin behind them


class _Open:
    """A call that runs: its facts so far."""

    def __init__(self, call: FlowCall) -> None:
        self.call = call
        self.body: list[Operation | FlowCall] = []


class _Recorder(TorchFunctionMode):  # type: ignore[misc]
    """Numbers tensors by their identity, and keeps them alive while the model runs."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs
        self.names = {id(m): name for name, m in model.named_modules()}
        modules = model.named_modules(remove_duplicate=False)
        self.alias = {n: self.names[id(m)] for n, m in modules if n != self.names[id(m)]}
        self.alive: list[torch.Tensor] = []
        self.numbers: dict[int, int] = {}
        self.live: set[int] = set()
        self.derived: set[int] = set()  # from weights or hidden states; indices and masks too
        self.lines: dict[Line, int] = {Line("", ""): 0}
        self.moved: dict[object, Mapping[int, int] | None] = {}
        self.open: list[_Open] = []
        self.root: FlowCall | None = None
        ids = inputs.get("input_ids")
        self.rows: int | None = None
        self.tokens: int | None = None
        if ids is not None:
            self.rows, self.tokens = ids.shape[:2]
        named = model.named_parameters(remove_duplicate=False)
        self.weights: dict[int, str] = {}
        for name, parameter in named:
            self.weights.setdefault(self.number(parameter), name)

    def run(self) -> DataFlow:
        hooks = []
        for module in self.model.modules():
            before = module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            hooks += [before, module.register_forward_hook(self._after)]
        try:
            with torch.no_grad(), self, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.model(**self.inputs)
        finally:
            for hook in hooks:
                hook.remove()
        assert self.root is not None
        modules = list(self.model.modules())
        held = Counter(id(p) for m in modules for p in m._parameters.values() if p is not None)
        return _compact(
            DataFlow(
                root=self.root,
                rows=self.rows,
                tokens=self.tokens,
                shapes=tuple(tuple(t.shape) for t in self.alive),
                live=frozenset(self.live),
                weights=self.weights,
                tied=frozenset(
                    self.numbers[p] for p, many in held.items() if many > 1 and p in self.numbers
                ),
                alias=self.alias,
                lines=tuple(self.lines),
            )
        )

    def number(self, tensor: torch.Tensor) -> int:
        number_of_tensor = self.numbers.get(id(tensor))
        if number_of_tensor is None:
            self.alive.append(tensor)
            number_of_tensor = self.numbers[id(tensor)] = len(self.numbers)
            if isinstance(tensor, nn.Parameter):
                self.live.add(number_of_tensor)
                self.derived.add(number_of_tensor)
        return number_of_tensor

    def line(self) -> int:
        """The line of the model's code that runs."""
        frame: Any = sys._getframe(2)
        while frame is not None and not of_a_model(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return 0
        path, number = frame.f_code.co_filename, frame.f_lineno
        text = " ".join(linecache.getline(path, number).split())
        short = re.sub(r"^.*/(site-packages|dist-packages)/", "", path)
        short = short if short != path else path.rpartition("/")[2]
        line = Line(f"{short}:{number}", text if len(text) <= _LONGEST else f"{text[:97]}...")
        return self.lines.setdefault(line, len(self.lines))

    # Calls ----------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = [*((str(i), v) for i, v in enumerate(args)), *kwargs.items()]
        parameters = module._parameters.items()
        call = FlowCall(
            name=self.names[id(module)],
            arguments=tuple((k, self.number(v)) for k, v in given if _is_tensor(v)),
            positional=len(args),
            outputs=(),
            weights=tuple((n, self.number(p)) for n, p in parameters if p is not None),
            holding=tuple((k, n) for k, v in given for n in self._held_tensors(v)),
            leaf=not any(True for child in module.children() for _ in child.parameters()),
            linear=isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D",
            line=self.line(),
        )
        self.open.append(_Open(call))

    def _held_tensors(self, value: Any) -> Iterator[int]:
        """The tensors in a container that depend on weights."""
        inside = dict(value) if isinstance(value, Mapping) else value
        for tensor in tree_leaves(inside) if isinstance(inside, dict | list | tuple) else ():
            if _is_tensor(tensor) and self.numbers.get(id(tensor)) in self.live:
                yield self.numbers[id(tensor)]

    def _after(self, module: nn.Module, _args: Any, output: Any) -> None:
        name = self.names[id(module)]
        while (ended := self.open.pop()).call.name != name:
            pass
        call = replace(ended.call, body=tuple(ended.body))
        if _is_tensor(output):
            call = replace(call, outputs=((None, self.number(output)),))
        else:
            named = hasattr(output, "values")
            values = [*output.values()] if named else output
            values = list(values) if isinstance(values, list | tuple) else []
            nested = [t for v in values if not _is_tensor(v) for t in tree_leaves(v)]
            call = replace(
                call,
                structured=named or hasattr(output, "_fields"),
                length=len(values),
                outputs=tuple((i, self.number(v)) for i, v in enumerate(values) if _is_tensor(v)),
                nested=tuple(self.number(t) for t in nested if _is_tensor(t)),
            )
        if self.open:
            self.open[-1].body.append(call)
        else:
            self.root = call

    # Operations -----------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in tree_leaves((args, kwargs)) if _is_tensor(t)]
        name = getattr(func, "__name__", str(func))
        writes = name == "__setitem__" or name.startswith("__i")
        writes = writes or (name.endswith("_") and not name.endswith("__"))
        small = bool(self.open) and len(inputs) < _MOST_INPUTS
        held = {id(t): t.clone() if writes else t for t in inputs} if small else {}
        before = torch.get_rng_state()
        out = func(*args, **kwargs)
        draws = not torch.equal(before, torch.get_rng_state())
        outputs = [t for t in tree_leaves(out) if _is_tensor(t)]
        if name == "__setitem__":
            outputs = inputs[:1]
        if self.open and outputs:
            self._add(_Run(func, args, kwargs, name, held, outputs, draws), inputs, writes)
        return out

    def _add(self, run: _Run, inputs: list[torch.Tensor], writes: bool) -> None:
        taken = tuple(self.number(t) for t in inputs)
        given = tuple(self.number(t) for t in run.outputs)
        living = any(t in self.live for t in taken)
        known = any(t in self.derived for t in taken) or any(self._hidden(t) for t in inputs)
        if known or run.draws:
            self.derived.update(given)
        else:
            self.derived.difference_update(given)
            return
        for number, output in zip(given, run.outputs, strict=True):
            if living and (output.is_floating_point() or output.is_complex()):
                self.live.add(number)
            else:
                self.live.discard(number)
        tokens = any(list(t.shape).count(self.tokens) == 1 for t in inputs)
        single_input = len(set(taken)) == 1 and run.held and not writes
        self.open[-1].body.append(
            Operation(
                name=run.name,
                inputs=taken,
                outputs=given,
                tokenwise=bool(tokens and run.held and run.tokenwise(self.rows, self.tokens)),
                in_place=writes,
                draws=run.draws,
                moves=self._moves(run, inputs[0]) if single_input else None,
                skips=run.name == "__getitem__" and _skips(inputs[0], run.outputs[0]),
                line=self.line(),
            )
        )

    def _moves(self, run: _Run, source: torch.Tensor) -> Mapping[int, int] | None:
        """`_Run.moves` of a call whose only tensor is the source, found once for calls that differ
        in its numbers alone: layers make the same ones again and again.
        """
        given = tree_map(
            lambda v: (v.shape, v.dtype) if _is_tensor(v) else v, (run.args, run.kwargs)
        )
        key = run.func, run.draws, run.outputs[0].shape, repr(given)
        if key not in self.moved:
            self.moved[key] = run.moves(source)
        return self.moved[key]

    def _hidden(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and tuple(tensor.shape[:-1]) == (self.rows, self.tokens)


_OF_SHAPES = ("empty", "zeros", "ones", "full", "rand")
"""Operations that take a shape from their input, and no value."""


class _Run(NamedTuple):
    """One call of a torch function, which can be made again on other values."""

    func: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    name: str
    held: Mapping[int, torch.Tensor]
    outputs: list[torch.Tensor]
    draws: bool

    def again(self, change: Callable[[Any], Any]) -> list[torch.Tensor]:
        """The outputs with other inputs. Raises what the function raises."""
        with torch._C.DisableTorchFunction():
            args, kwargs = tree_map(change, (self.args, self.kwargs))
            return [t for t in tree_leaves(self.func(*args, **kwargs)) if _is_tensor(t)]

    def tokenwise(self, rows: int | None, tokens: int | None) -> bool:
        """Whether each half of the sequence gives that half of the outputs. The first half alone
        would not do: causal attention passes there.
        """
        where = [[i for i, n in enumerate(t.shape) if n == tokens] for t in self.outputs]
        if tokens is None or any(len(dims) != 1 for dims in where):
            return False
        if self.name in VIEWS:  # sizes may be stated in numbers: by the shapes
            first = next(iter(self.held.values()))
            return (rows in first.shape) == (rows in self.outputs[0].shape)
        if self.draws:  # other numbers each time: by the shapes, as dropout has them
            return [t.shape for t in self.held.values()] == [t.shape for t in self.outputs]
        for start, end in ((0, tokens // 2), (tokens // 2, tokens)):

            def part(value: Any, start: int = start, end: int = end) -> Any:
                if not _is_tensor(value):
                    return value
                whole = self.held[id(value)]
                dims = [i for i, n in enumerate(whole.shape) if n == tokens]
                if len(dims) != 1:
                    return whole.clone()
                return whole.narrow(dims[0], start, end - start).clone()

            try:
                halves = self.again(part)
            except Exception as error:
                if not refuses_inputs(error):
                    raise
                return False
            for output, (dim,), got in zip(self.outputs, where, halves, strict=False):
                if not _close(output.narrow(dim, start, end - start), got):
                    return False
        return True

    def moves(self, source: torch.Tensor) -> Mapping[int, int] | None:
        """Maps each dim of the source to the outermost output dim along which it varies, which
        holds the ranks' slices. An index tensor along each dim shows it. None if each dim keeps its
        place.
        """
        out = self.outputs[0]
        shaped = self.name.removeprefix("new_").startswith(_OF_SHAPES)
        same = self.draws and source.shape == out.shape
        if same or shaped or source.numel() != out.numel():
            return None if source.dim() == out.dim() else {}
        varying_dims = {}
        for dim in range(source.dim()):
            if source.shape[dim] == 1:
                continue
            shape = [1] * source.dim()
            shape[dim] = -1
            index = torch.arange(1, source.shape[dim] + 1).to(source.dtype)  # rsqrt takes no zero
            index = index.view(shape).expand(source.shape).contiguous()
            swap = partial(_swap, source, index)
            try:
                got = self.again(swap)[0]
            except Exception as error:
                if not refuses_inputs(error):
                    raise
                continue
            varying = _first_varying(got) if got.shape == out.shape else None
            if varying is not None:
                varying_dims[dim] = varying
        kept = source.dim() == out.dim() and all(a == b for a, b in varying_dims.items())
        complete = all(d in varying_dims for d in range(source.dim()) if source.shape[d] > 1)
        return None if kept and complete else varying_dims


def _swap(source: torch.Tensor, other: torch.Tensor, value: Any) -> Any:
    return other if value is source else value


def _skips(whole: torch.Tensor, part: torch.Tensor) -> bool:
    """Whether an indexed part has every n-th of the last dim's numbers."""
    same = whole.dim() > 0 and part.dim() == whole.dim() and part._base is not None
    return same and part.shape[-1] > 1 and part.stride(-1) > whole.stride(-1)


def _first_varying(tensor: torch.Tensor) -> int | None:
    for dim in range(tensor.dim()):
        first = tensor.narrow(dim, 0, min(1, tensor.shape[dim])).expand_as(tensor)  # may be empty
        same = torch.equal(tensor, first)  # far quicker, and what most have
        if not same and not torch.isclose(tensor, first, equal_nan=True).all():
            return dim
    return None


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape:
        return False
    wide = torch.complex128 if left.is_complex() or right.is_complex() else torch.float64
    pair = left.to(wide), right.to(wide)
    return bool(torch.allclose(*pair, rtol=1e-3, atol=1e-5, equal_nan=True))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _compact(flow: DataFlow) -> DataFlow:
    """The flow with numbers for the tensors and lines that it mentions alone."""
    numbers: dict[int, int] = {}
    lines: dict[int, int] = {0: 0}

    def new(tensor: int) -> int:
        return numbers.setdefault(tensor, len(numbers))

    def line(old: int) -> int:
        return lines.setdefault(old, len(lines))

    def operation(event: Operation) -> Operation:
        inputs, outputs = (tuple(map(new, tensors)) for tensors in (event.inputs, event.outputs))
        return replace(event, inputs=inputs, outputs=outputs, line=line(event.line))

    def call(event: FlowCall) -> FlowCall:
        return replace(
            event,
            arguments=tuple((key, new(t)) for key, t in event.arguments),
            outputs=tuple((place, new(t)) for place, t in event.outputs),
            nested=tuple(map(new, event.nested)),
            weights=tuple((key, new(t)) for key, t in event.weights),
            holding=tuple((key, new(t)) for key, t in event.holding),
            body=tuple(call(e) if isinstance(e, FlowCall) else operation(e) for e in event.body),
            line=line(event.line),
        )

    root = call(flow.root)
    return replace(
        flow,
        root=root,
        shapes=tuple(flow.shapes[old] for old in numbers),
        live=frozenset(numbers[t] for t in flow.live if t in numbers),
        weights={numbers[t]: name for t, name in flow.weights.items() if t in numbers},
        tied=frozenset(numbers[t] for t in flow.tied if t in numbers),
        lines=tuple(flow.lines[old] for old in lines),
    )
