"""PL621 to PL626: the layers that can have fp8 matmuls, and the decisions that exclude them."""

from collections.abc import Iterator
from dataclasses import dataclass

from planc.checks.queries import (
    active,
    axis_label,
    divisors,
    holds,
    looked_up,
    several,
    sharding_rules,
    unit_of,
)
from planc.diagnostics.diagnostic import Label, Sink, one_of
from planc.diagnostics.source import Span
from planc.ir.local_shapes import local_shape, split_by_rules
from planc.ir.nodes import Plan
from planc.model.facts import Facts, Modules
from planc.ops.base import AxisRole
from planc.ops.styles import Custom
from planc.sections.matmul.ops import BLOCK, LowPrecision

_KEEP = "`override {} : none` keeps the parameters' dtype"


@dataclass(frozen=True, slots=True)
class _Found:
    """A finding about layers of one line; `{}` in its texts is for all layers that it is about."""

    code: str
    message: str
    origin: Span
    labels: tuple[Label, ...] = ()
    fact: str = ""
    help: str = _KEEP


def check(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Reports layers that cannot have fp8 matmuls, one finding for all layers of a kind."""
    if "matmul" in plan.broken:
        return
    found: dict[_Found, list[Modules]] = {}
    for op in plan.sections["matmul"]:
        wrong = _kind(op) or _critical_layer(op, plan, facts)
        every = [wrong] if wrong else [*_under(op, plan)]
        for one in every:
            found.setdefault(one, []).append(op.modules)
    for one, layers in found.items():
        named = several(layers)
        sink.error(
            one.code,
            one.message.format(named),
            Label(span=one.origin),
            *one.labels,
            facts=[one.fact] if one.fact else [],
            help=one.help.format(layers[0]),
        )
    if "compile" not in plan.broken and not found:
        _warn_uncompiled(plan, sink)


def _kind(op: LowPrecision) -> _Found | None:
    """The finding for a module that is not an nn.Linear: torchao converts no other module, and its
    layer replaces the forward of a subclass.
    """
    module = op.modules.module
    if module.kind == "linear" and module.cls == "Linear":
        return None
    inside = any(m.module.kind == "linear" for m in op.modules.below())
    own = module.kind == "linear"
    return _Found(
        "PL621",
        message="{} is not an nn.Linear, and torchao converts no other module",
        origin=op.origin,
        fact=f"it is a {module.cls}" + ", whose own forward would be lost" * own,
        help="name the linear layers inside it, as `{}.**<Linear>`"
        if inside and not own
        else "remove it from the rule",
    )


def _critical_layer(op: LowPrecision, plan: Plan, facts: Facts) -> _Found | None:
    """The finding for a linear layer that must keep its precision, with the reason; None for any
    other.
    """
    modules, what = op.modules, ("", "")
    tied = facts.tied_modules
    adapted = plan.adapters.rules if plan.adapters else ()
    role = looked_up(modules, op.modules.module.weight, facts)
    if any(modules.part_inside(rule.modules) is not None for rule in adapted):
        what = "a layer with an adapter", "peft wraps the layer, and its factors are narrow"
    elif any(name in tied for name in modules.names()):
        what = "a layer with a tied weight", "another module reads the same weight unrounded"
    elif "experts" in modules.path:
        what = (
            "an expert of its own",
            "a router sends it any number of tokens, and fp8 matmuls need multiples of 16",
        )
    elif role == "a router":
        what = role, "a rounded score chooses another expert"
    elif role is not None:
        what = role, "no later layer corrects an error of its outputs"
    if not what[0]:
        return None
    message = f"{{}}: {what[0]} keeps its precision"
    return _Found("PL622", message=message, origin=op.origin, fact=what[1])


def _under(op: LowPrecision, plan: Plan) -> Iterator[_Found]:
    """Yields conflicts with the decisions of other sections."""
    yield from _styles(op, plan)
    if "tensor" in plan.broken:
        return
    yield from _sizes(op, plan)
    yield from _scales(op, plan)
    if op.gather and "fsdp" not in plan.broken:
        yield from _gather_conflicts(op, plan)


def _sizes(op: LowPrecision, plan: Plan) -> Iterator[_Found]:
    """Yields matmuls whose features on a rank are not a multiple of the size that the kernel needs.

    No CPU path of torchao checks it; `torch._scaled_mm` raises on a GPU.
    """
    step, weight = BLOCK[op.recipe], op.modules.module.weight
    for _, rules in split_by_rules(op.modules, active(plan)):
        local = local_shape(weight, rules, plan)
        wrong = next((dim for dim in (0, 1) if local[dim] % step), None)
        if wrong is None:
            continue
        splits = [r for r in rules if (s := r.split(weight)) is not None and s.dim == wrong]
        whole = weight.shape[wrong]
        fit = divisors(whole // step) if whole % step == 0 and len(splits) == 1 else ()
        choices = f"{splits[0].axis} can be {one_of(map(str, fit[:8]))} here; or " if fit else ""
        yield _Found(
            "PL623",
            message=f"{{}}: {local[wrong]:,} {('output', 'input')[wrong]} features on a rank, and "
            f"{op.headline()} matmuls need multiples of {step}",
            origin=op.origin,
            labels=(
                *(Label(span=rule.origin, text="split here") for rule in splits),
                *(axis_label(plan, rule) for rule in splits),
            ),
            fact=f"a weight is {list(weight.shape)}, {list(local)} on a rank",
            help=f"{choices}{_KEEP}",
        )


def _scales(op: LowPrecision, plan: Plan) -> Iterator[_Found]:
    """Yields recipes whose scales on the ranks would differ from those of one process."""
    styles = [r for r in active(plan) if r.modules.overlap(op.modules) is not None]
    for rule in styles[:1] if op.recipe == "mxfp8" else ():
        yield _Found(
            "PL626",
            message=f"{{}}: mxfp8 has no tensor parallelism, and {rule.axis} has a style",
            origin=op.origin,
            labels=(Label(span=rule.origin, text="this style"), axis_label(plan, rule)),
            fact="torchao 0.18 multiplies weights that are DTensors in full precision, silently",
            help="write `fp8(recipe = rowwise)`",
        )
    for axis in plan.mesh.of_role(AxisRole.SEQUENCE) if op.recipe == "tensorwise" else ():
        if axis.size > 1:
            yield _Found(
                "PL626",
                message=f"{{}}: each rank of {axis.name} would compute a tensorwise scale of its "
                "own tokens",
                origin=op.origin,
                labels=(axis.label,),
                fact="one process computes a tensorwise scale of all tokens of a pass",
                help="write `fp8(recipe = rowwise)`, which scales each token separately",
            )


def _styles(op: LowPrecision, plan: Plan) -> Iterator[_Found]:
    """Yields torchao's own styles, which cast tensorwise, on layers with another recipe."""
    styles = [r for r in active(plan) if r.modules.overlap(op.modules) is not None]
    for rule in styles if op.recipe != "tensorwise" else ():
        if isinstance(rule.style, Custom) and "Float8" in rule.style.path:
            name = rule.style.path.partition(":")[2]
            yield _Found(
                "PL626",
                message=f"{{}}: `{name}` casts tensorwise, whatever the recipe",
                origin=op.origin,
                labels=(Label(span=rule.origin, text="this style"),),
                help="write `colwise` or `rowwise`: torch's styles go with every recipe",
            )


def _gather_conflicts(op: LowPrecision, plan: Plan) -> Iterator[_Found]:
    """Yields weights that FSDP cannot all-gather in fp8, as their scale must be known before their
    shards are gathered.
    """
    message, labels, help = "", tuple[Label, ...](), "leave out `gather`"
    if op.recipe != "tensorwise":
        message = "{}: the scales of rows are not known before FSDP has gathered the rows"
        help = "leave out `gather`, or write `recipe = tensorwise`"
    elif plan.fsdp is None or not plan.fsdp.shard or plan.fsdp.backend is not None:
        message = "{}: torch's FSDP does not gather these weights"
    elif plan.pipeline is not None:
        message = "{}: scales are computed before the model's forward, which pipeline stages skip"
        labels = (Label(span=plan.pipeline.origin, text="stages"),)
    elif other := next(_on_others(op, plan), None):
        message = "{}: one all-reduce computes all scales, and other weights have other axes"
        labels = (Label(span=other.origin, text="over other axes"),)
        help = "gather in fp8 only weights that are split over the same axes"
    elif other := next(_other_recipes(op, plan), None):
        message = "{}: FSDP gathers a unit in one recipe"
        labels = (Label(span=other.origin, text="another recipe in the same unit"),)
        help = "give both the same rule, or separate `unit`s"
    if message:
        yield _Found("PL625", message=message, origin=op.origin, labels=labels, help=help)


def _on_others(op: LowPrecision, plan: Plan) -> Iterator[LowPrecision]:
    """Yields operations that gather in fp8 weights that are split over other axes."""
    own = {*_axes(op, plan)}
    for other in plan.sections["matmul"]:
        if other.gather and len(own | {*_axes(other, plan)}) > 1:
            yield other


def _axes(op: LowPrecision, plan: Plan) -> Iterator[tuple[object, ...]]:
    """The axes over which styles and FSDP split the weights, of each part of the modules."""
    assert plan.fsdp is not None
    for modules, rules in split_by_rules(op.modules, [*sharding_rules(active(plan))]):
        unit = unit_of(plan, modules)
        yield frozenset(rule.axis for rule in rules), unit and plan.fsdp.axes(unit)


def _other_recipes(op: LowPrecision, plan: Plan) -> Iterator[LowPrecision]:
    """The operations with another recipe in a unit of these modules."""
    unit = unit_of(plan, op.modules)
    for other in plan.sections["matmul"] if unit is not None else ():
        alike = (other.recipe, other.gather) == (op.recipe, op.gather)
        if not alike and unit_of(plan, other.modules) is unit:
            yield other


def _warn_uncompiled(plan: Plan, sink: Sink) -> None:
    """Reports fp8 matmuls outside of compiled modules (PL624)."""
    rules = plan.sections["matmul"]
    left = [op for op in rules if not any(holds(c.modules, op.modules) for c in plan.compilations)]
    if left:
        sink.warning(
            "PL624",
            f"the fp8 matmuls of {several(op.modules for op in left)} are not compiled",
            *dict.fromkeys(op.origin for op in left),
            facts=["casts in separate kernels take more time than the matmuls save"],
            help="compile the blocks: `compile { $blocks : block }`",
        )
