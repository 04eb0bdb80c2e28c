"""`lora(...)` and `qlora(...)`: the arguments of an adapter."""

from planc.ops.lora import Adapt
from planc.ops.quantization import Quantize
from planc.plan.call_arguments import Arguments
from planc.plan.evaluate import number, size
from planc.plan.scope import Scope
from planc.plan.sections.fsdp_policies import DTYPES
from planc.source import Span
from planc.syntax import ast

INITS = ("default", "gaussian", "random")
KINDS = ("nf4", "fp4")
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""The sizes that `bitsandbytes.functional.quantize_4bit` takes."""

_ARGUMENTS = ("rank", "alpha", "dropout", "dtype", "init")
_QUANT = ("quant", "storage", "compute", "double", "block")
_DTYPES = {word: name for word, name in DTYPES.items() if name != "float64"}


Lora = tuple[Adapt, Quantize | None]
"""The operations of an adapter, without their modules."""


def lora(call: ast.Call, origin: Span, scope: Scope) -> Lora | None:
    """The arguments of `lora(...)` or `qlora(...)`, or None after PL012 or PL181."""
    four = call.name == "qlora"
    arguments = Arguments(call, scope, (*_ARGUMENTS, *_QUANT) if four else _ARGUMENTS)
    places = {a.name: a.value.origin for a in call.arguments}
    sizes = ("rank", "alpha", "dropout")
    rank, alpha, dropout = (arguments.read(n, None, "a number", number, size) for n in sizes)
    dtype = arguments.word("dtype", _DTYPES, None)
    init = arguments.word("init", {name: name for name in INITS}, "default")
    quant = _quantize(arguments, origin) if four else None
    if not arguments.done():
        return None
    if rank is None:
        example = f"write `{call.name}(rank = 16, alpha = 32)`"
        arguments.wrong(call, f"`{call.name}` needs a rank", example)
        return None
    before = scope.sink.errors
    if not isinstance(rank, int) or rank < 1:
        _range(scope, f"the rank of an adapter is a positive integer, not {rank}", places["rank"])
    if alpha is not None and alpha <= 0:
        _range(scope, f"`alpha` is a positive number, not {alpha}", places["alpha"])
    if dropout is not None and not 0 <= dropout < 1:
        text = f"`dropout` is a fraction of the inputs, from 0 to less than 1, not {dropout}"
        _range(scope, text, places["dropout"])
    if quant is not None and quant.block not in BLOCKS:
        text = f"a block is of {BLOCKS[0]} to {BLOCKS[-1]:,} weights, a power of 2"
        _range(scope, f"{text}, not {quant.block}", places["block"])
    if scope.sink.errors > before:
        return None
    assert isinstance(rank, int)
    op = Adapt(
        members=(),
        rank=rank,
        alpha=rank if alpha is None else alpha,
        dropout=dropout or 0.0,
        dtype=dtype,
        init=init,
        origin=origin,
    )
    return op, quant


def _quantize(arguments: Arguments, origin: Span) -> Quantize:
    return Quantize(
        members=(),
        kind=arguments.word("quant", {name: name for name in KINDS}, "nf4"),
        storage=arguments.word("storage", _DTYPES, ""),
        compute=arguments.word("compute", _DTYPES, None),
        double=arguments.truth("double", False),
        block=arguments.integer("block", 64),
        origin=origin,
    )


def _range(scope: Scope, message: str, origin: Span) -> None:
    scope.sink.error("PL181", message, origin)
