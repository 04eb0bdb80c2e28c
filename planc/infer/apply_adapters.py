"""Adapters applied to a plan and its model: modules, styles and units.

peft wraps the adapted layer in a layer with `lora_A.default` and `lora_B.default` inside. Here the
layer keeps its name and gets them as children, so that a rule means the same modules with and
without adapters. Fused experts get the factors of their weights as parameters of their own.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import prod

from planc.diagnostics.source import Span
from planc.ir.experts import expert_count
from planc.ir.nodes import AdapterRule, Plan, TensorRule, Unit
from planc.model.facts import Child, Facts, Module, Modules, Parameter
from planc.model.module_table import TRANSPOSED_EXPERTS, Path, divide_children
from planc.ops import styles as ir
from planc.ops.lora import MAGNITUDE, factor_dims, factor_name
from planc.ops.styles import PARAMETERLESS

NAME = "default"  # peft's default name of an adapter
_COMPRESSED = "compressed"
"""The fact of a layer whose weight is a column of a storage dtype."""

KINDS = ("linear", "conv1d", "embedding")
"""The kinds of modules that can have an adapter; an embedding's is parameters, not modules."""

_Kept = Callable[[Parameter], str]


def adapt_plan(plan: Plan, facts: Facts) -> tuple[Plan, Facts]:
    """Adds the adapters of a plan to the plan and its model; both are unchanged without adapters.

    Before:
        adapters { model.layers.*.self_attn.q_proj : lora(rank = 8, alpha = 16) }
        q_proj: Linear with `weight` [4096, 4096]
        q_proj.weight is trainable

    After:
        (the rule is applied: `Plan.adapted`)
        q_proj: base_layer with `weight`, lora_A.default [8, 4096], lora_B.default [4096, 8]
        q_proj.base_layer.weight is frozen, and lora_A and lora_B are trainable
    """
    if plan.adapters is None or not plan.adapters.rules:
        return plan, facts
    rules = tuple(map(_of_experts, plan.adapters.rules))
    facts = with_adapters(facts, rules, plan.dtype)
    # `load` casts before adapters are added, so the facts have its dtypes
    plan = replace(plan, adapters=replace(plan.adapters, rules=rules), adapted=True)
    plan = _with_factors(plan, [r for r in rules if weights_of_experts(r.modules.module)], facts)
    if plan.adapters and plan.adapters.own and plan.fsdp is not None:
        layers = (r for r in rules if r.modules.module.kind in KINDS[:2])
        own = [Unit(members=(half,), origin=r.origin) for r in layers for half in lora_modules(r)]
        plan = replace(plan, fsdp=replace(plan.fsdp, units=(*own, *plan.fsdp.units)))
    return plan, facts


def with_adapters(facts: Facts, rules: Iterable[AdapterRule], kept: _Kept) -> Facts:
    """The model with adapters, all else frozen; `kept` is a parameter's dtype after `load`."""
    paths = [(rule.modules.path, rule) for rule in rules]
    return replace(facts, root=_module(facts.root, paths, kept))


def lora_modules(rule: AdapterRule) -> tuple[Modules, Modules]:
    """`lora_A` and `lora_B` of a rule's layers, the linear modules."""
    first, second, *_ = _inner(rule)
    return first, second


def _inner(rule: AdapterRule) -> tuple[Modules, ...]:
    """The modules that a rule adds to its layers: `lora_A`, `lora_B`, and the magnitudes of
    DoRA.
    """
    return tuple(
        Modules((*rule.modules.path, child.name, NAME), child.module.children[0].module)
        for child in _children(rule.modules.module, rule)
    )


def in_out_features(module: Module) -> tuple[int, int]:
    """(input features, output features) of a layer that can have an adapter."""
    one, two = module.weight.shape
    return (two, one) if module.kind == "linear" else (one, two)


# Experts -----------------------------------------------------------------------------------------


def weights_of_experts(module: Module) -> tuple[Parameter, ...]:
    """The weights of fused experts that can have factors, [experts, x, y]; none elsewhere."""
    if expert_count(module) is None:
        return ()
    return tuple(p for p in module.parameters if len(p.shape) == 3 and not is_factor(p.name))


