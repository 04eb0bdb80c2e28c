"""A pack: what a full install knows of models and plans, for a machine without torch.

A pack is one JSON file (`grammars/pack.schema.json`) with the facts of models, the verdicts of
layout flow and of `planc verify`, each under its key in the cache, and the versions that these keys
depend on.

The key of a verdict is a digest of the configuration, the small lowered plan, planc's own sources,
and the versions of Python, torch and transformers. A machine without torch computes it again, so it
finds a verdict only for the very configuration, plan and planc that it has itself. It takes the
versions from the pack, and cannot check that a verdict was truly reached: a pack is to be trusted
as the machine that wrote it is.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planc.diagnostics.diagnostic import Sink, io_reason
from planc.files.resources import GRAMMARS, cache_folder
from planc.files.version import VERSION
from planc.model import cache, dataflow
from planc.model.config import too_deep
from planc.model.facts import Module
from planc.simulate import certificate
from planc.simulate.certificate import source_digest
from planc.simulate.outcome import LIMIT, outcome_of

FORMAT_VERSION = 1
MOST_BYTES = 64 * 2**20
_MOST_MODULES = 200_000
KINDS = ("facts", "flow", "dataflow")
"""The kinds of entries that `planc check` reads; what `planc apply` and estimates read stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """The content of a pack, as in the file."""

    document: dict[str, Any]

    def __str__(self) -> str:
        """Two lines: what it has, and what made it."""
        of, entries = self.document["made_with"], self.document["entries"].values()
        kinds = Counter(_kind(entry["kind"]) for entry in entries)
        said = Counter(e["data"]["verdict"] for e in entries if _kind(e["kind"]) == "flow")
        said.update(stored["verdict"] for stored in self.document["certificates"].values())
        counts = ", ".join(f"{count} {word}" for word, count in sorted(said.items()))
        versions = ", ".join(f"{name} {version}" for name, version in of.items())
        return (
            f"facts of {kinds['facts']} models, small ones too; runs: {counts or 'none'}\n"
            f"made with planc {self.document['planc']}, {versions}"
        )


def collect_pack() -> Pack:
    """The cache entries for the installed versions; without torch, those of the unpacked pack."""
    others = {n: v for n in cache.OTHERS if (v := cache.version(n)) != "none"}
    of, sources, wanted = cache.environment() | others, source_digest(), cache.key_versions()
    entries, certificates = {}, {}
    for key, about, data in cache.entries():
        current = wanted.items() <= about.items() and about["sources"] in ("", sources)
        if current and _kind(about["kind"]) in KINDS:
            entries[key] = {"kind": about["kind"], "sources": about["sources"], "data": data}
    for path in sorted(cache.home().glob("verify-*.json")):
        stored = certificate.read(path)
        if stored and stored["versions"].items() >= cache.versions({}).items():
            certificates[path.stem.removeprefix("verify-")] = stored
    return Pack(
        document={
            "format_version": FORMAT_VERSION,
            "planc": VERSION,
            "sources": sources,
            "made_with": of,
            "entries": entries,
            "certificates": certificates,
        }
    )


def dumps(pack: Pack) -> str:
    """The text of a pack, with one line for each entry, so that git shows what changes."""
    head = {k: v for k, v in pack.document.items() if k not in _LISTS}
    texts = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    for name in _LISTS:
        listed = (
            f"  {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}"
            for key, value in sorted(pack.document[name].items())
        )
        texts.append(f' "{name}": {{\n' + ",\n".join(listed) + "\n }")
    return "{\n" + ",\n".join(texts) + "\n}\n"


_LISTS = ("entries", "certificates")


def read(path: str, sink: Sink) -> Pack | None:
    """The pack in a file, or None after PL761; PL762 where another planc has made its verdicts."""
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except OSError as error:
        sink.error("PL761", f"cannot read {path}: {io_reason(error)}")
        return None
    try:
        if len(data) > MOST_BYTES:
            raise ValueError(f"it is larger than {MOST_BYTES:,} bytes")
        document = json.loads(data)
        problem = next(_problems(document), "")
    except RecursionError:
        problem = "it nests too deep"
    except ValueError as error:  # no JSON, or no UTF-8
        problem = str(error)
    if problem:
        message = f"{path} is no pack that this planc reads, or it is damaged: {problem}"
        sink.error("PL761", message, help="write it again with `planc cache pack`")
        return None
    return _current(Pack(document=document), path, sink)


