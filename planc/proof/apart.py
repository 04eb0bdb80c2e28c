"""Layout flow in a process of its own, for a process that is a rank of a run.

Layout flow makes a process group of threads and draws random numbers, neither of which a process
can spare that trains; so `planc.apply` has it done elsewhere, without a GPU.
"""

import json
import os
import pickle
import subprocess
import sys
from typing import Any, get_args

from planc.compiler import Compiled
from planc.diagnostic import Sink
from planc.proof.layout_flow import flow
from planc.proof.record import record
from planc.runtime.known_verdict import KnownVerdict, Level

SECONDS = 300
"""The time limit; below the ten minutes that NCCL's ranks wait for each other."""
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def prove_apart(compiled: Compiled, *, allow_code: bool) -> KnownVerdict:
    """The verdict of layout flow on a compiled plan, which is kept as that of a check.

    Args:
        compiled: a plan without errors; with a model of the user's own if its class can be
            imported elsewhere.
        allow_code: whether custom styles may be imported.
    """
    environment = {k: v for k, v in os.environ.items() if k not in _TORCHRUN}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=pickle.dumps((compiled, allow_code)),
            capture_output=True,
            check=False,
            timeout=SECONDS,
            env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        )
    except subprocess.TimeoutExpired:
        return _undecided(f"no answer in {SECONDS} s")
    except Exception as error:  # a model that cannot be pickled
        return _undecided(f"{type(error).__name__}: {error}")
    try:
        level, text = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return _undecided(lines[-1] if lines else f"exit status {done.returncode}")
    known = level in get_args(Level)
    return KnownVerdict(level=level, text=text) if known else _undecided(str(text))


def _undecided(reason: str) -> KnownVerdict:
    return KnownVerdict(level="undecided", text=f"not decided by layout flow: {reason}")


def _main() -> None:
    given: Any = pickle.load(sys.stdin.buffer)
    compiled, allow_code = given
    sink = Sink()
    verdict = flow(compiled, sink, allow_code=allow_code)
    known = record(compiled, verdict, sink)
    print(json.dumps([known.level, known.text]))


if __name__ == "__main__":
    _main()
