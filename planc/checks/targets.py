"""PL150, PL152, PL222, PL224, PL225, PL350 to PL352, PL433, PL677, PL678: names without a use."""

from collections.abc import Iterator

from planc.checks.queries import active, axis_label, divisors, ranks, sharding_rules
from planc.diagnostics.diagnostic import Label, Sink, did_you_mean, one_of
from planc.diagnostics.source import Span
from planc.ir.nodes import Plan, TensorRule
from planc.model.facts import Facts, Modules
from planc.model.module_table import (
    BATCHED_EXPERTS,
    FUSED_EXPERTS,
    GROUPED,
    INTEGER_ATTRIBUTES,
    SAME,
    TRANSPOSED_EXPERTS,
)
from planc.ops import styles as ir
from planc.ops.base import AxisRole
from planc.ops.contract import unfit
from planc.ops.styles import PARAMETERLESS, Attributes, Experts, Parameters, Replicated, Shard


def axis_use(plan: Plan, facts: Facts, sink: Sink) -> None:
    """The ranks of a tensor axis hold shards of one weight; those of a data axis hold replicas."""
    section = plan.fsdp
    used = {*section.shard, *section.replicate} if section else set()
    rules = active(plan)
    for axis in dict.fromkeys(r.axis for r in rules):
        if section is not None and axis in used:
            sink.error(
                "PL350",
                f"tensor parallelism and FSDP both work over `{axis}`",
                Label(span=section.origin, text="shards over it"),
                Label(span=next(r.origin for r in rules if r.axis == axis), text="splits over it"),
                help="use different axes",
            )
    split = list(sharding_rules(rules))
    for i, rule in enumerate(split):
        for other in split[:i]:
            both = rule.modules.overlap(other.modules)
            # torch 2.13 refuses it: `distribute_tensor` takes no DTensor of another mesh, and
            # no style works over two dimensions; shapes and bytes would be right
            if other.axis != rule.axis and both is not None:
                sink.error(
                    "PL352",
                    f"`{both}` is sharded over `{other.axis}` and over `{rule.axis}`",
                    Label(span=rule.origin, text=f"over {rule.axis}"),
                    Label(span=other.origin, text=f"over {other.axis}"),
                    help="keep one of the two",
                )
    _sequence_axes(plan, sink)


def _sequence_axes(plan: Plan, sink: Sink) -> None:
    """PL351: ranks that would compute the same, because nothing slices their sequences."""
    section = plan.fsdp
    used = {*section.shard, *section.replicate} if section else set()
    for context in plan.mesh.of_role(AxisRole.SEQUENCE):
        sliced = any(r.axis == context.name for r in plan.context) or "context" in plan.broken
        if section is None or context.size == 1 or context.name not in used or sliced:
            continue
        sink.error(
            "PL351",
            f"the {context.size} ranks of {context.name} read the same batch, and no section "
            "says that its sequences are sliced",
            context.label,
            Label(span=section.origin, text="only parameters are sharded over it"),
            facts=["its ranks would all compute the same"],
            help=f"write `context on {context.name} {{ attention = all_gather }}`, or `script` "
            f"where the script slices the sequences itself; or set `{context.name} = 1`",
        )


def uncalled_modules(plan: Plan, facts: Facts, sink: Sink) -> None:
    """A ModuleList has no forward: torch refuses it as a unit, and a style, checkpoint or compile
    target on it silently has no effect.

    Source: `_validate_module` in torch.distributed.fsdp, and torch.compile on four processes.
    """
    for modules, word, origin in _targets(plan):
        if modules.module.container:
            sink.error(
                "PL152",
                f"`{modules}` is a {modules.module.cls}: it is never called, so {word} it has "
                "no effect",
                origin,
                help=f"name its entries: `{modules}.*`",
            )


def _targets(plan: Plan) -> Iterator[tuple[Modules, str, Span]]:
    for rule in plan.tensor:
        yield rule.modules, "a style on", rule.origin
    for target in plan.checkpoint_rules:
        yield target.modules, "checkpointing", target.origin
    for compiled in plan.compilations:
        yield compiled.modules, "compiling", compiled.origin
    for unit in plan.fsdp.units if plan.fsdp else ():
        for member in unit.members:
            yield member, "sharding", unit.origin


