"""The base class of operations, the JSON of their fields, and what a diff compares of them."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum, auto
from operator import attrgetter
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

from planc.diagnostics.source import NOWHERE, Span
from planc.model.facts import Modules
from planc.ops import phrases
from planc.ops.call import Context, ScriptFunction, Step
from planc.ops.claims import CallClaim, ObservedCall
from planc.ops.decisions import Decision, Question, decision_on
from planc.ops.phrases import AxisSizes as AxisSizes  # noqa: PLC0414 - for every operation
from planc.ops.requirements import Requirement

Group = frozenset[str]
"""The paths of the members of a group (one FSDP unit)."""

Value = str | int | float | bool | tuple[int, ...] | tuple[str, ...] | None
Words = Mapping[str, tuple[str, Callable[[Any], str]]]
"""By the name of a field in the JSON: its name in a diff, and the text of a value."""


class Fact(NamedTuple):
    """A statement with its name in the lowered JSON; `usual` for a default that is left out."""

    name: str
    value: Value
    usual: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A statement of a plan about a set of modules.

    Args:
        kind: one of `planc.diffing.matching.kinds`.
        over: the axes of a tensor-parallel style.
        label: the subject, where that is not a set of modules.
        style: of a tensor-parallel rule.
        facts: all other statements.
        place: the line of the `.plan` file.
        brief: the text of a diff where only one side has the entry.
        source: the operation, or the part of one, whose fields are facts too, except those in its
            `ABOUT`; None for none.
        at: its position in the plan, which only orders names.
    """

    kind: str
    over: tuple[str, ...] = ()
    label: str = ""
    modules: Modules | None = None
    style: Any = None
    facts: tuple[Fact, ...] = ()
    place: str = ""
    brief: str = field(default="", compare=False)
    source: Any = field(default=None, compare=False)
    at: int = field(default=0, compare=False)

    @property
    def subject(self) -> tuple[object, ...]:
        """Entries with the same subject are compared where their indices overlap."""
        key = None if self.modules is None else self.modules.key
        return (self.kind, self.over, self.label, key)

    @property
    def content(self) -> str:
        """All statements, strictly typed: `reshard` to 1 rank differs from `reshard = True`."""
        return repr((self.style, self.facts))

    def order(self) -> tuple[str, str]:
        """A sort key that does not depend on the order of operations."""
        return (str(self.modules), self.content)


class AxisRole(StrEnum):
    """The part of the work that the ranks along a mesh axis split among them.

    `planc.ir.mesh_axes` decides it; no other module looks at the name of an axis.
    """

    DATA = "data"
    """Samples: each rank reads different ones."""
    SEQUENCE = "sequence"
    """The tokens of one sample."""
    TENSOR = "tensor"
    """The features of one weight."""
    EXPERT = "expert"
    """Whole experts."""
    STAGE = "stage"
    """Layers, as stages of a pipeline."""


class Phase(IntEnum):
    """The phases in which operations are applied to a model, in order.

    `planc.lowering.lower` gives the reason for the place of each phase.
    """

    MODEL = auto()
    """Stages, the configuration, loading and adapters, on the model without any sharding."""
    LAYERS = auto()
    """Layers are replaced before their weights are sharded."""
    TENSOR = auto()
    TIES = auto()
    EXPERTS = auto()
    INSIDE_EXPERTS = auto()
    """Styles on the experts of a rank."""
    CONTEXT = auto()
    DOCUMENTS = auto()
    """Recurrent states are reset at documents."""
    FREEZE = auto()
    QUANTIZE = auto()
    CHECKPOINT = auto()
    CAPACITY = auto()
    """It tells the checkpoints of all stages."""
    COMPILE = auto()
    SHARD = auto()
    UNITS = auto()
    """Settings of FSDP units."""
    LOSS = auto()
    INPUTS = auto()
    RANDOM = auto()
    OPTIMIZER = auto()


class SimulationKind(StrEnum):
    """The simulations on the proxy model that run an operation."""

    ALWAYS = "always"
    NEVER = "never"
    WITH_DATA = "with data"
    """Simulations with several ranks that read different rows."""
    SEPARATELY = "separately"
    """A separate simulation: results depend on all rows of a pass, or need another dtype."""


Where = tuple[str | int, ...]
"""A path in a JSON document: keys and indices."""

OMIT = {"omit": True}
"""Metadata of a dataclass field that is left out of the JSON at its default."""


NOT_WRITTEN = {"written": False}
"""Metadata of a dataclass field that is no part of the JSON."""