def is_factor(name: str) -> bool:
    """Whether a parameter of experts is a factor."""
    return name.endswith((factor_name("", "A"), factor_name("", "B")))


def _of_experts(rule: AdapterRule) -> AdapterRule:
    """A rule on experts with the weights that it means, in the module's order: those that it names,
    else all. A check reports names of no weight.
    """
    named = rule.adapt.parameters
    there = [p.name for p in weights_of_experts(rule.modules.module)]
    chosen = [*(n for n in there if n in named or not named), *(n for n in named if n not in there)]
    return replace(rule, adapt=replace(rule.adapt, parameters=tuple(chosen)))


def _factors(module: Module, rule: AdapterRule) -> Iterator[Parameter]:
    """The factors of the weights of experts: [experts, features, rank]."""
    dims = factor_dims(module.fact(TRANSPOSED_EXPERTS) is not None)
    for weight in weights_of_experts(module):
        if weight.name in rule.adapt.parameters:
            for half, dim in dims.items():
                yield Parameter(
                    name=factor_name(weight.name, half),
                    shape=(weight.shape[0], weight.shape[dim], rule.adapt.rank),
                    dtype=rule.adapt.dtype or weight.dtype,
                )


def _with_factors(plan: Plan, rules: list[AdapterRule], facts: Facts) -> Plan:
    """The plan whose rules on adapted experts know their factors, and split them."""

    def place(modules: Modules, _origin: Span) -> Iterator[Modules]:
        adapted = [rule.modules for rule in rules]
        for both in filter(None, map(modules.overlap, adapted)):
            yield Modules(both.path, facts.module_at(both.first_name).module)
        yield from modules.subtract(adapted)

    if not rules:
        return plan
    plan = plan.map_modules(place)
    styled = (replace(r, style=_factor_style(r.style, r.modules.module)) for r in plan.tensor)
    return replace(plan, tensor=tuple(styled))


def _factor_style(style: ir.Style, module: Module) -> ir.Style:
    """A style of experts with the layouts of their factors.

    The factor with the dim that a style splits is split as the weight, in its parts; the other one
    is replicated, and its gradient is summed over the ranks, which have a part of the product each.
    """
    if not isinstance(style, ir.Parameters | ir.Experts):
        return style
    stated, names = dict(style.layouts), {p.name for p in module.parameters}
    found = list(style.layouts)
    for weight in weights_of_experts(module):
        for half, dim in factor_dims(module.fact(TRANSPOSED_EXPERTS) is not None).items():
            own = factor_name(weight.name, half)
            if own in names and own not in stated and weight.name in stated:
                found.append((own, _layout(stated[weight.name], dim, half)))
    return replace(style, layouts=tuple(found))


def _layout(weight: ir.ParameterLayout, dim: int, half: str) -> ir.ParameterLayout:
    """The layout of a factor by that of its weight; `dim` is the weight's dim that it has."""
    whole = ir.ParameterLayout(layout=ir.Replicate())
    match weight.layout:
        case ir.Shard(dim=split) if split % 3 == 0:
            return ir.ParameterLayout(layout=ir.Shard(0))
        case ir.Shard(dim=split) if split % 3 == dim:
            return replace(weight, layout=ir.Shard(1))
        case ir.Partial() if half == "A":  # of the product, a rank's share
            return weight
    return whole


# Modules -----------------------------------------------------------------------------------------


def _module(module: Module, rules: list[tuple[Path, AdapterRule]], kept: _Kept) -> Module:
    own = [r for rest, r in rules if not rest]
    parts = divide_children(module, rules)
    children = [replace(c, module=_module(c.module, inner, kept)) for c, inner in parts]
    frozen = tuple(replace(p, trainable=False, dtype=kept(p)) for p in module.parameters)
    module = replace(module, parameters=frozen)
    children += [c for r in own for c in _children(module, r)]
    factors = (p for r in own for p in _factors(module, r))
    module = replace(module, parameters=(*module.parameters, *factors))
    for rule in own:
        module = _compress_weight(module, rule)
    return replace(module, children=tuple(children))


