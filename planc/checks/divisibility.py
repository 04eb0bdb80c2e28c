"""PL202, PL203: a dim that does not divide evenly, as an error or as a cost."""

from planc.checks.queries import (
    active,
    axis_label,
    inside,
    legal,
    parents,
    ranks,
    split_dim,
    splits_output,
    takes_split,
    weighted,
)
from planc.diagnostic import Label, Severity, Sink, one_of
from planc.model.facts import Facts
from planc.ops.styles import Colwise, Rowwise, style_name
from planc.plan.ir import Plan, TensorRule

_COSTLY = 0.1
"""Percent. A smaller excess of one rank's shard costs nothing that can be measured."""


def divisibility(plan: Plan, facts: Facts, sink: Sink) -> None:
    """torch shards a dim as torch.chunk does, so the last ranks may hold less.

    Observed on four processes (torch 2.13): a vocabulary of 131 over 2 ranks is right for a rowwise
    embedding and a colwise head. A colwise output that is passed on as a local tensor to a rowwise
    layer fails, because that layer assumes equal shards on all ranks ("must have same reduction
    dim"); with `local = false` it is right. A rank with an empty shard fails in either case.
    """
    for rule in weighted(active(plan)):
        if not isinstance(rule.style, Colwise | Rowwise) or rule.style.parts != 1:
            continue  # PL220 speaks of them
        sizes = [
            (p.name, p.shape[dim])
            for p in rule.modules.module.parameters
            if (dim := split_dim(rule, p)) is not None
        ]
        if not sizes or sizes[0][1] % ranks(plan, rule) == 0 or _by_head(rule, facts):
            continue
        _report(rule, sizes[0][1], plan, facts, sink)


def _by_head(rule: TensorRule, facts: Facts) -> bool:
    """Whether the features are attention heads, which PL201 checks."""
    split = splits_output(rule) or takes_split(rule)
    around = (p.module.fact("head_dim") for p in parents(facts, rule.modules))
    return split and any(size is not None for size in around)


def _report(rule: TensorRule, size: int, plan: Plan, facts: Facts, sink: Sink) -> None:
    over = ranks(plan, rule)
    most = -(-size // over)
    least = max(0, size - most * (over - 1))
    marks = (Label(span=rule.origin, text="split here"), axis_label(plan, rule))
    what = f"`{rule.modules}` splits {size:,} {_features(rule)} over {rule.axis} = {over}"
    partner = _partner(rule, plan, facts)
    if least == 0:
        sink.error(
            "PL202",
            f"{what}, and the last rank gets nothing",
            *marks,
            facts=[f"{most:,} per rank, so {-(-size // most)} ranks hold all of them"],
            help=f"{rule.axis} can be {_choices(size)} here",
        )
    elif isinstance(rule.style, Colwise) and rule.style.local and partner is not None:
        sink.error(
            "PL202",
            f"{what} unevenly, and `{partner.modules}` requires equal shards",
            *marks,
            Label(span=partner.origin, text="uses its output"),
            facts=[f"the first rank gets {most:,}, the last {least:,}"],
            help=f"{rule.axis} can be {_choices(size)}; or return a DTensor (`colwise(local = "
            "false)`), which supports uneven shards",
        )
    else:
        excess = 100 * (most * over - size) / size
        sink.report(
            Severity.WARNING if excess >= _COSTLY else Severity.INFO,
            "PL203",
            f"{what} unevenly: the first rank gets {most:,}, the last {least:,}",
            *marks,
            facts=[
                f"the result is right; the rank with the most holds {excess:.1f}% more than in "
                "an even split"
            ],
            help=f"{style_name(rule.style)} is even for {rule.axis} = {_choices(size)}",
        )


def _features(rule: TensorRule) -> str:
    if rule.modules.module.kind == "embedding":
        return "hidden features" if isinstance(rule.style, Colwise) else "tokens"
    return "output features" if isinstance(rule.style, Colwise) else "input features"


def _partner(rule: TensorRule, plan: Plan, facts: Facts) -> TensorRule | None:
    """The rowwise layer beside a colwise one that takes its output as a local tensor."""
    if not splits_output(rule):
        return None
    beside = (r for at in parents(facts, rule.modules) for r in inside(at, active(plan)))
    return next(filter(takes_split, beside), None)


def _choices(size: int) -> str:
    return one_of(str(n) for n in legal(size, most=64))
