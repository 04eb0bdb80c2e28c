"""The cache of model facts: built once with transformers, read back without.

An entry is a JSON file named by the digest of all that it depends on, and it carries the digest of
its own content. What is truncated, foreign, stale or damaged is simply not there; a folder that
can't be written is no cache. Writing is a rename, so two processes never see half an entry.
"""

from __future__ import annotations

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

_FORMAT = 5
"""Counts the changes of what `planc.model.module_table` records and of how it is written here."""


def folder() -> Path:
    """Where entries live: `PLANC_CACHE_DIR`, else `planc` in the user's cache folder."""
    own = os.environ.get("PLANC_CACHE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "planc"


def key_of(config: dict[str, Any]) -> str:
    """The name of a configuration's entry: its content and the versions that read it."""
    return entry_name(
        f"facts {_FORMAT}", json.dumps(config, sort_keys=True), *extra_versions(config)
    )


def extra_versions(config: Mapping[str, Any]) -> list[str]:
    """The version of the library that a configuration needs beside those that all do."""
    return [f"diffusers {version('diffusers')}"] if is_diffusers(config) else []


def entry_name(*parts: str) -> str:
    """The name of an entry that depends on these texts, on Python, torch and transformers."""
    own = [
        parts[0],
        f"python {sys.version_info[0]}.{sys.version_info[1]}",
        *(f"{name} {version(name)}" for name in ("torch", "transformers")),
        *parts[1:],
    ]
    return hashlib.sha256("\n".join(own).encode()).hexdigest()


def version(package: str) -> str:
    """The version of an installed package, from the name of its metadata's folder.

    `importlib.metadata` says the same, and importing it costs a fifth of a warm check.
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
    """The versions of the packages that decide what a model is and how it runs."""
    names = ("torch", "transformers", *(("diffusers",) if is_diffusers(config) else ()))
    return {name: version(name) for name in names}


def read(key: str, *, config_name: str, stated_fields: frozenset[str]) -> Facts | None:
    """The facts of an entry, or None where there is no sound one."""
    try:
        return _decode(recall(key), config_name, stated_fields)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None  # whatever is wrong with it, the facts are built anew


def write(key: str, facts: Facts) -> None:
    """Stores facts under a key; does nothing where the folder can't be written."""
    keep(key, _encode(facts))


def recall(key: str) -> Any:
    """The data of an entry, or None where there is none that is whole and its own."""
    try:
        digest, _, body = (folder() / f"{key}.json").read_text(encoding="utf-8").partition("\n")
        if hashlib.sha256(f"{key}{body}".encode()).hexdigest() != digest:
            return None
        return json.loads(body)
    except (OSError, RuntimeError, ValueError):
        return None


def keep(key: str, data: Any) -> None:
    """Stores plain data under a key; does nothing where the folder can't be written."""
    body = json.dumps(data, separators=(",", ":"))
    digest = hashlib.sha256(f"{key}{body}".encode()).hexdigest()
    with contextlib.suppress(OSError, RuntimeError):
        home = folder()
        home.mkdir(parents=True, exist_ok=True)
        atomic_write.write(home / f"{key}.json", f"{digest}\n{body}")


def _encode(facts: Facts) -> dict[str, Any]:
    """Facts as plain data; each distinct module once, children before parents."""
    modules: list[Any] = []
    known: dict[int, int] = {}

    def add(module: Module) -> int:
        if id(module) not in known:
            children = [
                [add(c.module), c.name, None if c.indices is None else hex(c.indices.bits)]
                for c in module.children
            ]
            own = [
                [p.name, p.shape, p.dtype, p.trainable, p.keep_in_fp32] for p in module.parameters
            ]
            modules.append([module.cls, module.kind, own, module.facts, children])
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
    for cls, kind, own, facts, children in data["modules"]:
        modules.append(
            Module(
                cls=cls,
                kind=kind,
                parameters=tuple(Parameter(n, tuple(s), d, t, i) for n, s, d, t, i in own),
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
