"""The serve section -> the ranks and the layers of an engine."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planc.diagnostics.diagnostic import did_you_mean, one_of
from planc.elaborate.call_arguments import Arguments, unknown, word
from planc.elaborate.evaluate import is_integer
from planc.elaborate.program import Program
from planc.elaborate.rule_conflicts import expand_conditions
from planc.elaborate.selectors import expand_braces
from planc.ir.mesh_axes import ENGINE_SIZES
from planc.ir.serving import FUSED, LAYERS, STACKS, ServeRule, Serving
from planc.ops.phrases import SHORT
from planc.syntax import ast

_ENGINES = {"vllm": False, "sglang": True, "transformers": False}
"""The engines, and whether a padded vocabulary grows until the ranks divide it."""
_DTYPES = {SHORT[name]: name for name in ("bfloat16", "float16", "float32")}
_NAMED = {"replicate": ("dtype",)}
_PATH = re.compile(r"[\w.]*(\{[\w.,]*\}[\w.]*)*")


def read(program: Program) -> tuple[Serving, ...]:
    """The engine that all serve sections together describe; later sizes replace earlier ones."""
    serving: Serving | None = None
    for section in program.sections_named("serve"):
        engine = section.engine
        if engine is None:
            help = "write `serve vllm on tp = 4 {}`"
            program.sink.error(
                "PL011", "a serve section names its engine", section.name_origin, help=help
            )
            return ()
        if engine.name not in _ENGINES:
            unknown(engine, tuple(_ENGINES), "serving engine", program.scope)
            return ()
        if serving is None:
            serving = Serving(
                modules=program.facts.model,
                engine=engine.name,
                version="",
                rows_by_ranks=_ENGINES[engine.name],
                origin=section.name_origin,
            )
        elif serving.engine != engine.name:
            message = f"a plan serves with one engine, not with {serving.engine} and {engine.name}"
            program.sink.error("PL011", message, engine.origin, serving.origin)
            return ()
        serving = _with_sizes(serving, section, program)
        serving = replace(serving, rules=(*serving.rules, *_rules(section, program)))
    return (_with_settings(serving, program),) if serving else ()


def _with_sizes(serving: Serving, section: ast.Section, program: Program) -> Serving:
    assert section.engine is not None
    arguments = Arguments(section.engine, program.scope, ("version",))
    version = arguments.read("version", serving.version, "a text", lambda v: isinstance(v, str))
    arguments.done()
    serving = replace(serving, version=version)
    for size in section.sizes:
        serving = _set_size(serving, size, program)
    return serving


def _with_settings(serving: Serving, program: Program) -> Serving:
    """The sizes that `--set` gives."""
    for name, literal in program.sizes.items():
        value: ast.Expr = literal
        if isinstance(literal.value, str):
            value = ast.Name(origin=literal.origin, path=literal.value)
        setting = ast.Setting(
            origin=literal.origin, name=name, name_origin=literal.origin, value=value
        )
        serving = _set_size(serving, setting, program)
    return serving


def _set_size(serving: Serving, size: ast.Setting, program: Program) -> Serving:
    sizes = {**serving.sizes, size.name: size.origin}
    value = word(size.value, program.scope)
    *counts, kind = ENGINE_SIZES
    if size.name == kind and isinstance(value, str) and value in _DTYPES:
        return replace(serving, dtype=_DTYPES[value], sizes=sizes)
    if size.name in counts and is_integer(value) and value > 0:
        numbers: dict[str, Any] = {size.name: value}
        return replace(serving, **numbers, sizes=sizes)
    wanted = "bf16, fp16 or fp32" if size.name == kind else "a positive integer"
    if size.name not in ENGINE_SIZES:
        known = one_of(ENGINE_SIZES, last="and")
        message = f"an engine has no size `{size.name}`; it has {known}"
        program.sink.error("PL011", message, size.name_origin)
    else:
        message = f"`{size.name}` is {wanted}, not {size.value.origin.text}"
        names = _DTYPES if size.name == kind else ()
        help = did_you_mean(size.value.origin.text, names)
        program.sink.error("PL012", message, size.value.origin, help=help)
    return serving


def _rules(section: ast.Section, program: Program) -> Iterator[ServeRule]:
    for item in expand_conditions(section.items, program.scope):
        if not isinstance(item, ast.Rule) or not isinstance(item.target, ast.Selector):
            message = "a serve section contains layers: `self_attn.o_proj : row`, one a line"
            program.sink.error("PL011", message, item.origin)
            continue
        call = item.action
        if call.name not in LAYERS:
            unknown(call, LAYERS, "layer of an engine", program.scope)
            continue
        ends = [end for one in item.target.parts or (item.target,) for end in _ends(one, program)]
        named = ("transposed",) if call.name in STACKS else _NAMED.get(call.name, ())
        arguments = Arguments(call, program.scope, named)
        transposed = "transposed" in named and arguments.truth("transposed", default=False)
        dtype = arguments.word("dtype", _DTYPES, None) if "dtype" in named else None
        given = arguments.positional
        arguments.done(positional=len(given))
        parts = [a.value.path for a in given if isinstance(a.value, ast.Name)]
        if not arguments.ok or not _takes(call, len(given), len(parts), program):
            continue
        yield ServeRule(
            ends=tuple(ends),
            kind=call.name,
            parts=tuple(parts),
            transposed=transposed,
            dtype=dtype,
            optional=item.optional,
            override=item.override,
            origin=item.origin,
        )


def _takes(call: ast.Call, arguments: int, names: int, program: Program) -> bool:
    """Whether a layer has the names of layers of the files that it needs; PL012 else."""
    wrong = "takes no argument" if arguments else ""
    if call.name in FUSED:
        none_needed = call.name in ("qkv", "merged") and not arguments
        named = names == arguments > 0 or none_needed
        wrong = "" if named else "names the layers of the files that it fuses"
        if call.name == "qkv" and named and names not in (0, 3):
            wrong = "names the layers of queries, keys and values, in this order"
    elif call.name in STACKS or call.name == "renames":
        wrong = "" if names == arguments == 1 else "names one layer of the files"
    if wrong:
        message = f"`{call.name}` {wrong}"
        program.sink.error("PL012", message, call.origin, help=_form(call))
    return not wrong


def _form(call: ast.Call) -> str:
    """The help for the arguments of a layer."""
    examples = {
        "qkv": "q_proj, k_proj, v_proj",
        "renames": "self_attn",
        "experts_row": "down_proj",
        **dict.fromkeys(("experts_merged", "experts_column"), "gate_up_proj"),
        **dict.fromkeys(("merged", "whole", "experts"), "gate_proj, up_proj"),
    }
    if call.name not in examples:
        return f"write `{call.name}`"
    return f"write `{call.name}({examples[call.name]})`, with the names of the files"


def _ends(selector: ast.Selector, program: Program) -> list[str]:
    """The ends of names that a selector has, with braces expanded."""
    if not _PATH.fullmatch(selector.path) or selector.cls or selector.has:
        message = "a layer of an engine is named by the end of its name, with braces at most"
        help = "write `self_attn.o_proj : row`, or `mlp.{gate,up}_proj : column`"
        program.sink.error("PL012", message, selector.origin, help=help)
        return []
    return [*expand_braces(selector.path)]
