"""Tensor sections -> styles on modules."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from planc.diagnostics import diagnostic
from planc.diagnostics.diagnostic import Label, did_you_mean
from planc.elaborate.call_arguments import unknown, word, wrong_value
from planc.elaborate.program import Program
from planc.elaborate.rule_conflicts import Claims, Placed, Settings, flatten
from planc.elaborate.scope import Scope
from planc.elaborate.sections.tensor_styles import (
    STYLES,
    custom,
    equivalent,
    style_of,
    style_of_torch,
)
from planc.elaborate.sections.word_settings import IMAGES, ROWS, one_word
from planc.elaborate.selectors import select
from planc.ir.nodes import ImagesSetting, SequenceSetting, TensorRule
from planc.model.facts import Modules
from planc.ops.styles import SPLITS, Style
from planc.sections import SECTIONS, STATED
from planc.syntax import ast

_EXAMPLES = {
    "tensor": "model.layers.* : colwise",
    "expert": "model.layers.*.mlp.experts : dispatch(all_to_all)",
    "optimizer": "model.layers.*.mlp.*_proj : muon",
    "adapters": "model.layers.*.self_attn.q_proj : lora(rank = 16)",
    **{name: SECTIONS[name].example for name in STATED},
}
_SETTINGS = {
    "tensor": ", and the settings `sequence`, `layouts` and `images`",
    "adapters": ", and the settings `units` and `seed`",
}
T = TypeVar("T")

_ASPECTS = ("input", "output", "attributes")


def aspect(style: str) -> str:
    """The part of a module that a style decides: a module can have one style a part for an axis."""
    return style if style in _ASPECTS else "style"


_SEQUENCE = {"auto": None, "true": True, "false": False}

Found = tuple[tuple[TensorRule, ...], tuple[SequenceSetting, ...], tuple[ImagesSetting, ...]]


def tensor(program: Program) -> Found:
    """The rules of the tensor sections, in the plan's order, and their settings."""
    scope = program.scope
    claims: dict[str, Claims[TensorRule | None]] = {}
    settings: dict[str, Settings] = {}
    known, used = (*STYLES, *program.styles), set[str]()
    for section in program.sections_named("tensor"):
        axis = _axis(section, program)

        def setting(item: ast.Setting, axis: str | None = axis) -> bool:
            read = _SETTING.get(item.name)
            if read is not None:
                held = settings.setdefault(axis or "", Settings(program.sink))
                held.add(item, lambda item: read(item, axis or "", scope))
            return read is not None

        found_rules = rules_of(
            section, known, "style", program, elsewhere=_elsewhere, setting=setting
        )
        for rule, placed in found_rules:
            used.add(rule.action.name)
            modules = modules_of(rule, placed, scope)
            if axis and modules:
                held = claims.setdefault(axis, Claims(program.sink))
                _claim(rule, modules, axis, held, program)
    for unused in program.styles.keys() - used:
        origin = program.styles[unused].name_origin
        hint = "use it or remove it"
        program.sink.warning("PL104", f"style `{unused}` is never used", origin, help=hint)
    for lines in settings.values():
        _both(lines, program)
    rules = (rule for held in claims.values() for rule in held.rules())
    stated = {axis for axis, lines in settings.items() if _STATED in lines.lines}
    rules = (replace(r, open=r.open and r.axis not in stated) for r in rules)
    values = [value for s in settings.values() for value in s.values.values()]
    sequence = tuple(value for value in values if isinstance(value, SequenceSetting))
    return tuple(rules), sequence, tuple(v for v in values if isinstance(v, ImagesSetting))


