"""Layout flow for a process that is a rank of a run, and the verdict that is kept of it.

A rank can spare neither a process group of threads nor random numbers, so what simulates ranks runs
in a process of its own, which needs no GPU: a new one, or for code of the script a copy of this.
"""

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from math import ceil
from typing import Any, NoReturn, get_args

from planc.compiler import Compiled
from planc.diagnostics.diagnostic import Sink
from planc.model.facts import Facts
from planc.model.fused_kernels import hide
from planc.proof.layout_flow import Verdict, flow
from planc.runtime.known_verdict import KnownVerdict, Level
from planc.simulate import verdict_store
from planc.simulate.certificate import keepable
from planc.syntax import plan_files


def record(compiled: Compiled, verdict: Verdict, sink: Sink) -> KnownVerdict:
    """Returns the verdict of layout flow, and keeps it unless it is of code that no key names; the
    first error of the proof is the reason for `refuted`. Of a model whose inputs the user can say,
    one that nothing decides replaces none.
    """
    facts, lowered = compiled.facts, compiled.lowered
    level, text = _judge(verdict, sink)
    even = bool(verdict.outcome.of_kind("lengths"))
    proved = KnownVerdict(level=level, text=text, even=even)
    if facts and lowered and keepable(facts, lowered):
        known = verdict_store.recall(lowered, facts).level if facts.own_code else "unproved"
        if level != "undecided" or known == "unproved":
            text = plan_files.digest(compiled.files)
            verdict_store.remember(lowered, facts, proved, plan=text)
    return proved


def _judge(verdict: Verdict, sink: Sink) -> tuple[Level, str]:
    """A plan that splits nothing is proved where structure decides all of its sections."""
    if verdict.verdict == "refuted":
        errors = (d for d in sink if d.severity == "error")
        return "refuted", next((d.short for d in errors), "its numbers are wrong")
    unknown = next((s.reason for s in verdict.sections if s.verdict == "unknown"), None)
    if verdict.verdict == "unknown" or unknown is not None:
        return "undecided", f"not decided by layout flow: {verdict.reason or unknown}"
    return "proved", "proved"


SECONDS = 300
"""The time limit, in seconds of processor time: no answer depends on the machine's load."""
WAIT = 540
"""The seconds after which the other ranks need an answer: those of NCCL wait for ten minutes."""
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LONGER = (
    "; prove it before the run, by `planc check --time-limit 1200`, or `planc.check(model, ..., "
    "time_limit=1200)`: `apply` finds the verdict"
)


def prove_in_subprocess(compiled: Compiled, *, allow_code: bool) -> KnownVerdict:
    """The verdict of layout flow on a compiled plan without errors, cached as by `planc check`."""
    facts = compiled.facts
    given = replace(compiled, facts=facts and readable(facts))
    try:
        answer = answer_elsewhere(_answer, given, allow_code, of=facts)
    except NoAnswerError as error:
        return _undecided_verdict(f"{error}{_LONGER}" if error.late else str(error))
    known = answer["level"] in get_args(Level)
    return KnownVerdict(**answer) if known else _undecided_verdict(str(answer["text"]))


def readable(facts: Facts) -> Facts:
    """Returns the facts with a model without tensors on a device, which a fork cannot use."""
    from planc.proxy.user_model import without_devices

    module = facts.user_model
    if module is None:
        return facts
    held = (*module.parameters(), *module.buffers())
    if all(tensor.device.type in ("cpu", "meta") for tensor in held):
        return facts
    return replace(facts, user_model=without_devices(module))


class NoAnswerError(Exception):
    """Another process returned no result; the message is the reason.

    Args:
        late: whether it exceeded the time limit.
    """

    def __init__(self, reason: str, *, late: bool = False) -> None:
        super().__init__(reason)
        self.late = late


def answer_elsewhere(answer: Callable[..., object], *given: object, of: Facts | None) -> Any:
    """Calls a function in another process and returns its result, which is JSON.

    Args:
        answer: a module-level function of planc.
        given: its arguments.
        of: the model that they are about. If a script built it, the other process is a fork of
            this one, which has the model's code; otherwise it is a new process.

    Raises:
        NoAnswerError: see `answer_of_subprocess` and `answer_of_copy`.
    """
    if of is not None and of.user_model is not None:
        return answer_of_copy(lambda: answer(*given))
    return answer_of_subprocess(answer, *given)


