"""PL160, PL162, PL163, PL205: layouts on which adjacent modules do not agree."""

from collections.abc import Iterable

from planc.checks import queries
from planc.diagnostic import Label, Sink, one_of
from planc.model.facts import Facts, Module, Modules, Segment
from planc.model.indices import Indices
from planc.ops.contract import contract
from planc.ops.styles import Colwise, Output, Rowwise, Sequence, Shard
from planc.plan.ir import Plan, TensorRule
from planc.source import Span

_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
"""Names that transformers gives to projections of which one is multiplied with another."""


def projection_groups(plan: Plan, facts: Facts, sink: Sink) -> None:
    """q, k and v are combined head by head, gate and up element by element.

    Observed on four processes (torch 2.13, llama): one of them replicated or gathered beside a
    sharded one fails with a shape error, and a DTensor beside a local tensor is refused.
    """
    if "tensor" in plan.broken:
        return
    rules = queries.active(plan)
    seen: set[tuple[Modules, tuple[str, ...]]] = set()
    for rule in rules:
        name = rule.modules.path[-1] if rule.modules.path else ""
        group = next((g for g in _TOGETHER if name in g), ())
        if not group or not queries.splits_output(rule):
            continue
        for parent in queries.parents(facts, rule.modules):
            if (parent, group) not in seen:
                seen.add((parent, group))
                own = [r for r in queries.inside(parent, rules) if isinstance(r.style, Colwise)]
                _compare(rule, parent, group, own, plan, sink)


def _compare(  # noqa: PLR0917
    rule: TensorRule,
    parent: Modules,
    group: tuple[str, ...],
    own: list[TensorRule],
    plan: Plan,
    sink: Sink,
) -> None:
    name = str(rule.modules.path[-1])
    there = [c.name for c in parent.module.children if c.name in group and c.name != name]
    others = {n: [r for r in own if r.modules.path[-1] == n] for n in there}
    differing = [n for n in there if not _like(rule, parent, others[n])]
    if not differing:
        return
    labels: dict[Span, Label] = {
        rule.origin: Label(span=rule.origin, text=f"the output of {name} stays sharded")
    }
    for other in (r for n in differing for r in others[n]):
        text = f"{other.modules.path[-1]} is not sharded the same way"
        labels.setdefault(other.origin, Label(span=other.origin, text=text))
    sink.warning(
        "PL205",
        f"`{name}` of `{parent}` is sharded over {rule.axis} = {queries.ranks(plan, rule)}, and "
        f"{one_of((f'`{n}`' for n in differing), last='and')}, which "
        f"{'feeds' if len(differing) == 1 else 'feed'} the same operation, "
        f"{'is' if len(differing) == 1 else 'are'} not sharded the same way",
        *labels.values(),
        queries.axis_label(plan, rule),
        facts=[f"{n} has no colwise rule" for n in differing if not others[n]],
        help=f"use one style for all: `{{{','.join(n for n in group if n in (name, *there))}}} : "
        "colwise`",
    )


def _like(rule: TensorRule, parent: Modules, others: list[TensorRule]) -> bool:
    """Whether the other projections of these parents have the same output layout as the rule's."""
    left: tuple[Modules, ...] = (parent,)
    if (both := parent.overlap(_beside(rule, parent))) is not None:
        left = (both,)
    for other in others:
        if other.axis == rule.axis and other.style.output == rule.style.output:  # type: ignore[union-attr]
            if getattr(other.style, "local", None) != getattr(rule.style, "local", None):
                continue
            left = tuple(p for m in left for p in m.minus(_beside(other, m)))
    return not left


def _beside(rule: TensorRule, parent: Modules) -> Modules:
    return Modules(rule.modules.path[:-1], parent.module)