def is_compressed(module: Module) -> bool:
    """Whether a layer's weight is stored in fewer bits, as a column without its dims."""
    return module.fact(_COMPRESSED) is not None


def _compress_weight(module: Module, rule: AdapterRule) -> Module:
    """The module with its weight as one column of the storage dtype, if the rule compresses it."""
    compressed = rule.compressed
    if compressed is None or module.kind != "linear":
        return module
    weight = module.weight
    shape = (compressed.column_length(prod(weight.shape)), 1)
    column = replace(weight, shape=shape, dtype=compressed.storage)
    parameters = tuple(column if p is weight else p for p in module.parameters)
    facts = (*module.facts, (_COMPRESSED, 1))
    return replace(module, cls=compressed.LAYER, parameters=parameters, facts=facts)


def _children(module: Module, rule: AdapterRule) -> tuple[Child, ...]:
    if module.kind not in KINDS:
        return ()  # a check reports it
    dtype = rule.adapt.dtype or module.weight.dtype
    one, two = in_out_features(module)
    embeds = module.kind == "embedding"
    shapes = {"A": (rule.adapt.rank, one), "B": (two, rule.adapt.rank)}
    factors = tuple(
        Child(
            module=(_parameter_dict if embeds else _module_dict)(shape, dtype),
            name=f"lora_embedding_{half}" if embeds else f"lora_{half}",
        )
        for half, shape in shapes.items()
    )
    if embeds or not rule.adapt.dora:
        return factors
    inside = _module_dict((two,), dtype, cls="DoraLinearLayer", kind="other")
    return (*factors, Child(module=inside, name=MAGNITUDE))


def _parameter_dict(shape: tuple[int, ...], dtype: str) -> Module:
    parameter = Parameter(name=NAME, shape=shape, dtype=dtype)
    return Module(cls="ParameterDict", kind="dict", parameters=(parameter,))


def _module_dict(
    shape: tuple[int, ...], dtype: str, cls: str = "Linear", kind: str = "linear"
) -> Module:
    weight = Parameter(name="weight", shape=shape, dtype=dtype)
    inner = Module(cls=cls, kind=kind, parameters=(weight,))
    return Module(cls="ModuleDict", kind="dict", children=(Child(module=inner, name=NAME),))


# Styles ------------------------------------------------------------------------------------------


def styles(plan: Plan) -> tuple[TensorRule, ...]:
    """The styles of adapters, which follow from the styles of their layers."""
    found: list[TensorRule] = []
    for rule, base, part in adapted_tensor_rules(plan):
        derived = of_rule(base.style, rule)
        if isinstance(derived, str) or rule.modules.module.kind not in KINDS[:2]:
            continue  # a check reports it
        inner = _inner(replace(rule, modules=part))
        for modules, style in zip(inner, derived, strict=True):
            if style is not None:
                own = TensorRule(modules=modules, axis=base.axis, style=style, origin=rule.origin)
                found.append(own)
    return tuple(found)


def adapted_tensor_rules(plan: Plan) -> Iterator[tuple[AdapterRule, TensorRule, Modules]]:
    """Every adapter rule, a style of its layers' weights, and the layers that both rules have.

    Styles that only change inputs or outputs apply to the layer and its adapter together.
    """
    for rule in plan.adapters.rules if plan.adapters else ():
        for base in plan.tensor:
            part = rule.modules.overlap(base.modules)
            if part is not None and not isinstance(base.style, PARAMETERLESS):
                yield rule, base, part


def of_rule(style: ir.Style, rule: AdapterRule) -> tuple[ir.Style | None, ...] | str:
    """The styles of what a rule adds to a layer of a style, or why there are none."""
    factors = of_layer(style, rule.modules.module.kind)
    if isinstance(factors, str) or not rule.adapt.dora:
        return factors
    magnitudes = of_magnitudes(style)
    return magnitudes if isinstance(magnitudes, str) else (*factors, magnitudes)


