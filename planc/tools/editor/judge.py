"""One open plan: its files, the model that it is judged for, and what is found."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from planc.compiler import compile
from planc.diagnostics.diagnostic import Diagnostic, Label, Sink
from planc.diagnostics.source import Source
from planc.elaborate.elaborate import program_of
from planc.elaborate.scope import Scope
from planc.elaborate.selectors import select
from planc.model.config import locate_config
from planc.model.facts import Facts, Modules
from planc.model.load import load
from planc.syntax import ast
from planc.syntax.plan_files import read_open
from planc.tools.editor.target import Chosen, chosen, place_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """An open plan, and what is known of it.

    Args:
        file: the plan itself, without statements that don't parse.
        files: the plan that is judged, bases first.
        scope: its names and their values; None without a model.
        styles: its own styles, with their classes.
        findings: each with a place in the open plan in front.
        checked: whether findings are all; else those of the syntax and of the target.
    """

    file: ast.File
    files: tuple[ast.File, ...]
    chosen: Chosen
    scope: Scope | None = None
    styles: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Diagnostic, ...] = ()
    checked: bool = False

    @property
    def source(self) -> Source:
        return self.file.origin.source

    def select_modules(self, *selectors: ast.Selector) -> tuple[Modules, ...]:
        """The modules of a selector, inside those of the enclosing blocks, which come first."""
        if self.scope is None:
            return ()
        bases: tuple[Modules, ...] = (self.scope.facts.model,)
        for each in selectors:
            bases = select(each, bases, self.scope, optional=True)
        return bases


@cache
def _read(model: str, changed: float) -> tuple[Facts | None, tuple[Diagnostic, ...]]:
    """A model's facts and what reading it found; a configuration that changes is read again."""
    sink = Sink()
    return load(model, sink), sink.diagnostics


def judge(path: Path, texts: Mapping[str, str]) -> Judged:
    """Reads an open plan: its syntax, its model, and the values of its names.

    Args:
        path: of the plan, whose text is in `texts`.
        texts: the files that are open, by their real paths.
    """
    sink = Sink()
    files = read_open(path, texts, sink)
    source = Source(str(path), texts[str(path.resolve())])
    empty = ast.File(origin=source.span(0, len(source.text)), statements=())
    file = next((f for f in files if f.origin.source.name == str(path)), empty)
    judged = Judged(file=file, files=files, chosen=chosen(file, texts, sink))
    target, root = judged.chosen.target, judged.chosen.root
    if root.resolve() != path.resolve():
        judged = replace(judged, files=read_open(root, texts, sink))
    place = locate_config(target.model) if target else None
    changed = place.path.stat().st_mtime if place and place.path.exists() else 0.0
    facts, diagnostics = _read(target.model, changed) if target else (None, ())
    sink.add(*diagnostics)
    if target and facts:
        size, settings = target.world_size, target.set
        program = program_of(judged.files, facts, Sink(), world_size=size, settings=settings)
        styles = {name: style.path for name, style in program.styles.items()}
        judged = replace(judged, scope=program.scope, styles=styles)
    return replace(judged, findings=tuple(_place(finding, judged) for finding in sink))


def check(judged: Judged) -> Judged:
    """With what the compiler finds, where the syntax is right: a second for the largest models."""
    sink, target = Sink(), judged.chosen.target
    sink.add(*judged.findings)
    if target and judged.scope and not sink.has_errors:
        size, settings = target.world_size, target.set
        compile(judged.files, judged.scope.facts, sink, world_size=size, settings=settings)
    findings = tuple(_place(finding, judged) for finding in sink)
    return replace(judged, findings=findings, checked=True)


def _place(finding: Diagnostic, judged: Judged) -> Diagnostic:
    """A finding with a place in the open plan in front: for one in a plan that it extends, the line
    that extends it; for one without a place the header, or the comment with the target.
    """
    path = Path(judged.source.name).resolve()
    written = [la for la in finding.labels if not la.span.source.argument]
    here = [la for la in written if place_of(la.span.source) == path][:1]
    if not here:
        kinds = (ast.Extend, ast.Header) if written else (ast.Header,)
        lines = [s.origin for kind in kinds for s in judged.file.statements if isinstance(s, kind)]
        comment = [] if written or not judged.chosen.origin else [judged.chosen.origin]
        here = [Label(span=[*comment, *lines, judged.source.span(0, 0)][0])]
    return replace(finding, labels=(*here, *(la for la in finding.labels if la not in here)))
