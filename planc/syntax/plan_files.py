"""The name of a plan -> its files, extended files first.

Reading a plan runs none of its code. The plans that it extends are read relative to its folder, at
its git revision, or else from the plans that ship with planc.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from planc.diagnostics.diagnostic import Sink, did_you_mean, io_reason, one_of
from planc.diagnostics.source import MAX_CHARACTERS, Source, Span
from planc.files.project import ProjectError, plan_folders
from planc.files.resources import PLANS
from planc.syntax import ast
from planc.syntax.parsed_files import parse_file

DRAFT = "<draft>"
"""The name of a plan that is drafted for a family without one."""
ANY = "any"
"""The family of a plan that others extend, or that fits a model by its roles."""
_MAX_FILES = 64
_HEADER = re.compile(r"^plan \w+ for (.*)$", re.M)
_PLAN = re.compile(r"\ufeff?(?:\s|#[^\n]*\n)*plan[ \t]+\w+[ \t]+for[ \t]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """The place of a plan's text.

    Args:
        name: what the user calls it, for messages.
        path: the file, or None for standard input.
        revision: the git revision that it is read at, or None for the file as it stands.
    """

    name: str
    path: Path | None
    revision: str | None = None


@dataclass(slots=True)
class _Chain:
    """Reads one plan and what it extends, each file once, in an order in which bases come first."""

    sink: Sink
    open_texts: Mapping[str, str] = field(default_factory=dict)
    files: list[ast.File] = field(default_factory=list)
    done: set[tuple[str, str | None]] = field(default_factory=set)
    open: list[tuple[str, str | None]] = field(default_factory=list)

    def read(self, place: PlanFile) -> tuple[ast.File, ...]:
        self.add(place, None)
        return tuple(self.files)

    def add(self, place: PlanFile, origin: Span | None) -> None:
        key = (os.path.realpath(place.path) if place.path else "-", place.revision)
        if key in self.open:
            where, help = [origin] if origin else [], "remove one `extend` of the cycle"
            self.sink.error("PL008", f"{place.name} extends itself", *where, help=help)
            return
        if key in self.done:
            return
        if len(self.done) + len(self.open) >= _MAX_FILES:
            self.sink.error("PL008", f"more than {_MAX_FILES} files extend each other")
            return
        content = self.open_texts.get(key[0]) if place.revision is None else None
        content = text(place, origin, self.sink) if content is None else content
        if content is None or not quotable(place, content, origin, self.sink):
            return
        self.open.append(key)
        source = Source(place.name, content)
        on_disk = place.path and place.revision is None and key[0] not in self.open_texts
        file = parse_file(source, self.sink, key[0] if on_disk else None)
        for statement in file.statements:
            if isinstance(statement, ast.Extend):
                self.add(base_of(place, statement.path), statement.origin)
        self.open.pop()
        self.done.add(key)
        self.files.append(
            replace(file, schedule_files=tuple(_schedule_files(file, place, self.sink)))
        )


def _schedule_files(file: ast.File, place: PlanFile, sink: Sink) -> Iterator[tuple[Span, str]]:
    """The texts of the files that the pipelines of a plan name, relative to its folder."""
    waiting: list[object] = [*file.statements]
    while waiting:
        match waiting.pop():
            case ast.Section(name="pipeline", items=items):
                waiting += items
            case ast.When(then=then, otherwise=otherwise):
                waiting += (*then, *otherwise)
            case ast.Setting(name="schedule", value=ast.Call(name="file") as call):
                argument = call.arguments[0].value if len(call.arguments) == 1 else None
                if isinstance(argument, ast.Literal) and isinstance(argument.value, str):
                    path = (place.path.parent if place.path else Path()) / argument.value
                    named = PlanFile(name=argument.value, path=path, revision=place.revision)
                    schedule = text(named, call.origin, sink)
                    yield call.origin, schedule or ""
            case _:
                pass


def read(plan: str, sink: Sink) -> tuple[ast.File, ...]:
    """The files of a plan; each extended file comes before the file that extends it.

    Args:
        plan: a path, `-` for standard input, the name of a shipped plan or of a family that one
            is for, or `REV:path` in git.
        sink: receives PL006 (can't be read), PL008 (extends itself), PL021 (the project's
            settings) and the parser's findings.
    """
    if not plan.strip():
        help = "is it a variable of the shell that is not set?"
        sink.error("PL006", "the name of the plan is empty", help=help)
        return ()
    try:
        place = locate(plan)
    except ProjectError as error:
        _unusable(error, sink)
        return ()
    if place is None:
        name = Path(plan).name.removesuffix(".plan")
        hint = did_you_mean(name, shipped_plans(), "`planc list plans` has the names")
        message = f"there is no plan {plan!r}: no such file, and no shipped plan"
        sink.error("PL006", message, help=hint)
        return ()
    return _Chain(sink).read(place)


def read_open(path: Path, texts: Mapping[str, str], sink: Sink) -> tuple[ast.File, ...]:
    """The files of a plan as they are in an editor, as `read` gives them.

    Args:
        path: of the plan.
        texts: of the files that are open, saved or not, by their real paths.
        sink: as for `read`.
    """
    return _Chain(sink, open_texts=texts).read(PlanFile(name=str(path), path=path))


def read_text(name: str, content: str, sink: Sink) -> tuple[ast.File, ...]:
    """The files of a plan whose text is in no file, as `read` gives them."""
    return _Chain(sink, open_texts={"-": content}).read(PlanFile(name=name, path=None))


def read_for(
    names: tuple[str, str],
    sink: Sink,
    draft: Callable[[], tuple[ast.File, ...] | None] | None = None,
    *,
    user_folders: bool = True,
) -> tuple[ast.File, ...] | None:
    """The files of the plan for a model, or of its `draft` where there is no plan; None after PL022
    (neither), PL611 (several) and as `read` does.

    Args:
        names: the model's class and its family.
        user_folders: whether plans of the user's folders count, besides those that ship.
    """
    before = sink.errors
    try:
        place = plan_of_family(*names, user_folders=user_folders)
    except ProjectError as error:
        _unusable(error, sink)
        return None
    if place is None:
        if draft and (files := draft()):
            return files
        sink.error(
            "PL022",
            f"no plan is for {names[1]}",
            help="`planc init MODEL -o my.plan` drafts one and proves it; then name it as PLAN",
        )
        return None
    files = _Chain(sink).read(place)
    return files if sink.errors == before else None


def _unusable(error: ProjectError, sink: Sink) -> None:
    if isinstance(error, SeveralPlans):
        sink.error("PL611", str(error), help=f"name one: {one_of(error.plans)}")
    else:
        sink.error("PL021", str(error))


class SeveralPlans(ProjectError):
    """Several plans of the user's own folder name a family, and none has its name."""

    def __init__(self, family: str, plans: tuple[str, ...]) -> None:
        super().__init__(f"{one_of(plans, last='and')} are for {family}, and no plan was named")
        self.plans = plans


