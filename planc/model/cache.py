"""The cache of model facts: a model is built once with transformers and read back afterwards.

An entry is a JSON file named by the digest of everything it depends on, and it contains the digest
of its own content. A truncated, foreign, stale or damaged entry counts as missing; an unwritable
folder disables the cache. An entry is written by renaming a file, so no process reads half of one.

Where torch or transformers is not installed, nothing can be built or run. The cache then consists
of the entries of the pack that `planc cache unpack` was given, the versions that keys depend on are
those that the pack states, and nothing is written. Where both are installed, no pack is read.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache as once
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from planc.diagnostics.diagnostic import PlanError, Sink
from planc.files import atomic_write
from planc.files.resources import cache_folder
from planc.model.config import is_diffusers
from planc.model.facts import Child, Facts, Module, Parameter
from planc.model.indices import Indices

_FORMAT = 14
"""Raised when the recorded facts or their encoding change."""

PACK = "pack"
"""The folder, in the cache folder, of the entries of a pack."""
MADE_WITH = "made-with.json"
"""The file, in that folder, with the versions of the machine that packed."""
_VERSIONS = ("python", "torch", "transformers", "diffusers")
OTHERS = ("peft", "bitsandbytes", "torchao")
"""The libraries that a proof runs where the operations of a plan require them."""
_BUILD = re.compile(r"\+(cpu|xpu|cu\d+|rocm[\d.]+)$")
INSTALL = "`pip install planc`, into the environment of this planc, installs what is missing"
UNPACK = f"{INSTALL}; or `planc cache unpack` a pack of an install that has checked it"


@once
def missing() -> tuple[str, ...]:
    """The names of torch and transformers that are not installed; a model can be built if it is
    empty.
    """
    specs = {name: find_spec(name) for name in ("torch", "transformers")}
    return tuple(n for n, spec in specs.items() if spec is None or spec.origin is None)  # a folder


def not_installed() -> str:
    """`torch and transformers are not installed`."""
    return f"{' and '.join(missing())} {'are' if len(missing()) > 1 else 'is'} not installed"


def needs(what: str, package: str) -> str:
    """The message of PL760 for a command, or a function of the API."""
    return f"`{what}` needs {package}, which is not installed"


def require_torch(what: str) -> None:
    """Raises PlanError (PL760) where torch is not installed, for a function of the API."""
    if "torch" in missing():
        sink = Sink()
        sink.error("PL760", needs(what, "torch"), help=INSTALL)
        raise PlanError(sink)


def unproved_reason() -> str:
    """Why nothing is known of a plan where torch is missing."""
    has = "and the unpacked pack has no verdict on it" if made_with() else "and no pack is unpacked"
    return f"{not_installed()}, {has}"


def made_with() -> dict[str, str]:
    """The versions of the machine whose pack is read here; empty where none is."""
    return _made_with(cache_folder() / PACK / MADE_WITH) if missing() else {}


@once
def _made_with(path: Path) -> dict[str, str]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    known = isinstance(stored, dict) and stored.keys() >= set(_VERSIONS)
    return stored if known else {}


def provenance() -> str:
    """The origin of imported verdicts, as a text after the word `proved`; empty if all are of this
    machine.
    """
    of = made_with()
    if not of:
        return ""
    return (
        f" with torch {of['torch']}, transformers {of['transformers']} on the machine that packed"
    )


class Key(str):
    """The name of an entry.

    Attributes:
        about: the kind of the entry, and the versions that it depends on; `sources` is a digest of
            the sources of planc that decide it, empty for facts of a model.
    """

    __slots__ = ("about",)
    about: dict[str, str]


def home() -> Path:
    """The folder of the entries that are read: those of a pack where torch is missing."""
    return cache_folder() / PACK if missing() else cache_folder()


def key_of(config: dict[str, Any]) -> Key:
    """The entry name of a configuration: a digest of its content and of the library versions."""
    return entry_name(f"facts {_FORMAT}", config=config)


def entry_name(
    kind: str, *parts: str, config: Mapping[str, Any] | None = None, sources: str = ""
) -> Key:
    """The name of an entry that depends on these texts and on Python, torch and transformers.

    Args:
        config: the configuration of the model that it is about, if there is one.
        sources: the digest of the sources of planc that decide it.
    """
    of = key_versions()
    if config is not None:
        extra = [f"diffusers {version('diffusers')}"] if is_diffusers(config) else []
        parts = (*parts, json.dumps(config, sort_keys=True), *extra)
    texts = [kind, *(f"{name} {version}" for name, version in of.items()), *parts, sources]
    key = Key(hashlib.sha256("\n".join(texts).encode()).hexdigest())
    key.about = {"kind": kind, **of, "sources": sources}
    return key


def environment() -> dict[str, str]:
    """The versions that every entry depends on, and that of diffusers, which some depend on."""
    return {name: version(name) for name in _VERSIONS}


def key_versions() -> dict[str, str]:
    """The versions in every key, without the build: `2.13.0` of `2.13.0+cpu` and `2.13.0+cu130`.

    Proofs run on the CPU, where the builds of one release compute the same.
    """
    return without_builds(environment())


def without_builds(versions: Mapping[str, str]) -> dict[str, str]:
    """The versions that every key depends on, of those of a machine."""
    return {name: _BUILD.sub("", versions[name]) for name in _VERSIONS[:3]}


def package_versions(packages: Iterable[str]) -> str:
    """` peft 0.18.0`: the versions of other libraries that a plan uses, for a key."""
    return "".join(f" {name} {version(name)}" for name in sorted(packages))


def version(package: str) -> str:
    """The version of an installed package, from the name of its metadata folder, or of Python.

    `importlib.metadata` returns the same, but importing it takes a fifth of a warm check.
    """
    if package in made_with():
        return made_with()[package]
    if package == "python":
        return f"{sys.version_info[0]}.{sys.version_info[1]}"
    for place in sys.path:
        with contextlib.suppress(OSError):
            for name in os.listdir(place or "."):  # noqa: PTH208, twice as fast as pathlib
                if name.startswith(f"{package}-") and name.endswith(".dist-info"):
                    return name.removeprefix(f"{package}-").removesuffix(".dist-info")
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def versions(config: Mapping[str, Any]) -> dict[str, str]:
    """The versions of the packages that determine what a model is and how it runs."""
    names = ("torch", "transformers", *(("diffusers",) if is_diffusers(config) else ()))
    return {name: version(name) for name in names}


def read(key: str, *, config_name: str, stated_fields: frozenset[str]) -> Facts | None:
    """The facts of an entry, or None if there is no valid one."""
    try:
        return decode_facts(recall(key), config_name=config_name, stated_fields=stated_fields)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None  # a malformed entry counts as missing


def write(key: str, facts: Facts) -> None:
    """Stores facts under a key; a no-op if the folder cannot be written."""
    keep(key, _encode(facts))


def recall(key: str) -> Any:
    """The data of an entry, or None if the entry is missing, damaged or belongs to another key."""
    try:
        return _sound(key, (home() / f"{key}.json").read_text(encoding="utf-8"))[1]
    except (OSError, RuntimeError, ValueError):
        return None


def keep(key: str, data: Any) -> None:
    """Stores plain data under a key; a no-op if the folder cannot be written, and where torch is
    missing: what follows from a pack was not found on this machine.
    """
    if not missing():
        write_file(f"{key}.json", entry_text(key, getattr(key, "about", {}), data))


def write_file(name: str, text: str) -> None:
    """Writes a file of the cache folder; a no-op if the folder cannot be written."""
    with contextlib.suppress(OSError, RuntimeError):
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write.write(folder / name, text)


def entry_text(key: str, about: Mapping[str, str], data: Any) -> str:
    """The text of an entry: a digest of all of it, what it is, and the data."""
    texts = (json.dumps(part, separators=(",", ":")) for part in (about, data))
    about_text, body = texts
    return f"{hashlib.sha256(f'{key}{about_text}{body}'.encode()).hexdigest()} {about_text}\n{body}"


def _sound(key: str, text: str) -> tuple[dict[str, str], Any]:
    """The kind of an entry, and its data. Raises ValueError if it is damaged or of another key."""
    head, _, body = text.partition("\n")
    digest, _, about_text = head.partition(" ")
    if hashlib.sha256(f"{key}{about_text}{body}".encode()).hexdigest() != digest:
        raise ValueError(key)
    return json.loads(about_text), json.loads(body)


def entries() -> Iterator[tuple[str, dict[str, str], Any]]:
    """Yields the sound entries that are read here: the key, what it is, and the data."""
    for path in sorted(home().glob("*.json")):
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            yield (path.stem, *_sound(path.stem, path.read_text(encoding="utf-8")))


def _encode(facts: Facts) -> dict[str, Any]:
    """Facts as plain data; each distinct module is written once, children before parents."""
    modules: list[Any] = []
    known: dict[int, int] = {}

    def add(module: Module) -> int:
        if id(module) not in known:
            children = [
                [add(c.module), c.name, None if c.indices is None else hex(c.indices.bits)]
                for c in module.children
            ]
            parameters = [
                [p.name, p.shape, p.dtype, p.trainable, p.keep_in_fp32] for p in module.parameters
            ]
            modules.append([module.cls, module.kind, parameters, module.facts, children])
            known[id(module)] = len(modules) - 1
        return known[id(module)]

    root = add(facts.root)
    return {
        "name": facts.name,
        "family": facts.family,
        "config": facts.config,
        "ties": facts.ties,
        "modules": modules,
        "root": root,
    }


def decode_facts(
    data: dict[str, Any], *, config_name: str = "", stated_fields: frozenset[str] = frozenset()
) -> Facts:
    """The facts of an entry's data. Raises anything at data that no `write` has made."""
    modules: list[Module] = []
    for cls, kind, parameters, facts, children in data["modules"]:
        modules.append(
            Module(
                cls=cls,
                kind=kind,
                parameters=tuple(Parameter(n, tuple(s), d, t, i) for n, s, d, t, i in parameters),
                facts=tuple((n, v) for n, v in facts),
                children=tuple(
                    Child(modules[i], name, None if bits is None else Indices(int(bits, 16)))
                    for i, name, bits in children
                ),
            )
        )
    return Facts(
        name=data["name"],
        family=data["family"],
        config=data["config"],
        config_name=config_name,
        root=modules[data["root"]],
        ties=tuple(tuple(group) for group in data["ties"]),
        stated_fields=stated_fields,
    )
