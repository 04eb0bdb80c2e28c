"""`make matrix`: runs the tests with each set of versions, and writes a page of the results.

Each set is a row. Its environment is in build/matrix/NAME, and constraints/NAME.txt pins it. A row
that runs the core tests with the installed torch borrows all other packages of this environment.
The numbers of passed and failed tests are in docs/generated/rows.json, the source of rows.md.

    python tests/compat/matrix.py run torch-2.13-transformers-5.24
    python tests/compat/matrix.py page
    python tests/compat/matrix.py constraints
    python tests/compat/matrix.py names
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
import venv
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from planc.compat.rows import LIBRARIES, ROWS  # noqa: E402


@dataclass(frozen=True)
class Newest:
    """The newest releases of torch and transformers, whatever planc's own bounds are.

    It is allowed to fail, and counts no version as tested.
    """

    name = "newest"
    tests = "core"


ALL = (*ROWS, Newest())
CORE = ROOT / "tests" / "compat" / "core.txt"
RESULTS = ROOT / "docs" / "generated" / "rows.json"
PAGE = ROOT / "docs" / "generated" / "rows.md"
HEAD = """# Versions that planc is tested with

Written by `make matrix`, or `make matrix ROWS=NAME` for one row. Each row is a set of versions,
which `constraints/NAME.txt` pins; `core` is the files in `tests/compat/core.txt`. Where a version
is installed that no row ran with, `planc check` says so ([PL744](../diagnostics/PL744.md)).
`newest` has the newest releases, is allowed to fail, and counts no version as tested.

| row | tests | run on | versions | passed | failed | skipped | minutes |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def constraints_text(row):
    """The pins of a row: those of constraints.txt, but for its own versions."""
    head = f"# The versions of row {row.name}; written by `make pages`."
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()[1:]
    )
    if isinstance(row, Newest):
        free = {*LIBRARIES, "huggingface_hub"}
        pins = {name: version for name, version in pins.items() if name not in free}
    else:
        pins |= row.pins
    return "\n".join([head, *(f"{name}=={version}" for name, version in pins.items())]) + "\n"


def constraints_file(row):
    """The file of a row's pins."""
    return ROOT / "constraints" / f"{row.name}.txt"


def environment(row):
    """The Python of a row's environment, which is made if it is not there."""
    folder = ROOT / "build" / "matrix" / row.name
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists() and borrows(row):
        borrow(row, folder)
        (folder / ".ready").touch()
    if not (folder / ".ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        pins = ["--quiet", "--constraint", constraints_file(row)]
        wanted = [["torch"], ["--editable", f"{ROOT}[dev]"]]
        if isinstance(row, Newest):  # last: pip warns that planc's bounds do not admit them
            wanted.append(["--upgrade", *LIBRARIES])
        for what in wanted:
            subprocess.run([python, "-m", "pip", "install", *pins, *what], check=True)
        (folder / ".ready").touch()
    return python


def borrows(row):
    """Whether a row has the installed torch, and no test that starts an installed script."""
    return row.tests == "core" and row in ROWS and row.torch == release("torch")


def borrow(row, folder):
    """Makes an environment with the packages of this one, but for those of the row."""
    venv.create(folder, clear=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    other = [f"{name}=={pin}" for name, pin in row.pins.items() if release(name) != pin]
    if other:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", site, *other], check=True)
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")


def release(package):
    """The installed version of a package, without the build."""
    return metadata.version(package).partition("+")[0]


def run(row, python, tests):
    """What a run of a row counts: versions, numbers of tests, and the names of those that fail.

    Args:
        tests: `all` or `core`.
    """
    report = ROOT / "build" / "matrix" / f"{row.name}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    chosen = ["--full"] if tests == "all" else CORE.read_text().split()
    settings = {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        "PLANC_CACHE_DIR": str(ROOT / "build" / "matrix" / f"{row.name}-cache"),
    }
    began = time.monotonic()
    command = [python, "-W", "ignore", "-m", "pytest", f"--junitxml={report}", *chosen]
    subprocess.run(list(map(str, command)), cwd=ROOT, env=os.environ | settings, check=False)
    counted = counts(report)
    text = "import importlib.metadata as m; print(*map(m.version, ('torch', 'transformers')))"
    found = subprocess.run([python, "-c", text], capture_output=True, text=True, check=True)
    torch, transformers = found.stdout.split()
    return {
        "tests": tests,
        "date": date.today().isoformat(),
        "torch": torch,
        "transformers": transformers,
        **counted,
        "minutes": round((time.monotonic() - began) / 60),
    }


def counts(report):
    """The numbers of a JUnit report, and the names of the tests that failed."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    kinds = [{child.tag for child in case} for case in cases]
    failed = [
        f"{case.get('classname')}.{case.get('name')}"
        for case, kind in zip(cases, kinds, strict=True)
        if kind & {"failure", "error"}
    ]
    skipped = sum("skipped" in kind for kind in kinds)
    passed = len(cases) - len(failed) - skipped
    return {"passed": passed, "failed": len(failed), "skipped": skipped, "failures": failed}


def page(results):
    """The page of all rows, those that never ran included."""
    lines = []
    for row in ALL:
        found = results.get(row.name)
        if found is None:
            lines.append(f"| {row.name} | {row.tests} | never | | | | | |")
            continue
        versions = f"torch {found['torch']}, transformers {found['transformers']}"
        numbers = " | ".join(str(found[k]) for k in ("passed", "failed", "skipped", "minutes"))
        lines.append(
            f"| {row.name} | {found['tests']} | {found['date']} | {versions} | {numbers} |"
        )
    failures = [
        f"- {name}: `{test}`" for name, found in results.items() for test in found["failures"]
    ]
    told = ["", "## Tests that failed", "", *failures] if failures else []
    return HEAD + "\n".join([*lines, *told]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("run", "page", "constraints", "names"))
    parser.add_argument("rows", nargs="*", help="names; by default all")
    parser.add_argument("--python", help="of an environment that is there already")
    parser.add_argument("--core", action="store_true", help="of the tests, for a row of all too")
    asked = parser.parse_args()
    unknown = {*asked.rows} - {row.name for row in ALL}
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(r.name for r in ALL)}")
    rows = [row for row in ALL if not asked.rows or row.name in asked.rows]
    if asked.command == "names":  # as JSON, for a matrix of jobs
        print(json.dumps([row.name for row in rows if row in ROWS]))
        return 0
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for row in rows:
        if asked.command == "constraints":
            constraints_file(row).write_text(constraints_text(row))
        elif asked.command == "run":
            python = asked.python or environment(row)
            results[row.name] = run(row, python, "core" if asked.core else row.tests)
            RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    PAGE.write_text(page(results))
    counted = (row.name for row in rows if row.name in results and row in ROWS)
    return int(any(results[name]["failed"] for name in counted))


if __name__ == "__main__":
    sys.exit(main())
