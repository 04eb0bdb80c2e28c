"""`planc why`: what decided one module or one parameter, and on which lines of the plan.

Gathered from the lowered plan, which is what `apply` runs, so it can't say anything else; the IR
adds what lowering leaves out because it has no effect, and the words of each line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from planc.diagnostic import Sink, nearest, one_of
from planc.emit import words
from planc.ir.plan import Plan
from planc.ir.style import style_name
from planc.lowering.ops import AnyOp, Checkpoint, Compile, FullyShard, Lowered, Parallelize, Tie
from planc.model.facts import DTYPE_BYTES, Facts, Modules, Parameter

_WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_orig_mod)\.|\.(?:_orig_mod)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One thing that a line of the plan decides.

    Args:
        what: the decision, in words.
        target: the module that the line decides: the one asked for, or one around or inside it.
        place: `name:line`; empty for what planc adds itself.
        text: the line's words, where the plan is at hand.
        op: which operation of the lowered plan it is.
    """

    what: str
    target: str
    place: str
    text: str = ""
    op: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One parameter, on the rank that holds most of it.

    Args:
        name: in its module.
        shape: as the model has it.
        dtype: its torch dtype.
        trainable: whether it takes a gradient.
        local: its shape after tensor parallelism.
        spread: (ranks, size) along the tensor-parallel dim, in order, where ranks differ.
        shard: its shape at rest, after FSDP.
        at_rest: bytes that a rank keeps.
        gathered: bytes while its unit is gathered, in the dtype that it is gathered in.
        computed: that dtype.
        ties: names of the parameters that are the same tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    local: tuple[int, ...]
    spread: tuple[tuple[int, int], ...]
    shard: tuple[int, ...]
    at_rest: int
    gathered: int
    computed: str
    ties: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is decided of one module, or of one of its parameters.

    Args:
        name: as torch has it; `root` for the model itself.
        parameter: the parameter's name in the module, None where the module was asked for.
        cls: the module's class.
        kind: `linear`, `norm` and the like.
        like: the set of like modules that it is one of.
        held: its own parameters, or the one.
        count: elements of all its parameters, with those of the modules inside it.
        tensor: styles on the module itself.
        around: styles on modules around it: what comes in there and goes out.
        inside: styles on modules inside it.
        checkpoint, compile: what is around it, is it, or is inside it.
        unit: the unit that it belongs to, then those inside it.
        unit_bytes: of the unit that it belongs to: at rest on a rank, and gathered.
        missing: by section, why nothing decides it.
    """

    name: str
    parameter: str | None
    cls: str
    kind: str
    like: Modules
    held: tuple[Held, ...]
    count: int
    tensor: tuple[Reason, ...] = ()
    around: tuple[Reason, ...] = ()
    inside: tuple[Reason, ...] = ()
    checkpoint: tuple[Reason, ...] = ()
    compile: tuple[Reason, ...] = ()
    unit: tuple[Reason, ...] = ()
    unit_bytes: tuple[int, int] | None = None
    ties: tuple[Reason, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)


def why(name: str, facts: Facts, lowered: Lowered, plan: Plan | None, sink: Sink) -> Answer | None:
    """What decided a module or a parameter, or None after PL130.

    Args:
        name: a module or a parameter as torch calls it, with or without the names of wrappers;
            `root` or nothing is the model itself.
        facts: the model.
        lowered: the plan for it.
        plan: the plan's meaning, None for one that was read back from JSON.
        sink: receives PL130 for a name that is not there.
    """
    found = _found(name, facts, sink)
    return None if found is None else _Question(facts, lowered, plan, *found).answer()


# The name --------------------------------------------------------------------------------------


def _found(name: str, facts: Facts, sink: Sink) -> tuple[Modules, Parameter | None] | None:
    plain = re.sub(r"\[(\d+)\]", r".\1", _WRAPPERS.sub("", name)).removeprefix(".")
    plain = "" if plain == "root" else plain
    try:
        return facts.at(plain), None
    except KeyError as error:
        missing = str(error.args[0])
    try:
        return facts.find(plain)
    except KeyError:
        _unknown(name, missing, facts, sink)
    return None


def _unknown(name: str, missing: str, facts: Facts, sink: Sink) -> None:
    path, _, last = missing.rpartition(".")
    at = facts.at(path)
    close = nearest(last, _below(at))
    around = f"`{path}`" if path else "the model"
    help = f"did you mean {one_of(f'`{path}.{c}`'.replace('`.', '`') for c in close)}?"
    if not close:
        ends = [m for m in facts.model.below() if last in _below(m)]
        first = [next(m.names()) for m in ends[:3]]
        help = f"there is {one_of(f'`{f}.{last}`' for f in first)}" if first else ""
    sink.error(
        "PL130",
        f"there is no module and no parameter `{name}`: {around} has no `{last}`",
        facts=(f"{around} is a {at.module.cls}: {_listed(at)}",),
        help=help or None,
    )


def _below(at: Modules) -> list[str]:
    """What could follow a module's name."""
    names = [p.name for p in at.module.parameters]
    for child in at.module.children:
        names += [child.name] if child.indices is None else map(str, child.indices)
    return names


