"""`backend = megatron`: Megatron-FSDP instead of torch's FSDP, with the package's own option names.

Source: `megatron_fsdp.fully_shard_model` and `megatron_fsdp.MixedPrecisionPolicy`, version 0.6.1.
"""

from collections.abc import Mapping

from planc.elaborate.call_arguments import Arguments
from planc.elaborate.rule_conflicts import SectionLine
from planc.elaborate.scope import Scope
from planc.elaborate.sections.fsdp_policies import DTYPES
from planc.elaborate.sections.word_settings import one_word
from planc.sections.megatron_fsdp.ops import OPTIONS, OUTER, STRATEGIES, MegatronShard
from planc.syntax import ast

DTYPE_WORDS = ("main_params", "main_grads", "grad_comm")


def read(lines: Mapping[str, SectionLine], section: str, scope: Scope) -> MegatronShard | None:
    """The operation without its units and axes, or None after a finding."""
    origin = lines["backend"].origin
    if section != "fsdp":
        message = f"Megatron-FSDP has no `{section}` section"
        help = "write an fsdp section with `strategy = no_shard`"
        scope.sink.error("PL498", message, origin, help=help)
        return None
    dtypes, options = _directive(lines.get("megatron"), scope)
    places = {"strategy": "strategy", "outer_strategy": "outer", "megatron": "options"}
    return MegatronShard(
        members=(),
        classes=(),
        shard=(),
        strategy=_word(lines.get("strategy"), STRATEGIES, STRATEGIES[-1], scope),
        outer=_word(lines.get("outer_strategy"), OUTER, OUTER[0], scope),
        main_params=dtypes.get("main_params", "float32"),
        main_grads=dtypes.get("main_grads"),
        grad_comm=dtypes.get("grad_comm"),
        options=options,
        origin=origin,
        origins=tuple((field, lines[n].origin) for n, field in places.items() if n in lines),
    )


def _word(item: SectionLine | None, words: tuple[str, ...], default: str, scope: Scope) -> str:
    """A setting's word; the empty text after a finding."""
    if not isinstance(item, ast.Setting):
        return default
    return one_word(item, {word: word for word in words}, scope) or ""


def _directive(
    item: SectionLine | None, scope: Scope
) -> tuple[dict[str, str | None], tuple[tuple[str, bool], ...]]:
    """`megatron(main_params = bf16, nccl_ub = true)`: dtypes, and options that are not defaults."""
    if not isinstance(item, ast.Directive):
        return {}, ()
    arguments = Arguments(item.call, scope, (*DTYPE_WORDS, *OPTIONS))
    if not item.call.arguments:
        arguments.wrong(item, "`megatron` has no arguments", "write `megatron(main_params = fp32)`")
    given = {a.name for a in item.call.arguments}
    known = {**DTYPES, "none": None}
    dtypes = {n: arguments.word(n, known, None) for n in DTYPE_WORDS if n in given}
    options = {n: arguments.truth(n, default) for n, default in OPTIONS.items()}
    arguments.done()
    return dtypes, tuple((n, v) for n, v in options.items() if v != OPTIONS[n])
