"""The language server: what the protocol asks for, answered by the other files of this package."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from lsprotocol import types as lsp
from pygls.lsp.server import LanguageServer

import planc
from planc.diagnostic import Diagnostic, Sink
from planc.editor import completion, hover, navigation
from planc.editor.judge import Judged, Models, judge
from planc.editor.target import place_of
from planc.source import Source, Span
from planc.syntax.formatter.layout import formatted

_PAUSE = 0.08  # seconds without a key before a plan is judged
_SEVERITY = {"error": 1, "warning": 2, "info": 3}
_KINDS = {"module": 9, "word": 14, "value": 12, "class": 7, "file": 17}
_SYMBOLS = {"Header": 2, "Section": 3, "Block": 19, "When": 19, "Rule": 12, "Style": 5}
_VARIABLE = 13  # in the protocol's list of kinds, as those above


class Server:
    """The open plans, each judged when it was changed and something is asked.

    Args:
        ls: the protocol's side.
    """

    def __init__(self, ls: Any) -> None:
        self.ls = ls
        self.models = Models()
        self.known: dict[str, tuple[Any, Judged]] = {}
        self.lock = asyncio.Lock()

    # Texts and places

    def path(self, uri: str) -> Path:
        parts = urlparse(uri)
        return Path(unquote(parts.path)) if parts.scheme == "file" else Path.cwd() / "untitled.plan"

    def text(self, uri: str) -> str:
        return str(self.ls.workspace.get_text_document(uri).source)

    def offset(self, uri: str, at: Any) -> int:
        """The protocol counts UTF-16 units of a line, unless the editor asks for others."""
        lines = self.text(uri).split("\n")
        codec, line, column = self.ls.workspace.position_codec, lines[at.line], 0
        while column < len(line) and codec.client_num_units(line[:column]) < at.character:
            column += 1
        return sum(len(before) + 1 for before in lines[: at.line]) + column

    def range(self, span: Span) -> Any:
        codec = self.ls.workspace.position_codec
        ends = []
        for offset in (span.start, span.end):
            line, column = span.source.position(offset)
            before = span.source.line(line)[: column - 1]
            ends.append(lsp.Position(line=line - 1, character=codec.client_num_units(before)))
        return lsp.Range(start=ends[0], end=ends[1])

    def location(self, span: Span) -> Any:
        return lsp.Location(uri=place_of(span.source).as_uri(), range=self.range(span))

    # Judging

    async def judged(self, uri: str) -> Judged:
        """The plan as it is now. Building a model's table for the first time takes seconds, so it
        happens beside what the protocol does.
        """
        async with self.lock:
            texts = {uri: doc.source for uri, doc in self.ls.workspace.text_documents.items()}
            if uri not in self.known or self.known[uri][0] != texts:
                real = {os.path.realpath(self.path(u)): t for u, t in texts.items()}
                found = await asyncio.to_thread(judge, self.path(uri), real, self.models)
                self.known[uri] = (texts, found)
            return self.known[uri][1]

    async def changed(self, params: Any) -> None:
        """Publishes what is found in all open plans: they may extend the one that changed."""
        version = self.ls.workspace.get_text_document(params.text_document.uri).version
        await asyncio.sleep(_PAUSE)
        documents = self.ls.workspace.text_documents
        now = documents.get(params.text_document.uri)
        if now is None or now.version != version:
            return
        for uri in list(documents):
            found = (await self.judged(uri)).findings
            self._publish(uri, [self._diagnostic(finding) for finding in found])

    async def saved(self, params: Any) -> None:
        """Files that are not open may have changed: other plans, pyproject.toml, a model."""
        self.known.clear()
        await self.changed(params)

    def closed(self, params: Any) -> None:
        self.known.pop(params.text_document.uri, None)
        self._publish(params.text_document.uri, [])

    def _publish(self, uri: str, found: list[Any]) -> None:
        params = lsp.PublishDiagnosticsParams(uri=uri, diagnostics=found)
        self.ls.text_document_publish_diagnostics(params)

    def _diagnostic(self, finding: Diagnostic) -> Any:
        first, *others = finding.labels
        notes = [*(f"fact: {f}" for f in finding.facts), f"help: {finding.help}"]
        related = [
            lsp.DiagnosticRelatedInformation(
                location=lsp.Location(
                    uri=place_of(la.span.source).as_uri(), range=self.range(la.span)
                ),
                message=la.text or finding.message,
            )
            for la in others
            if not la.span.source.argument
        ]
        return lsp.Diagnostic(
            range=self.range(first.span),
            severity=lsp.DiagnosticSeverity(_SEVERITY[finding.severity]),
            code=finding.code,
            source="planc",
            message="\n".join([finding.message, *(n for n in notes if n != "help: None")]),
            related_information=related,
        )

    # Requests

    async def hover(self, params: Any) -> Any:
        uri = params.text_document.uri
        found = hover.hover(await self.judged(uri), self.offset(uri, params.position))
        if found is None:
            return None
        content = lsp.MarkupContent(kind=lsp.MarkupKind.Markdown, value=found[0])
        return lsp.Hover(contents=content, range=self.range(found[1]))

    async def completion(self, params: Any) -> Any:
        uri = params.text_document.uri
        text, offset = self.text(uri), self.offset(uri, params.position)
        typed, items = completion.complete(await self.judged(uri), text, offset)
        place = self.range(Source("", text).span(offset - len(typed), offset))
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
        uri = params.text_document.uri
        found = navigation.definition(await self.judged(uri), self.offset(uri, params.position))
        return self.location(found) if found else None

    async def symbols(self, params: Any) -> Any:
        return self._symbols((await self.judged(params.text_document.uri)).own.statements)

    def _symbols(self, nodes: Iterable[Any]) -> list[Any]:
        found = []
        for node in nodes:
            name, inside = navigation.outlined(node)
            if name:
                place = self.range(node.origin)
                kind = lsp.SymbolKind(_SYMBOLS.get(type(node).__name__, _VARIABLE))
                inner = self._symbols(inside)
                found.append(lsp.DocumentSymbol(name, kind, place, place, children=inner))
        return found

    def formatting(self, params: Any) -> Any:
        """None for a plan that does not parse: its findings say why."""
        source = Source("the plan", self.text(params.text_document.uri))
        text = formatted(source, Sink())
        if text is None or text == source.text:
            return None
        return [lsp.TextEdit(range=self.range(source.span(0, len(source.text))), new_text=text)]

    async def actions(self, params: Any) -> Any:
        """The corrections that `planc check --fix` makes, on the lines that are asked for."""
        uri = params.text_document.uri
        found = []
        for finding in (await self.judged(uri)).findings:
            place = self.range(finding.labels[0].span)
            asked = params.range.start.line <= place.end.line
            if finding.edit is None or not asked or place.start.line > params.range.end.line:
                continue
            span, meant = finding.edit
            edit = lsp.TextEdit(range=self.range(span), new_text=meant)
            found.append(
                lsp.CodeAction(
                    title=f"change `{span.text}` to `{meant}`",
                    kind=lsp.CodeActionKind.QuickFix,
                    diagnostics=[self._diagnostic(finding)],
                    edit=lsp.WorkspaceEdit(changes={uri: [edit]}),
                    is_preferred=True,
                )
            )
        return found

    def initialized(self, _: Any) -> None:
        """Names in a plan and in pyproject.toml are those of `planc` in the editor's folder."""
        if self.ls.workspace.root_path:
            os.chdir(self.ls.workspace.root_path)


