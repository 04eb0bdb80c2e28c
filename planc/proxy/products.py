"""Finds the use of each weight in a model's code: the weights that are factors of products, and of
these the fused ones, whose outputs the code splits into several projections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from planc.model.dataflow import VIEWS, DataFlow, Operation
from planc.model.facts import Facts, generic
from planc.proxy.flow import flow_of, flow_source

_LAYERS = 2
"""The layers of the proxy model, which has layers of every kind."""
_FEW = (2, 3)
"""The possible numbers of parts of a view: keys and values, with or without queries."""
_CUTS = frozenset(
    {"chunk", "split", "split_with_sizes", "tensor_split", "unbind", "narrow", "__getitem__"}
)
_EQUAL = frozenset({"chunk", "unbind"})
"""Cuts into parts of equal size, if the size of the dim allows it."""
_PRODUCTS = frozenset(
    {"linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "__matmul__", "__rmatmul__", "einsum"}
    | {"_grouped_mm", "grouped_mm"}
)
_SAME = VIEWS.union(
    ("to", "type", "float", "transpose", "permute", "squeeze", "unsqueeze", "t", "__get__")
)
"""Operations that give the numbers of their input in another layout or dtype."""
_ELEMENTWISE = frozenset({"add", "mul", "sub", "div", "exp", "radd", "rmul", "rsub", "neg"})


Order = Literal["ranges", "alternate", "blocks"]
"""Ranges of features, every n-th feature, or ranges of each block of features, such as a head."""


@dataclass(frozen=True, slots=True)
class WeightUse:
    """The use of a weight in a model's code.

    Args:
        elementwise: whether it is added or multiplied elementwise, and a factor of no product.
        heads: whether the code views features of its product as heads.
        sizes: the features of each part into which the code cuts its product, in the proxy model;
            empty if the code does not cut it.
        order: how the parts lie in the features.
        equal: whether the code cuts parts of equal size, whatever the sizes of the model.
        line: the line of the code that cuts, as a text.
    """

    elementwise: bool = False
    heads: bool = True
    sizes: tuple[int, ...] = ()
    order: Order = "ranges"
    equal: bool = False
    line: str = ""

    @property
    def parts(self) -> int:
        """The number of parts into which the code cuts the features of the product."""
        return len(self.sizes) or 1

    @property
    def alternate(self) -> bool:
        """Whether each part is every n-th of the features."""
        return self.order == "alternate"


def weight_uses(facts: Facts) -> Mapping[str, WeightUse] | str:
    """The uses of parameters, by their names with `*` for indices, or why no flow is known."""
    if _USES not in facts.memo:
        source = flow_source(facts, {}, _LAYERS)
        flow = source if isinstance(source, str) else flow_of(source, facts)
        facts.remember(_USES, flow if isinstance(flow, str) else _uses(flow))
    uses: Mapping[str, WeightUse] | str = facts.memo[_USES]
    return uses


_USES = "weight_uses"


def _uses(flow: DataFlow) -> Mapping[str, WeightUse]:
    uses: dict[str, WeightUse] = {}
    for weight, name in flow.weights.items():
        use = _use(weight, flow)
        if use.parts > uses.setdefault(generic(name), use).parts:  # a block of another kind
            uses[generic(name)] = use
    return uses


def _use(weight: int, flow: DataFlow) -> WeightUse:
    names, products = set[str](), list[Operation]()
    for operation in _after(weight, flow, _SAME | {"__getitem__"}):
        names.add(operation.name.strip("_"))
        products += [operation] if operation.name in _PRODUCTS else []
    if not products:
        return WeightUse(elementwise=bool(names) and names <= _ELEMENTWISE)
    given = [tensor for product in products for tensor in product.outputs]
    heads = any(_of_heads(tensor, flow) for tensor in given)
    for tensor in given:
        parts_of_product = cut_into(tensor, flow)
        if len(parts_of_product) > 1:
            by = flow.makers[parts_of_product[0]][0]
            sizes, order = _parts(tensor, parts_of_product, by, flow)
        elif (parts := viewed_parts(tensor, flow)) > 1:
            by, order = flow.users[tensor][0], "ranges"
            sizes = (flow.shapes[tensor][-1] // parts,) * parts
        else:
            continue
        equal = not parts_of_product or by.skips or by.name in _EQUAL
        line = str(flow.lines[by.line])
        return WeightUse(heads=heads, sizes=sizes, order=order, equal=equal, line=line)
    return WeightUse(heads=heads)


def _parts(
    tensor: int, pieces: tuple[int, ...], by: Operation, flow: DataFlow
) -> tuple[tuple[int, ...], Order]:
    """The features of each part of a product, and how the parts lie in its features."""
    features, view = flow.shapes[tensor][-1], flow.shapes[by.inputs[0]]
    first = flow.shapes[pieces[0]]
    sizes = tuple(prod(flow.shapes[t]) * features // prod(view) for t in pieces)
    if by.skips:
        return sizes, "alternate"
    cut = next(i for i, size in enumerate(view) if first[i : i + 1] != (size,))
    return sizes, "ranges" if prod(view[cut:]) == features else "blocks"


def _of_heads(tensor: int, flow: DataFlow) -> bool:
    """Whether the features of a product, or ranges of them, may be heads: those of one that is
    added to hidden states, before anything views it as heads, are none.
    """
    waiting, seen, added = [tensor], set[int](), False
    while waiting:
        seen.add(at := waiting.pop())
        if view_dims(at, flow):
            return True
        shape = flow.shapes[at]
        for user in flow.users.get(at, ()):
            others = (t for t in user.inputs if t != at and t in flow.live)
            if user.name in _PRODUCTS or any(flow.shapes[t] == shape for t in others):
                added |= user.adds
                continue
            waiting += [t for t in user.outputs if flow.shapes[t][-1:] == shape[-1:]]
        waiting = [t for t in (*waiting, *ranges(at, flow)) if t not in seen]
    return not added


def _after(tensor: int, flow: DataFlow, through: frozenset[str]) -> Iterator[Operation]:
    """Yields the operations that take a tensor, also through others of these names."""
    waiting, seen = [tensor], {tensor}
    while waiting:
        for user in flow.users.get(waiting.pop(), ()):
            if user.name not in through:
                yield user
                continue
            new = [t for t in user.outputs if t not in seen]
            seen.update(new)
            waiting += new


def skip_elementwise(tensor: int, flow: DataFlow) -> int:
    """The tensor after what changes no shape, such as a bias or a norm."""
    outputs = [t for user in flow.users.get(tensor, ()) for t in user.outputs]
    if (
        len(outputs) == 1
        and outputs[0] != tensor
        and flow.shapes[outputs[0]] == flow.shapes[tensor]
    ):
        return skip_elementwise(outputs[0], flow)
    return tensor


def cut_into(tensor: int, flow: DataFlow) -> tuple[int, ...]:
    """The tensors into which the code cuts the features of a product: ranges of them, or at least
    three of each head's. None where it does not: two of a head are what turns with its position and
    what does not, of one projection.
    """
    tensor = skip_elementwise(tensor, flow)
    if pieces := ranges(tensor, flow):
        return pieces
    lead = len(flow.shapes[tensor]) - 1
    for user in flow.users.get(tensor, ()):
        for view in user.outputs if user.name in _SAME else ():
            inner = len(flow.shapes[view]) - lead
            pieces = _cut(view, flow, inner) if inner > 1 else ()
            if len(pieces) > 2 or any(
                flow.shapes[t][lead] < flow.shapes[view][lead] for t in pieces
            ):
                return pieces
            if len(pieces := _permuted_ranges(view, flow)) > 2:
                return pieces
    return ()


def ranges(tensor: int, flow: DataFlow) -> tuple[int, ...]:
    """The tensors that are ranges of a tensor's last dim, and together all of it; else none."""
    return _cut(tensor, flow, 1)


