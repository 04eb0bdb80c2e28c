"""PL680 to PL684: 4-bit weights that a plan would cast, train, tie or split within a block."""

from planc.checks.queries import axis_label, ranks
from planc.diagnostics.diagnostic import Label, Sink
from planc.infer.apply_adapters import adapted_tensor_rules, is_compressed, weights_of_experts
from planc.ir.nodes import AdapterRule, Plan, TensorRule
from planc.ir.parameter_owners import Owned, owned_modules
from planc.model.facts import Facts, Modules
from planc.ops import phrases
from planc.ops.contract import part_sizes
from planc.ops.styles import Colwise, Rowwise, style_text
from planc.sections.quantization.ops import Quantize


def check(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Packed 4-bit bytes are not numbers, so nothing may cast, train or tie them.

    Source: `quantize_4bit` in bitsandbytes, which scales blocks of the flattened weight.
    """
    if plan.adapters is None or "adapters" in plan.broken:
        return
    rules = [r for r in plan.adapters.rules if isinstance(r.compressed, Quantize)]
    for rule in rules:
        _linear(rule, sink)
        _check_ties(rule, facts, sink)
    for owned in owned_modules(plan, facts) if rules else ():
        if is_compressed(owned.modules.module):
            rule = next(r for r in rules if owned.modules.overlap(r.modules) is not None)
            _check_gather_dtype(rule, owned, plan, sink)
            if owned.training is not None and owned.training.trainable:
                sink.error(
                    "PL683",
                    f"`{owned.modules}` is quantized and cannot train",
                    rule.origin,
                    Label(span=owned.training.origin, text="requested here"),
                    help="write `lora(...)` for it, or train other modules",
                )
    for rule, style, part in adapted_tensor_rules(plan) if "tensor" not in plan.broken else ():
        if rule in rules and ranks(plan, style) > 1 and part.module.kind == "linear":
            _check_split(rule, style, part, plan, sink)


def _linear(rule: AdapterRule, sink: Sink) -> None:
    module = rule.modules.module
    experts = bool(weights_of_experts(module))
    if experts or module.kind in ("conv1d", "embedding"):  # of any other, PL180 tells
        message = f"`{rule.modules}` cannot be quantized: it is not an `nn.Linear`"
        hint = "write `lora(...)`, which does not quantize its weight"
        sink.error(
            "PL681", message, rule.origin, facts=[f"`{rule.modules}` is a {module.cls}"], help=hint
        )


def _check_ties(rule: AdapterRule, facts: Facts, sink: Sink) -> None:
    for group in facts.ties:
        tied = [name for name in group if rule.modules.has(name.rpartition(".")[0])]
        if tied and rule.modules.module.kind == "linear":
            other = next(name for name in group if name != tied[0])
            message = f"`{tied[0]}` cannot be quantized: it is tied to `{other}`"
            help = "write `lora(...)` for it, which does not quantize its weight"
            sink.error("PL682", message, rule.origin, help=help)


def _check_gather_dtype(rule: AdapterRule, owned: Owned, plan: Plan, sink: Sink) -> None:
    """FSDP casts gathered parameters to the unit's `param` dtype, packed bytes too."""
    precision = plan.fsdp.policy(owned.unit) if plan.fsdp else None
    if rule.compressed is None or precision is None or precision.param is None:
        return
    if precision.param == rule.compressed.storage:
        return
    wanted = phrases.dtype(precision.param)
    sink.error(
        "PL680",
        f"the 4-bit weights of `{owned.modules}` are stored as "
        f"{phrases.dtype(rule.compressed.storage)} and would be cast to {wanted}",
        rule.origin,
        Label(span=precision.origin, text=f"gathers in {wanted}"),
        facts=["casting packed bytes changes the weights"],
        help=f"write `storage = {wanted}`",
    )


def _check_split(
    rule: AdapterRule, style: TensorRule, part: Modules, plan: Plan, sink: Sink
) -> None:
    """Reports PL684: a rank's shard of a 4-bit weight would be quantized in other blocks than the
    full weight.
    """
    assert isinstance(rule.compressed, Quantize)
    reason = _misalignment(rule.compressed, style, part, ranks(plan, style))
    if reason is None:
        return
    text, fix = reason
    sink.error(
        "PL684",
        f"`{part}` cannot be split over {style.axis} in 4 bits: {text}",
        rule.origin,
        Label(span=style.origin, text="the layer's style"),
        axis_label(plan, style),
        help=fix,
    )


def _misalignment(
    quantize: Quantize, rule: TensorRule, part: Modules, count: int
) -> tuple[str, str] | None:
    """Returns why a rank's shard is not a multiple of the 4-bit block, and the fix; else None."""
    block, blocks = quantize.block, f"blocks of {quantize.block}"
    if not isinstance(rule.style, Colwise | Rowwise):
        text = f"its style, `{style_text(rule.style)}`, is unknown for 4-bit weights"
        return text, "write `lora(...)` for it, or use `colwise` or `rowwise`"
    if quantize.double:
        return "with `double`, scales depend on the full weight", "write `double = false`"
    weight = part.module.weight
    split = rule.split(weight)
    if split is None:
        return None
    size = weight.shape[split.dim]
    sizes = part_sizes(split, size) if split.is_packed else (size,)
    inner = weight.shape[1] if split.dim == 0 else 1  # numbers that a step along the dim passes
    for size in sizes:
        if size % count or size // count * inner % block:
            what = f"{size:,} {'rows' if split.dim == 0 else 'columns'} over {count} ranks"
            fix = "write `lora(...)` for it, or a smaller block"
            return f"{what} do not form whole {blocks}", fix
    return None
