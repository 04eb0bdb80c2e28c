"""Refuses batches of a length that the plan is known to be wrong for."""

import math
from functools import partial
from typing import Any

from torch import Tensor, nn

from planc.ops.base import AxisRole
from planc.ops.lowered import Lowered
from planc.runtime.known_verdict import KnownVerdict
from planc.runtime.preconditions import stop
from planc.runtime.script_line import script_line


def guard(model: nn.Module, lowered: Lowered, known: KnownVerdict | None) -> None:
    """Watches the calls of a model whose plan is proved for equal parts of a sequence alone."""
    ranks = math.lcm(*(a.size for a in lowered.axes if a.role is AxisRole.TENSOR))
    if known is not None and known.even and ranks > 1:
        model.register_forward_pre_hook(partial(_refuse, ranks), with_kwargs=True)


def _refuse(ranks: int, _model: nn.Module, args: Any, kwargs: Any) -> None:
    found = (v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim() > 1)
    first = next(found, None)
    if first is not None and first.shape[1] % ranks:
        raise stop(
            "PL516",
            f"{first.shape[1]} tokens are not divisible by {ranks} ranks of the tensor axis, and "
            "the plan was proved to be wrong or to fail for such lengths",
            *script_line("the batch arrives here"),
            help=f"pad rows on the right to a multiple of {ranks}, with labels of -100; `planc "
            "check` says which rule is to blame",
        )
