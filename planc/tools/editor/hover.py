"""The text that an editor shows of the place under the pointer, as Markdown."""

import tomllib
from functools import cache

from planc.diagnostics.explain import explain
from planc.diagnostics.source import Span
from planc.elaborate.evaluate import describe, evaluate
from planc.elaborate.scope import Failed
from planc.elaborate.settings import SETTINGS
from planc.files.resources import GRAMMARS
from planc.model.facts import Modules
from planc.ops import phrases
from planc.sections import FOLDER, STATED
from planc.syntax import ast
from planc.tools.editor.cursor import nodes_at
from planc.tools.editor.judge import Judged

_MOST = 12  # sets of modules that are listed


def hover(judged: Judged, offset: int) -> tuple[str, Span] | None:
    """The meaning of a place of a plan, and the place; None where nothing is known of it."""
    about = _about(judged, offset)
    text, place = about or ("", None)
    for finding in judged.findings:
        span = finding.labels[0].span
        if span.start <= offset <= span.end:
            lines = (explain(finding.code) or "").splitlines()
            page = "\n".join(f"**{ln.lstrip('# ')}**" if ln[:1] == "#" else ln for ln in lines)
            return f"{text}\n\n---\n\n{page}" if text else page, place or span
    return about


def _about(judged: Judged, offset: int) -> tuple[str, Span] | None:
    *around, node = nodes_at(judged.file, offset)
    while around and isinstance(around[-1], ast.Selector | ast.Header):
        if isinstance(around[-1], ast.Selector) and around[-1].parts:
            break
        node = around.pop()  # of what the modules must contain, and of families
    section = next((n.name for n in around if isinstance(n, ast.Section)), "")
    text, place = "", node.origin
    match node:
        case ast.Header():
            target, reason = judged.chosen.target, judged.chosen.reason
            text = f"Judged for `{target.text}`: {reason}." if target else f"Not judged: {reason}."
        case ast.Selector():
            blocks = [n.target for n in around if isinstance(n, ast.Block) and n.target != node]
            text = _modules(judged.select_modules(*blocks, node))
        case ast.Name():
            text = _name(node, judged) or _word(node.path, section)
        case ast.Call() if offset <= node.origin.start + len(node.name):
            text = _word(node.name, section)
        case ast.Section() if offset <= node.name_origin.end:
            text, place = meanings(node.name).get("about", ""), node.name_origin
        case ast.Option() | ast.Let() | ast.Setting() if offset <= node.name_origin.end:
            place = node.name_origin
            texts = _name(ast.Name(origin=place, path=node.name), judged), _word(node.name, section)
            text = "\n\n".join(filter(None, texts))
    return (text, place) if text else None


def _modules(module_sets: tuple[Modules, ...]) -> str:
    """The number of modules, their classes, and the shapes of their parameters."""
    count = sum(len(modules) for modules in module_sets)
    lines = [f"{count:,} module{'' if count == 1 else 's'}\n"] if module_sets else []
    lines += [f"- `{modules}`: {module_text(modules)}" for modules in module_sets[:_MOST]]
    return "\n".join(lines + ["- ..."] * (len(module_sets) > _MOST))


def module_text(modules: Modules) -> str:
    """`32 x Linear, weight [14336, 4096] bf16`."""
    module = modules.module
    parameters = [f"{p.name} {list(p.shape)} {phrases.dtype(p.dtype)}" for p in module.parameters]
    parameters = parameters or [f"{module.count:,} parameters"] * (module.count > 0)
    times = f"{len(modules)} x " if len(modules) > 1 else ""
    return ", ".join((f"{times}{module.cls}", *parameters))


def _name(name: ast.Name, judged: Judged) -> str:
    """The value of an option, a let, an axis or a field, and why; else the modules of that path."""
    scope, path = judged.scope, name.path
    if scope is None:
        return ""
    if not path.startswith("config.") and not scope.knows(path):
        return _modules(judged.select_modules(ast.Selector(origin=name.origin, path=path)))
    value = evaluate(name, scope)
    definition, setting = scope.definitions.get(path), SETTINGS.get(path)
    if isinstance(value, Failed):
        return ""
    text = f"`{path}` = {describe(value)}"
    if definition is None:
        field = path.partition(".")[2]
        text += f", {scope.facts.source(field)}" if field else " ranks"
        return f"{text}\n\n{setting.meaning}" if setting else text
    if isinstance(value, ast.Selector):
        text += f"\n\n{_modules(judged.select_modules(value))}"
    text += f", {definition.given.origin.source.name}" if definition.given else ""
    comment = definition.origin.source.line(definition.origin.line).partition("#")[2].strip()
    return "\n\n".join(filter(None, (text, comment or (setting.meaning if setting else ""))))


def _word(word: str, section: str) -> str:
    tables = (*(meanings(section, k) for k in ("actions", "items", "values")), meanings("layouts"))
    return next((f"`{word}`: {table[word]}" for table in tables if word in table), "")


@cache
def meanings(section: str, kind: str = "") -> dict[str, str]:
    """Words and what they mean, of `grammars/words.toml`, or of `words.toml` in a section's folder.

    Args:
        section: of a plan, `keywords` or `layouts`.
        kind: of a section's words: `items`, `actions` or `values`; empty for what is beside them.
    """
    folder = FOLDER / section if section in STATED else GRAMMARS
    table = tomllib.loads((folder / "words.toml").read_text(encoding="utf-8")).get(section, {})
    return {k: v for k, v in (table.get(kind, {}) if kind else table).items() if type(v) is str}
