"""The verdict on the loss."""

from collections.abc import Iterator

from planc.ir.nodes import Plan


def verdict_names(plan: Plan) -> Iterator[str]:
    """A verdict for each head, also where no axis has several ranks."""
    for rule in plan.sections["loss"]:
        yield f"loss on {rule.axes[0]}" if rule.axes else "loss"
