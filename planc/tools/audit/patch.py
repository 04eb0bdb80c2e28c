"""The lines of a configuration class of transformers that hold a plan, and a patch for them."""

import ast
import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planc.diagnostics.source import Source, Span
from planc.tools.audit.repair import Repair


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOwner:
    """A class with a plan, and the part of the model that the plan is for.

    Args:
        cls: a configuration class, or the class of the full model.
        attribute: the name of the plan, with `{}` for its kind.
        prefix: of the names in the model: `model.`; empty for the full model.
    """

    cls: type
    attribute: str
    prefix: str = ""

    def plan(self, kind: str) -> Mapping[str, Any]:
        """The plan of a kind."""
        return getattr(self.cls, self.attribute.format(kind), None) or {}


def plan_owners(model: Any) -> list[PlanOwner]:
    """The classes whose plans a model merges, innermost first."""
    owners = [
        PlanOwner(
            cls=type(module.config),
            attribute="base_model_{}",
            prefix=f"{name}." if name else "",
        )
        for name, module in model.named_modules()
        if hasattr(module, "init_parallel_plans") and module.base_model is module
    ]
    owners.sort(key=lambda owner: owner.prefix.count("."), reverse=True)
    return [*owners, PlanOwner(cls=type(model), attribute="_{}")]


def rule_span(owners: list[PlanOwner], kind: str, name: str) -> Span | None:
    """The line of the rule of a name, or that of the plan without such a rule."""
    for owner in owners:
        for path, holder in _files(owner, kind):
            source = Source(_short_path(path), path.read_text(encoding="utf-8"))
            plan = _plan(source.text, holder, owner.attribute.format(kind))
            if plan is None or not name.startswith(owner.prefix):
                continue
            keys = [k for k in plan.keys if _value(k) == name.removeprefix(owner.prefix)]
            node: ast.expr = next((k for k in keys if k is not None), plan)
            start = source.offset(node.lineno) + node.col_offset
            line = source.line(node.lineno)
            return source.span(start, source.offset(node.lineno) + len(line))
    return None


def patch(owners: list[PlanOwner], kind: str, repair: Repair) -> str:
    """A patch of a checkout of transformers for `git apply`; empty if the plan is not a literal."""
    edits = [
        *((name, None) for name in repair.removed),
        *repair.changed.items(),
        *repair.added.items(),
    ]
    texts: dict[Path, tuple[str, str]] = {}
    for name, style in edits:
        owner = next((o for o in owners if _has(o, kind, name, repair)), None)
        if owner is None:
            return ""
        for path, holder in _files(owner, kind):
            before, now = texts.get(path, (path.read_text(encoding="utf-8"),) * 2)
            attribute = owner.attribute.format(kind)
            edited = _edit(now, holder, attribute, name.removeprefix(owner.prefix), style)
            if edited is None:
                return ""
            texts[path] = before, edited
    return "".join(_file_diff(path, *both) for path, both in texts.items())


def _has(owner: PlanOwner, kind: str, name: str, repair: Repair) -> bool:
    """Whether a change of the rule of a name belongs to the class."""
    if not name.startswith(owner.prefix):
        return False
    plan = owner.plan(kind)
    return bool(plan) and (name in repair.added or name.removeprefix(owner.prefix) in plan)


def _files(owner: PlanOwner, kind: str) -> Iterator[tuple[Path, str]]:
    """The files that define the plan of a class: its own, and the one that it is generated from."""
    try:
        path, name = Path(inspect.getsourcefile(owner.cls) or ""), owner.cls.__name__
    except TypeError:  # a class of no module, such as one of a notebook
        return
    yield path, name
    modular = path.with_name(re.sub(r"^(configuration|modeling)_", "modular_", path.name))
    text = modular.read_text(encoding="utf-8") if modular != path and modular.is_file() else ""
    if _plan(text, name, owner.attribute.format(kind)) is not None:
        yield modular, name


def _plan(text: str, holder: str, attribute: str) -> ast.Dict | None:
    """The literal of the plan in a class."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name == holder:
            for statement in node.body:
                match statement:
                    case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict() as plan):
                        pass
                    case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict() as plan):
                        pass
                    case _:
                        continue
                if name == attribute:
                    return plan
    return None


def _value(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _edit(text: str, holder: str, attribute: str, key: str, style: str | None) -> str | None:
    """The text of a file with another style of a rule, without it, or with a new one."""
    plan = _plan(text, holder, attribute)
    if plan is None or not plan.keys:
        return None
    lines = text.splitlines(keepends=True)
    entries = [(k, v) for k, v in zip(plan.keys, plan.values, strict=True) if k is not None]
    entry_of_key = next((entry for entry in entries if _value(entry[0]) == key), None)
    if entry_of_key is None:
        if len(entries) < len(plan.keys) or not entries:  # a part of the plan is no literal
            return None
        near = max(entries, key=lambda e: _common(str(_value(e[0])), key))
        indent = " " * near[0].col_offset
        lines.insert(near[1].end_lineno or 0, f'{indent}"{key}": "{style}",\n')
        return "".join(lines)
    first, last = entry_of_key[0].lineno - 1, entry_of_key[1].end_lineno or 0
    if first + 1 != last or sum(e[0].lineno == first + 1 for e in entries) > 1:
        return None
    if style is None:
        del lines[first]
    else:
        start, end = entry_of_key[1].col_offset, entry_of_key[1].end_col_offset or 0
        lines[first] = f'{lines[first][:start]}"{style}"{lines[first][end:]}'
    return "".join(lines)


def _common(first: str, other: str) -> int:
    """The number of segments with which both names begin."""
    pairs = zip(first.split("."), other.split("."), strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(other))


def _file_diff(path: Path, before: str, after: str) -> str:
    name = f"src/{_short_path(path)}"
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(lines)


def _short_path(path: Path) -> str:
    """`transformers/models/llama/configuration_llama.py`."""
    parts = path.parts
    at = len(parts) - 1 - parts[::-1].index("transformers") if "transformers" in parts else 0
    return "/".join(parts[at:])
