"""LoRA adapters, through peft, and the patterns by which it finds layers."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Annotated, ClassVar, Self

from planc.model.facts import Modules, Segment
from planc.ops import phrases
from planc.ops.base import (
    OMIT,
    AxisSizes,
    Count,
    Dtype,
    Form,
    Name,
    Op,
    Phase,
    Positive,
    Size,
    Some,
    choice,
)
from planc.ops.call import (
    MODEL,
    Context,
    Each,
    FunctionCall,
    Once,
    ScriptFunction,
    Step,
    drop_none,
    dtype,
)
from planc.ops.decisions import Decision, Question
from planc.ops.requirements import Requirement


def segment_pattern(segment: Segment) -> str:
    """A name, or a set of indices such as `([0-9]|[12][0-9]|3[01])`, as a regular expression."""
    if isinstance(segment, str):
        return re.escape(segment)
    tens: dict[str, list[str]] = {}
    for number in map(str, segment):
        tens.setdefault(number[:-1], []).append(number[-1])
    heads: dict[str, list[str]] = {}
    for head, digits in tens.items():
        heads.setdefault(_any(digits), []).append(head)
    parts: list[str] = []
    for ending, branches in heads.items():
        parts += [ending] if "" in branches else []
        if more := [head for head in branches if head]:
            parts.append((_any(more) if max(map(len, more)) == 1 else either(more)) + ending)
    return parts[0] if len(parts) == 1 else either(parts)


def _any(digits: Sequence[str]) -> str:
    if len(digits) == 1:
        return digits[0]
    return "[0-9]" if len(digits) == 10 else f"[{''.join(digits)}]"


def either(parts: Iterable[str]) -> str:
    """A regular expression that matches any of several."""
    return f"({'|'.join(parts)})"


def pattern_of(sets: Iterable[Modules]) -> str:
    last: dict[tuple[Segment, ...], list[str]] = {}
    for members in sets:
        last.setdefault(members.path[:-1], []).append(segment_pattern(members.path[-1]))
    return "|".join(
        r"\.".join([*map(segment_pattern, path), names[0] if len(names) == 1 else either(names)])
        for path, names in last.items()
    )


BASE_LAYER = "base_layer"
"""The layer that peft wraps."""

HALVES = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
"""The factors' submodules of a peft layer; those for other kinds of layers are empty."""

MAGNITUDE = "lora_magnitude_vector"
"""The submodule with the magnitudes of DoRA, one for each output feature."""


def factor_name(weight: str, half: str) -> str:
    """The name of a factor of a weight of experts, beside it; `half` is `A` or `B`."""
    return f"{weight}_lora_{half}"


def factor_dims(transposed: bool) -> dict[str, int]:
    """The dim of a weight [experts, x, y] whose features each factor has.

    Source: `ParamWrapper` in peft.tuners.lora.layer, from 0.19 on, reads the module's
    `is_transposed`; without it a weight is [experts, out, in].
    """
    return {"A": 1, "B": 2} if transposed else {"A": 2, "B": 1}