def serve() -> None:
    """Answers an editor over standard input and output, until it ends."""
    ls = LanguageServer("planc", planc.__version__)
    server = Server(ls)
    triggers = lsp.CompletionOptions(trigger_characters=[".", "$", "<", "{", ",", '"'])
    for name, answer, options in (
        (lsp.INITIALIZED, server.initialized, None),
        (lsp.TEXT_DOCUMENT_DID_OPEN, server.changed, None),
        (lsp.TEXT_DOCUMENT_DID_CHANGE, server.changed, None),
        (lsp.TEXT_DOCUMENT_DID_SAVE, server.saved, None),
        (lsp.TEXT_DOCUMENT_DID_CLOSE, server.closed, None),
        (lsp.TEXT_DOCUMENT_HOVER, server.hover, None),
        (lsp.TEXT_DOCUMENT_COMPLETION, server.completion, triggers),
        (lsp.TEXT_DOCUMENT_DEFINITION, server.definition, None),
        (lsp.TEXT_DOCUMENT_DOCUMENT_SYMBOL, server.symbols, None),
        (lsp.TEXT_DOCUMENT_FORMATTING, server.formatting, None),
        (lsp.TEXT_DOCUMENT_CODE_ACTION, server.actions, None),
    ):
        ls.feature(name, options)(partial(answer))  # a method cannot be marked
    ls.start_io()
