"""Optimizer algorithms of parameters, and the matrices that they work on."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from math import ceil, prod
from typing import Annotated, Any, ClassVar

from planc.model.facts import DTYPE_BYTES, Modules
from planc.ops import phrases
from planc.ops.base import (
    OMIT,
    AxisSizes,
    ClassPath,
    Dtype,
    Form,
    Op,
    Pairs,
    Phase,
    PlainKeywords,
    Size,
    StepFacts,
    choice,
    kind_of,
)
from planc.ops.call import (
    Context,
    Each,
    FunctionCall,
    ImportedName,
    ScriptFunction,
    Step,
    Table,
    Value,
    dtype,
    plain,
)

Factor = Annotated[int | float, Form({"type": "number", "minimum": 0})]
Fraction = Annotated[
    int | float, Form({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, name="below_one")
]

Decay = Annotated[int | float, Form({"type": "number", "maximum": 0}, name="decay")]
Limit = Annotated[int | float, Form({"type": "number", "minimum": 1}, name="limit")]
BUCKET = 2**28
"""About how many elements of its matrices a rank exchanges at once: 1 GiB of float32."""
AT_ONCE = 2**25
"""About how many elements a rank computes with at once: 128 MiB of float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """torch's `AdamW`."""

    KIND: ClassVar[str] = "adamw"

    beta1: Fraction = field(default=0.9, metadata=OMIT)
    beta2: Fraction = field(default=0.999, metadata=OMIT)
    eps: Factor = field(default=1e-8, metadata=OMIT)

    def state_size(self, shape: tuple[int, ...]) -> int:
        """The elements of the states of a parameter."""
        return 2 * prod(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """torch's `SGD`; its weight decay is a part of the gradient."""

    KIND: ClassVar[str] = "sgd"

    momentum: Fraction = field(default=0.0, metadata=OMIT)
    nesterov: bool = field(default=False, metadata=OMIT)

    def state_size(self, shape: tuple[int, ...]) -> int:
        return prod(shape) if self.momentum else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Adafactor:
    """torch's `Adafactor`, with the second moments of a matrix by its rows and columns.

    Args:
        beta2_decay: the exponent of the step by which averages forget.
        eps1: what a mean of squares is at least; None for the precision of the parameter.
        eps2: the size that a parameter is taken to have at least, which scales its step.
        d: the root mean square that an update has at most.
    """

    KIND: ClassVar[str] = "adafactor"

    beta2_decay: Decay = field(default=-0.8, metadata=OMIT)
    eps1: Factor | None = field(default=None, metadata=OMIT)
    eps2: Factor = field(default=1e-3, metadata=OMIT)
    d: Limit = field(default=1.0, metadata=OMIT)

    def state_size(self, shape: tuple[int, ...]) -> int:
        """The numbers in the state of a parameter; for a matrix, those of its rows and columns."""
        if len(shape) < 2:
            return prod(shape)
        return prod(shape) // max(1, shape[-1]) + prod(shape) // max(1, shape[-2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The matrices of a parameter: `sizes` along `dim`; none for the whole parameter, or for each
    entry of a stack.

    Args:
        interleaved: whether their rows or columns alternate, as many of each.
    """

    dim: Annotated[int, Form({"minimum": 0, "maximum": 2})] = field(default=0, metadata=OMIT)
    sizes: tuple[Size, ...] = field(default=(), metadata=OMIT)
    interleaved: bool = field(default=False, metadata=OMIT)

    @property
    def terms(self) -> tuple[Any, ...]:
        """The cut as an argument of `standalone.optimizer`."""
        if not self.sizes:
            return ()
        return (self.dim, self.sizes, *((True,) if self.interleaved else ()))

    def __str__(self) -> str:
        alternate = " that alternate" if self.interleaved else ""
        return f"in {len(self.sizes)} of dim {self.dim}{alternate}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon:
    """torch's `Muon`, on matrices that are gathered by one owner each.

    Args:
        units: of the parameters that it takes.
        compute: the dtype of the Newton-Schulz iteration; None for float32, or that of the
            parameter if it is wider.
    """

    KIND: ClassVar[str] = "muon"

    units: Annotated[Pairs[Cut], Form({"minProperties": 1})]
    momentum: Fraction = field(default=0.95, metadata=OMIT)
    nesterov: bool = field(default=True, metadata=OMIT)
    ns_steps: Size = field(default=5, metadata=OMIT)
    adjust_lr: Annotated[str, choice("original", "match_rms_adamw")] = field(
        default="original", metadata=OMIT
    )
    compute: Dtype | None = field(default=None, metadata=OMIT)

    def state_size(self, shape: tuple[int, ...]) -> int:
        return prod(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerClass:
    """A `torch.optim.Optimizer` of the user's.

    Args:
        path: imported only where the user allows code.
        arguments: keyword arguments of the class, beside `lr` and `weight_decay`.
    """

    KIND: ClassVar[str] = "class"

    path: ClassPath
    arguments: PlainKeywords = field(default=(), metadata=OMIT)

    def state_size(self, shape: tuple[int, ...]) -> int:
        """The numbers in AdamW's state, since the state of the class is not known."""
        return 2 * prod(shape)


Algorithm = Annotated[AdamW | Sgd | Adafactor | Muon | OptimizerClass, Form(tag="algorithm")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimize(Op):
    """The optimizer of the parameters inside modules; a later operation may be on a submodule.

    Args:
        lr, weight_decay: factors of what the script gives `run.optimizer`.
        state: the dtype of the optimizer's state; None for that of the parameter.
        block: how many numbers of a row of a state in 8 bits have one scale; None for other states.
        offload: whether states are in the host's memory between steps.
    """

    modules: Modules
    algorithm: Algorithm
    lr: Factor = field(default=1.0, metadata=OMIT)
    weight_decay: Factor = field(default=1.0, metadata=OMIT)
    state: Dtype | None = field(default=None, metadata=OMIT)
    block: Size | None = field(default=None, metadata=OMIT)
    offload: bool = field(default=False, metadata=OMIT)

    KIND: ClassVar[str] = "optimize"
    SCRIPT: ClassVar = ScriptFunction("optimize_parameters", "Records how parameters are stepped.")

    def calls(self, _context: Context) -> Iterator[Step]:
        terms: list[tuple[str, Value]] = [("lr", self.lr), ("weight_decay", self.weight_decay)]
        if not isinstance(self.algorithm, OptimizerClass):
            terms += [("state", dtype(self.state))]
            terms += [("block", self.block)] if self.block else []
            terms += [("host", True)] if self.offload else []
        match self.algorithm:
            case AdamW(beta1=beta1, beta2=beta2, eps=eps):
                terms += [("betas", (beta1, beta2)), ("eps", eps)]
            case Sgd() | Adafactor():
                names = (f.name for f in fields(self.algorithm))
                terms += [(name, getattr(self.algorithm, name)) for name in names]
            case Muon(units=units, compute=compute):
                muon_fields = ("momentum", "nesterov", "ns_steps", "adjust_lr")
                terms += [(name, getattr(self.algorithm, name)) for name in muon_fields]
                cuts = tuple((name, cut.terms) for name, cut in units)
                terms += [("compute", dtype(compute)), ("units", Table(cuts))]
            case OptimizerClass(path=path, arguments=given):
                own_terms = Table(tuple((name, plain(value)) for name, value in given))
                terms += [("kind", ImportedName(path)), ("arguments", own_terms)]
        name = kind_of(type(self.algorithm))
        call = FunctionCall("standalone.optimizer:optimize", (name,), tuple(terms))
        yield Each(modules=self.modules, calls=(call,), note=self.place)

    def in_eight_bits(self, shape: tuple[int, ...]) -> bool:
        """Whether the states of a parameter of that shape, the whole one, are in 8 bits."""
        return self.block is not None and len(shape) > 1 and shape[-1] >= self.block

    def state_bytes(self, whole: tuple[int, ...], shape: tuple[int, ...], dtype: str) -> int:
        """Bytes of the states of a shard, or of all.

        Args:
            whole: the shape of the parameter.
            shape: that of the shard.
            dtype: of the parameter.
        """
        if self.block is None or not self.in_eight_bits(whole):
            return self.algorithm.state_size(shape) * DTYPE_BYTES[self.state or dtype]
        *rows, width = shape
        blocks = self.algorithm.state_size((*rows, ceil(width / self.block)))
        return blocks * (self.block + DTYPE_BYTES["float32"])

    def saved_bytes(self, whole: tuple[int, ...], shape: tuple[int, ...], dtype: str) -> int:
        """Returns `state_bytes` for a checkpoint, which has values of states in 8 bits in
        float32.
        """
        if self.in_eight_bits(whole):
            return self.algorithm.state_size(shape) * DTYPE_BYTES["float32"]
        return self.state_bytes(whole, shape, dtype)

    ALONE: ClassVar = True
    LOOP_FUNCTIONS: ClassVar = ("planned_optimizer",)

    def uncounted_traffic(self, step: StepFacts) -> str:
        text = "sums of rows and columns that adafactor takes, two all-reduces a step"
        return text if isinstance(self.algorithm, Adafactor) else ""

    PHASE: ClassVar = Phase.OPTIMIZER
    WORD: ClassVar = "optimizer"
    ABOUT: ClassVar[tuple[str, ...]] = ("modules",)

    def headline(self, _mesh: AxisSizes | None = None) -> str:
        """`muon of 3 parts, lr x 0.5`."""
        words = self._arguments()
        words += [f"lr x {self.lr:g}"] * (self.lr != 1)
        words += [f"weight decay x {self.weight_decay:g}"] * (self.weight_decay != 1)
        words += [f"states in {phrases.value(self.state)}"] * (self.state is not None)
        words += [f"states in 8 bits, in blocks of {self.block}"] * (self.block is not None)
        words += ["states on the host"] * self.offload
        return ", ".join([f"{kind_of(type(self.algorithm))}{self._subject()}", *words])

    def _arguments(self) -> list[str]:
        if isinstance(self.algorithm, OptimizerClass):
            given = ((name, phrases.literal(value)) for name, value in self.algorithm.arguments)
            return [f"{name} = {value}" for name, value in given]
        usual = {f.name: f.default for f in fields(self.algorithm) if f.name != "units"}
        values = ((name, getattr(self.algorithm, name)) for name in usual)
        return [f"{n} = {_shown(v)}" for n, v in values if v != usual[n]]

    def _subject(self) -> str:
        """The class, or what Muon cuts a weight into."""
        if isinstance(self.algorithm, OptimizerClass):
            return f' "{self.algorithm.path}"'
        cuts = dict(self.algorithm.units) if isinstance(self.algorithm, Muon) else {}
        texts = {f"{name} {cut}" for name, cut in cuts.items() if cut.sizes}
        return f" ({', '.join(sorted(texts))})" if texts else ""


def _shown(value: Any) -> str:
    return phrases.value(value) if isinstance(value, str) else f"{value}".lower()
