"""One side of a diff: what a lowered plan says of each set of modules, whatever its order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from planc.emit import phrases
from planc.model.facts import Modules
from planc.ops import styles as ir
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.compile import Compile
from planc.ops.configure import Configure
from planc.ops.freeze import Freeze
from planc.ops.fsdp import Divide, FullyShard, Prefetch
from planc.ops.load import Load
from planc.ops.lora import Adapt
from planc.ops.lowered import Lowered
from planc.ops.megatron_fsdp import MegatronShard
from planc.ops.quantization import Quantize
from planc.ops.registry import AnyOp
from planc.ops.rng import Draw
from planc.ops.tensor_parallel import Parallelize, Tie

Value = str | int | float | bool | tuple[int, ...] | tuple[str, ...] | None
Facts = tuple[tuple[str, Value], ...]

KINDS = (
    "model",
    "mesh",
    "data",
    "configure",
    "load",
    "layers",
    "adapters",
    "tensor",
    "tensor input",
    "tensor output",
    "tie",
    "training",
    "quantize",
    "checkpoint",
    "compile",
    "fsdp",
    "spread",
    "megatron",
    "divide",
    "prefetch",
    "random",
)
"""What a change can be about, in the order in which a diff lists it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a plan says of a set of modules.

    Args:
        kind: one of `KINDS`.
        over: the axes of a tensor-parallel style.
        label: what it is about, where that is not a set of modules.
        modules: the set.
        style: of a tensor-parallel rule.
        facts: the rest of what it says, named as in the lowered JSON.
        place: the `.plan` line.
        at: where it stands in its plan, which decides nothing but the order of names.
    """

    kind: str
    over: tuple[str, ...] = ()
    label: str = ""
    modules: Modules | None = None
    style: ir.Style | None = None
    facts: Facts = ()
    place: str = ""
    at: int = field(default=0, compare=False)

    @property
    def subject(self) -> tuple[object, ...]:
        """Two entries of one subject speak of the same, as far as their indices meet."""
        key = None if self.modules is None else self.modules.key
        return (self.kind, self.over, self.label, key)

    @property
    def said(self) -> str:
        """All that it says, strictly: to reshard to 1 rank is not to reshard to all."""
        return repr((self.style, self.facts))

    def order(self) -> tuple[str, str]:
        """A fixed order of entries, so that the order of operations does not matter."""
        return (str(self.modules), self.said)


Group = frozenset[str]


def groups(lowered: Lowered) -> set[Group]:
    """The groups that are one FSDP unit, by the paths of their members."""
    return {_members(op) for op in lowered.ops if isinstance(op, FullyShard) and op.group}


def _members(op: FullyShard) -> Group:
    return frozenset(str(m) for m in op.members)


def entries(lowered: Lowered, common: set[Group]) -> Iterator[Entry]:
    """Each operation as entries.

    Args:
        lowered: one side.
        common: the groups that both sides have; any other is compared member by member.
    """
    said = (entry for op in lowered.ops for entry in _said(op, common))
    for at, entry in enumerate(said):
        yield replace(entry, at=at)


_ADAPTED = ("rank", "alpha", "dropout", "dtype", "init", "seed")
_QUANTIZED = ("kind", "storage", "compute", "double", "block")


def _said(op: AnyOp, common: set[Group]) -> Iterator[Entry]:
    match op:
        case Configure():
            yield Entry(kind="configure", label=op.name, facts=(("value", op.value),))
        case Tie():
            facts = (("source", op.source),)
            yield Entry(kind="tie", label=op.parameter, facts=facts, place=op.place)
        case Parallelize():
            yield _tensor(op)
        case Adapt():
            own: Facts = tuple((name, getattr(op, name)) for name in _ADAPTED)
            for members in op.members:
                yield Entry(kind="adapters", modules=members, facts=own, place=op.place)
        case Quantize():
            kept: Facts = tuple((name, getattr(op, name)) for name in _QUANTIZED)
            for members in op.members:
                inner = phrases.layer(members)
                yield Entry(kind="quantize", modules=inner, facts=kept, place=op.place)
        case Checkpoint():
            yield _checkpoint(op)
        case Compile():
            full: Facts = (("fullgraph", op.fullgraph),)
            yield Entry(kind="compile", modules=op.modules, facts=full, place=op.place)
        case Load():
            yield _load(op)
        case Freeze():
            state: Facts = (("trainable", op.trainable),)
            yield Entry(kind="training", modules=op.modules, facts=state, place=op.place)
        case FullyShard() | MegatronShard():
            yield from _unit(op, common) if isinstance(op, FullyShard) else _megatron(op)
        case Divide():
            factor: Facts = (("factor", op.factor),)
            for some in op.units or (None,):
                yield Entry(kind="divide", modules=some, facts=factor, place=op.place)
        case Draw():
            yield Entry(kind="random", label=op.axis, facts=(("fields", op.fields),))
        case Prefetch():
            depth: Facts = (("forward", op.forward), ("backward", op.backward))
            for modules in op.units:
                yield Entry(kind="prefetch", modules=modules, facts=depth, place=op.place)


def _load(op: Load) -> Entry:
    way: Facts = (("weights", op.weights), ("dtype", op.dtype))
    way = ((("meta", True),) if op.meta else ()) + way
    way += (("fp32", tuple(phrases.islands(op))),) if op.fp32 else ()
    return Entry(kind="load", facts=way, place=op.place)


def _checkpoint(op: Checkpoint) -> Entry:
    """Only what is not as in a plain `full`."""
    said: tuple[tuple[str, Value], ...] = (
        ("save", phrases.saves(op) or None),
        ("offload", op.offload or None),
        *((name, getattr(op, name) and None) for name in ("pin", "preserve_rng", "early_stop")),
    )
    facts = tuple((name, value) for name, value in said if value is not None)
    return Entry(kind="checkpoint", modules=op.modules, facts=facts, place=op.place)


def _tensor(op: Parallelize) -> Entry:
    kind = "tensor"
    if isinstance(op.style, ir.Input | ir.Output):
        kind = f"tensor {ir.style_name(op.style)}"
    facts = [(f"{s.name}.shape", s.shape) for s in op.shapes]
    facts += [(f"{s.name}.local", s.local) for s in op.shapes]
    return Entry(
        kind=kind,
        over=op.axes,
        modules=phrases.layer(op.modules),
        style=op.style,
        facts=tuple(facts),
        place=op.place,
    )


def _unit(op: FullyShard, common: set[Group]) -> Iterator[Entry]:
    facts: Facts = (
        ("shard", op.shard),
        ("replicate", op.replicate),
        ("reshard", op.reshard),
        ("param", op.param),
        ("reduce", op.reduce),
        ("output", op.output),
        ("cast_inputs", op.cast_inputs),
        ("nbytes", op.nbytes),
        ("gathered", op.gathered),
        *_more(op),
    )
    yield from _spreads(op)
    entry = Entry(kind="fsdp", facts=facts, place=op.place)
    if op.group and _members(op) in common:
        yield replace(entry, label=phrases.unit(op))
        return
    group = phrases.unit(op) if op.group else None
    for members in op.members:
        yield replace(entry, modules=members, facts=(("group", group), *facts))


def _spreads(op: FullyShard) -> Iterator[Entry]:
    for spread in op.spreads:
        said: Facts = (("shard", spread.shard), ("replicate", spread.replicate))
        said += (("shard_dim", spread.shard_dim),) if spread.shard_dim else ()
        for modules in filter(None, map(spread.modules.inside, op.members)):
            yield Entry(kind="spread", modules=modules, facts=said, place=op.place)


_MEGATRON = (
    *("shard", "replicate", "strategy", "outer", "main_params", "main_grads", "grad_comm"),
    *("summed", "experts", "nbytes", "gathered"),
)


def _megatron(op: MegatronShard) -> Iterator[Entry]:
    """The call by itself, and its units."""
    facts: Facts = tuple((name, getattr(op, name)) for name in _MEGATRON)
    yield Entry(kind="megatron", facts=(*facts, *op.options), place=op.place)
    for members in op.members:
        yield Entry(kind="megatron unit", modules=members, place=op.place)


def _more(op: FullyShard) -> Facts:
    """What most units do not say; a diff has them where one side does."""
    return tuple(
        (name, value)
        for name, value in (
            ("ignored", tuple(str(m) for m in op.ignored)),
            ("shard_dim", op.shard_dim),
            ("offload", op.offload),
            ("pin", op.pin),
        )
        if value
    )


def differences(old: Entry, new: Entry) -> Iterator[tuple[str, Value, Value]]:
    """(what, before, after) of all that two entries on the same modules say differently."""
    if old.style != new.style:
        yield from _styles(old.style, new.style)
    before, after = dict(old.facts), dict(new.facts)
    for name in dict.fromkeys([*before, *after]):
        one, two = before.get(name), after.get(name)
        if (one, type(one)) != (two, type(two)):  # resharding to 1 rank is not True
            yield name, one, two


def _styles(old: ir.Style | None, new: ir.Style | None) -> Iterator[tuple[str, Value, Value]]:
    """Layout by layout where the style is the same; else the whole."""
    assert old is not None and new is not None
    if type(old) is not type(new):
        yield "style", ir.style_text(old), ir.style_text(new)
        return
    before, after = dict(_layouts(old)), dict(_layouts(new))
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            yield name, before.get(name), after.get(name)


def _layouts(style: ir.Style) -> Iterator[tuple[str, Value]]:
    match style:
        case ir.Colwise() | ir.Rowwise():
            yield "input", str(style.input)
            yield "output", str(style.output)
            yield from _packing(style)
        case ir.Sequence():
            yield "dim", style.dim
        case ir.Replicated():
            yield "gradient", "sum" if style.summed else "same"
        case ir.MlaKv():
            yield "rope", style.rope
        case ir.Features():
            pass
        case ir.Attributes():
            yield from ((name, "split") for name in style.names)
        case ir.Custom():
            yield "path", style.path
            yield "arguments", ir.style_arguments(style)
        case ir.Parameters() | ir.Experts():
            for name, held in style.held:
                yield name, str(held)
            if isinstance(style, ir.Experts):
                yield "input", str(style.input)
                yield "output", str(style.output)
        case ir.Input() | ir.Output():
            sides = [(str(i), c) for i, c in enumerate(style.positional) if c]
            if isinstance(style, ir.Input):
                sides += style.named
            for name, change in sides:
                yield f"{name}.source", str(change.source)
                yield f"{name}.target", str(change.target)
    local = getattr(style, "local", None)
    if local is not None:
        yield "local", local


def _packing(style: ir.Colwise | ir.Rowwise) -> Iterator[tuple[str, Value]]:
    yield "parts", style.parts if isinstance(style.parts, int) else str(list(style.parts))
    yield "interleaved", style.interleaved
    yield "transposed", style.transposed
