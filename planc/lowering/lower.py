"""IR -> lowered operations, in the order of their phases (`planc.ops.base.Phase`):

mesh, pipeline (after adapters, where there are any), configure, adapters, tensor, ties, experts
(and the styles on them), context or resets of states, freezing, quantization, checkpoint, slots of
experts, compile, FSDP (nested units first, the root last), the settings of units, and the loss.

Adapters come first because peft reads the size of a layer from its weight, and a sharded weight has
the size of a rank's shard; and before the pipeline, which remembers what other stages hold. Tensor
parallelism comes before FSDP, which shards the local tensors; a checkpoint wrapper goes inside
compile and FSDP so that recomputation happens while the unit's parameters are gathered; compile
goes inside FSDP because FSDP's hooks are graph breaks. Freezing comes after tensor parallelism,
which may create new parameters, and before FSDP, which reads `requires_grad`; so does
quantization, because no style can shard a compressed weight. (The order of torchtitan's
`parallelize_llama`.) The loss takes what the head returns after the hooks of styles and FSDP, so
its own hook is the last.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import TypeVar

from planc.infer.apply_adapters import styles
from planc.ir.experts import dividing, expert_count, expert_styles, splits_divided
from planc.ir.local_shapes import local_shape, split_by_rules
from planc.ir.nodes import AdapterRule, OptimizerRule, Plan, TensorRule
from planc.ir.optimizer_groups import cut_of, steps_of
from planc.ir.parameter_owners import stepped_dtypes
from planc.lowering.fsdp import data_axes, settings, units_of
from planc.lowering.lora import adapt, scales
from planc.lowering.memory import Holdings
from planc.lowering.stages import of_ranks
from planc.model.facts import MODULE_DICT, Facts, Module, Modules
from planc.model.module_table import BATCHED_EXPERTS
from planc.model.rotary import length_dependent_rotary
from planc.ops.backend import Backend
from planc.ops.base import AxisRole, Op, Phase, Shape
from planc.ops.configure import Configure
from planc.ops.context import Attend, ContextParallel
from planc.ops.expert_capacity import LimitExperts
from planc.ops.expert_parallel import ALL_REDUCE, DispatchExperts
from planc.ops.freeze import Freeze
from planc.ops.fsdp import FullyShard
from planc.ops.lora import BASE_LAYER, Adapt
from planc.ops.lowered import Lowered, Stage
from planc.ops.optimizer import Cut, Muon, Optimize
from planc.ops.registry import AnyOp
from planc.ops.rotary import ShareLongestPosition
from planc.ops.styles import PARAMETERLESS, Input, Output, Replicated, Sequence
from planc.ops.tensor_parallel import Parallelize, Tie
from planc.sections import IMPLIED, Hook


def lower(plan: Plan, facts: Facts) -> Lowered:
    """The ordered operations of a plan without errors, for its model, both with adapters.

    Before:
        tensor on tp { model.layers.*.mlp.up_proj : colwise }
        checkpoint { model.layers.* : full }
        fsdp on dp_shard { model.layers.* : unit }

    After:
        Parallelize(model.layers[0:32].mlp.up_proj, Colwise, axis tp)
        Checkpoint(model.layers[0:32])
        FullyShard(model.layers[0:32], over dp_shard)

    Styles over an axis of one rank are left out, and so is `replicate`, a no-op.
    """
    added = [*adapt(plan)]
    return _lower(plan, facts, tuple(_stage(*part, added) for part in of_ranks(plan, facts)))


def on_activations(plan: Plan, facts: Facts) -> Lowered:
    """The operations alone whose modules send activations, of all stages as of one: their sizes
    need no unit of FSDP, which takes most of the time that lowering does.
    """
    ops: list[AnyOp] = [
        *([plan.pipeline.op] if plan.pipeline else []),
        *_on_modules(plan, _wide(plan), _adapter_rules(plan)),
        *(op for op in _section_operations(plan, facts) if op.SENDS_ACTIVATIONS),
    ]
    return _lower(plan, facts, (Stage(ops=tuple(ops)),))


def _lower(plan: Plan, facts: Facts, stages: tuple[Stage, ...]) -> Lowered:
    return Lowered(
        plan=plan.name,
        model=facts.name,
        family=facts.family,
        layers=_layers(facts.root),
        module_dicts=tuple(_module_dicts(facts)),
        axes=plan.mesh.axes,
        experts=plan.mesh.experts,
        data=data_axes(plan),
        stages=stages,
    )


def _wide(plan: Plan) -> list[TensorRule]:
    """The tensor rules over axes of several ranks, but for those that change nothing."""
    return [r for r in plan.tensor if plan.mesh.size(r.axis) > 1 and r.style != Replicated()]


def _adapter_rules(plan: Plan) -> list[TensorRule]:
    """The tensor rules of adapters' layers."""
    return [r for r in styles(plan) if plan.mesh.size(r.axis) > 1]


