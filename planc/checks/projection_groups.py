"""PL205: projections that feed the same operation with different output layouts."""

from planc.checks.queries import active, axis_label, inside, parents, ranks, splits_output
from planc.diagnostic import Label, Sink, one_of
from planc.model.facts import Facts, Modules
from planc.ops.styles import Colwise
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
    rules = active(plan)
    seen: set[tuple[Modules, tuple[str, ...]]] = set()
    for rule in rules:
        name = rule.modules.path[-1] if rule.modules.path else ""
        group = next((g for g in _TOGETHER if name in g), ())
        if not group or not splits_output(rule):
            continue
        for parent in parents(facts, rule.modules):
            if (parent, group) not in seen:
                seen.add((parent, group))
                own = [r for r in inside(parent, rules) if isinstance(r.style, Colwise)]
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
    unlike = [n for n in there if not _like(rule, parent, others[n])]
    if not unlike:
        return
    labels: dict[Span, Label] = {
        rule.origin: Label(span=rule.origin, text=f"the output of {name} stays sharded")
    }
    for other in (r for n in unlike for r in others[n]):
        text = f"{other.modules.path[-1]} is not sharded the same way"
        labels.setdefault(other.origin, Label(span=other.origin, text=text))
    sink.warning(
        "PL205",
        f"`{name}` of `{parent}` is sharded over {rule.axis} = {ranks(plan, rule)}, and "
        f"{one_of((f'`{n}`' for n in unlike), last='and')}, which "
        f"{'feeds' if len(unlike) == 1 else 'feed'} the same operation, "
        f"{'is' if len(unlike) == 1 else 'are'} not sharded the same way",
        *labels.values(),
        axis_label(plan, rule),
        facts=[f"{n} has no colwise rule" for n in unlike if not others[n]],
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