def _listed(at: Modules) -> str:
    names = [c.name if c.indices is None else f"entries {c.indices}" for c in at.module.children]
    names += [p.name for p in at.module.parameters]
    return ", ".join(names) or "nothing is in it"


# The answer ------------------------------------------------------------------------------------


class _Question:
    """One module, or one of its parameters, and everything that may decide it."""

    def __init__(
        self,
        facts: Facts,
        lowered: Lowered,
        plan: Plan | None,
        at: Modules,
        parameter: Parameter | None,
    ) -> None:
        self.facts, self.lowered, self.plan = facts, lowered, plan
        self.at, self.parameter = at, parameter
        self.styles = [op for op in lowered.ops if isinstance(op, Parallelize)]
        self.texts = _texts(plan) if plan else {}
        self.name = next(at.names())
        self.full = _joined(self.name, parameter.name) if parameter else self.name
        self.shard = self._unit()

    def answer(self) -> Answer:
        module = self.at.module
        held = [self.parameter] if self.parameter else module.parameters
        found = {
            "tensor": tuple(self._tensor(op) for op in self.styles if self._is(op)),
            "checkpoint": tuple(self._wraps(Checkpoint)),
            "compile": tuple(self._wraps(Compile)),
            "unit": tuple(self._units()),
        }
        return Answer(
            name=self.full or "root",
            parameter=self.parameter.name if self.parameter else None,
            cls=module.cls,
            kind=module.kind,
            like=_alike(self.facts, self.at),
            held=tuple(self._held(p) for p in held),
            count=self.parameter.numel if self.parameter else module.count,
            around=tuple(self._tensor(op) for op in self.styles if self._around(op)),
            inside=() if self.parameter else tuple(self._inside()),
            unit_bytes=(self.shard.nbytes, self.shard.gathered) if self.shard else None,
            ties=tuple(self._ties()),
            missing={k: self._missing(k) for k, reasons in found.items() if not reasons},
            **found,
        )

    def _is(self, op: Parallelize) -> bool:
        return op.modules.has(self.name)

    def _around(self, op: Parallelize) -> bool:
        return not self._is(op) and self.at.inside(op.modules) is not None

    def _reason(self, what: str, target: str, op: AnyOp) -> Reason:
        return Reason(
            what=what,
            target=target or "root",
            place=op.place,
            text=self.texts.get(op.place, ""),
            op=next(i for i, other in enumerate(self.lowered.ops) if other is op),
        )

    def _tensor(self, op: Parallelize) -> Reason:
        layouts = words.flow(op.style)
        style = f"{style_name(op.style)} {layouts}".strip()
        target = self._part(len(op.modules.path))
        return self._reason(f"{style}, on {words.axes([op.axis], self.lowered)}", target, op)

    def _part(self, length: int) -> str:
        """The name of the module around this one whose path is that long."""
        return next(Modules(self.at.path[:length], self.at.module).names())

    def _inside(self) -> Iterator[Reason]:
        for op in self.styles:
            both = op.modules.inside(self.at)
            if both is not None and len(both.path) > len(self.at.path):
                said = f"{style_name(op.style)} {words.flow(op.style)}".strip()
                shapes = words.shapes(op.shapes)
                yield self._reason(f"{said}  {shapes}".strip(), _after(both, self.at), op)

    def _wraps(self, kind: type[Checkpoint] | type[Compile]) -> Iterator[Reason]:
        for op in self.lowered.ops:
            if isinstance(op, kind):
                if self.at.inside(op.modules) is not None:
                    target = self._part(len(op.modules.path))
                    yield self._reason(_wrapped(op), target, op)
                elif self.parameter is None and (both := op.modules.inside(self.at)) is not None:
                    yield self._reason(_wrapped(op), str(both), op)

    def _unit(self) -> FullyShard | None:
        """The innermost unit around the module."""
        units = [op for op in self.lowered.ops if isinstance(op, FullyShard)]
        around = [(len(m.path), u) for u in units for m in u.members if self.at.inside(m)]
        return max(around, key=lambda pair: pair[0])[1] if around else None

    def _units(self) -> Iterator[Reason]:
        if self.shard:
            yield self._sharded(self.shard)
        for op in self.lowered.ops if self.parameter is None else ():
            if isinstance(op, FullyShard) and op is not self.shard:
                both = next((m.inside(self.at) for m in op.members if m.inside(self.at)), None)
                if both is not None:
                    target = words.unit(op) if op.group else str(both)
                    yield self._reason(f"a unit inside it, {words.reshard(op.reshard)}", target, op)

    def _sharded(self, op: FullyShard) -> Reason:
        member = max((m for m in op.members if self.at.inside(m)), key=lambda m: len(m.path))
        target = words.unit(op) if op.group else self._part(len(member.path))
        what = f"on {words.axes(op.shard, self.lowered)}"
        if op.replicate:
            what += f", replicated over {words.axes(op.replicate, self.lowered)}"
        what += f", {words.reshard(op.reshard)}, {words.precision(op)}"
        return self._reason(what, target, op)

    def _ties(self) -> Iterator[Reason]:
        names = {_joined(self.name, p.name) for p in self.at.module.parameters}
        for op in self.lowered.ops:
            if isinstance(op, Tie) and {op.parameter, op.source} & (
                {self.full} if self.parameter else names
            ):
                yield self._reason("tied again after tensor parallelism", op.parameter, op)

    def _missing(self, section: str) -> str:
        """Why nothing decides, in words."""
        match section:
            case "tensor":
                return self._untouched()
            case "checkpoint":
                return "no rule: its activations are kept for backward"
            case "compile":
                return "no rule: it runs as written"
        if any(isinstance(op, FullyShard) for op in self.lowered.ops):
            return "no unit is around it: whole on every rank, and its gradient is not averaged"
        return "no section: whole on every rank"

    def _untouched(self) -> str:
        """A rule over an axis of one rank has no effect, and is not in the lowered plan."""
        rules = self.plan.tensor if self.plan else ()
        for rule in rules:
            if rule.modules.has(self.name) and self.lowered.axis_size(rule.axis) == 1:
                place = rule.origin.place
                style = style_name(rule.style)
                return f"{style} has no effect: {rule.axis} has one rank ({place})"
        axes = dict.fromkeys([op.axis for op in self.styles])
        if not self.at.module.parameters:
            return "no rule"
        if not axes:
            return "no rule, and no style on any module"
        return f"no rule: whole on every rank of {words.axes(axes, self.lowered)}"

    def _held(self, parameter: Parameter) -> Held:
        full = _joined(self.name, parameter.name)
        local = parameter.shape
        spread: tuple[tuple[int, int], ...] = ()
        for op in self.styles:
            for shape in op.shapes if self._is(op) else ():
                if shape.name == parameter.name:
                    local = shape.local
                    spread = _spread(shape.shape, local, self.lowered.axis_size(op.axis))
        ranks = self.lowered.axis_size(*self.shard.shard) if self.shard else 1
        shard = (-(-local[0] // ranks), *local[1:]) if local else local
        computed = (self.shard.param if self.shard else None) or parameter.dtype
        group = next((g for g in self.facts.ties if full in g), ())
        return Held(
            name=parameter.name,
            shape=parameter.shape,
            dtype=parameter.dtype,
            trainable=parameter.trainable,
            local=local,
            spread=spread,
            shard=shard,
            at_rest=prod(shard) * DTYPE_BYTES.get(parameter.dtype, 4),
            gathered=prod(local) * DTYPE_BYTES.get(computed, 4),
            computed=computed,
            ties=tuple(n for n in group if n != full),
        )


def _texts(plan: Plan) -> dict[str, str]:
    """The words of each line that decides something, by its place."""
    rules = [*plan.tensor, *plan.checkpoint, *plan.compile, *(plan.fsdp.units if plan.fsdp else ())]
    return {r.origin.place: " ".join(r.origin.text.split()) for r in rules}


def _wrapped(op: Checkpoint | Compile) -> str:
    if isinstance(op, Checkpoint):
        return "activations are computed again in backward"
    return "compiled as one graph, or fails" if op.fullgraph else "compiled"


def _alike(facts: Facts, at: Modules) -> Modules:
    """The set of like modules in the module table that one module is in."""
    return next(m for m in facts.model.below() if m.overlap(at) is not None)


def _after(inner: Modules, outer: Modules) -> str:
    """The path of modules inside another."""
    return str(inner).removeprefix(str(outer)).removeprefix(".") if outer.path else str(inner)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _spread(
    shape: tuple[int, ...], local: tuple[int, ...], ranks: int
) -> tuple[tuple[int, int], ...]:
    """How many ranks hold how much of the split dim, as `torch.chunk` cuts it; empty when even."""
    dim = next((i for i, (a, b) in enumerate(zip(shape, local, strict=True)) if a != b), None)
    if dim is None or shape[dim] % ranks == 0:
        return ()
    size = local[dim]
    full, rest = divmod(shape[dim], size)
    left = ranks - full - (rest > 0)
    parts = [(full, size), (1 if rest else 0, rest), (left, 0)]
    return tuple(part for part in parts if part[0] > 0)
