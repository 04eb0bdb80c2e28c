"""The data flow of a model: which module's output goes into which module's input, and what the
model's code does with tensors between them.

It is recorded in one plain forward of a proxy model (`proxy/record_flow.py`) and cached with
the module table, so what reads it imports no torch. Nothing of a plan is in it: one recording
serves every plan and every setting.
"""

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

FORMAT = 10
"""Raised when the recorded facts or their encoding change."""

VIEWS = frozenset(
    {"view", "reshape", "expand", "expand_as", "unflatten", "flatten", "contiguous", "view_as"}
)
"""Operations that give the elements of their input in another shape. They may state sizes in
numbers, which a part of the tokens does not fit, and may share memory with their input."""


class Line(NamedTuple):
    """A line of the model's code, as `transformers/models/llama/modeling_llama.py:291`."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.place else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One torch function that the model's code calls outside of a module's children.

    Args:
        name: torch's name of it.
        inputs, outputs: the tensors, by number.
        tokenwise: whether a sequence shard gives the same shard of the outputs.
        in_place: whether it writes into its first input.
        draws: whether it draws random numbers.
        moves: the output's dim for each dim of the one input; None where dims keep their distance
            from the end, or where there are several inputs.
        skips: whether the output has every second, or every n-th, of the last dim's numbers.
        line: in the model's code.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    tokenwise: bool = False
    in_place: bool = False
    draws: bool = False
    moves: Mapping[int, int] | None = None
    skips: bool = False
    line: int = 0

    @property
    def adds(self) -> bool:
        """Whether it is a sum of its inputs."""
        return self.name.strip("_") in ("add", "radd", "iadd")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowCall:
    """One call of a module.

    Args:
        name: the module's name; of a shared module, the first.
        arguments: its tensor arguments, by name or by position (`0`).
        positional: the number of positional arguments, tensors or not.
        holding: of arguments that are containers, such as a table of keys and values that layers
            share, the tensors in them that depend on weights.
        outputs: its output tensors, by their place in the tuple that it returns, of `length`; the
            place of a single tensor is None.
        nested: the tensors in outputs that are no tensors themselves.
        structured: whether it returns an object with names, as a `ModelOutput`.
        weights: its own parameters, by name.
        leaf: whether no child has parameters.
        linear: whether it is a linear layer.
        body: the operations and calls inside, in order.
        line: in the model's code, where it is called.
    """

    name: str
    arguments: tuple[tuple[str, int], ...]
    positional: int
    outputs: tuple[tuple[int | None, int], ...]
    length: int = 0
    nested: tuple[int, ...] = ()
    structured: bool = False
    weights: tuple[tuple[str, int], ...] = ()
    holding: tuple[tuple[str, int], ...] = ()
    leaf: bool = False
    linear: bool = False
    body: "tuple[Operation | FlowCall, ...]" = ()
    line: int = 0

    def below(self) -> "Iterator[FlowCall]":
        """Yields this call and all calls inside it, in order."""
        yield self
        for event in self.body:
            if isinstance(event, FlowCall):
                yield from event.below()

    @property
    def output_tensors(self) -> tuple[int, ...]:
        """The tensors that it returns directly."""
        return tuple(t for _, t in self.outputs)

    @property
    def input_tensors(self) -> tuple[int, ...]:
        """The tensors that it takes."""
        return tuple(t for _, t in self.arguments)


@dataclass(frozen=True, kw_only=True)
class DataFlow:
    """The data flow of one model.

    Args:
        root: the call of the model.
        rows, tokens: of the batch; None for a model without tokens.
        shapes: of tensors, by number.
        live: the tensors that depend on weights.
        weights: the names of parameters, by the number of their tensor.
        tied: the parameters that several modules hold.
        alias: the first name of modules that have several.
        lines: of the model's code.
        memo: what was inferred from this flow in this process.
    """

    root: FlowCall
    rows: int | None
    tokens: int | None
    shapes: tuple[tuple[int, ...], ...]
    live: frozenset[int]
    weights: Mapping[int, str]
    tied: frozenset[int]
    alias: Mapping[str, str]
    lines: tuple[Line, ...]
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def calls(self) -> tuple[FlowCall, ...]:
        return tuple(self.root.below())

    @cached_property
    def width(self) -> int:
        """The width of hidden states: the one that most calls take; 0 without hidden states."""
        many: dict[int, int] = {}
        for call in self.calls:
            for tensor in call.input_tensors:
                if self.hidden(tensor):
                    many[self.shapes[tensor][2]] = many.get(self.shapes[tensor][2], 0) + 1
        return max(many, key=lambda width: many[width], default=0)

    def hidden(self, tensor: int) -> bool:
        """Whether a tensor is [rows, tokens, features]."""
        shape = self.shapes[tensor]
        return len(shape) == 3 and shape[:2] == (self.rows, self.tokens)

    def wide(self, tensor: int) -> bool:
        """Whether a tensor is a hidden state of the model's own width."""
        return self.hidden(tensor) and self.shapes[tensor][2] == self.width

    def token_dim(self, tensor: int) -> int | None:
        """The dim of the tokens; None if there is none, or if there are several."""
        dims = [i for i, size in enumerate(self.shapes[tensor]) if size == self.tokens]
        return dims[0] if len(dims) == 1 else None

    def scalar(self, tensor: int) -> bool:
        """Whether a tensor has one element, which goes with a DTensor (an empty one does not)."""
        return prod(self.shapes[tensor]) == 1

    @cached_property
    def takers(self) -> Mapping[int, tuple[FlowCall, ...]]:
        """The calls that take each tensor."""
        calls: dict[int, list[FlowCall]] = {}
        for call in self.calls:
            for tensor in call.input_tensors:
                calls.setdefault(tensor, []).append(call)
        return {tensor: tuple(takers) for tensor, takers in calls.items()}

    @cached_property
    def users(self) -> Mapping[int, tuple[Operation, ...]]:
        """The operations that take each tensor."""
        return self._operations(lambda operation: operation.inputs)

    @cached_property
    def makers(self) -> Mapping[int, tuple[Operation, ...]]:
        """The operations that give each tensor, or write into it."""
        return self._operations(lambda operation: operation.outputs)

    def _operations(
        self, tensors: Callable[[Operation], Sequence[int]]
    ) -> Mapping[int, tuple[Operation, ...]]:
        operations: dict[int, list[Operation]] = {}
        inside = (event for call in self.calls for event in call.body)
        for operation in (event for event in inside if isinstance(event, Operation)):
            for tensor in {*tensors(operation)}:
                operations.setdefault(tensor, []).append(operation)
        return {tensor: tuple(of_tensor) for tensor, of_tensor in operations.items()}


