"""PL621 to PL626: which layers can have products in 8 bits, and under which other decisions."""

from collections.abc import Iterator

from planc.checks.queries import active, axis_label, divisors, holds, looked_up, several, unit_of
from planc.diagnostic import Label, Sink, one_of
from planc.model.facts import Facts, Modules
from planc.ops.base import AxisRole
from planc.ops.matmul import BLOCK, Matmul
from planc.ops.styles import Custom
from planc.plan.ir import Plan, TensorRule
from planc.plan.local_shapes import local_shape, ruled

_OUT = "`override {} : none` keeps it in the parameters' dtype"


def matmul(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Each rule is on linear layers that may be rounded, and whose shards the kernels take."""
    if not plan.matmul or "matmul" in plan.broken:
        return
    for op in plan.matmul:
        if _linear(op, plan, facts, sink) and not {"tensor", "mesh"} & plan.broken:
            _sizes(op, plan, sink)
            _scales(op, plan, sink)
            if op.gather and "fsdp" not in plan.broken:
                _gathered(op, plan, sink)
    if "compile" not in plan.broken:
        _compiled(plan, sink)


def _linear(op: Matmul, plan: Plan, facts: Facts, sink: Sink) -> bool:
    module = op.modules.module
    if module.kind != "linear" or module.cls != "Linear":
        inside = any(m.module.kind == "linear" for m in op.modules.below())
        fact = f"it is a {module.cls}" + ", whose own forward would be lost" * (
            module.kind == "linear"
        )
        sink.error(
            "PL621",
            f"`{op.modules}` is no linear layer, so torchao cannot round its products",
            op.origin,
            facts=[fact],
            help=f"name the linear layers inside it: `{op.modules}.**<Linear>`"
            if inside and module.kind != "linear"
            else "remove it from this rule; experts of one weight keep their precision",
        )
        return False
    what = _kept(op.modules, plan, facts)
    if what is not None:
        reason, fact = what
        sink.error(
            "PL622",
            f"`{op.modules}` is {reason}, which keeps its precision",
            op.origin,
            facts=[fact],
            help=_OUT.format(op.modules),
        )
    return what is None


def _kept(modules: Modules, plan: Plan, facts: Facts) -> tuple[str, str] | None:
    """What a linear layer is that must not be rounded, and why; None for any other."""
    for rule in plan.adapters.rules if plan.adapters else ():
        if modules.inside(rule.modules) is not None:
            fact = "peft wraps the layer, and its factors are of few features"
            return "a layer with an adapter", fact
    tied = {name.rpartition(".")[0] for group in facts.ties for name in group}
    if any(name in tied for name in modules.names()):
        return "a layer with a tied weight", "another module reads the same weight unrounded"
    if "experts" in modules.path:
        return (
            "an expert of its own",
            "a router sends it any number of tokens, and products in 8 bits take multiples of 16",
        )
    weight = next(p for p in modules.module.parameters if p.name == "weight")
    if (what := looked_up(modules, weight, facts)) is None:
        return None
    fact = (
        "a rounded score chooses another expert"
        if what == "a router"
        else ("errors of its outputs are errors of the loss, and no later layer corrects them")
    )
    return what, fact


def _sizes(op: Matmul, plan: Plan, sink: Sink) -> None:
    """The features of a product must be multiples of a size, those of a rank's shard too.

    No CPU path of torchao checks it; `torch._scaled_mm` raises on a GPU.
    """
    step = BLOCK[op.recipe]
    weight = next(p for p in op.modules.module.parameters if p.name == "weight")
    for modules, rules in ruled(op.modules, active(plan)):
        local = local_shape(weight, rules, plan)
        wrong = next((dim for dim in (0, 1) if local[dim] % step), None)
        if wrong is None:
            continue
        splits = [r for r in rules if (s := r.split(weight)) is not None and s.dim == wrong]
        side = ("output", "input")[wrong]
        fit = divisors(weight.shape[wrong] // step) if weight.shape[wrong] % step == 0 else ()
        help = _OUT.format(modules)
        if len(splits) == 1 and fit:
            help = f"{splits[0].axis} can be {one_of(map(str, fit[:8]))} here; or {help}"
        sink.error(
            "PL623",
            f"`{modules}` has {local[wrong]:,} {side} features on a rank, and products in "
            f"{op.headline()} take multiples of {step}",
            op.origin,
            *(Label(span=rule.origin, text="split here") for rule in splits),
            *(axis_label(plan, rule) for rule in splits),
            facts=[f"its weight is {list(weight.shape)}, {list(local)} on a rank"],
            help=help,
        )


def _scales(op: Matmul, plan: Plan, sink: Sink) -> None:
    """The ranks' scales must be those of one process."""
    styles = [r for r in active(plan) if r.modules.overlap(op.modules) is not None]
    if op.recipe == "mxfp8":
        for rule in _weights(styles, op)[:1]:
            sink.error(
                "PL626",
                f"`{op.modules}` cannot be in mxfp8 and split over {rule.axis}",
                op.origin,
                Label(span=rule.origin, text="split here"),
                axis_label(plan, rule),
                facts=[
                    "torchao 0.18 multiplies a weight that is a DTensor in full precision, "
                    "without a word"
                ],
                help="write `fp8(recipe = rowwise)`",
            )
    for rule in styles:
        if (
            isinstance(rule.style, Custom)
            and "Float8" in rule.style.path
            and op.recipe != ("tensorwise")
        ):
            sink.error(
                "PL626",
                f"`{rule.style.path.partition(':')[2]}` casts `{op.modules}` tensorwise, whatever "
                "its recipe",
                op.origin,
                Label(span=rule.origin, text="this style"),
                help="write `colwise` or `rowwise`: torch's styles go with every recipe",
            )
    for axis in plan.mesh.of_role(AxisRole.SEQUENCE):
        if op.recipe == "tensorwise" and axis.size > 1:
            sink.error(
                "PL626",
                f"a scale of `{op.modules}` would be of the tokens of one rank of {axis.name}",
                op.origin,
                Label(span=axis.origin, text=f"{axis.name} is {axis.size}"),
                facts=[
                    "tensorwise, one scale is for all tokens of a pass: one process has another"
                ],
                help="write `fp8(recipe = rowwise)`, whose scales are of single tokens",
            )


def _weights(styles: list[TensorRule], op: Matmul) -> list[TensorRule]:
    return [r for r in styles if any(r.split(p) is not None for p in op.modules.module.parameters)]


def _gathered(op: Matmul, plan: Plan, sink: Sink) -> None:
    """FSDP gathers in fp8 what has one scale, known before the shards are together."""

    def wrong(message: str, *labels: Label, help: str) -> None:
        sink.error("PL625", message, op.origin, *labels, help=help)

    without = "leave out `gather`"
    if op.recipe != "tensorwise":
        wrong(
            f"`{op.modules}` has a scale for each row, and FSDP gathers parts of rows in fp8 "
            "with one scale alone",
            help=f"{without}, or write `recipe = tensorwise`",
        )
    elif plan.fsdp is None or not plan.fsdp.shard or plan.fsdp.backend is not None:
        wrong(f"no FSDP of torch gathers `{op.modules}`", help=without)
    elif plan.pipeline is not None:
        label = Label(span=plan.pipeline.origin, text="stages run without the model's forward")
        wrong(
            f"the scales of `{op.modules}` are computed before a forward pass of the model",
            label,
            help=without,
        )
    elif other := next(_beside(op, plan), None):
        label = Label(span=other.origin, text="in the same unit")
        wrong(
            f"`{op.modules}` and `{other.modules}` are in one unit, which FSDP gathers in one "
            "recipe",
            label,
            help="give both the same rule, or `unit`s of their own",
        )


def _beside(op: Matmul, plan: Plan) -> Iterator[Matmul]:
    """The operations with another recipe in a unit of these modules."""
    unit = unit_of(plan, op.modules)
    for other in plan.matmul if unit is not None else ():
        alike = (other.recipe, other.gather) == (op.recipe, op.gather)
        if not alike and unit_of(plan, other.modules) is unit:
            yield other


def _compiled(plan: Plan, sink: Sink) -> None:
    left = [op for op in plan.matmul if not any(holds(c.modules, op.modules) for c in plan.compile)]
    if left:
        sink.warning(
            "PL624",
            f"{several(op.modules for op in left)} round in passes of their own: they are not "
            "compiled",
            *dict.fromkeys(op.origin for op in left),
            facts=["uncompiled, casting to 8 bits takes more time than the products save"],
            help="compile the blocks: `compile { $blocks : block }`",
        )
