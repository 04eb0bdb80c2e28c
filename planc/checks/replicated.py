"""PL161, PL162, PL204: norms and parameters that tensor parallelism leaves replicated."""

import re
from collections.abc import Iterator

from planc.checks.queries import active, around, ranks, several, splits_output, stated
from planc.diagnostic import Label, Sink, one_of
from planc.model.facts import Facts, Modules
from planc.ops.phrases import braced
from planc.ops.styles import Rowwise, Sequence, Shard
from planc.plan.apply_adapters import styles
from planc.plan.experts import expert_styles
from planc.plan.ir import Plan, TensorRule
from planc.plan.parameter_owners import owned
from planc.source import Span

Spans = tuple[Span, ...]
_OF_HEADS = re.compile(r"(^|_)[qkv](_|$)|query|key|value")


def norm_gradients(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A replicated weight applied to a shard of heads or of the sequence gets a partial gradient.

    Without a rule nothing all-reduces these gradients, and the copies of the weight diverge.
    Observed on qwen3 (tp 2, torch 2.13) without a rule for q_norm: losses look right, and after
    three steps the copies of the weight differ by 4%.
    """
    if "tensor" in plan.broken:
        return
    rules = stated(plan)
    on_heads: dict[Spans, list[Modules]] = {}
    on_sequence: dict[Spans, list[Modules]] = {}
    for parent, own in around(facts, rules):
        split = [r for r in own if splits_output(r) and r.modules.module.kind == "linear"]
        sequence = [r for r in own if isinstance(r.style, Sequence) and not r.style.local]
        heads = bool(split) and not _is_block(parent)
        for norm in _without_rule(parent, own):
            if heads and not _replicated_input(norm, parent, split):
                on_heads.setdefault(_spans(split), []).append(norm)
            elif sequence and _residual_is_split(parent, rules):
                on_sequence.setdefault(_spans(sequence), []).append(norm)
    for spans, norms in on_heads.items():
        whose = _verb(norms, "its", "their")
        sink.warning(
            "PL161",
            f"{several(norms)} {_verb(norms, 'sees', 'see')} only the heads of {whose} rank, and "
            f"no rule sums {whose} gradient",
            *(Label(span=s, text="split here") for s in spans),
            facts=[_replicated_weights(norms)],
            help=f"`{_last(norms)} : replicate(gradient = sum)`",
        )
    for spans, norms in on_sequence.items():
        sink.warning(
            "PL162",
            f"{several(norms)} {_verb(norms, 'gets', 'get')} sequence-sharded activations and "
            f"{_verb(norms, 'has', 'have')} no rule",
            *(Label(span=s, text="these have one") for s in spans),
            facts=[_replicated_weights(norms)],
            help=f"`{_last(norms)} : sequence`",
        )


def _spans(rules: list[TensorRule]) -> Spans:
    return tuple(dict.fromkeys(r.origin for r in rules))


def _without_rule(parent: Modules, own: tuple[TensorRule, ...]) -> Iterator[Modules]:
    for at in parent.children:
        if at.module.kind != "norm" or not at.module.parameters:
            continue
        if not any(r.modules.overlap(at) for r in own):
            yield at


def _replicated_input(norm: Modules, parent: Modules, split: list[TensorRule]) -> bool:
    """Whether a norm runs before a sharded layer, and after none whose output stays sharded.

    The order is that of definition: the last linear layer before such a norm, if there is one,
    returns all features, and the next one takes them. A norm of queries or keys always has a
    sharded input, and so may a norm that is defined last.
    """
    if _OF_HEADS.search(str(norm.path[-1])):
        return False
    order = [child.segment for child in parent.module.children]
    linears = [c.segment for c in parent.module.children if c.module.kind in ("linear", "conv1d")]
    sharded = {r.modules.path[-1] for r in split}
    at = order.index(norm.path[-1])
    before = [name for name in linears if order.index(name) < at]
    after = [name for name in linears if order.index(name) > at]
    return bool(sharded.intersection(after)) and not sharded.intersection(before[-1:])


def _is_block(parent: Modules) -> bool:
    """Whether attention is a submodule: its norms see no heads. OPT's blocks hold MLP linears."""
    return any(
        below.module.kind == "linear" and len(below.path) > len(parent.path) + 1
        for below in parent.below()
    )


def _residual_is_split(parent: Modules, rules: tuple[TensorRule, ...]) -> bool:
    split = (r for r in rules if isinstance(r.style, Rowwise) and r.style.output == Shard(1))
    return any(r.modules.within(parent) for r in split)


def _verb(norms: list[Modules], one: str, more: str) -> str:
    return one if len({n.key for n in norms}) == 1 else more


def _replicated_weights(norms: list[Modules]) -> str:
    classes = one_of(dict.fromkeys(n.module.cls for n in norms), last="and")
    return f"{_verb(norms, 'it is a', 'each is a')} {classes} with a replicated weight and no rule"


def _last(norms: list[Modules]) -> str:
    """The last names of the modules, as a rule inside their parent writes them."""
    return braced(list(dict.fromkeys(str(n.path[-1]) for n in norms)))


def _splitting(plan: Plan) -> tuple[TensorRule, ...]:
    return (*active(plan), *(r for r in styles(plan) if ranks(plan, r) > 1))


def replicated_parameters(plan: Plan, facts: Facts) -> list[tuple[int, str]] | None:
    """The numbers of elements of parameters that every rank of the tensor axis holds in full, with
    their names as of `Modules`; None where no rule splits anything.
    """
    rules = _splitting(plan)
    every = (*rules, *expert_styles(plan))
    if not rules or "tensor" in plan.broken:
        return None
    whole: list[tuple[int, str]] = []
    shared = _shared(rules[0].axis, plan, facts)
    for modules in facts.model.below():
        for parameter in modules.module.parameters:
            left: list[Modules] = list(modules.outside(shared))
            for rule in every:
                if rule.split(parameter):
                    left = [rest for part in left for rest in part.minus(rule.modules)]
            whole.extend((parameter.numel * len(part), f"{part}.{parameter.name}") for part in left)
    return whole


def unsplit_parameters(plan: Plan, facts: Facts, sink: Sink) -> None:
    """An info: the share of parameters that every rank of the tensor axis holds in full."""
    whole, rules = replicated_parameters(plan, facts) or [], _splitting(plan)
    kept = sum(count for count, _ in whole)
    if not kept:
        return
    share = 100 * kept / facts.root.count
    percent = f"{share:.0f}%" if share >= 10 else f"{share:.2g}%"
    largest = sorted(whole, reverse=True)[:3]
    names = ", ".join(f"{name} {count:,}" for count, name in largest)
    sink.info(
        "PL204",
        f"{percent} of the parameters are replicated over {rules[0].axis} = "
        f"{ranks(plan, rules[0])}",
        facts=[f"the largest: {names}"],
    )


def _shared(axis: str, plan: Plan, facts: Facts) -> list[Modules]:
    section = plan.fsdp
    if section is None or not any(section.extra_axes(part) for part in section.parts):
        return []
    own = ((o.modules, o.spread or o.unit) for o in owned(plan, facts))
    return [m for m, part in own if part and axis in section.axes(part)[0]]