def is_draft(files: object) -> bool:
    """Whether the files of a plan are a draft, which nobody has read yet."""
    return isinstance(files, tuple) and any(f.origin.source.name == DRAFT for f in files)


def digest(files: object) -> str:
    """The sha256, in hex, of the texts of a plan and of those that it extends; empty for what has
    none, as a lowered plan.
    """
    if not isinstance(files, tuple):
        return ""
    whole = hashlib.sha256()
    for file in files:
        whole.update(file.origin.source.text.encode())
    return whole.hexdigest()


def shipped_plans() -> tuple[str, ...]:
    """The names of the plans that ship with planc, without those that others extend."""
    return tuple(p.stem for p in plans_in(PLANS) if families(p) != (ANY,))


def plans_in(folder: Path) -> list[Path]:
    """The plans of a folder, by name."""
    return sorted(path for path in folder.glob("*.plan") if path.is_file())


def families(path: Path) -> tuple[str, ...]:
    """The families that the header of a plan names."""
    header = _HEADER.search(path.read_text(encoding="utf-8-sig", errors="replace"))
    return tuple(re.findall(r"[^\s,]+", header[1])) if header else ()


def written_family(name: str) -> str:
    """A family as a plan's header has it, in quotes where it is no name."""
    return name if re.fullmatch(r"[A-Za-z_][\w.]*", name) else json.dumps(name)


