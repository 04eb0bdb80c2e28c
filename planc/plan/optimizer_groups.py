"""Which optimizer rule steps a parameter, and what Muon orthogonalizes of it."""

from collections.abc import Iterator
from dataclasses import dataclass

from planc.model.facts import Facts, Modules, Parameter
from planc.model.module_table import BATCHED_EXPERTS, TRANSPOSED_EXPERTS
from planc.ops.contract import Split, part_sizes
from planc.ops.optimizer import Cut, Muon
from planc.plan.experts import expert_count
from planc.plan.ir import OptimizerRule, Plan
from planc.plan.local_shapes import local_slices, ruled, splitting
from planc.plan.parameter_owners import Owned, divided_by, inner_first, owned


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
    for own in owned(plan, facts):
        yield from _of_owner(own, own.modules, plan)


def _of_owner(own: Owned, modules: Modules, plan: Plan) -> Iterator[Stepped]:
    for piece, rule, other in rules_around(modules, plan):
        for p in piece.module.parameters:
            if own.trains(p):
                chosen = rule if is_matrix(piece, p) else other
                yield Stepped(modules=piece, parameter=p, rule=chosen)


def cut_rows(plan: Plan, facts: Facts) -> Iterator[tuple[Stepped, OptimizerRule, tuple[int, ...]]]:
    """The parameters with states in 8 bits whose rows, along the last dim, are split: their rule,
    and the sizes of the slices that a rank has of a row.
    """
    rules, section = splitting(plan), plan.fsdp
    for own in owned(plan, facts):
        placement = own.spread or own.unit
        for part, styles in ruled(own.modules, rules):
            for step in _of_owner(own, part, plan):
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
    every = inner_first([(rule.modules, rule) for rule in plan.optimizer])
    others = [(m, rule) for m, rule in every if not isinstance(rule.op.algorithm, Muon)]
    for part, rule in divided_by(modules, every):
        for piece, other in divided_by(part, others):
            yield piece, rule, other


def cut_of(step: Stepped, plan: Plan, facts: Facts) -> Cut | str:
    """The matrices that Muon orthogonalizes of a parameter, or why there are none such."""
    rule, shape = step.rule, step.parameter.shape
    assert rule is not None
    fused = fused_parts(step, plan)
    if rule.parts != 1:
        dim = fused.dim if fused else _outputs(step)
        fused = Split(dim, rule.parts, rule.interleaved)
    match rule.per:
        case "head":
            size = _head_dim(step, facts)
            if size is None:
                return "its module has no `head_dim`"
            dim = _outputs(step)
            if shape[dim] % size:
                return f"its {shape[dim]:,} outputs are not whole heads of {size:,}"
            return Cut(dim=dim, sizes=(size,) * (shape[dim] // size))
        case "part" if fused is None:
            return "no tensor rule says its parts"
        case "expert" if len(shape) != 3:
            return "it is no stack of experts"
        case "matrix" | "expert":
            fused = None
    if fused is None:
        return Cut()
    sizes = part_sizes(fused, shape[fused.dim])
    if sum(sizes) != shape[fused.dim]:
        return f"its dim {fused.dim} is {shape[fused.dim]:,}, the parts are {sum(sizes):,}"
    return Cut(dim=fused.dim, sizes=sizes, interleaved=fused.interleaved)


def fused_parts(step: Stepped, plan: Plan) -> Split | None:
    """How a tensor rule says that a parameter packs several projections; None where none does."""
    rules = (r for r in plan.tensor if r.modules.overlap(step.modules))
    splits = (split for r in rules if (split := r.split(step.parameter)) is not None)
    return next((split for split in splits if split.parts != 1), None)


def _outputs(step: Stepped) -> int:
    """The dim of a weight's output features."""
    module = step.modules.module
    if len(step.parameter.shape) == 3:
        turned = any(module.fact(f) is not None for f in (TRANSPOSED_EXPERTS, BATCHED_EXPERTS))
        return 2 if turned else 1
    return 1 if module.kind == "conv1d" else 0


def _head_dim(step: Stepped, facts: Facts) -> int | None:
    """The features of a head, as the attention around a projection has them."""
    parts = step.modules.first_name.split(".")
    around = (facts.at(".".join(parts[:depth])) for depth in range(len(parts) - 1, 0, -1))
    sizes = (at.module.fact("head_dim") for at in around)
    return next((size for size in sizes if size is not None), None)
