"""The verdicts of `planc check` and `planc verify`, found by the digest of the lowered plan.

`planc.apply` asks here whether the plan that it is about to run was proved or refuted. Layout flow
caches its outcomes by the small lowered plan, which only a compilation knows; so `planc check`
writes its verdict again, under a key of the lowered plan itself, the model, the library versions
and planc's own sources. An entry contains the digest of its content: a damaged one counts as
missing, and one that is older than planc's sources is never found. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache as once
from typing import Any, get_args

from planc.model import cache
from planc.model.facts import Facts
from planc.runtime.known_verdict import KnownVerdict, Level
from planc.trial import certificate
from planc.trial.source_digest import PACKAGE

_FORMAT = 1
NEVER = "never proved: run `planc check` with the same model, world size and settings"


def remember(lowered: str, facts: Facts, level: Level, text: str) -> None:
    """Writes the verdict of layout flow; a no-op if the cache folder cannot be written.

    Args:
        lowered: the digest of the lowered plan.
        facts: the model that it was lowered for.
        level, text: of the `KnownVerdict`.
    """
    cache.keep(_key(lowered, facts), {"level": level, "text": text})


def recall(lowered: str, facts: Facts) -> KnownVerdict:
    """What is known of a lowered plan for a model. Real processes overrule the simulation, except
    that a refuted plan stays refuted.
    """
    model = certificate.identity(facts)
    proof = certificate.known(lowered, model)
    if proof and proof["verdict"] == "refuted":
        return KnownVerdict(level="refuted", text=certificate.summary(proof).lower())
    flow = _flow(cache.recall(_key(lowered, facts)))
    if proof and (flow is None or flow.level != "refuted"):
        count = proof["processes"]
        text = f"verified on {count} process{'es' if count != 1 else ''}"
        return KnownVerdict(level="verified", text=text)
    return flow or KnownVerdict(level="unproved", text=NEVER)


def _key(lowered: str, facts: Facts) -> str:
    key = certificate.key_of(lowered, certificate.identity(facts))
    return cache.entry_name(f"verdict {_FORMAT}", key, _all_sources())


def _flow(kept: Any) -> KnownVerdict | None:
    if not isinstance(kept, dict) or set(kept) != {"level", "text"}:
        return None
    level, text = kept["level"], kept["text"]
    known = level in get_args(Level) and level not in ("unproved", "verified")
    return KnownVerdict(level=level, text=text) if known and isinstance(text, str) else None


@once
def _all_sources() -> str:
    """The sha256 of all of planc: from a lowered plan to its small one every stage has a say."""
    found = hashlib.sha256()
    for folder, folders, names in os.walk(PACKAGE):
        folders.sort()
        for name in sorted(n for n in names if n.endswith(".py")):
            found.update(f"{folder.removeprefix(str(PACKAGE))}/{name}\n".encode())
            with open(f"{folder}/{name}", "rb", buffering=0) as stream:  # noqa: PTH123
                found.update(stream.read())
    return found.hexdigest()
