"""The lowered plan as text: what a person reads before a run.

Sections stand in the order in which `apply` works; inside `tensor`, what is inside one list of
blocks stands together, and names that say the same share a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from planc.emit import phrases
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.compile import Compile
from planc.ops.configure import Configure
from planc.ops.freeze import Freeze
from planc.ops.fsdp import Divide, FullyShard, Prefetch
from planc.ops.load import Load
from planc.ops.lora import Adapt
from planc.ops.lowered import FORMAT_VERSION, Lowered
from planc.ops.megatron_fsdp import MegatronShard
from planc.ops.quantization import Quantize
from planc.ops.rng import Draw
from planc.ops.styles import style_name
from planc.ops.tensor_parallel import Parallelize, Tie

_WIDTH = 100


def render(lowered: Lowered, *, digest: str) -> str:
    """The text of a lowered plan; the same plan gives the same bytes.

    Args:
        lowered: the plan.
        digest: of it, in hex; its beginning is shown.
    """
    return "".join(f"{line.rstrip()}\n" for line in _lines(lowered, digest))


def _lines(lowered: Lowered, digest: str) -> Iterator[str]:
    yield _title(lowered, digest)
    yield ""
    sizes = (f"{a.name} {a.size}{' (auto)' if a.inferred else ''}" for a in lowered.axes)
    yield _head("mesh", " | ".join(sizes))
    yield _head("data", _data(lowered))
    for op in lowered.ops:
        if isinstance(op, Configure):
            said = " ".join(op.reason.split())
            reason = f": {said}" if said else ""
            yield _head("configure", f"{op.name} = {str(op.value).lower()}{reason}")
    for op in lowered.ops:
        if isinstance(op, Load):
            yield _head("load", phrases.arrival(op))
    yield from _adapters(lowered)
    yield from _tensor(lowered)
    yield from _ties([op for op in lowered.ops if isinstance(op, Tie)])
    for word, state in (("frozen", False), ("trainable", True)):
        states = [o for o in lowered.ops if isinstance(o, Freeze) and o.trainable is state]
        yield from _listed(word, [str(o.modules) for o in states])
    yield from _four_bits(lowered)
    checkpoints = [op for op in lowered.ops if isinstance(op, Checkpoint)]
    for i, how in enumerate(dict.fromkeys(map(phrases.recomputing, checkpoints))):
        alike = [str(op.modules) for op in checkpoints if phrases.recomputing(op) == how]
        note = "" if how == "full" else f"  {how}"
        yield from _listed("" if i else "checkpoint", alike, note)
    for full in (False, True):
        own = [o for o in lowered.ops if isinstance(o, Compile) and o.fullgraph is full]
        note = "  as one graph, or fail" if full else ""
        yield from _listed("compile", [str(op.modules) for op in own], note)
    yield from _fsdp(lowered)
    yield from _settings(lowered)
    if not lowered.ops:
        yield _head("nothing", "to do: the model stays as it is")
    yield _head("per rank", _total(lowered))


def _settings(lowered: Lowered) -> Iterator[str]:
    """What is set on units, once they are."""
    for op in lowered.ops:
        if isinstance(op, Divide):
            some = f", of {', '.join(map(str, op.units))}" if op.units else ""
            yield _head("divide", f"gradients are summed, then divided by {op.factor:,}{some}")
        if isinstance(op, Prefetch):
            yield _head("prefetch", f"{phrases.ahead(op)}, of {', '.join(map(str, op.units))}")
        if isinstance(op, Draw):
            told = f"drawn alike on all ranks of {op.axis}, from the first one's state"
            yield _head("random", f"{told}: {', '.join(op.fields)}" if op.fields else told)


def _ties(ops: list[Tie]) -> Iterator[str]:
    """One line for all parameters that modules share, for blocks may share tens of them."""
    shared: dict[tuple[str, str], list[str]] = {}
    for op in ops:
        names = zip(op.parameter.split(".")[::-1], op.source.split(".")[::-1], strict=False)
        tail = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], names)][::-1]
        cut = -sum(len(name) + 1 for name in tail) or None
        both = op.parameter[:cut], op.source[:cut]
        shared.setdefault(both, []).append(".".join(tail))
    for (one, source), tails in shared.items():
        if len(tails) == 1:
            end = f".{tails[0]}" if tails[0] else ""
            yield _head("tie", f"{one}{end} = {source}{end}: one parameter in the model")
        else:
            yield _head("tie", f"{one} = {source}: {len(tails)} parameters, one in the model each")


def _title(lowered: Lowered, digest: str) -> str:
    layers = f", {lowered.layers} layers" if lowered.layers else ""
    ranks = f"{lowered.world_size:,} rank{'' if lowered.world_size == 1 else 's'}"
    left = f"{lowered.plan} for {lowered.model}{layers}, {ranks}"
    right = f"lowered {digest[:12]}, format {FORMAT_VERSION}"
    return f"{left}{right.rjust(max(len(right) + 2, _WIDTH - len(left)))}"


def _head(name: str, text: str) -> str:
    return f"{name:<12}{text}"


def _data(lowered: Lowered) -> str:
    """How many samplers there are: what a batch size is multiplied with."""
    names = [a.name for a in lowered.axes if a.name in lowered.data and a.size > 1]
    if not names:
        return "the same on every rank"
    return f"split {lowered.axis_size(*names):,} ways, over {' * '.join(names)}"


def _total(lowered: Lowered) -> str:
    text = f"{phrases.size(lowered.parameters)} of parameters at rest"
    if lowered.gathered:
        text += f"; the largest unit is {phrases.size(lowered.gathered)} while gathered"
    return text


def _listed(name: str, paths: Sequence[str], note: str = "") -> Iterator[str]:
    for i, path in enumerate(phrases.together(paths)):
        yield _head("" if i else name, f"{path}{note}")


# Tensor ------------------------------------------------------------------------------------------


def _adapters(lowered: Lowered) -> Iterator[str]:
    """The layers that get LoRA; those that get the same share a line."""
    ops = [op for op in lowered.ops if isinstance(op, Adapt)]
    if not ops:
        return
    yield _head("adapters", "all else is frozen")
    yield from phrases.table(
        (path, "lora", phrases.lora(op))
        for op in ops
        for path in phrases.together(map(str, op.members))
    )


def _four_bits(lowered: Lowered) -> Iterator[str]:
    """The layers whose weights are in 4 bits; those that are kept alike share a line."""
    ops = [op for op in lowered.ops if isinstance(op, Quantize)]
    if not ops:
        return
    yield _head("quantize", "frozen weights in 4 bits, by bitsandbytes")
    yield from phrases.table(
        (path, phrases.four_bit(op))
        for op in ops
        for path in phrases.together(str(phrases.layer(m)) for m in op.members)
    )


def _tensor(lowered: Lowered) -> Iterator[str]:
    ops = [op for op in lowered.ops if isinstance(op, Parallelize)]
    for axes in dict.fromkeys(op.axes for op in ops):
        yield _head("tensor", f"on {phrases.axes(axes, lowered)}")
        blocks: dict[str, list[Parallelize]] = {}
        for op in ops:
            if op.axes == axes:
                named = replace(op, modules=phrases.layer(op.modules))
                blocks.setdefault(phrases.block(op.modules), []).append(named)
        for block, inside in blocks.items():
            if block:
                yield f"  {block}"
            yield from phrases.table(_rules(inside), indent="    " if block else "  ")


def _shelf(path: str) -> tuple[str, str]:
    """What paths that share a line have in common: all but the last name of a layer."""
    layer, half = phrases.adapter(path)
    return phrases.parent(layer), half


def _rules(ops: Sequence[Parallelize]) -> list[tuple[str, str, str, str]]:
    """(modules, style, layouts, shapes) of each rule; names that say the same as one."""
    alike: dict[tuple[object, ...], list[Parallelize]] = {}
    for op in ops:
        key = (*_shelf(phrases.inside(op.modules)), op.style, op.shapes)
        alike.setdefault(key, []).append(op)
    rows = []
    for group in alike.values():
        first = group[0]
        said = (style_name(first.style), phrases.flow(first.style), phrases.shapes(first.shapes))
        paths = [phrases.adapter(phrases.inside(op.modules)) for op in group]
        for path in phrases.together([layer for layer, _ in paths]):
            rows.append((f"{path}{paths[0][1]}", *said))
    return rows


# FSDP --------------------------------------------------------------------------------------------


def _fsdp(lowered: Lowered) -> Iterator[str]:
    """The units in the order of their calls, with a new head where the axes change."""
    ops = [op for op in lowered.ops if isinstance(op, FullyShard)]
    start = 0
    for call in lowered.ops:
        if isinstance(call, MegatronShard):
            yield from _megatron(call, lowered)
    for i, op in enumerate(ops):
        following = ops[i + 1] if i + 1 < len(ops) else None
        if following and _together(following, op):
            continue
        units = ops[start : i + 1]
        common = phrases.precision(units[0])
        text = f"{phrases.spread(op, lowered)}, {common}{phrases.offload(op)}"
        yield _head("fsdp" if op.shard else "replicate", text)
        yield from phrases.table(_units(units, common))
        start = i + 1
    for lying in dict.fromkeys(s for op in ops for s in op.spreads):
        how = ", ".join(filter(None, (phrases.spread(lying, lowered), phrases.along(lying))))
        yield from _listed("spread", [str(lying.modules)], f"  {how}")
    ignored = dict.fromkeys(str(m) for op in ops for m in op.ignored)
    yield from _listed("ignored", list(ignored), "  whole on every rank, in no unit")


def _megatron(op: MegatronShard, lowered: Lowered) -> Iterator[str]:
    """The one call of Megatron-FSDP: its units, and what becomes of the rest."""
    yield _head("megatron", phrases.megatron(op, lowered))
    count = sum(len(m) for m in op.members)
    kept = ": gathered once, and kept" if op.strategy == "optim_grads_params" else ""
    numbers = f"{count} units of {' and '.join(op.classes)}, at most {phrases.size(op.gathered)}"
    yield from phrases.table(
        [
            (", ".join(phrases.together(map(str, op.members))), f"{numbers} gathered"),
            ("the rest", f"in no unit{kept}"),
        ]
    )


def _together(one: FullyShard, two: FullyShard) -> bool:
    """Whether one head will do for both."""
    return (one.shard, one.replicate) == (two.shard, two.replicate)


def _units(ops: Sequence[FullyShard], common: str) -> Iterator[tuple[str, str, str, str]]:
    """(unit, reshard, bytes, a precision of its own) of each unit."""
    folded = list(_folded(ops))
    ops = [op for op, _ in folded]
    columns = (
        [f"{times} x " if times > 1 else "" for _, times in folded],
        [phrases.size(op.nbytes) for op in ops],
        [phrases.size(op.gathered) for op in ops],
    )
    widths = [max(map(len, column)) for column in columns]
    for op, *cells in zip(ops, *columns, strict=True):
        times, rest, whole = (c.rjust(w) for c, w in zip(cells, widths, strict=True))
        numbers = f"{times}{rest} a rank, {whole} gathered"
        own = phrases.precision(op)
        yield (
            phrases.unit(op),
            phrases.reshard(op.reshard) if op.shard else "",
            numbers if op.nbytes or op.gathered else "nothing of its own",
            ", ".join(filter(None, (own if own != common else "", phrases.along(op)))),
        )


def _folded(ops: Sequence[FullyShard]) -> Iterator[tuple[FullyShard, int]]:
    """Each unit with how many it is; the groups of one line that are of like sizes as one."""
    groups: list[tuple[FullyShard, int]] = []
    for op in ops:
        before = groups[-1][0] if groups else None
        both = _joined(before, op) if before and before.group and op.group else None
        if both:
            groups[-1] = (both, groups[-1][1] + 1)
        else:
            groups.append((op, 1 if op.group else len(op.members[0])))
    return iter(groups)


def _joined(one: FullyShard, two: FullyShard) -> FullyShard | None:
    """Two groups of entries of the same lists as one."""
    if one.place != two.place or len(one.members) != len(two.members):
        return None
    unions = tuple(a.union(b) for a, b in zip(one.members, two.members, strict=True))
    members = tuple(m for m in unions if m is not None)
    joined = replace(one, members=members)
    return (
        joined if len(members) == len(unions) and replace(two, members=members) == joined else None
    )
