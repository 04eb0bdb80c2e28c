"""What a rank has of every tensor of a model's data flow, from how weights are split: the layouts
that follow.

A tensor is whole on every rank, a part of the sequence, something of the rank's own, or whole as a
DTensor whose gradient is a sum (`Kind`; spmd_types has the same four). The calls of the flow are
interpreted with these types in order, without values. Where a module takes parts of the sequence,
it is tried in five ways; where tensors do not go together, outputs of the modules that gave them
are changed (`Clash`), and the module around is interpreted again. A state is never changed, so each
way begins with the same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from planc.model.dataflow import Call, Flow, Operation
from planc.ops import styles as st
from planc.ops.styles import Redistribution, Replicate, Shard, Style

VIEWS = frozenset(
    {"view", "reshape", "expand", "expand_as", "unflatten", "flatten", "contiguous", "view_as"}
)
"""Operations whose output shares memory with their input: autograd refuses writes into views of
what a style returns."""
_SLICES = frozenset({"split", "__getitem__", "chunk", "narrow", "split_with_sizes"})
_SUMS = frozenset({"add", "radd", "iadd"})
_MENDS = 8
_RETRIES = 2000
"""The most mends in one model, and in one module: the search ends for every model."""


class Kind(Enum):
    """What a rank has of a tensor."""

    WHOLE = "whole"
    PART = "a part of the sequence"
    VARYING = "its own features"
    GATHERED = "whole, as a DTensor"


class Clash(Exception):
    """Tensors that do not go together.

    Args:
        why: the reason, at a line of the model's code.
        cut: those that would have to be parts of the sequence.
        whole: those that would have to be whole.
        mixed: those that would have to be DTensors.
    """

    def __init__(
        self,
        why: str,
        line: int = 0,
        *,
        cut: Iterable[int] = (),
        whole: Iterable[int] = (),
        mixed: Iterable[int] = (),
        stated: str = "",
    ) -> None:
        super().__init__(why)
        self.line, self.stated = line, stated
        self.cut, self.whole, self.mixed = tuple(cut), tuple(whole), tuple(mixed)


class Found(NamedTuple):
    """A rule that follows.

    Args:
        module, style: as in a plan.
        reason: why, as a sentence after "because".
        weights: the modules with split weights that it follows from.
        line: of the model's code.
        beside: the modules whose widths are the rest of a linear's output (`mla_kv`).
    """

    module: str
    style: Style
    reason: str = ""
    weights: tuple[str, ...] = ()
    line: int = 0
    beside: tuple[str, ...] = ()


class Met(NamedTuple):
    """A whole tensor that meets a varying one in an operation; `own`: a weight of the module."""

    tensor: int
    line: int
    own: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is known after some calls.

    Args:
        kinds: of tensors; whole where it has none.
        dims: the dim along which a varying tensor is split, where that is known.
        met: whole tensors that met varying ones.
        rules: that follow.
        sent: what is sent forward and backward, in hidden states.
        work: norms and sums of residuals that run on parts of the sequence.
    """

    kinds: Mapping[int, Kind] = field(default_factory=dict)
    dims: Mapping[int, int | None] = field(default_factory=dict)
    met: tuple[Met, ...] = ()
    rules: tuple[Found, ...] = ()
    sent: float = 0
    work: int = 0

    def kind(self, tensor: int) -> Kind:
        return self.kinds.get(tensor, Kind.WHOLE)

    def typed(self, tensors: Iterable[int], kind: Kind) -> State:
        return replace(self, kinds={**self.kinds, **dict.fromkeys(tensors, kind)})

    def ruled(self, *rules: Found, sent: float = 0) -> State:
        return replace(self, rules=(*self.rules, *rules), sent=self.sent + sent)

    def some(self, call: Call, *kinds: Kind) -> list[tuple[str, int]]:
        """The arguments of a call that are of some kinds."""
        return [(key, t) for key, t in call.arguments if self.kind(t) in kinds]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """What holds inside a module: whether outputs may be parts of the sequence, the outputs that
    were changed to mend clashes, whether a module may enter parts of the sequence, whether inputs
    are DTensors, and whether clashes are mended.
    """

    sequence: bool
    forced: Mapping[str, Kind] = field(default_factory=dict)
    may_enter: bool = True
    gathered: bool = False
    mends: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """All rules of a model.

    Args:
        rules: those that follow, and the split weights as completed.
        parts, sums: the sums of two hidden states that run on parts of the sequence, and all.
        around: the blocks that are gathered as one.
        whole: the line and the reason of what stays whole.
    """

    rules: tuple[Found, ...]
    parts: int
    sums: int
    around: tuple[str, ...]
    why: tuple[tuple[str, str, int], ...]

    @property
    def everywhere(self) -> bool:
        """Whether all sums of hidden states run on parts of the sequence."""
        return 0 < self.parts == self.sums and not self.around