def key(name: str) -> dict[str, str]:
    """Metadata of a dataclass field that has another name in the JSON."""
    return {"key": name}


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """The JSON form of an annotated type, and the values that it allows.

    Args:
        schema: keywords of JSON Schema, beyond those that follow from the type.
        name: the name of the definition that other schemas refer to; empty for none.
        write: converts a value to JSON.
        read: converts JSON to a value; raises ValueError with a message for an invalid one.
        axis: whether the value is the name of an axis, which must be in the mesh.
        pairs: whether a tuple of pairs is written as an object.
        tag: the key that holds the kind of an object in a union of dataclasses.
    """

    schema: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    write: Callable[[Any], Any] = _same
    read: Callable[[Any], Any] = _same
    axis: bool = False
    pairs: bool = False
    tag: str = ""


def text(name: str, title: str, pattern: str, *, axis: bool = False, most: int = 200) -> Form:
    """A string that matches a pattern. JSON Schema's `$` also matches before a trailing newline."""
    pattern = f"^{pattern}$(?!\\n)"
    schema = {"title": title, "type": "string", "pattern": pattern, "maxLength": most}
    return Form(schema, name=name, axis=axis)


T = TypeVar("T")
Name = Annotated[str, text("name", "a name", r"[\w.-]+")]
Axis = Annotated[str, text("axis", "a name", r"[\w.-]+", axis=True)]
Axes = tuple[Axis, ...]
Operator = Annotated[str, text("operator", "the name of an operator", r"\w+(\.\w+)*")]
Count = Annotated[int, Form({"minimum": 0, "maximum": 2**63 - 1}, name="count")]
Size = Annotated[int, Form({"minimum": 1, "maximum": 2**31 - 1}, name="size")]
ShardDim = Annotated[int, Form({"minimum": 0, "maximum": 100})]
Positive = Annotated[int | float, Form({"type": "number", "exclusiveMinimum": 0})]
Dims = Annotated[tuple[Count, ...], Form({"maxItems": 16}, name="dims")]
Dtype = Annotated[str, Form({"enum": ["float16", "bfloat16", "float32", "float64"]})]
Some = Annotated[tuple[T, ...], Form({"minItems": 1})]
Pairs = Annotated[tuple[tuple[Name, T], ...], Form(pairs=True)]


Literal = int | float | str | bool | None | tuple["Literal", ...]


def _as_lists(value: Literal) -> Any:
    return [_as_lists(v) for v in value] if isinstance(value, tuple) else value


def _frozen(value: Any) -> Literal:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


Plain = Annotated[
    Any,
    Form(
        {
            "type": ["null", "boolean", "number", "string", "array"],
            "items": {"$ref": "#/$defs/literal"},
        },
        name="literal",
        write=_as_lists,
        read=_frozen,
    ),
]

_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
ClassPath = Annotated[str, text("", "package.module:Class", rf"{_WORD}([.]{_WORD})*:{_WORD}")]
"""A class of the user's, imported only where the user allows code."""
PlainKeywords = Annotated[
    Pairs[Plain], Form({"propertyNames": dict(text("", "a name", _WORD).schema)})
]


def choice(*values: object) -> Form:
    """One of several values."""
    return Form({"enum": list(values)})


def kind_of(cls: type) -> str:
    """The tag of a dataclass in the JSON of a union: `KIND`, or its name in snake case."""
    given = getattr(cls, "KIND", "")
    return given or re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


Origin = Annotated[Span, Form({"type": "string"}, write=attrgetter("place"), read=Span.from_place)]
"""A part of a `.plan` file, in JSON as `name:line`."""
Origins = Annotated[Pairs[Origin], Form(name="origins")]
"""Spans by field; `ignored.0` is the first entry of `ignored`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A parameter's shape before and after an operation, on the rank with the largest shard."""

    name: Name
    shape: Dims
    local: Dims

    def problems(self) -> Iterator[tuple[Where, str]]:
        if len(self.shape) != len(self.local):
            yield (), "shape and local have different numbers of dims"


