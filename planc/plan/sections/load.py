"""The load section -> where weights start, how they are loaded, and their dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planc.diagnostic import did_you_mean, one_of
from planc.model.facts import Facts, Modules
from planc.plan.call_arguments import word
from planc.plan.evaluate import describe
from planc.plan.ir import Load
from planc.plan.overrides import Settings
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


def load(program: Program) -> Load | None:
    """The settings of the load sections, or None where there are none."""
    settings = Settings(program.sink)
    for section in program.named("load"):
        no_axes(section, program)
        for placed in flatten(section, program.scope):
            item = placed.item
            if isinstance(item, ast.Setting) and not placed.nested:
                if item.name in WORDS:
                    settings.add(item, lambda item: _value(item, program))
                else:
                    told = did_you_mean(item.name, WORDS, f"there is {one_of(WORDS, last='and')}")
                    message = f"there is no setting `{item.name}`"
                    program.sink.error("PL105", message, item.name_origin, help=told)
                continue
            program.sink.error(
                "PL011",
                "this has no place in a `load` section",
                item.origin,
                help="it holds settings: `weights = slices`",
            )
    values, lines = settings.values, settings.lines
    if not any(values.values()):
        return None
    if "islands" in values and values.get("dtype") is None:
        program.sink.error(
            "PL690",
            "`islands` says what a cast leaves in fp32, and nothing is cast",
            lines["islands"].origin,
            help="say what parameters are kept in, such as `dtype = bf16`, or take this out",
        )
    found = Load(
        meta=values.get("init") == "meta",
        weights=values.get("weights"),
        dtype=values.get("dtype"),
        islands=values.get("islands") != "none",
        origin=next(lines[name].origin for name, value in values.items() if value),
    )
    program.scope.kept = found.kept
    return replace(found, fp32=tuple(_islands(found, program.facts)))


def _islands(load: Load, facts: Facts) -> Iterator[Modules]:
    """What a cast leaves in float32, or takes there, as modules with a parameter's name."""
    for modules in facts.model.below() if load.dtype is not None else ():
        for parameter in modules.module.parameters:
            if "float" in parameter.dtype and load.kept(parameter) != load.dtype:
                yield Modules((*modules.path, parameter.name), modules.module)


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
