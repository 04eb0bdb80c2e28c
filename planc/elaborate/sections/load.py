"""The load section -> where weights start, how they are loaded, and their dtype."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from planc.elaborate.call_arguments import Arguments
from planc.elaborate.evaluate import is_integer
from planc.elaborate.program import Program
from planc.elaborate.rule_conflicts import SectionLine, Settings
from planc.elaborate.sections.fsdp_policies import DTYPES
from planc.elaborate.sections.tensor import no_axes
from planc.elaborate.sections.word_settings import one_word, read_settings
from planc.model.facts import Facts, Modules
from planc.ops.load import Load
from planc.syntax import ast

WORDS: dict[str, dict[str, str]] = {
    "init": {"meta": "meta"},
    "weights": {"slices": "slices", "rank0": "rank0", "checkpoint": "checkpoint"},
    "dtype": DTYPES,
    "dequantize": {"fp8": "fp8", "mxfp4": "mxfp4"},
    "islands": {"model": "model", "none": "none"},
}
_BLOCK = (128, 128)
"""The block of DeepSeek-V3, and the default of transformers' `FineGrainedFP8Config`."""
_FIELDS = {"init": "meta", "islands": "fp32"}
"""The fields of the operation whose names differ from those of their settings."""


def load(program: Program) -> Load | None:
    """The settings of the load sections, or None where there are none."""
    settings = Settings(program.sink)
    for section in program.sections_named("load"):
        no_axes(section, program)
        read = partial(_read, program=program)
        read_settings(section, WORDS, settings, program, "weights = slices", read=read)
    values, lines = settings.values, settings.lines
    if not any(values.values()):
        return None
    dtype, (stored, block) = values.get("dtype"), values.get("dequantize") or (None, ())
    if "islands" in values and dtype is None:
        message = "`islands` names what a cast leaves in fp32, and nothing is cast"
        help = "set the dtype of the parameters, such as `dtype = bf16`, or remove this"
        program.sink.error("PL690", message, lines["islands"].origin, help=help)
    origin = next(lines[name].origin for name, value in values.items() if value)
    others = ((name, line.origin) for name, line in lines.items() if line.origin is not origin)
    cast = dtype if values.get("islands") != "none" else None
    rule = Load(
        meta=values.get("init") == "meta",
        weights=values.get("weights"),
        dtype=dtype,
        dequantize=stored,
        block=_block(stored, block, lines["dequantize"], program) if stored else (),
        fp32=tuple(_islands(cast, program.facts)) if cast else (),
        origin=origin,
        origins=tuple((_FIELDS.get(name, name), origin) for name, origin in others),
    )
    program.scope.kept = rule.dtype_after_load
    return rule


def _read(item: ast.Setting, program: Program) -> Any:
    """The value of a setting; of `dequantize` its word, and the block that `fp8` states."""
    call, sized = item.value, item.name == "dequantize"
    if not sized or not isinstance(call, ast.Call) or call.name != "fp8":
        word = one_word(item, WORDS[item.name], program.scope)
        return (word, ()) if word and sized else word
    arguments = Arguments(call, program.scope, ("block",))
    wanted = "a size, or the rows and the columns, `[128, 64]`"
    block = arguments.read("block", (), wanted, lambda value: bool(_sizes(value)))
    return ("fp8", _sizes(block)) if arguments.done() else None


def _sizes(block: Any) -> tuple[int, ...]:
    """The rows and columns of a block, which may be one number; empty if it is neither."""
    given = (block, block) if is_integer(block) else block
    both = tuple(given) if isinstance(given, list | tuple) else ()
    return both if len(both) == 2 and all(is_integer(n) and n > 0 for n in both) else ()


def _block(
    method: str, block: tuple[int, ...], line: SectionLine, program: Program
) -> tuple[int, ...]:
    """The rows and columns that share a scale in fp8: those of the plan, or of the configuration,
    else 128 of each.
    """
    config = program.facts.config.get("quantization_config") or {}
    stored, size = config.get("quant_method"), tuple(config.get("weight_block_size") or ())
    if stored not in (None, method):
        message = f"`dequantize = {method}`, and the model's weights are stored as {stored}"
        fact = f"quantization_config.quant_method = {stored}"
        program.sink.error("PL691", message, line.origin, facts=[fact])
    elif block and size and block != size:
        message = "the model's weights have scales of other blocks"
        fact = f"quantization_config.weight_block_size = {[*size]}"
        program.sink.error("PL691", message, line.origin, facts=[fact])
    return (block or tuple(map(int, size)) or _BLOCK) if method == "fp8" else ()


def _islands(dtype: str, facts: Facts) -> Iterator[Modules]:
    """The parameters that a cast leaves in, or casts to, float32, with their modules."""
    for modules in facts.model.below():
        for parameter in modules.module.parameters:
            if "float" in parameter.dtype and parameter.cast(dtype) != dtype:
                yield Modules((*modules.path, parameter.name), modules.module)
