"""Records of measurements: NAME.json in docs/generated, and NAME.md, the page that shows it.

A target adds its results to the record and writes the page from it, so that results of other
machines, and of parts that did not run this time, stay.
"""

import json
from importlib import metadata

from folders import ROOT

GENERATED = ROOT / "docs" / "generated"


def read_record(name):
    """The record NAME, or {} before its target first ran."""
    path = GENERATED / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_record(name, record, page):
    """Writes a record, and the text of its page."""
    (GENERATED / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (GENERATED / f"{name}.md").write_text(page)


def table(heads, rows):
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def versions():
    """The installed versions of torch and transformers, such as `torch 2.13.0+cpu, ...`."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
