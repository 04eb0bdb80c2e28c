"""The roles of a model's modules, derived from the recorded flow of its proxy model.

Blocks are the repeated entries of a module list. Inside a block, a *projection group* is a few
linears to split colwise (query, key, value; gate and up) and one to split rowwise (the output
projection, down): tensor parallelism shards the output features of the first, and the last takes
these sharded features. The last gives hidden states, or no other linear takes its output; the first
are those whose outputs reach it. A run decides about the rules written from them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod

from planc.model.dataflow import DataFlow, FlowCall
from planc.model.facts import Facts, Module, Modules
from planc.model.roles import ends, lists, same_tensor
from planc.proxy.products import ranges, skip_elementwise, view_dims, viewed_parts

ROUTER = re.compile(
    r"(^|\.)(gate|router|classifier|wg|shared_expert_gate|gate_weight|router\.\w+)$"
)
_LINEAR = ("linear", "conv1d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear of a block, by its name in it (`*` for entries of a list).

    Args:
        inputs, outputs: its features.
        parts: of its output, as the model's code cuts it; empty where it does not.
        counts: the number of heads that the code views each part as; 0 where it does not.
        heads: the numbers of heads that the code views the parts as.
        size: of a head; 0 if there are none.
    """

    name: str
    inputs: int
    outputs: int
    parts: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    heads: frozenset[int] = frozenset()
    size: int = 0


@dataclass(slots=True, kw_only=True)
class ProjectionGroup:
    """Linears to split together, colwise and rowwise."""

    colwise: list[Linear]
    rowwise: Linear

    @property
    def holder(self) -> str:
        """The module around them; empty for the block itself, and for entries of a list."""
        names = [linear.name.split(".")[:-1] for linear in (*self.colwise, self.rowwise)]
        around = zip(*names, strict=False)
        common = [parts[0] for parts in takewhile(lambda parts: len({*parts}) == 1, around)]
        return "" if "*" in common else ".".join(common)


@dataclass(slots=True, kw_only=True)
class Blocks:
    """The roles in the blocks of one list at `path`, by their names inside a block.

    Args:
        experts: modules with the weights of all their experts as parameters of their own.
    """

    path: str
    projection_groups: list[ProjectionGroup]
    experts: dict[str, Module]


@dataclass(slots=True, kw_only=True)
class Roles:
    """The roles of a model's modules.

    Args:
        embedding: of tokens, None if it is not known; `same` are others with the same tensor.
        heads, norms: linears that output logits, and norms outside the blocks.
    """

    blocks: list[Blocks]
    embedding: str | None
    same: list[str]
    heads: list[str]
    norms: list[str]


