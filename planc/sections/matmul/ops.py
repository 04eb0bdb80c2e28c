"""The operations that give linear layers fp8 or mxfp8 matmuls, through torchao."""

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
    """Replaces linear layers by torchao's, which have fp8 or mxfp8 matmuls.

    Args:
        recipe: `tensorwise` or `rowwise` (fp8 with one scale per tensor, or per row), or `mxfp8`
            (one scale per 32 numbers).
        gather: whether FSDP all-gathers the weights in fp8.
        emulate: whether operands are rounded and then multiplied in the parameters' dtype, as on a
            CPU. Simulations always emulate.
    """

    modules: Modules
    recipe: Annotated[str, choice(*RECIPES)]
    gather: bool = field(default=False, metadata=OMIT)
    emulate: bool = field(default=False, metadata=OMIT)

    SCRIPT: ClassVar = ScriptFunction(
        "convert_matmuls", "Gives linear layers fp8 or mxfp8 matmuls."
    )

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
    """A scale depends on all rows of a pass, and numbers between two fp8 values need float64."""
    SIMULATION_LIMIT: ClassVar = 1e-2
    """In float64 a single number may be rounded to the other of two fp8 values. A wrong maximum
    causes an error of at least 3e-2."""

    @property
    def simulation_dtype(self) -> str:
        """`float64`, because rounding errors of float32 decide to which of two fp8 values a number
        is rounded. `float32` for mxfp8, which torchao does not emulate in float64.
        """
        return "float32" if self.recipe == "mxfp8" else "float64"

    @property
    def token_multiple(self) -> int:
        return BLOCK[self.recipe]

    def simplify(self, context: Context, *, precision: bool) -> Self:
        return replace(self, emulate=True)

    def omission(self, *, precision: bool) -> tuple[str, str] | None:
        if cache.version("torchao") == "none":  # it rounds the operands of emulated products
            return "matmul", "torchao is not installed: no matmul is in fp8"
        text = "fp8 matmuls are compared in float64, by a run without `--precision`"
        return ("matmul", text) if precision else None

    def decisions(self, question: Question) -> Iterator[Decision]:
        yield from decision_around(self.modules, f"products in {self.headline()}", question)

    def uncounted_traffic(self, step: StepFacts) -> str:
        text = "largest values of activations of tensorwise products, 4 bytes each"
        return text if self.recipe == "tensorwise" and step.has_styles(self.modules) else ""

    KIND: ClassVar = "matmul"

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        reason, help = "the plan has fp8 matmuls", "pip install 'planc[fp8]'"
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
