"""Selects the tests of a run by their recorded cost.

`tests/costs.json` contains the seconds of each slow test, as `make costs` recorded them. A test
that it does not name is fast, or new, and always runs. Of the slow tests a run selects

- a quarter, by a hash of the test's name and the number of commits, so that four commits in a
  row run all tests;
- the tests of what the last commit or the working tree changes: a file in `planc/NAME/` selects
  the tests in `tests/NAME/`, and the files of tests that import it; a changed Python
  module below `tests/` selects itself and the files that import it, directly or not, a
  specification selects `test_specs.py`, and any other file the tests in its folder;
- the tests that failed in the last run.

`pytest --full` (`make test FULL=1`) selects all tests. So does a run outside of a git checkout,
and a run that names files or tests.
"""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from folders import NESTED, ROOT, TESTS

COSTS = TESTS / "costs.json"
LEFT_OUT = ROOT / "build" / "left-out.txt"
"""The file with the slow tests that the last run left out, one id a line."""
SLOW = 0.5
"""Seconds from which a test is slow."""
TURNS = 4
"""Number of commits in a row that run all tests."""
_FROM_PLANC = re.compile(r"^\s*(?:from|import) planc\.([\w.]+)(?: import (.*))?", re.M)
_MODULES = re.compile(r"^\s*(?:from|import) (\w+)|\"(\w+)\.\w+\"", re.M)


def slow_tests():
    """The seconds of each slow test, by its id."""
    return json.loads(COSTS.read_text())


def write_costs(seconds):
    """Replaces the recorded costs by those of one full run, given by test id."""
    slow = {name: round(cost, 1) for name, cost in sorted(seconds.items()) if cost >= SLOW}
    COSTS.write_text(json.dumps(slow, indent=0) + "\n")


def turn_of(name):
    """The turn, from 0 to `TURNS - 1`, in which a slow test runs."""
    return int(hashlib.sha1(name.encode()).hexdigest(), 16) % TURNS


def git_lines(*words):
    """The lines that a git command prints, or None if it fails."""
    try:
        run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return run.stdout.splitlines() if run.returncode == 0 else None


def current_turn():
    """The turn of this checkout, or None outside of a git checkout."""
    count = git_lines("rev-list", "--count", "HEAD")
    return int(count[0]) % TURNS if count else None


def changed_files():
    """Paths that the last commit or the working tree changes."""
    listings = (
        git_lines("diff", "--name-only", "HEAD~1"),
        git_lines("ls-files", "--others", "--exclude-standard"),
    )
    return {path for lines in listings for path in lines or ()}


def tests_of(changed):
    """Paths of the test files to which a change belongs.

    Args:
        changed: paths of the change, relative to the checkout.
    """
    folders, modules, changed_code = set(), set(), set()
    for path in map(Path, changed):
        place, *inside = path.with_suffix("").parts
        if place == "tests" and path.suffix == ".py":
            modules.add(path.stem)
        elif place == "tests" and path.suffix == ".md":
            modules.add("test_specs")
        elif place in ("planc", "tests"):
            folders.add(_folder(inside))
        if place == "planc":
            changed_code.add(".".join(inside).removesuffix(".__init__"))
    sources = {path: path.read_text() for path in TESTS.rglob("*.py")}
    imports = {path: _modules_of(source) for path, source in sources.items()}
    before = None
    while before != modules:
        before = set(modules)
        modules |= {path.stem for path, names in imports.items() if modules & names}
    selected = set()
    for test, source in sources.items():
        if not test.name.startswith("test_"):
            continue
        used = {part for match in _FROM_PLANC.finditer(source) for part in _names(match)}
        inside = _folder(test.relative_to(TESTS).parts) in folders
        if inside or test.stem in modules or changed_code & used:
            selected.add(str(test.relative_to(ROOT)))
    return selected


def _modules_of(source):
    """Modules that a file imports, or names with a function that ranks call, `"jobs.train"`."""
    return {match[1] or match[2] for match in _MODULES.finditer(source)}


def _names(match):
    """The module of an import, and each name that it takes from it, which may be a module."""
    return [match[1], *(f"{match[1]}.{name}" for name in re.findall(r"\w+", match[2] or ""))]


def _folder(parts):
    """The folder of a file or module, such as `checks` or `tools/init`, below planc/ or tests/."""
    return tuple(parts[: 2 if parts[0] in NESTED else 1])


def left_out(names, *, turn, slow, changed, failed):
    """The slow tests that a run of this turn does not select.

    Args:
        names: ids of the collected tests, `tests/test_x.py::test_y[case]`.
        turn: the turn of the checkout, from 0 to `TURNS - 1`.
        slow: ids of the slow tests.
        changed: paths of the test files to which the change belongs.
        failed: ids of the tests that failed in the last run.
    """
    return [
        name
        for name in names
        if name in slow
        and turn_of(name) != turn
        and name not in failed
        and name.partition("::")[0] not in changed
    ]