def _current(pack: Pack, path: str, sink: Sink) -> Pack:
    """Without what another planc has made."""
    document = pack.document
    entries = document["entries"]
    kept = {k: e for k, e in entries.items() if e["sources"] in ("", source_digest())}
    certificates = document["certificates"] if document["sources"] == source_digest() else {}
    stale = len(entries) - len(kept) + len(document["certificates"]) - len(certificates)
    if stale:
        sink.warning(
            "PL762",
            f"{stale} verdicts in {path} are of another planc ({document['planc']}) than this one "
            f"({VERSION}), and are left out",
            help="pack again with the planc that reads the pack",
        )
    return Pack(document=document | {"entries": kept, "certificates": certificates})


def _problems(document: Any) -> Iterator[str]:
    """Yields why a document is no pack: its form first, then entries that no planc has written."""
    import jsonschema  # slow to import, and only needed to read

    if too_deep(document):
        yield "it nests too deep"
        return

    def against(schema: str, part: Any, at: str) -> Iterator[str]:
        form = json.loads((GRAMMARS / f"{schema}.schema.json").read_text(encoding="utf-8"))
        for error in jsonschema.Draft202012Validator(form).iter_errors(part):
            path = "/".join(map(str, [at, *error.absolute_path])).strip("/")
            yield f"{path[:120] or 'the top'}: {error.message[:120]}"

    yield from against("pack", document, "")
    for key, stored in document["certificates"].items():
        yield from against("certificate", stored, f"certificates/{key}")
    for key, entry in document["entries"].items():
        kind = _kind(entry["kind"])
        if not _readable(kind, entry["data"]):
            yield f"entries/{key} has no data of the kind {kind}"


def _readable(kind: str, data: Any) -> bool:
    """Whether an entry that has the right form can be read; a proof has the errors of a proof."""
    if kind == "flow":
        outcome = outcome_of(data)
        return outcome is not None and (outcome.verdict != "proved" or outcome.worst <= LIMIT)
    if kind == "dataflow":
        return dataflow.decode(data) is not None
    if kind != "facts":
        return True
    try:
        facts = cache.decode_facts(data)
        if _count(facts.root, {}) > _MOST_MODULES:
            return False
        return all(facts.find(name) for group in facts.ties for name in group)
    except (KeyError, IndexError, ValueError):
        return False


def _count(module: Module, known: dict[int, int]) -> int:
    """The number of places in the tree below a module, which shares equal parts."""
    if id(module) not in known:
        known[id(module)] = 1 + sum(_count(child.module, known) for child in module.children)
    return known[id(module)]


def _kind(text: str) -> str:
    return text.partition(" ")[0]


def install(pack: Pack) -> None:
    """Puts a pack in the place of the one that was unpacked before. Raises OSError."""
    home, made_with = cache_folder(), pack.document["made_with"]
    home.mkdir(parents=True, exist_ok=True)
    new = home / f"{cache.PACK}.{os.urandom(6).hex()}"
    new.mkdir()
    try:
        for key, entry in pack.document["entries"].items():
            keys = cache.without_builds(made_with)
            about = {**made_with, **keys, "kind": entry["kind"], "sources": entry["sources"]}
            text = cache.entry_text(key, about, entry["data"])
            (new / f"{key}.json").write_text(text, encoding="utf-8")
        for key, stored in pack.document["certificates"].items():
            text = certificate.dumps(stored)
            (new / f"verify-{key}.json").write_text(text, encoding="utf-8")
        (new / cache.MADE_WITH).write_text(json.dumps(made_with), encoding="utf-8")
        shutil.rmtree(home / cache.PACK, ignore_errors=True)
        new.rename(home / cache.PACK)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
