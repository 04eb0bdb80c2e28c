"""Which keys of a peer's files a plan takes over, and why the others are left.

The tables are data: `grammars/import` has a file for each library.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from planc.resources import GRAMMARS

NAMES = (
    "accelerate",
    "axolotl",
    "automodel",
    "torchtitan",
    "transformers",
    "deepspeed",
    "megatron",
)


def table(name: str) -> dict[str, Any]:
    """One file of tables."""
    return tomllib.loads((GRAMMARS / "import" / f"{name}.toml").read_text(encoding="utf-8"))


LEFT: dict[str, str] = table("reasons")["left"]
"""Why a key is no part of a plan, by the word that the tables use."""
LOST: dict[str, str] = table("reasons")["lost"]
"""Why a plan cannot say what a key does, likewise."""


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
        keys: patterns of keys, by what becomes of them: a setting of `planc.importing.settings`, or
            a word of LEFT or LOST. `*` stands for any text, and a pattern covers what is below its
            keys. Of several that match, the longest decides.
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

    def meaning(self, path: str) -> str | None:
        """What becomes of a key: the word of the key itself, or of the longest pattern."""
        path = re.sub(*self.rename, path)
        table = ((p, word) for word, patterns in self.keys.items() for p in patterns.split())
        found = [(p == path, len(p), word) for p, word in table if matches(p, path)]
        return max(found)[2] if found else None

    def misspelled(self, path: str) -> str | None:
        """The key of a setting that a key seems to mean, which only a pattern with `*` covers."""
        path = re.sub(*self.rename, path)
        covered = {p for patterns in self.keys.values() for p in patterns.split()}
        if any("*" not in p and matches(p, path) for p in covered):
            return None
        last = path.rpartition(".")[2]
        settings = [w for w in self.keys if w not in LEFT and w not in LOST]
        known = {p.rpartition(".")[2]: p for w in settings for p in self.keys[w].split()}
        close = get_close_matches(last, [k for k in known if "*" not in k], n=1, cutoff=0.9)
        return close[0] if close and close[0] != last else None

    def marks(self, paths: tuple[str, ...]) -> int:
        """The number of patterns among the signs that one of the keys matches."""
        return sum(any(matches(p, path) for path in paths) for p in self.signs.split())


@cache
def peers() -> dict[str, Peer]:
    """All libraries by name."""
    return {name: Peer(name=name, **table(name)) for name in NAMES}


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern covers a key: the key itself, or one above it; `KEY$` is the key alone."""
    return bool(_compiled(pattern).match(path))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    signs = re.escape(pattern).replace(r"\*", ".*").replace(r"\$", "$")
    return re.compile(signs + r"(?=[.\[]|$)", re.DOTALL)
