"""The model and the mesh that a plan in an editor is judged for."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source, Span
from planc.files.project import ProjectError, Target, project
from planc.files.resources import PLANS
from planc.model.config import locate_config
from planc.syntax import ast
from planc.syntax.plan_files import SeveralPlans, locate, plan_of_family, read_open

_COMMENT = re.compile(r"(?:^|(?<=^\ufeff))#[ \t]*planc:(.*)$", re.M)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The model and the settings that a plan is judged for.

    Args:
        root: the plan to judge, which is the open one or extends it.
        reason: who chose the target, as part of a sentence.
        target: the model, the number of ranks, and settings; None where no one names a model.
        origin: of the comment that chose it.
    """

    root: Path
    reason: str
    target: Target | None = None
    origin: Span | None = None


def chosen(file: ast.File, texts: Mapping[str, str], sink: Sink) -> Chosen:
    """The target of a plan: by its comment, by a target of the project, or by its family.

    Args:
        file: the open plan; the name of its source is its path.
        texts: the files that are open, by their real paths.
        sink: receives PL740 (the comment), PL021 (the project's settings) and PL741 (none of the
            three names a model).
    """
    source = file.origin.source
    path = Path(source.name)
    if comment := _COMMENT.search(source.text):
        origin, help = source.span(*comment.span()), "`# planc: MODEL --world-size N --set A=B`"
        try:
            target = _read_comment(comment[1], path.parent)
            return Chosen(path, "the comment in it says so", target, origin)
        except ValueError as error:
            sink.error("PL740", f"this comment names no target: {error}", origin, help=help)
            return Chosen(path, "its comment cannot be read")
    try:
        if default := _in_project(path.resolve(), texts) or _shipped_shape(file, path):
            return default
    except ProjectError as error:
        sink.error("PL021", str(error))
        return Chosen(path, "pyproject.toml cannot be used")
    nothing = Chosen(path, "no model is known for its family")
    help = "name one in a comment: `# planc: MODEL --world-size N`"
    sink.info("PL741", f"the plan is not judged: {nothing.reason}", help=help)
    return nothing


def _read_comment(words: str, folder: Path) -> Target:
    """The target of a comment; the path of a model is relative to the plan."""
    name, *rest = shlex.split(words) or [""]
    given = list(zip(rest[::2], rest[1::2], strict=False))
    unknown = [word for word in rest[::2] if word not in ("--world-size", "--set")]
    if not name or unknown or len(rest) % 2:
        raise ValueError(f"`{(unknown or rest or ['MODEL'])[-1]}` is unknown, or lacks its value")
    size = [value for option, value in given if option == "--world-size"]
    if wrong := [value for value in size if not value.isdecimal() or not int(value)]:
        raise ValueError(f"`--world-size` is a number of ranks, not `{wrong[0]}`")
    return Target(
        model=str(folder / name) if (folder / name).exists() else name,
        world_size=int(size[-1]) if size else None,
        set=tuple(value for option, value in given if option == "--set"),
    )


def _in_project(path: Path, texts: Mapping[str, str]) -> Chosen | None:
    """The first target whose plan is the open one, or extends it."""
    for target in project().targets:
        config = locate_config(target.model)
        values = _values(config.path) if config else {}
        names = (*(values.get("architectures") or ()), values.get("model_type", ""))
        try:
            plan = locate(target.plan) if target.plan else plan_of_family(*map(str, names))
        except SeveralPlans:
            continue
        root = plan.path.resolve() if plan and plan.path else None
        if root and path in (place_of(f.origin.source) for f in read_open(root, texts, Sink())):
            return Chosen(root, "a target in pyproject.toml names it", target)
    return None


def _shipped_shape(file: ast.File, path: Path) -> Chosen | None:
    """The smallest shape that ships with planc for a family of the plan."""
    headers = (s for s in file.statements if isinstance(s, ast.Header))
    for family in (f.path for header in headers for f in header.families):
        shapes = [(size, name) for size, name, families in _shapes() if family in families]
        if shapes:
            reason = f"it is the smallest shape that ships with planc for {family}"
            return Chosen(path, reason, Target(model=min(shapes)[1]))
    return None


@cache
def _shapes() -> tuple[tuple[int, str, tuple[str, ...]], ...]:
    """(size, name, families) of the shapes that ship with planc."""
    configurations = [(p.stem, _values(p)) for p in sorted((PLANS / "models").glob("*.json"))]
    names = ("model_type", "_class_name")
    return tuple(
        (v.get("hidden_size") or 0, stem, (*map(v.get, names), *v.get("architectures", ())))
        for stem, v in configurations
    )


def _values(path: Path) -> dict[str, Any]:
    """The fields of a configuration; none where it can't be read, as loading it says."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        values = None
    return values if isinstance(values, dict) else {}


def place_of(source: Source) -> Path:
    """The file of a source; one that ships with planc has a name that is relative to no folder."""
    path = Path(source.name)
    shipped = not path.is_absolute() and path.parts[:1] == (PLANS.name,)
    return (PLANS.parent / path if shipped else path).resolve()
