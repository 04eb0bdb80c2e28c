"""The fork server of a proof: `python -m planc.simulate.fork_server`.

Importing torch and transformers takes seconds, so one process imports them while the command still
compiles. Then it reads its job, one line of JSON, and forks one process per rank. It starts no
thread before that, so forking is safe. But for CUDA, which does not survive a fork, and which some
libraries start when they are imported: there each rank is a process of its own that imports anew.
Standard input stays open as long as the command runs: when it closes, for whatever reason, every
process ends.
"""

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

from planc.model.fused_kernels import hide
from planc.simulate.launcher import Job

GRACE = 3.0
"""Seconds for the other ranks to report after one has died."""


def main(rank: str = "", file: str = "") -> int:
    """Returns 0 if every rank succeeded, or the rank whose job is in a file."""
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.disable()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it asks the ranks alone where they wait
    from planc.simulate import numerics, worker

    if rank:
        end_with_the_command()
        return worker.main(Job.loads(Path(file).read_text()), int(rank))
    text = sys.stdin.buffer.readline()
    if not text:
        return 2
    job = Job.loads(text.decode())
    start = _fork
    if numerics.device_for(job.ranks) == "cuda":
        start = _spawn
        (Path(job.folder) / "job.json").write_text(text.decode())
    else:
        hide()
        worker.prepare(job)
    gc.freeze()
    children = {start(job, number): number for number in range(job.ranks)}
    end_with_the_command()
    return _wait(children, Path(job.folder))


def _fork(job: Job, number: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        end_with_the_command()
        from planc.simulate import worker

        code = worker.main(job, number)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no cleanup: torch would wait for a rank that died


def _spawn(job: Job, number: int) -> int:
    module = "planc.simulate.fork_server"
    words = ["-W", "ignore", "-m", module, str(number), f"{job.folder}/job.json"]
    return os.posix_spawn(sys.executable, [sys.executable, *words], os.environ)


def end_with_the_command() -> None:
    """Ends this process when standard input closes."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _wait(children: dict[int, int], folder: Path) -> int:
    """Waits for all ranks; `GRACE` seconds after a failure. Records ranks that a signal ended."""
    failed, end = False, float("inf")
    ended: set[int] = set()
    while children:
        child, status = os.waitpid(-1, os.WNOHANG if failed else 0)
        if child:
            number, code = children.pop(child), os.waitstatus_to_exitcode(status)
            if code < 0 and child not in ended:
                (folder / f"{number}.signal").write_text(f"{-code} {time.monotonic()}")
            if code and not failed:
                failed, end = True, time.monotonic() + GRACE
        elif time.monotonic() > end:
            for late in children.keys() - ended:
                os.kill(late, signal.SIGKILL)
                ended.add(late)
        else:
            time.sleep(0.01)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
