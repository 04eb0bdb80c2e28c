"""PL220, PL221, PL223: weights that hold several projections."""

from collections.abc import Iterator

from planc.checks import queries
from planc.diagnostics.diagnostic import Label, Sink, one_of
from planc.ir.nodes import Plan, TensorRule
from planc.model.facts import Facts, Parameter
from planc.ops.contract import Split
from planc.ops.styles import Colwise, Replicate, Rowwise, Shard, style_name


def packed_parts(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A rank holds a shard of each part: every part divides, and the parts cover the dim."""
    for rule in queries.sharding_rules(plan.tensor):
        if _gathers(rule, sink):
            continue
        for parameter, split in _splits(rule):
            size = parameter.shape[split.dim]
            if isinstance(split.parts, tuple) and sum(split.parts) != size:
                sink.error(
                    "PL221",
                    f"the parts of `{rule.modules}.{parameter.name}` add up to "
                    f"{sum(split.parts):,}, and its dim {split.dim} is {size:,}",
                    rule.origin,
                    facts=[f"parts = {list(split.parts)}"],
                    help="give the size of every part by fields of the model's configuration "
                    "(`config.NAME`) or by integers of the module around (`parent.NAME`)",
                )
                break
            if rule in queries.active(plan) and _uneven(rule, parameter, split, plan, sink):
                break


def _splits(rule: TensorRule) -> Iterator[tuple[Parameter, Split]]:
    """The parameters that a rule shards, where it has parts or bare parameters."""
    plain = isinstance(rule.style, Colwise | Rowwise) and rule.style.parts == 1
    for parameter in rule.modules.module.parameters:
        split = rule.split(parameter)
        if split is not None and not plain:
            yield parameter, split


def _uneven(rule: TensorRule, parameter: Parameter, split: Split, plan: Plan, sink: Sink) -> bool:
    size = parameter.shape[split.dim]
    parts = split.parts
    sizes = parts if isinstance(parts, tuple) else (size // parts,)
    over = queries.ranks(plan, rule)
    whole = size % parts if isinstance(parts, int) else 0
    bad = next((s for s in sizes if s % over), None)
    if not whole and bad is None:
        return False
    name = f"`{rule.modules}.{parameter.name}`"
    if whole:
        message = (
            f"dim {split.dim} of {name} is {size:,}, which is not divisible into {parts} "
            "equal parts"
        )
        advice = "give the size of each part: `parts = [a, b, c]`"
    else:
        what = (
            f"a part of {bad:,}" if split.is_packed else f"{bad:,} pairs" if parts != 1 else "dim"
        )
        what = f"dim {split.dim}, of {bad:,}," if what == "dim" else what
        message = f"{what} of {name} cannot be split over {rule.axis} = {over}"
        choices = [n for n in queries.divisors(min(sizes), 64) if not any(s % n for s in sizes)]
        advice = f"{rule.axis} can be {one_of(map(str, choices))} here"
    marks = (Label(span=rule.origin, text="split here"), queries.axis_label(plan, rule))
    sink.error(
        "PL220", message, *marks, facts=[f"its shape is {list(parameter.shape)}"], help=advice
    )
    return True


def _gathers(rule: TensorRule, sink: Sink) -> bool:
    """Whether a layout that does not know its parts would gather or shard a packed weight."""
    style = rule.style
    if not isinstance(style, Colwise | Rowwise) or style.parts == 1 or style.interleaved:
        return False
    name = style_name(style)
    if isinstance(style, Rowwise) and not isinstance(style.input, Shard):
        problem = "its input is replicated and would be sharded as one tensor, not part by part"
    elif isinstance(style, Colwise) and isinstance(style.output, Replicate):
        problem = "its output would be gathered rank by rank, not part by part"
    elif isinstance(style, Colwise) and not style.local:
        problem = "its output is returned as a DTensor, whose layout has no parts"
    else:
        return False
    sink.error(
        "PL223",
        f"`{rule.modules}` is sharded in parts, and {problem}",
        rule.origin,
        help=f"for replicated activations remove `parts`: `{name}(-> replicate)`"
        if isinstance(style, Colwise)
        else "for replicated activations remove `parts`: `rowwise(replicate -> replicate)`",
    )
    return True
