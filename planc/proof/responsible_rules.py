"""The lines of a plan that are responsible for a module, for layout flow and verify."""

from collections.abc import Iterable, Iterator

from planc.diagnostics.diagnostic import Label
from planc.diagnostics.source import Span
from planc.infer.apply_adapters import NAME, styles
from planc.ir.nodes import Plan
from planc.model.facts import Modules, below

RuleSpans = list[tuple[Modules, Span]]


def rule_labels(name: str, plan: Plan) -> Iterator[Label]:
    """The tensor and loss rules for a module, else those inside it, else those for one around it.

    For a module around it, the rules for its direct children count too: a module without a rule
    takes the outputs of its siblings.

    Args:
        name: the torch name of a module of the plan's model; empty for the model.
    """
    known = [(r.modules, r.origin) for r in plan.loss_rules]
    known += [(r.modules, r.origin) for r in plan.experts]
    known += [(r.modules, r.origin) for r in (*plan.tensor, *styles(plan))]
    direct = _direct(name, known)
    anywhere = ((m, o) for m, o in known if any(below(n, name) for n in m.names()))
    inside = _right_inside(name, known) or list(anywhere)
    if direct or inside:
        yield from _labels(direct or inside)
        return
    for at in holders(name):
        around = _direct(at, known) or (_right_inside(at, known) if at else [])
        if around:
            yield from _labels(around)
            return


def unit_labels(name: str, plan: Plan) -> Iterator[Label]:
    """The FSDP unit of a module: the module itself, or the nearest enclosing unit."""
    known = [(m, u.origin) for u in (plan.fsdp.units if plan.fsdp else ()) for m in u.members]
    for at in (name, *holders(name)):
        origins = dict.fromkeys(origin for _, origin in _direct(at, known))
        if origins:
            label = "its unit" if at == name else f"the unit of {at or 'the model'}"
            yield from (Label(span=span, text=label) for span in origins)
            return


def holders(name: str) -> Iterator[str]:
    """The modules around a module, the nearest first and the model, `""`, last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _direct(name: str, known: RuleSpans) -> RuleSpans:
    return [(modules, origin) for modules, origin in known if modules.has(name)]


def _right_inside(name: str, known: RuleSpans) -> RuleSpans:
    count = len(name.split(".")) + 1 if name else 1
    return [
        (modules, origin)
        for modules, origin in known
        if len(modules.path) == count and any(below(n, name) for n in modules.names())
    ]


def _labels(owned_spans: Iterable[tuple[Modules, Span]]) -> Iterator[Label]:
    """One label per line; an adapter's label has the name `lora_A` or `lora_B`, not `default`."""
    for origin, modules in {origin: modules for modules, origin in owned_spans}.items():
        path = [s for s in modules.path if s != NAME]
        yield Label(span=origin, text=f"decides `{path[-1]}`" if path else "")