def _sequence(item: ast.Setting, axis: str, scope: Scope) -> SequenceSetting:
    """`sequence = auto`, `true` or `false`."""
    value = word(item.value, scope)
    if isinstance(value, bool):
        value = str(value).lower()
    if not isinstance(value, str) or value not in _SEQUENCE:
        hint = did_you_mean(value, _SEQUENCE) if isinstance(value, str) else None
        wanted = "`auto`, `true` or `false`"
        wrong_value(item.value, "sequence", wanted, value, scope, hint=hint)
        value = "false"
    return SequenceSetting(axis=axis, wanted=_SEQUENCE[value], origin=item.origin)


def _images(item: ast.Setting, axis: str, scope: Scope) -> ImagesSetting:
    """`images = rows` or `whole`."""
    divided = one_word(item, IMAGES, scope) == ROWS
    return ImagesSetting(axis=axis, divided=divided, origin=item.origin)


def _layouts(item: ast.Setting, axis: str, scope: Scope) -> bool | None:
    """Whether the line is `layouts = stated`; None after PL012."""
    value = word(item.value, scope)
    if value == _WORD:
        return True
    hint: str | None = "without the line layouts are inferred"
    if isinstance(value, str):
        hint = did_you_mean(value, [_WORD], hint)
    wrong_value(item.value, _STATED, f"`{_WORD}`", value, scope, hint=hint)
    return None


def _both(held: Settings, program: Program) -> None:
    """Reports a section that says of its layouts that they are stated, and that they are not."""
    if held.values.get(_STATED) and "sequence" in held.lines:
        stated, sequence = (held.lines[name].origin for name in (_STATED, "sequence"))
        program.sink.error(
            "PL102",
            "two lines decide whether layouts are inferred",
            Label(span=stated, text="they are stated"),
            Label(span=sequence, text="they are inferred"),
            help="remove one; `override tensor on AXIS {` replaces the section of another plan",
        )


_STATED, _WORD = "layouts", "stated"
_SETTING: dict[
    str, Callable[[ast.Setting, str, Scope], SequenceSetting | ImagesSetting | bool | None]
] = {
    "sequence": _sequence,
    _STATED: _layouts,
    "images": _images,
}


def _open(style: Style, call: ast.Call) -> bool:
    """Whether a line says how weights are split, and leaves layouts to inference: an arrow may say
    that the output is needed whole.
    """
    if not isinstance(style, SPLITS):
        return False
    arrows = [a.value for a in call.arguments if a.name is None]
    local = any(a.name == "local" for a in call.arguments)
    return not local and all(
        isinstance(a, ast.Arrow)
        and a.source is None
        and isinstance(a.target, ast.Name)
        and a.target.path == "replicate"
        for a in arrows
    )


def _elsewhere(call: ast.Call) -> str | None:
    return equivalent(call.name) or style_of_torch(call)


def _claim(
    rule: ast.Rule,
    selected: tuple[Modules, ...],
    axis: str,
    claims: Claims[TensorRule | None],
    program: Program,
) -> None:
    """Claims modules by kind: a bare rowwise on an embedding takes replicated token ids; and by the
    integers of their parents, where the rule names one.
    """
    groups: dict[tuple[object, ...], tuple[str, Scope, list[Modules]]] = {}
    for modules, scope in _scopes(rule, selected, program):
        kind = modules.module.kind
        style_kind = kind if kind in ("embedding", "conv1d") else "other"
        key = style_kind, scope.parent and scope.parent.facts
        groups.setdefault(key, (style_kind, scope, []))[2].append(modules)
    for i, (kind, scope, group) in enumerate(groups.values()):
        style: Style | None
        if own_style := program.styles.get(rule.action.name):
            style = custom(rule.action, own_style.path, scope)
        else:
            style = style_of(rule.action, scope, kind=kind)
        if style is None:
            return
        override = rule.override and i == 0
        value = TensorRule(
            modules=group[0],
            axis=axis,
            style=style,
            written=rule.action.origin,
            open=_open(style, rule.action),
            origin=rule.origin,
        )
        claims.add(group, aspect(rule.action.name), value, rule.origin, override=override)


