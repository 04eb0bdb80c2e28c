"""The truth about a plan: four gloo processes that train with it, beside one without it.

One process imports torch once and forks four ranks for each plan, so a crash or a hang costs
nothing but its own ranks. The runner goes on while it works: it sends jobs and takes answers.
"""

import contextlib
import gc
import importlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

WORLD = 4
SECONDS = 240
"""What a plan may take where other work shares the cores; one that hangs is a crash."""
LIMITS = {
    "logits": 1e-4,
    "loss": 1e-4,
    "gradient": 1e-4,
    "norm": 1e-4,
    "later": 1e-3,
    "parameters": 1e-3,
    "routes": 0.0,
}
"""The largest relative errors; later are the logits and the loss of the second step, routes the
part of its tokens that go to other experts."""
ROUGH = LIMITS | dict.fromkeys(("gradient", "norm", "later", "parameters"), 3e-2) | {"routes": 0.05}
"""The limits where gradients are reduced in 16 bits; bfloat16 rounds by up to 1 / 256."""


@dataclass(frozen=True)
class Job:
    """A lowered plan for a model.

    Args:
        number: the answer has the same one.
        values: the model's configuration.
        document: the lowered plan, as JSON.
    """

    number: int
    values: dict
    document: str


class Truth:
    """The process that forks the ranks; used as a context."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="planc-mutants-")
        context = get_context("spawn")
        self._mine, theirs = context.Pipe()
        arguments = (theirs, self._folder.name, os.getpid())
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        self.open = 0

    def ask(self, job):
        path = Path(self._folder.name) / f"{job.number}.job"
        path.write_text(json.dumps(asdict(job)))
        self._mine.send(str(path))
        self.open += 1

    def answers(self, most=0):
        """Yields (number, verdict, detail) of what is done, until no more than `most` are open."""
        while self.open and (self.open > most or self._mine.poll()):
            if not self._mine.poll(2):
                assert self._process.is_alive(), "the process of the truth has died"
                continue
            yield tuple(self._mine.recv())
            self.open -= 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self._mine.send(None)
        self._process.join(10)
        self._process.kill()
        self._folder.cleanup()


def serve(jobs, folder, parent):
    """Answers jobs until there is a None, or until the runner is gone."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PLANC_CACHE_DIR"] = str(Path(folder) / "cache")  # knows of no refuted plan
    log = os.open(os.environ.get("MUTANTS_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    server = Server(Path(folder))
    while os.getppid() == parent:
        if not jobs.poll(2):
            continue
        path = jobs.recv()
        if path is None:
            return
        job = Job(**json.loads(Path(path).read_text()))
        Path(path).unlink()
        jobs.send((job.number, *server.judge(job)))


class Server:
    """Forks ranks, and keeps what a single process gives for each model."""

    def __init__(self, folder):
        import ranks

        self._ranks, self._folder, self._known, self._values = ranks, folder, {}, None
        ranks.prepare()

    def judge(self, job):
        """`right`, `wrong` or `crash`, and a word on it."""
        if job.values != self._values:
            self._known, self._values = {}, job.values
        what = self._ranks.wanted(job)
        if what not in self._known:
            failed = self._forked(1, lambda _, at: self._ranks.single(job, at))
            if failed:
                return "untrainable", failed
            self._known[what] = self._ranks.keep(self._place(0))
            gc.freeze()
        reference = self._known[what]
        failed = self._forked(WORLD, lambda rank, at: self._ranks.train(job, reference, rank, at))
        if failed:
            return "crash", failed
        found = [json.loads(self._place(rank).read_text()) for rank in range(WORLD)]
        imported(found[0]["modules"])
        return judged(found)

    def _place(self, rank):
        return self._folder / f"{rank}.result"

    def _forked(self, many, function):
        """Why one of the ranks failed; empty if none did."""
        for path in (*self._folder.glob("*.result"), *self._folder.glob("store*")):
            path.unlink()
        children = {self._fork(function, rank): rank for rank in range(many)}
        end = time.monotonic() + SECONDS
        reason = ""
        while children and not reason:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                time.sleep(0.005)
                reason = "" if time.monotonic() < end else f"no answer in {SECONDS} s"
                continue
            rank = children.pop(child)
            if status:
                text = self._place(rank).read_text() if self._place(rank).exists() else ""
                reason = text or f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}"
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return reason

    def _fork(self, function, rank):
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            gc.disable()
            function(rank, self._place(rank))
            code = 0
        except BaseException as error:
            last = (str(error).strip().splitlines() or [""])[0]
            self._place(rank).write_text(f"{type(error).__name__}: {last}")
        finally:
            sys.stderr.flush()
            os._exit(code)  # no cleanup: torch would wait for a rank that has failed


def judged(found):
    """The verdict on what the ranks measured."""
    limits = ROUGH if any(r["rough"] for r in found) else LIMITS
    worst = {kind: max(r["errors"][kind] for r in found) for kind in limits}
    off = {k: e for k, e in worst.items() if not (math.isfinite(e) and e <= limits[k])}
    detail = ", ".join(f"{k} {e:.1e}" for k, e in (off or worst).items())
    return ("wrong" if off else "right"), f"{detail} ({found[0]['worst']})"


def imported(names):
    """Imports modules, so that forked processes find them."""
    for name in set(names) - set(sys.modules):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
