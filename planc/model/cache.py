"""The cache of model facts: a model is built once with transformers and read back afterwards.

An entry is a JSON file named by the digest of everything it depends on, and it contains the digest
of its own content. A truncated, foreign, stale or damaged entry counts as missing; an unwritable
folder disables the cache. An entry is written by renaming a file, so no process reads half of one.
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planc import atomic_write
from planc.model.config import is_diffusers
from planc.model.facts import Child, Facts, Module, Parameter
from planc.model.indices import Indices

_FORMAT = 7
"""Raised when the recorded facts or their encoding change."""


def folder() -> Path:
    """The folder of the entries: `PLANC_CACHE_DIR`, else `planc` in the user's cache folder."""
    chosen = os.environ.get("PLANC_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "planc"


def key_of(config: dict[str, Any]) -> str:
    """The entry name of a configuration: a digest of its content and of the library versions."""
    return entry_name(
        f"facts {_FORMAT}", json.dumps(config, sort_keys=True), *extra_versions(config)
    )


def extra_versions(config: Mapping[str, Any]) -> list[str]:
    """The versions, besides torch and transformers, that a configuration depends on."""
    return [f"diffusers {version('diffusers')}"] if is_diffusers(config) else []


def entry_name(*parts: str) -> str:
    """The name of an entry that depends on these texts and on Python, torch and transformers."""
    texts = [
        parts[0],
        f"python {sys.version_info[0]}.{sys.version_info[1]}",
        *(f"{name} {version(name)}" for name in ("torch", "transformers")),
        *parts[1:],
    ]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def version(package: str) -> str:
    """The version of an installed package, from the name of its metadata folder.

    `importlib.metadata` returns the same, but importing it takes a fifth of a warm check.
    """
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
        return _decode(recall(key), config_name, stated_fields)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None  # a malformed entry counts as missing


def write(key: str, facts: Facts) -> None:
    """Stores facts under a key; a no-op if the folder cannot be written."""
    keep(key, _encode(facts))


def recall(key: str) -> Any:
    """The data of an entry, or None if the entry is missing, damaged or belongs to another key."""
    try:
        digest, _, body = (folder() / f"{key}.json").read_text(encoding="utf-8").partition("\n")
        if hashlib.sha256(f"{key}{body}".encode()).hexdigest() != digest:
            return None
        return json.loads(body)
    except (OSError, RuntimeError, ValueError):
        return None


def keep(key: str, data: Any) -> None:
    """Stores plain data under a key; a no-op if the folder cannot be written."""
    body = json.dumps(data, separators=(",", ":"))
    digest = hashlib.sha256(f"{key}{body}".encode()).hexdigest()
    with contextlib.suppress(OSError, RuntimeError):
        home = folder()
        home.mkdir(parents=True, exist_ok=True)
        atomic_write.write(home / f"{key}.json", f"{digest}\n{body}")


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


def _decode(data: dict[str, Any], config_name: str, stated_fields: frozenset[str]) -> Facts:
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
