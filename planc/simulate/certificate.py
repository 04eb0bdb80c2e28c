"""The certificate of a proof: a JSON document and its place in the cache; imports no torch.

Its schema is `grammars/certificate.schema.json`. The file name in planc's cache folder is a digest
of what it certifies: the lowered plan, the model's configuration, the library versions and planc's
own sources. `planc check` finds it by that name, and a new torch invalidates it.
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from planc.files.version import VERSION
from planc.model import cache
from planc.model.facts import Facts, Module
from planc.ops.lowered import Lowered

PACKAGE = Path(__file__).parent.parent
_OF_PLANS = ("ir/mesh_axes.py", "ir/stand_in.py", "ir/unit_lists.py")
SOURCES = (
    "compat",
    "model",
    "ops",
    "proxy",
    *_OF_PLANS,
    "proof",
    "runtime",
    "sections",
    "simulate",
)
"""Folders and files of the package that build and run proxy models and judge the runs."""


@functools.cache
def source_digest() -> str:
    """The sha256 of these files, computed once per process; takes about a millisecond."""
    return digest_of(files())


def digest_of(paths: Iterable[str]) -> str:
    """The sha256 of files of the package: of their names and contents."""
    hashed = hashlib.sha256()
    for path in paths:
        hashed.update(f"{path.removeprefix(str(PACKAGE))}\n".encode())
        with open(path, "rb", buffering=0) as stream:  # noqa: PTH123, half the time of pathlib
            hashed.update(stream.read())
    return hashed.hexdigest()


def files(names: Iterable[str] = SOURCES) -> list[str]:
    """The paths of the files in some folders of the package, in a fixed order."""
    places = [f"{PACKAGE}/{name}" for name in names]
    paths = [place for place in places if place.endswith(".py")]
    for place in places:
        for folder, _, inside in os.walk(place):
            paths += [f"{folder}/{name}" for name in inside if name.endswith(".py")]
    return sorted(paths)


FORMAT_VERSION = 1

Certificate = dict[str, Any]


def key_of(lowered: str, config: Mapping[str, Any], packages: Iterable[str] = ()) -> str:
    """The key of a certificate.

    Args:
        lowered: the digest of a lowered plan.
        config: the original configuration of the model.
        packages: the other libraries that the plan uses.
    """
    fields = {"certificate": FORMAT_VERSION, "planc": source_digest(), "lowered": lowered}
    text = json.dumps(fields) + cache.package_versions(packages)
    return hashlib.sha256(f"{text}\n{cache.key_of(dict(config))}".encode()).hexdigest()


def identity(facts: Facts) -> dict[str, Any]:
    """The parts of a model that decide a verdict: its configuration, its modules' classes and
    shapes, and the functions that it runs, where its libraries did not ship them.

    The same for a model that is read from `config.json` and for one that a script built from it, or
    from keywords, of which a configuration names no class.
    """
    config = {k: v for k, v in facts.config.items() if k not in _OF_THE_COPY}
    code = {"planc.code": str(facts.own_code)} if facts.own_code else {}
    structure_of_model = {"architectures": [facts.name], "planc.modules": structure(facts.root)}
    return {**config, **structure_of_model, **code}


def keepable(facts: Facts, lowered: Lowered) -> bool:
    """Whether the key of a verdict says which code is run."""
    named = facts.own_code or not (facts.code or facts.user_model is not None)
    return bool(named) and not lowered.code


def structure(root: Module) -> str:
    """A digest of a module table: names, classes and shapes, not dtypes.

    A model whose modules a script has replaced differs from the one that its configuration names.
    """
    known: dict[int, str] = {}

    def hash_module(module: Module) -> str:
        if id(module) not in known:
            shapes = [(p.name, p.shape) for p in module.parameters]
            inner = [
                (c.name, c.indices and hex(c.indices.bits), hash_module(c.module))
                for c in module.children
            ]
            text = repr((module.cls, module.kind, shapes, module.facts, inner))
            known[id(module)] = hashlib.sha256(text.encode()).hexdigest()
        return known[id(module)]

    return hash_module(root)


_OF_THE_COPY = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Fields of a configuration that say where it comes from, or in which dtype its weights are stored:
proofs run in float32.
"""


def dumps(certificate: Certificate) -> str:
    return f"{json.dumps(certificate, indent=2)}\n"


def keep(certificate: Certificate, key: str) -> None:
    """Writes the certificate to the cache folder; a no-op if the folder cannot be written."""
    cache.write_file(f"verify-{key}.json", dumps(certificate))  # verify, which does, needs torch


def stored_certificate(
    lowered: str, config: Mapping[str, Any], packages: Iterable[str] = ()
) -> Certificate | None:
    """The certificate of this lowered plan for this model with the installed versions, or None."""
    stored = read(cache.home() / f"verify-{key_of(lowered, config, packages)}.json")
    return stored if stored and stored["lowered"] == lowered else None


def read(path: Path) -> Certificate | None:
    """The certificate in a file of the cache, or None if there is no sound one."""
    try:
        certificate: Certificate = json.loads(path.read_text(encoding="utf-8"))
        sound = certificate["format_version"] == FORMAT_VERSION and "lowered" in certificate
        sound = (
            sound
            and certificate["verdict"] in ("verified", "refuted")
            and summary(certificate) != ""
        )
        sound = sound and (
            certificate["verdict"] == "verified" or isinstance(certificate["reason"], str)
        )
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    return certificate if sound else None


def summary(certificate: Certificate) -> str:
    """One line: `Verified on 4 processes: logits 3e-07, gradients 9e-07`."""
    errors = certificate["errors"]
    word = {"verified": "Verified", "refuted": "Refuted"}[certificate["verdict"]]
    count = certificate["processes"]
    verdict = f"{word} on {count} process{'es' if count != 1 else ''}"
    if errors is None:
        return f"{verdict}: {certificate['reason']}"
    numbers = ", ".join(f"{kind} {number(errors[kind])}" for kind in ("logits", "gradients"))
    left = certificate["not_reached"]
    return f"{verdict}: {numbers}" + (f"; not reached: {', '.join(left)}" if left else "")


def number(error: float) -> str:
    """An error in short notation, such as `3e-7`; `not comparable` for an infinite one."""
    if error >= 1e9:
        return "not comparable"
    if error == 0:
        return "0"
    mantissa, exponent = f"{error:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}" if error < 1e-2 else f"{error:.2g}"


def versions(config: Mapping[str, Any]) -> dict[str, str]:
    """The versions that a proof of a model with this configuration depends on."""
    import platform

    known = {"planc": VERSION, "python": platform.python_version()}
    return {**known, **cache.versions(config)}