class StepFacts(Protocol):
    """The facts of a training step that decide which collectives of an operation are not counted.

    Attributes:
        knows_trained: whether it is known which parameters train.
        skips_blocks: whether the backward pass ends after the first block.
    """

    @property
    def knows_trained(self) -> bool: ...
    @property
    def skips_blocks(self) -> bool: ...
    def wide(self, axes: tuple[str, ...]) -> bool:
        """Whether there are several ranks along the axes."""

    def has_styles(self, modules: Modules) -> bool:
        """Whether styles split some of the modules over several ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """Args:
    origin: the `.plan` line that it is from, as `name:line`; empty for what planc adds by itself.
    origins: the lines of fields that another line decided; `precision` is all of FSDP's policy.
    """

    SCRIPT: ClassVar[ScriptFunction]
    KIND: ClassVar[str] = ""
    PHASE: ClassVar[Phase]
    SECTION: ClassVar[str] = ""
    """The section in whose folder the operation is; empty for operations of the compiler."""
    ANSWER: ClassVar[str] = ""
    """The field of `planc why`'s answer for its decisions; empty for that of its section."""
    WORD: ClassVar[str]
    """The name of the kind in `lower` and `diff`."""
    ABOUT: ClassVar[tuple[str, ...]] = ()
    """The fields that identify the subject, the main one first; all others are facts of a diff."""
    WORDS: ClassVar[Words] = {}
    """The words of a diff for facts, where they are not the names and values."""

    ROLE: ClassVar[AxisRole | None] = None
    """The part of the work that the ranks along `split_axes` split; None where they split none."""
    CARRIES: ClassVar[str] = ""
    """The data that ranks along `split_axes` send to each other, in words; empty for none."""

    SENDS_ACTIVATIONS: ClassVar[bool] = False
    """Whether an operation of a section changes which activations ranks send in a step."""
    ALONE: ClassVar[bool] = False
    """Whether a reference run in one process has the operation too."""
    NEEDS: ClassVar[str] = ""
    """Packages and devices that a script needs in place of parts of torch; empty for none."""
    LOOP_FUNCTIONS: ClassVar[tuple[str, ...]] = ()
    """The functions of a script that its training loop calls because of the operation."""
    SIMULATION: ClassVar[SimulationKind] = SimulationKind.ALWAYS
    SIMULATION_LIMIT: ClassVar[float] = 1e-4
    """The largest relative error of its separate simulation that counts as equal."""
    READS_VALUES: ClassVar[bool] = False
    """Whether its calls read the values of weights, which fake tensors lack."""
    SETS_TRAINING: ClassVar[bool] = False
    """Whether it decides which parameters train."""
    UNDONE_BY: ClassVar[Mapping[str, str]] = {}
    """Methods of transformers' models that would undo it, and phrases for what is undone."""

    origin: Origin = field(default=NOWHERE, compare=False, repr=False, metadata=key("place"))
    origins: Origins = field(default=(), compare=False, repr=False, metadata=OMIT)

    @property
    def place(self) -> str:
        return self.origin.place

    def origin_of(self, field: str) -> Span | None:
        """The line that decided a field; None where it is the line of the operation."""
        return dict(self.origins).get(field)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes whose ranks split the work that `ROLE` names."""
        return ()

    @property
    def communication_axes(self) -> tuple[str, ...]:
        """The axes along which its ranks call collectives."""
        return self.split_axes

    @property
    def weight_shapes(self) -> tuple[Shape, ...]:
        """The shapes of the parameters that it splits over `split_axes`."""
        return ()

    @property
    def traced_modules(self) -> tuple[Modules, ...]:
        """The modules to whose forward pass a profile adds the line of the operation."""
        return ()

    @property
    def compiled_modules(self) -> tuple[Modules, ...]:
        """The modules that the operation compiles."""
        return ()

    @property
    def loss_modules(self) -> tuple[Modules, ...]:
        """The modules in which the operation computes the loss; they return no logits."""
        return ()

    @property
    def short_name(self) -> str:
        """The name in a profile and in a picture."""
        return self.WORD

    def claims(self, collective: ObservedCall) -> CallClaim | None:
        """The claim on a collective of a run; None if the operation does not make it."""
        return None

    @property
    def inference(self) -> str:
        """The reason for which planc inferred the operation; empty for what a line states."""
        return ""

    @property
    def call_name(self) -> str:
        """The function that the operation calls, in messages of a run."""
        return type(self).__name__.lower()

    @property
    def whole_call_modules(self) -> tuple[Modules, ...]:
        """The modules that the operation works on besides those that its calls name."""
        return ()

    @property
    def required_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes that parameters of its modules must have before it, by name."""
        return {}

    def misfits(self, modules: Mapping[str, Any]) -> Iterator[str]:
        """Yields the reasons for which the operation does not fit a model.

        Args:
            modules: of the model, by name.
        """
        yield from ()

    def union(self, other: "Op") -> Self | None:
        """Two operations of one line as one, if they are equal on modules whose paths differ in one
        set of indices; else None.
        """
        alike = type(self) is type(other) and self.place == other.place
        both = self.about.union(other.about) if alike and isinstance(self.about, Modules) else None
        if both is None:
            return None
        modules: dict[str, Any] = {self.ABOUT[0]: both}
        joined = replace(self, **modules)
        return joined if replace(other, **modules) == joined else None

    def uncounted_traffic(self, step: StepFacts) -> str:
        """Names the collectives of a step whose number or size is unknown; empty for none."""
        if self.SETS_TRAINING and not step.knows_trained:
            return "what backward leaves out where parameters are frozen"
        if self.ROLE in (AxisRole.SEQUENCE, AxisRole.STAGE) and step.skips_blocks:
            return f"what backward leaves out of {self.WORD} for frozen blocks"
        return ""

    @property
    def shared_encoders(self) -> tuple[Modules, ...]:
        """The modules whose encoders run on all data ranks, if batches of some have inputs."""
        return ()

    def runs_everywhere(self, parameter: str) -> bool:
        """Whether a parameter of that name is one of such an encoder."""
        return False

    @property
    def divided_encoders(self) -> tuple[str, ...]:
        """The modules and parameters that each rank of an axis uses for inputs of its own."""
        return ()

    @property
    def state_updates(self) -> tuple[str, ...]:
        """The functions of the model whose recurrent states it resets at documents."""
        return ()

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """The packages that `apply` needs for the operation, in addition to torch."""
        return ()

    def decisions(self, question: Question) -> Iterator[Decision]:
        """The decisions about a module that `planc why` prints; by default the headline, about the
        modules of the operation.
        """
        if self.ABOUT[:1] == ("modules",):
            yield from decision_on(self.about, self.headline(question.mesh), question)

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages that a script imports for the operation, in addition to torch."""
        return ()

    @property
    def simulation_dtype(self) -> str | None:
        """The dtype that its separate simulation requires; None for no requirement."""
        return None

    @property
    def token_multiple(self) -> int:
        """The number of which the tokens of a pass on a rank must be a multiple."""
        return 1

    def simplify(self, context: Context, *, precision: bool) -> Self:
        """The operation on the proxy model, where sizes are small and packages may be missing.

        Args:
            context: the mesh of the simulation.
            precision: whether mixed precision is kept.
        """
        return self

    def omission(self, *, precision: bool) -> tuple[str, str] | None:
        """The name and the text of what a simulation leaves out; None for nothing."""
        return None

    def drop_sizes(self) -> Self:
        """The operation without the numbers of bytes in it, which decide nothing that runs."""
        return self

    def problems(self) -> Iterator[tuple[Where, str]]:
        """Yields (where in the operation, a message) for what the types of the fields allow."""
        yield from ()

    @property
    def script(self) -> ScriptFunction:
        """The function of an emitted script that makes the calls of this operation."""
        return self.SCRIPT

    def calls(self, context: Context) -> Iterator[Step]:
        """The torch calls of the operation, in order."""
        raise NotImplementedError

    def headline(self, mesh: AxisSizes | None = None) -> str:
        """The operation as a person reads it; with the sizes of its axes where a mesh is given."""
        raise NotImplementedError

    @property
    def about(self) -> Any:
        """The value of the first field in `ABOUT`."""
        return getattr(self, self.ABOUT[0]) if self.ABOUT else None

    @classmethod
    def section(cls, ops: Sequence[Self], mesh: AxisSizes) -> Iterator[str]:
        """The lines that `lower` prints for all operations of the kind: those on modules as a
        listing.
        """
        if cls.ABOUT[:1] == ("modules",):
            yield from phrases.listing((cls.WORD, str(op.about), op.headline(mesh)) for op in ops)
            return
        for op in ops:
            units = op.about if isinstance(op.about, tuple) else ()
            some = f", of {', '.join(map(str, units))}" if units else ""
            yield phrases.head(cls.WORD, op.headline(mesh) + some)

    def entries(self, common: Set[Group]) -> Iterator[Entry]:
        """The entries that a diff compares; groups of only one side go by members."""
        about = self.about
        entry = Entry(kind=self.WORD, place=self.place, brief=self.headline(), source=self)
        if isinstance(about, str):
            yield replace(entry, label=about)
            return
        for modules in (about or (None,)) if isinstance(about, tuple) else (about,):
            yield replace(entry, modules=phrases.layer(modules) if modules else None)


def short(value: Any) -> str:
    """A JSON value for a message, truncated where it is long."""
    return cut(json.dumps(value))


def cut(message: str) -> str:
    return message if len(message) <= 80 else f"{message[:77]}..."
