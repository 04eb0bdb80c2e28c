"""PL222, PL224, PL225: rules for bare parameters that do not exist; parameters without a rule."""

from planc.diagnostic import Label, Sink, did_you_mean, one_of
from planc.model.facts import Facts
from planc.ops.styles import Experts, MlaKv, Parameters, Replicated, Shard, style_name
from planc.plan.ir import Plan, TensorRule


def module_parameters(plan: Plan, facts: Facts, sink: Sink) -> None:
    """`parameters` and `experts` name a module's own parameters; `experts` must name all of them.

    A replicated parameter next to sharded ones is added once per rank.
    """
    for rule in plan.tensor:
        if isinstance(rule.style, Parameters | Experts):
            _names(rule, rule.style, sink)
        if isinstance(rule.style, Replicated) and rule.style.summed:
            _inside(rule, plan, sink)


def _names(rule: TensorRule, style: Parameters | Experts, sink: Sink) -> None:
    own = {p.name: p for p in rule.modules.module.parameters}
    for name, stated in style.layouts:
        if name not in own:
            there = one_of((f"`{n}`" for n in own), last="and") if own else "no parameters"
            sink.error(
                "PL222",
                f"`{rule.modules}` has no parameter `{name}`",
                rule.origin,
                facts=[f"it is a {rule.modules.module.cls}, and has {there}"],
                help=did_you_mean(name, own),
            )
            continue
        dims = len(own[name].shape)
        if isinstance(stated.layout, Shard) and not -dims <= stated.layout.dim < dims:
            sink.error(
                "PL222",
                f"`{rule.modules}.{name}` has no dim {stated.layout.dim}",
                rule.origin,
                facts=[f"its shape is {list(own[name].shape)}"],
            )
    left = [n for n in own if n not in dict(style.layouts)]
    if left and isinstance(style, Experts):
        names = one_of((f"`{n}`" for n in left), last="and")
        sink.error(
            "PL225",
            f"`experts` on `{rule.modules}` has no rule for {names}",
            rule.origin,
            facts=[
                "every rank would use the full tensor, and the sum would count it once per rank"
            ],
            help=f"name it too: `{left[0]} = shard(1)`; use `partial` for a parameter that is "
            "added to the sum",
        )


def _inside(rule: TensorRule, plan: Plan, sink: Sink) -> None:
    """A module with `replicate(gradient = sum)` around a module whose weights have a style."""
    for other in plan.tensor:
        deeper = len(other.modules.path) > len(rule.modules.path)
        decides = not isinstance(other.style, MlaKv) and other.style != Replicated()
        decides = decides and style_name(other.style) not in ("input", "output", "attributes")
        if deeper and decides and other.modules.within(rule.modules):
            sink.error(
                "PL224",
                f"`{other.modules}` is inside `{rule.modules}`, which is replicated as a whole",
                Label(span=other.origin, text="sets its style"),
                Label(span=rule.origin, text="sets the style of all modules inside"),
                help="put `replicate(gradient = sum)` on the modules that have no style",
            )
            return
