"""PL160 to PL162: stated layouts, judged by what flows between modules at the real size."""

from planc.checks.queries import several
from planc.diagnostic import Label, Sink
from planc.model.facts import Facts
from planc.ops.styles import Input, Output, Sequence, style_text
from planc.plan.infer_layouts import Contradiction, contradicted
from planc.plan.ir import Plan, TensorRule


def stated_layouts(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Reports where the rules of sections that state all layouts do not go together, and the rules
    that they lack; no finding where the data flow of the model is not known.

    Args:
        plan, facts: before adapters are in them.
    """
    if "tensor" in plan.broken:
        return
    lacking: dict[str, list[TensorRule]] = {}
    for found in contradicted(plan, facts):
        if isinstance(found, Contradiction):
            sink.warning(
                "PL160",
                "stated layouts do not go with what flows between the modules",
                *(Label(span=s) for s in dict.fromkeys(rule.origin for rule in found.rules)),
                facts=[found.text],
                help="state how the weights are split, and `sequence = auto`: planc infers layouts",
            )
        else:
            lacking.setdefault(style_text(found.style), []).append(found)
    for style, rules in lacking.items():
        _report(style, rules, sink)


def _report(text: str, rules: list[TensorRule], sink: Sink) -> None:
    """Rules of one style that must follow, and are not stated."""
    style = rules[0].style
    cut = isinstance(style, Input | Output) or (isinstance(style, Sequence) and not style.local)
    places = several(rule.modules for rule in rules)
    reasons = dict.fromkeys(rule.inferred.text for rule in rules if rule.inferred)
    labels = [Label(span=s) for s in dict.fromkeys(rule.origin for rule in rules)]
    facts = list(reasons)[:3]
    help = f"write `{text}` there; or how the weights are split alone, with `sequence = auto`"
    if cut:
        message = f"no rule states the layout of what {places} takes or gives"
        sink.warning("PL162", message, *labels, facts=facts, help=help)
    else:
        message = f"no rule sums the gradient of {places}, of which each rank has a summand"
        sink.warning("PL161", message, *labels, facts=facts, help=help)
