"""What the modules of a model are for, read off one run of its small sibling.

Blocks are the lists of modules that a model repeats. Inside, a *segment* is a few linears that open
up (`fans`: query, key, value; gate and up) and one that closes (`close`: the output projection,
down): tensor parallelism splits the first by features, and the last takes the split features in.
Names say which linear closes, the order of the run says which ones belong to it; both may be
wrong, and what is written from them is proved or taken back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from planc.model.facts import Facts, Module, Modules
from planc.model.layer_kinds import block_lists

ROWWISE_NAMES = re.compile(
    r"(^|\.)(o_proj|out_proj|o|wo|c_proj|down_proj|fc2|fc_out|fc_o|w2|w3_out|dense_4h_to_h"
    r"|linear_2|linear_fc2|lin2|proj_out|proj|out_lin|out_linear|output_linear|dense_out|wo_proj|ff_out|attn_out|c_out|Wo"
    r"|attention_out|linear_out|output\.dense|output|out)$"
)
"""Linears that close a segment, by the names that the families of transformers give them."""

ATTENTION = re.compile(r"att|self_attention", re.I)
ROUTER = re.compile(
    r"(^|\.)(gate|router|classifier|wg|shared_expert_gate|gate_weight|router\.\w+)$"
)
TOWER = re.compile(r"vis|image|audio|speech|sound", re.I)
"""Lists of blocks that belong to a tower, by their path."""
_BETWEEN = re.compile(f"{TOWER.pattern}|projector|merger|connector|adapter", re.I)
"""Modules of a tower, and those that hand what it gives to the language model."""
_LINEAR = ("linear", "conv1d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear of a block.

    Args:
        name: inside its block, such as `mlp.up_proj`; entries of a list in it are `*`.
        inputs, outputs: its features.
        kind: `linear` or `conv1d`.
    """

    name: str
    inputs: int
    outputs: int
    kind: str = "linear"


@dataclass(slots=True, kw_only=True)
class ProjectionGroup:
    """Args:
    fans: what opens up.
    close: what closes.
    holder: the module around them all that takes the hidden states, empty for the block itself.
    takes: what `input(...)` says to gather what the holder takes, None where unknown.
    latent: linears before the fans that make something small of the hidden states.
    """

    colwise: list[Linear]
    rowwise: Linear
    holder: str = ""
    hidden_input: str | None = None
    latent: list[Linear] = field(default_factory=list)

    @property
    def linears(self) -> list[Linear]:
        return [*self.latent, *self.colwise, self.rowwise]

    @property
    def attention(self) -> bool:
        return bool(ATTENTION.search(self.rowwise.name))


@dataclass(slots=True, kw_only=True)
class FusedExperts:
    """A module that keeps the weights of all its experts in parameters of its own."""

    name: str
    module: Module


@dataclass(slots=True, kw_only=True)
class Blocks:
    """Args:
    path: of the list, such as `model.layers`.
    segments, experts, norms: names inside a block.
    """

    path: str
    projection_groups: list[ProjectionGroup]
    experts: list[FusedExperts]
    norms: list[str]


@dataclass(slots=True, kw_only=True)
class Roles:
    """Args:
    blocks: the lists of blocks.
    embedding: the table of tokens, None where there is none that is known.
    same: other modules that hold the same table, such as an encoder's and a decoder's.
    tables: other tables, such as that of positions.
    heads: linears that give logits.
    norms: outside the blocks.
    """

    blocks: list[Blocks]
    embedding: str | None
    same: list[str]
    tables: list[str]
    heads: list[str]
    norms: list[str]


