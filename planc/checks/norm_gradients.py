"""PL161, PL162: norms without a rule whose input is sharded."""

from __future__ import annotations

import re
from collections.abc import Iterator

from planc.checks.queries import active, around, splits_output
from planc.diagnostic import Label, Sink
from planc.model.facts import Facts, Modules
from planc.ops.styles import Rowwise, Sequence, Shard
from planc.plan.ir import Plan, TensorRule

_OF_HEADS = re.compile(r"(^|_)[qkv](_|$)|query|key|value")


def norm_gradients(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A replicated weight applied to a shard of the heads or of the sequence gets a partial
    gradient.

    Without a rule nothing all-reduces these gradients, and the copies of the weight diverge.
    Observed on qwen3 (tp 2, torch 2.13) without a rule for q_norm: losses look right, and after
    three steps the copies of the weight differ by 4%.
    """
    if "tensor" in plan.broken:
        return
    rules = active(plan)
    for parent, own in around(facts, rules):
        split = [r for r in own if splits_output(r) and r.modules.module.kind == "linear"]
        sequence = [r for r in own if isinstance(r.style, Sequence) and not r.style.local]
        heads = bool(split) and not _is_block(parent)
        for norm in _without_rule(parent, own):
            if heads and not _before(norm, parent, split):
                _on_heads(norm, split, sink)
            elif sequence and _residual_is_split(parent, rules):
                _on_sequence(norm, sequence, sink)


def _without_rule(parent: Modules, own: tuple[TensorRule, ...]) -> Iterator[Modules]:
    for child in parent.module.children:
        if child.module.kind != "norm" or not child.module.parameters:
            continue
        at = Modules((*parent.path, child.segment), child.module)
        if not any(r.modules.overlap(at) for r in own):
            yield at


def _before(norm: Modules, parent: Modules, split: list[TensorRule]) -> bool:
    """Whether a norm runs before every sharded layer, so that its input is replicated.

    A norm of queries or keys always has a sharded input.
    """
    if _OF_HEADS.search(str(norm.path[-1])):
        return False
    order = [child.segment for child in parent.module.children]
    after = [order.index(r.modules.path[-1]) for r in split if r.modules.path[-1] in order]
    return bool(after) and order.index(norm.path[-1]) < min(after)


def _is_block(parent: Modules) -> bool:
    """Whether attention is a submodule: norms beside it see the residual stream, not heads.

    OPT's blocks hold the two linears of their MLP directly.
    """
    return any(
        below.module.kind == "linear" and len(below.path) > len(parent.path) + 1
        for below in parent.below()
    )


def _residual_is_split(parent: Modules, rules: tuple[TensorRule, ...]) -> bool:
    """Whether some submodule outputs a sharded sequence, as under sequence parallelism."""
    return any(
        isinstance(r.style, Rowwise)
        and isinstance(r.style.output, Shard)
        and r.style.output.dim == 1
        and r.modules.within(parent)
        for r in rules
    )


def _on_heads(norm: Modules, split: list[TensorRule], sink: Sink) -> None:
    sink.warning(
        "PL161",
        f"`{norm}` sees only the heads of its rank, and no rule sums its gradient",
        *(Label(span=s, text="split here") for s in dict.fromkeys(r.origin for r in split)),
        facts=[f"`{norm}` is a {norm.module.cls} with a replicated weight and no rule"],
        help=f"`{norm.path[-1]} : sequence(dim = 2, local = true)`, where dim is the dim of the "
        "heads in the norm's input (1 if they are transposed before it)",
    )


def _on_sequence(norm: Modules, sequence: list[TensorRule], sink: Sink) -> None:
    sink.warning(
        "PL162",
        f"`{norm}` gets sequence-sharded activations and has no rule",
        *(Label(span=s, text="these have one") for s in dict.fromkeys(r.origin for r in sequence)),
        facts=[f"`{norm}` is a {norm.module.cls} with a replicated weight"],
        help=f"`{norm.path[-1]} : sequence`",
    )
