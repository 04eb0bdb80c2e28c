"""The settings of a user's repository: `[tool.planc]` in pyproject.toml, and `PLANC_PATH`."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SEVERITIES = ("error", "warning", "info", "ignore")


class ProjectError(ValueError):
    """`[tool.planc]` cannot be used; the message names the file and the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model and a plan that `planc check` judges when no model is named.

    Args:
        model, plan: as on the command line; None for the plan of the model's family.
        world_size: the number of ranks.
        set: `name=value` for axes and options.
        elastic: the largest of the world sizes between which a run changes and keeps its batch; 0
            for one that has a single size.
    """

    model: str
    plan: str | None = None
    world_size: int | None = None
    set: tuple[str, ...] = ()
    elastic: int = 0

    @property
    def file_name(self) -> str:
        """The file name of the target's lowered plan."""
        path = Path(self.model)
        path = path.parent.absolute() if path.name == "config.json" else path
        model = path.name.removesuffix(".json")
        rest = replace(self, model=model, plan=Path(self.plan).stem if self.plan else None)
        return re.sub(r"[^\w.=]+", "-", rest.text.replace("--set ", "").replace("--", "")) + ".json"

    @property
    def text(self) -> str:
        """The target as arguments of `planc check`."""
        words = [self.model, self.plan or ""]
        words += [f"--world-size {self.world_size}"] if self.world_size else []
        return " ".join(filter(None, [*words, *(f"--set {s}" for s in self.set)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """`[tool.planc]`; empty without any.

    Args:
        folder: of the pyproject.toml; paths in it are relative to this folder.
        plans: folders of plans, which come before the shipped ones.
        targets: what `planc check` and `planc lower --check` judge.
        severity: of findings, by code: an error, a warning, an info, or ignored.
        lowered: the folder of the lowered plans that `planc lower --save` writes.
    """

    folder: Path = field(default_factory=Path)
    plans: tuple[Path, ...] = ()
    targets: tuple[Target, ...] = ()
    severity: Mapping[str, str] = field(default_factory=dict)
    lowered: Path | None = None


def project() -> Project:
    """Reads the nearest pyproject.toml with `[tool.planc]`, at the current folder or above it.

    Raises:
        ProjectError: it has a mistake.
    """
    import tomllib  # only a folder with a pyproject.toml needs it

    start = Path.cwd()
    for folder in (start, *start.parents):
        file = Path(os.path.relpath(folder / "pyproject.toml"))
        try:
            data = file.read_bytes()
        except (OSError, ValueError):
            continue
        if b"planc" not in data:
            continue
        try:
            tools = tomllib.loads(data.decode()).get("tool")
        except UnicodeDecodeError:
            raise ProjectError(f"{file} is not UTF-8 text") from None
        except tomllib.TOMLDecodeError as error:
            raise ProjectError(f"{file} is not TOML: {error}") from None
        table = tools.get("planc") if isinstance(tools, dict) else None
        if table is not None:
            return _read(table, file)
    return Project()


def plan_folders() -> tuple[Path, ...]:
    """The folders of plans by name: those of `PLANC_PATH`, then the project's.

    Raises:
        ProjectError: as `project`.
    """
    path = os.environ.get("PLANC_PATH", "")
    named = tuple(map(Path, filter(None, path.split(os.pathsep))))
    if missing := next((folder for folder in named if not folder.is_dir()), None):
        raise ProjectError(f"PLANC_PATH: {missing} is not a folder")
    user_project = project()
    if missing := next((folder for folder in user_project.plans if not folder.is_dir()), None):
        raise ProjectError(
            f"{user_project.folder / 'pyproject.toml'}: `plans`: {missing} is not a folder"
        )
    return (*named, *user_project.plans)


def _read(table: Any, file: Path) -> Project:
    table = _keys(table, ("plans", "targets", "severity", "ignore", "lowered"), file, "tool.planc")
    targets = table.get("targets", [])
    if not isinstance(targets, list):
        raise ProjectError(f"{file}: `targets` is a list: write [[tool.planc.targets]]")
    ignored = _texts(table, "ignore", file)
    return Project(
        folder=file.parent,
        plans=tuple(_folder(p, file) for p in _texts(table, "plans", file)),
        targets=tuple(target for t in targets for target in _targets(t, file)),
        severity={
            **dict(_severities(table.get("severity", {}), file)),
            **dict.fromkeys((_code(code, "ignore", file) for code in ignored), "ignore"),
        },
        lowered=_folder(_text(table, "lowered", file), file) if "lowered" in table else None,
    )


def _targets(table: Any, file: Path) -> Iterator[Target]:
    """The targets of a table: one for each world size."""
    where = "tool.planc.targets"
    table = _keys(table, ("model", "plan", "world-size", "set"), file, where)
    if "model" not in table:
        raise ProjectError(f"{file}: each [[{where}]] names a `model`")
    given = table.get("world-size")
    sizes = given if isinstance(given, list) and given else [given]
    if given is not None and not all(type(size) is int and size > 0 for size in sizes):
        text = f"`world-size` is a positive integer, or a list of some, not {given!r}"
        raise ProjectError(f"{file}: {text}")
    for size in sizes:
        yield Target(
            model=_place(_text(table, "model", file), file),
            plan=_place(_text(table, "plan", file), file) if "plan" in table else None,
            world_size=size,
            set=_texts(table, "set", file),
            elastic=max(sizes) if len(sizes) > 1 else 0,
        )


def _folder(name: str, file: Path) -> Path:
    return Path(os.path.relpath(file.parent / name))


def _place(name: str, file: Path) -> str:
    """A path relative to the pyproject.toml, as one relative to the current folder; other names as
    they are.
    """
    return os.path.relpath(file.parent / name) if (file.parent / name).exists() else name


def _severities(table: Any, file: Path) -> Iterator[tuple[str, str]]:
    if not isinstance(table, dict):
        raise ProjectError(f"{file}: `severity` is a table of codes, such as PL104 = 'error'")
    for code, severity in table.items():
        if severity not in SEVERITIES:
            raise ProjectError(f"{file}: the severity of {code} is one of {', '.join(SEVERITIES)}")
        yield _code(code, "severity", file), severity


def _code(code: str, key: str, file: Path) -> str:
    if not re.fullmatch(r"PL\d{3}", code):
        raise ProjectError(f"{file}: `{key}` names {code!r}, which is not a code")
    return code


def _keys(table: Any, known: tuple[str, ...], file: Path, where: str) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ProjectError(f"{file}: `{where}` is a table")
    for key in table:
        if key not in known:
            raise ProjectError(f"{file}: [{where}] has no key `{key}`; it has {', '.join(known)}")
    return table


def _text(table: dict[str, Any], key: str, file: Path) -> str:
    if not isinstance(table[key], str):
        raise ProjectError(f"{file}: `{key}` is a text, not {table[key]!r}")
    return str(table[key])


def _texts(table: dict[str, Any], key: str, file: Path) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ProjectError(f"{file}: `{key}` is a list of texts in brackets, not {value!r}")
    return tuple(value)
