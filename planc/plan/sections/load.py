"""The load section -> where weights start, how they are loaded, and their dtype."""

from collections.abc import Iterator, Mapping

from planc.model.facts import Facts, Modules
from planc.ops.load import Load
from planc.plan.program import Program
from planc.plan.rule_conflicts import SectionLine, Settings
from planc.plan.sections.fsdp_policies import DTYPES
from planc.plan.sections.tensor import no_axes
from planc.plan.sections.word_settings import word_settings

WORDS: dict[str, dict[str, str]] = {
    "init": {"meta": "meta"},
    "weights": {"slices": "slices", "rank0": "rank0", "checkpoint": "checkpoint"},
    "dtype": DTYPES,
    "dequantize": {"fp8": "fp8", "mxfp4": "mxfp4"},
    "islands": {"model": "model", "none": "none"},
}
_BLOCK = (128, 128)
"""Of DeepSeek-V3, and of transformers' `FineGrainedFP8Config` without another."""
_FIELDS = {"init": "meta", "islands": "fp32"}
"""The fields of the operation whose names differ from those of their settings."""


def load(program: Program) -> Load | None:
    """The settings of the load sections, or None where there are none."""
    settings = Settings(program.sink)
    for section in program.named("load"):
        no_axes(section, program)
        word_settings(section, WORDS, settings, program, "weights = slices")
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
        dequantize=values.get("dequantize"),
        block=_block(values.get("dequantize"), lines, program),
        fp32=tuple(_islands(cast, program.facts)) if cast else (),
        origin=origin,
        origins=tuple((_FIELDS.get(name, name), origin) for name, origin in others),
    )
    program.scope.kept = found.kept
    return found


def _block(
    dequantize: str | None, lines: Mapping[str, SectionLine], program: Program
) -> tuple[int, ...]:
    """The rows and columns that share a scale in fp8: the configuration's, else 128 of each."""
    stated = program.facts.config.get("quantization_config") or {}
    method = stated.get("quant_method")
    if dequantize and method not in (None, dequantize):
        message = f"`dequantize = {dequantize}`, and the model's weights are stored as {method}"
        fact = f"quantization_config.quant_method = {method}"
        program.sink.error("PL691", message, lines["dequantize"].origin, facts=[fact])
    block = stated.get("weight_block_size") or _BLOCK
    return tuple(map(int, block)) if dequantize == "fp8" else ()


def _islands(dtype: str, facts: Facts) -> Iterator[Modules]:
    """The parameters that a cast leaves in, or casts to, float32, with their modules."""
    for modules in facts.model.below():
        for parameter in modules.module.parameters:
            if "float" in parameter.dtype and parameter.cast(dtype) != dtype:
                yield Modules((*modules.path, parameter.name), modules.module)
