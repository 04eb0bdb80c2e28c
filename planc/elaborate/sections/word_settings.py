"""Sections of settings, such as those whose values are words."""

from collections.abc import Callable, Mapping

from planc.diagnostics.diagnostic import did_you_mean, elsewhere, one_of
from planc.elaborate.call_arguments import word, wrong_value
from planc.elaborate.program import Program
from planc.elaborate.rule_conflicts import Placed, Settings, flatten
from planc.elaborate.scope import Scope
from planc.syntax import ast

ROWS = "rows"
IMAGES = {ROWS: ROWS, "whole": "whole"}
"""The values of `images`, in tensor and in context sections."""


def read_settings(
    section: ast.Section,
    known: Mapping[str, object],
    settings: Settings,
    program: Program,
    example: str,
    *,
    read: Callable[[ast.Setting], object],
    rule: Callable[[ast.Rule, Placed], None] | None = None,
) -> None:
    """Adds the settings of a section, those that are `known`; reports PL011 and PL105. `rule` takes
    its rules, where it has some.
    """
    for placed in flatten(section, program.scope):
        item = placed.item
        if isinstance(item, ast.Rule) and rule is not None:
            rule(item, placed)
        elif not isinstance(item, ast.Setting) or placed.nested:
            program.sink.error(
                "PL011",
                f"this has no place in a `{section.name}` section",
                item.origin,
                help=f"it holds settings: `{example}`",
            )
        elif item.name not in known:
            there = f"there is {one_of(known, last='and')}"
            hint = elsewhere(item.name) or did_you_mean(item.name, known, there)
            message = f"there is no setting `{item.name}`"
            program.sink.error("PL105", message, item.name_origin, help=hint)
        else:
            settings.add(item, read)


def one_word(item: ast.Setting, words: Mapping[str, str], scope: Scope) -> str | None:
    """The value of a setting, by one of a few words; None after PL012."""
    call = item.value
    if isinstance(call, ast.Call) and call.name in words:
        help = f"write `{item.name} = {call.name}`"
        scope.sink.error("PL012", f"`{call.name}` takes no arguments here", call.origin, help=help)
        return None
    value = word(item.value, scope)
    if isinstance(value, str) and value in words:
        return words[value]
    hint = did_you_mean(value, words) if isinstance(value, str) else None
    wanted = one_of(f"`{w}`" for w in words)
    wrong_value(item.value, item.name, wanted, value, scope, hint=hint)
    return None