def plan_of_family(*names: str, user_folders: bool = True) -> PlanFile | None:
    """The plan for a model, such as llama's for mistral: one of the user's own folders, else a
    shipped one.

    A plan whose name is among its families takes precedence: other plans are for a part of a
    family, such as its classifiers, whose classes their headers name.

    Args:
        names: the model's class and its `model_type`, or one of both; the first with a plan counts.
        user_folders: as for `read_for`.

    Raises:
        ProjectError: the project's settings cannot be used, or `SeveralPlans`.
    """
    folders = (*(plan_folders() if user_folders else ()), PLANS)
    headers = {folder: {p: families(p) for p in plans_in(folder)} for folder in folders}
    for name in names:
        for folder, plans in headers.items():
            those = [p for p in plans if name in plans[p]]
            named = [p for p in those if p.stem in plans[p]]
            if len(those) > 1 and not named and folder != PLANS:
                raise SeveralPlans(name, tuple(map(shown, those)))
            for path in (*named, *those):
                return PlanFile(name=shown(path), path=path)
    return None


def shown(path: Path) -> str:
    """The name of a plan in messages."""
    ships = path.is_relative_to(PLANS)
    return f"plans/{path.relative_to(PLANS)}" if ships else os.path.relpath(path)


def shipped_file(name: str) -> Path | None:
    """The shipped plan of a name, such as `llama` or `serve/vllm.plan`; None if none has it."""
    inside = Path(name if name.endswith(".plan") else f"{name}.plan")
    outside = inside.is_absolute() or name.startswith(".") or ".." in inside.parts
    return None if outside or not _is_file(PLANS / inside) else PLANS / inside


def locate(plan: str) -> PlanFile | None:
    """Finds the text of a plan; None if there is no plan with that name.

    Raises:
        ProjectError: the project's settings cannot be used.
    """
    if plan == "-":
        return PlanFile(name="<stdin>", path=None)
    path = Path(plan)
    bare = "/" not in plan and "\\" not in plan and not plan.endswith(".plan")
    try:
        folders = (*plan_folders(), PLANS) if bare else ()
        known = next((p for f in folders if (p := f / f"{plan}.plan").is_file()), None)
        if path.is_file() or (path.exists() and known is None):
            return PlanFile(name=plan, path=path)
        if known:
            return PlanFile(name=shown(known), path=known)
        if bare and (base := plan_of_family(plan)):
            return base
        if "/" in plan and (ships := shipped_file(plan)):
            return PlanFile(name=shown(ships), path=ships)
    except ProjectError:
        raise
    except (OSError, ValueError):  # a name too long, or with a NUL in it
        return None
    revision, colon, inside = plan.rpartition(":")
    if colon and revision and inside:
        return PlanFile(name=plan, path=Path(inside), revision=revision)
    return None


def base_of(place: PlanFile, name: str) -> PlanFile:
    """The file that `extend "name"` in a plan names."""
    folder = place.path.parent if place.path else Path()
    path = folder / name
    ships = shipped_file(name)
    if place.revision is not None:
        if not ships or _is_at_revision(place.revision, path):
            return PlanFile(name=f"{place.revision}:{path}", path=path, revision=place.revision)
        return PlanFile(name=shown(ships), path=ships)
    # a folder of weights may have the name as well, and a plan does not mean itself
    if ships and (not _is_file(path) or path == place.path):
        return PlanFile(name=shown(ships), path=ships)
    prefix = place.name.removesuffix(place.path.name) if place.path else ""
    return PlanFile(name=name if Path(name).is_absolute() else f"{prefix}{name}", path=path)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # its name is too long
        return False