def _scopes(
    rule: ast.Rule, selected: tuple[Modules, ...], program: Program
) -> Iterator[tuple[Modules, Scope]]:
    """The modules of a rule with the scope of its arguments, which may name integers of the parent
    module: parents that differ have separate ones.
    """
    names = (node for node in ast.walk(rule.action) if isinstance(node, ast.Name))
    if not any(name.path.startswith("parent.") for name in names):
        yield from ((modules, program.scope) for modules in selected)
        return
    for modules in selected:
        for parent in program.facts.parents(modules):
            inner = Modules((*parent.path, modules.path[-1]), modules.module)
            yield inner, program.scope.child_scope(parent)


def rules_of(
    section: ast.Section,
    known: tuple[str, ...],
    what: str,
    program: Program,
    *,
    elsewhere: Callable[[ast.Call], str | None] = lambda _: None,
    setting: Callable[[ast.Setting], bool] = lambda _: False,
) -> Iterator[tuple[ast.Rule, Placed]]:
    """The rules of a section with one of its actions; anything else is PL011 or PL105, with the
    help for what other libraries have, if it is that. `setting` takes a setting of the section.
    """
    for placed in flatten(section, program.scope):
        rule = placed.item
        if isinstance(rule, ast.Setting) and not placed.nested and setting(rule):
            continue
        if not isinstance(rule, ast.Rule) or not isinstance(rule.target, ast.Selector):
            name = rule.name if isinstance(rule, ast.Setting) else ""
            item = f"`{name}`" if name else "this"
            message = f"{item} has no place in {_a(section)} section"
            usage = f"it holds rules: `{_EXAMPLES[section.name]}`{_SETTINGS.get(section.name, '')}"
            help = diagnostic.elsewhere(name) or usage
            program.sink.error("PL011", message, rule.origin, help=help)
        elif rule.action.name in known:
            yield rule, placed
        else:
            unknown(rule.action, known, what, program.scope, help=elsewhere(rule.action))


def _a(section: ast.Section) -> str:
    """The name of a section with its article."""
    return f"a{'n' * (section.name[0] in 'aeio')} `{section.name}`"


def read_claims(
    program: Program,
    name: str,
    known: tuple[str, ...],
    what: str,
    read: Callable[[ast.Rule], tuple[T] | None],
    *,
    aspect: str = "",
    setting: Callable[[ast.Setting], bool] = lambda _: False,
) -> Claims[T]:
    """The claims of all sections of a name, which work over no axis; arguments as of `rules_of`.

    Args:
        read: gives what a rule decides, or None after a finding.
        aspect: what rules decide, for messages; by default the name.
    """
    claims: Claims[T] = Claims(program.sink)
    for section in program.sections_named(name):
        no_axes(section, program)
        for rule, placed in rules_of(section, known, what, program, setting=setting):
            modules, value = modules_of(rule, placed, program.scope), read(rule)
            if value is not None:
                override = rule.override
                claims.add(modules, aspect or name, value[0], rule.origin, override=override)
    return claims


def modules_of(rule: ast.Rule, placed: Placed, scope: Scope) -> tuple[Modules, ...]:
    assert isinstance(rule.target, ast.Selector)
    return select(rule.target, placed.bases, scope, optional=rule.optional)


def _axis(section: ast.Section, program: Program) -> str | None:
    """The one axis of a tensor section."""
    if section.replicate or len(section.axes) != 1:
        message = "a tensor section works over one axis of the mesh"
        program.sink.error("PL305", message, section.name_origin, help="write `tensor on tp {`")
        return None
    return section.axes[0].path


def no_axes(section: ast.Section, program: Program) -> None:
    """Reports axes of a section that works over none."""
    if section.axes or section.replicate:
        program.sink.error(
            "PL305",
            f"{_a(section)} section works over no axis",
            (section.axes or section.replicate)[0].origin,
            help=f"write `{section.name} {{`",
        )
