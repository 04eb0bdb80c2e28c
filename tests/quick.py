"""`make quick`: what a change of syntax, plan, checks or lowering needs; torch is never imported.

Run as a script, it reads the shipped models into the cache that these tests begin with; the first
time that takes transformers.
"""

import os
import re
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from planc.diagnostic import Sink
from planc.model.config import shipped_models
from planc.model.load import load

CACHE = Path(__file__).parent.parent / "build" / "quick"
FILES = (
    "test_architecture",
    "test_diff",
    "test_elaborate",
    "test_format",
    "test_fsdp",
    "test_grammars",
    "test_lowered_json",
    "test_parse",
    "test_report",
    "test_text",
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
    "settings: Former names",  # of a pipeline too
    "timetables:",
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
    """Whether a test needs no torch: of the examples, those that ask for structure alone, of
    shipped models.
    """
    if any(part in item.name for part in NEED_TORCH):
        return False
    if item.path.stem != "test_specs":
        return item.path.stem in FILES
    if not hasattr(item, "callspec"):
        return True
    page, number = item.callspec.params["page"], item.callspec.params["number"]
    section = re.split(r"^(?=## )", page.read_text(), flags=re.M)[number]
    return all(map(_structural, _COMMAND.findall(section)))


def _structural(command):
    words = command.split()
    reads = words[0] in _READS or (words[0] == "check" and "--level structure" in command)
    return reads and (len(words) < 2 or words[1] in shipped_models())


def main():
    os.environ["PLANC_CACHE_DIR"] = str(CACHE)
    for model in shipped_models():
        load(model, Sink())


if __name__ == "__main__":
    main()