def quotable(place: PlanFile, content: str, origin: Span | None, sink: Sink) -> bool:
    """Whether findings may quote the lines of a file.

    A plan of someone else's may name any file that its reader can read: by `extend`, or as a
    symlink. Such a file is quoted only if it begins as a plan does.

    Args:
        origin: the `extend` that names it, if one does.
        sink: receives PL009 if it is no plan.
    """
    named_by_user = origin is None and not (place.path and os.path.islink(place.path))  # noqa: PTH114
    if named_by_user or _PLAN.match(content):
        return True
    message = f"{place.name} is not a plan: it does not begin with a header"
    help = "a plan begins with `plan NAME for FAMILY`; no line of another file is shown"
    sink.error("PL009", message, *([origin] if origin else []), help=help)
    return False


def text(place: PlanFile, origin: Span | None, sink: Sink) -> str | None:
    """The text of a place, or None after PL006.

    Args:
        place: a file, standard input, or a file in git.
        origin: the `extend` that names it, if one does.
        sink: receives PL006.
    """
    where = [origin] if origin else []
    try:
        return _bytes(place).decode("utf-8-sig", errors="replace")
    except OSError as error:
        reason = io_reason(error)
    except ValueError as error:
        reason = str(error)
    sink.error("PL006", f"cannot read {place.name}: {reason}", *where, help=_similar(place, origin))
    return None


def _similar(place: PlanFile, origin: Span | None) -> str | None:
    """The help for a file that another file names and that cannot be read: the files with similar
    names in its folder, and in the folder of that name which ships, such as `serve`.
    """
    if origin is None or place.path is None:
        return None
    help = "a path is relative to the file that names it"
    path, suffix = place.path, place.path.suffix or ".plan"
    if place.revision is not None or os.path.lexists(path):
        return help
    try:
        known = {p.stem for p in path.parent.iterdir() if p.suffix == suffix}
    except OSError:  # there is no such folder
        known = set()
    folder, extender = Path(place.name).parent, Path(origin.source.name).parent
    if suffix == ".plan" and ".." not in folder.parts and folder.is_relative_to(extender):
        known |= {p.stem for p in plans_in(PLANS / folder.relative_to(extender))}
    return did_you_mean(path.stem, sorted(known), help)


def _bytes(place: PlanFile) -> bytes:
    """The first bytes of a plan, one more than the parser takes, so that large files stay cheap.

    Raises:
        OSError: the file can't be read.
        ValueError: it is not a file, or git does not have it.
    """
    limit = 4 * MAX_CHARACTERS + 4
    if place.path is None:
        return sys.stdin.buffer.read(limit)
    if place.revision is not None:
        return _at_revision(place.revision, place.path)[:limit]
    if place.path.is_dir():
        raise ValueError("it is a folder")
    if place.path.exists() and not place.path.is_file():
        raise ValueError("it is not a regular file")
    with place.path.open("rb") as stream:
        return stream.read(limit)


def _is_at_revision(revision: str, path: Path) -> bool:
    """Whether git has a file at the revision of another file."""
    try:
        _at_revision(revision, path)
        return True
    except ValueError:
        return False


def _at_revision(revision: str, path: Path) -> bytes:
    """The content of a file at a git revision; a path is relative to the current folder."""
    import subprocess

    if revision.startswith("-"):
        raise ValueError(f"{revision!r} is not a git revision")
    inside = path.as_posix() if path.is_absolute() else f"./{path.as_posix()}"
    try:
        done = subprocess.run(
            ["git", "show", f"{revision}:{inside}"], capture_output=True, check=False, timeout=30
        )
    except FileNotFoundError:
        raise ValueError("there is no such file, and git is not installed") from None
    except OSError as error:  # the name is too long for an argument
        raise ValueError(error.strerror or str(error)) from None
    except subprocess.TimeoutExpired:
        raise ValueError("git does not answer") from None
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", errors="replace").strip().splitlines()
        raise ValueError(lines[0].removeprefix("fatal: ") if lines else "git does not have it")
    return done.stdout
