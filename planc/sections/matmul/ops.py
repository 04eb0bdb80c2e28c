"""Matrix products of linear layers in 8 bits, through torchao."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Self

from planc.model import cache
from planc.model.facts import Modules
from planc.ops.base import OMIT, AxisSizes, Phase, SimulationKind, StepFacts, choice
from planc.ops.call import (
    DEVICE_TYPE,
    MODEL,
    Context,
    Each,
    FunctionCall,
    Once,
    ScriptFunction,
    Step,
    drop_none,
)
from planc.ops.decisions import Decision, Question, decision_around
from planc.ops.registry import SectionOp
from planc.ops.requirements import Requirement

RECIPES = ("tensorwise", "rowwise", "mxfp8")
BLOCK = {"tensorwise": 16, "rowwise": 16, "mxfp8": 32}
"""The number of which the features of a product, and the tokens of a pass on a rank, must be a
multiple.

Source: `_check_scaled_mm` of `torch._scaled_mm` takes multiples of 16; a scale of the microscaling
formats (OCP MX 1.0) is of 32 numbers along the dim that a product sums over.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowPrecision(SectionOp):
    """torchao's layer in the place of each linear layer: its three products are of rounded numbers.

    Args:
        recipe: `tensorwise` or `rowwise` (fp8: a scale a tensor, or a row), or `mxfp8` (a scale for
            32 numbers).
        gather: whether FSDP all-gathers the weights in fp8.
        emulate: whether numbers are rounded and then multiplied in the parameters' dtype, as on a
            CPU; a proof does so everywhere.
    """

    modules: Modules
    recipe: Annotated[str, choice(*RECIPES)]
    gather: bool = field(default=False, metadata=OMIT)
    emulate: bool = field(default=False, metadata=OMIT)

    SCRIPT: ClassVar = ScriptFunction("convert_matmuls", "Rounds matrix products to 8 bits.")

    def calls(self, _context: Context) -> Iterator[Step]:
        name = "mxfp8_linear" if self.recipe == "mxfp8" else "fp8_linear"
        recipe = () if self.recipe == "mxfp8" else (self.recipe,)
        device = "cpu" if self.emulate else DEVICE_TYPE
        options = drop_none(gather=self.gather or None)
        call = FunctionCall(f"sections.matmul.standalone:{name}", (*recipe, device), options)
        yield Each(modules=self.modules, calls=(call,), replaces=True, note=self.place)

    SECTION: ClassVar = "matmul"
    ALONE: ClassVar = True
    NEEDS: ClassVar = "torchao"
    SIMULATION: ClassVar = SimulationKind.SEPARATELY
    """A scale depends on all rows of a pass, and numbers on the border between two need float64."""
    SIMULATION_LIMIT: ClassVar = 1e-2
    """In float64 a single number on the border between two may fall to the other side. A wrong
    maximum is an error of 3e-2 and more."""

    @property
    def simulation_dtype(self) -> str:
        """`float64`: by the rounding of float32 alone, a number on the border between two falls to
        either side. torchao has no mxfp8 in float64.
        """
        return "float32" if self.recipe == "mxfp8" else "float64"

    @property
    def token_multiple(self) -> int:
        return BLOCK[self.recipe]

    def simplify(self, context: Context, *, precision: bool) -> Self:
        return replace(self, emulate=True)

    def omission(self, *, precision: bool) -> tuple[str, str] | None:
        if cache.version("torchao") == "none":  # it rounds the operands of emulated products
            return "matmul", "torchao is not installed: products are not rounded to 8 bits"
        text = "products in 8 bits are compared in float64, by a run without `--precision`"
        return ("matmul", text) if precision else None

    def decisions(self, question: Question) -> Iterator[Decision]:
        yield from decision_around(self.modules, f"products in {self.headline()}", question)

    def uncounted_traffic(self, step: StepFacts) -> str:
        text = "largest values of activations of tensorwise products, 4 bytes each"
        return text if self.recipe == "tensorwise" and step.has_styles(self.modules) else ""

    KIND: ClassVar = "matmul"

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        reason, help = "the plan has products in 8 bits", "pip install 'planc[fp8]'"
        return (Requirement("torchao.float8", "PL627", reason, help),)

    PHASE: ClassVar = Phase.LAYERS
    WORD: ClassVar = "matmul"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules",)
    WORDS: ClassVar = {
        "recipe": ("", str),
        "gather": ("gathered in", lambda gather: "fp8" if gather else "the parameters' dtype"),
        "emulate": ("", lambda emulate: "emulated" if emulate else "by the device"),
    }

    def headline(self, _mesh: AxisSizes | None = None) -> str:
        named = self.recipe if self.recipe == "mxfp8" else f"fp8, {self.recipe}"
        parts = [named, "gathered in fp8" * self.gather, "emulated" * self.emulate]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWeights(SectionOp):
    """Scales of all weights that FSDP gathers in fp8, before each forward pass: one all-reduce over
    the ranks of data and of tensor axes. A gather alone takes the maximum over its own ranks.
    """

    SCRIPT: ClassVar = ScriptFunction(
        "scale_weights", "Computes the scales of weights that are gathered in fp8."
    )

    def calls(self, _context: Context) -> Iterator[Step]:
        yield Once(call=FunctionCall("sections.matmul.standalone:scale_before_forward", (MODEL,)))

    SECTION: ClassVar = "matmul"
    SIMULATION: ClassVar = SimulationKind.SEPARATELY
    PHASE: ClassVar = Phase.UNITS
    WORD: ClassVar = "scales"

    def headline(self, _mesh: AxisSizes | None = None) -> str:
        return "of weights gathered in fp8, before each forward pass"


KINDS = (LowPrecision, ScaleWeights)
