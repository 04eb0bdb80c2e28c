"""The language server: what the protocol asks for, answered by the other files of this package."""

import asyncio
import contextlib
import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from lsprotocol import types as lsp
from pygls.lsp.server import LanguageServer

from planc.diagnostics.diagnostic import Diagnostic, Sink
from planc.diagnostics.sorting import notes
from planc.diagnostics.source import Span
from planc.files.version import VERSION
from planc.syntax.formatter.layout import format_plan
from planc.tools.editor import completion, hover, navigation
from planc.tools.editor.judge import Judged, check, judge
from planc.tools.editor.target import place_of

_PAUSE = 0.08  # seconds without a key before a plan is judged
# The protocol's numbers.
_SEVERITY = {"error": 1, "warning": 2, "info": 3}
_KINDS = {"module": 9, "word": 14, "value": 12, "class": 7, "file": 17}
_SYMBOLS = {"Header": 2, "Section": 3, "Block": 19, "When": 19, "Rule": 12, "Style": 5}
_VARIABLE = 13


class Server:
    """The open plans, each judged when it has changed and something is asked.

    Args:
        ls: the protocol's side.
    """

    def __init__(self, ls: Any) -> None:
        self.ls = ls
        self.known: dict[str, tuple[dict[str, str], Judged]] = {}
        self.lock = asyncio.Lock()

    async def judge(self, uri: str, *, whole: bool = False) -> Judged:
        """The plan as it is now; `whole` with all findings. Building a model's table for the first
        time takes seconds, and so may checks, so both run beside what the protocol does.
        """
        async with self.lock:
            documents = self.ls.workspace.text_documents.values()
            texts = {document.uri: document.source for document in documents}
            if uri not in texts:  # a request for a file that is not open
                with contextlib.suppress(OSError, ValueError):
                    texts[uri] = self.ls.workspace.get_text_document(uri).source
                texts.setdefault(uri, "")
            if uri not in self.known or self.known[uri][0] != texts:
                real = {os.path.realpath(_path(u)): t for u, t in texts.items()}
                self.known[uri] = texts, await asyncio.to_thread(judge, _path(uri), real)
            judged = self.known[uri][1]
        if whole and not judged.checked:
            judged = await asyncio.to_thread(check, judged)
            if uri in self.known and self.known[uri][0] == texts:
                self.known[uri] = texts, judged
        return judged

    async def position(self, params: Any) -> tuple[Judged, int]:
        """The plan and the offset that a request is about. The protocol counts UTF-16 units of a
        line, unless the editor asks for others.
        """
        judged = await self.judge(params.text_document.uri)
        lines, at = judged.source.text.split("\n"), params.position
        if at.line >= len(lines):  # the text is shorter by now
            return judged, len(judged.source.text)
        codec, line, column = self.ls.workspace.position_codec, lines[at.line], 0
        while column < len(line) and codec.client_num_units(line[:column]) < at.character:
            column += 1
        return judged, judged.source.offset(at.line + 1) + column

    def range(self, span: Span) -> Any:
        ends = []
        for offset in (span.start, span.end):
            line, column = span.source.position(offset)
            units = self.ls.workspace.position_codec.client_num_units
            ends.append(lsp.Position(line - 1, units(span.source.line(line)[: column - 1])))
        return lsp.Range(*ends)

    def location(self, span: Span) -> Any:
        return lsp.Location(uri=place_of(span.source).as_uri(), range=self.range(span))

    # What is found

    async def publish(self, params: Any) -> None:
        """Publishes what is found in all open plans: they may extend the one that changed."""
        # pygls knows documents by their decoded URIs
        documents, key = self.ls.workspace.text_documents, unquote(params.text_document.uri)
        version = documents[key].version if key in documents else None
        await asyncio.sleep(_PAUSE)
        if key not in documents or documents[key].version != version:
            return
        await self._publish_all()

    async def _publish_all(self) -> None:
        documents = self.ls.workspace.text_documents
        for uri, version in [(d.uri, d.version) for d in documents.values()]:
            findings = (await self.judge(uri, whole=True)).findings
            self._publish(uri, [self._diagnostic(finding) for finding in findings], version)

    async def read_again(self, params: Any) -> None:
        """Files that are not open may have changed: other plans, pyproject.toml, a model."""
        self.known.clear()
        await self.publish(params)

    async def forget(self, params: Any) -> None:
        """Plans that extend the closed one see the file again, and not what was typed."""
        self._publish(params.text_document.uri, [])
        await self._publish_all()

    def _publish(self, uri: str, diagnostics: list[Any], version: int | None = None) -> None:
        params = lsp.PublishDiagnosticsParams(uri=uri, diagnostics=diagnostics, version=version)
        self.ls.text_document_publish_diagnostics(params)

    def _diagnostic(self, finding: Diagnostic) -> Any:
        first, *others = finding.labels
        related = [la for la in others if not la.span.source.argument]
        return lsp.Diagnostic(
            range=self.range(first.span),
            severity=lsp.DiagnosticSeverity(_SEVERITY[finding.severity]),
            code=finding.code,
            source="planc",
            message="\n".join((finding.message, *notes(finding))),
            related_information=[
                lsp.DiagnosticRelatedInformation(self.location(la.span), la.text or finding.message)
                for la in related
            ],
        )

    # Requests

    async def hover(self, params: Any) -> Any:
        hovered = hover.hover(*await self.position(params))
        if hovered is None:
            return None
        content = lsp.MarkupContent(kind=lsp.MarkupKind.Markdown, value=hovered[0])
        return lsp.Hover(contents=content, range=self.range(hovered[1]))

    async def completion(self, params: Any) -> Any:
        judged, offset = await self.position(params)
        typed, items = completion.complete(judged, offset)
        place = self.range(judged.source.span(offset - len(typed), offset))
        return [
            lsp.CompletionItem(
                label=word,
                kind=lsp.CompletionItemKind(_KINDS[kind]),
                detail=detail,
                text_edit=lsp.TextEdit(range=place, new_text=word),
            )
            for word, kind, detail in items
        ]

    async def definition(self, params: Any) -> Any:
        span = navigation.definition(*await self.position(params))
        return self.location(span) if span else None

    async def symbols(self, params: Any) -> Any:
        return self._symbols((await self.judge(params.text_document.uri)).file.statements)

    def _symbols(self, nodes: Iterable[Any]) -> list[Any]:
        return [
            lsp.DocumentSymbol(
                name=name,
                kind=lsp.SymbolKind(_SYMBOLS.get(type(node).__name__, _VARIABLE)),
                range=self.range(node.origin),
                selection_range=self.range(node.origin),
                children=self._symbols(inside),
            )
            for node in nodes
            for name, inside in [navigation.outline_entry(node)]
        ]

    async def formatting(self, params: Any) -> Any:
        """None for a plan that does not parse: its findings say why."""
        source = (await self.judge(params.text_document.uri)).source
        text = format_plan(source, Sink())
        if text is None or text == source.text.removeprefix("\ufeff"):
            return None
        return [lsp.TextEdit(range=self.range(source.span(0, len(source.text))), new_text=text)]

    async def actions(self, params: Any) -> Any:
        """The corrections that `planc check --fix` makes, on the lines that are asked for."""
        uri, first, last = params.text_document.uri, params.range.start.line, params.range.end.line
        code_actions = []
        for finding in (await self.judge(uri, whole=True)).findings:
            place = self.range(finding.labels[0].span)
            if finding.edit is None or not place.start.line <= last or place.end.line < first:
                continue
            span, meant = finding.edit
            edit = lsp.TextEdit(range=self.range(span), new_text=meant)
            action = lsp.CodeAction(
                title=f"change `{span.text}` to `{meant}`",
                kind=lsp.CodeActionKind.QuickFix,
                diagnostics=[self._diagnostic(finding)],
                edit=lsp.WorkspaceEdit(changes={uri: [edit]}),
            )
            code_actions.append(action)
        return code_actions

    def enter_folder(self, _: Any) -> None:
        """Names in a plan and in pyproject.toml are those of `planc` in the editor's folder."""
        if self.ls.workspace.root_path:
            os.chdir(self.ls.workspace.root_path)


