"""Refuses batches whose tokens would see what they must not: other documents, and padding."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from planc.diagnostics.diagnostic import PlanError
from planc.runtime.leaks import DOCUMENTS, PADDING, leaks
from planc.runtime.preconditions import stop, warning
from planc.runtime.script_line import script_line
from planc.runtime.standalone.context import CONTEXT
from planc.runtime.standalone.documents import RESETS, STATED

_KEPT = "_planc_leaks"


def not_apart(text: str) -> PlanError:
    """The error for a batch whose documents the resets cannot keep apart."""
    return stop(
        "PL519",
        f"the documents of this batch cannot be kept apart: {text}",
        *script_line("the batch arrives here"),
        help="mark documents by `position_ids` that restart at 0, and without a "
        "mask; or give each document a row of its own",
    )


def class_of(model: nn.Module) -> type | None:
    """The model's class in transformers; None for a class of another library."""
    kinds = (k for k in type(model).__mro__ if k.__module__.startswith("transformers.models."))
    return next(kinds, None) if hasattr(model, "config") else None


def refuse(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Stops where a batch has packed documents, or padding on the left, that the model's other
    tokens would see; returns whether a later batch may have. Warns (PL558) if it is not known
    what they see.

    Raises:
        PlanError: PL517, documents; PL518, padding.
    """
    if batch.get("position_ids") is None and batch.get("attention_mask") is None:
        return True  # nothing to leak, and no proxy model to run
    kind = class_of(model)
    name = kind.__name__ if kind else ""
    found = model.__dict__.get(_KEPT)
    if found is None:
        reset, context = model.__dict__.get(RESETS), model.__dict__.get(CONTEXT)
        # ranks with a part of each row keep documents apart as they exchange states
        parts = sorted(reset.parts if reset else context.states if context else ())
        found = leaks(model.config.to_dict(), name, parts) if kind else {}
        model.__dict__[_KEPT] = found
    if isinstance(found, str):
        if rows_at_risk := _has_packed_documents(batch) or _has_left_padding(batch):
            _warn_unknown(name, found)
        return not rows_at_risk  # one warning is enough
    if DOCUMENTS in found and _has_packed_documents(batch):
        raise stop(
            "PL517",
            f"rows with several documents: positions restart at 0, and in {name} the tokens of one "
            f"document see those before it (they move by {found[DOCUMENTS]:.1g} of the output)",
            *script_line("the batch arrives here"),
            help="give each document a row of its own, padded on the right; or leave out "
            "`position_ids`, if documents may see each other",
        )
    if PADDING in found and _has_left_padding(batch):
        raise stop(
            "PL518",
            f"rows with padding on the left, which the tokens of {name} see (they move by "
            f"{found[PADDING]:.1g} of the output)",
            *script_line("the batch arrives here"),
            help="pad rows on the right, with labels of -100",
        )
    return bool(found)


def _warn_unknown(name: str, reason: str) -> None:
    warning(
        "PL558",
        f"rows with several documents, or with padding on the left: whether {name} keeps them "
        f"apart is unknown ({reason})",
        *script_line("the batch arrives here"),
        help="give each document a row of its own, padded on the right",
    )


def _has_packed_documents(batch: Mapping[str, Any]) -> bool:
    """Whether documents are isolated by the positions alone."""
    stated = any(batch.get(name) is not None for name in ("attention_mask", *STATED))
    return not stated and _holds(batch.get("position_ids"), _begins_again)


def _has_left_padding(batch: Mapping[str, Any]) -> bool:
    return _holds(batch.get("attention_mask"), _padded_before)


def _holds(value: Any, condition: Callable[[Tensor], Tensor]) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and bool(condition(value).any())


def _begins_again(positions: Tensor) -> Tensor:
    return positions.diff(dim=-1) != 1


def _padded_before(mask: Tensor) -> Tensor:
    return mask[:, 0] == 0