def _stage(plan: Plan, facts: Facts, adapters: list[Adapt]) -> Stage:
    """The operations of one pipeline rank, by these ranks' modules alone, but
    for the adapters, which are added while the model is whole.
    """
    tensor, derived = _wide(plan), _adapter_rules(plan)
    holdings = Holdings(facts, plan, [*tensor, *derived, *expert_styles(plan)])
    units = _sharding(plan, facts, holdings)
    whole = plan.fsdp is not None and plan.fsdp.backend is not None
    at_rest = units[0].nbytes if whole else holdings.at_rest()
    # a style on expert-parallel weights shards the local experts, and sums the outputs of all ranks
    inside = [r for r in tensor if splits_divided(r, plan)]
    tensor = [r for r in tensor if r not in inside]
    ops: list[AnyOp] = [
        *_on_model(plan, facts, adapters),
        *_on_modules(plan, tensor, derived),
        *_ties(facts, tensor, plan),
        *_freeze(tensor, plan),
        *_section_operations(plan, facts),
        *units,
        *settings(plan, facts),
        *_rotary(plan, facts),
        *_merge(optimize(plan, facts)),
    ]
    phases = [(op.PHASE, op) for op in ops]
    phases += [(Phase.INSIDE_EXPERTS, op) for op in _merge(_parallelize(_order(inside), plan))]
    return Stage(
        parameters=at_rest + scales(plan),
        gathered=max((u.gathered for u in units), default=0),
        steps=tuple(sorted(stepped_dtypes(plan, facts))),
        ops=tuple(op for _, op in sorted(phases, key=itemgetter(0))),
    )


def _on_model(plan: Plan, facts: Facts, adapters: list[Adapt]) -> Iterator[AnyOp]:
    """Yields the operations before any weight is split."""
    pipeline = [plan.pipeline.op] if plan.pipeline else []
    yield from pipeline if not adapters else ()
    yield from configure(facts)
    yield from [plan.load] if plan.load else ()
    yield from adapters
    yield from pipeline if adapters else ()


def _on_modules(
    plan: Plan, tensor: Iterable[TensorRule], derived: Iterable[TensorRule]
) -> Iterator[AnyOp]:
    """Yields the operations whose modules send activations, but for those of sections.

    Args:
        tensor, derived: the rules that styles are lowered from: of the plan, and of adapters.
    """
    yield from _merge(_parallelize(_order([*_on_layers(tensor, plan), *derived]), plan))
    yield from _merge(dispatch_operations(plan))
    yield from _merge(capacity_operations(plan))
    yield from _contexts(plan)
    yield from _merge(_exchanges(plan))


_LOWER = Hook[Callable[[Plan, Facts], Iterator[AnyOp]]]("lowering", "lower")


def _section_operations(plan: Plan, facts: Facts) -> Iterator[AnyOp]:
    """The operations of sections that are folders."""
    for operations in _LOWER.find_all((*plan.sections, *IMPLIED)):
        yield from _merge(operations(plan, facts))


def _exchanges(plan: Plan) -> Iterator[Attend]:
    """Layers whose attention exchanges otherwise over an axis of several ranks."""
    yield from (op for op in plan.attention if plan.mesh.size(op.axis) > 1)


def _contexts(plan: Plan) -> Iterator[ContextParallel]:
    """An axis of one rank has whole sequences."""
    for rule in plan.context:
        if rule.op is not None and plan.mesh.size(rule.axis) > 1:
            yield rule.op


def _rotary(plan: Plan, facts: Facts) -> Iterator[ShareLongestPosition]:
    """Ranks choose the frequencies of one process that reads the rows of all of them."""
    if length_dependent_rotary(facts.config):
        axes = tuple(axis for axis in data_axes(plan) if plan.mesh.size(axis) > 1)
        parts = tuple(op.axis for op in _contexts(plan) if plan.mesh.size(op.axis) > 1)
        if axes or parts or plan.pipeline:
            yield ShareLongestPosition(axes=axes, parts=parts)


