"""Types of the outputs of operations, and the traffic of rules: the part of the interpretation that
enters no module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from typing import NamedTuple

from planc.infer.flow_types import Around, Clash, CutOutput, FoundRule, Held, Met, State
from planc.model.dataflow import VIEWS, DataFlow, FlowCall, Operation
from planc.ops import styles as st
from planc.ops.contract import contract
from planc.ops.styles import Layout, Redistribution, Replicate, Shard, Style

_CUTS = frozenset({"chunk", "narrow", "split", "split_with_sizes", "tensor_split", "__getitem__"})

Makers = dict[int, list[Operation | FlowCall]]
"""The operations, split modules and leaves with weights that give each tensor."""

Styles = Mapping[str, Sequence[Style]]
"""Styles that a plan states, by the module's name."""


class Inputs(NamedTuple):
    """The inputs of an operation that are no scalars, what a rank has of each, and the module's own
    weights.
    """

    tensors: list[int]
    kinds: list[Held]
    weights: set[int]

    def of_kind(self, kind: Held) -> list[int]:
        """The tensors of a kind."""
        return [t for t, k in zip(self.tensors, self.kinds, strict=True) if k is kind]


class FlowOperations:
    """A flow and the styles of its modules.

    Attributes:
        splits, stated: styles by the first name of a module.
        ruled: the modules with styles; `above`, those that contain one.
        makers: what gives each tensor; `reached`, the modules with rules that tensors come from, as
            far as they were asked for.
    """

    def __init__(self, flow: DataFlow, splits: Styles, stated: Styles) -> None:
        self.flow = flow
        self.splits = {flow.alias.get(name, name): rules for name, rules in splits.items()}
        self.stated = {flow.alias.get(name, name): rules for name, rules in stated.items()}
        self.ruled = {*self.splits, *self.stated}
        self.above = {""}
        for name in self.ruled:
            self.above.update(accumulate(name.split(".")[:-1], "{}.{}".format))
        self.makers: Makers = {}
        self.reached: dict[tuple[int, ...], tuple[str, ...]] = {}
        for call in flow.calls:
            for event in call.body:
                if isinstance(event, Operation):
                    given = event.outputs
                elif event.name in self.ruled or (event.leaf and event.weights):
                    given = event.output_tensors
                else:
                    continue
                for tensor in given:
                    self.makers.setdefault(tensor, []).append(event)

    def sources(self, tensor: int, state: State) -> Iterator[FlowCall]:
        """The calls of split linears whose varying output reaches a tensor by operations."""
        seen, waiting = set[int](), [tensor]
        while waiting:
            tensor = waiting.pop()
            if tensor in seen or state.kind(tensor) is not Held.VARYING:
                continue
            seen.add(tensor)
            for event in self.makers.get(tensor, ()):
                if isinstance(event, FlowCall):
                    yield event
                else:
                    waiting += event.inputs

    def residual(self, event: Operation) -> bool:
        """Whether an operation adds two hidden states."""
        both = sum(self.flow.wide(t) and t in self.flow.live for t in event.inputs) > 1
        return event.adds and both

    def operations(
        self, operations: Sequence[Operation], state: State, weights: set[int], around: Around
    ) -> State:
        """Interprets operations. The outputs of operations on `weights` alone are added to them."""
        # of most models most are
        if not weights and all(self.plain(operation, state) for operation in operations):
            return state
        kinds, dims, met, work = dict(state.kinds), dict(state.dims), [*state.met], state.work
        cuts = [*state.cuts]
        for operation in operations:
            real = [t for t in operation.inputs if not self.flow.scalar(t) or t in weights]
            if weights and real and all(t in weights for t in real):
                weights.update(operation.outputs)
                continue
            have = [kinds.get(t, Held.WHOLE) for t in real]
            given = Inputs(real, have, weights)
            first = have[0] if have and operation.inputs[0] == real[0] else Held.WHOLE
            writes = operation.in_place and first in (Held.WHOLE, Held.VARYING)
            if writes and self.fresh(operation.inputs[0], around):
                why = f"`{operation.name.strip('_')}` writes into the local output of a style"
                raise Clash(why, operation.line, mixed=real, rules=self.givers_of(*real))
            self.check(operation, given, dims)
            result = next((k for k in (Held.PART, Held.VARYING, Held.GATHERED) if k in have), None)
            if result is Held.PART:
                # a sum of residuals
                twice = have.count(Held.PART) > 1
                work += twice and self.flow.shapes[operation.outputs[0]][-1] == self.flow.width
            elif result is Held.VARYING:
                varying = given.of_kind(Held.VARYING)[0]
                if operation.name in _CUTS and self.shorter(operation, varying, dims.get(varying)):
                    cuts.append(CutOutput(varying, operation.line))
                met += (
                    Met(t, varying, operation.line, t in weights) for t in given.of_kind(Held.WHOLE)
                )
                self.follow(operation, given, dims)
            kinds.update(dict.fromkeys(operation.outputs, result or Held.WHOLE))
        return replace(state, kinds=kinds, dims=dims, met=tuple(met), cuts=tuple(cuts), work=work)

    def plain(self, operation: Operation, state: State) -> bool:
        """Whether an operation makes whole tensors of whole ones, and writes into none."""
        return not operation.in_place and all(state.kind(t) is Held.WHOLE for t in operation.inputs)

    def shorter(self, operation: Operation, tensor: int, dim: int | None) -> bool:
        """Whether the outputs of an operation have a part of a tensor's dim."""
        before, after = self.flow.shapes[tensor], self.flow.shapes[operation.outputs[0]]
        return dim is not None and len(after) == len(before) and after[dim] < before[dim]

    def check(self, operation: Operation, given: Inputs, dims: Mapping[int, int | None]) -> None:
        """Raises a clash where the inputs of an operation do not go together."""
        name, have, parts = operation.name.strip("_"), {*given.kinds}, given.of_kind(Held.PART)
        others = [t for t in given.tensors if t not in parts and t not in given.weights]
        why, cut, at_fault = "", list[int](), given.tensors
        if parts and others:
            shape, cut = list(self.flow.shapes[others[0]]), others
            why = f"`{name}` gets a sequence shard and a plain tensor {shape}"
        elif parts and not operation.tokenwise:
            why = f"`{name}` mixes tokens"
        elif not parts and Held.GATHERED in have and {Held.VARYING, Held.WHOLE} & have:
            why = f"`{name}` takes a DTensor and a plain tensor"
        elif not parts and Held.VARYING in have and self.unequal(operation, given, dims):
            why = f"`{name}` takes what is split over the ranks, and all of what goes with it"
            at_fault = given.of_kind(Held.VARYING)  # hidden states come from every block before
        if why:
            split = self.givers_of(*at_fault)
            both = self.givers_of(*given.tensors)
            rules = tuple(name for name in both if name in split or name in self.stated)
            raise Clash(why, operation.line, cut=cut, whole=parts, rules=rules)

    def unequal(self, operation: Operation, given: Inputs, dims: Mapping[int, int | None]) -> bool:
        """Whether an elementwise operation has one input split along a dim, and another not. With
        the module's own weights it is right where a style makes DTensors of both.
        """
        masks = 3 if operation.name == "scaled_dot_product_attention" else None  # behind q, k and v
        real = given.tensors[:masks]
        if (
            operation.in_place
            or operation.name == "type_as"
            or not self.elementwise(operation, real)
        ):
            return False
        split: dict[int, set[bool]] = {}
        for tensor, kind in zip(real, given.kinds, strict=False):
            at = dims.get(tensor) if kind is Held.VARYING else -1
            if at is None or tensor in given.weights:
                return False
            shape = self.flow.shapes[tensor]
            for i, size in enumerate(shape):
                if size > 1:
                    split.setdefault(len(shape) - i, set()).add(i == at)
        return any(len(both) > 1 for both in split.values())

    def elementwise(self, operation: Operation, real: Iterable[int]) -> bool:
        """Whether an operation gives its inputs' shapes, broadcast."""
        back = (self.flow.shapes[t][::-1] for t in real)
        whole = tuple(max(sizes) for sizes in zip_longest(*back, fillvalue=1))
        return len(operation.outputs) == 1 and whole[::-1] == self.flow.shapes[operation.outputs[0]]

    def givers_of(self, *tensors: int) -> tuple[str, ...]:
        """The modules with rules whose outputs reach tensors by operations and plain modules."""
        if tensors not in self.reached:
            self.reached[tensors] = tuple(dict.fromkeys(self._reaching(tensors)))
        return self.reached[tensors]

    def _reaching(self, tensors: Iterable[int]) -> Iterator[str]:
        seen, waiting = set[int](), [*tensors]
        while waiting:
            tensor = waiting.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            for event in self.makers.get(tensor, ()):
                if isinstance(event, FlowCall) and event.name in self.ruled:
                    yield event.name
                else:
                    waiting += event.inputs if isinstance(event, Operation) else event.input_tensors

    def follow(self, operation: Operation, given: Inputs, dims: dict[int, int | None]) -> None:
        """Records the split dim of a varying input in the outputs of an operation."""
        varying = given.of_kind(Held.VARYING)
        source = next((t for t in varying if dims.get(t) is not None), None)
        for out in operation.outputs:
            at = dims[source] if source is not None else None
            length = len(self.flow.shapes[out])
            if at is not None and source is not None:
                longer = length - len(self.flow.shapes[source])
                if operation.moves is not None:
                    at = operation.moves.get(at)
                elif longer:  # broadcast, or stacked along any dim
                    at = at + longer if self.elementwise(operation, given.tensors) else None
            dims[out] = at if at is not None and 0 <= at < length else None

    def fresh(self, tensor: int, around: Around) -> bool:
        """Whether a tensor is the output of split weights, or a view of it: autograd refuses writes
        into what a style returns.
        """
        while True:
            makers = self.makers.get(tensor, ())
            calls = [e for e in makers if isinstance(e, FlowCall)]
            if any(self.is_wrapped(e) or around.forced.get(e.name) is Held.WHOLE for e in calls):
                return True
            rest = [e for e in makers if not (isinstance(e, Operation) and e.in_place)]
            if not rest or not isinstance(rest[0], Operation) or rest[0].name not in VIEWS:
                return False
            tensor = rest[0].inputs[0]

    def styles(self, call: FlowCall) -> tuple[st.Style, ...]:
        """The styles of a module that the plan states."""
        return (*self.splits.get(call.name, ()), *self.stated.get(call.name, ()))

    def is_wrapped(self, call: FlowCall) -> bool:
        """Whether a style returns the output of a module."""
        return any(contract(style).gives for style in self.styles(call))

    def part(self, tensor: int) -> Shard:
        """The layout of a sequence shard."""
        dim = self.flow.token_dim(tensor)
        return Shard(1 if dim is None else dim)

    def wide(self, tensors: Iterable[int]) -> float:
        """The size of the tensors in hidden states."""
        return sum(self.flow.shapes[t][-1] for t in tensors) / (self.flow.width or 1)

    def output(
        self,
        call: FlowCall,
        changes: Mapping[int | None, Redistribution],
        reason: str,
        *,
        local: bool = True,
    ) -> FoundRule:
        places = [None] if None in changes else range(call.length)
        style = st.Output(positional=tuple(changes.get(p) for p in places), local=local)
        return FoundRule(call.name, style, reason, line=call.line)

    def input(
        self,
        call: FlowCall,
        inputs: Sequence[tuple[str, int]],
        change: Callable[[int], Redistribution],
        reason: str,
        *,
        local: bool = False,
    ) -> FoundRule:
        given = {key: change(tensor) for key, tensor in inputs}
        last = max((int(key) for key in given if key.isdecimal()), default=-1)
        length = max(last + 1, call.positional) if last >= 0 else 0
        style = st.Input(
            positional=tuple(given.get(str(i)) for i in range(length)),
            named=tuple(
                (key, redistribution)
                for key, redistribution in given.items()
                if not key.isdecimal()
            ),
            local=local,
        )
        return FoundRule(call.name, style, reason, self.split_in(call), call.line)

    def split_in(self, call: FlowCall) -> tuple[str, ...]:
        """The modules with split weights inside a module."""
        inside = (c.name for c in call.below() if c.name in self.ruled)
        return tuple(dict.fromkeys(inside))

    def kind_of(self, tensor: int, layout: Layout, local: bool) -> Held:
        """The type on a rank of a tensor in a layout."""
        if isinstance(layout, Replicate):
            return Held.WHOLE if local else Held.GATHERED
        part = isinstance(layout, Shard) and layout.dim == self.flow.token_dim(tensor)
        return Held.PART if part and not local else Held.VARYING

    def meets(self, call: FlowCall, tensor: int, layout: Layout, state: State) -> None:
        """Raises a clash where a tensor has another layout than a style states."""
        have, wanted = state.kind(tensor), self.kind_of(tensor, layout, False)
        if have is not wanted and {have, wanted} != {Held.WHOLE, Held.GATHERED}:
            why = f"the style of `{call.name}` states {layout}, and a rank has {have.value}"
            cut = (tensor,) if wanted is Held.PART and have is Held.WHOLE else ()
            whole = (tensor,) if have is Held.PART else ()
            rules = (call.name, *self.givers_of(tensor))
            raise Clash(why, call.line, cut=cut, whole=whole, rules=rules)
