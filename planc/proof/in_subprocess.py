"""Layout flow for a process that is a rank of a run, and the verdict that is kept of it.

A rank can spare neither a process group of threads nor random numbers, so what simulates ranks runs
in a process of its own; this needs no GPU.
"""

import json
import os
import sys
from dataclasses import asdict
from typing import Any, get_args

from planc.compiler import Compiled
from planc.diagnostic import Sink
from planc.proof.layout_flow import Verdict, flow
from planc.runtime.known_verdict import KnownVerdict, Level
from planc.trial import verdict_store


def record(compiled: Compiled, verdict: Verdict, sink: Sink) -> KnownVerdict:
    """Returns the verdict of layout flow, and keeps it unless code of the user's own, which can
    change, decides it; the first error of the proof is the reason for `refuted`.
    """
    facts, lowered = compiled.facts, compiled.lowered
    level, text = _judged(verdict, sink)
    even = any(one.kind == "uneven" for one in verdict.outcome.discrepancies)
    known = KnownVerdict(level=level, text=text, even=even)
    if facts and lowered and not (facts.code or facts.user_model is not None or lowered.code):
        verdict_store.remember(lowered, facts, known)
    return known


def _judged(verdict: Verdict, sink: Sink) -> tuple[Level, str]:
    """A plan that splits nothing is proved where structure decides all of its sections."""
    if verdict.verdict == "refuted":
        errors = (d for d in sink if d.severity == "error")
        return "refuted", next((f"{d.message} ({d.code})" for d in errors), "its numbers are wrong")
    unknown = next((s.reason for s in verdict.sections if s.verdict == "unknown"), None)
    if verdict.verdict == "unknown" or unknown is not None:
        return "undecided", f"not decided by layout flow: {verdict.reason or unknown}"
    return "proved", "proved"


SECONDS = 300
"""The time limit; below the ten minutes that NCCL's ranks wait for each other."""
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def prove_in_subprocess(compiled: Compiled, *, allow_code: bool) -> KnownVerdict:
    """The verdict of layout flow on a compiled plan without errors, kept as that of a check; a
    model of the user's own must have a class that can be imported elsewhere.
    """
    try:
        answer = answer_of_subprocess(__name__, (compiled, allow_code))
    except NoAnswerError as error:
        return _undecided(str(error))
    known = answer["level"] in get_args(Level)
    return KnownVerdict(**answer) if known else _undecided(str(answer["text"]))


class NoAnswerError(Exception):
    """Why a process of its own gave no answer."""


def answer_of_subprocess(module: str, given: object) -> Any:
    """What a module of planc, run in a process of its own, prints as JSON in its last line.

    Args:
        module: its name; it reads `given` from standard input, with pickle.

    Raises:
        NoAnswerError: it failed, takes longer than `SECONDS`, or `given` cannot be pickled.
    """
    import pickle
    import subprocess

    environment = {k: v for k, v in os.environ.items() if k not in _TORCHRUN}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", module],
            input=pickle.dumps(given),
            capture_output=True,
            check=False,
            timeout=SECONDS,
            env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"no answer in {SECONDS} s") from None
    except Exception as error:  # a model that cannot be pickled
        raise NoAnswerError(f"{type(error).__name__}: {error}") from error
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise NoAnswerError(lines[-1] if lines else f"exit status {done.returncode}") from None


def _undecided(reason: str) -> KnownVerdict:
    return KnownVerdict(level="undecided", text=f"not decided by layout flow: {reason}")


def _main() -> None:
    import pickle

    compiled, allow_code = pickle.load(sys.stdin.buffer)
    sink = Sink()
    verdict = flow(compiled, sink, allow_code=allow_code)
    known = record(compiled, verdict, sink)
    print(json.dumps(asdict(known)))


if __name__ == "__main__":
    _main()
