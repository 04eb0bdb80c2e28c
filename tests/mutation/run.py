"""`make mutation`: breaks places of `planc/`, and tells which tests notice.

A seed draws the places, each in another function: a comparison, a boolean operator, an arithmetic
operator, a constant or a condition is replaced by its opposite. The tests run in a copy of the
checkout, in four tiers, until one fails:

1. `near`: the fast tests that `tests/selection.py` selects for the broken file;
2. `fast`: all other fast tests;
3. `slow`: the slow tests that it selects for the broken file;
4. `full`: all other slow tests.

In the first tier one place is broken at a time. In the others all places of a group are broken at
once, since few tests notice a place that the first tier does not; a test that fails then runs
again on the sound code, and with each place of the group broken alone.

`make test` after the change runs the first three tiers and a quarter of the fourth. A place that no
tier notices is reported as `survived`: no test covers it, or its opposite means the same.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import selection

ROOT = selection.ROOT
ROWS = ROOT / "build" / "mutation.json"
"""The file with a row for each noticed place: its tier, and the test that noticed it."""
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
    text: str
    """The broken line, with its indentation and its end."""


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


def broken_line(source, node, replacement):
    """The line of a file in which one expression is replaced, or None if it spans lines."""
    if node.lineno != node.end_lineno:
        return None
    lines = source.splitlines(keepends=True)
    line = lines[node.lineno - 1].encode()
    inner = ast.unparse(ast.fix_missing_locations(replacement)).encode()
    new = line[: node.col_offset] + b"(" + inner + b")" + line[node.end_col_offset :]
    return new.decode()


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
            text = broken_line(source, node, opposite(node))
            if text is not None:
                before = source.splitlines()[node.lineno - 1].strip()
                name = str(path.relative_to(ROOT))
                yield Place(name, node.lineno, before, text.strip(), text)
                break


def draw_places(count, seed):
    """Places of all folders of `planc/`, as many of each as its share of the functions."""
    found = [place for path in sorted((ROOT / "planc").rglob("*.py")) for place in places(path)]
    return random.Random(seed).sample(found, min(count, len(found)))


class Checkout:
    """A copy of the checkout in which some places are broken at a time."""

    def __init__(self, folder):
        self.folder = Path(folder) / "checkout"
        listing = selection.git_lines("ls-files")
        for name in listing:
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        paths = os.pathsep.join([str(self.folder), *os.environ.get("PYTHONPATH", "").split(":")])
        self.environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}

    @contextlib.contextmanager
    def broken(self, places):
        """The code with these places broken, until the end of the block."""
        texts = {place.path: (self.folder / place.path).read_text() for place in places}
        for path, text in texts.items():
            lines = text.splitlines(keepends=True)
            for place in places:
                if place.path == path:
                    lines[place.line - 1] = place.text
            (self.folder / path).write_text("".join(lines))
        try:
            yield
        finally:
            for path, text in texts.items():
                (self.folder / path).write_text(text)

    def collect(self):
        """The ids of the tests that `pytest --full` runs."""
        run = self._pytest("--full", "--collect-only", limit=600)
        return [line for line in run.stdout.splitlines() if "::" in line]

    def failures(self, names, limit, *words):
        """The tests of some that fail, or None if the run itself ends before they are done."""
        if not names:
            return []
        arguments = self.folder / "tests.txt"
        arguments.write_text("".join(f"{name}\n" for name in names))
        # workers cost a start, which one file of tests does not repay
        workers = ("--numprocesses", "auto") if len(names) > 200 else ()
        try:
            run = self._pytest(f"@{arguments}", "--no-header", *workers, *words, limit=limit)
        except subprocess.TimeoutExpired:
            return None
        marks = ("FAILED ", "ERROR ")
        failed = [line for line in run.stdout.splitlines() if line.startswith(marks)]
        known = set(names)
        failed = [line.split(" ", 1)[1].partition(" - ")[0] for line in failed]
        failed = [name for name in failed if name in known]
        return failed if failed or run.returncode == 0 else None

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


def tests_of_tier(tier, paths, names, costs):
    """The tests of a tier for some broken files, the cheap ones first."""
    related = selection.tests_of(paths)
    near = tier in ("near", "slow")
    chosen = [
        name
        for name in names
        if (name.partition("::")[0] in related) == near
        and (name in costs) == (tier in ("slow", "full"))
    ]
    return sorted(chosen, key=lambda name: costs.get(name, 0))


def noticed_alone(place, checkout, names, limit):
    """The first of some tests that fails with one place broken, or None if all pass."""
    with checkout.broken([place]):
        failed = checkout.failures(names, limit, "-x")
    if failed is None:
        return "the run itself"
    return failed[0] if failed else None


def noticed_in_group(places, checkout, names, limit):
    """The test that notices each place of a group, by the place; others are left out."""
    if len(places) == 1:
        test = noticed_alone(*places, checkout, names, limit)
        return {places[0]: test} if test else {}
    with checkout.broken(places):
        failed = checkout.failures(names, limit)
    if failed is None:
        middle = len(places) // 2
        halves = places[:middle], places[middle:]
        first, second = (noticed_in_group(half, checkout, names, limit) for half in halves)
        return first | second
    unsound = set(checkout.failures(failed, limit) or ())
    failed = [name for name in names if name in failed and name not in unsound]
    tests = {place: noticed_alone(place, checkout, failed, limit) for place in places}
    return {place: test for place, test in tests.items() if test}


class Report:
    """The rows of the places that are judged, in `ROWS`."""

    def __init__(self, *, resume):
        ROWS.parent.mkdir(exist_ok=True)
        self.rows = json.loads(ROWS.read_text()) if resume and ROWS.is_file() else []

    def lacks(self, place):
        """Whether no tier has noticed a place so far."""
        key = place.path, place.line, place.after
        return all(key != (row["path"], row["line"], row["after"]) for row in self.rows)

    def add(self, place, tier, test):
        row = asdict(place) | {"tier": tier, "test": test}
        del row["text"]
        self.rows.append(row)
        ROWS.write_text(json.dumps(self.rows, indent=1) + "\n")
        print(f"{tier:9} {place.path}:{place.line}  {test}", flush=True)

    def summary(self):
        counts = {tier: sum(row["tier"] == tier for row in self.rows) for tier in TIERS}
        return f"{sum(counts.values())} noticed: {counts}"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, default=40)
    parser.add_argument("--group", type=int, default=8, help="places that are broken at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=3600, help="seconds for a tier")
    parser.add_argument("--first", default="near", choices=TIERS, help="the first tier")
    parser.add_argument("--last", default="full", choices=TIERS, help="the last tier")
    parser.add_argument("--list", action="store_true", help="print the places and break none")
    parser.add_argument("--resume", action="store_true", help="keep the places that have a row")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    drawn = draw_places(arguments.places, arguments.seed)
    if arguments.list:
        for place in drawn:
            print(f"{place.path}:{place.line}: {place.before}  ->  {place.after}")
        return
    report = Report(resume=arguments.resume)
    costs = selection.slow_tests()
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(folder)
        names = checkout.collect()
        for tier in TIERS[TIERS.index(arguments.first) : TIERS.index(arguments.last) + 1]:
            left = [place for place in drawn if report.lacks(place)]
            size = 1 if tier == "near" else arguments.group
            for start in range(0, len(left), size):
                group = left[start : start + size]
                paths = {place.path for place in group}
                tests = tests_of_tier(tier, paths, names, costs)
                noticed = noticed_in_group(group, checkout, tests, arguments.limit)
                for place, test in noticed.items():
                    report.add(place, tier, test)
    left = [place for place in drawn if report.lacks(place)]
    for place in left:
        print(f"survived  {place.path}:{place.line}  {place.before}  ->  {place.after}")
    print(f"{report.summary()}; {len(left)} survived up to the tier `{arguments.last}`")


if __name__ == "__main__":
    main()