def of_magnitudes(style: ir.Style) -> ir.Style | str | None:
    """The style of the magnitudes of DoRA for a layer's style, or why there is none.

    They multiply the layer's output after it is redistributed: a rank has those of the features
    that it has there. Where it has some of the tokens, their gradient is summed. A rank computes
    the norms of its part of the weight, and ranks with some of the columns sum the squares.
    """
    match style:
        case ir.Colwise(output=ir.Shard() as shard) if _features(shard):
            own = ir.ParameterLayout(
                layout=ir.Shard(0), parts=style.parts, interleaved=style.interleaved
            )
            return ir.Parameters(layouts=(("weight", own),))
        case ir.Rowwise(output=ir.Shard() as shard) if _features(shard):
            return "the norms of DoRA are of all columns, and a rank has some, and some of the rows"
        case ir.Colwise(output=ir.Shard()) | ir.Rowwise(output=ir.Shard()) | ir.Sequence():
            return ir.Replicated(summed=True)
        case ir.Replicated(summed=True):
            return style
    return None


def of_layer(style: ir.Style, kind: str) -> tuple[ir.Style | None, ir.Style | None] | str:
    """The styles of lora_A and lora_B for a layer's style, or why there are none.

    The adapter's output must have the layout of the layer's output, to which it is added.
    Only tensors of the adapter's rank are communicated, never all features of the layer.

    - colwise: A is replicated, B is sharded as the layer. torch's colwise style all-reduces the
      gradient of its input, so the gradient of A is not partial. Where the input is sharded on the
      sequence dim, A works on the shards, and B all-gathers the output of A.
    - rowwise: A is sharded as the layer, and its output is all-reduced; B is replicated. Where the
      output is sharded on the sequence dim, B works on the shards.
    - sequence: both are replicated and work on sequence shards.

    Args:
        style: the layer's.
        kind: the layer's, `linear` or `embedding`.
    """
    if kind == "embedding":
        return _of_embedding(style)
    match style:
        case ir.Colwise(input=ir.Replicate()):
            whole = ir.Redistribution(ir.Replicate(), ir.Replicate())
            return ir.Input(positional=(whole,), local=True), replace(style, transposed=False)
        case ir.Colwise(input=ir.Shard() as shard) if not _features(shard):
            return ir.Sequence(dim=shard.dim), replace(style, transposed=False)
        case ir.Rowwise(output=ir.Replicate()):
            whole = ir.Redistribution(ir.Replicate(), ir.Replicate())
            kept = None if style.local else ir.Output(positional=(whole,), local=False)
            return replace(style, local=True, transposed=False), kept
        case ir.Rowwise(output=ir.Shard() as shard) if _features(shard):
            a = replace(style, output=ir.Replicate(), local=True, transposed=False)
            return a, ir.Colwise(output=shard, local=style.local)
        case ir.Rowwise(output=ir.Shard() as shard):
            a = replace(style, local=False, transposed=False)  # its shards may be uneven
            return a, ir.Sequence(dim=shard.dim, local=style.local)
        case ir.Sequence():
            return ir.Sequence(dim=style.dim), ir.Sequence(dim=style.dim, local=style.local)
        case ir.Replicated():
            return (style, style) if style.summed else (None, None)
        case ir.Colwise() | ir.Rowwise():
            split = style.output if isinstance(style.output, ir.Partial) else style.input
            return f"the two steps of an adapter cannot have the layout `{split}`"
    return "it is not a style of a linear layer"


def _of_embedding(style: ir.Style) -> tuple[None, None] | str:
    """peft's adapter of an embedding is two parameters, which no torch style can shard."""
    match style:
        case ir.Colwise() | ir.Rowwise() if style.output == ir.Replicate() and style.local:
            return None, None
    return "the adapter of an embedding is replicated, so the embedding's output must be, too"


def _features(shard: ir.Shard) -> bool:
    """Whether a layout shards the features; activations are [batch, sequence, features]."""
    return shard.dim in (-1, 2)
