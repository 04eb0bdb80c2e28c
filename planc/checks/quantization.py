"""PL680 to PL684: 4-bit weights that a plan would corrupt, or shard where it cannot."""

from planc.checks.queries import axis_label, ranks
from planc.diagnostic import Label, Sink
from planc.model.facts import Facts, Modules
from planc.ops.styles import Colwise, Rowwise, part_sizes, style_text, weight_split
from planc.plan.apply_adapters import FOUR_BIT, adapted_tensor_rules
from planc.plan.ir import AdapterRule, Plan, TensorRule
from planc.plan.parameter_owners import Owned, owned

_SPELLED = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def four_bits(plan: Plan, facts: Facts, sink: Sink) -> None:
    """Packed 4-bit bytes are not numbers, so nothing may cast, train or tie them.

    Source: `quantize_4bit` in bitsandbytes, which scales blocks of the flattened weight.
    """
    if plan.adapters is None or "adapters" in plan.broken:
        return
    rules = [r for r in plan.adapters.rules if r.quantize is not None]
    for rule in rules:
        _linear(rule, sink)
        _tied(rule, facts, sink)
    for own in owned(plan, facts) if rules else ():
        if own.modules.module.cls == FOUR_BIT:
            rule = next(r for r in rules if own.modules.overlap(r.modules) is not None)
            _gathered(rule, own, plan, sink)
            _trained(rule, own, sink)
    if "tensor" not in plan.broken:
        for rule, base, part in adapted_tensor_rules(plan):
            if rule.quantize and ranks(plan, base) > 1 and part.module.kind == "linear":
                _split(rule, base, part, plan, sink)


def _linear(rule: AdapterRule, sink: Sink) -> None:
    module = rule.modules.module
    if module.kind in ("conv1d", "embedding"):  # of any other, PL180 tells
        sink.error(
            "PL681",
            f"`{rule.modules}` cannot be quantized: it is not an `nn.Linear`",
            rule.origin,
            facts=[f"`{rule.modules}` is a {module.cls}"],
            help="write `lora(...)`, which does not quantize its weight",
        )


def _tied(rule: AdapterRule, facts: Facts, sink: Sink) -> None:
    for group in facts.ties:
        own = [name for name in group if rule.modules.has(name.rpartition(".")[0])]
        if own and rule.modules.module.kind == "linear":
            other = next(name for name in group if name != own[0])
            message = f"`{own[0]}` cannot be quantized: it is tied to `{other}`"
            help = "write `lora(...)` for it, which does not quantize its weight"
            sink.error("PL682", message, rule.origin, help=help)


def _gathered(rule: AdapterRule, own: Owned, plan: Plan, sink: Sink) -> None:
    """FSDP casts gathered parameters to the unit's `param` dtype, packed bytes too."""
    quant = rule.quantize
    if plan.fsdp is None or quant is None:
        return
    precision = plan.fsdp.policy(own.unit)
    if precision is None or precision.param in (None, quant.storage):
        return
    assert precision.param is not None
    wanted = _SPELLED.get(precision.param, precision.param)
    sink.error(
        "PL680",
        f"the 4-bit weights of `{own.modules}` are stored as "
        f"{_SPELLED.get(quant.storage, quant.storage)} and would be cast to {wanted}",
        rule.origin,
        Label(span=precision.origin, text=f"gathers in {wanted}"),
        facts=["casting packed bytes changes the weights"],
        help=f"write `storage = {wanted}`",
    )


def _trained(rule: AdapterRule, own: Owned, sink: Sink) -> None:
    if own.training is not None and own.training.trainable:
        sink.error(
            "PL683",
            f"`{own.modules}` is quantized and cannot train",
            rule.origin,
            Label(span=own.training.origin, text="requested here"),
            help="write `lora(...)` for it, or train other modules",
        )


def _split(rule: AdapterRule, base: TensorRule, part: Modules, plan: Plan, sink: Sink) -> None:
    """Each rank quantizes its own shard: the weights are equal only where shards are whole blocks.

    Scales that are quantized themselves depend on the whole weight.
    """
    assert rule.quantize is not None
    reason = _unaligned(rule, base, part, ranks(plan, base))
    if reason is None:
        return
    text, fix = reason
    sink.error(
        "PL684",
        f"`{part}` cannot be split over {base.axis} in 4 bits: {text}",
        rule.origin,
        Label(span=base.origin, text="the layer's style"),
        axis_label(plan, base),
        help=fix,
    )


def _unaligned(
    rule: AdapterRule, base: TensorRule, part: Modules, count: int
) -> tuple[str, str] | None:
    """(why shards are not whole blocks, the fix), or None."""
    assert rule.quantize is not None
    block, high = rule.quantize.block, f"blocks of {rule.quantize.block}"
    if not isinstance(base.style, Colwise | Rowwise):
        text = f"its style, `{style_text(base.style)}`, is unknown for 4-bit weights"
        return text, "write `lora(...)` for it, or use `colwise` or `rowwise`"
    if rule.quantize.double:
        return "with `double`, scales depend on the full weight", "write `double = false`"
    weight = next(p for p in part.module.parameters if p.name == "weight")
    split = weight_split(base.style, "linear", "weight", 2)
    if split is None:
        return None
    size = weight.shape[split.dim]
    sizes = part_sizes(split, size) if split.packed else (size,)
    inner = weight.shape[1] if split.dim == 0 else 1  # numbers that a step along the dim passes
    for size in sizes:
        if size % count or size // count * inner % block:
            what = f"{size:,} {'rows' if split.dim == 0 else 'columns'} over {count} ranks"
            fix = "write `lora(...)` for it, or a smaller block"
            return f"{what} do not form whole {high}", fix
    return None
