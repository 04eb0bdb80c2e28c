"""The device on which weights are created, the way to load them, and their dtype."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from planc.model.facts import Modules, Parameter
from planc.ops import phrases
from planc.ops.base import OMIT, AxisSizes, Dtype, Op, Phase, SimulationKind, choice
from planc.ops.call import (
    MODEL,
    Context,
    FunctionCall,
    Once,
    ScriptFunction,
    Step,
    drop_none,
    dtype,
)
from planc.ops.decisions import Decision, Question
from planc.ops.lora import pattern_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Op):
    """The dtype cast that comes before all other operations, and what `Run.load` does.

    Args:
        meta: whether the model must be on the meta device.
        weights: how `Run.load` reads a folder: `slices`, each rank reads its slices; `rank0`, rank
            0 reads and broadcasts; `checkpoint`, a distributed checkpoint (DCP). None leaves it to
            the call.
        dtype: the torch dtype that parameters are cast to, None keeps the model's.
        dequantize: how the folder stores weights in fewer bits, which are read as plain ones.
        block: rows and columns that share a scale in fp8.
        fp32: parameters that are cast to float32 instead; the last part of a path is a
            parameter's name.
    """

    meta: bool = False
    weights: Annotated[str, choice("slices", "rank0", "checkpoint")] | None = None
    dtype: Dtype | None = None
    dequantize: Annotated[str, choice("fp8", "mxfp4")] | None = field(default=None, metadata=OMIT)
    block: tuple[int, ...] = field(default=(), metadata=OMIT)
    fp32: tuple[Modules, ...] = field(default=(), metadata=OMIT)

    def dtype_after_load(self, parameter: Parameter) -> str:
        """The parameter's dtype after `load`."""
        if self.dtype is None:
            return parameter.dtype
        return (parameter if self.fp32 else replace(parameter, keep_in_fp32="")).cast(self.dtype)

    @property
    def pattern(self) -> str:
        """A regular expression that matches the names in `fp32` and no others."""
        return pattern_of(self.fp32)

    SCRIPT: ClassVar = ScriptFunction(
        "prepare", "Prepares parameters for loading: their device and dtype."
    )

    def calls(self, _context: Context) -> Iterator[Step]:
        if self.meta:
            yield Once(
                call=FunctionCall("standalone.load_weights:on_meta", (MODEL,)), note=self.place
            )
        if self.dtype:
            fp32 = drop_none(fp32=self.pattern if self.fp32 else None)
            call = FunctionCall("standalone.load_weights:keep_in", (MODEL, dtype(self.dtype)), fp32)
            yield Once(call=call, note=self.place)

    SIMULATION: ClassVar = SimulationKind.NEVER  # weights are random

    @property
    def packages(self) -> tuple[str, ...]:
        return ("safetensors",) if self.weights in ("slices", "rank0") else ()

    def decisions(self, question: Question) -> Iterator[Decision]:
        if question.at.module.parameters:
            yield Decision(self.headline(), "root")

    PHASE: ClassVar = Phase.MODEL
    WORD: ClassVar = "load"
    WORDS: ClassVar = {"fp32": ("fp32", lambda names: ", ".join(phrases.together(names)) or "none")}

    def headline(self, _mesh: AxisSizes | None = None) -> str:
        """`each rank reads its own slices, kept in bf16, built on meta`."""
        ways = {
            "slices": "each rank reads its own slices",
            "rank0": "rank 0 reads and sends",
            "checkpoint": "from a distributed checkpoint",
        }
        parts = [ways[self.weights]] if self.weights else []
        but = f" but for {', '.join(phrases.together(map(str, self.fp32)))} in fp32"
        parts += [f"kept in {phrases.value(self.dtype)}{but * bool(self.fp32)}"] * bool(self.dtype)
        of = " in blocks of " + " x ".join(map(str, self.block)) if self.block else ""
        parts += [f"weights stored in {self.dequantize}{of}"] if self.dequantize else []
        parts += ["built on meta"] if self.meta else []
        return ", ".join(parts) or "as the call says"
