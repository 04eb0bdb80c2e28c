"""The answer of `planc why`, as data, as lines of text and as a JSON document."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

from planc.diagnostics.diagnostic import Diagnostic
from planc.model.facts import Modules
from planc.ops import phrases
from planc.ops.document import dumps
from planc.ops.lowered import Lowered
from planc.ops.registry import kinds
from planc.sections import NAMES

FORMAT_VERSION = 1
Segment = tuple[str, str]
"""Text and the name of its terminal style; `""` is plain."""

_HEAD = 12
_DECISIONS = (
    "load",
    "stage",
    "adapter",
    "tensor",
    "around",
    "inside",
    "ties",
    "training",
    "checkpoint",
    "compile",
    "context",
    "experts",
    "loss",
    "unit",
    "towers",
    "draws",
)
"""The fields of an answer that are decisions of operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One decision of one line of the plan.

    Args:
        target: the module that the line is about: the one asked for, an ancestor or a submodule.
        place, text: `name:line`, empty for what planc adds, and the line, where the plan is
            available.
        op: the index of the operation in the lowered plan.
        inferred: why planc inferred it; empty for what the line states.
    """

    what: str
    target: str
    place: str
    text: str = ""
    op: int
    inferred: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterAnswer:
    """One parameter, on the rank with the largest shard.

    Args:
        name: in its module.
        shape: in the model.
        dtype: its torch dtype.
        trainable: whether it requires a gradient.
        local: its shape after tensor parallelism.
        spread: (ranks, size) along the dim of tensor parallelism, in order, where ranks differ.
        shard: its shape at rest, after FSDP.
        at_rest: bytes on one rank.
        gathered: bytes while its unit is all-gathered, in the dtype of `computed`.
        computed: the dtype that it is all-gathered in.
        ties: names of the parameters that are the same tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    local: tuple[int, ...]
    spread: tuple[tuple[int, int], ...]
    shard: tuple[int, ...]
    at_rest: int
    gathered: int
    computed: str
    ties: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """All decisions about one module, or about one of its parameters.

    Args:
        name: in torch; `root` for the model itself.
        parameter: the parameter's name in the module, None where the module was asked for.
        kind: `linear`, `norm` and so on.
        like: the set of equal modules that contains the module.
        parameters: of the module itself, or the one that was asked for.
        count: the number of elements in all its parameters, those of submodules included.
        load: how weights are loaded, and their dtype.
        stage: the stages of the pipeline that hold it, and what they take where time decides.
        adapter: the adapter on the layer, or the one that contains the module.
        tensor: styles on the module itself.
        around: styles on its ancestors, which redistribute inputs and outputs there.
        inside: styles on its submodules.
        checkpoint, compile: of the module, of its ancestors and of its submodules.
        context: what attention exchanges where its ranks have parts of sequences or images.
        experts: how tokens come to its experts, which ranks divide.
        loss: how the loss is computed in it.
        unit: the unit that contains it, then the units inside it.
        training: what freezes or unfreezes it.
        sections: by the names of sections that are folders.
        towers: the tower that the module is in, which data ranks without images or sound run too.
        draws: whether random numbers differ by rank in the module and after it.
        unit_bytes: of the unit that contains it: at rest on one rank, and all-gathered.
        missing: by section, why nothing decides it.
        findings: those of the compiler, as `planc.why` returns them.
    """

    name: str
    parameter: str | None
    cls: str
    kind: str
    like: Modules
    parameters: tuple[ParameterAnswer, ...]
    count: int
    load: tuple[Reason, ...] = ()
    stage: tuple[Reason, ...] = ()
    adapter: tuple[Reason, ...] = ()
    tensor: tuple[Reason, ...] = ()
    around: tuple[Reason, ...] = ()
    inside: tuple[Reason, ...] = ()
    checkpoint: tuple[Reason, ...] = ()
    compile: tuple[Reason, ...] = ()
    context: tuple[Reason, ...] = ()
    experts: tuple[Reason, ...] = ()
    loss: tuple[Reason, ...] = ()
    unit: tuple[Reason, ...] = ()
    unit_bytes: tuple[int, int] | None = None
    ties: tuple[Reason, ...] = ()
    training: tuple[Reason, ...]
    sections: Mapping[str, tuple[Reason, ...]] = field(default_factory=dict)
    towers: tuple[Reason, ...] = ()
    draws: tuple[Reason, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Diagnostic, ...] = ()

    def __str__(self) -> str:
        return text(self).rstrip()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Reason, ...]:
            """The decisions of a section that is a folder, by its name."""
            if name in NAMES:
                return self.sections.get(name, ())
            raise AttributeError(name)


