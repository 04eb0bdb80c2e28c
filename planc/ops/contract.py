"""The contract of each style: what a rank of its axis has of weights, inputs and outputs.

Checks, random numbers, collectives and estimates read it; they do not know styles.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import assert_never

from planc.model.facts import Module
from planc.ops import styles as ir
from planc.ops.layouts import Layout, Partial, Replicate, Shard
from planc.ops.lora import BASE_LAYER

_FEATURES = Shard(-1)


class Side(StrEnum):
    """The features of a matrix product that a style splits."""

    OUT = "output"
    IN = "input"
    INSIDE = "inside"
    """The features between several products of one module, as of each expert."""


class Grad(StrEnum):
    """The layout of a gradient on a rank."""

    INVARIANT = "invariant"
    """The complete gradient, or its shard if the activation is sharded."""
    PARTIAL = "partial"
    """One addend of a pending sum over ranks."""
    VARYING = "varying"
    """Partial if the modules inside are sharded, else complete."""


@dataclass(frozen=True, slots=True)
class Flow:
    """An activation that enters or leaves a module.

    Args:
        source, target: its layout before and after the style redistributes it.
        gradient: the layout of the gradient of the target.
        routed: whether the activation is the routing weights of tokens, and not their features.
    """

    source: Layout
    target: Layout
    gradient: Grad = Grad.INVARIANT
    routed: bool = False

    @property
    def forward(self) -> tuple[Layout, Layout]:
        """The layouts between which the forward pass redistributes."""
        return self.source, self.target

    @property
    def backward(self) -> tuple[Layout, Layout]:
        """The layouts between which the backward pass redistributes the gradient."""
        summed = self.gradient is not Grad.INVARIANT and self.target == Replicate()
        return Partial() if summed else _dual(self.target), _dual(self.source)


def _dual(layout: Layout) -> Layout:
    """The layout of an activation's gradient; the gradient of a partial value is replicated."""
    return Replicate() if isinstance(layout, Partial) else layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The layouts and the communication of a style.

    Args:
        takes: the inputs whose layouts the style states. `colwise`: one flow from `replicate` to
            `replicate` whose gradient is partial.
        gives: the outputs whose layouts it states. `rowwise(-> shard(1))`: one flow from `partial`
            to `shard(1)`, a reduce-scatter.
        splits: the features of the matmul that it shards; None if it shards none. `colwise`:
            `Side.OUT`; `rowwise`: `Side.IN`; `experts`: `Side.INSIDE`; `sequence`: None.
        sums: whether the gradients of weights are summed over the ranks. True for `sequence`, whose
            norm sees only a shard of the tokens on each rank.
        counted: whether flows and sums are all that the ranks send. False for `features`, which
            also all-reduces a mean.
    """

    takes: tuple[Flow, ...] = ()
    gives: tuple[Flow, ...] = ()
    splits: Side | None = None
    sums: bool = False
    counted: bool = True


@lru_cache(maxsize=4096)
def contract(style: ir.Style, kind: str = "linear") -> Contract:
    """The contract of a style on a module of a kind."""
    ids = kind == "embedding"  # which have no gradient
    match style:
        case ir.Colwise():
            taken = Flow(style.input, Replicate(), Grad.INVARIANT if ids else Grad.PARTIAL)
            given = Flow(_FEATURES, style.output)
            return Contract(takes=(taken,), gives=(given,), splits=Side.OUT)
        case ir.Rowwise():
            taken = Flow(style.input, style.input if ids else _FEATURES)
            given = Flow(Partial(), style.output)
            return Contract(takes=(taken,), gives=(given,), splits=Side.IN)
        case ir.Sequence():
            same = Flow(Shard(style.dim), Shard(style.dim))
            return Contract(takes=(same,), gives=(same,), sums=True)
        case ir.Input():
            grad = Grad.INVARIANT if style.local else Grad.VARYING
            return Contract(takes=tuple(Flow(c.source, c.target, grad) for c in style.changes))
        case ir.Output():
            return Contract(gives=tuple(Flow(c.source, c.target) for c in style.changes))
        case ir.Experts():
            grad = Grad.PARTIAL if style.input == Replicate() else Grad.INVARIANT
            taken = Flow(style.input, style.input, grad)
            left = style.output in (Partial(), _FEATURES)
            return Contract(
                takes=(taken, Flow(style.input, style.input, grad, routed=True)),
                gives=(Flow(Partial(), Partial() if left else style.output),),
                splits=Side.INSIDE,
            )
        case ir.Parameters():
            return Contract(splits=Side.INSIDE, counted=False)
        case ir.Features():
            return Contract(gives=(Flow(_FEATURES, _FEATURES),), counted=False)
        case ir.Attributes():
            return Contract()
        case ir.Replicated() | ir.MlaKv() | ir.Custom():
            return Contract(counted=False)
    assert_never(style)


# Modules -----------------------------------------------------------------------------------------


def _latent(style: ir.MlaKv, module: Module) -> tuple[str, str] | None:
    """MLA's keys and values come out of one linear, with the rotary features last."""
    wide = next((p.shape[0] for p in module.parameters if p.name == "weight"), 0)
    if module.kind != "linear":
        return ("it is not a linear layer", "put it on `kv_a_proj_with_mqa`")
    if wide < style.rope:
        advice = "write `mla_kv(rope = config.qk_rope_head_dim)`"
        return (f"it has {wide:,} output features, and `rope` is {style.rope:,} of them", advice)
    return None


