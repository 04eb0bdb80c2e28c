"""Sections of settings whose values are words."""

from collections.abc import Mapping

from planc.diagnostic import did_you_mean, one_of
from planc.plan.call_arguments import word
from planc.plan.evaluate import describe
from planc.plan.program import Program
from planc.plan.rule_conflicts import Settings, flatten
from planc.plan.scope import Failed
from planc.syntax import ast

Words = Mapping[str, Mapping[str, str]]
"""The values of each setting, by the words that a plan writes."""


def word_settings(
    section: ast.Section, words: Words, settings: Settings, program: Program, example: str
) -> None:
    """Adds the settings (of `words`) of a section; reports PL011, PL012 and PL105."""
    for placed in flatten(section, program.scope):
        item = placed.item
        if not isinstance(item, ast.Setting) or placed.nested:
            program.sink.error(
                "PL011",
                f"this has no place in a `{section.name}` section",
                item.origin,
                help=f"it holds settings: `{example}`",
            )
        elif item.name not in words:
            hint = did_you_mean(item.name, words, f"there is {one_of(words, last='and')}")
            message = f"there is no setting `{item.name}`"
            program.sink.error("PL105", message, item.name_origin, help=hint)
        else:
            settings.add(item, lambda item: _value(item, words[item.name], program))


def _value(item: ast.Setting, words: Mapping[str, str], program: Program) -> str | None:
    value = word(item.value, program.scope)
    if isinstance(value, str) and value in words:
        return words[value]
    if not isinstance(value, Failed):
        shown = f"`{value}`" if isinstance(value, str) else describe(value)
        wanted = one_of(f"`{w}`" for w in words)
        message = f"`{item.name}` is {wanted}, not {shown}"
        hint = did_you_mean(value, words) if isinstance(value, str) else None
        program.sink.error("PL012", message, item.value.origin, help=hint)
    return None
