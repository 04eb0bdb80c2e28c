"""The number of values that a loss averages, by the autograd graph of the loss.

The nodes next to the root of the graph contain the means, sums and factors of a scalar loss. They
show how a loss is normalized, whichever function of the logits it is.
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

_NODES = 256
"""The largest number of scalar nodes that are read."""
_MEAN, _SUM = 1, 2
"""The values of `_saved_reduction`, see torch's `at::Reduction`."""
_REDUCTIONS = {"MeanBackward0": _MEAN, "MeanBackward1": _MEAN}
_REDUCTIONS |= {"SumBackward0": _SUM, "SumBackward1": _SUM}
_UNCHANGED = (
    *("Add", "Sub", "Neg", "View", "ReshapeAlias", "UnsafeView", "Squeeze", "Unsqueeze"),
    *("ToCopy", "Clone", "Alias", "Stack", "Cat"),
)
_OPEN = threading.local()


class UnknownGraph(Exception):
    """The graph contains an operation whose effect on the weights is not known."""


def await_loss(observe: Callable[[Sequence[Any]], None]) -> None:
    """Calls a bound method with the outputs of this thread's next backward pass."""
    _OPEN.observe = weakref.WeakMethod(observe)


def observe_backward(outputs: Any) -> None:
    """Shows the outputs of a backward pass, before it runs, to the method that awaits them."""
    observe, _OPEN.observe = getattr(_OPEN, "observe", None), None
    method = observe and observe()
    if method is not None:
        method(outputs)


def weights_of(outputs: Sequence[Any]) -> tuple[float, float] | None:
    """Returns the number of values that a loss averages, and the mean weight of one of them; None
    if they are not known.

    Args:
        outputs: the tensors of which a backward pass computes gradients.
    """
    if len(outputs) != 1 or isinstance(outputs[0], DTensor) or outputs[0].numel() != 1:
        return None
    try:
        terms = list(_terms(outputs[0].grad_fn))
    except UnknownGraph:
        return None
    count = sum(count for count, _ in terms)
    return (count, sum(count * weight for count, weight in terms) / count) if count else None


def _terms(root: Any) -> Iterator[tuple[float, float]]:
    """Yields, for each mean or sum in a loss, its number of values and the weight of each.

    Raises:
        UnknownGraph: not all of the graph is known.
    """
    nodes, seen = [(root, 1.0, 1.0)], 0  # with the factor and the number of all nodes before it
    while nodes:
        node, factor, count = nodes.pop()
        seen += 1
        if node is None:
            continue  # a constant
        if seen > _NODES:
            raise UnknownGraph
        name = node.name()
        reduction = _REDUCTIONS.get(name, getattr(node, "_saved_reduction", 0))
        if reduction:
            inner, size = node.next_functions[0][0], _size(*node.next_functions[0])
            averaged = _mean_size(node, size) if reduction == _MEAN else 1.0
            factor, count = factor / averaged, count * averaged
            if inner.name().startswith(("Stack", "Cat")) and size == len(inner.next_functions):
                nodes += [(each, factor, count) for each, _ in inner.next_functions]
            else:
                yield (count if count > 1 else float(size)), abs(factor)
        elif name.startswith(("Mul", "Div")):
            nodes += _factors(node, factor, count)
        elif name.startswith(_UNCHANGED) and _size(node) == 1:
            nodes += [(each, factor, count) for each, _ in node.next_functions]
        else:
            raise UnknownGraph


def _factors(node: Any, factor: float, count: float) -> Iterator[tuple[Any, float, float]]:
    """Yields the inputs of a product or quotient of scalars, with the factor of each."""
    divides, given = node.name().startswith("Div"), ("_saved_other", "_saved_self")
    for (inner, _), name in zip(node.next_functions, given, strict=False):
        if inner is None:
            continue
        other = _number(getattr(node, name, None))
        if divides and (name == "_saved_self" or other == 0):
            raise UnknownGraph
        whole = divides and other.is_integer() and other > 1
        scaled = factor / other if divides else factor * other
        yield inner, scaled, count * other if whole else count


def _mean_size(node: Any, size: int) -> float:
    """The number of values of a mean; the sum of their weights, for classes with weights."""
    total = getattr(node, "_saved_total_weight", None)
    return float(size) if total is None else _number(total)


def _number(value: Any) -> float:
    if isinstance(value, DTensor | None) or (isinstance(value, Tensor) and value.numel() > 1):
        raise UnknownGraph
    return float(value)


def _size(node: Any, index: int = 0) -> int:
    """The number of values of an output of a node."""
    if node is None or not node._input_metadata:
        raise UnknownGraph
    return math.prod(node._input_metadata[index].shape)