def _path(uri: str) -> Path:
    """The file of a document; of one that has none, a name of its own in the editor's folder."""
    parts = urlparse(uri)
    unsaved = f"{re.sub(r'[^0-9A-Za-z]+', '-', unquote(uri)).strip('-')}.plan"
    return Path(unquote(parts.path) if parts.scheme == "file" else unsaved).absolute()


def serve() -> None:
    """Answers an editor over standard input and output, until it ends."""
    ls = LanguageServer("planc", VERSION)
    server = Server(ls)
    triggers = lsp.CompletionOptions(trigger_characters=[".", "$", "<", "{", ",", '"'])
    ls.feature(lsp.TEXT_DOCUMENT_COMPLETION, triggers)(partial(server.completion))
    for name, answer in {
        lsp.INITIALIZED: server.enter_folder,
        lsp.TEXT_DOCUMENT_DID_OPEN: server.publish,
        lsp.TEXT_DOCUMENT_DID_CHANGE: server.publish,
        lsp.TEXT_DOCUMENT_DID_SAVE: server.read_again,
        lsp.TEXT_DOCUMENT_DID_CLOSE: server.forget,
        lsp.TEXT_DOCUMENT_HOVER: server.hover,
        lsp.TEXT_DOCUMENT_DEFINITION: server.definition,
        lsp.TEXT_DOCUMENT_DOCUMENT_SYMBOL: server.symbols,
        lsp.TEXT_DOCUMENT_FORMATTING: server.formatting,
        lsp.TEXT_DOCUMENT_CODE_ACTION: server.actions,
    }.items():
        ls.feature(name)(partial(answer))  # a method cannot be marked
    ls.start_io()
