"""A step that one rank of a plan runs on fake tensors, and the process that runs it."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subprocess import Popen


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """The steps that a rank takes.

    Args:
        rows, tokens: of each pass of a rank.
        micro_batches: gradient accumulation steps.
        dtype: that the parameters are built in; empty for the configuration's own.
        optimizer: `adamw`, `adam`, `sgd` or `momentum`, where the plan has no optimizer section.
        attention: transformers' `attn_implementation`.
        images: of each row; on fake tensors alone.
        image_size: height and width of an image in pixels; empty for the configuration's.
    """

    rows: int
    tokens: int
    micro_batches: int
    dtype: str
    optimizer: str = "adamw"
    attention: str = "sdpa"
    images: int = 0
    image_size: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """
    Args:
        config: the fields of the model's configuration.
        lowered, digest: the plan.
        rank: of the mesh.
        begins: the blocks before which another forward pass begins.
        edges: the blocks at which backward passes from one moment to the next: by their name, that
            of the moment.
        form: of what the stages before it send.
        order: whether what it sends is noted, in place of what it holds.
        device: where tensors have memory, `cpu` or `cuda`; empty for fake ones.
        calls: the checkpointed modules whose operators are noted, in place of what it holds, each
            with the one like it that runs in its place.
        code: whether the plan's custom styles may be imported.
    """

    step: RankStep
    config: dict[str, Any]
    lowered: str
    digest: str
    rank: int
    begins: tuple[str, ...] = ()
    edges: dict[str, str] = field(default_factory=dict)
    form: list[Any] = field(default_factory=list)
    order: bool = False
    device: str = ""
    calls: dict[str, str] = field(default_factory=dict)
    code: bool = False

    def dumps(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def loads(cls, text: str) -> RankJob:
        values = json.loads(text)
        return cls(**{**values, "step": RankStep(**values["step"])})


class RankRunner:
    """The process that runs ranks, which starts with the first one."""

    MODULE = "planc.tools.measure.one_rank"

    def __init__(self) -> None:
        self._process: Popen[str] | None = None

    def __enter__(self) -> RankRunner:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.stop(self._process)

    def start(self) -> Popen[str]:
        """Starts the process, with what this process can import and nothing of its folder."""
        import subprocess  # a warm check starts no process

        words = [sys.executable, "-P", "-W", "ignore", "-m", self.MODULE]
        known = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipe = subprocess.PIPE
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=known)

    def stop(self, process: Popen[str]) -> None:
        """Ends a process that `start` returned, and waits for it."""
        if process.stdin:
            with suppress(BrokenPipeError):
                process.stdin.close()
        process.wait()

    def ask(self, job: RankJob) -> dict[str, Any]:
        """Runs one rank; an answer with `error` where it did not run."""
        if self._process is None:
            self._process = self.start()
        process = self._process
        assert process.stdin and process.stdout
        with suppress(BrokenPipeError):
            process.stdin.write(job.dumps() + "\n")
            process.stdin.flush()
        text = process.stdout.readline() or '{"error": "the process that runs it has ended"}'
        answer: dict[str, Any] = json.loads(text)
        return answer
