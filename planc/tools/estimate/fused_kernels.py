"""The layers of a model under fused kernels: what they keep and move in place of what the model's
own operators do.

Products keep their inputs, attention its queries, keys, values and output, a norm its input, an
activation the outputs of the products before it. All else is part of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from planc.model.facts import Facts, Module
from planc.tools.estimate.counted import Attended, Counted, Moved, Part, Product, Saved
from planc.tools.estimate.profiles import Kernels


def fuse(counted: Counted, facts: Facts, kernels: Kernels, tokens: int, width: int) -> Counted:
    """The counts of a micro-batch, under other kernels.

    Args:
        tokens: of the micro-batch on a rank.
        width: bytes of an element of activations.
    """
    if not kernels.fused:
        return counted
    parts = tuple(
        _Fused(part, facts, kernels, tokens, width, counted.logits).part() for part in counted.parts
    )
    return replace(counted, parts=parts)


def _input_of(product: Product) -> tuple[str, int, int, int, bool]:
    """The module around a product, and the shape of its input."""
    holder = product.module.rpartition(".")[0]
    return holder, product.m, product.k, product.count, product.divided


@dataclass
class _Fused:
    """One part; the arguments are those of `fuse`."""

    counted: Part
    facts: Facts
    kernels: Kernels
    tokens: int
    width: int
    logits: int

    def part(self) -> Part:
        return replace(
            self.counted,
            saved=tuple(Saved(module=name, size=round(n)) for name, n in self.kept_sizes()),
            moved=tuple(Moved(module=name, size=round(n)) for name, n in self.moved_sizes() if n),
            products=tuple(self.products()),
            attended=(*self.counted.attended, *self.flash.values()),
        )

    # Kinds of modules ----------------------------------------------------------------------------

    def module(self, name: str) -> Module | None:
        """The structure of a module of the part, in the first layer that it stands for."""
        try:
            return self.facts.module_at(".".join(filter(None, (self.counted.like[0], name)))).module
        except KeyError:
            return None

    def of_kind(self, name: str, kind: str) -> bool:
        module = self.module(name)
        return module is not None and module.kind == kind

    @cached_property
    def by_module(self) -> dict[str, list[Product]]:
        products: dict[str, list[Product]] = {}
        for product in self.counted.products:
            products.setdefault(product.module, []).append(product)
        return products

    @cached_property
    def pairs(self) -> dict[str, tuple[Product, Product]]:
        """By module: products of queries with keys, and of scores with values, which materialize
        the scores of all heads."""
        pairs = {}
        for name, products in self.by_module.items():
            if len(products) == 2 and all(p.count > 1 and not p.divided for p in products):
                scores, values = products
                if (scores.m, scores.n, scores.count) == (values.m, values.k, values.count):
                    pairs[name] = (scores, values)
        return pairs

    @cached_property
    def squares(self) -> set[Product]:
        return {product for pair in self.pairs.values() for product in pair}

    @cached_property
    def flash(self) -> dict[str, Attended]:
        """The flash kernels in place of these products."""
        return {name: self._flash(name, *pair) for name, pair in self.pairs.items()}

    def _flash(self, name: str, scores: Product, values: Product) -> Attended:
        rows = max(1, self.tokens // scores.m)
        wide = (scores.k + values.n) / 2  # heads of values can be narrower than those of keys
        return Attended(
            module=name,
            batch=rows,
            heads=max(1, scores.count // rows),
            queries=scores.m,
            keys=scores.n,
            head_dim=round(wide),
        )

    @cached_property
    def attention(self) -> set[str]:
        """The modules that attend."""
        return {*self.pairs, *(a.module for a in self.counted.attended if not a.linear)}

    @cached_property
    def experts(self) -> dict[str, list[Product]]:
        """The grouped products of experts, by module."""
        return {
            name: products
            for name, products in self.by_module.items()
            if all(p.divided for p in products) and len(products) > 1
        }

    @cached_property
    def routers(self) -> set[str]:
        """The modules beside experts that choose them."""
        holders = {name.rpartition(".")[0] for name in self.experts}
        return {
            name
            for name in self.by_module
            if name.rpartition(".")[0] in holders
            and name not in self.experts
            and not self.of_kind(name, "linear")
        }

    @cached_property
    def activations(self) -> dict[str, list[Product]]:
        """The products of linear modules, by the module that has an activation between them."""
        activations: dict[str, list[Product]] = {}
        for name, products in self.by_module.items():
            holder = name.rpartition(".")[0]
            if self.of_kind(name, "linear") and holder not in self.attention and holder:
                activations.setdefault(holder, []).extend(products)
        return {name: products for name, products in activations.items() if len(products) > 1}

    def products(self) -> Iterator[Product]:
        """Yields the products without those of flash kernels. The last product of a module is not
        joined to others, since its input is what they compute.
        """
        last = {_input_of(product)[0]: product for product in self.counted.products}
        before: tuple[str, int, int, int, bool] | None = None
        for product in self.counted.products:
            tensor, behind = _input_of(product), before
            before = tensor
            if product in self.squares:
                continue
            linear = self.kernels.joins_products and self.of_kind(product.module, "linear")
            join = linear and tensor == behind and product is not last[tensor[0]]
            yield replace(product, joined=True) if join else product

    def is_inside(self, name: str, holders: Iterable[str]) -> bool:
        return any(f"{name}.".startswith(f"{holder}.") for holder in holders)

    # Bytes ---------------------------------------------------------------------------------------

    def norm_elements(self, name: str) -> float:
        """The elements of a norm's input: of the residual stream, or of heads."""
        module = self.module(name)
        features = module.parameters[0].numel if module and module.parameters else 0
        stream = self.counted.boundary / self.width
        if not self.counted.at or features * self.tokens == stream:
            return float(features * self.tokens)
        largest = max((s.size for s in self.counted.saved if s.module == name), default=0)
        return largest / 4  # the model's operators keep it in float32

    def kept_sizes(self) -> Iterator[tuple[str, float]]:
        """Bytes kept, by module."""
        before, done = "", set[str]()
        for saved in self.counted.saved:
            name = saved.module
            if not self.of_kind(name, "linear") and name not in self.routers:
                before = name
            if self.of_kind(name, "norm"):
                size = self.norm_elements(name) * self.width if name not in done else 0.0
            elif name in self.routers and saved.size == self.counted.boundary:
                yield self._input(saved, before)
                continue
            elif name in self.pairs or name in self.experts or name in self.routers:
                size = self.of_kernel(name) if name not in done else 0.0
            elif self.is_inside(name, self.experts) or (name == "" and not self.counted.at):
                size = self.of_loss(saved) if name == "" else 0.0
            elif self.of_kind(name, "linear"):
                yield self._input(saved, before)
                continue
            else:
                size = self.of_activation(saved, done)
            done.add(name)
            yield name, size

    def _input(self, saved: Saved, before: str) -> tuple[str, float]:
        """The input of a product, at the module that writes it."""
        if self.of_kind(before, "norm"):
            return before, saved.size * self.kernels.norm_output
        if before in self.pairs:  # the output that a flash kernel keeps
            return before, 0.0
        if before and self.is_inside(before, self.activations):
            return saved.module, saved.size * self.kernels.activation_output
        return saved.module, saved.size

    def of_kernel(self, name: str) -> float:
        """Bytes that attention, experts or a router keeps."""
        if pair := self.pairs.get(name):
            scores, values = pair
            heads = scores.count * self.width
            keys = scores.n * (scores.k + values.n)
            return heads * (scores.m * (scores.k + values.n) + keys)
        if products := self.experts.get(name):
            *before, last = products
            outputs = sum(p.n for p in before)
            kept = products[0].k + outputs + last.k * self.kernels.activation_output
            return products[0].m * kept * self.width
        return 8.0 * sum(p.m * p.n for p in self.by_module[name])

    def of_loss(self, saved: Saved) -> float:
        """Bytes that the loss keeps: of logits those of its kernel."""
        return self.logits * self.kernels.loss_kept if saved.size >= 2 * self.logits else saved.size

    def of_activation(self, saved: Saved, done: set[str]) -> float:
        """Bytes that another module keeps: of a gated activation not its output, which the kernel
        computes again from its input."""
        inner = (s for s in self.counted.saved if s.module.rpartition(".")[0] == saved.module)
        again = saved.module in self.activations and any(
            s.size == saved.size and not self.of_kind(s.module, "linear") for s in inner
        )
        return 0.0 if again and saved.module not in done else saved.size

    def moved_sizes(self) -> Iterator[tuple[str, float]]:
        """Bytes that one forward pass moves, by module."""
        kernels, done = self.kernels, set[str]()
        holders = (*self.experts, *self.activations, *self.attention)
        for name in dict.fromkeys(m.module for m in self.counted.moved):
            if self.of_kind(name, "norm"):
                if not self.is_inside(name, self.attention):
                    done.add(name)
                    yield name, kernels.norm_moved * self.norm_elements(name) * self.width
            elif name in self.attention or name in self.experts or name in self.routers:
                done.add(name)
                yield name, self.moved_by_kernel(name)
            elif name in self.activations:
                done.add(name)
                yield name, kernels.activation_moved * self.gate_elements(name) * self.width
            elif not self.counted.at and name == "":
                yield name, kernels.loss_moved * self.logits
            elif name and not self.is_inside(name, holders):
                yield name, self.counted.bytes_moved[name]
        for name in self.activations.keys() - done:  # whose operators are in a module of their own
            yield name, kernels.activation_moved * self.gate_elements(name) * self.width

    def moved_by_kernel(self, name: str) -> float:
        """Bytes that attention, experts or a router moves."""
        kernels = self.kernels
        if name in self.attention:
            heads = [p for p in self.counted.products if p.module.startswith(f"{name}.")]
            size = sum(p.m * p.n * p.count for p in heads[:-1])
            return kernels.attention_moved * size * self.width
        if products := self.experts.get(name):
            *before, last = products
            rows = kernels.expert_moved * products[0].k
            inner = kernels.activation_moved * (sum(p.n for p in before) + last.k)
            return products[0].m * (rows + inner) * self.width
        routed = sum(p.m * p.n for p in self.by_module[name])
        return kernels.router_moved * routed * self.width

    def gate_elements(self, name: str) -> float:
        """Elements that an activation reads and writes between products."""
        *before, last = self.activations[name]
        return float(sum(p.m * p.n for p in before) + last.m * last.k)