def text(answer: Reasons) -> str:
    """The answer as `planc why` prints it."""
    rows = ("".join(part for part, _ in line).rstrip(" ") for line in lines(answer))
    return "".join(f"{row}\n" for row in rows)


def lines(answer: Reasons) -> Iterator[list[Segment]]:
    """The answer as text: each decision, and below it the line of the plan."""
    kind = f" ({answer.kind})" if answer.kind != "other" else ""
    what = f"a parameter of {answer.cls}" if answer.parameter else answer.cls
    yield [(answer.name, "bold"), (f"  {what}{kind}", "")]
    width = max([_HEAD, *(len(parameter.name) + 2 for parameter in answer.parameters)])
    for line in _below(answer):
        yield [(f"{line[0][0]:<{width}}", line[0][1]), *line[1:]] if line else []


def _below(answer: Reasons) -> Iterator[list[Segment]]:
    """The lines below the first; what stands in front of each is not padded yet."""
    yield from _model(answer)
    yield []
    for reason in answer.load:
        yield from _reason("load", reason.what, reason)
    for i, reason in enumerate(answer.stage):
        yield from _reason("" if i else "stage", reason.what, reason)
    yield from _target_lines("adapter", answer.adapter)
    yield from _reasons("tensor", answer.tensor, answer)
    for reason in answer.around:
        yield from _reason("", f"in {reason.target}: {reason.what}", reason)
    yield from _target_lines("", _together(answer.inside))
    yield from _target_lines("tie", answer.ties)
    yield from _target_lines("train", answer.training)
    for name, reasons in answer.sections.items():
        yield from _target_lines(name, _together(reasons))
    yield from _reasons("checkpoint", answer.checkpoint, answer)
    yield from _reasons("compile", answer.compile, answer)
    yield from _reasons("context", answer.context, answer)
    yield from _reasons("experts", answer.experts, answer)
    yield from _reasons("loss", answer.loss, answer)
    yield from _reasons("unit", answer.unit, answer)
    yield from _target_lines("towers", answer.towers)
    for reason in answer.draws:
        yield from _reason("draws", reason.what, reason)
    names = max((len(parameter.name) + 2 for parameter in answer.parameters), default=0)
    for i, parameter in enumerate(answer.parameters):
        name = "" if answer.parameter else f"{parameter.name}:".ljust(names)
        yield _head("" if i else "per rank", f"{name}{_memory(parameter)}")
    if answer.unit_bytes is not None:
        rest, gathered = (phrases.size(b) for b in answer.unit_bytes)
        text = f"{rest} at rest, {gathered} gathered" if any(answer.unit_bytes) else "nothing"
        yield _head("" if answer.parameters else "per rank", f"its unit: {text}")


def _model(answer: Reasons) -> Iterator[list[Segment]]:
    if len(answer.like) > 1:
        yield _head("like it", f"{len(answer.like)} modules: {answer.like}")
    for parameter in answer.parameters:
        yield _head(parameter.name, _shapes(parameter))
        if parameter.ties:
            yield _head("", f"the same tensor as {' and '.join(parameter.ties)}")
    if answer.parameter is None and answer.count > sum(prod(p.shape) for p in answer.parameters):
        yield _head("inside", f"{answer.count:,} parameters with those of the modules in it")


