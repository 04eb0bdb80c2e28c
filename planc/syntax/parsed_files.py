"""The ASTs of files that parse without a finding, in the cache folder.

The parser and its library take a third of a warm check; reading an AST back takes a hundredth. An
entry is named by the path of its file, so that a folder of plans has as many entries as plans. It
begins with a digest of its own content, of the text that was parsed, of the grammar and of this
package's sources: a stale or damaged entry counts as missing.
"""

import contextlib
import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source, Span
from planc.files import atomic_write
from planc.files.resources import GRAMMARS, cache_folder
from planc.syntax import ast

_NODES = {c.__name__: c for c in vars(ast).values() if isinstance(c, type)}
_KIND = "node"


def parse_file(source: Source, sink: Sink, path: str | None) -> ast.File:
    """The AST of a text, as `parse` gives it, from the cache if it was parsed before.

    Args:
        path: of its file, absolute and without links; None for a text that no file has.
    """
    if path:
        with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError, TypeError):
            return _read(_entry(path), source)
    from planc.syntax.parse import parse

    file_sink = Sink()
    file = parse(source, file_sink)
    for finding in file_sink:
        sink.add(finding)
    if path and not file_sink.diagnostics:
        _keep(path, file)
    return file


def _entry(path: str) -> Path:
    return cache_folder() / "parsed" / f"{_sha256(path)}.json"


def _read(entry: Path, source: Source) -> ast.File:
    """The AST of an entry. Raises anything where the entry is not that of this text."""

    def node(fields: dict[str, Any]) -> ast.Node:
        kind: type[ast.Node] = _NODES[fields.pop(_KIND)]
        for name, value in fields.items():
            if isinstance(value, list):
                at = name.endswith("origin")
                fields[name] = source.span(*value) if at else tuple(value)
        return kind(**fields)

    digest, _, body = entry.read_text(encoding="utf-8").partition("\n")
    if digest != _digest(source, body):
        raise ValueError(digest)
    file: ast.File = json.loads(body, object_hook=node)
    return file


def _keep(path: str, file: ast.File) -> None:
    """Writes an entry; a no-op if the folder cannot be written."""
    body = json.dumps(file, default=_plain, separators=(",", ":"))
    with contextlib.suppress(OSError, RuntimeError):
        entry = _entry(path)
        entry.parent.mkdir(parents=True, exist_ok=True)
        atomic_write.write(entry, f"{_digest(file.origin.source, body)}\n{body}")


def _plain(part: ast.Node | Span) -> object:
    if isinstance(part, Span):
        return part.start, part.end
    fields = {name: getattr(part, name) for name in part.__dataclass_fields__}
    return {_KIND: type(part).__name__, **fields}


def _digest(source: Source, body: str) -> str:
    return _sha256(f"{_sources()}\n{_sha256(source.text)}\n{body}")


@cache
def _sources() -> str:
    """A digest of what decides an AST besides the text."""
    folder = Path(__file__).parent
    paths = [folder / name for name in sorted(os.listdir(folder)) if name.endswith(".py")]  # noqa: PTH208
    texts = [path.read_text(encoding="utf-8") for path in (GRAMMARS / "plan.lark", *paths)]
    return _sha256("\n".join(texts))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()
