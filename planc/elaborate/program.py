"""Combines the files of a plan: extended files first, overrides applied, `when`s decided."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from planc.diagnostics.diagnostic import Label, Sink, did_you_mean, one_of
from planc.diagnostics.source import Source, Span
from planc.elaborate.call_arguments import names_class
from planc.elaborate.evaluate import describe, truth
from planc.elaborate.rule_conflicts import nothing_to_override
from planc.elaborate.scope import Definition, Failed, Scope
from planc.elaborate.sections.tensor_styles import STYLES
from planc.elaborate.settings import SETTINGS
from planc.ir.mesh_axes import ENGINE_SIZES
from planc.ir.nodes import Mesh
from planc.model.facts import Facts
from planc.model.roles import LACKS
from planc.sections import is_sized
from planc.syntax import ast

T = TypeVar("T")


@dataclass(slots=True)
class Program:
    """The content of the files, with one meaning for each name.

    Args:
        header: of the file that extends the others.
        sections: in order, without overridden ones and branches that are not taken.
        settings, styles: axes given by `--set`, and the plan's own styles, by name.
        sizes: those in the heads of sections that `--set` gives, by name.
        mesh: sized the first time an axis is looked up.
        roles_used: where an extended plan first uses a role that no let defines, by its name.
        schedule_files: the texts of schedule files, by the place of the call that names each.
        broken: sections with errors.
    """

    facts: Facts
    sink: Sink
    world_size: int | None
    scope: Scope
    header: ast.Header | None = None
    sections: list[ast.Section] = field(default_factory=list)
    requires: list[ast.Require] = field(default_factory=list)
    settings: dict[str, ast.Literal] = field(default_factory=dict)
    sizes: dict[str, ast.Literal] = field(default_factory=dict)
    styles: dict[str, ast.Style] = field(default_factory=dict)
    mesh: Mesh | None = None
    sized: bool = False
    roles_used: dict[str, Span] = field(default_factory=dict)
    schedule_files: dict[Span, str] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def sections_named(self, name: str) -> Iterator[ast.Section]:
        return (s for s in self.sections if s.name == name)

    def part(self, name: str, read: Callable[[], T]) -> T:
        """Reads a section; `broken` gets its name if this reports errors."""
        before, result = self.sink.errors, read()
        if self.sink.errors > before:
            self.broken.add(name)
        return result


def gather(
    files: Sequence[ast.File], program: Program, settings: Iterable[str], known: Iterable[str]
) -> None:
    """Fills a program from its files, extended first, and `--set`; `known` has all sections."""
    given = dict(_setting(text, program.sink) for text in settings)
    given.pop("", None)
    statements = [s for file in files for s in file.statements]
    program.schedule_files.update(pair for file in files for pair in file.schedule_files)
    _define_settings(files, program, given)
    program.roles_used = _roles_used(files)
    # names first, so that a condition may use what stands below it or in a plan that extends
    for statement in statements:
        if not _is_ordered(statement):
            _add(statement, program, given)
    program.scope.axis_names = axis_names(program)
    program.settings = {n: v for n, v in given.items() if n in program.scope.axis_names}
    for statement in statements:
        if _is_ordered(statement):
            _add(statement, program, given)
    if any(is_sized(section.name) for section in program.sections):
        sizes = {*ENGINE_SIZES} - {*program.scope.axis_names, *program.scope.definitions}
        program.sizes = {n: v for n, v in given.items() if n in sizes}
    _unknown_settings(given, program)
    _report_unused(files, program)
    _unknown_sections(program, tuple(known))


def _is_ordered(statement: ast.Statement) -> bool:
    """Whether it decides something about modules, so that a later rule can override it."""
    if isinstance(statement, ast.Section):
        return statement.name != "mesh"
    return isinstance(statement, ast.When)


def _setting(text: str, sink: Sink) -> tuple[str, ast.Literal]:
    """`tp=8` as a name and a literal; a value that is no number, boolean or null is a string."""
    source = Source(f"--set {text}", text, argument=True)
    name, equal, value = (part.strip() for part in text.partition("="))
    origin = source.span(0, len(text))
    nothing = ast.Literal(origin=origin, value=None)
    if not equal or not re.fullmatch(r"[A-Za-z_]\w*", name):
        sink.error("PL106", f"`--set {text}` is not of the form name=value", origin)
        return "", nothing
    words: dict[str, bool | None] = {"true": True, "false": False, "null": None}
    literal: int | float | str | bool | None = value
    if value.lower() in words:
        literal = words[value.lower()]
    elif re.fullmatch(r"\d{1,9}(\.\d{1,9})?[KMGT](iB)?", value):
        literal = ast.number_of(value)
    elif re.fullmatch(r"[+-]?\d{1,18}", value):
        literal = int(value)
    elif re.fullmatch(r"[+-]?\d+\.\d*([eE][+-]?\d{1,3})?", value):
        literal = float(value)
    elif len(value) > 1 and value[0] == value[-1] == '"':
        literal = value[1:-1]
    return name, ast.Literal(origin=source.span(text.index("=") + 1, len(text)), value=literal)


def _add(statement: ast.Statement, program: Program, given: dict[str, ast.Literal]) -> None:
    match statement:
        case ast.Header():
            program.header = statement
        case ast.Option() | ast.Let():
            _define(statement, program, given)
        case ast.Require():
            program.requires.append(statement)
        case ast.Section():
            _section(statement, program)
        case ast.Style():
            _style(statement, program)
        case ast.When():
            _branch(statement, program, given)
        case ast.Extend() | ast.Language():
            pass  # the files it names are in the list already; the parser reports a version


def _style(statement: ast.Style, program: Program) -> None:
    """A name for a class, which is not imported here: reading a plan runs no code."""
    name, known = statement.name, program.styles.get(statement.name)
    if name in STYLES or known:
        program.sink.error(
            "PL170",
            f"there is a style `{name}` already",
            statement.name_origin,
            *([known.name_origin] if known else []),
            help="choose another name",
        )
    elif not names_class(statement.path):
        message = f'"{statement.path}" names no class'
        help = f'write `style {name} = python "package.module:Class"`'
        program.sink.error("PL171", message, statement.origin, help=help)
    else:
        program.styles[name] = statement


def _first_declarations(files: Sequence[ast.File]) -> dict[str, int]:
    """The number of the first file that declares each option and let, without `override`."""
    numbers: dict[str, int] = {}
    for i, file in enumerate(files):
        for name in file.declared_names:
            numbers.setdefault(name, i)
    return numbers


def _roles_used(files: Sequence[ast.File]) -> dict[str, Span]:
    """The first use of each role in a file before the one with a let of that name."""
    declared = _first_declarations(files)
    uses: dict[str, Span] = {}
    for i, file in enumerate(files):
        for role in LACKS:
            if role in file.first_mentions and declared.get(role, len(files)) > i:
                uses.setdefault(role, file.first_mentions[role])
    return uses


def _define_settings(
    files: Sequence[ast.File], program: Program, given: dict[str, ast.Literal]
) -> None:
    """Defines the settings that a file uses before one declares an option of that name."""
    declared = _first_declarations(files)
    for setting in SETTINGS.values():
        for i, file in enumerate(files):
            if setting.axis or declared.get(setting.word, i + 1) <= i:
                break
            origin = file.first_mentions.get(setting.word)
            if origin is None:
                continue
            default = ast.Literal(origin=origin, value=setting.default)
            value = _set_value(setting.word, default, program, given)
            program.scope.define(
                Definition(
                    name=setting.word, kind="option", value=default, origin=origin, given=value
                )
            )
            break


def _define(
    statement: ast.Option | ast.Let, program: Program, given: dict[str, ast.Literal]
) -> None:
    kind = "option" if isinstance(statement, ast.Option) else "let"
    name = statement.name
    setting = SETTINGS.get(name)
    if kind == "option" and statement.override and setting and setting.axis:
        _size_axis(statement, name, program)
        return
    earlier = program.scope.definitions.get(name)
    used = program.roles_used.get(name) if kind == "let" else None
    if used and not earlier and not statement.override:
        program.sink.error(
            "PL107",
            f"`{name}` is a role that an extended plan uses",
            Label(span=statement.name_origin, text="defined here"),
            Label(span=used, text="used here"),
            help=f"write `override let {name} = ...` to replace it there too, or another name",
        )
        return
    if earlier and not (statement.override and earlier.kind == kind):
        program.sink.error(
            "PL107",
            f"`{statement.name}` is defined twice",
            Label(span=statement.name_origin, text="again here"),
            Label(span=earlier.origin, text="first here"),
            help=f"write `override {kind} {statement.name} = ...` to replace the earlier one",
        )
        return
    if statement.override and not (earlier or used):
        what = f"{kind} `{statement.name}`"
        nothing_to_override(program.sink, what, statement.name_origin)
    if kind == "option" and earlier and not _fits(name, statement.value, earlier.value, program):
        return
    value, origin = statement.value, statement.name_origin
    given_value = _set_value(name, value, program, given) if kind == "option" else None
    program.scope.define(
        Definition(name=statement.name, kind=kind, value=value, origin=origin, given=given_value)
    )


def _size_axis(statement: ast.Option | ast.Let, name: str, program: Program) -> None:
    """`override option pp = 4` sizes the axis, as `mesh { override pp = 4 }` does."""
    axis = ast.Setting(
        origin=statement.origin,
        name=name,
        name_origin=statement.name_origin,
        value=statement.value,
        override=True,
    )
    program.sections.append(
        ast.Section(
            origin=statement.origin,
            name="mesh",
            name_origin=statement.name_origin,
            axes=(),
            replicate=(),
            items=(axis,),
        )
    )


_KINDS = (bool, int | float, str)


def _set_value(
    name: str, default: ast.Expr, program: Program, given: dict[str, ast.Literal]
) -> ast.Literal | None:
    """The value of `--set` for an option, if it has the type of its default."""
    value = given.get(name)
    if value is None or _fits(name, value, default, program):
        return value
    del given[name]
    return None


def _fits(name: str, value: ast.Expr, default: ast.Expr, program: Program) -> bool:
    """Whether a value that is stated has the type of an option's default, and is one of a setting's
    values where these are few.
    """
    if not (isinstance(value, ast.Literal) and isinstance(default, ast.Literal)):
        return True
    setting = SETTINGS.get(name)
    few = (setting.default, *setting.others) if setting and setting.others else ()
    known = {(type(choice), choice) for choice in few}  # 1 is not true
    if (type(default.value), default.value) in known:
        fits = (type(value.value), value.value) in known
        help = f"give {one_of(map(describe, few))}"
    else:
        wanted = next((k for k in _KINDS if isinstance(default.value, k)), object)
        odd = isinstance(value.value, bool) and wanted is not bool
        fits = isinstance(value.value, wanted) and not odd
        help = "give a value of the same type"
    if fits or default.value is None:
        return True
    program.sink.error(
        "PL106",
        f"option `{name}` cannot be {describe(value.value)}",
        value.origin,
        Label(span=default.origin, text=f"its default is {describe(default.value)}"),
        help=help,
    )
    return False


def _section(section: ast.Section, program: Program) -> None:
    if section.override:
        axes = [a.path for a in section.axes]

        def is_replaced(other: ast.Section) -> bool:
            return other.name == section.name and (
                section.name != "tensor" or [a.path for a in other.axes] == axes
            )

        if not any(is_replaced(s) for s in program.sections):
            what = f"`{section.name}` section"
            nothing_to_override(program.sink, what, section.name_origin)
        if section.name == "mesh":
            optional = axis_names(program, optional=True)
            program.scope.replaced_axes = (*program.scope.replaced_axes, *optional)
        program.sections = [s for s in program.sections if not is_replaced(s)]
    if section.name == "mesh" and program.sized:
        message = "the mesh cannot depend on the size of one of its own axes"
        help = "decide it by an option or a config field"
        program.sink.error("PL309", message, section.name_origin, help=help)
        return
    program.sections.append(section)


def _branch(when: ast.When, program: Program, given: dict[str, ast.Literal]) -> None:
    condition = truth(when.condition, program.scope)
    if condition is None:
        return
    for statement in when.then if condition else when.otherwise:
        if isinstance(statement, ast.Let | ast.Require | ast.Section | ast.When):
            _add(statement, program, given)
        else:
            message = "this stands at the top of a file, not inside a `when`"
            program.sink.error("PL011", message, statement.origin)
    program.scope.axis_names = axis_names(program)


def axis_names(program: Program, *, optional: bool = False) -> tuple[str, ...]:
    """The axes that the mesh sections name, in taken branches or not; or the optional ones."""
    items = (item for s in program.sections_named("mesh") for item in ast.branches(s.items))
    axes = (i.name for i in items if isinstance(i, ast.Setting) and i.optional >= optional)
    return tuple(dict.fromkeys(axes))


def _unknown_settings(given: dict[str, ast.Literal], program: Program) -> None:
    options = [n for n, d in program.scope.definitions.items() if d.kind == "option"]
    known = [*options, *program.scope.axis_names, *program.sizes]
    for name, literal in given.items():
        if name in known:
            continue
        has = f"the plan has {one_of((f'`{k}`' for k in known), last='and')}" if known else None
        hint = did_you_mean(name, known, has)
        message = f"`--set {name}` names no option and no mesh axis of the plan"
        program.sink.error("PL106", message, literal.origin.source.span(0, len(name)), help=hint)


def _report_unused(files: Sequence[ast.File], program: Program) -> None:
    used = {name.partition(".")[0] for file in files for name in file.first_mentions}
    for name, definition in program.scope.definitions.items():
        if name not in used:
            message = f"{definition.kind} `{name}` is never used"
            program.sink.warning("PL104", message, definition.origin, help="use it or remove it")


_ITEMS = {
    "prefetch": "write `prefetch(forward = 2)` in the fsdp section",
    "ignore": "write `ignore model.norm` in the fsdp section",
    "frozen": "write `train {`, and in it `model.norm : frozen`",
}


def _unknown_sections(program: Program, known: tuple[str, ...]) -> None:
    for section in program.sections:
        if section.name in known:
            continue
        hint = did_you_mean(section.name, known, f"known are {one_of(known, last='and')}")
        hint = _ITEMS.get(section.name, hint)
        message = f"there is no section `{section.name}`"
        program.sink.error("PL011", message, section.name_origin, help=hint)


def require(program: Program) -> None:
    """Evaluates every `require`; a false one is PL110, with the values behind it."""
    scope = program.scope
    for statement in program.requires:
        if truth(statement.condition, scope) is not False:
            continue
        facts = []
        for path in dict.fromkeys(ast.mentioned_names(statement.condition)):
            value = scope.value(ast.Name(origin=statement.origin, path=path))
            head, _, rest = path.partition(".")
            source = f"  ({program.facts.source(rest)})" if head == "config" and rest else ""
            if not isinstance(value, Failed):
                facts.append(f"{path} = {describe(value)}{source}")
        program.sink.error("PL110", statement.message, statement.condition.origin, facts=facts)


def origin_of(program: Program) -> Span:
    """The place of a plan as a whole."""
    if program.header:
        return program.header.origin
    return program.sections[0].origin if program.sections else Source("", "").span(0, 0)