def _shapes(parameter: ParameterAnswer) -> str:
    text = f"{list(parameter.shape)}"
    if parameter.local != parameter.shape:
        text += f" -> {list(parameter.local)}"
    text += f" {parameter.dtype}{'' if parameter.trainable else ', frozen'}"
    if parameter.spread:
        parts = ", ".join(f"{n} x {size}" for n, size in parameter.spread)
        text += f"; not even over the ranks: {parts}"
    return text


def _memory(of: ParameterAnswer) -> str:
    return (
        f"{phrases.size(of.at_rest)} at rest, {list(of.shard)} {phrases.dtype(of.dtype)}; "
        f"{phrases.size(of.gathered)} gathered, {list(of.local)} {phrases.dtype(of.computed)}"
    )


def _reasons(section: str, reasons: Iterable[Reason], answer: Reasons) -> Iterator[list[Segment]]:
    title = "fsdp" if section == "unit" else section
    if section in answer.missing:
        inside = ", but on what is inside" if section == "tensor" and answer.inside else ""
        yield _head(title, f"{answer.missing[section]}{inside}")
    for i, reason in enumerate(reasons):
        same = reason.target in (answer.name, answer.name.rpartition(".")[0])
        same = same and (section == "tensor" or reason.target == answer.name)
        what = reason.what if same else f"{reason.target}: {reason.what}"
        yield from _reason("" if i else title, what, reason)


def _target_lines(title: str, reasons: Iterable[Reason]) -> Iterator[list[Segment]]:
    for reason in reasons:
        yield from _reason(title, f"{reason.target}: {reason.what}", reason)


def _reason(title: str, what: str, reason: Reason) -> Iterator[list[Segment]]:
    yield _head(title, what)
    if reason.place:
        text = f"  {reason.text}" if reason.text else ""
        yield [("", ""), ("  ", ""), (reason.place, "secondary"), (text, "")]
    if reason.inferred:
        yield [("", ""), ("  ", ""), ("inferred: ", "secondary"), (reason.inferred, "")]


def _head(title: str, text: str) -> list[Segment]:
    return [(title, "bold"), (text, "")]


def _together(reasons: Sequence[Reason]) -> Iterator[Reason]:
    alike: dict[tuple[str, ...], list[Reason]] = {}
    for reason in reasons:
        key = (reason.what, reason.place, phrases.parent(reason.target))
        alike.setdefault(key, []).append(reason)
    for (what, place, _), group in alike.items():
        for target in phrases.together(r.target for r in group):
            yield replace(group[0], what=what, target=target, place=place)


def decision_names() -> tuple[str, ...]:
    """The names of an answer's decisions: fields, and sections that are folders."""
    decide = (kind for kind in kinds() if kind.SECTION and kind.ABOUT and not kind.ANSWER)
    return tuple(dict.fromkeys((*_DECISIONS, *(kind.SECTION for kind in decide))))


def document(answer: Reasons, lowered: Lowered) -> dict[str, Any]:
    """The answer in the form of `grammars/why.schema.json`."""
    stages = json.loads(dumps(lowered))["stages"]
    ops = [op for stage in stages for op in stage["ops"]]
    parts = asdict(answer)
    sections = {n: parts["sections"].get(n, ()) for n in decision_names() if n not in parts}
    fields: dict[str, Any] = {}
    for name, value in parts.items():
        fields |= sections if name == "sections" else {name: value}
    del fields["findings"]
    fields["like"], fields["alike"] = str(answer.like), len(answer.like)
    fields["class"] = fields.pop("cls")
    for name in decision_names():
        for reason in fields[name]:
            reason["op"] = ops[reason["op"]]
    return {"format_version": FORMAT_VERSION, **fields}
