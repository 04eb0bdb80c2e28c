"""The reset of recurrent states, for a model that has any."""

from collections.abc import Iterator

from planc.ir.nodes import Plan
from planc.model.facts import Facts
from planc.model.recurrent_states import state_updates
from planc.ops.registry import AnyOp
from planc.sections.documents.ops import ResetStates


def lower(plan: Plan, facts: Facts) -> Iterator[AnyOp]:
    """The reset at documents, if each rank computes full sequences; ranks that pass states on
    reset them too.
    """
    contexts = (r.op for r in plan.context if r.op and plan.mesh.size(r.axis) > 1)
    parts = state_updates(facts)
    if parts and all(op.attention == "gather" for op in contexts):
        yield ResetStates(parts=parts)
