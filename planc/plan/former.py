"""Names that settings and roles had before: they still work, and a warning names the new word."""

from collections.abc import Sequence

from planc.model.roles import LACKS
from planc.plan.scope import Scope
from planc.plan.settings import FORMER, SETTINGS, PlanSetting
from planc.source import Span
from planc.syntax import ast

_ROLES = {"block": "blocks"}
"""Roles by the names that shipped plans had for them."""


def declared(files: Sequence[ast.File]) -> dict[str, int]:
    """The names of options and lets that replace no other, and the first file that has each."""
    found: dict[str, int] = {}
    for i, file in enumerate(files):
        for name in file.declared:
            found.setdefault(name, i)
    return found


def apply(files: Sequence[ast.File], scope: Scope, given: dict[str, ast.Literal]) -> None:
    """Has former names stand for today's in a plan that does not declare them itself.

    A plan that does has an option of its own, which `--set` sizes by either name.

    Args:
        scope: receives the aliases, and a PL113 for each.
        given: values of `--set`, by name; renamed to what this plan has.
    """
    own = declared(files)
    words = {name: setting.word for name, setting in FORMER.items()}
    for name, word in (words | _ROLES).items():
        if name in own:
            if word in given and word not in own:
                given[name] = given.pop(word)
            continue
        scope.aliases[name] = word
        origin = _first(name, files)
        if name in given and name in words:
            value = given.pop(name)
            origin = value.origin.source.span(0, len(name))
            given.setdefault(word, value)
        if origin is not None:
            what = "role" if name in _ROLES else "setting"
            message = f"`{name}` is the former name of the {what} `{word}`"
            scope.sink.warning("PL113", message, origin, help=f"write `{word}`")


def current(name: str, files: Sequence[ast.File]) -> str:
    """Today's name of what `--set` names in a plan."""
    return FORMER[name].word if name in FORMER and name not in declared(files) else name


def uses(setting: PlanSetting, files: Sequence[ast.File]) -> bool:
    """Whether a plan refers to a setting, by either name, or declares it."""
    names = {setting.word, setting.former} - {""}
    return any(names & file.mentioned.keys() for file in files)


def _first(name: str, files: Sequence[ast.File]) -> Span | None:
    """Where a plan first writes a name: it refers to it, or replaces an option or a let."""
    for file in files:
        if name in file.mentioned:
            return file.mentioned[name]
        for node in file.statements:
            if isinstance(node, ast.Option | ast.Let) and node.name == name:
                return node.name_origin
    return None


def roles_used(files: Sequence[ast.File]) -> dict[str, Span]:
    """The first use of each role in a file before the one with a let of that name."""
    own, found = declared(files), dict[str, Span]()
    for i, file in enumerate(files):
        for word in LACKS:
            if word in file.mentioned and own.get(word, len(files)) > i:
                found.setdefault(word, file.mentioned[word])
    return found


assert not (FORMER.keys() | _ROLES.keys()) & (SETTINGS.keys() | LACKS.keys())