INITS = ("default", "gaussian", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapt(Op):
    """peft's `inject_adapter_in_model` with one `LoraConfig`, or factors beside the weights of
    fused experts; all parameters but adapters are frozen.

    Args:
        members: the layers of one rule, or the experts.
        rank, alpha, dropout: the configuration's `r`, `lora_alpha` and `lora_dropout`.
        dtype: the dtype of A and B, None for that of their layer.
        init: `default`, `gaussian` or `random`, peft's `init_lora_weights`.
        seed: of the initial values, which are equal on every rank.
        rslora: whether the factors' product is multiplied by alpha / sqrt(rank), not alpha / rank.
        dora: whether the rows of the sum of weight and product are divided by their norms, and
            multiplied by magnitudes that train.
        parameters: the weights of fused experts, in the order of the module; none for layers.
    """

    members: Some[Modules]
    rank: Size
    alpha: Positive
    dropout: Annotated[float, Form({"minimum": 0, "exclusiveMaximum": 1})] = 0.0
    dtype: Dtype | None = None
    init: Annotated[str, choice(*INITS)] = "default"
    seed: Count = 0
    rslora: bool = field(default=False, metadata=OMIT)
    dora: bool = field(default=False, metadata=OMIT)
    parameters: tuple[Name, ...] = field(default=(), metadata=OMIT)

    @property
    def scale(self) -> float:
        """By which the product of the factors is multiplied."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)

    @property
    def pattern(self) -> str:
        """A regular expression that matches the names of these layers and no others."""
        return pattern_of(self.members)

    def names(self) -> Iterator[str]:
        """The torch names of all layers."""
        return (name for members in self.members for name in members.names())

    SCRIPT: ClassVar = ScriptFunction(
        "add_adapters", "Adds LoRA adapters, and freezes all other parameters."
    )

    def calls(self, _context: Context) -> Iterator[Step]:
        if self.parameters:
            keywords = drop_none(
                pattern=self.pattern,
                parameters=self.parameters,
                rank=self.rank,
                scale=self.scale,
                init=self.initial if self.init != "default" else None,
                dtype=dtype(self.dtype) if self.dtype else None,
            )
            arguments = (MODEL, self.seed)
            call = FunctionCall("standalone.lora_experts:adapt_experts", arguments, keywords)
            yield Once(call=call, note=self.place)
            return
        config = drop_none(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout or None,
            init_lora_weights=self.initial if self.init != "default" else None,
            use_rslora=self.rslora or None,
            use_dora=self.dora or None,
            target_modules=self.pattern,
        )
        # initial values are equal on every rank
        call = FunctionCall("standalone.lora:inject_lora", (MODEL, self.seed), config)
        yield Once(call=call, replaces=self.members, note=self.place)
        if self.dtype is None:
            return
        inner = (*HALVES, MAGNITUDE) if self.dora else HALVES
        casts = tuple(FunctionCall(f".{name}.to", (dtype(self.dtype),)) for name in inner)
        yield from (Each(modules=modules, calls=casts) for modules in self.members)

    @property
    def initial(self) -> bool | str:
        """peft's `init_lora_weights`."""
        return {"default": True, "random": False}.get(self.init, self.init)

    ALONE: ClassVar = True
    SETS_TRAINING: ClassVar = True

    @property
    def packages(self) -> tuple[str, ...]:
        return () if self.parameters else ("peft",)

    def decisions(self, question: Question) -> Iterator[Decision]:
        for members in self.members:
            if question.at.part_inside(members) is not None:
                yield Decision(self.headline(), question.ancestor(len(members.path)))

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        reason, help = "the plan has adapters", "pip install 'planc[lora]'"
        return (Requirement("peft", "PL187", reason, help),)

    PHASE: ClassVar = Phase.MODEL
    WORD: ClassVar = "adapters"
    ABOUT: ClassVar[tuple[str, ...]] = ("members",)

    def headline(self, _mesh: AxisSizes | None = None) -> str:
        """The adapter's settings; defaults of planc are left out."""
        parts = ["lora", f"rank {self.rank:,}", f"alpha {self.alpha:g}"]
        parts += ["rslora"] if self.rslora else []
        parts += ["dora"] if self.dora else []
        parts += [f"dropout {self.dropout:g}"] if self.dropout else []
        parts += [phrases.dtype(self.dtype)] if self.dtype else []
        parts += [f"init {self.init}"] if self.init != "default" else []
        parts += [f"on {' and '.join(self.parameters)}"] if self.parameters else []
        return ", ".join(parts)

    @classmethod
    def section(cls, ops: Sequence[Self], _mesh: AxisSizes) -> Iterator[str]:
        yield phrases.head(cls.WORD, "all else is frozen")
        yield from phrases.table(
            (path, *op.headline().split(", ", 1))
            for op in ops
            for path in phrases.together(map(str, op.members))
        )
