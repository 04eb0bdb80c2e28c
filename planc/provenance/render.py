"""The answer of `planc why` as lines of text and as a JSON document."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from math import prod
from typing import Any

from planc.ops import phrases
from planc.ops.document import dumps
from planc.ops.lowered import Lowered
from planc.provenance.answer import ParameterAnswer, Reason, Reasons

FORMAT_VERSION = 1
Segment = tuple[str, str]
"""Text and the name of its terminal style; `""` is plain."""

_HEAD = 12
SECTIONS = (
    "load",
    "adapter",
    "tensor",
    "around",
    "inside",
    "ties",
    "training",
    "checkpoint",
    "compile",
    "experts",
    "loss",
    "unit",
    "draws",
)


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
    yield from _targeted("adapter", answer.adapter)
    yield from _reasons("tensor", answer.tensor, answer)
    for reason in answer.around:
        yield from _reason("", f"in {reason.target}: {reason.what}", reason)
    yield from _targeted("", _together(answer.inside))
    yield from _targeted("tie", answer.ties)
    yield from _targeted("train", answer.training)
    yield from _reasons("checkpoint", answer.checkpoint, answer)
    yield from _reasons("compile", answer.compile, answer)
    yield from _reasons("experts", answer.experts, answer)
    yield from _reasons("loss", answer.loss, answer)
    yield from _reasons("unit", answer.unit, answer)
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


def _targeted(title: str, reasons: Iterable[Reason]) -> Iterator[list[Segment]]:
    for reason in reasons:
        yield from _reason(title, f"{reason.target}: {reason.what}", reason)


def _reason(title: str, what: str, reason: Reason) -> Iterator[list[Segment]]:
    yield _head(title, what)
    if reason.place:
        text = f"  {reason.text}" if reason.text else ""
        yield [("", ""), ("  ", ""), (reason.place, "secondary"), (text, "")]


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


def document(answer: Reasons, lowered: Lowered) -> dict[str, Any]:
    """The answer in the form of `grammars/why.schema.json`."""
    stages = json.loads(dumps(lowered))["stages"]
    ops = [op for stage in stages for op in stage["ops"]]
    fields = asdict(answer)
    fields["like"], fields["alike"] = str(answer.like), len(answer.like)
    fields["class"] = fields.pop("cls")
    for section in SECTIONS:
        for reason in fields[section]:
            reason["op"] = ops[reason["op"]]
    return {"format_version": FORMAT_VERSION, **fields}