def roles(facts: Facts, ran: RunRecord | None) -> Roles:
    """The roles of a model's modules, by a run of it, else by the module table's order."""
    around = ends(facts)
    reached = [m for m in around.embeddings if ran is None or str(m) in ran.order]
    embedding = next(iter(reached or around.embeddings), None)
    return Roles(
        blocks=[_blocks(at, ran) for at in lists(facts)],
        embedding=str(embedding) if embedding else None,
        same=[str(m) for m in same_tensor(facts, embedding)] if embedding else [],
        heads=[str(m) for m in around.heads],
        norms=[str(m) for m in around.norms],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The modules of a run in the order in which they began, and the width of its hidden states:
    that of most inputs [batch, sequence, features]; 0 without such inputs.
    """

    order: tuple[str, ...]
    width: int
    flow: DataFlow

    @classmethod
    def from_flow(cls, flow: DataFlow) -> RunRecord:
        names = dict.fromkeys(call.name for call in flow.calls if call.name)
        taken = (t for call in flow.calls for t in call.input_tensors if t in flow.live)
        widths = Counter(flow.shapes[t][-1] for t in taken if len(flow.shapes[t]) == 3)
        width = max(widths, key=lambda w: widths[w], default=0)
        return cls(order=tuple(names), width=width, flow=flow)


# Blocks ------------------------------------------------------------------------------------------


def _inner(name: str, path: str, rows: frozenset[str] = frozenset()) -> str:
    """A module's name inside its block: `model.layers.3.mlp.experts.5.w1` -> `mlp.experts.*.w1`.

    Entries of `rows`, modules that are an nn.Sequential, are not identical and keep their numbers.
    """
    segments: list[str] = []
    for part in name[len(path) + 1 :].split(".")[1:]:
        like = part.isdecimal() and ".".join(segments) not in rows
        segments.append("*" if like else part)
    return ".".join(segments)


def _rows(block: Modules, path: str) -> frozenset[str]:
    list_modules = [m for m in block.below() if m.module.kind == "list" and not m.module.container]
    return frozenset(_inner(m.first_name, path) for m in list_modules)


def _blocks(at: Modules, ran: RunRecord | None) -> Blocks:
    path = str(at)
    experts: dict[str, Module] = {}
    projection_groups: dict[str, ProjectionGroup] = {}
    for child, block in zip(at.module.children, at.children, strict=True):
        first = f"{path}.{next(iter(child.indices))}" if child.indices is not None else path
        rows = _rows(block, path)
        modules_by_name = {_inner(m.first_name, path, rows): m for m in block.below()}
        names = [n for n, m in modules_by_name.items() if m.module.kind in _LINEAR]
        linears = [
            _linear(n, modules_by_name[n].module)
            for n in names
            if _useful(n, modules_by_name[n].module)
        ]
        if ran is not None:
            calls = _calls(first, path, rows, ran.flow)
            for group in _projection_groups(linears, calls, ran):
                projection_groups.setdefault(group.rowwise.name, group)
        for name, modules in modules_by_name.items():
            if sum(len(p.shape) == 3 for p in modules.module.parameters) > 1:
                experts[name] = modules.module
    return Blocks(path=path, projection_groups=list(projection_groups.values()), experts=experts)


def _calls(
    first: str, path: str, rows: frozenset[str], flow: DataFlow
) -> dict[str, list[FlowCall]]:
    """The calls of the linears of one block, by their names in it, in execution order."""
    calls_by_name: dict[str, list[FlowCall]] = {}
    for call in (c for c in flow.calls if c.linear and c.name.startswith(f"{first}.")):
        calls_by_name.setdefault(_inner(call.name, path, rows), []).append(call)
    return calls_by_name


def _useful(name: str, module: Module) -> bool:
    """Whether splitting the linear can pay off: not for routers and linears to one number."""
    if not module.parameters or len(module.parameters[0].shape) != 2:
        return False
    return not ROUTER.search(name) and min(module.parameters[0].shape) >= 8


def _linear(name: str, module: Module) -> Linear:
    rows, columns = module.parameters[0].shape
    if module.kind == "conv1d":
        return Linear(name=name, inputs=rows, outputs=columns)
    return Linear(name=name, inputs=columns, outputs=rows)


def _cut(linear: Linear, tensor: int, flow: DataFlow) -> Linear:
    """A linear with the parts and heads of its output, by the shapes that the code makes of it."""
    tensor = skip_elementwise(tensor, flow)
    pieces, shape = ranges(tensor, flow), flow.shapes[tensor]
    if pieces:
        sizes = tuple(flow.shapes[t][-1] for t in pieces)
        views = [view_dims(t, flow) for t in pieces]
    else:
        few, dims = viewed_parts(tensor, flow), view_dims(tensor, flow)
        sizes = (shape[-1] // few,) * few if few > 1 else ()
        views = [dims[1:] if sizes else dims]
    heads = {n for dims in views for n in (*dims[:-1], prod(dims[:-1])) if n > 1}
    size = min((dims[-1] for dims in views if dims), default=0)
    counts = tuple(prod(dims[:-1]) if dims else 0 for dims in views)
    return replace(linear, parts=sizes, counts=counts, heads=frozenset(heads), size=size)


def _projection_groups(
    linears: list[Linear], calls: Mapping[str, list[FlowCall]], ran: RunRecord
) -> Iterator[ProjectionGroup]:
    """Groups linears that ran, by which outputs reach which, without a sum of hidden states."""
    known = {linear.name: linear for linear in linears}
    run = [known[name] for name in calls if name in known]
    width = Counter(linear.inputs for linear in run).most_common(1)[0][0] if run else 0
    producers = {
        t: linear.name for linear in run for call in calls[linear.name] for t in call.output_tensors
    }
    taken = (
        ran.flow.shapes[t]
        for linear in run
        for call in calls[linear.name]
        for t in call.input_tensors[:1]
    )
    hidden = {shape for shape in taken if shape[-1:] == (width,)}
    before = {
        linear.name: {*_before(calls[linear.name], producers, hidden, ran.flow)} for linear in run
    }
    inner = {name for names in before.values() for name in names}
    rowwise: list[Linear] = []
    for last in run:
        near = [
            linear for linear in run if linear.name in before[last.name] and linear not in rowwise
        ]
        through = {name for linear in near for name in before[linear.name]}
        # the first half of a low-rank pair stays whole
        colwise = [o for o in near if not (o.name in through and o.outputs < o.inputs)]
        if colwise and (last.name not in inner or last.outputs == ran.width):
            rowwise.append(last)
            cut = [
                _cut(linear, calls[linear.name][0].output_tensors[0], ran.flow)
                for linear in colwise
            ]
            yield ProjectionGroup(colwise=cut, rowwise=last)


def _before(
    calls: Iterable[FlowCall],
    producers: Mapping[int, str],
    hidden: Container[tuple[int, ...]],
    flow: DataFlow,
) -> Iterator[str]:
    """Yields the linears whose outputs reach a linear with these calls, the nearest alone, and not
    through a sum of hidden states, which have these shapes.
    """
    waiting, seen = [t for call in calls for t in call.input_tensors], set[int]()
    while waiting:
        if (tensor := waiting.pop()) in seen:
            continue
        seen.add(tensor)
        if tensor in producers:
            yield producers[tensor]
            continue
        for operation in flow.makers.get(tensor, ()):
            shape = flow.shapes[tensor]
            alike = [t for t in operation.inputs if t in flow.live and flow.shapes[t] == shape]
            if not (operation.adds and len(alike) > 1 and shape in hidden):
                waiting += operation.inputs