def _sharding(plan: Plan, facts: Facts, holdings: Holdings) -> list[FullyShard] | list[Backend]:
    if plan.fsdp is None:
        return []
    if (op := plan.fsdp.backend) is not None:
        return [op.part("lowering").lower_shards(plan, op, facts, holdings)]
    return _merge(units_of(plan.fsdp, holdings))


OpT = TypeVar("OpT", bound=Op)


def _merge(ops: Iterable[OpT]) -> list[OpT]:
    """Equal operations on modules whose paths differ in one set of indices, merged."""
    result: list[OpT] = []
    for op in ops:
        for i, other in enumerate(result):
            if (union := other.union(op)) is not None:
                result[i] = union
                break
        else:
            result.append(op)
    return result


def _layers(root: Module) -> int:
    lists = [sum(c.times for c in root.children if c.indices)]
    lists += [_layers(child.module) for child in root.children]
    return max(lists)


def _module_dicts(facts: Facts) -> Iterator[str]:
    """Yields the lists that are an nn.ModuleDict, with `*` for indices."""
    lists = (m for m in facts.model.below() if m.module.kind == "list" and m.path)
    module_dicts = (m for m in lists if m.module.cls == MODULE_DICT)
    names = (".".join(s if isinstance(s, str) else "*" for s in m.path) for m in module_dicts)
    yield from dict.fromkeys(names)


def _order(rules: Iterable[TensorRule]) -> list[TensorRule]:
    """The plan's order, with the rules inside one list of blocks together.

    Of the styles on one module, an input style is first and an output style last:
    `parallelize_module` installs hooks, and torch runs them in the order of installation.
    """
    rules = list(rules)
    blocks = list(dict.fromkeys(_block(r) for r in rules))

    def rank(rule: TensorRule) -> tuple[int, int, int]:
        first = next(i for i, r in enumerate(rules) if r.modules.overlap(rule.modules))
        side = isinstance(rule.style, Output) - isinstance(rule.style, Input)
        return blocks.index(_block(rule)), first, side

    return sorted(rules, key=rank)


def _block(rule: TensorRule) -> tuple[str, ...]:
    key = rule.modules.key
    return key[: len(key) - key[::-1].index("[]")] if "[]" in key else ()


def _parallelize(rules: list[TensorRule], plan: Plan) -> Iterator[Parallelize]:
    """The operations of rules in order. A rule over another axis shards the local tensors of the
    rules before it, so its modules are split by those rules.
    """
    for i, rule in enumerate(rules):
        module = rule.modules.module
        earlier = [r for r in rules[:i] if r.axis != rule.axis]
        for modules, before in split_by_rules(rule.modules, earlier):
            yield Parallelize(
                modules=modules,
                axes=(rule.axis,),
                style=rule.style,
                shapes=tuple(
                    Shape(
                        name=p.name,
                        shape=local_shape(p, before, plan),
                        local=local_shape(p, (*before, rule), plan),
                    )
                    for p in module.parameters
                    if rule.split(p)
                ),
                inferred=rule.inferred.text if rule.inferred else "",
                origin=rule.origin,
            )


def _on_layers(rules: Iterable[TensorRule], plan: Plan) -> Iterator[TensorRule]:
    """The rules on the modules that are adapted: peft wraps a layer, which becomes its
    `base_layer`.

    Styles that change inputs or outputs stay on the wrapper, where they apply to the adapter too.
    """
    for rule in rules:
        if isinstance(rule.style, PARAMETERLESS):
            yield rule
            continue
        wrapped = [adapter.modules for adapter in _wrapping(plan)]
        for both in filter(None, map(rule.modules.overlap, wrapped)):
            yield replace(rule, modules=Modules((*both.path, BASE_LAYER), both.module))
        yield from (replace(rule, modules=part) for part in rule.modules.subtract(wrapped))


def _wrapping(plan: Plan) -> list[AdapterRule]:
    """The rules whose layers peft wraps."""
    return [r for r in plan.adapters.rules if r.wraps] if plan.adapters else []


def _freeze(tensor: Iterable[TensorRule], plan: Plan) -> Iterator[Freeze]:
    """Freezes again what `SequenceParallel` unfreezes; torch 2.13's other styles do not."""
    whole = [r for r in tensor if isinstance(r.style, Sequence) and r.modules.module.parameters]
    frozen = plan.adapters is not None and bool(plan.adapters.rules)
    for rule in _on_layers(_order(whole), plan):
        if frozen or not any(p.trainable for p in rule.modules.module.parameters):
            yield Freeze(modules=rule.modules)


