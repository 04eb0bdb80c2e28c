"""`parallelize_module`, and the weight ties that it breaks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Self

from planc.model.facts import Modules, below
from planc.ops import call, phrases
from planc.ops.base import (
    OMIT,
    Axis,
    AxisRole,
    AxisSizes,
    Entry,
    Group,
    Name,
    Op,
    Phase,
    Shape,
    Some,
    StepFacts,
    Where,
    text,
)
from planc.ops.claims import GRADIENT, CallClaim, ObservedCall, module_claim, unit_names
from planc.ops.contract import contract
from planc.ops.decisions import Decision, Question
from planc.ops.lora import MAGNITUDE
from planc.ops.styles import (
    Input,
    Output,
    Replicated,
    Rowwise,
    Style,
    style_arguments,
    style_call,
    style_name,
)

INFERRED = "~"
"""The mark that `lower` writes before a style that planc inferred, or whose layouts it
completed."""

_CHECK_IDS = "standalone.tensor_styles:check_ids"
_SCRIPT = call.ScriptFunction(
    "tensor_parallel", "Shards weights and activations over the tensor axes."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelize(Op):
    """`parallelize_module(module, mesh[axes], style)` for each module.

    Args:
        axes: the mesh dimensions that the style takes, outermost first.
        shapes: of the parameters that it shards; several operations on a module shard in turn.
        inferred: why planc added it, or completed its layouts; empty for what a line states.
    """

    modules: Modules
    axes: Some[Axis]
    style: Style
    shapes: tuple[Shape, ...] = ()
    inferred: Annotated[str, text("", "why planc inferred it", ".*", most=1000)] = field(
        default="", compare=False, repr=False, metadata=OMIT
    )

    SCRIPT: ClassVar = _SCRIPT
    ROLE: ClassVar = AxisRole.TENSOR
    CARRIES: ClassVar = "activations and their gradients"

    @property
    def split_axes(self) -> tuple[str, ...]:
        return self.axes

    @property
    def traced_modules(self) -> tuple[Modules, ...]:
        return (self.modules,)

    @property
    def short_name(self) -> str:
        return style_name(self.style)

    def claims(self, collective: ObservedCall) -> CallClaim | None:
        """Claims what its modules call, and the gradients of weights that the style leaves
        replicated: a unit of FSDP sums them before it reduces them.
        """
        if not {*collective.axes} & {*self.axes}:
            return None
        if claim := module_claim(collective, self.axes, self.modules.names()):
            return claim
        units, names = unit_names(collective), [*self.modules.names()]
        inside = any(name == unit or below(name, unit) for name in names for unit in units)
        return GRADIENT if inside and not self.shapes else None

    def problems(self) -> Iterator[tuple[Where, str]]:
        if len(self.axes) != 1:  # so it is for torch 2.13's `ParallelStyle`s
            yield ("axes",), f"{style_name(self.style)} takes 1 axis, not {len(self.axes)}"

    @property
    def splits_vocabulary(self) -> bool:
        """Whether the modules are embeddings, each rank of which holds some rows."""
        style, weights = self.style, (s for s in self.shapes if s.name == "weight")
        split = any(s.shape[0] != s.local[0] for s in weights)
        return split and isinstance(style, Rowwise) and not style.transposed

    def calls(self, _context: call.Context) -> Iterator[call.Step]:
        mesh = call.Shared(f"{'_'.join(self.axes)}_mesh", call.Index(call.MESH, self.axes))
        function_call = call.FunctionCall(call.PARALLELIZE, (mesh, style_call(self.style)))
        yield call.Each(modules=self.modules, calls=(function_call,), note=self.place)
        if self.splits_vocabulary:
            check = call.FunctionCall(_CHECK_IDS, (str(self.modules),))
            yield call.Each(modules=self.modules, calls=(check,), note=self.place)

    @property
    def inference(self) -> str:
        return self.inferred

    @property
    def weight_shapes(self) -> tuple[Shape, ...]:
        return self.shapes

    @property
    def required_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {shape.name: shape.shape for shape in self.shapes}

    def uncounted_traffic(self, step: StepFacts) -> str:
        if not step.wide(self.axes) or self._is_counted:
            return ""
        return f"{style_name(self.style)} of {self.modules}"

    @property
    def sums_all(self) -> bool:
        """Whether the gradients of all parameters inside are summed; activations stay."""
        return isinstance(self.style, Replicated) and self.style.summed

    @property
    def _is_counted(self) -> bool:
        # what is sent for magnitudes is counted with the norms of DoRA
        of_magnitudes = self.modules.path[-2:-1] == (MAGNITUDE,)
        return contract(self.style).counted or self.sums_all or of_magnitudes

    PHASE: ClassVar = Phase.TENSOR
    WORD: ClassVar = "tensor"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules", "axes", "style")
    WORDS: ClassVar = {
        "style": ("", phrases.value),
        "local": ("", lambda local: "local" if local else "dtensor"),
        "summed": ("gradient", lambda summed: "sum" if summed else "same"),
    }

    def headline(self, mesh: AxisSizes | None = None) -> str:
        layouts = f"{style_name(self.style)} {self.layouts}".strip()
        return f"{layouts}, on {phrases.axes(self.axes, mesh)}"

    @property
    def layouts(self) -> str:
        """The style's arguments, and whether it outputs a local tensor, where not the default."""
        return style_arguments(self.style, "local", "dtensor")

    @property
    def sizes(self) -> str:
        """The shapes of all sharded parameters; a weight's comes without its name."""
        texts = ((s.name, f"{list(s.shape)} -> {list(s.local)}") for s in self.shapes)
        return ", ".join(
            shapes if name == "weight" else f"{name} {shapes}" for name, shapes in texts
        )

    @classmethod
    def section(cls, ops: Sequence[Self], mesh: AxisSizes) -> Iterator[str]:
        """Rules inside one list of blocks are listed together."""
        for axes in dict.fromkeys(op.axes for op in ops):
            infers = any(op.inferred for op in ops if op.axes == axes)
            mark = f"; {INFERRED} is inferred" if infers else ""
            yield phrases.head(cls.WORD, f"on {phrases.axes(axes, mesh)}{mark}")
            blocks: dict[str, list[Self]] = {}
            for op in ops:
                if op.axes == axes:
                    named = replace(op, modules=phrases.layer(op.modules))
                    blocks.setdefault(phrases.block(op.modules), []).append(named)
            for block, inside in blocks.items():
                if block:
                    yield f"  {block}"
                yield from phrases.table(_rules(inside), indent="    " if block else "  ")

    def entries(self, common: Set[Group]) -> Iterator[Entry]:
        local = (f"local {list(s.local)}" for s in self.shapes)
        named = zip(self.shapes, local, strict=True)
        brief = ", ".join(
            shapes if s.name == "weight" else f"{s.name} {shapes}" for s, shapes in named
        )
        change = f" {style_name(self.style)}" if isinstance(self.style, Input | Output) else ""
        kind = f"{self.WORD}{change}"
        for entry in super(Parallelize, self).entries(common):
            yield replace(entry, kind=kind, over=self.axes, style=self.style, brief=brief)