def answer_of_subprocess(answer: Callable[..., object], *given: object) -> Any:
    """Calls a module-level function in a new process and returns its result, which is JSON.

    Raises:
        NoAnswerError: the function raises or exceeds the time limit, or `given` cannot be pickled.
    """
    import pickle
    import subprocess

    environment = {k: v for k, v in os.environ.items() if k not in _TORCHRUN}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, str(SECONDS)],
            input=pickle.dumps((answer, given)),
            capture_output=True,
            check=False,
            timeout=WAIT,
            env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        )
    except subprocess.TimeoutExpired:
        raise _too_late() from None
    except Exception as error:  # a model that cannot be pickled
        raise NoAnswerError(f"{type(error).__name__}: {error}") from error
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise _failure(done.stderr, done.returncode) from None


def _too_late() -> NoAnswerError:
    return NoAnswerError(f"no answer in {WAIT:g} s, for which other ranks wait", late=True)


def _failure(said: bytes, code: int) -> NoAnswerError:
    """The error for a process that ended without a result, with the last line of its stderr."""
    if code < 0 and -code == getattr(signal, "SIGXCPU", None):
        text = f"no answer within {SECONDS:g} seconds of processor time"
        return NoAnswerError(text, late=True)
    lines = said.decode(errors="replace").strip().splitlines()
    return NoAnswerError(lines[-1] if lines else f"exit status {code}")


def answer_of_copy(answer: Callable[[], object]) -> Any:
    """The result of a function, as JSON, in a copy of this process: with all that a script has
    defined, and has put into its libraries.

    Raises:
        NoAnswerError: it raises, its time is up, or the system has no such copies.
    """
    import tempfile  # slow to import, and a warm check needs none

    if not hasattr(os, "fork"):
        raise NoAnswerError("this system cannot copy a process that runs the script's own code")
    with tempfile.TemporaryFile() as answer_file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's, that threads are not copied: none is used
        process = os.fork()
        if process == 0:
            _answer_and_end(answer, answer_file.fileno())
        code = _exit_status(process, time.monotonic() + WAIT)
        answer_file.seek(0)
        said = answer_file.read()
    try:
        kind, value = json.loads(said.splitlines()[-1])
    except (IndexError, ValueError):
        raise _failure(said, code) from None
    if kind == "error":
        raise NoAnswerError(value)
    return value


def _answer_and_end(answer: Callable[[], object], file: int) -> NoReturn:
    """Writes an answer to a file, and ends the process without what its original would do then."""
    try:
        import torch
        from torch import distributed

        os.dup2(file, 1)
        os.dup2(file, 2)
        for name in _TORCHRUN:
            os.environ.pop(name, None)
        _limit_processor_time(SECONDS)
        torch.set_num_threads(1)  # those of the original are not copied
        distributed.GroupMember.WORLD = None  # its process group is the original's
        reply = ["answer", answer()]
    except BaseException as error:
        reply = ["error", f"{type(error).__name__}: {error}"]
    os.write(file, f"\n{json.dumps(reply)}\n".encode())
    os._exit(0)


def _exit_status(process: int, end: float) -> int:
    """The exit status of a process, which is ended when its time is up."""
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            raise _too_late()
        time.sleep(0.05)


def _limit_processor_time(seconds: float) -> None:
    """Lets the system end this process after some processor time, on systems that can do so."""
    try:
        import resource
    except ImportError:  # Windows, where `WAIT` is the only limit
        return
    limits = resource.getrlimit(resource.RLIMIT_CPU)
    known = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_CPU, (min([ceil(seconds), *known]), limits[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _undecided_verdict(reason: str) -> KnownVerdict:
    return KnownVerdict(level="undecided", text=f"not decided by layout flow: {reason}")


def _answer(compiled: Compiled, allow_code: bool) -> dict[str, Any]:
    sink = Sink()
    return asdict(record(compiled, flow(compiled, sink, allow_code=allow_code), sink))


def _main() -> None:
    import pickle

    _limit_processor_time(float(sys.argv[1]))
    answer, given = pickle.load(sys.stdin.buffer)
    print(json.dumps(answer(*given)))


if __name__ == "__main__":
    hide()
    _main()