def _permuted_ranges(tensor: int, flow: DataFlow) -> tuple[int, ...]:
    """The ranges of a tensor's last dim after others are in another order; else none."""
    others = (t for user in flow.users.get(tensor, ()) if user.moves for t in user.outputs)
    return next((pieces for t in others if (pieces := ranges(t, flow))), ())


def _cut(tensor: int, flow: DataFlow, dims: int) -> tuple[int, ...]:
    """Into what a tensor is cut whole, along one of its last dims."""
    shape = flow.shapes[tensor]
    users = [user for user in flow.users.get(tensor, ()) if user.name in _CUTS]
    pieces = tuple(dict.fromkeys(t for user in users for t in user.outputs if t != tensor))
    shapes = [flow.shapes[t] for t in pieces]
    first = len(shape) - dims
    whole = len(pieces) > 1 and sum(map(prod, shapes)) == prod(shape) and all(map(prod, shapes))
    return pieces if whole and {s[:first] for s in shapes} == {shape[:first]} else ()


def viewed_parts(tensor: int, flow: DataFlow) -> int:
    """The number of equal parts, such as keys and values, as which the code views features; 1 for
    no such view.
    """
    dims = view_dims(skip_elementwise(tensor, flow), flow)
    return dims[0] if len(dims) > 2 and dims[0] in _FEW else 1


def view_dims(tensor: int, flow: DataFlow) -> tuple[int, ...]:
    """The dims that the features of a tensor are viewed as; empty for no such view."""
    shape = flow.shapes[tensor]
    for user in flow.users.get(tensor, ()):
        for view in (flow.shapes[t] for t in user.outputs):
            dims = view[len(shape) - 1 :]
            if len(view) > len(shape) > 0 and prod(dims) == shape[-1]:
                return dims
    return ()
