"""A peer's file -> its leaf keys with their values, in the order in which they stand.

The file is a stranger's: nothing of it is executed, and its size, depth and number of keys are
bounded.
"""

import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planc.diagnostics.diagnostic import Sink, first_line, io_reason, one_of
from planc.tools.importers.peer import ConfigKey
from planc.tools.importers.python_config import python_leaves
from planc.tools.importers.shell import ShellReader

_MAX_BYTES, _MAX_KEYS, _MAX_DEPTH = 512 * 1024, 20_000, 40


def text_of(name: str, sink: Sink) -> str | None:
    """The text of a file, or None after PL730."""
    path = Path(name)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(0, "it is not a regular file")
        with path.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise OSError(0, f"it is larger than {_MAX_BYTES:,} bytes")
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except OSError as error:
        reason = io_reason(error)
    except ValueError as error:  # a NUL in the name
        reason = str(error)
    sink.error("PL730", f"cannot read {name}: {reason}")
    return None


def leaves(name: str, text: str, function: str | None, sink: Sink) -> tuple[ConfigKey, ...] | None:
    """The leaf keys of a file, or None after PL731 or PL737.

    Args:
        name: the file; its suffix decides how it is read.
        text: its content.
        function: of a Python file, the function whose configuration is meant.
    """
    kind = Path(name).suffix.lower()
    try:
        if not text.strip():
            raise ValueError("it is empty")
        match kind:
            case ".py":
                return python_leaves(name, text, function, sink)
            case ".json":
                values = json.loads(text, object_pairs_hook=_once)
            case ".toml":
                import tomllib

                values = tomllib.loads(text)
            case ".yaml" | ".yml":
                values = _yaml(text)
            case _:
                return tuple(ShellReader(kind not in (".args", ".txt")).read(text))
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}, not keys with values")
        return tuple(_with_lines(_flat(values, "", 0, [0]), text))
    except (RecursionError, MemoryError):
        problem = "it is nested too deeply"
    except (ValueError, SyntaxError) as error:
        problem = first_line(error)
    sink.error("PL731", f"{name} cannot be read as {kind.lstrip('.') or 'arguments'}: {problem}")
    return None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = [k for k in result if sum(k == other for other, _ in pairs) > 1]
        raise ValueError(f"the key {one_of(map(repr, twice), last='and')} stands twice")
    return result


def _yaml(text: str) -> Any:
    """Safe YAML in which no key stands twice; a tag that names code is an error."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _once(
                [(str(k.value), None) for k, _ in node.value if k.tag != "tag:yaml.org,2002:merge"]
            )
            return super().construct_mapping(node, deep=deep)

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    try:
        return yaml.load(text, Loader) or {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{error.problem}{where}") from None
    except yaml.YAMLError as error:
        raise ValueError(first_line(error)) from None


def _flat(value: Any, path: str, depth: int, count: list[int]) -> Iterator[ConfigKey]:
    """The leaves below a value. Aliases are followed, so both bounds hold for what they repeat."""
    count[0] += 1
    if count[0] > _MAX_KEYS:
        raise ValueError(f"it has more than {_MAX_KEYS:,} keys")
    if depth > _MAX_DEPTH:
        raise RecursionError
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key), depth + 1, count)
    elif isinstance(value, list) and any(isinstance(v, dict | list) for v in value):
        for inner in value:
            yield from _flat(inner, f"{path}[]", depth + 1, count)
    else:
        yield ConfigKey(path=path, value=value)


def _with_lines(keys: Iterator[ConfigKey], text: str) -> Iterator[ConfigKey]:
    """The leaves with the lines of their keys, which stand in the same order in the text."""
    at = 0
    for leaf in keys:
        key = re.escape(re.sub(r"(\[\])+$", "", leaf.path).rpartition(".")[2])
        pattern = rf"""(?m)(?:^|[\s.,{{\["'-]){key}["']?\s*[:=]"""
        place = re.compile(pattern).search(text, at) if key else None
        if place:
            at = place.end()
        line = text.count("\n", 0, at) + 1 if place else None
        yield ConfigKey(path=leaf.path, value=leaf.value, line=line)
