"""Reads a peer's files: the keys that a plan takes over, and the reasons to leave the others.

The tables are data: `grammars/import` has a file for each library.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from planc.files.resources import GRAMMARS

NAMES = (
    "accelerate",
    "axolotl",
    "automodel",
    "torchtitan",
    "prime-rl",
    "transformers",
    "trainer",
    "llamafactory",
    "llamafactory_v1",
    "swift",
    "deepspeed",
    "megatron",
    "bridge",
)


@cache
def table(name: str) -> dict[str, Any]:
    """One file of tables."""
    return tomllib.loads((GRAMMARS / "import" / f"{name}.toml").read_text(encoding="utf-8"))


LEFT: dict[str, str] = table("reasons")["left"]
"""Why a key is no part of a plan, by the word that the tables use."""
LOST: dict[str, str] = table("reasons")["lost"]
"""Why no line of a plan says what a key does, where a number may depend on it, likewise."""
COST: dict[str, str] = table("reasons")["cost"]
"""Likewise where time or memory alone depends on it."""
REASONS = LEFT | LOST | COST
_CHANGING: dict[str, str] = table("reasons")["changing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """One key of a file that has no keys below it.

    Args:
        path: the keys from the root, joined by dots; `[]` stands for the entries of a list.
        value: what the file gives it: a scalar, a list of scalars, or an empty mapping.
        line: counted from 1, or None where it is unknown.
    """

    path: str
    value: Any
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One library whose configuration planc reads.

    Args:
        name, title: the word of `--from`, and its name in comments and messages.
        suffixes: of its files; an empty one stands for any text of arguments.
        signs: keys by which its files are recognized, as patterns.
        keys: patterns of keys, by what becomes of them: a setting of
            `planc.tools.importers.settings`, or a word of REASONS. `*` stands for any text, and a
            pattern covers what is below its keys. Of several that match, the longest decides.
        same_words: whether `_` and `-` are one letter in its keys.
        tables_on: whether a table that is there switches on what it is named after.
        note: for the header of each plan.
        absent: settings that the library assumes where the file does not have them.
        rename: a regular expression and its replacement, applied to each key first.
        exact: whether its word for the model is a `model_type`.
        model_file: keys of which a model's own configuration has one; all keys of such a file that
            no pattern covers are the model's.
    """

    name: str
    title: str
    suffixes: list[str]
    signs: str
    keys: Mapping[str, str]
    absent: Mapping[str, object]
    rename: tuple[str, str] = ("$^", "")
    exact: bool = False
    model_file: str = ""
    same_words: bool = False
    tables_on: bool = False
    note: str = ""

    def meaning(self, path: str) -> str | None:
        """The word for a key in the table: of the key itself, or of the longest pattern."""
        paths = self._spellings(path)
        table = ((p, word) for word, patterns in self.keys.items() for p in patterns.split())
        matching_patterns = [
            (p in paths, len(p), word) for p, word in table if any(matches(p, at) for at in paths)
        ]
        word = max(matching_patterns)[2] if matching_patterns else None
        return _changing(path) or word if word in REASONS and word != "optimizer" else word

    def spelling(self, path: str) -> str:
        """The key as the table has it."""
        return re.sub(self.rename[0], self.rename[1], path)

    def _spellings(self, path: str) -> tuple[str, ...]:
        """The key as the table may have it."""
        path = self.spelling(path)
        return (path, path.replace("_", "-")) if self.same_words else (path,)

    def suggest_key(self, path: str) -> str | None:
        """The key of a setting that a key seems to mean, which only a pattern with `*` covers."""
        paths = self._spellings(path)
        covered = {p for patterns in self.keys.values() for p in patterns.split()}
        if any("*" not in p and matches(p, at) for p in covered for at in paths):
            return None
        last = paths[-1].rpartition(".")[2]
        settings = [w for w in self.keys if w not in REASONS]
        known = {p.rpartition(".")[2]: p for w in settings for p in self.keys[w].split()}
        close = get_close_matches(last, [k for k in known if "*" not in k], n=1, cutoff=0.9)
        return close[0] if close and close[0] != last else None

    def marks(self, paths: tuple[str, ...]) -> int:
        """The number of patterns among the signs that one of the keys matches."""
        known = {at for path in paths for at in (path, *self._spellings(path))}
        return sum(any(matches(p, path) for path in known) for p in self.signs.split())


@cache
def peers() -> dict[str, Peer]:
    """All libraries by name. A table with `like` adds to that of another library."""
    return {name: _peer(name) for name in NAMES}


def _peer(name: str) -> Peer:
    fields = dict(table(name))
    if like := fields.pop("like", ""):
        base = table(like)
        keys = {w: f"{base['keys'].get(w, '')} {p}" for w, p in fields["keys"].items()}
        fields = base | fields | {"keys": base["keys"] | keys}
    return Peer(name=name, **fields)


def _changing(path: str) -> str | None:
    """The reason for a key that changes training, whatever table a pattern puts it in."""
    last = path.rpartition(".")[2].replace("-", "_")
    words = (
        w for w, patterns in _CHANGING.items() if any(matches(p, last) for p in patterns.split())
    )
    return next(words, None)


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern covers a key: the key itself, or one above it; `KEY$` is the key alone."""
    return bool(_compile_pattern(pattern).match(path))


@cache
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    signs = re.escape(pattern).replace(r"\*", ".*").replace(r"\$", "$")
    return re.compile(signs + r"(?=[.\[]|$)", re.DOTALL)
