"""The load section -> where weights start, how they are loaded, and their dtype."""

from collections.abc import Iterator

from planc.diagnostic import did_you_mean, one_of
from planc.model.facts import Facts, Modules
from planc.ops.load import Load
from planc.plan.call_arguments import word
from planc.plan.evaluate import describe
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
_FIELDS = {"init": "meta", "islands": "fp32"}
"""The fields of the operation whose names differ from those of their settings."""


def load(program: Program) -> Load | None:
    """The settings of the load sections, or None where there are none."""
    settings = _settings(program)
    values, lines = settings.values, settings.lines
    if not any(values.values()):
        return None
    dtype = values.get("dtype")
    if "islands" in values and dtype is None:
        message = "`islands` names what a cast leaves in fp32, and nothing is cast"
        help = "set the dtype of the parameters, such as `dtype = bf16`, or remove this"
        program.sink.error("PL690", message, lines["islands"].origin, help=help)
    origin = next(lines[name].origin for name, value in values.items() if value)
    others = ((name, line.origin) for name, line in lines.items() if line.origin is not origin)
    cast = dtype if values.get("islands") != "none" else None
    found = Load(
        meta=values.get("init") == "meta",
        weights=values.get("weights"),
        dtype=dtype,
        fp32=tuple(_islands(cast, program.facts)) if cast else (),
        origin=origin,
        origins=tuple((_FIELDS.get(name, name), origin) for name, origin in others),
    )
    program.scope.kept = found.kept
    return found


def _settings(program: Program) -> Settings:
    settings = Settings(program.sink)
    for section in program.named("load"):
        no_axes(section, program)
        for placed in flatten(section, program.scope):
            item = placed.item
            if not isinstance(item, ast.Setting) or placed.nested:
                message = "this has no place in a `load` section"
                help = "it holds settings: `weights = slices`"
                program.sink.error("PL011", message, item.origin, help=help)
            elif item.name not in WORDS:
                hint = did_you_mean(item.name, WORDS, f"there is {one_of(WORDS, last='and')}")
                message = f"there is no setting `{item.name}`"
                program.sink.error("PL105", message, item.name_origin, help=hint)
            else:
                settings.add(item, lambda item: _value(item, program))
    return settings


def _islands(dtype: str, facts: Facts) -> Iterator[Modules]:
    """The parameters that a cast leaves in, or casts to, float32, with their modules."""
    for modules in facts.model.below():
        for parameter in modules.module.parameters:
            if "float" in parameter.dtype and parameter.cast(dtype) != dtype:
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
        hint = did_you_mean(value, words) if isinstance(value, str) else None
        program.sink.error("PL012", message, item.value.origin, help=hint)
    return None
