"""`backend = megatron`: Megatron-FSDP instead of torch's FSDP, with the package's own option names.

Source: `megatron_fsdp.fully_shard_model` and `megatron_fsdp.MixedPrecisionPolicy`, version 0.6.1.
"""

from planc.diagnostic import one_of
from planc.ops.megatron_fsdp import OPTIONS, OUTER, STRATEGIES, MegatronShard
from planc.plan.call_arguments import Arguments, word
from planc.plan.rule_conflicts import SectionLine, Settings
from planc.plan.scope import Failed, Scope
from planc.plan.sections.fsdp_policies import DTYPES
from planc.syntax import ast

NAME = "megatron"
SETTINGS = ("backend", "strategy", "outer_strategy")
DTYPE_WORDS = ("main_params", "main_grads", "grad_comm")


def read(settings: Settings, section: str, scope: Scope) -> MegatronShard | None:
    """The settings of a section, or None for torch's FSDP or after a finding."""
    lines = {n: item for n, item in settings.lines.items() if n in (*SETTINGS, NAME)}
    chosen = _word(lines.get("backend"), ("torch", NAME), "torch", scope)
    if chosen != NAME:
        for name, item in lines.items():
            if name != "backend" and chosen == "torch":
                scope.sink.error(
                    "PL498",
                    f"`{name}` is a setting of Megatron-FSDP, and this section uses torch's FSDP",
                    item.origin,
                    help="write `backend = megatron` in the section, or remove this",
                )
        return None
    backend = lines["backend"]
    if section != "fsdp":
        message = f"Megatron-FSDP has no `{section}` section"
        help = "write an fsdp section with `strategy = no_shard`"
        scope.sink.error("PL498", message, backend.origin, help=help)
        return None
    dtypes, options = _directive(lines.get(NAME), scope)
    places = {"strategy": "strategy", "outer_strategy": "outer", NAME: "options"}
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
        origin=backend.origin,
        origins=tuple((field, lines[n].origin) for n, field in places.items() if n in lines),
    )


def _word(item: SectionLine | None, words: tuple[str, ...], default: str, scope: Scope) -> str:
    """A setting's word; the empty text after a finding."""
    if not isinstance(item, ast.Setting):
        return default
    value = word(item.value, scope)
    if isinstance(value, str) and value in words:
        return value
    if not isinstance(value, Failed):
        known = one_of(f"`{w}`" for w in words)
        scope.sink.error("PL012", f"`{item.name}` is {known}", item.value.origin)
    return ""


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
