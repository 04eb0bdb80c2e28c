"""Queries on expert sections: which rules divide experts, and the layouts of parameters."""

from planc.ir.nodes import ExpertRule, Plan, TensorRule
from planc.model.facts import Module
from planc.model.module_table import BATCHED_EXPERTS, FUSED_EXPERTS
from planc.ops.styles import Experts, ParameterLayout, Parameters, Shard


def dividing(plan: Plan) -> tuple[ExpertRule, ...]:
    """The expert-parallel rules, if there is more than one expert-parallel rank."""
    return plan.experts if plan.mesh.experts else ()


def expert_styles(plan: Plan) -> list[TensorRule]:
    """The layouts of expert-parallel weights as tensor rules, from which local shapes follow."""
    experts = plan.mesh.experts
    rest = ParameterLayout(layout=Shard(0))
    return [
        TensorRule(
            modules=rule.modules,
            axis=experts.ranks.name,
            style=Parameters(layouts=tuple((p.name, rest) for p in rule.modules.module.parameters)),
            origin=rule.origin,
        )
        for rule in dividing(plan)
        if experts is not None
    ]


def expert_count(module: Module) -> int | None:
    """The number of fused experts of a module; None for any other module."""
    count = module.fact(FUSED_EXPERTS)
    return module.fact(BATCHED_EXPERTS) if count is None else count


def fullest(plan: Plan, imbalance: float) -> float:
    """The most tokens that the experts of one rank take, as a multiple of the mean over ranks."""
    limits = [rule.capacity for rule in dividing(plan)]
    known_limits = [limit for limit in limits if limit is not None]
    return min(imbalance, max(known_limits)) if known_limits and None not in limits else imbalance


def splits_divided(rule: TensorRule, plan: Plan) -> bool:
    """Whether a style shards the weights inside each expert of an expert-parallel module."""
    experts = plan.mesh.experts
    return (
        experts is not None
        and rule.axis in experts.inside
        and isinstance(rule.style, Experts)
        and any(rule.modules.overlap(other.modules) for other in dividing(plan))
    )