def _over_features(module: Module) -> tuple[str, str] | None:
    """A factor corrects an RMS norm over sharded features; one that subtracts the mean has none."""
    weights = [p.name for p in module.parameters]
    if module.kind != "norm" or weights != ["weight"] or "RMS" not in module.cls:
        return ("it is not an RMS norm with one weight", "gather its input, and replicate the norm")
    return None


def unfit(style: ir.Style, module: Module) -> tuple[str, str] | None:
    """Why a module cannot take a style, and the fix; None where it can."""
    match style:
        case ir.Colwise() | ir.Rowwise():
            if module.kind not in ("linear", "embedding", "conv1d"):
                return (
                    "it is neither a linear layer nor an embedding",
                    "name the projections inside it" if module.children else "leave it replicated",
                )
            inner = [c.name for c in module.children if c.module.count]
            if inner and BASE_LAYER not in inner and module.kind != "conv1d":
                # torch's styles register the parameters inside as the module's own
                return (f"it has `{inner[0]}` inside, with parameters", "leave it replicated")
            if module.kind == "embedding" and not isinstance(style.input, ir.Replicate):
                return (
                    "an embedding needs replicated token ids",
                    f"write `{ir.style_name(style)}(replicate -> ...)`",
                )
            if module.kind == "embedding" and style.parts != 1:
                return ("an embedding holds no projections", "remove `parts`")
        case ir.Features():
            return _over_features(module)
        case ir.MlaKv():
            return _latent(style, module)
        case ir.Replicated() if style.summed and not module.count:
            return ("it has no parameters", "remove the rule")
        case ir.Sequence():
            if any(child.module.count for child in module.children):
                return ("it has submodules with weights", "put `sequence` on the norms themselves")
            if module.kind == "embedding":
                return ("it takes token ids", "put `sequence` on norms and dropouts")
    return None


# Weights -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Split:
    """The dim along which a style shards a parameter, and the projections packed in that dim."""

    dim: int
    parts: ir.Parts = 1
    interleaved: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether a rank's shard consists of several slices."""
        return self.parts != 1 and not self.interleaved


def weight_split(style: ir.Style, kind: str, parameter: str, ndim: int) -> Split | None:
    """The dim and parts by which a style shards a parameter, or None if it is replicated.

    Source: `ColwiseParallel` and `RowwiseParallel` in torch.distributed.tensor.parallel.style. A
    linear's weight is [out, in], a Conv1D's [in, out], an embedding's [vocabulary, hidden].

    Args:
        style: of the module.
        kind: the module's kind, `linear`, `conv1d` or `embedding`.
        parameter: the parameter's name in the module.
        ndim: the number of the parameter's dims.
    """
    dim: int | None = None
    match style:
        case ir.Features():
            return Split(0)
        case ir.Colwise():
            turned = kind == "embedding" or (kind == "conv1d" and ndim == 2)
            dim = 1 if turned else 0
        case ir.Rowwise():
            if kind == "embedding":
                dim = 0
            elif parameter == "weight" and ndim == 2:
                dim = 0 if kind == "conv1d" else 1
        case ir.Parameters() | ir.Experts():
            stated = dict(style.layouts).get(parameter)
            if stated is None or not isinstance(stated.layout, Shard):
                return None
            dim = stated.layout.dim % ndim if -ndim <= stated.layout.dim < ndim else None
            return None if dim is None else Split(dim, stated.parts, stated.interleaved)
    if dim is None or not isinstance(style, ir.Colwise | ir.Rowwise):
        return None
    return Split(dim, style.parts, style.interleaved)


def part_sizes(split: Split, size: int) -> tuple[int, ...]:
    """The size of each part of a dim."""
    if isinstance(split.parts, tuple):
        return split.parts
    return (size // split.parts,) * split.parts


def output_layout(style: ir.Style) -> Layout | None:
    """The layout of a module's first output that can be compared; None where none is stated."""
    if isinstance(style, ir.Bare | ir.Features):
        return None
    if isinstance(style, ir.Output):  # whose first output may be left as it is
        return style.positional[0].target if style.positional and style.positional[0] else None
    return next((flow.target for flow in contract(style).gives), None)
