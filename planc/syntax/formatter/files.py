"""`planc fmt`: plan files and their canonical layout."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from planc.diagnostics.diagnostic import Sink, io_reason
from planc.diagnostics.source import Source
from planc.files import atomic_write
from planc.syntax.formatter.layout import format_plan
from planc.syntax.plan_files import PlanFile, quotable, text


@dataclass(frozen=True, slots=True, kw_only=True)
class FormattedFile:
    """A plan by its name and path (None: standard input), its text, and its layout if it parses."""

    name: str
    path: Path | None
    before: str
    after: str | None

    @property
    def changes(self) -> bool:
        return self.after is not None and self.after != self.before

    def diff(self) -> str:
        """The changes as a unified diff; empty where there are none."""
        if self.after is None:
            return ""
        import difflib

        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), self.name, self.name, lineterm=""
        )
        return "".join(f"{line}\n" for line in lines)

    def write(self, sink: Sink) -> bool:
        """Writes the layout into the file; returns whether that succeeded (else PL020)."""
        assert self.path is not None and self.after is not None
        try:
            atomic_write.write(self.path, self.after)
        except OSError as error:
            sink.error("PL020", f"cannot write {self.name}: {io_reason(error)}")
            return False
        return True


def formatted_files(names: Iterable[str], sink: Sink) -> Iterator[FormattedFile]:
    """The layout of each plan in files, folders (any depth, not hidden) or `-`; reports PL006."""
    for name in names:
        folder = Path(name)
        if name != "-" and folder.is_dir():
            files = _plan_files(folder)
            if not files:
                sink.error("PL006", f"{name} holds no .plan file")
        else:
            files = [name]
        for file in files:
            stdin = PlanFile(name="<stdin>", path=None)
            place = stdin if file == "-" else PlanFile(name=file, path=Path(file))
            content = text(place, None, sink)
            if content is not None and quotable(place, content, None, sink):
                after = format_plan(Source(place.name, content), sink)
                yield FormattedFile(name=place.name, path=place.path, before=content, after=after)


def _plan_files(folder: Path) -> list[str]:
    plans = (p for p in folder.rglob("*.plan") if p.is_file())
    shown = (p for p in plans if not any(n.startswith(".") for n in p.relative_to(folder).parts))
    return sorted(str(p) for p in shown)
