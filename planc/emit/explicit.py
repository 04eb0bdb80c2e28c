"""A plan with its inferred layouts written out, for one model: `planc fmt --explicit`."""

from collections.abc import Iterator, Sequence

from planc.ir.nodes import Plan, TensorRule
from planc.model.facts import Facts, Modules, merge_sets
from planc.model.indices import Indices
from planc.ops import phrases
from planc.ops.styles import style_text
from planc.syntax import ast


def explicit(files: Sequence[ast.File], plan: Plan, facts: Facts) -> str:
    """The text of the last file, in which sections with all layouts take the place of those that
    leave layouts open; not yet in the canonical layout.
    """
    last = files[-1]
    text, source = last.origin.source.text, last.origin.source
    for setting in plan.sequence:
        replaced = [s for s in last.statements if _over(s, setting.axis)]
        based = (s for f in files[:-1] for s in ast.branches(f.statements))
        others = any(_over(s, setting.axis) for s in based)
        nested = ast.branches(last.statements)
        inner = any(_over(s, setting.axis) and s not in replaced for s in nested)
        word = "override tensor" if others or inner else "tensor"
        divided = [i for i in plan.images if i.axis == setting.axis and i.divided and not i.parts]
        summed = {images.origin for images in divided}  # by the setting, which stays
        axis_rules = (rule for rule in plan.tensor if rule.axis == setting.axis)
        rules = [rule for rule in axis_rules if rule.origin not in summed]
        body = "\n".join((*("images = rows" for _ in divided), *_body(rules, facts)))
        section = f"{word} on {setting.axis} {{\n{body}\n}}"
        first = min((s.origin.start for s in replaced), default=len(source.text))
        for statement in sorted(replaced, key=lambda s: -s.origin.start):
            start, end = statement.origin.start, statement.origin.end
            text = text[:start] + (section if start == first else "") + text[end:]
        if not replaced:
            text = f"{text.rstrip()}\n\n{section}\n"
    return text


def _over(statement: ast.Statement | ast.Item, axis: str) -> bool:
    if not isinstance(statement, ast.Section) or statement.name != "tensor":
        return False
    return [a.path for a in statement.axes] == [axis]


def _body(rules: Sequence[TensorRule], facts: Facts) -> Iterator[str]:
    """The lines of a section: a block for the rules inside the same entries of a list."""
    blocks: dict[str, dict[str, list[str]]] = {}
    for rule in rules:
        at = rule.modules.list_at
        cut = 0 if at is None or at + 1 == len(rule.modules.path) else at + 1
        parts = _selector(rule.modules, facts)
        block, path = ("".join(group).removeprefix(".") for group in (parts[:cut], parts[cut:]))
        blocks.setdefault(block, {}).setdefault(style_text(rule.style), []).append(path or "root")
    for block, styles in blocks.items():
        if block:
            yield f"{block} {{"
        for style, paths in styles.items():
            groups: dict[str, list[str]] = {}
            for path in paths:
                groups.setdefault(phrases.parent(path), []).append(path)
            for group in groups.values():
                yield from (f"{path} : {style}" for path in phrases.together(group))
        if block:
            yield "}"


def _selector(modules: Modules, facts: Facts) -> list[str]:
    """A text for each segment of a path; all entries of a list are `.*`."""
    texts: list[str] = []
    at = [facts.model]
    for segment in modules.path:
        inner = [child for parent in at for child in parent.children]
        if isinstance(segment, Indices):
            listed = [m for m in inner if isinstance(m.path[-1], Indices)]
            merged = merge_sets(Modules((m.path[-1],), m.module) for m in listed)
            whole = len(merged) == 1 and merged[0].path == (segment,)
            texts.append(".*" if whole else str(segment))
            at = [m for m in listed if isinstance(m.path[-1], Indices) and m.path[-1] & segment]
        else:
            texts.append(f".{segment}")
            at = [m for m in inner if m.path[-1] == segment]
    return texts
