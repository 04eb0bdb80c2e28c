"""The load section -> where weights start, how they are loaded, and their dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planc.diagnostic import Label, did_you_mean, one_of
from planc.model.facts import Facts, Modules
from planc.plan.call_arguments import word
from planc.plan.evaluate import describe
from planc.plan.ir import Load
from planc.plan.program import Program
from planc.plan.rule_conflicts import flatten
from planc.plan.scope import Failed
from planc.plan.sections.fsdp_policies import DTYPES
from planc.plan.sections.tensor import no_axes
from planc.syntax import ast

WORDS: dict[str, dict[str, str]] = {
    "init": {"meta": "meta"},
    "weights": {"slices": "slices", "rank0": "rank0", "checkpoint": "checkpoint"},
    "dtype": DTYPES,
    "islands": {"model": "model", "none": "none"},
}


@dataclass(frozen=True, slots=True)
class _Said:
    setting: ast.Setting
    value: str | None


def load(program: Program) -> Load | None:
    """The settings of the load sections, or None where there are none."""
    said: dict[str, _Said] = {}
    for section in program.named("load"):
        no_axes(section, program)
        for placed in flatten(section, program.scope):
            item = placed.item
            if isinstance(item, ast.Setting) and not placed.nested:
                _setting(item, said, program)
                continue
            program.sink.error(
                "PL011",
                "this has no place in a `load` section",
                item.origin,
                help="it holds settings: `weights = slices`",
            )
    if not any(s.value for s in said.values()):
        return None
    values = {name: s.value for name, s in said.items()}
    if "islands" in said and values.get("dtype") is None:
        program.sink.error(
            "PL690",
            "`islands` says what a cast leaves in fp32, and nothing is cast",
            said["islands"].setting.origin,
            help="say what parameters are kept in, such as `dtype = bf16`, or take this out",
        )
    found = Load(
        meta=values.get("init") == "meta",
        weights=values.get("weights"),
        dtype=values.get("dtype"),
        islands=values.get("islands") != "none",
        origin=next(s.setting.origin for s in said.values() if s.value),
    )
    program.scope.kept = found.kept
    return replace(found, fp32=tuple(_islands(found, program.facts)))


def _islands(load: Load, facts: Facts) -> Iterator[Modules]:
    """What a cast leaves in float32, or takes there, as modules with a parameter's name."""
    for modules in facts.model.below() if load.dtype is not None else ():
        for parameter in modules.module.parameters:
            if "float" in parameter.dtype and load.kept(parameter) != load.dtype:
                yield Modules((*modules.path, parameter.name), modules.module)


def _setting(item: ast.Setting, said: dict[str, _Said], program: Program) -> None:
    sink = program.sink
    if item.name not in WORDS:
        told = did_you_mean(item.name, WORDS, f"there is {one_of(WORDS, last='and')}")
        sink.error("PL105", f"there is no setting `{item.name}`", item.name_origin, help=told)
        return
    earlier = said.get(item.name)
    if earlier is not None and not item.override:
        sink.error(
            "PL102",
            f"two settings decide `{item.name}`",
            Label(span=item.origin, text="this one"),
            Label(span=earlier.setting.origin, text="and this one"),
            help="take one away, or write `override` before the one that is to hold",
        )
    if earlier is None and item.override:
        sink.error(
            "PL103",
            f"nothing before this decides `{item.name}`: there is nothing to override",
            item.origin,
            help="take `override` away",
        )
    said[item.name] = _Said(item, _value(item, program))


def _value(item: ast.Setting, program: Program) -> str | None:
    value = word(item.value, program.scope)
    words = WORDS[item.name]
    if isinstance(value, str) and value in words:
        return words[value]
    if not isinstance(value, Failed):
        shown = f"`{value}`" if isinstance(value, str) else describe(value)
        wanted = one_of(f"`{w}`" for w in words)
        message = f"`{item.name}` is {wanted}, not {shown}"
        told = did_you_mean(value, words) if isinstance(value, str) else None
        program.sink.error("PL012", message, item.value.origin, help=told)
    return None
