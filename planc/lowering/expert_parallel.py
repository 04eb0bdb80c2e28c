"""Expert rules -> operations."""

from __future__ import annotations

from collections.abc import Iterator

from planc.model.module_table import BATCHED_EXPERTS
from planc.ops.base import AxisRole
from planc.ops.expert_parallel import ALL_TO_ALL, DispatchExperts
from planc.ops.tensor_parallel import Shape
from planc.plan.expert_rules import dividing, expert_styles
from planc.plan.ir import Plan
from planc.plan.local_shapes import local_shape


def divided(plan: Plan) -> Iterator[DispatchExperts]:
    """The operations of the expert rules; none where one rank has all experts."""
    experts = plan.mesh.experts
    if experts is None:
        return
    alike = tuple(a.name for a in plan.mesh.of_role(AxisRole.TENSOR) if a.size > 1)
    for rule, style in zip(dividing(plan), expert_styles(plan), strict=True):
        module = rule.modules.module
        yield DispatchExperts(
            modules=rule.modules,
            axis=experts.ranks.name,
            dispatch=rule.dispatch,
            shared=alike if rule.dispatch == ALL_TO_ALL else (),
            batched=module.fact(BATCHED_EXPERTS) is not None,
            shapes=tuple(
                Shape(name=p.name, shape=p.shape, local=local_shape(p, (style,), plan))
                for p in module.parameters
            ),
            origin=rule.origin,
        )
