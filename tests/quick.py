"""`make quick`: the tests of syntax, plan, checks and lowering; they never import torch.

Run as a script, it fills the cache with which these tests begin, once with transformers: the facts
of the shipped models, and the data flows that the examples infer layouts from. An example whose
text has not changed since is not played again.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from planc.diagnostics.diagnostic import Sink
from planc.model import cache
from planc.model.config import shipped_models
from planc.model.dataflow import FORMAT
from planc.model.load import load

CACHE = Path(__file__).parent.parent / "build" / "quick"
FILES = (
    "test_architecture",
    "test_compile_ops",
    "test_diff",
    "test_elaborate",
    "test_format",
    "test_frozen_units",
    "test_fsdp",
    "test_grammars",
    "test_lowered_json",
    "test_parse",
    "test_report",
    "test_text",
    "test_words",
)
NEED_TORCH = (
    "of_transformers",  # reads its styles
    "estimate:",  # counts what a layer keeps
    "keeps in float32",  # a class of transformers says it
    "inferred-layouts:",  # records the data flow of a small model
    "knows_its_style_as_written",  # and of stated layouts too
    "prints_as_it_is_written",
    "differ_are_one_set",
    "pipeline:",  # torch's schedules
    "schedule-files:",
    "What a step sends",
)
"""Parts of the names of tests that import torch all the same."""
_COMMAND = re.compile(r"^\$ planc (.*)$", re.M)
_READS = ("lower", "diff", "fmt", "explain", "why")


class NoTorch:
    """Finds torch and transformers, as planc looks for their versions, and refuses to run them."""

    def find_spec(self, name, path=None, target=None):
        if name not in ("torch", "transformers"):
            return None
        found = PathFinder.find_spec(name, path)
        return found and ModuleSpec(name, self, origin=found.origin, is_package=True)

    def create_module(self, spec):
        raise AssertionError(f"{spec.name} is imported, which `make quick` does without")

    exec_module = create_module  # importlib asks for both


def quick(item):
    """Whether a test runs without torch: of the examples, those that ask for structure alone, of
    shipped models.
    """
    if any(part in item.name for part in NEED_TORCH):
        return False
    if item.path.stem != "test_specs":
        return item.path.stem in FILES
    if not hasattr(item, "callspec"):
        return True
    page, number = item.callspec.params["page"], item.callspec.params["number"]
    return runs_without_torch(split_page(page)[number])


def split_page(page):
    """The introduction and the sections of a page of specifications."""
    return re.split(r"^(?=## )", page.read_text(), flags=re.M)


def runs_without_torch(section):
    """Whether each command of a section asks for structure alone, of a shipped model."""
    return all(map(_structural, _COMMAND.findall(section)))


def _structural(command):
    words = command.split()
    reads = words[0] in _READS or (words[0] == "check" and "--level structure" in command)
    return reads and (len(words) < 2 or words[1] in shipped_models())


def main():
    os.environ["PLANC_CACHE_DIR"] = str(CACHE)
    for model in shipped_models():
        load(model, Sink())
    record_flows()


def record_flows():
    """Plays the examples that are new or changed, so that the cache has their data flows."""
    sys.path.insert(0, str(Path(__file__).parent / "support"))
    from folders import FOLDERS

    sys.path.extend(FOLDERS)
    import test_specs

    stamps = CACHE / "played.json"
    known = set(json.loads(stamps.read_text())) if stamps.is_file() else set()
    played = set()
    versions = json.dumps([FORMAT, cache.environment()])
    for example in test_specs.EXAMPLES:
        page, number = example.values
        sections = split_page(page)
        needs_torch = any(part in f"test_example[{example.id}]" for part in NEED_TORCH)
        if needs_torch or not runs_without_torch(sections[number]):
            continue
        text = "\n".join((versions, sections[0], sections[number]))
        stamp = hashlib.sha256(text.encode()).hexdigest()
        played.add(stamp)
        if stamp not in known:
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                test_specs.play(page, number, Path(folder))
    stamps.write_text(json.dumps(sorted(played)))


if __name__ == "__main__":
    main()