def roles(facts: Facts, ran: RunRecord | None) -> Roles:
    """The roles of a model's modules.

    Args:
        facts: of the model, best of its small sibling.
        ran: what one run of it showed, None where it could not run: then the order is the table's.
    """
    lists = [m for m in block_lists(facts.model) if m.module.count]
    blocks = sorted((_blocks(at, ran) for at in lists), key=lambda b: bool(TOWER.search(b.path)))
    outside = [
        m
        for m in _all(facts.model)
        if not any(m.within(at) for at in lists) and not str(m).startswith("[")
    ]  # an entry of a list that is the model itself has no name that a selector could say
    tables = [m for m in outside if m.module.kind == "embedding"]
    vocabulary = facts.config.get("vocab_size") or _text(facts).get("vocab_size")
    rows = [m.module.parameters[0].shape[0] for m in tables]
    if vocabulary not in rows:
        gives = {m.module.parameters[0].shape[0] for m in outside if m.module.kind == "linear"}
        vocabulary = next((n for n in rows if n in gives), max(rows, default=None))
    named = [m for m in tables if m.module.parameters[0].shape[0] == vocabulary]
    tied = {name.rpartition(".")[0] for group in facts.ties for name in group}
    named.sort(key=lambda m: (ran is not None and str(m) not in ran.order, str(m) not in tied))
    embedding = str((named or tables)[0]) if tables else None
    heads = [
        str(m)
        for m in outside
        if m.module.kind == "linear"
        and m.module.parameters[0].shape[0] == vocabulary
        and not _BETWEEN.search(str(m))
    ]
    norms = [str(m) for m in outside if m.module.kind == "norm"]
    others = [str(m) for m in tables if str(m) != embedding]
    groups = [{n.rpartition(".")[0] for n in group} for group in facts.ties]
    same = [m for m in others if any({embedding, m} <= group for group in groups)]
    others = [m for m in others if m not in same]
    return Roles(
        blocks=blocks, embedding=embedding, same=same, tables=others, heads=heads, norms=norms
    )


def _text(facts: Facts) -> Any:
    inner = facts.config.get("text_config")
    return inner if isinstance(inner, dict) else {}


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """What a run of the small model showed.

    Args:
        order: the modules in the order in which they began.
        hidden: for each that takes hidden states, what `input(...)` says to gather them.
        gives: for each, how many things it gives; 0 for one tensor that is in no tuple.
        dims: for each, of the first tensor that it gives.
        width: the features of hidden states.
    """

    order: list[str]
    hidden: dict[str, str]
    output_counts: dict[str, int]
    dims: dict[str, int]
    width: int


# Blocks ------------------------------------------------------------------------------------------


def _all(at: Modules) -> Iterator[Modules]:
    yield at
    for child in at.module.children:
        yield from _all(Modules((*at.path, child.segment), child.module))


def _inner(name: str, path: str, rows: frozenset[str] = frozenset()) -> str:
    """A module's name inside its block: `model.layers.3.mlp.experts.5.w1` -> `mlp.experts.*.w1`.

    Entries of `rows`, modules that are an nn.Sequential, are unlike and keep their numbers.
    """
    found: list[str] = []
    for part in name[len(path) + 1 :].split(".")[1:]:
        like = part.isdecimal() and ".".join(found) not in rows
        found.append("*" if like else part)
    return ".".join(found)


def _rows(block: Modules, path: str) -> frozenset[str]:
    """The modules of a block that are an nn.Sequential."""
    found = [m for m in _all(block) if m.module.kind == "list" and not m.module.container]
    return frozenset(_inner(next(m.names()), path) for m in found)


def _blocks(at: Modules, ran: RunRecord | None) -> Blocks:
    path = str(at)
    linears: dict[str, Linear] = {}
    experts: dict[str, FusedExperts] = {}
    norms: dict[str, None] = {}
    kinds: list[list[str]] = []
    for child in at.module.children:
        block = Modules((*at.path, child.segment), child.module)
        first = f"{path}.{next(iter(child.indices))}" if child.indices is not None else path
        rows = _rows(block, path)
        found = {_inner(next(m.names()), path, rows): m for m in _all(block)}
        names = [n for n, m in found.items() if m.module.kind in _LINEAR]
        if ran is not None:
            names = _by_run(names, first, path, rows, ran)
        kinds.append([n for n in names if _useful(n, found[n].module)])
        for name in kinds[-1]:
            linears.setdefault(name, _linear(name, found[name].module))
        for name, modules in found.items():
            own = modules.module
            if own.kind == "norm":
                norms[name] = None
            elif sum(len(p.shape) == 3 for p in own.parameters) > 1:
                experts[name] = FusedExperts(name=name, module=own)
    projection_groups: dict[str, ProjectionGroup] = {}
    for names in kinds:
        for projections in _projection_groups([linears[n] for n in names], ran.width if ran else 0):
            _hold(projections, path, ran)
            projection_groups.setdefault(projections.rowwise.name, projections)
    return Blocks(
        path=path,
        projection_groups=list(projection_groups.values()),
        experts=list(experts.values()),
        norms=list(norms),
    )


