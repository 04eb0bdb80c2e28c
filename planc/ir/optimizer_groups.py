"""The optimizer rule that steps each parameter, and the matrices that Muon orthogonalizes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planc.ir.experts import expert_count
from planc.ir.local_shapes import local_slices, split_by_rules, splitting
from planc.ir.nodes import OptimizerRule, Plan, TensorRule
from planc.ir.parameter_owners import Owned, divided_by, inner_first, owned_modules
from planc.model.facts import Facts, Modules, Parameter, generic
from planc.model.module_table import BATCHED_EXPERTS, TRANSPOSED_EXPERTS
from planc.ops.contract import Split, part_sizes
from planc.ops.optimizer import Cut, Muon
from planc.proxy.products import WeightUse, weight_uses


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A trainable parameter of some modules, and the rule that steps it; None for none."""

    modules: Modules
    parameter: Parameter
    rule: OptimizerRule | None


def is_matrix(modules: Modules, parameter: Parameter) -> bool:
    """Whether a parameter is a matrix, or a stack of experts' matrices."""
    experts = expert_count(modules.module)
    return len(parameter.shape) == (2 if experts is None else 3)


def steps_of(plan: Plan, facts: Facts) -> Iterator[Stepped]:
    """Every trainable parameter with its rule: the innermost one around it that takes it."""
    for assignment in owned_modules(plan, facts):
        yield from _of_owner(assignment, assignment.modules, plan)


def _of_owner(assignment: Owned, modules: Modules, plan: Plan) -> Iterator[Stepped]:
    for piece, rule, other in rules_around(modules, plan):
        for p in piece.module.parameters:
            if assignment.trains(p):
                chosen = rule if is_matrix(piece, p) else other
                yield Stepped(modules=piece, parameter=p, rule=chosen)


def cut_rows(plan: Plan, facts: Facts) -> Iterator[tuple[Stepped, OptimizerRule, tuple[int, ...]]]:
    """The parameters with states in 8 bits whose rows, along the last dim, are split: their rule,
    and the sizes of the slices that a rank has of a row.
    """
    rules, section = splitting(plan), plan.fsdp
    for assignment in owned_modules(plan, facts):
        placement = assignment.spread or assignment.unit
        for part, styles in split_by_rules(assignment.modules, rules):
            for step in _of_owner(assignment, part, plan):
                rule, shape = step.rule, step.parameter.shape
                if rule is None or not rule.op.in_eight_bits(shape):
                    continue
                last = len(shape) - 1
                slices = local_slices(step.parameter, styles, plan).get(last, ())
                ranks = plan.mesh.size(*section.axes(placement)[0]) if section and placement else 1
                if ranks > 1 and placement and placement.shard_dim == last:
                    slices = tuple(size // ranks for size in slices or shape[last:])
                if slices:
                    yield step, rule, slices


def rules_around(
    modules: Modules, plan: Plan
) -> Iterator[tuple[Modules, OptimizerRule | None, OptimizerRule | None]]:
    """The modules, divided by the rules for their matrices and for their other parameters."""
    rules = inner_first([(rule.modules, rule) for rule in plan.optimizer])
    others = [(m, rule) for m, rule in rules if not isinstance(rule.op.algorithm, Muon)]
    for part, rule in divided_by(modules, rules):
        for piece, other in divided_by(part, others):
            yield piece, rule, other


def cut_of(step: Stepped, facts: Facts) -> Cut | str:
    """The matrices of a parameter that Muon orthogonalizes, or why they are unknown.

    They follow from the optimizer rule and the model's code, never from the mesh.
    """
    rule, shape = step.rule, step.parameter.shape
    assert rule is not None
    dim = outputs_dim(step)
    match rule.per:
        case "matrix":
            return Cut()
        case "expert":
            return Cut() if len(shape) == 3 else "it is no stack of experts"
        case "head":
            size = _head_dim(step, facts)
            if size is None:
                return "its module has no `head_dim`"
            if shape[dim] % size:
                return f"its {shape[dim]:,} outputs are not whole heads of {size:,}"
            return Cut(dim=dim, sizes=(size,) * (shape[dim] // size))
    parts, interleaved, use = rule.parts, rule.interleaved, use_of(step, facts)
    if parts != 1 and _beside_fused(step, facts):
        return Cut()
    if parts == 1:
        if isinstance(use, str):
            return f"its parts are unknown, because {use}"
        if use.parts == 1:
            return "the model's code does not cut its outputs" if rule.per else Cut()
        if not use.equal or use.order == "blocks":
            return f"the model's code does not cut it into ranges of equal size: {use.line}"
        parts, interleaved = use.parts, use.alternate
    sizes = part_sizes(Split(dim, parts), shape[dim])
    if sum(sizes) != shape[dim]:
        return f"its dim {dim} is {shape[dim]:,}, the parts are {sum(sizes):,}"
    return Cut(dim=dim, sizes=sizes, interleaved=interleaved)


def use_of(step: Stepped, facts: Facts) -> WeightUse | str:
    """The use of a parameter in the model's code, or why it is unknown."""
    uses = weight_uses(facts)
    if isinstance(uses, str):
        return uses
    return uses.get(generic(f"{step.modules.first_name}.{step.parameter.name}"), WeightUse())


def _beside_fused(step: Stepped, facts: Facts) -> bool:
    """Whether the code cuts the outputs of another weight of the module, and not of this one."""
    parameters = (p for p in step.modules.module.parameters if is_matrix(step.modules, p))
    uses = {p.name: use_of(replace(step, parameter=p), facts) for p in parameters}
    cut = {name for name, use in uses.items() if not isinstance(use, str) and use.parts > 1}
    return bool(cut) and step.parameter.name not in cut


def packing_rule(step: Stepped, plan: Plan) -> tuple[TensorRule, Split] | None:
    """The tensor rule that states the parts of a parameter's outputs; None if there is none."""
    for rule in plan.tensor:
        split = rule.split(step.parameter) if rule.modules.overlap(step.modules) else None
        if split is not None and split.parts != 1 and split.dim == outputs_dim(step):
            return rule, split
    return None


def outputs_dim(step: Stepped) -> int:
    """The dim of a weight's output features."""
    module = step.modules.module
    if len(step.parameter.shape) == 3:
        turned = any(module.fact(f) is not None for f in (TRANSPOSED_EXPERTS, BATCHED_EXPERTS))
        return 2 if turned else 1
    return 1 if module.kind == "conv1d" else 0


def _head_dim(step: Stepped, facts: Facts) -> int | None:
    """The features of a head, as the attention around a projection has them."""
    parts = step.modules.first_name.split(".")
    around = (facts.module_at(".".join(parts[:depth])) for depth in range(len(parts) - 1, 0, -1))
    sizes = (at.module.fact("head_dim") for at in around)
    return next((size for size in sizes if size is not None), None)
