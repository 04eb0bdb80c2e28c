"""PL180, PL182 to PL184, PL186, PL582: LoRA on unsupported layers, or with a useless rank."""

from planc.checks.queries import axis_label, ranks
from planc.diagnostics.diagnostic import Label, Sink, did_you_mean, one_of
from planc.infer.apply_adapters import (
    KINDS,
    adapted_tensor_rules,
    in_out_features,
    of_rule,
    weights_of_experts,
)
from planc.ir.nodes import AdapterRule, Adapters, Plan, TensorRule
from planc.model.facts import Facts, Modules
from planc.ops.styles import style_text


def adapters(plan: Plan, facts: Facts, sink: Sink) -> None:
    """LoRA applies to linear layers and embeddings; its styles are derived from theirs."""
    if plan.adapters is None or "adapters" in plan.broken:
        return
    if not plan.adapters.rules:
        sink.error(
            "PL183",
            "the `adapters` section adapts nothing",
            plan.adapters.origin,
            help="name layers, `model.layers.*.self_attn.q_proj : lora(rank = 16)`, or remove it "
            "and train all of the model",
        )
    for rule in plan.adapters.rules:
        module = rule.modules.module
        experts = weights_of_experts(module)
        if experts or (rule.adapt.parameters and module.kind in KINDS):
            if _experts(rule, sink):
                _rank(rule, sink)
            continue
        if module.kind not in KINDS:
            sink.error(
                "PL180",
                f"`{rule.modules}` cannot have an adapter: it is neither a linear layer nor an "
                "embedding, and has no fused experts",
                rule.origin,
                facts=[f"`{rule.modules}` is a {module.cls}"],
                help="name the projections inside it" if module.children else "leave it frozen",
            )
            continue
        _rank(rule, sink)
        if rule.adapt.dora:
            _dora(rule, plan, sink)
    _check_own_units(plan.adapters, plan, sink)
    if "tensor" not in plan.broken:
        for rule, base, part in adapted_tensor_rules(plan):
            if ranks(plan, base) > 1 and rule.modules.module.kind in KINDS:
                _style(rule, base, part, plan, sink)


def _experts(rule: AdapterRule, sink: Sink) -> bool:
    """Whether peft can have the adapter of these experts; PL582 if it cannot."""
    there = [p.name for p in weights_of_experts(rule.modules.module)]
    wrong = next((n for n in rule.adapt.parameters if n not in there), None)
    if wrong is not None:
        named = one_of((f"`{n}`" for n in there), last="and")
        sink.error(
            "PL582",
            f"`{rule.modules}` has no weight `{wrong}` of fused experts",
            rule.origin,
            facts=[f"it has {named}" if there else f"it is a {rule.modules.module.cls}"],
            help=did_you_mean(wrong, there) if there else "remove `parameters`",
        )
    elif rule.adapt.dropout:
        sink.error(
            "PL582",
            f"the adapter of `{rule.modules}` cannot have dropout",
            rule.origin,
            facts=["peft has none for the weights of experts: it changes weights, not inputs"],
            help="write `dropout = 0` for it, in a rule of its own",
        )
    elif rule.adapt.dora:
        sink.error(
            "PL582",
            f"the adapter of `{rule.modules}` cannot have DoRA",
            rule.origin,
            facts=["peft has none for the weights of experts"],
            help="leave `dora` out, in a rule of its own",
        )
    return wrong is None


def _dora(rule: AdapterRule, plan: Plan, sink: Sink) -> None:
    """PL180 where DoRA is of an embedding, or of a layer that trains itself."""
    trains = (rule_of_train for rule_of_train in plan.freezes if rule_of_train.trainable)
    trained = next((t for t in trains if t.modules.overlap(rule.modules)), None)
    if rule.modules.module.kind == "embedding":
        sink.error(
            "PL180",
            f"the adapter of `{rule.modules}` cannot have DoRA: it is an embedding",
            rule.origin,
            facts=["the magnitudes of an embedding are of its columns, of all tokens"],
            help="leave `dora` out, in a rule of its own",
        )
    elif trained is not None:
        sink.error(
            "PL180",
            f"the adapter of `{rule.modules}` cannot have DoRA: the layer itself trains",
            rule.origin,
            Label(span=trained.origin, text="trained here"),
            facts=["the norms of DoRA are of a frozen weight"],
            help="leave the layer frozen, or remove `dora`",
        )


def _rank(rule: AdapterRule, sink: Sink) -> None:
    module = rule.modules.module
    if rule.adapt.parameters:
        sizes = (p.shape[1:] for p in weights_of_experts(module))
        inputs, outputs = min(sizes, key=min)
    else:
        inputs, outputs = in_out_features(module)
    most = min(inputs, outputs)
    if rule.adapt.rank > most:
        sink.warning(
            "PL182",
            f"an adapter of rank {rule.adapt.rank:,} is no smaller than `{rule.modules}`",
            rule.origin,
            facts=[f"the layer has {inputs:,} input and {outputs:,} output features"],
            help=f"the rank can be at most {most:,}; train the layer itself beyond that",
        )


def _check_own_units(section: Adapters, plan: Plan, sink: Sink) -> None:
    if not section.own or section.units_origin is None:
        return
    if plan.fsdp is None:
        message = "adapters cannot be separate units: the plan has no fsdp section"
        sink.error("PL186", message, section.units_origin, help="remove `units = own`")
    for rule in section.rules:
        fact = ""
        if rule.modules.module.kind == "embedding" or rule.adapt.parameters:
            fact = "its factors are parameters, which no forward of their own gathers"
        elif rule.adapt.dora:
            fact = "the norms of DoRA are of the layer's weight and both factors together"
        if fact:
            sink.error(
                "PL186",
                f"the adapter of `{rule.modules}` cannot be a separate unit",
                rule.origin,
                Label(span=section.units_origin, text="requested here"),
                facts=[fact],
                help="write `units = with_layer`",
            )


def _style(rule: AdapterRule, base: TensorRule, part: Modules, plan: Plan, sink: Sink) -> None:
    derived = of_rule(base.style, rule)
    if not isinstance(derived, str):
        return
    sink.error(
        "PL184",
        f"the styles of the adapter of `{part}` cannot be derived from "
        f"`{style_text(base.style)}`: {derived}",
        rule.origin,
        Label(span=base.origin, text="the layer's style"),
        axis_label(plan, base),
        help="give the layer a plain output layout, or leave it without an adapter",
    )
