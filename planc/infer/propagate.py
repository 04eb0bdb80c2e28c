"""Layouts from weight splits: an interpretation of a model's data flow.

The calls of the flow are interpreted in order, with the types of `flow_types` and without values.
If a module gets sequence shards, it is tried in five ways; where tensors do not go
together, outputs of the modules that gave them are changed, and the module around is interpreted
again. What is stated is a fixed point, around which the rest follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from planc.infer.flow_types import Around, Clash, FoundRule, Held, Layouts, State, Tried
from planc.infer.gradient_sums import gradient_sums
from planc.infer.interpret_operations import FlowOperations, Styles
from planc.model.dataflow import DataFlow, FlowCall, Operation
from planc.ops import styles as st
from planc.ops.contract import contract
from planc.ops.styles import Layout, Redistribution, Replicate, Shard, Style

_MENDS = 8
_RETRIES = 2000
"""The most mends in one module, and in one model: the search ends for every model."""


def infer(flow: DataFlow, splits: Styles, stated: Styles, *, sequence: bool) -> Layouts:
    """The layouts that follow from splits, with or without sequence parallelism.

    Args:
        splits: how weights are split; their layouts are open.
        stated: styles whose layouts are complete.

    Raises:
        Clash: there are none.
    """
    return _Inference(flow, splits, stated).layouts(sequence)


class _Inference(FlowOperations):
    """One flow and the splits of its weights. `heads` and `whole` grow from one interpretation to
    the next: linears whose output leaves the model, and modules that no part may enter.
    """

    def __init__(self, flow: DataFlow, splits: Styles, stated: Styles) -> None:
        super().__init__(flow, splits, stated)
        self.heads: frozenset[str] = frozenset()
        self.whole: frozenset[str] = frozenset()
        self.tried: dict[Tried, None] = {}
        self.retries = 0

    # The whole model ------------------------------------------------------------------------------

    def layouts(self, sequence: bool) -> Layouts:
        root = self.flow.root
        leaving = (*root.output_tensors, *root.nested)
        for _ in range(6):
            state = self.attempt(root, State(), Around(sequence=sequence))
            varying = (t for t in leaving if state.kind(t) is Held.VARYING)
            heads = {call.name for t in varying for call in self.sources(t, state)}
            if heads - self.heads:
                self.heads |= heads
                continue
            sums = tuple(gradient_sums(self, state))
            summed = {rule.module for rule in sums}
            cut = {f.module for f in state.rules if _cut(f.style)} & summed
            uneven = self.uneven(state.rules)
            if uneven and uneven <= self.whole:
                raise Clash(f"`{min(uneven)}` is called several times, with several layouts")
            if uneven or cut - self.whole:
                self.whole |= uneven or cut
                continue
            return self.answer(state, (*state.rules, *sums))
        raise Clash("what leaves the model is not whole", rules=sorted(self.heads))

    def answer(self, state: State, rules: tuple[FoundRule, ...]) -> Layouts:
        first = {(f.module, f.style): f for f in reversed(rules)}
        kept = tuple(dict.fromkeys(first[f.module, f.style] for f in rules))
        seen = {f.module for f in kept}
        left = (
            FoundRule(name, style)
            for name, styles in self.splits.items()
            for style in (styles if name not in seen else ())
        )
        sums = [
            state.kind(event.outputs[0]) is Held.PART
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
            cuts=tuple(dict.fromkeys(self.cut(state))),
        )

    def cut(self, state: State) -> Iterator[tuple[str, int]]:
        """The modules with plain `colwise` whose local outputs are cut along the split dim."""
        for tensor, line in state.cuts:
            for call in self.sources(tensor, state):
                styles = [s for s in self.styles(call) if isinstance(s, st.Colwise)]
                if any(s.local and s.parts == 1 for s in styles):
                    yield call.name, line

    def uneven(self, rules: Iterable[FoundRule]) -> frozenset[str]:
        """Modules that are called several times, with several layouts: a style has one."""
        times = Counter(call.name for call in self.flow.calls)
        stated: dict[str, Counter[Style]] = {}
        for rule in rules:
            stated.setdefault(rule.module, Counter())[rule.style] += 1
        styles_by_module = stated.items()
        return frozenset(
            n for n, each in styles_by_module if any(k != times[n] for k in each.values())
        )

    # A module, with mends where tensors clash -----------------------------------------------------

    def attempt(self, call: FlowCall, state: State, around: Around, depth: int = 0) -> State:
        try:
            result = self.run_body(call, state, around)
            if call is self.flow.root:
                leaving = (*call.output_tensors, *call.nested)
                parts = [t for t in leaving if result.kind(t) is Held.PART]
                if parts:
                    raise Clash("a sequence shard leaves the model", whole=parts)
            return result
        except Clash as clash:
            last = clash
            self.tried[Tried(call.name, str(clash), clash.line, clash.rules)] = None
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
        self, call: FlowCall, clash: Clash, forced: Mapping[str, Held]
    ) -> Iterator[dict[str, Held]]:
        """Other outputs of the direct children that gave the tensors."""
        for tensors, kind in (
            (clash.mixed, Held.GATHERED),
            (clash.cut, Held.PART),
            (clash.whole, Held.WHOLE),
        ):
            givers = (child.name for t in tensors for child in self.givers(call, t))
            if outputs := {name: kind for name in givers if name not in forced}:
                yield outputs

    def givers(self, call: FlowCall, tensor: int) -> Iterator[FlowCall]:
        """The children of `call` that give a tensor, directly or by its own operations."""
        seen, waiting = set[int](), [tensor]
        while waiting:
            tensor = waiting.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            for event in call.body:
                if isinstance(event, FlowCall):
                    if tensor in event.output_tensors:
                        # a style can't change what is in an object
                        yield from self.givers(event, tensor) if event.structured else (event,)
                        break
                elif tensor in event.outputs and tensor not in event.inputs:
                    waiting += (t for t in event.inputs if t in self.flow.live)

    def run_body(self, call: FlowCall, state: State, around: Around) -> State:
        """The calls and operations of a module in order."""
        replicated_weights = (
            {t for _, t in call.weights if state.kind(t) is Held.WHOLE} if call.leaf else set()
        )
        waiting: list[Operation] = []
        for event in call.body:
            if isinstance(event, Operation):
                waiting.append(event)
                continue
            state = self.visit(
                event, self.operations(waiting, state, replicated_weights, around), around
            )
            waiting = []
        return self.operations(waiting, state, replicated_weights, around)

    # One call of a module -------------------------------------------------------------------------

    def visit(self, call: FlowCall, state: State, around: Around) -> State:
        if call.name in self.stated:
            return self.as_stated(call, state, around)
        for style in self.splits.get(call.name, ()):
            match style:
                case st.Colwise():
                    return self.colwise(call, style, state)
                case st.Rowwise():
                    return self.rowwise(call, style, state, around)
                case st.Experts():
                    return self.experts(call, style, state, around)
                case st.Parameters():
                    split = {name for name, _ in style.layouts}
                    split_weights = (t for name, t in call.weights if name in split)
                    state = state.with_kind(split_weights, Held.VARYING).with_rules(
                        FoundRule(call.name, style)
                    )
                case _:
                    state = state.with_rules(FoundRule(call.name, style))
                    if contract(style).gives:
                        return state.with_kind(call.output_tensors, Held.VARYING)
        if state.some(call, Held.PART):
            return self.ends(call, self.with_parts(call, state, around), around)
        return self.ends(call, self.without_parts(call, state, around), around)

    def ends(self, call: FlowCall, state: State, around: Around) -> State:
        """The changes of a module's outputs."""
        to, flow = around.forced.get(call.name), self.flow
        tokens = [(place, t) for place, t in call.outputs if flow.token_dim(t) is not None]
        first = call.outputs[0] if call.outputs else None
        if to is Held.PART and (changed := _select_kind(tokens, state, Held.WHOLE)):
            changes = {p: Redistribution(Replicate(), self.part(t)) for p, t in changed}
            after = state.with_kind((t for _, t in tokens), Held.PART)
            reason = "its output is combined with sequence shards"
            rule = self.output(call, changes, reason, local=False)
            return after.with_rules(rule, sent=self.wide(t for _, t in changed))
        both = Redistribution(Replicate(), Replicate())
        if to is Held.GATHERED and first and state.kind(first[1]) is Held.WHOLE:
            reason = "its output is written into, which a style's local output refuses"
            rule = self.output(call, {first[0]: both}, reason, local=False)
            return state.with_kind((first[1],), Held.GATHERED).with_rules(rule)
        inner = to is not Held.GATHERED and not around.gathered
        if inner and first and state.kind(first[1]) is Held.GATHERED:
            reason = "what is around it takes a plain tensor"
            rule = self.output(call, {first[0]: both}, reason)
            return state.with_kind((first[1],), Held.WHOLE).with_rules(rule)
        if to is Held.WHOLE and (changed := _select_kind(tokens, state, Held.PART)):
            changes = {p: Redistribution(self.part(t), Replicate()) for p, t in changed}
            after = state.with_kind((t for _, t in tokens), Held.WHOLE)
            rule = self.output(call, changes, "its output is needed whole")
            return after.with_rules(rule, sent=self.wide(t for _, t in changed))
        return state

    def without_parts(self, call: FlowCall, state: State, around: Around) -> State:
        varying = state.some(call, Held.VARYING)
        if call.leaf and call.weights and varying:
            return self.on_varying(call, state, around, varying[0][1], len(varying))
        if call.weights and state.some(call, Held.GATHERED):
            raise Clash(f"plain weights of `{call.name}` take a DTensor", call.line)
        inner = replace(around, mends=around.may_enter)
        ways = [self.way(lambda: self.attempt(call, state, inner))]
        whole = [(k, t) for k, t in state.some(call, Held.WHOLE) if self.flow.hidden(t)]
        if whole and call.name in self.above and not around.gathered:
            if not around.sequence:
                ways.append(self.way(lambda: self.sum_input_gradient(call, whole, state, around)))
            elif around.may_enter:
                ways.append(self.way(lambda: self.enter_sequence(call, whole, state, around)))
        possible = [way for way in ways if isinstance(way, State)]
        if not possible:
            assert isinstance(ways[0], Clash)
            raise ways[0]
        return min(possible, key=lambda way: (-way.work, way.sent))

    def way(self, attempt: Callable[[], State]) -> State | Clash:
        try:
            return attempt()
        except Clash as clash:
            return clash

    def on_varying(
        self, call: FlowCall, state: State, around: Around, source: int, many: int
    ) -> State:
        """Whole weights on varying values have partial gradients, which are summed."""
        if call.linear and state.dims.get(source) == len(self.flow.shapes[source]) - 1:
            why = f"`{call.name}` takes all features, and a rank has its own"
            raise Clash(why, call.line, rules=self.givers_of(source))
        after = self.run_body(call, state, around)
        new = after.met[len(state.met) :]
        if not any(met.is_weight for met in new):
            return after
        dim = state.dims.get(source)
        same = many == 1 and dim is not None and len(call.arguments) == 1
        style = st.Sequence(dim=dim or 0, local=True) if same else st.Replicated(summed=True)
        # the call's outputs keep their kinds; the walk back from what met is the style's
        others = (*state.met, *(met for met in new if not met.is_weight))
        reason = "its whole weights are applied to what each rank has of its own"
        weights = tuple(dict.fromkeys(c.name for c in self.sources(source, state)))
        rule = FoundRule(call.name, style, reason, weights, call.line)
        return replace(after, met=others, rules=state.rules).with_rules(rule)

    def sum_input_gradient(
        self, call: FlowCall, whole: Sequence[tuple[str, int]], state: State, around: Around
    ) -> State:
        """One sum of the input's gradient for all linears inside that take it."""
        inner = state.with_kind((t for _, t in whole), Held.GATHERED)
        after = self.attempt(call, inner, replace(around, gathered=True, mends=False))
        after = after.with_kind((t for _, t in whole if t not in call.output_tensors), Held.WHOLE)
        if any(after.kind(t) is Held.GATHERED for t in call.output_tensors):
            raise Clash("a DTensor leaves", call.line)
        reason = "the gradients of all that take its input are summed once"
        both = Redistribution(Replicate(), Replicate())
        rule = self.input(call, whole, lambda _: both, reason)
        return _first(after, state, rule, sent=2 * self.wide(t for _, t in whole))

    def enter_sequence(
        self, call: FlowCall, whole: Sequence[tuple[str, int]], state: State, around: Around
    ) -> State:
        """Makes hidden states sequence shards from here on."""
        after = self.attempt(call, state.with_kind((t for _, t in whole), Held.PART), around)
        after = after.with_kind((t for _, t in whole if t not in call.output_tensors), Held.WHOLE)
        reason = "from here on, hidden states are sequence shards"
        rule = self.input(call, whole, lambda t: Redistribution(Replicate(), self.part(t)), reason)
        return _first(after, state, rule, sent=self.wide(t for _, t in whole))

    def with_parts(self, call: FlowCall, state: State, around: Around) -> State:
        """The cheapest of: sequence shards inside as well; gathered here, as a DTensor or
        plain, with outputs that are cut inside or here.
        """
        parts = state.some(call, Held.PART)
        inside = self.way(lambda: self.pure(call, state, around))
        ways = [inside]
        for local, tail in product((False, True), (True, False)):
            gathered = partial(self.gather, call, parts, state, around, local=local, tail=tail)
            ways.append(self.way(gathered))
        possible = [way for way in ways if isinstance(way, State)]
        if not possible:
            assert isinstance(inside, Clash)
            raise inside
        to_whole = around.forced.get(call.name) is Held.WHOLE

        def sent_bytes(way: State) -> float:
            left = (t for t in call.output_tensors if way.kind(t) is Held.PART)
            return way.sent + (self.wide(left) if to_whole else 0)

        # one gather around is one rule
        return min(possible, key=lambda way: (-way.work, sent_bytes(way), way is inside))

    def pure(self, call: FlowCall, state: State, around: Around) -> State:
        flow = self.flow
        if call.name in self.whole:
            parts = (t for _, t in state.some(call, Held.PART))
            raise Clash(f"the gradient of `{call.name}` is partial", call.line, whole=parts)
        after = self.attempt(call, state, replace(around, sequence=True, mends=True))
        if not (call.leaf and call.weights):
            return after
        if call.positional != 1:
            raise Clash(f"`sequence` passes one input on, `{call.name}` takes more", call.line)
        if any(t in flow.tied for _, t in call.weights):
            raise Clash(f"the weights of `{call.name}` are another module's too", call.line)
        if any(after.kind(t) is not Held.PART for t in call.output_tensors):
            raise Clash(f"the output of `{call.name}` is not a sequence shard", call.line)
        reason = "it is applied to sequence shards, token by token"
        dim = self.part(call.input_tensors[0]).dim
        rule = FoundRule(call.name, st.Sequence(dim=dim), reason, line=call.line)
        work = not call.linear and any(
            flow.shapes[t][-1] == flow.width for t in call.output_tensors
        )
        after = replace(after, rules=state.rules, sent=state.sent, work=after.work + work)
        return after.with_rules(rule)

    def gather(
        self,
        call: FlowCall,
        parts: Sequence[tuple[str, int]],
        state: State,
        around: Around,
        *,
        local: bool,
        tail: bool,
    ) -> State:
        if not local and call.weights and call.leaf and call.name not in self.splits:
            raise Clash(f"plain weights of `{call.name}` take a DTensor", call.line)
        inner = state.with_kind((t for _, t in parts), Held.WHOLE if local else Held.GATHERED)
        inside = Around(
            sequence=tail, forced=around.forced, may_enter=False, gathered=not local, mends=False
        )
        after = self.attempt(call, inner, inside)
        shapes = {self.flow.shapes[t] for _, t in parts}
        changes: dict[int | None, Redistribution] = {}
        kinds: dict[int, Held] = {}
        for place, t in call.outputs:
            hidden = self.flow.hidden(t) and call.name not in self.heads
            like = self.flow.shapes[t] in shapes or hidden
            kind = after.kind(t)
            is_whole = kind in (Held.WHOLE, Held.GATHERED)
            if like and is_whole and around.forced.get(call.name) is not Held.WHOLE:
                changes[place] = Redistribution(Replicate(), self.part(t))
                kinds[t] = Held.PART
            elif kind is Held.GATHERED:
                kinds[t] = Held.WHOLE
        if changes and call.structured:
            raise Clash(f"a style can't change what is in the object of `{call.name}`", call.line)
        # others still have parts
        left = {t: Held.PART for _, t in parts if t not in call.output_tensors}
        after = replace(after, kinds={**after.kinds, **kinds, **left})
        reason = "all tokens are needed inside"
        rule = self.input(
            call, parts, lambda t: Redistribution(self.part(t), Replicate()), reason, local=local
        )
        # an all-gather and a reduce-scatter for each input; plain, its gradient is whole already
        sent = self.wide(t for _, t in parts) * (1 if local else 2)
        after = _first(after, state, rule, sent=sent)
        if not changes:
            return after
        reason = "each rank has all of its output, and keeps its sequence shard"
        cut = self.output(call, changes, reason, local=False)
        changed = (t for place, t in call.outputs if place in changes)
        return after.with_rules(cut, sent=self.wide(changed))

    # Stated layouts -------------------------------------------------------------------------------

    def as_stated(self, call: FlowCall, state: State, around: Around) -> State:
        """A module whose layouts are stated: nothing is added to it."""
        styles = self.stated[call.name]
        before = state.with_rules(*(FoundRule(call.name, style) for style in styles))
        inner = before
        for style in styles:
            if isinstance(style, st.Parameters):
                split = {
                    name for name, parameter in style.layouts if isinstance(parameter.layout, Shard)
                }
                split_weights = (t for name, t in call.weights if name in split)
                inner = inner.with_kind(split_weights, Held.VARYING)
            if isinstance(style, st.Input):
                places = ((str(i), change) for i, change in enumerate(style.positional))
                outside = inner  # a tensor can be given twice, as query and as key
                for key, change in (*places, *style.named):
                    tensor = dict(call.arguments).get(key)
                    if change is not None and tensor is not None:
                        self.meets(call, tensor, change.source, outside)
                        kind = self.kind_of(tensor, change.target, style.local)
                        inner = inner.with_kind((tensor,), kind)
        weights = (st.Colwise, st.Rowwise, st.Sequence, st.Experts, st.MlaKv, st.Custom)
        main = next((s for s in styles if isinstance(s, weights)), None)
        if main is not None:
            after = self.of_style(call, main, inner)
        else:
            if inner.some(call, Held.PART) and call.leaf and call.weights:
                raise Clash(f"plain weights of `{call.name}` take a DTensor", call.line)
            gathered = around.gathered or bool(inner.some(call, Held.GATHERED))
            after = self.attempt(call, inner, replace(around, gathered=gathered, mends=True))
        left = {t: before.kind(t) for t in call.input_tensors if t not in call.output_tensors}
        after = replace(after, kinds={**after.kinds, **left})
        for style in styles:
            changes = style.positional if isinstance(style, st.Output) else ()
            outputs = {place or 0: tensor for place, tensor in call.outputs}
            for place, change in enumerate(changes):
                if change is not None and place in outputs and isinstance(style, st.Output):
                    self.meets(call, outputs[place], change.source, after)
                    kind = self.kind_of(outputs[place], change.target, style.local)
                    after = after.with_kind((outputs[place],), kind)
        return after

    def of_style(self, call: FlowCall, style: Style, state: State) -> State:
        """The outputs of a module whose weights have a stated style."""
        source = call.input_tensors[0] if call.input_tensors else None
        match style:
            case st.Colwise() | st.Rowwise():
                if source is not None and source in self.flow.live:
                    self.meets(call, source, style.input, state)
                output: Layout = style.output
                local = style.local
            case st.Sequence():
                output, local = Shard(style.dim), style.local
                if source is not None and not local:
                    self.meets(call, source, output, state)
            case st.Experts():
                output, local = style.output, style.local
            case _:
                output, local = Replicate(), True
        for tensor in call.output_tensors:
            last = len(self.flow.shapes[tensor]) - 1
            at = style.dim if isinstance(style, st.Sequence) else last
            state = replace(state, dims={**state.dims, tensor: at})
            state = state.with_kind((tensor,), self.kind_of(tensor, output, local))
        return state

    # Split weights --------------------------------------------------------------------------------

    def colwise(self, call: FlowCall, style: st.Colwise, state: State) -> State:
        source, out = call.input_tensors[0], call.output_tensors[0]
        whole = isinstance(style.output, Replicate) or call.name in self.heads
        have = state.kind(source)
        if have is Held.VARYING:
            why = f"`{call.name}` is split by its outputs, and its input is split already"
            raise Clash(why, call.line, rules=(call.name, *self.givers_of(source)))
        inferred = replace(
            style,
            input=self.part(source) if have is Held.PART else Replicate(),
            output=Replicate() if whole else Shard(-1),
            local=True,
        )
        reason = "its input is a sequence shard" if have is Held.PART else ""
        if call.name in self.heads:
            reason = "what leaves the model is whole"
        dims = {**state.dims, out: len(self.flow.shapes[out]) - 1}
        state = replace(state, dims=dims).with_kind((out,), Held.WHOLE if whole else Held.VARYING)
        free = have is Held.GATHERED or source not in self.flow.live
        sent = 0 if free else 2 * self.wide((source,))
        return state.with_rules(FoundRule(call.name, inferred, reason, line=call.line), sent=sent)

    def rowwise(self, call: FlowCall, style: st.Rowwise, state: State, around: Around) -> State:
        source, out = call.input_tensors[0], call.output_tensors[0]
        to, have = around.forced.get(call.name), state.kind(source)
        dim = self.flow.token_dim(out)
        cut = around.sequence and to not in (Held.WHOLE, Held.GATHERED)
        cut = cut and dim is not None and len(self.flow.shapes[out]) > 2
        given: st.Layout = style.input
        if not isinstance(style.input, Replicate) or source in self.flow.live:
            given = Shard(-1) if have is Held.VARYING else Replicate()
        if have is Held.PART:  # its features are split from here on: an all-to-all
            given, cut = self.part(source), False
        kind = Held.PART if cut else Held.GATHERED if to is Held.GATHERED else Held.WHOLE
        inferred = replace(
            style,
            input=given,
            output=Shard(dim) if cut and dim is not None else Replicate(),
            local=kind is Held.WHOLE,
        )
        reason = "its sum is needed as sequence shards" if cut else ""
        if have is not Held.VARYING and isinstance(style.input, Shard):
            reason = reason or "its input is whole"
        rule = FoundRule(call.name, inferred, reason, line=call.line)
        return state.with_kind((out,), kind).with_rules(rule, sent=2 * self.wide((out,)))

    def experts(self, call: FlowCall, style: st.Experts, state: State, around: Around) -> State:
        parts = [t for _, t in state.some(call, Held.PART)]
        if parts or state.some(call, Held.GATHERED):
            raise Clash(f"`{call.name}` takes all tokens", call.line, whole=parts)
        inner: list[FoundRule] = []
        for child in call.below():
            if child is call:
                continue
            child_styles = self.splits.get(child.name, ())
            inner += (FoundRule(child.name, child_style) for child_style in child_styles)
            if child.weights and not child_styles:
                reason = "each rank applies it to its own slice of the experts"
                child_style = st.Replicated(summed=True)
                inner.append(FoundRule(child.name, child_style, reason, (call.name,), child.line))
        out = call.output_tensors[0]
        to = around.forced.get(call.name)
        cut = around.sequence and self.flow.hidden(out) and to not in (Held.WHOLE, Held.GATHERED)
        kind = Held.PART if cut else Held.GATHERED if to is Held.GATHERED else Held.WHOLE
        inferred = replace(
            style, output=self.part(out) if cut else Replicate(), local=kind is Held.WHOLE
        )
        reason = "its sum is needed as sequence shards" if cut else ""
        state = state.with_kind(call.output_tensors, Held.WHOLE).with_kind((out,), kind)
        return state.with_rules(
            FoundRule(call.name, inferred, reason, line=call.line), *inner, sent=4
        )


def _first(after: State, before: State, rule: FoundRule, *, sent: float) -> State:
    """A state with a rule before those that were found inside."""
    inner = after.rules[len(before.rules) :]
    return replace(after, rules=(*before.rules, rule, *inner), sent=after.sent + sent)


def _select_kind(
    places: Iterable[tuple[int | None, int]], state: State, kind: Held
) -> list[tuple[int | None, int]]:
    return [(place, t) for place, t in places if state.kind(t) is kind]


def _cut(style: Style) -> bool:
    return isinstance(style, st.Sequence) and not style.local


def _gathers(style: st.Input) -> bool:
    return any(
        isinstance(c.source, Shard) and isinstance(c.target, Replicate) for c in style.changes
    )
