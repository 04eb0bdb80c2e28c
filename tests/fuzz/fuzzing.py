"""Runs broken input through the command and stops at nothing: `make fuzz`.

Each case must end with an exit code that planc documents, in time, without a traceback and without
PL900; JSON that it prints must be JSON. Cases that don't are kept as files, to be run again:

    python tests/fuzz/fuzzing.py --seed 7 --cases 100000
    python tests/fuzz/fuzzing.py --seed 7 --only 4711
"""

import argparse
import contextlib
import faulthandler
import json
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from folders import FOLDERS

sys.path.extend(FOLDERS)

from cases import case
from console import call

CODES = (0, 1, 2)
HANG = 600  # seconds after which a case is ended, with its stack


def failure(one, folder):
    """What is wrong with how a case ended, or None; and the CPU time that it took."""
    for name, data in one.files.items():
        (folder / name).write_bytes(data)
    began = time.process_time()
    try:
        code, output, errors = call(*one.words)
    except BaseException:
        return traceback.format_exc(), time.process_time() - began
    taken = time.process_time() - began
    if code not in CODES:
        return f"exit code {code}", taken
    if "PL900" in output + errors or "Traceback (" in output + errors:
        return f"{output}{errors}", taken
    if taken > one.seconds:
        return f"{taken:.0f} s of CPU time, more than {one.seconds} s", taken
    if one.json and output:
        try:
            json.loads(output)
        except ValueError as error:
            return f"no JSON: {error}\n{output[:500]}", taken
    return None, taken


@contextlib.contextmanager
def place():
    """A folder to run in; exceptions are not caught by the command itself."""
    before = Path.cwd()
    os.environ["PLANC_TRACEBACK"] = "1"
    with tempfile.TemporaryDirectory(prefix="planc-fuzz-") as name:
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)
            del os.environ["PLANC_TRACEBACK"]


@contextlib.contextmanager
def cached(one, folder):
    """The cache of facts; what a broken configuration gives is not kept."""
    before = os.environ.get("PLANC_CACHE_DIR")
    if one.kind == "config":
        os.environ["PLANC_CACHE_DIR"] = os.devnull
    try:
        yield
    finally:
        if one.kind == "config":
            if before is None:
                del os.environ["PLANC_CACHE_DIR"]
            else:
                os.environ["PLANC_CACHE_DIR"] = before


def run(seed, numbers):
    """(number, case, what is wrong or None, seconds) of cases of a seed."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with place() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in numbers:
            one = case(seed, number)
            faulthandler.dump_traceback_later(HANG, exit=True)
            with cached(one, folder):
                found = failure(one, folder)
            faulthandler.cancel_dump_traceback_later()
            yield number, one, *found


def kept(number, one, wrong, folder):
    """Writes a case that failed."""
    here = folder / str(number)
    here.mkdir(parents=True, exist_ok=True)
    for name, data in one.files.items():
        (here / name).write_bytes(data)
    (here / "command").write_text(f"planc {' '.join(one.words)}\n\n{wrong}", errors="replace")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--cases", type=int, default=100_000)
    arguments.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments.add_argument("--start", type=int, default=0, help="the number of the first case")
    arguments.add_argument("--only", type=int, help="one case")
    arguments.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="failed cases")
    options = arguments.parse_args()
    numbers = range(options.start, options.start + options.cases)
    if options.only is not None:
        numbers = range(options.only, options.only + 1)
    print(f"seed {options.seed}, {len(numbers):,} cases", flush=True)
    keep, began = options.keep.absolute(), time.monotonic()
    ended, wrongs, slowest = Counter(), 0, 0.0
    for number, one, wrong, taken in run(options.seed, numbers):
        ended[one.kind] += 1
        slowest = max(slowest, taken)
        if wrong:
            wrongs += 1
            kept(number, one, wrong, keep)
            last = wrong.strip().splitlines()[-1]
            print(f"case {number} ({one.kind}): {last[:150]}", flush=True)
        if sum(ended.values()) % 1_000 == 0:
            told = ", ".join(f"{count:,} of {kind}" for kind, count in sorted(ended.items()))
            spent = time.monotonic() - began
            print(f"{told}; {wrongs} wrong, slowest {slowest:.1f} s, {spent:.0f} s", flush=True)
    print(f"{sum(ended.values()):,} cases, {wrongs} wrong, seed {options.seed}")
    return 1 if wrongs else 0


if __name__ == "__main__":
    sys.exit(main())