# As plain data ------------------------------------------------------------------------------------


def encode(flow: DataFlow) -> str:
    """The flow as a short text: JSON, compressed, in base 64."""
    data = {
        "root": _call(flow.root),
        "batch": [flow.rows, flow.tokens],
        "shapes": flow.shapes,
        "live": sorted(flow.live),
        "weights": list(flow.weights.items()),
        "tied": sorted(flow.tied),
        "alias": list(flow.alias.items()),
        "lines": flow.lines,
    }
    text = json.dumps(data, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


_MOST_BYTES = 50_000_000


def decode(text: Any) -> DataFlow | None:
    """The flow that `encode` wrote; None for any other text."""
    try:
        stream = zlib.decompressobj()
        data = json.loads(stream.decompress(base64.b64decode(text), _MOST_BYTES))
        flow = DataFlow(
            root=_read_call(data["root"]),
            rows=data["batch"][0],
            tokens=data["batch"][1],
            shapes=tuple(tuple(shape) for shape in data["shapes"]),
            live=frozenset(data["live"]),
            weights=dict(data["weights"]),
            tied=frozenset(data["tied"]),
            alias=dict(data["alias"]),
            lines=tuple(Line(*line) for line in data["lines"]),
        )
        return flow if _sound(flow) else None
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, zlib.error):
        return None


def _sound(flow: DataFlow) -> bool:
    """Whether all tensors and lines that a flow mentions are in it."""
    tensors, lines = {*flow.live, *flow.weights, *flow.tied}, set[int]()
    for call in flow.calls:
        tensors.update(call.input_tensors, call.output_tensors, call.nested)
        tensors.update(t for _, t in (*call.weights, *call.holding))
        lines.add(call.line)
        for event in call.body:
            lines.add(event.line)
            if isinstance(event, Operation):
                tensors.update(event.inputs, event.outputs)
    known = range(len(flow.shapes)), range(len(flow.lines))
    return all(t in known[0] for t in tensors) and all(n in known[1] for n in lines)


def _call(call: FlowCall) -> list[Any]:
    body = [
        _call(e)
        if isinstance(e, FlowCall)
        else [
            e.name,
            e.inputs,
            e.outputs,
            e.tokenwise + 2 * e.in_place + 4 * e.draws + 8 * e.skips,
            e.line,
            *([] if e.moves is None else [list(e.moves.items())]),
        ]
        for e in call.body
    ]
    flags = call.structured + 2 * call.leaf + 4 * call.linear
    about = [call.name, call.arguments, call.positional, call.outputs, call.length, call.nested]
    return [body, *about, flags, call.weights, call.line, call.holding]


def _read_call(data: list[Any]) -> FlowCall:
    body, name, arguments, positional, outputs, length, nested, flags, weights, line, held = data
    return FlowCall(
        name=name,
        arguments=tuple((key, tensor) for key, tensor in arguments),
        positional=positional,
        outputs=tuple((place, tensor) for place, tensor in outputs),
        length=length,
        nested=tuple(nested),
        structured=bool(flags & 1),
        leaf=bool(flags & 2),
        linear=bool(flags & 4),
        weights=tuple((key, tensor) for key, tensor in weights),
        holding=tuple((key, tensor) for key, tensor in held),
        body=tuple(_read_call(e) if isinstance(e[0], list) else _operation(e) for e in body),
        line=line,
    )


def _operation(data: list[Any]) -> Operation:
    name, inputs, outputs, flags, line, *moves = data
    return Operation(
        name=name,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        tokenwise=bool(flags & 1),
        in_place=bool(flags & 2),
        draws=bool(flags & 4),
        skips=bool(flags & 8),
        moves=dict(moves[0]) if moves else None,
        line=line,
    )