def _rules(ops: Iterable[Parallelize]) -> Iterator[tuple[str, str, str, str]]:
    """(modules, style, layouts, shapes) of each rule; modules with the same rule are merged."""
    alike: dict[tuple[str, str, tuple[str, str, str], Style], list[str]] = {}
    for op in ops:
        path, half = phrases.adapter(phrases.path_in_block(op.modules))
        mark = INFERRED if op.inferred else ""
        words = (f"{mark}{style_name(op.style)}", op.layouts, op.sizes)
        alike.setdefault((phrases.parent(path), half, words, op.style), []).append(path)
    for (_, half, words, _), paths in alike.items():
        for path in phrases.together(paths):
            yield (f"{path}{half}", *words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie(Op):
    """Ties two parameters again (`parameter = source`), because `parallelize_module` creates new
    ones.

    Both are torch names of parameters, such as `lm_head.weight`.
    """

    parameter: Name
    source: Name

    SCRIPT: ClassVar = _SCRIPT

    def calls(self, _context: call.Context) -> Iterator[call.Step]:
        note = "sharding creates new parameters, so the tie is restored"
        target, source = call.ParameterRef(self.parameter), call.ParameterRef(self.source)
        yield call.Assign(target=target, value=source, note=note)

    def decisions(self, question: Question) -> Iterator[Decision]:
        all_names = [parameter.name for parameter in question.at.module.parameters]
        names = [question.parameter] if question.parameter else all_names
        full = {f"{question.name}.{name}" if question.name else name for name in names}
        if {self.parameter, self.source} & full:
            yield Decision("tied again after tensor parallelism", self.parameter)

    def misfits(self, modules: Mapping[str, Any]) -> Iterator[str]:
        for path in (self.parameter, self.source):
            owner, _, last = path.rpartition(".")
            if owner not in modules or modules[owner]._parameters.get(last) is None:
                yield f"the model has no parameter {path!r}"

    PHASE: ClassVar = Phase.TIES
    WORD: ClassVar = "tie"
    ABOUT: ClassVar[tuple[str, ...]] = ("parameter",)
    WORDS: ClassVar = {"source": ("", phrases.value)}

    def headline(self, _mesh: AxisSizes | None = None) -> str:
        return f"= {self.source}"

    @classmethod
    def section(cls, ops: Sequence[Self], _mesh: AxisSizes) -> Iterator[str]:
        """One line for all ties between two modules: blocks may share tens of parameters."""
        shared: dict[tuple[str, str], list[str]] = {}
        for op in ops:
            names = zip(op.parameter.split(".")[:0:-1], op.source.split(".")[:0:-1], strict=False)
            same = [segment for segment, _ in takewhile(lambda pair: pair[0] == pair[1], names)][
                ::-1
            ]
            tail = "".join(f".{name}" for name in same)
            both = op.parameter.removesuffix(tail), op.source.removesuffix(tail)
            shared.setdefault(both, []).append(tail)
        for (segment, source), tails in shared.items():
            end, note = tails[0], "one parameter in the model"
            if len(tails) > 1:
                end, note = "", f"{len(tails)} parameters, one in the model each"
            yield phrases.head(cls.WORD, f"{segment}{end} = {source}{end}: {note}")
