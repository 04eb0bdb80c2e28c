"""PL162, PL163: norms whose input is sharded on the sequence dim, and rules whose input is not."""

from collections.abc import Iterable

from planc.checks.queries import active, axis_label, ranks, splits_output
from planc.diagnostic import Label, Sink
from planc.model.facts import Facts, Modules
from planc.model.indices import Indices
from planc.ops.styles import Colwise, Input, Output, Redistribution, Rowwise, Sequence, Shard
from planc.plan.ir import Plan, TensorRule


def sequence_layout(plan: Plan, facts: Facts, sink: Sink) -> None:
    """`sequence` treats its input as a shard of the sequence and sums its gradient over the ranks.

    Observed on four processes (torch 2.13, llama): where the sequence is not sharded, the forward
    pass is right and each norm's gradient is too large by a factor of the number of ranks. Where it
    is sharded, the norm after the blocks needs the blocks' rule too.
    """
    if "tensor" in plan.broken:
        return
    rules = active(plan)
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
    split = (r for r in peers if splits_output(r) and len(r.modules.path) == depth > 1)
    return any(r.modules.within(parent) for r in split)


def _splits(rule: TensorRule, dim: int) -> bool:
    """Whether a rule takes or returns an activation that is sharded along a dim."""
    changes: tuple[Redistribution | None, ...]
    match rule.style:
        case Colwise() | Rowwise():
            return Shard(dim) in (rule.style.input, rule.style.output)
        case Input():
            changes = (*rule.style.positional, *(c for _, c in rule.style.named))
        case Output():
            changes = rule.style.positional
        case _:
            return False
    return any(c is not None and Shard(dim) in (c.source, c.target) for c in changes)


def _whole(rule: TensorRule, dim: int, plan: Plan, sink: Sink) -> None:
    over = ranks(plan, rule)
    sink.warning(
        "PL163",
        f"`{rule.modules}` expects an input sharded on dim {dim}, and the plan shards nothing "
        "on that dim",
        Label(span=rule.origin, text="treats a replicated input as a shard"),
        axis_label(plan, rule),
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
        for child in holder.module.children:
            norm = Modules((*holder.path, child.segment), child.module)
            plain = child.module.kind == "norm" and child.module.parameters
            if plain and not any(r.modules.overlap(norm) for r in peers):
                yield norm
