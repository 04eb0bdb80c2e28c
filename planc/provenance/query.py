"""`planc why`: the lines of the plan that decide a module or a parameter.

The answer is built from the lowered plan, which is what `apply` runs. The IR adds the rules that
lowering drops because they have no effect, and the text of each line.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from math import prod

from planc.compiler import Compiled
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import NOWHERE, Span
from planc.infer.apply_adapters import is_compressed, with_adapters
from planc.ir.nodes import AdapterRule, Plan, StageTimes
from planc.lowering.memory import kept_shape
from planc.model.facts import DTYPE_BYTES, Facts, Modules, Parameter
from planc.ops import phrases
from planc.ops.activation_checkpoint import Save
from planc.ops.base import AxisRole, Op
from planc.ops.contract import Split, part_sizes, weight_split
from planc.ops.decisions import Question
from planc.ops.fsdp import Divide, FullyShard, Prefetch, Spread, along, offloading, where
from planc.ops.lowered import Lowered
from planc.ops.pipeline import Pipeline
from planc.ops.registry import AnyOp, units_of
from planc.ops.styles import Custom, style_name
from planc.ops.tensor_parallel import Parallelize
from planc.provenance.answer import ParameterAnswer, Reason, Reasons
from planc.provenance.module_lookup import look_up
from planc.sections import Hook

_LONGEST = 100
_Describe = Callable[[str, Plan, Facts, Sequence[Save] | None], Iterator[str]]
_DESCRIBE_BLOCK = Hook[_Describe]("provenance", "describe_block")


def why(name: str, compiled: Compiled, sink: Sink) -> Reasons | None:
    """The decisions about a module or a parameter, by its torch name or as `look_up` takes it; None
    after PL130, or where nothing was lowered. A plan from JSON has operations only.
    """
    facts, lowered = compiled.facts, compiled.lowered
    if facts is None or lowered is None:
        return None
    plan, facts = compiled.applied or (compiled.plan, _apply_adapters(facts, lowered))
    named = look_up(name, facts, sink)
    return None if named is None else _Question(facts, lowered, plan, named).answer()


def _apply_adapters(facts: Facts, lowered: Lowered) -> Facts:
    rules = []
    for op in lowered.adapters:
        for members in op.members:
            layers = Modules(members.path, facts.module_at(members.first_name).module)
            compressed = (
                other
                for other in lowered.compressions
                if any(phrases.layer(m).overlap(layers) for m in other.members)
            )
            rule = AdapterRule(
                modules=layers, adapt=op, compressed=next(compressed, None), origin=op.origin
            )
            rules.append(rule)
    return with_adapters(facts, rules, lowered.load.dtype_after_load) if rules else facts


class _Question:
    """One module, or one of its parameters, and the operations that may decide it."""

    def __init__(
        self,
        facts: Facts,
        lowered: Lowered,
        plan: Plan | None,
        named: tuple[Modules, Parameter | None],
    ) -> None:
        self.facts, self.lowered, self.plan = facts, lowered, plan
        self.at, self.parameter = at, parameter = named
        self.styles = lowered.styles
        self.name = at.first_name
        asked = parameter.name if parameter else None
        self.question = Question(at=at, parameter=asked, mesh=lowered)
        self.full = _join(self.name, parameter.name) if parameter else self.name
        # a backend makes units of its own at each call
        pairs = [(unit, op) for op in lowered.ops for unit in units_of(op)]
        self.owner = {id(unit): op for unit, op in pairs}
        self.units = [unit for unit, _ in pairs]
        self.shard = self._unit()
        around = (m for m in (self.shard.ignored if self.shard else ()) if at.part_inside(m))
        self.ignored = max(around, key=lambda m: len(m.path), default=None)
        self.freezing = [op for op in lowered.freezes if at.part_inside(op.modules) is not None]

    def answer(self) -> Reasons:
        module = self.at.module
        parameters = [self.parameter] if self.parameter else module.parameters
        found = {
            "tensor": tuple(self._tensor(op) for op in self.styles if self._is(op)),
            "checkpoint": tuple(self._checkpoints()),
            "compile": tuple(self._decisions("compile")),
            "unit": tuple(self._units()),
        }
        return Reasons(
            name=self.full or "root",
            parameter=self.parameter.name if self.parameter else None,
            cls=module.cls,
            kind=module.kind,
            like=next(m for m in self.facts.model.below() if m.overlap(self.at) is not None),
            parameters=tuple(self._parameter(p) for p in parameters),
            count=self.parameter.numel if self.parameter else module.count,
            load=tuple(self._decisions("load")),
            stage=tuple(self._stage_reasons()),
            context=tuple(self._decisions("context", "attention")),
            experts=tuple(self._decisions("experts", "capacity")),
            loss=tuple(self._decisions("loss")),
            adapter=(*self._decisions("adapters"), *self._answers("adapter")),
            around=tuple(self._tensor(op) for op in self.styles if self._is_around(op)),
            inside=() if self.parameter else tuple(self._inner_styles()),
            unit_bytes=(self.shard.nbytes, self.shard.gathered)
            if self.shard and not self.ignored and self.shard in self.lowered.ops
            else None,
            training=tuple(self._training()),
            sections=dict(self._section_reasons()),
            towers=tuple(self._decisions("towers", "images")),
            draws=tuple(self._decisions("draws")),
            ties=tuple(self._decisions("tie")),
            missing={k: self._missing(k) for k, reasons in found.items() if not reasons},
            findings=(),
            **found,
        )

    def _is(self, op: Parallelize) -> bool:
        return phrases.layer(op.modules).has(self.name)

    def _is_around(self, op: Parallelize) -> bool:
        return not self._is(op) and self.at.part_inside(op.modules) is not None

    def _reason(self, what: str, target: str, op: AnyOp, origin: Span | None = None) -> Reason:
        origin = op.origin if origin is None else origin
        text = " ".join(origin.text.split())
        return Reason(
            what=what,
            target=target or "root",
            place=origin.place,
            text=f"{text[:_LONGEST]}..." if len(text) > _LONGEST else text,
            op=next(i for i, o in enumerate(self.lowered.ops) if o is self.owner.get(id(op), op)),
            inferred=op.inference,
        )

    def _tensor(self, op: Parallelize) -> Reason:
        target = self.question.ancestor(len(op.modules.path))
        what = op.headline(self.lowered)
        if isinstance(op.style, Custom):
            what += "; a user-defined style, so shapes and bytes are those without it"
        return self._reason(what, target, op)

    def _inner_styles(self) -> Iterator[Reason]:
        for op in self.styles:
            both = op.modules.part_inside(self.at)
            if both is not None and len(both.path) > len(self.at.path) and not self._is(op):
                what = f"{style_name(op.style)} {op.layouts}".strip()
                yield self._reason(f"{what}  {op.sizes}".strip(), _after(both, self.at), op)

    def _decisions(self, *words: str) -> Iterator[Reason]:
        """Yields the reasons of operations with these words (`Op.WORD`) that act on the module."""
        for word in words:
            yield from self._reasons(op for op in self.lowered.ops if word == op.WORD)

    def _answers(self, name: str) -> Iterator[Reason]:
        """Yields the reasons of operations whose decisions are in a field (`Op.ANSWER`)."""
        return self._reasons(op for op in self.lowered.ops if name == op.ANSWER)

    def _section_reasons(self) -> Iterator[tuple[str, tuple[Reason, ...]]]:
        """Yields the reasons of each section that has no field in `Reasons`."""
        known = {field.name for field in fields(Reasons)}
        ops = [op for op in self.lowered.ops if op.SECTION and op.ABOUT and not op.ANSWER]
        for name in dict.fromkeys(op.SECTION for op in ops if op.SECTION not in known):
            yield name, tuple(self._reasons(op for op in ops if name == op.SECTION))

    def _reasons(self, ops: Iterable[AnyOp]) -> Iterator[Reason]:
        for op in ops:
            for text, target in op.decisions(self.question):
                yield self._reason(text, target, op)

    def _stage_reasons(self) -> Iterator[Reason]:
        times = self.plan.pipeline.times if self.plan and self.plan.pipeline else None
        for op in self.lowered.find_ops(Pipeline):
            for stage in op.own:
                if any(self.at.part_inside(held) is not None for held in op.stage_modules(stage)):
                    line = op.origin_of("stages") or op.origin
                    what = f"{stage} of {op.stages}: {op.modules_of(stage)}"
                    yield self._reason(what, self.name, op, line)
                    if isinstance(times, StageTimes):
                        what = _stage_times(times, stage)
                        yield self._reason(what, self.name, op, NOWHERE)

    def _checkpoints(self) -> Iterator[Reason]:
        for op in self.lowered.checkpoint_ops:
            for text, target in op.decisions(self.question):
                yield self._reason(text, target, op)
            if self.at.overlap(op.modules) is not None:
                target = self.question.ancestor(len(op.modules.path))
                kept = self._budget_lines(op.save)
                yield from (self._reason(x, target, op, NOWHERE) for x in kept)

    def _budget_lines(self, saves: Sequence[Save] | None) -> Iterator[str]:
        """Yields lines on the calls that a budget saves of the module, or of the block that it
        is.
        """
        if self.plan is not None and self.parameter is None:
            for describe in _DESCRIBE_BLOCK.find_all(self.plan.sections):
                yield from describe(self.name, self.plan, self.facts, saves)

    def _unit(self) -> FullyShard | None:
        """The innermost unit that contains the module."""
        around = [(len(m.path), u) for u in self.units for m in u.members if self.at.part_inside(m)]
        return max(around, key=lambda pair: pair[0])[1] if around else None

    def _units(self) -> Iterator[Reason]:
        op = self.shard
        if op and self.ignored:
            line = op.origin_of(f"ignored.{op.ignored.index(self.ignored)}") or NOWHERE
            target = self.question.ancestor(len(self.ignored.path))
            yield self._reason("ignored: replicated", target, op, line)
        elif op:
            yield self._shard_reason(op)
            yield from self._placement(op)
            yield from self._settings(op)
        for other in self.units if self.parameter is None else ():
            if other is not op:
                both = next(filter(None, (m.part_inside(self.at) for m in other.members)), None)
                if both is not None:
                    target = other.name if other.group else str(both)
                    what = f"a unit inside it, {other.resharding}"
                    yield self._reason(what, target, other)

    def _shard_reason(self, op: FullyShard) -> Reason:
        member = max((m for m in op.members if self.at.part_inside(m)), key=lambda m: len(m.path))
        target = op.name if op.group else self.question.ancestor(len(member.path))
        parts = [where(op, self.lowered), along(op), op.resharding]
        if (call := self.owner[id(op)]) is not op:
            parts = [f"{call.short_name}, {call.headline(self.lowered)}", *parts[2:]]
        return self._reason(", ".join(filter(None, parts)) + offloading(op), target, op)

    def _spread(self, op: FullyShard) -> Spread | None:
        """The innermost spread on the module or its ancestors, inside the unit."""
        depth = max(len(m.path) for m in op.members if self.at.part_inside(m))
        around = [s for s in op.spreads if self.at.part_inside(s.modules)]
        around = [s for s in around if len(s.modules.path) > depth]
        return max(around, key=lambda s: len(s.modules.path), default=None)

    def _placement(self, op: FullyShard) -> Iterator[Reason]:
        spread = self._spread(op)
        if spread is not None:
            line = op.origin_of(f"spreads.{op.spreads.index(spread)}") or NOWHERE
            target = self.question.ancestor(len(spread.modules.path))
            yield self._reason(f"spread {spread.headline(self.lowered)}", target, op, line)

    def _settings(self, op: FullyShard) -> Iterator[Reason]:
        if self.owner[id(op)] is not op:  # of a backend
            return
        target = self._shard_reason(op).target
        line = op.origin_of("precision") or NOWHERE
        yield self._reason(op.precision, target, op, line)
        for other in self.lowered.ops:
            if isinstance(other, Divide) and other is self._divide(op):
                yield self._reason(f"gradients are divided by {other.factor}", target, other)
            elif isinstance(other, Prefetch) and any(self.at.part_inside(m) for m in other.units):
                yield self._reason(f"gathers {other.headline()}", target, other)

    def _divide(self, op: FullyShard) -> Divide | None:
        """The last `Divide` on the unit, which is the one in force."""
        found = self.lowered.find_ops(Divide)
        own = [o for o in found if any(m.overlap(u) for m in op.members for u in o.units)]
        found = [o for o in found if not o.units or o in own]
        return found[-1] if found else None

    def _training(self) -> Iterator[Reason]:
        for op in self.freezing[-1:]:
            what = "trains" if op.trainable else "frozen"
            yield self._reason(what, self.question.ancestor(len(op.modules.path)), op)

    def _missing(self, section: str) -> str:
        match section:
            case "tensor":
                return self._no_effect()
            case "checkpoint":
                kept = next(self._budget_lines(None), "its activations are kept for backward")
                budgets = self.plan.replaced if self.plan else ()
                lines = (b.origin.place for b in budgets if b.modules.has(self.name))
                room = "; ".join(f"the budget of {x} has room" for x in lines)
                return f"{room}; {kept}" if room else f"no rule: {kept}"
            case "compile":
                return "no rule: it runs as written"
        if self.units:
            return "no unit contains it: replicated, and its gradient is not averaged"
        return "no section: replicated"

    def _no_effect(self) -> str:
        """A rule over an axis of one rank has no effect and is not in the lowered plan."""
        for rule in self.plan.tensor if self.plan else ():
            if rule.modules.has(self.name) and self.lowered.axis_size(rule.axis) == 1:
                style, place = style_name(rule.style), rule.origin.place
                return f"{style} has no effect: {rule.axis} has one rank ({place})"
        if any(self._decisions("experts")):
            return "no rule: its experts are divided over ranks"
        axes = dict.fromkeys(axis for op in self.styles for axis in op.axes)
        if not self.at.module.parameters:
            return "no rule"
        if not axes:
            return "no rule, and no style on any module"
        return f"no rule: replicated over {phrases.axes(axes, self.lowered)}"

    def _parameter(self, parameter: Parameter) -> ParameterAnswer:
        full = _join(self.name, parameter.name)
        local, kind = parameter.shape, self.at.module.kind
        spread: tuple[tuple[int, int], ...] = ()
        for op in self.styles:
            for shape in op.shapes if self._is(op) else ():
                if shape.name == parameter.name:
                    split = weight_split(op.style, kind, shape.name, len(shape.local))
                    ranks = self.lowered.axis_size(*op.axes)
                    if is_compressed(self.at.module) and shape.name == "weight":
                        local = (-(-local[0] // ranks), 1)  # a column of bytes
                        continue
                    local = shape.local
                    spread = _spread(split, shape.shape, ranks) if split else ()
        divided: list[Op] = [o for o in self.lowered.ops if o.ROLE is AxisRole.EXPERT]
        for other in divided:
            if other.about.has(self.name):
                shapes = other.weight_shapes
                local = next((s.local for s in shapes if s.name == parameter.name), local)
        unit = None if self.ignored else self.shard
        placement = (self._spread(unit) or unit) if unit else None
        shard = kept_shape(local, placement, self.lowered)
        dtype = parameter.dtype
        if not self.lowered.adapters:  # else the facts are cast already
            dtype = self.lowered.load.dtype_after_load(parameter)
        computed = (unit.param if unit else None) or dtype
        trains = [op.trainable for op in self.freezing]
        group = next((g for g in self.facts.ties if full in g), ())
        return ParameterAnswer(
            name=parameter.name,
            shape=parameter.shape,
            dtype=dtype,
            trainable=trains[-1] if trains else parameter.trainable,
            local=local,
            spread=spread,
            shard=shard,
            at_rest=prod(shard) * DTYPE_BYTES.get(dtype, 4),
            gathered=prod(local) * DTYPE_BYTES.get(computed, 4),
            computed=computed,
            ties=tuple(n for n in group if n != full),
        )


def _stage_times(times: StageTimes, stage: int) -> str:
    """The estimated times of a stage and of the others for a microbatch, as a text."""
    each = [f"{seconds * 1e3:.1f}" for seconds in times.seconds]
    others = ", ".join(one for i, one in enumerate(each) if i != stage)
    size = f"a microbatch of {times.rows:,} x {times.seq:,} tokens"
    return f"estimated: {each[stage]} ms for {size}, forward and backward; the others {others} ms"


def _after(inner: Modules, outer: Modules) -> str:
    return str(inner).removeprefix(str(outer)).removeprefix(".") if outer.path else str(inner)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _spread(split: Split, shape: tuple[int, ...], ranks: int) -> tuple[tuple[int, int], ...]:
    """(ranks, size) along the sharded dim, each part cut as by `torch.chunk`; () where even."""
    parts = part_sizes(split, shape[split.dim]) if split.is_packed else (shape[split.dim],)
    chunks = [-(-size // ranks) for size in parts]
    cut = list(zip(parts, chunks, strict=True))
    # of each part, ranks have a whole chunk, then one has the rest, then none: any number of ranks
    ends = {min(ranks, size // chunk + more) for size, chunk in cut if chunk for more in (0, 1)}
    runs: list[tuple[int, int]] = []
    for rank, end in pairwise(sorted({0, ranks, *ends})):
        local = sum(min(chunk, max(0, size - rank * chunk)) for size, chunk in cut)
        before = runs.pop()[0] if runs and runs[-1][1] == local else 0
        runs.append((before + end - rank, local))
    return tuple(runs) if len(runs) > 1 else ()