def colwise_rowwise_pairs(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Inside one module, a rowwise layer reduces the features that a colwise layer shards.

    This is a warning, not an error: the module's own code may do it in a way that is not visible in
    the module table.
    """
    if "tensor" in plan.broken:
        return
    sets = [(parent, *_sides(own)) for parent, own in queries.around(facts, queries.stated(plan))]
    for parent, given, taken in sets:
        if bool(given) == bool(taken) or _next_door(parent, given, taken, sets):
            continue
        rules = given or taken
        name = f"`{rules[0].modules.path[-1]}`"
        if given:
            message = f"the sharded output of {name} has no rowwise layer in `{parent}`"
            fact = "every rank continues with a shard of the features"
            how, whole = (
                "`rowwise` on the projection that follows, or gather",
                "colwise(-> replicate)",
            )
        else:
            needs = "needs an input sharded on the features"
            message = f"{name} {needs}, and `{parent}` has no colwise layer"
            fact = "every rank treats its replicated input as a shard of the features"
            how = "`colwise` on the projections before it, or state a replicated input"
            whole = "rowwise(replicate -> replicate)"
        origins = dict.fromkeys(r.origin for r in rules)
        sink.warning("PL160", message, *origins, facts=[fact], help=f"put {how}: `{whole}`")


_Sets = list[tuple[Modules, list[TensorRule], list[TensorRule]]]


def _sides(own: tuple[TensorRule, ...]) -> tuple[list[TensorRule], list[TensorRule]]:
    linears = [r for r in own if r.modules.module.kind == "linear"]
    return [r for r in linears if queries.splits_output(r)], [
        r for r in linears if queries.takes_split(r)
    ]


def _next_door(
    parent: Modules, given: list[TensorRule], taken: list[TensorRule], sets: _Sets
) -> bool:
    """Whether the other side is a sibling of the parent, as in BERT's `attention.{self,output}`.

    This holds only where the parent has no other linear, which might be the one without a rule. An
    entry of a list counts as a sibling of the list: `to_out[0]` beside `to_q`, `net[2]` beside
    `net[0].proj`.
    """
    at = _home(parent)
    beside = [s for s in sets if _meet(_home(s[0]), at) and s[0] is not parent]
    if any(others if given else mine for _, mine, others in beside):
        return True
    linears = sum(c.times for c in parent.module.children if c.module.kind == "linear")
    if len({r.modules.path[-1] for r in given or taken}) < linears:
        return False
    outer = _outer(at)
    if any(_meet(_home(s), outer) and (others if given else mine) for s, mine, others in sets):
        return True
    below = [s for s in sets if _meet(_outer(_home(s[0])), at) or _meet(_outer(_home(s[0])), outer)]
    return any(
        (others and not mine) if given else (mine and not others) for _, mine, others in below
    )


_Path = tuple[Segment, ...]


def _home(parent: Modules) -> _Path:
    """The path of the module that calls the parent's children; a list calls none itself."""
    return _outer(parent.path) if parent.module.kind == "list" else parent.path


def _outer(path: _Path) -> _Path:
    rest = path[:-1]
    return rest[:-1] if path and isinstance(path[-1], Indices) else rest


def _meet(one: _Path, two: _Path) -> bool:
    module = Module(cls="", kind="other")
    return Modules(one, module).overlap(Modules(two, module)) is not None


def sequence_layout(plan: Plan, facts: Facts, sink: Sink) -> None:
    """`sequence` treats its input as a shard of the sequence and sums its gradient over the ranks.

    Observed on four processes (torch 2.13, llama): where the sequence is not sharded, the forward
    pass is right and each norm's gradient is too large by a factor of the number of ranks. Where it
    is sharded, the norm after the blocks needs the blocks' rule too.
    """
    if "tensor" in plan.broken:
        return
    rules = queries.stated(plan)
    ends: set[Modules] = set()
    for rule in rules:
        style, module = rule.style, rule.modules.module
        if not isinstance(style, Sequence) or module.kind == "embedding" or module.children:
            continue
        peers = [r for r in rules if r.axis == rule.axis]
        if _beside_split(rule, peers):
            continue  # it works on heads, which a projection beside it splits
        if not any(_splits(r, style.dim) for r in peers):
            if module.parameters:
                _whole(rule, style.dim, plan, sink)
        elif module.kind == "norm":
            ends |= set(_bare_ends(rule, peers, facts))
    for norm in sorted(ends, key=str):
        marks = [r.origin for r in rules if isinstance(r.style, Sequence)]
        sink.warning(
            "PL162",
            f"`{norm}` gets sequence-sharded activations and has no rule",
            *(Label(span=s, text="these have one") for s in dict.fromkeys(marks)),
            facts=[f"`{norm}` is a {norm.module.cls} with a replicated weight"],
            help=f"`{norm} : sequence`",
        )


def _beside_split(rule: TensorRule, peers: Iterable[TensorRule]) -> bool:
    depth = len(rule.modules.path)
    parent = Modules(rule.modules.path[:-1], rule.modules.module)
    split = (r for r in peers if queries.splits_output(r) and len(r.modules.path) == depth > 1)
    return any(r.modules.within(parent) for r in split)


def _splits(rule: TensorRule, dim: int) -> bool:
    """Whether a rule takes or returns an activation that is sharded along a dim."""
    made = contract(rule.style)
    flows = () if made.sums else (*made.takes, *made.gives)
    return any(Shard(dim) in flow.forward for flow in flows)


def _whole(rule: TensorRule, dim: int, plan: Plan, sink: Sink) -> None:
    over = queries.ranks(plan, rule)
    sink.warning(
        "PL163",
        f"`{rule.modules}` expects an input sharded on dim {dim}, and the plan shards nothing "
        "on that dim",
        Label(span=rule.origin, text="treats a replicated input as a shard"),
        queries.axis_label(plan, rule),
        facts=[f"the forward pass is right; the gradient of its weight is {over} times too large"],
        help=f"shard the activations: `rowwise(-> shard({dim}), local = false)` on the embedding "
        "and at the end of each attention and mlp; or remove this rule",
    )


def _bare_ends(rule: TensorRule, peers: list[TensorRule], facts: Facts) -> Iterable[Modules]:
    """Norms without a rule beside a list of blocks that returns a sharded sequence."""
    path = rule.modules.path
    if len(path) < 3 or not isinstance(path[-2], Indices):
        return
    block = Modules(path[:-1], rule.modules.module)
    handed = any(
        isinstance(r.style, Rowwise) and r.style.output == Shard(1) and r.modules.within(block)
        for r in peers
    )
    if not handed or any(isinstance(r.style, Output) for r in peers):
        return
    for holder in facts.model.below():
        if holder.key != block.key[:-2]:
            continue
        for norm in holder.children:
            plain = norm.module.kind == "norm" and norm.module.parameters
            if plain and not any(r.modules.overlap(norm) for r in peers):
                yield norm