Splits = Mapping[str, Sequence[Style]]
"""The styles that a plan states of modules, by name; those with layouts of their own are `fixed`."""


def infer(
    flow: Flow, splits: Splits, *, sequence: bool, fixed: frozenset[str] = frozenset()
) -> Layouts:
    """The layouts that follow from splits, with or without parts of the sequence.

    Args:
        fixed: the modules whose stated layouts are complete.

    Raises:
        Clash: there are none.
    """
    return _Inference(flow, splits, fixed).layouts(sequence)


class _Inference:
    """One flow and the splits of its weights. `heads` and `whole` grow from one interpretation to
    the next: linears whose output leaves the model, and modules that no part may enter.
    """

    def __init__(self, flow: Flow, splits: Splits, fixed: frozenset[str]) -> None:
        self.flow, self.fixed = flow, fixed
        self.splits = {flow.alias.get(name, name): some for name, some in splits.items()}
        self.above = {""}
        for name in self.splits:
            while name:
                name = name.rpartition(".")[0]
                self.above.add(name)
        self.heads: frozenset[str] = frozenset()
        self.whole: frozenset[str] = frozenset()
        self.tried: dict[tuple[str, str, int], None] = {}
        self.retries = 0
        self.makers: dict[int, list[Operation | Call]] = {}
        for call in flow.calls:
            for event in call.body:
                if isinstance(event, Operation):
                    given = event.outputs
                elif event.name in self.splits or (event.leaf and event.weights):
                    given = event.given
                else:
                    continue
                for tensor in given:
                    self.makers.setdefault(tensor, []).append(event)

    # The whole model ------------------------------------------------------------------------------

    def layouts(self, sequence: bool) -> Layouts:
        root = self.flow.root
        leaving = (*root.given, *root.nested)
        for _ in range(6):
            state = self.attempt(root, State(), _Around(sequence=sequence))
            varying = (t for t in leaving if state.kind(t) is Kind.VARYING)
            heads = {call.name for t in varying for call in self.sources(t, state)}
            if heads - self.heads:
                self.heads |= heads
                continue
            sums = tuple(self.sums(state))
            summed = {found.module for found in sums}
            cut = {f.module for f in state.rules if _cut(f.style)} & summed
            uneven = self.uneven(state.rules)
            if uneven and uneven <= self.whole:
                raise Clash(f"`{min(uneven)}` is called several times, with several layouts")
            if uneven or cut - self.whole:
                self.whole |= uneven or cut
                continue
            return self.answer(state, (*state.rules, *sums))
        raise Clash("what leaves the model is not whole")

    def answer(self, state: State, rules: tuple[Found, ...]) -> Layouts:
        first = {(f.module, f.style): f for f in reversed(rules)}
        kept = tuple(dict.fromkeys(first[f.module, f.style] for f in rules))
        seen = {f.module for f in kept}
        left = (
            Found(name, style)
            for name, some in self.splits.items()
            for style in (some if name not in seen else ())
        )
        sums = [
            state.kind(event.outputs[0]) is Kind.PART
            for call in self.flow.calls
            for event in call.body
            if isinstance(event, Operation) and self.residual(event)
        ]
        blocks = (f.module for f in kept if isinstance(f.style, st.Input) and _gathers(f.style))
        return Layouts(
            rules=(*kept, *left),
            parts=sum(sums),
            sums=len(sums),
            around=tuple(n for n in blocks if n.rpartition(".")[2].isdecimal()),
            why=tuple(self.tried),
        )

    def residual(self, event: Operation) -> bool:
        """Whether an operation adds two hidden states."""
        if event.name.strip("_") not in _SUMS:
            return False
        return sum(self.flow.wide(t) and t in self.flow.live for t in event.inputs) > 1

    def uneven(self, rules: Iterable[Found]) -> frozenset[str]:
        """Modules that are called several times, with several layouts: a style has one."""
        times = Counter(call.name for call in self.flow.calls)
        stated: dict[str, Counter[Style]] = {}
        for found in rules:
            stated.setdefault(found.module, Counter())[found.style] += 1
        some = stated.items()
        return frozenset(n for n, each in some if any(k != times[n] for k in each.values()))

    def sources(self, tensor: int, state: State) -> Iterator[Call]:
        """The calls of split linears whose varying output reaches a tensor by operations."""
        seen, waiting = set[int](), [tensor]
        while waiting:
            tensor = waiting.pop()
            if tensor in seen or state.kind(tensor) is not Kind.VARYING:
                continue
            seen.add(tensor)
            for event in self.makers.get(tensor, ()):
                if isinstance(event, Call):
                    yield event
                else:
                    waiting += event.inputs

    # A module, with mends where tensors clash -----------------------------------------------------

    def attempt(self, call: Call, state: State, around: _Around, depth: int = 0) -> State:
        try:
            result = self.inside(call, state, around)
            if call is self.flow.root:
                leaving = (*call.given, *call.nested)
                parts = [t for t in leaving if result.kind(t) is Kind.PART]
                if parts:
                    raise Clash("a part of the sequence leaves the model", whole=parts)
            return result
        except Clash as clash:
            last = clash
            self.tried[call.name, str(clash), clash.line] = None
        if not last.mixed and (depth >= _MENDS or not (around.mends and around.sequence)):
            raise last
        for fix in self.fixes(call, last, around.forced):
            self.retries += 1
            if self.retries > _RETRIES:
                break
            try:
                forced = {**around.forced, **fix}
                return self.attempt(call, state, replace(around, forced=forced), depth + 1)
            except Clash as clash:
                last = clash
        raise last

    def fixes(
        self, call: Call, clash: Clash, forced: Mapping[str, Kind]
    ) -> Iterator[dict[str, Kind]]:
        """Other outputs of the direct children that gave the tensors."""
        for tensors, kind in (
            (clash.mixed, Kind.GATHERED),
            (clash.cut, Kind.PART),
            (clash.whole, Kind.WHOLE),
        ):
            givers = (child.name for t in tensors for child in self.givers(call, t))
            if found := {name: kind for name in givers if name not in forced}:
                yield found

    def givers(self, call: Call, tensor: int) -> Iterator[Call]:
        """The children of `call` that give a tensor, directly or by its own operations."""
        seen, waiting = set[int](), [tensor]
        while waiting:
            tensor = waiting.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            for event in call.body:
                if isinstance(event, Call):
                    if tensor in event.given:
                        # a style can't change what is in an object
                        yield from self.givers(event, tensor) if event.structured else (event,)
                        break
                elif tensor in event.outputs and tensor not in event.inputs:
                    waiting += (t for t in event.inputs if t in self.flow.live)

    def inside(self, call: Call, state: State, around: _Around) -> State:
        """The calls and operations of a module in order."""
        own = {t for _, t in call.weights if state.kind(t) is Kind.WHOLE} if call.leaf else set()
        waiting: list[Operation] = []
        for event in call.body:
            if isinstance(event, Operation):
                waiting.append(event)
                continue
            state = self.visit(event, self.operations(waiting, state, own, around), around)
            waiting = []
        return self.operations(waiting, state, own, around)

    def operations(
        self, some: Sequence[Operation], state: State, own: set[int], around: _Around
    ) -> State:
        """Some operations; what is made of the module's own weights alone counts as one (`own`)."""
        if not some:
            return state
        kinds, dims, met, work = dict(state.kinds), dict(state.dims), [*state.met], state.work
        for one in some:
            real = [t for t in one.inputs if not self.flow.scalar(t) or t in own]
            if own and real and all(t in own for t in real):
                own.update(one.outputs)
                continue
            have = [kinds.get(t, Kind.WHOLE) for t in real]
            self.check(one, real, have, kinds, own, around)
            result = next((k for k in (Kind.PART, Kind.VARYING, Kind.GATHERED) if k in have), None)
            if result is Kind.PART:
                # a sum of residuals
                twice = have.count(Kind.PART) > 1
                work += twice and self.flow.shapes[one.outputs[0]][-1] == self.flow.width
            elif result is Kind.VARYING:
                pairs = zip(real, have, strict=True)
                whole = (t for t, kind in pairs if kind is Kind.WHOLE)
                met += (Met(t, one.line, t in own) for t in whole)
                self.follow(one, real, have, dims)
            kinds.update(dict.fromkeys(one.outputs, result or Kind.WHOLE))
        return replace(state, kinds=kinds, dims=dims, met=tuple(met), work=work)

    def check(
        self,
        one: Operation,
        real: Sequence[int],
        have: Sequence[Kind],
        kinds: Mapping[int, Kind],
        own: set[int],
        around: _Around,
    ) -> None:
        """Raises a clash where the inputs of an operation do not go together."""
        name = one.name.strip("_")
        if one.in_place and kinds.get(one.inputs[0], Kind.WHOLE) in (Kind.WHOLE, Kind.VARYING):
            if self.fresh(one.inputs[0], around):
                why = f"`{name}` writes into the local output of a style"
                raise Clash(why, one.line, mixed=real)
        if Kind.PART in have:
            pairs = list(zip(real, have, strict=True))
            parts = [t for t, kind in pairs if kind is Kind.PART]
            others = [t for t, kind in pairs if kind is not Kind.PART and t not in own]
            if others:
                shape = list(self.flow.shapes[others[0]])
                why = f"`{name}` takes a part of the sequence and a plain tensor {shape}"
                raise Clash(why, one.line, cut=others, whole=parts)
            if not one.tokenwise:
                raise Clash(f"`{name}` mixes tokens", one.line, whole=parts)
        elif Kind.GATHERED in have and {Kind.VARYING, Kind.WHOLE} & {*have}:
            raise Clash(f"`{name}` takes a DTensor and a plain tensor", one.line)

    def follow(
        self, one: Operation, real: Sequence[int], have: Sequence[Kind], dims: dict[int, int | None]
    ) -> None:
        """Where the split dim of a varying input is in the outputs."""
        pairs = zip(real, have, strict=True)
        varying = (t for t, kind in pairs if kind is Kind.VARYING)
        source = next((t for t in varying if dims.get(t) is not None), None)
        for out in one.outputs:
            at = dims[source] if source is not None else None
            length = len(self.flow.shapes[out])
            if at is not None and source is not None:
                back = at + length - len(self.flow.shapes[source])
                at = back if one.moves is None else one.moves.get(at)
            dims[out] = at if at is not None and 0 <= at < length else None

    def fresh(self, tensor: int, around: _Around) -> bool:
        """Whether a tensor is the output of split weights, or a view of it."""
        while True:
            made = self.makers.get(tensor, ())
            calls = [e for e in made if isinstance(e, Call)]
            if any(e.name in self.splits or around.forced.get(e.name) is Kind.WHOLE for e in calls):
                return True
            rest = [e for e in made if not (isinstance(e, Operation) and e.in_place)]
            if not rest or not isinstance(rest[0], Operation) or rest[0].name not in VIEWS:
                return False
            tensor = rest[0].inputs[0]

    # One call of a module -------------------------------------------------------------------------

    def visit(self, call: Call, state: State, around: _Around) -> State:
        for style in self.splits.get(call.name, ()):
            match style:
                case st.Colwise():
                    return self.colwise(call, style, state)
                case st.Rowwise():
                    return self.rowwise(call, style, state, around)
                case st.Experts():
                    return self.experts(call, style, state, around)
                case st.Features():
                    return state.typed(call.given, Kind.VARYING).ruled(Found(call.name, style))
                case st.Parameters():
                    split = {name for name, _ in style.layouts}
                    own = (t for name, t in call.weights if name in split)
                    state = state.typed(own, Kind.VARYING).ruled(Found(call.name, style))
                case _:
                    state = state.ruled(Found(call.name, style))
        if state.some(call, Kind.PART):
            return self.ends(call, self.with_parts(call, state, around), around)
        return self.ends(call, self.without_parts(call, state, around), around)

    def ends(self, call: Call, state: State, around: _Around) -> State:
        """The changes of a module's outputs."""
        to, flow = around.forced.get(call.name), self.flow
        tokens = [(place, t) for place, t in call.outputs if flow.token_dim(t) is not None]
        first = call.outputs[0] if call.outputs else None
        if to is Kind.PART and (some := _of(tokens, state, Kind.WHOLE)):
            changes = {p: Redistribution(Replicate(), self.part(t)) for p, t in some}
            made = state.typed((t for _, t in tokens), Kind.PART)
            reason = "its output goes where parts of the sequence are"
            found = self.output(call, changes, reason, local=False)
            return made.ruled(found, sent=self.wide(t for _, t in some))
        both = Redistribution(Replicate(), Replicate())
        if to is Kind.GATHERED and first and state.kind(first[1]) is Kind.WHOLE:
            reason = "its output is written into, which a style's local output refuses"
            found = self.output(call, {first[0]: both}, reason, local=False)
            return state.typed((first[1],), Kind.GATHERED).ruled(found)
        inner = to is not Kind.GATHERED and not around.gathered
        if inner and first and state.kind(first[1]) is Kind.GATHERED:
            reason = "what is around it takes a plain tensor"
            found = self.output(call, {first[0]: both}, reason)
            return state.typed((first[1],), Kind.WHOLE).ruled(found)
        if to is Kind.WHOLE and (some := _of(tokens, state, Kind.PART)):
            changes = {p: Redistribution(self.part(t), Replicate()) for p, t in some}
            made = state.typed((t for _, t in tokens), Kind.WHOLE)
            found = self.output(call, changes, "its output is needed whole")
            return made.ruled(found, sent=self.wide(t for _, t in some))
        return state

    def part(self, tensor: int) -> Shard:
        """The layout of a part of the sequence."""
        dim = self.flow.token_dim(tensor)
        return Shard(1 if dim is None else dim)

    def wide(self, tensors: Iterable[int]) -> float:
        """How much is sent of tensors, in hidden states."""
        return sum(self.flow.shapes[t][-1] for t in tensors) / (self.flow.width or 1)

    def output(
        self,
        call: Call,
        changes: Mapping[int | None, Redistribution],
        reason: str,
        *,
        local: bool = True,
    ) -> Found:
        places = [None] if None in changes else range(call.length)
        style = st.Output(positional=tuple(changes.get(p) for p in places), local=local)
        return Found(call.name, style, reason, line=call.line)

    def input(
        self,
        call: Call,
        some: Sequence[tuple[str, int]],
        change: Callable[[int], Redistribution],
        reason: str,
        *,
        local: bool = False,
    ) -> Found:
        given = {key: change(tensor) for key, tensor in some}
        last = max((int(key) for key in given if key.isdecimal()), default=-1)
        length = max(last + 1, call.positional) if last >= 0 else 0
        style = st.Input(
            positional=tuple(given.get(str(i)) for i in range(length)),
            named=tuple((key, one) for key, one in given.items() if not key.isdecimal()),
            local=local,
        )
        return Found(call.name, style, reason, self.split_in(call), call.line)

    def split_in(self, call: Call) -> tuple[str, ...]:
        """The modules with split weights inside a module."""
        inside = (c.name for c in call.below() if c.name in self.splits)
        return tuple(dict.fromkeys(inside))

    def without_parts(self, call: Call, state: State, around: _Around) -> State:
        varying = state.some(call, Kind.VARYING)
        if call.leaf and call.weights and varying:
            return self.on_varying(call, state, around, varying[0][1], len(varying))
        if call.weights and state.some(call, Kind.GATHERED):
            raise Clash(f"plain weights of `{call.name}` take a DTensor", call.line)
        inner = replace(around, mends=around.may_enter)
        ways = [self.way(lambda: self.attempt(call, state, inner))]
        whole = [(k, t) for k, t in state.some(call, Kind.WHOLE) if self.flow.hidden(t)]
        if whole and call.name in self.above and not around.gathered:
            if not around.sequence:
                ways.append(self.way(lambda: self.fed(call, whole, state, around)))
            elif around.may_enter:
                ways.append(self.way(lambda: self.entered(call, whole, state, around)))
        possible = [way for way in ways if isinstance(way, State)]
        if not possible:
            assert isinstance(ways[0], Clash)
            raise ways[0]
        return min(possible, key=lambda way: (-way.work, way.sent))

    def way(self, one: Callable[[], State]) -> State | Clash:
        try:
            return one()
        except Clash as clash:
            return clash

    def on_varying(
        self, call: Call, state: State, around: _Around, source: int, many: int
    ) -> State:
        """Whole weights on varying values have partial gradients, which are summed."""
        made = self.inside(call, state, around)
        new = made.met[len(state.met) :]
        if not any(met.own for met in new):
            return made
        dim = state.dims.get(source)
        same = many == 1 and dim is not None and len(call.arguments) == 1
        style = st.Sequence(dim=dim or 0, local=True) if same else st.Replicated(summed=True)
        # the call's outputs keep their kinds; the walk back from what met is the style's
        others = (*state.met, *(met for met in new if not met.own))
        reason = "its whole weights are applied to what each rank has of its own"
        weights = tuple(dict.fromkeys(c.name for c in self.sources(source, state)))
        found = Found(call.name, style, reason, weights, call.line)
        return replace(made, met=others, rules=state.rules).ruled(found)

    def fed(
        self, call: Call, whole: Sequence[tuple[str, int]], state: State, around: _Around
    ) -> State:
        """One sum of the input's gradient for all linears inside that take it."""
        inner = state.typed((t for _, t in whole), Kind.GATHERED)
        made = self.attempt(call, inner, replace(around, gathered=True, mends=False))
        made = made.typed((t for _, t in whole if t not in call.given), Kind.WHOLE)
        if any(made.kind(t) is Kind.GATHERED for t in call.given):
            raise Clash("a DTensor leaves", call.line)
        reason = "the gradients of all that take its input are summed once"
        both = Redistribution(Replicate(), Replicate())
        found = self.input(call, whole, lambda _: both, reason)
        return _first(made, state, found, sent=2 * self.wide(t for _, t in whole))

    def entered(
        self, call: Call, whole: Sequence[tuple[str, int]], state: State, around: _Around
    ) -> State:
        """From here on hidden states are parts of the sequence."""
        made = self.attempt(call, state.typed((t for _, t in whole), Kind.PART), around)
        made = made.typed((t for _, t in whole if t not in call.given), Kind.WHOLE)
        reason = "from here on, hidden states are parts of the sequence"
        found = self.input(
            call, whole, lambda t: Redistribution(Replicate(), self.part(t)), reason
        )
        return _first(made, state, found, sent=self.wide(t for _, t in whole))

    def with_parts(self, call: Call, state: State, around: _Around) -> State:
        """The cheapest of: parts of the sequence inside as well; gathered here, as a DTensor or
        plain, with outputs that are cut inside or here.
        """
        parts = state.some(call, Kind.PART)
        inside = self.way(lambda: self.pure(call, state, around))
        ways = [inside]
        for local in (False, True):
            for tail in (True, False):
                made = self.way(
                    lambda a=local, b=tail: self.gather(call, parts, state, around, local=a, tail=b)
                )
                ways.append(made)
        possible = [way for way in ways if isinstance(way, State)]
        if not possible:
            assert isinstance(inside, Clash)
            raise inside
        to_whole = around.forced.get(call.name) is Kind.WHOLE

        def sent(way: State) -> float:
            left = (t for t in call.given if way.kind(t) is Kind.PART)
            return way.sent + (self.wide(left) if to_whole else 0)

        # one gather around is one rule
        return min(possible, key=lambda way: (-way.work, sent(way), way is inside))

    def pure(self, call: Call, state: State, around: _Around) -> State:
        flow = self.flow
        if call.name in self.whole:
            parts = (t for _, t in state.some(call, Kind.PART))
            raise Clash(f"the gradient of `{call.name}` is partial", call.line, whole=parts)
        made = self.attempt(call, state, replace(around, sequence=True, mends=True))
        if not (call.leaf and call.weights):
            return made
        if call.positional != 1:
            raise Clash(f"`sequence` passes one input on, `{call.name}` takes more", call.line)
        if any(t in flow.tied for _, t in call.weights):
            raise Clash(f"the weights of `{call.name}` are another module's too", call.line)
        if any(made.kind(t) is not Kind.PART for t in call.given):
            raise Clash(f"the output of `{call.name}` is no part of the sequence", call.line)
        reason = "it is applied to parts of the sequence, token by token"
        dim = self.part(call.taken[0]).dim
        found = Found(call.name, st.Sequence(dim=dim), reason, line=call.line)
        work = not call.linear and any(flow.shapes[t][-1] == flow.width for t in call.given)
        made = replace(made, rules=state.rules, sent=state.sent, work=made.work + work)
        return made.ruled(found)

    def gather(
        self,
        call: Call,
        parts: Sequence[tuple[str, int]],
        state: State,
        around: _Around,
        *,
        local: bool,
        tail: bool,
    ) -> State:
        if not local and call.weights and call.leaf and call.name not in self.splits:
            raise Clash(f"plain weights of `{call.name}` take a DTensor", call.line)
        inner = state.typed((t for _, t in parts), Kind.WHOLE if local else Kind.GATHERED)
        inside = _Around(
            sequence=tail, forced=around.forced, may_enter=False, gathered=not local, mends=False
        )
        made = self.attempt(call, inner, inside)
        shapes = {self.flow.shapes[t] for _, t in parts}
        changes: dict[int | None, Redistribution] = {}
        kinds: dict[int, Kind] = {}
        for place, t in call.outputs:
            hidden = self.flow.hidden(t) and call.name not in self.heads
            like = self.flow.shapes[t] in shapes or hidden
            kind = made.kind(t)
            is_whole = kind in (Kind.WHOLE, Kind.GATHERED)
            if like and is_whole and around.forced.get(call.name) is not Kind.WHOLE:
                changes[place] = Redistribution(Replicate(), self.part(t))
                kinds[t] = Kind.PART
            elif kind is Kind.GATHERED:
                kinds[t] = Kind.WHOLE
        if changes and call.structured:
            raise Clash(f"a style can't change what is in the object of `{call.name}`", call.line)
        # others still have parts
        left = {t: Kind.PART for _, t in parts if t not in call.given}
        made = replace(made, kinds={**made.kinds, **kinds, **left})
        reason = "all tokens are needed inside"
        found = self.input(
            call, parts, lambda t: Redistribution(self.part(t), Replicate()), reason, local=local
        )
        # an all-gather and a reduce-scatter for each input; plain, its gradient is whole already
        sent = self.wide(t for _, t in parts) * (1 if local else 2)
        made = _first(made, state, found, sent=sent)
        if not changes:
            return made
        reason = "each rank has all of its output, and keeps its part of the sequence"
        cut = self.output(call, changes, reason, local=False)
        changed = (t for place, t in call.outputs if place in changes)
        return made.ruled(cut, sent=self.wide(changed))

    # Split weights --------------------------------------------------------------------------------

    def colwise(self, call: Call, style: st.Colwise, state: State) -> State:
        source, out = call.taken[0], call.given[0]
        whole = isinstance(style.output, Replicate) or call.name in self.heads
        have, embedding = state.kind(source), not self.flow.hidden(source)
        if have is Kind.VARYING:
            raise Clash(f"`{call.name}` is split by rows of features that are split", call.line)
        made = replace(
            style,
            input=self.part(source) if have is Kind.PART else Replicate(),
            output=Replicate() if whole else Shard(-1),
            local=True,
        )
        reason = "its input is a part of the sequence" if have is Kind.PART else ""
        if call.name in self.heads:
            reason = "what leaves the model is whole"
        dims = {**state.dims, out: len(self.flow.shapes[out]) - 1}
        state = replace(state, dims=dims).typed((out,), Kind.WHOLE if whole else Kind.VARYING)
        free = have is Kind.GATHERED or (embedding and source not in self.flow.live)
        sent = 0 if free else 2 * self.wide((source,))
        return state.ruled(Found(call.name, made, reason, line=call.line), sent=sent)

    def rowwise(self, call: Call, style: st.Rowwise, state: State, around: _Around) -> State:
        source, out = call.taken[0], call.given[0]
        to, have = around.forced.get(call.name), state.kind(source)
        dim = self.flow.token_dim(out)
        cut = around.sequence and to not in (Kind.WHOLE, Kind.GATHERED)
        cut = cut and dim is not None and len(self.flow.shapes[out]) > 2
        given: st.Layout = style.input
        if not isinstance(style.input, Replicate) or source in self.flow.live:
            given = Shard(-1) if have is Kind.VARYING else Replicate()
        if have is Kind.PART:  # its features are split from here on: an all-to-all
            given, cut = self.part(source), False
        kind = Kind.PART if cut else Kind.GATHERED if to is Kind.GATHERED else Kind.WHOLE
        made = replace(
            style,
            input=given,
            output=Shard(dim) if cut and dim is not None else Replicate(),
            local=kind is Kind.WHOLE,
        )
        reason = "its sum is needed as parts of the sequence" if cut else ""
        if have is not Kind.VARYING and isinstance(style.input, Shard):
            reason = reason or "its input is whole"
        found = Found(call.name, made, reason, line=call.line)
        return state.typed((out,), kind).ruled(found, sent=2 * self.wide((out,)))

    def experts(self, call: Call, style: st.Experts, state: State, around: _Around) -> State:
        parts = [t for _, t in state.some(call, Kind.PART)]
        if parts or state.some(call, Kind.GATHERED):
            raise Clash(f"`{call.name}` takes all tokens", call.line, whole=parts)
        inner: list[Found] = []
        for child in call.below():
            if child is call:
                continue
            some = self.splits.get(child.name, ())
            inner += (Found(child.name, one) for one in some)
            if child.weights and not some:
                reason = "each rank applies it to its own slice of the experts"
                one = st.Replicated(summed=True)
                inner.append(Found(child.name, one, reason, (call.name,), child.line))
        out = call.given[0]
        to = around.forced.get(call.name)
        cut = around.sequence and self.flow.hidden(out) and to not in (Kind.WHOLE, Kind.GATHERED)
        kind = Kind.PART if cut else Kind.GATHERED if to is Kind.GATHERED else Kind.WHOLE
        made = replace(
            style, output=self.part(out) if cut else Replicate(), local=kind is Kind.WHOLE
        )
        reason = "its sum is needed as parts of the sequence" if cut else ""
        state = state.typed(call.given, Kind.WHOLE).typed((out,), kind)
        return state.ruled(Found(call.name, made, reason, line=call.line), *inner, sent=4)

    # Whole values that meet varying ones ----------------------------------------------------------

    def sums(self, state: State) -> Iterator[Found]:
        """Yields the rules by which partial gradients are summed: of what whole values, that met
        varying ones, are made of.
        """
        flow, slices, seen = self.flow, dict[int, int](), set[int]()
        waiting = [(met.tensor, met.line) for met in state.met if not met.own]
        reason = "each rank uses it with what it has of its own, so its gradient is a summand"
        while waiting:
            tensor, line = waiting.pop()
            if tensor in seen or tensor not in flow.live:
                continue
            seen.add(tensor)
            if tensor in flow.weights:
                holder, _, name = flow.weights[tensor].rpartition(".")
                layout = st.ParameterLayout(layout=Replicate())
                yield Found(holder, st.Parameters(layouts=((name, layout),)), reason, line=line)
                continue
            makers = self.makers.get(tensor, ())
            calls = [e for e in makers if isinstance(e, Call)]
            for event in [*calls[:1]] or makers[:1]:
                if isinstance(event, Operation):
                    waiting += ((t, line) for t in event.inputs)
                    if len(event.inputs) == 1 and event.name in _SLICES:
                        source = event.inputs[0]
                        slices[source] = max(slices.get(source, 0), flow.shapes[tensor][-1])
                elif event.name in self.splits:
                    why = f"the whole output of `{event.name}` meets what each rank has of its own"
                    self.tried["", why, line] = None
                elif event.linear:  # summed here, where what is behind it is whole
                    rope = slices.get(tensor, flow.shapes[tensor][-1])
                    beside = tuple(self.beside(tensor, rope))
                    style = st.MlaKv(rope=rope)
                    yield Found(event.name, style, reason, line=line, beside=beside)
                else:
                    yield Found(event.name, st.Replicated(summed=True), reason, line=line)
                    waiting += ((t, line) for t in event.taken)

    def beside(self, tensor: int, rope: int) -> Iterator[str]:
        """The modules whose width is the rest of a linear's output, which they take."""
        rest = self.flow.shapes[tensor][-1] - rope
        for call in self.flow.calls:
            for event in call.body:
                if not isinstance(event, Operation) or event.inputs != (tensor,):
                    continue
                for out in event.outputs:
                    if self.flow.shapes[out][-1] == rest != rope:
                        yield from (c.name for c in self.flow.takers.get(out, ()) if c.weights)


def _first(made: State, before: State, found: Found, *, sent: float) -> State:
    """A state with a rule before those that were found inside."""
    inner = made.rules[len(before.rules) :]
    return replace(made, rules=(*before.rules, found, *inner), sent=made.sent + sent)


def _of(
    some: Iterable[tuple[int | None, int]], state: State, kind: Kind
) -> list[tuple[int | None, int]]:
    return [(place, t) for place, t in some if state.kind(t) is kind]


def _cut(style: Style) -> bool:
    return isinstance(style, st.Sequence) and not style.local


def _gathers(style: st.Input) -> bool:
    return any(
        isinstance(c.source, Shard) and isinstance(c.target, Replicate) for c in style.changes
    )
