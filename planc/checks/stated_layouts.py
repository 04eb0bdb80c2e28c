"""PL160 to PL162: stated layouts, judged by what flows between modules at the real size."""

from planc.checks.queries import several
from planc.diagnostics.diagnostic import Sink
from planc.infer.infer_layouts import LayoutClash, layout_errors
from planc.ir.nodes import Plan, TensorRule
from planc.model.facts import Facts
from planc.ops.styles import Input, Output, Sequence, style_text


def stated_layouts(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Reports where the rules of sections that state all layouts do not go together, and the rules
    that they lack; no finding where the data flow of the model is not known.

    Args:
        plan, facts: before adapters are in them.
    """
    if "tensor" in plan.broken:
        return
    lacking: dict[str, list[TensorRule]] = {}
    for error in layout_errors(plan, facts):
        if isinstance(error, LayoutClash):
            sink.warning(
                "PL160",
                "stated layouts do not go with what flows between the modules",
                *error.origins,
                facts=[error.text],
                help="state how the weights are split, and `sequence = auto`: planc infers layouts",
            )
        else:
            lacking.setdefault(style_text(error.style), []).append(error)
    for style, rules in lacking.items():
        _report(style, rules, sink)


def _report(text: str, rules: list[TensorRule], sink: Sink) -> None:
    """Rules of one style that must follow, and are not stated."""
    style = rules[0].style
    cut = isinstance(style, Input | Output) or (isinstance(style, Sequence) and not style.local)
    places = several(rule.modules for rule in rules)
    reasons = dict.fromkeys(rule.inferred.text for rule in rules if rule.inferred)
    lines, facts = dict.fromkeys(rule.origin for rule in rules), list(reasons)[:3]
    help = f"write `{text}` there; or write only the splits of weights, with `sequence = auto`"
    if cut:
        message = f"no rule states the layouts of the inputs and outputs of {places}"
        sink.warning("PL162", message, *lines, facts=facts, help=help)
    else:
        message = f"no rule sums the partial gradients of {places}"
        sink.warning("PL161", message, *lines, facts=facts, help=help)
