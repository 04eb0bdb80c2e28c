"""The arguments of `qlora` -> how the weights of its layers are stored."""

from planc.diagnostics.source import Span
from planc.elaborate.call_arguments import Arguments
from planc.elaborate.sections.fsdp_policies import DTYPES
from planc.ops.compressed_weights import CompressedWeights
from planc.sections.quantization.ops import NUMBERS, Quantize

_DTYPES = {word: name for word, name in DTYPES.items() if name != "float64"}


def read_compression(arguments: Arguments, origin: Span) -> CompressedWeights:
    """The operation, still without its layers."""
    return Quantize(
        members=(),
        kind=arguments.word("quant", {name: name for name in NUMBERS}, "nf4"),
        storage=arguments.word("storage", _DTYPES, ""),
        compute=arguments.word("compute", _DTYPES, None),
        double=arguments.truth("double", False),
        block=arguments.integer("block", 64),
        origin=origin,
    )