def _by_run(
    names: list[str], first: str, path: str, rows: frozenset[str], ran: RunRecord
) -> list[str]:
    """The names in the order of the run; what did not run (an expert without tokens) last."""
    order: dict[str, int] = {}
    for i, name in enumerate(ran.order):
        if name.startswith(f"{first}."):
            order.setdefault(_inner(name, path, rows), i)
    return sorted(names, key=lambda n: order.get(n, len(ran.order)))


def _useful(name: str, module: Module) -> bool:
    """Whether splitting it could be worth it: a router, or one that gives a number, stays whole."""
    if not module.parameters or len(module.parameters[0].shape) != 2:
        return False
    return not ROUTER.search(name) and min(module.parameters[0].shape) >= 8


def _linear(name: str, module: Module) -> Linear:
    one, two = module.parameters[0].shape
    if module.kind == "conv1d":
        return Linear(name=name, inputs=one, outputs=two, kind="conv1d")
    return Linear(name=name, inputs=two, outputs=one)


def _projection_groups(linears: list[Linear], width: int) -> Iterator[ProjectionGroup]:
    """Linears in their order -> segments; what opens and is never closed is left out."""
    waiting: list[Linear] = []
    for linear in linears:
        if not _is_rowwise(linear, waiting, width):
            waiting.append(linear)
            continue
        near = [w for w in waiting if _near(w.name, linear.name)] or waiting
        colwise = [w for w in near if not _latent(w, near, width)]
        latent = [w for w in near if _latent(w, near, width)]
        if colwise:
            yield ProjectionGroup(colwise=colwise, rowwise=linear, latent=latent)
        waiting = [w for w in waiting if w not in near]


def _is_rowwise(linear: Linear, waiting: list[Linear], width: int) -> bool:
    """Whether a linear closes a segment; `dense` does where its own module opened one.

    So does any that gives hidden states of what is wider and was opened, whatever its name.
    """
    if linear.name.rpartition(".")[2] == "dense" and not ROWWISE_NAMES.search(linear.name):
        holder = linear.name.rpartition(".")[0]
        return any(w.name.rpartition(".")[0] == holder for w in waiting)
    if ROWWISE_NAMES.search(linear.name):
        return bool(waiting)
    opened = [w for w in waiting if w.inputs == width and w.outputs % linear.inputs == 0]
    return linear.outputs == width < linear.inputs and bool(opened)


def _near(one: str, two: str) -> bool:
    """Whether two linears can belong together: no other entry of a list, no other branch."""
    a, b = one.split(".")[:-1], two.split(".")[:-1]
    shorter = min(len(a), len(b))
    return a[:shorter] == b[:shorter] or (len(a) and len(b) and a[0] == b[0])  # type: ignore[return-value]


def _latent(linear: Linear, others: list[Linear], width: int) -> bool:
    """Whether another one takes what it gives: a low-rank pair, whose first half stays whole."""
    if linear.outputs == width:
        return False
    for other in others:
        narrow = other.inputs not in (width, linear.inputs)
        if other is not linear and narrow and other.inputs <= linear.outputs < 2 * other.inputs:
            return True
    return False


def _hold(projections: ProjectionGroup, path: str, ran: RunRecord | None) -> None:
    """Finds the module around the segment that takes the hidden states."""
    names = [linear.name.split(".")[:-1] for linear in projections.linears]
    common: list[str] = []
    for parts in zip(*names, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    if "*" in common:
        return
    projections.holder = ".".join(common)
    if ran is None or not projections.holder:
        return
    for name, which in ran.hidden.items():
        if name.startswith(f"{path}.") and _inner(name, path) == projections.holder:
            projections.hidden_input = which
            return
