"""Frozen weights in 4 bits, through bitsandbytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

from planc.model.facts import DTYPE_BYTES, Modules
from planc.ops import call, phrases
from planc.ops.base import AxisSizes, Phase, SimulationKind, Some, choice
from planc.ops.decisions import Decision, Question
from planc.ops.registry import SectionOp
from planc.ops.requirements import Requirement

NUMBERS = ("nf4", "fp4")
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""The sizes that `bitsandbytes.functional.quantize_4bit` takes."""
Float = Annotated[str, choice("float32", "bfloat16", "float16")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantize(SectionOp):
    """bitsandbytes' `quantize_4bit` of each layer's weight, whose bytes become one column.

    Args:
        members: linear layers; `base_layer` is in the path of a layer that peft wraps.
        kind: `nf4` or `fp4`.
        storage: the torch dtype that the bytes are viewed as.
        compute: the dtype of the matrix product, None for that of its input.
        double: whether scales are quantized too.
        block: the number of weights that share a scale.
    """

    members: Some[Modules]
    kind: Annotated[str, choice(*NUMBERS)]
    storage: Float
    compute: Float | None = None
    double: bool = False
    block: Annotated[int, choice(*BLOCKS)] = 64

    SCRIPT: ClassVar = call.ScriptFunction(
        "quantize_weights", "Quantizes frozen weights to 4 bits."
    )

    def calls(self, context: call.Context) -> Iterator[call.Step]:
        # One weight at a time, on the device of the mesh: a model on meta is materialized so.
        name = "quantize_filled" if context.fills else "quantize"
        options = call.drop_none(
            compute=call.dtype(self.compute),
            double=self.double or None,
            block=self.block if self.block != 64 else None,
        )
        arguments = (self.kind, call.dtype(self.storage), call.DEVICE_TYPE)
        for modules in self.members:
            made = call.FunctionCall(f"sections.quantization.standalone:{name}", arguments, options)
            yield call.Each(modules=modules, calls=(made,), note=self.place)

    SECTION: ClassVar = "quantization"
    ANSWER: ClassVar = "adapter"
    TITLE: ClassVar[str] = "4-bit weights"
    LAYER: ClassVar[str] = "FourBit"

    def with_storage(self, dtype: str) -> Self:
        return replace(self, storage=dtype)

    def range_problems(self) -> Iterator[tuple[str, str]]:
        if self.block not in BLOCKS:
            sizes = f"{BLOCKS[0]} to {BLOCKS[-1]:,} weights, a power of 2"
            yield "block", f"a block is of {sizes}, not {self.block}"

    def column_length(self, numel: int) -> int:
        return -(-numel // (2 * DTYPE_BYTES[self.storage]))

    def scale_bytes(self, numel: int, ranks: int) -> int:
        """A scale is a float32; with `double` it is a byte, plus one float32 for 256 of them."""
        blocks = -(-numel // (ranks * self.block))
        return blocks + 4 * -(-blocks // 256) if self.double else 4 * blocks

    READS_VALUES: ClassVar = True
    SIMULATION: ClassVar = SimulationKind.NEVER
    """A shard of a small weight is not a multiple of the quantization block; that of the real one
    is checked."""

    @property
    def packages(self) -> tuple[str, ...]:
        return "peft", "bitsandbytes"

    def omission(self, *, precision: bool) -> tuple[str, str]:
        return "4 bits", "frozen weights stay in full precision"

    def decisions(self, question: Question) -> Iterator[Decision]:
        for members in map(phrases.layer, self.members):
            if question.at.overlap(members) is not None:
                text = f"in 4 bits, {self.headline()}"
                yield Decision(text, question.ancestor(len(members.path)))

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        reason, help = "the plan has 4-bit weights", "pip install 'planc[qlora]'"
        return (Requirement("bitsandbytes", "PL685", reason, help),)

    PHASE: ClassVar = Phase.QUANTIZE
    WORD: ClassVar = "quantize"
    ABOUT: ClassVar[tuple[str, ...]] = ("members",)

    def headline(self, _mesh: AxisSizes | None = None) -> str:
        parts = [f"{self.kind} in {phrases.dtype(self.storage)}", f"blocks of {self.block:,}"]
        parts += ["scales quantized too"] if self.double else []
        parts += [f"computes in {phrases.dtype(self.compute)}"] if self.compute else []
        return ", ".join(parts)

    @classmethod
    def section(cls, ops: Sequence[Self], _mesh: AxisSizes) -> Iterator[str]:
        yield phrases.head(cls.WORD, "frozen weights in 4 bits, by bitsandbytes")
        yield from phrases.table(
            (path, op.headline())
            for op in ops
            for path in phrases.together(str(phrases.layer(m)) for m in op.members)
        )


KINDS = (Quantize,)
