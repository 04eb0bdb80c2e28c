"""`make mutation`: breaks places of `planc/` one at a time, and tells which tests notice.

A seed draws the places, each in another function: a comparison, a boolean operator, an arithmetic
operator, a constant or a condition is replaced by its opposite. The tests run in a copy of the
checkout, in four tiers, until one fails:

1. `near`: the fast tests that `tests/selection.py` selects for the broken file;
2. `fast`: all other fast tests;
3. `slow`: the slow tests that it selects for the broken file;
4. `full`: all other slow tests.

`make test` after the change runs the first three tiers and a quarter of the fourth. A place that no
tier notices is reported as `survived`: no test covers it, or its opposite means the same.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import selection

ROOT = selection.ROOT
ROWS = ROOT / "build" / "mutation.json"
"""The file with a row for each place: its tier, the test that noticed it, and the seconds."""
TIERS = ("near", "fast", "slow", "full")
COMPARISONS = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True, slots=True)
class Place:
    """A place to break: a file, a line of it, and the line before and after."""

    path: str
    line: int
    before: str
    after: str
    source: str
    """The text of the whole broken file."""


def opposite(node):
    """A copy of a node that means the opposite, or None if it has none."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            return ast.Compare(node.left, [COMPARISONS[type(op)]()], node.comparators)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return ast.BinOp(left, OPERATORS[type(op)](), right)
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(OPERATORS[type(op)](), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=bool() as value):
            return ast.Constant(not value)
    return None


def text_type(node):
    """Whether an operator joins texts, where its opposite only raises."""
    parts = ast.walk(node) if isinstance(node, ast.BinOp) else ()
    return any(
        isinstance(part, ast.JoinedStr)
        or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in parts
    )


def broken(source, node, replacement):
    """The text of a file in which one expression is replaced, or None if it spans lines."""
    if node.lineno != node.end_lineno:
        return None
    lines = source.splitlines(keepends=True)
    line = lines[node.lineno - 1].encode()
    inner = ast.unparse(ast.fix_missing_locations(replacement)).encode()
    new = line[: node.col_offset] + b"(" + inner + b")" + line[node.end_col_offset :]
    lines[node.lineno - 1] = new.decode()
    return "".join(lines)


def places(path):
    """One place to break in each function of a file, the same in each run."""
    source = path.read_text()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        body = [node for statement in function.body for node in ast.walk(statement)]
        nodes = [node for node in body if opposite(node) is not None and not text_type(node)]
        draw = random.Random(f"{path.name} {function.name}")
        draw.shuffle(nodes)
        for node in nodes:
            text = broken(source, node, opposite(node))
            if text is not None:
                name, at = str(path.relative_to(ROOT)), node.lineno - 1
                lines = source.splitlines()[at].strip(), text.splitlines()[at].strip()
                yield Place(name, node.lineno, *lines, text)
                break


def draw_places(count, seed):
    """Places of all folders of `planc/`, as many of each as its share of the functions."""
    found = [place for path in sorted((ROOT / "planc").rglob("*.py")) for place in places(path)]
    return random.Random(seed).sample(found, min(count, len(found)))


class Checkout:
    """A copy of the checkout in which one file at a time is broken."""

    def __init__(self, folder):
        self.folder = Path(folder) / "checkout"
        listing = selection.git_lines("ls-files")
        for name in listing:
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        paths = os.pathsep.join([str(self.folder), *os.environ.get("PYTHONPATH", "").split(":")])
        self.environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}

    def collect(self):
        """The ids of the tests that `pytest --full` runs."""
        run = self._pytest("--full", "--collect-only", limit=600)
        return [line for line in run.stdout.splitlines() if "::" in line]

    def first_failure(self, names, limit):
        """The first test of some that fails, `time limit`, or None if all pass."""
        if not names:
            return None
        arguments = self.folder / "tests.txt"
        arguments.write_text("".join(f"{name}\n" for name in names))
        try:
            # workers cost a start, which one file of tests does not repay
            workers = ("--numprocesses", "auto") if len(names) > 1000 else ()
            run = self._pytest(f"@{arguments}", "-x", "--no-header", *workers, limit=limit)
        except subprocess.TimeoutExpired:
            return "time limit"
        if run.returncode == 0:
            return None
        marks = ("FAILED ", "ERROR ")
        failed = [line for line in run.stdout.splitlines() if line.startswith(marks)]
        return failed[0].split(" ", 1)[1].partition(" - ")[0] if failed else "the run itself"

    def _pytest(self, *words, limit):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )


def tiers(path, names, costs):
    """The tests of each tier for a broken file, by the tier's name."""
    related = selection.tests_of({path})
    inside = [name for name in names if name.partition("::")[0] in related]
    others = [name for name in names if name.partition("::")[0] not in related]
    return {
        "near": [name for name in inside if name not in costs],
        "fast": [name for name in others if name not in costs],
        "slow": sorted((name for name in inside if name in costs), key=costs.get),
        "full": [name for name in others if name in costs],
    }


def judge(place, checkout, names, limit, last):
    """The tier up to `last` and the test that notice a broken place, and the seconds until then."""
    target = checkout.folder / place.path
    sound = target.read_text()
    target.write_text(place.source)
    start = time.monotonic()
    try:
        for tier, tests in tiers(place.path, names, selection.slow_tests()).items():
            if test := checkout.first_failure(tests, limit):
                return tier, test, time.monotonic() - start
            if tier == last:
                break
        return "survived", "", time.monotonic() - start
    finally:
        target.write_text(sound)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1800, help="seconds for a tier")
    parser.add_argument("--last", default="full", choices=TIERS, help="the last tier")
    parser.add_argument("--list", action="store_true", help="print the places and break none")
    parser.add_argument("--resume", action="store_true", help="keep the places that have a row")
    arguments = parser.parse_args()
    drawn = draw_places(arguments.places, arguments.seed)
    if arguments.list:
        for place in drawn:
            print(f"{place.path}:{place.line}: {place.before}  ->  {place.after}")
        return
    ROWS.parent.mkdir(exist_ok=True)
    rows = json.loads(ROWS.read_text()) if arguments.resume and ROWS.is_file() else []
    known = {(row["path"], row["line"], row["after"]) for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(folder)
        names = checkout.collect()
        for place in drawn:
            if (place.path, place.line, place.after) in known:
                continue
            tier, test, seconds = judge(place, checkout, names, arguments.limit, arguments.last)
            row = asdict(place) | {"tier": tier, "test": test, "seconds": round(seconds, 1)}
            del row["source"]
            rows.append(row)
            ROWS.write_text(json.dumps(rows, indent=1) + "\n")
            print(f"{tier:9} {seconds:6.0f} s  {place.path}:{place.line}  {test}", flush=True)
    counts = {tier: sum(row["tier"] == tier for row in rows) for tier in TIERS}
    noticed = sum(counts.values())
    print(f"{noticed} of {len(rows)} noticed: {counts}; {len(rows) - noticed} survived")


if __name__ == "__main__":
    main()