def style_targets(plan: Plan, facts: Facts, sink: Sink) -> None:
    """torch's colwise and rowwise styles take nn.Linear and nn.Embedding, its sequence style
    leaves.

    Source: `_apply` of the styles in torch.distributed.tensor.parallel.style. transformers' Conv1D,
    a linear with a transposed weight, has planc's own style.
    """
    for rule in plan.tensor:
        unfitness = unfit(rule.style, rule.modules.module)
        if unfitness is None:
            continue
        reason, advice = unfitness
        module = rule.modules.module
        message = f"`{rule.modules}` does not support `{ir.style_name(rule.style)}`: {reason}"
        sink.error(
            "PL150",
            message,
            rule.origin,
            facts=[f"`{rule.modules}` is a {module.cls}"],
            help=advice,
        )


def module_parameters(plan: Plan, facts: Facts, sink: Sink) -> None:
    """`parameters` and `experts` name a module's own parameters; `experts` must name all of them.

    A replicated parameter next to sharded ones is added once per rank.
    """
    for rule in plan.tensor:
        if isinstance(rule.style, Parameters | Experts):
            _names(rule, rule.style, sink)
        if isinstance(rule.style, Replicated) and rule.style.summed:
            _check_inner_styles(rule, plan, sink)


def _names(rule: TensorRule, style: Parameters | Experts, sink: Sink) -> None:
    parameters = {p.name: p for p in rule.modules.module.parameters}
    for name, stated in style.layouts:
        if name not in parameters:
            there = (
                one_of((f"`{n}`" for n in parameters), last="and")
                if parameters
                else "no parameters"
            )
            sink.error(
                "PL222",
                f"`{rule.modules}` has no parameter `{name}`",
                rule.origin,
                facts=[f"it is a {rule.modules.module.cls}, and has {there}"],
                help=did_you_mean(name, parameters),
            )
            continue
        dims = len(parameters[name].shape)
        if isinstance(stated.layout, Shard) and not -dims <= stated.layout.dim < dims:
            message = f"`{rule.modules}.{name}` has no dim {stated.layout.dim}"
            sink.error(
                "PL222",
                message,
                rule.origin,
                facts=[f"its shape is {list(parameters[name].shape)}"],
            )
    left = [n for n in parameters if n not in dict(style.layouts)]
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


def _check_inner_styles(rule: TensorRule, plan: Plan, sink: Sink) -> None:
    """A module with `replicate(gradient = sum)` around a module whose weights have a style."""
    for other in plan.tensor:
        decides = not isinstance(other.style, PARAMETERLESS) and other.style != Replicated()
        if decides and other.modules.deeper(rule.modules):
            sink.error(
                "PL224",
                f"`{other.modules}` is inside `{rule.modules}`, which is replicated as a whole",
                Label(span=other.origin, text="sets its style"),
                Label(span=rule.origin, text="sets the style of all modules inside"),
                help="put `replicate(gradient = sum)` on the modules that have no style",
            )
            return


_NO_COUNTS = (*SAME, GROUPED, FUSED_EXPERTS, BATCHED_EXPERTS, TRANSPOSED_EXPERTS)

_COUNTS = tuple(name for name in INTEGER_ATTRIBUTES if name not in SAME)


def split_attributes(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Reports names in `attributes` that are no integers of the module.

    Only integers that decide how features are split, such as a number of heads, can be named.
    """
    for rule in plan.tensor:
        for name in rule.style.names if isinstance(rule.style, Attributes) else ():
            value = rule.modules.module.fact(name)
            if value is None:
                _missing(rule, name, sink)
            elif value % ranks(plan, rule):
                over = ranks(plan, rule)
                sink.error(
                    "PL678",
                    f"`{rule.modules}` has {name} = {value:,}, which cannot be split over "
                    f"{rule.axis} = {over}",
                    Label(span=rule.origin, text="split here"),
                    axis_label(plan, rule),
                    help=f"{rule.axis} can be {one_of(map(str, divisors(value, 64)))} here",
                )


def _missing(rule: TensorRule, name: str, sink: Sink) -> None:
    module = rule.modules.module
    counts = {n: v for n, v in module.facts if n not in _NO_COUNTS}
    there = one_of((f"`{n}` = {v:,}" for n, v in counts.items()), last="and") or "none of them"
    sink.error(
        "PL677",
        f"`{rule.modules}` has no attribute `{name}` to split",
        rule.origin,
        facts=[
            f"the attributes that planc knows of libraries: {', '.join(_COUNTS)}",
            f"it is a {module.cls}, which has {there}",
        ],
        help=did_you_mean(name, counts, "name the attribute by which its code splits features")
        if counts
        else "remove the rule where its code infers the number of heads from the features",
    )