def _ties(facts: Facts, tensor: list[TensorRule], plan: Plan) -> Iterator[Tie]:
    """`parallelize_module` creates new parameters and breaks ties, so parameters are tied again.

    All are tied to the first one that a rule creates: a head's bias that its parent names too is
    sharded as the head's.
    """

    def now(parameter: str) -> str:
        owner, _, name = parameter.rpartition(".")
        inside = any(r.modules.has(owner) for r in _wrapping(plan))
        return f"{owner}.{BASE_LAYER}.{name}" if inside else parameter

    # styles create replicated parameters anew, too
    making = [r.modules for r in tensor if not isinstance(r.style, PARAMETERLESS)]
    for group in facts.ties:
        recreated = [n for n in group if any(m.has(n.rpartition(".")[0]) for m in making)]
        for other in group if recreated else ():
            if other != recreated[0]:
                yield Tie(parameter=now(other), source=now(recreated[0]))


def configure(facts: Facts) -> Iterator[Configure]:
    """Disables the key/value cache: it costs memory and breaks activation checkpointing.

    A multimodal model has the field in the configuration of each part (`text_config`).
    """
    inner = {f"{n}.": part for n, part in facts.config.items() if isinstance(part, Mapping)}
    for owner, values in {"": facts.config, **inner}.items():
        if values.get("use_cache") is True:
            reason = "training keeps no key/value cache"
            yield Configure(name=f"{owner}use_cache", value=False, reason=reason)


def dispatch_operations(plan: Plan) -> Iterator[DispatchExperts]:
    """The operations of the expert rules; none where one rank has all experts."""
    experts = plan.mesh.experts
    if experts is None:
        return
    tensor = (a for a in plan.mesh.of_role(AxisRole.TENSOR) if a.name not in experts.inside)
    alike = tuple(a.name for a in tensor if a.size > 1)
    split = [r for r in plan.tensor if splits_divided(r, plan)]
    for rule, style in zip(dividing(plan), expert_styles(plan), strict=True):
        module = rule.modules.module
        for modules, inside in split_by_rules(rule.modules, split):
            held = (style, *inside)
            yield DispatchExperts(
                modules=modules,
                axis=experts.ranks.name,
                dispatch=rule.dispatch,
                shared=alike if rule.dispatch != ALL_REDUCE else (),
                chunks=rule.chunks,
                batched=module.fact(BATCHED_EXPERTS) is not None,
                shapes=tuple(
                    Shape(name=p.name, shape=p.shape, local=local_shape(p, held, plan))
                    for p in module.parameters
                ),
                origin=rule.origin,
            )


def capacity_operations(plan: Plan) -> Iterator[LimitExperts]:
    """The slots of experts, which are as many on one rank."""
    part = next(_contexts(plan), None)
    for rule in plan.experts:
        count = expert_count(rule.modules.module)
        if rule.capacity is None or count is None:
            continue
        yield LimitExperts(
            modules=rule.modules,
            experts=count,
            capacity=rule.capacity,
            drop=rule.drop,
            sent=plan.mesh.experts is not None,
            axis=part.axis if part else None,
            balance=part.balance if part else "none",
            origin=rule.origin,
        )


def optimize(plan: Plan, facts: Facts) -> Iterator[Optimize]:
    """Rules of other algorithms, outer modules first; then the matrices of each `muon`, on the
    modules that hold them.
    """
    for rule in plan.optimizer:
        if not isinstance(rule.op.algorithm, Muon):
            yield replace(rule.op, modules=rule.modules, origin=rule.origin)
    cuts_by_rule: dict[tuple[Modules, OptimizerRule], list[tuple[str, Cut]]] = {}
    for step in steps_of(plan, facts):
        if step.rule is None or not isinstance(step.rule.op.algorithm, Muon):
            continue
        cut = cut_of(step, facts)
        if isinstance(cut, Cut):
            cuts_by_rule.setdefault((step.modules, step.rule), []).append(
                (step.parameter.name, cut)
            )
    for (modules, rule), cuts in cuts_by_rule.items():
        assert isinstance(rule.op.algorithm, Muon)
        algorithm = replace(rule.op.algorithm, units=tuple(cuts))
        yield replace(rule.op, modules=modules, algorithm=algorithm, origin=rule.origin)
