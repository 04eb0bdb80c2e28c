"""What a proof found, as a JSON document, and where it is kept; imports no torch.

The document's schema is `grammars/certificate.schema.json`. In planc's cache folder it is named by
what it speaks of: the lowered plan, the model's configuration, and what ran it: the versions of the
libraries and planc's own sources. So `planc check` finds it again, and another torch makes it void.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Mapping
from typing import Any

from planc import atomic_write
from planc.model import cache
from planc.trial.source_digest import source_digest

FORMAT_VERSION = 1

Certificate = dict[str, Any]


def key_of(lowered: str, config: Mapping[str, Any]) -> str:
    """The name of a certificate.

    Args:
        lowered: the digest of the lowered plan, for the real model.
        config: the real model's configuration.
    """
    own = {"certificate": FORMAT_VERSION, "planc": source_digest(), "lowered": lowered}
    text = json.dumps(own)
    return hashlib.sha256(f"{text}\n{cache.key_of(dict(config))}".encode()).hexdigest()


def dumps(certificate: Certificate) -> str:
    return f"{json.dumps(certificate, indent=2)}\n"


def keep(certificate: Certificate, key: str) -> None:
    """Puts it into the cache folder; where that can't be written, `check` will not know of it."""
    with contextlib.suppress(OSError, RuntimeError):
        home = cache.folder()
        home.mkdir(parents=True, exist_ok=True)
        atomic_write.write(home / f"verify-{key}.json", dumps(certificate))


def known(lowered: str, config: Mapping[str, Any]) -> Certificate | None:
    """The certificate of this lowered plan for this model under these versions, if there is one."""
    try:
        path = cache.folder() / f"verify-{key_of(lowered, config)}.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        sound = found["format_version"] == FORMAT_VERSION and found["lowered"] == lowered
        sound = sound and found["verdict"] in ("verified", "refuted") and summary(found) != ""
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if sound else None


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
    """An error as people write it: `3e-7`; a missing or endless one in words."""
    if error >= 1e9:
        return "not comparable"
    if error == 0:
        return "0"
    mantissa, exponent = f"{error:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}" if error < 1e-2 else f"{error:.2g}"


def versions(config: Mapping[str, Any]) -> dict[str, str]:
    """What ran a proof of a model of this configuration."""
    import planc

    own = {"planc": planc.__version__, "python": platform.python_version()}
    return {**own, **cache.versions(config)}
