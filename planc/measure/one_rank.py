"""One rank of a plan on torch's fake process group and fake tensors: `python -m
planc.measure.one_rank` reads jobs, one line of JSON each, and answers each with a line.

Every rank is a fork of its own: torch's caches of DTensor keep meshes, so a process can be a rank
once. This module imports torch.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # an optimizer imports it in its first step
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from planc.diagnostic import Sink
from planc.measure.fake_ranks import alone, sent_by
from planc.measure.job import RankJob
from planc.measure.storages import Storages
from planc.model.config import config_of
from planc.model.facts import generic
from planc.model.small.stack_frames import of_a_model
from planc.model.sources.huggingface import prepare, quiet, training_model
from planc.ops.document import loads
from planc.ops.lowered import Lowered
from planc.ops.optimizer import Optimize
from planc.runtime.collectives import Collectives, named_modules
from planc.runtime.executor import apply_lowered
from planc.runtime.run import Run

_OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, foreach=True),
    "adam": partial(torch.optim.Adam, foreach=True),
    "sgd": partial(torch.optim.SGD, foreach=True),
    "momentum": partial(torch.optim.SGD, momentum=0.9, foreach=True),
}


def main() -> int:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # what torch says of a fake group is not about the plan
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a model may print
    for line in sys.stdin:
        job = RankJob.loads(line)
        with suppress(Exception):  # what every rank imports; a rank reports what is wrong
            prepare(config_of(job.config, "the model"), Sink())
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            with os.fdopen(writing, "w") as answer:
                json.dump(_answer(job), answer)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            text = answer.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(text or json.dumps({"error": f"it ended with code {status}"}), file=answers)
        answers.flush()
    return 0


def _answer(job: RankJob) -> dict[str, Any]:
    try:
        return _Rank(job).measured()
    except Exception as error:
        if os.environ.get("PLANC_TRACEBACK"):
            traceback.print_exc()
        return {"error": why(error)}


def why(error: Exception) -> str:
    """Why a rank cannot be run, with the line of the model's code that it is at."""
    stack = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in stack if of_a_model(frame.filename)]
    at = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        text = f"`{own[-1].line}`, {at}," if own else "the model's code"
        return f"{text} reads values of tensors, which fake ones do not have"
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return f"torch cannot run {at} on tensors without values: {text}" if at else text


class _Rank:
    def __init__(self, job: RankJob) -> None:
        self.job = job
        lowered = loads(job.lowered, "the lowered plan", Sink())
        assert lowered is not None
        self.lowered: Lowered = lowered
        self.running: list[str] = []
        self.stepping = ""
        self.storages = Storages(self.what)

    def measured(self) -> dict[str, Any]:
        job = self.job
        distributed.init_process_group(
            "fake", rank=job.rank, world_size=self.lowered.world_size, store=FakeStore()
        )
        model = _model(job)
        names = {id(m): _layer(n) for n, m in named_modules(model).items()}
        names[id(model)] = type(model).__name__
        run = apply_lowered(
            model, self.lowered, digest=job.digest, device_type="cpu", allow_code=job.code
        )
        fake = nullcontext() if job.real else FakeTensorMode(allow_non_fake_inputs=True)
        with quiet(), fake:
            model.to_empty(device="cpu")
            if job.real:
                _zero(model)
        optimizer = self._optimizer(run)
        with quiet(), fake:
            if job.order:
                return {"steps": [*self._calls(run, optimizer)], "form": sent_by(run) or {}}
            self.storages.note([*model.parameters(), *model.buffers()], "parameters")
            self.storages.mark("parameters")
            with self._watched(run, names), alone(run, job.form or None):
                for _ in range(2):
                    self._step(run, optimizer)
        return {"moments": [*self.storages.moments()], "form": sent_by(run) or {}}

    def _calls(self, run: Run, optimizer: Any) -> Iterator[list[dict[str, Any]]]:
        """What the rank calls in its first step, and in another."""
        names = {id(module): name for name, module in named_modules(run.model).items()}
        noted = Collectives(names, lambda: self.stepping)
        with alone(run, self.job.form or None), noted.recording():
            for _ in range(2):
                before = len(noted.calls)
                self._step(run, optimizer)
                yield noted.calls[before:]

    def _optimizer(self, run: Run) -> Any:
        if self.lowered.has(Optimize):  # it reads which ranks a mesh has, and asks the others
            with mock.patch.object(distributed, "all_gather_object", _alike):
                return run.optimizer(lr=1e-4)
        trained = [p for p in run.model.parameters() if p.requires_grad]
        return run.optimizer(_OPTIMIZERS[self.job.step.optimizer](trained, lr=1e-4))

    def _step(self, run: Run, optimizer: Any) -> None:
        step = self.job.step
        tokens = torch.zeros((step.rows, step.tokens), dtype=torch.long)
        passes = min(2, step.micro_batches)  # those after the second hold what that one holds
        batches = [{"input_ids": tokens, "labels": tokens}] * passes
        self.storages.mark("loss")
        run.forward_backward(batches)
        grads = (p.grad for p in run.model.parameters())
        self.storages.note((g for g in grads if g is not None), "gradients")
        self.storages.mark("optimizer step")
        self.stepping = "clipping"
        run.clip_grad_norm_(1.0)
        self.stepping = "optimizer"
        optimizer.step()
        states = (value for held in optimizer.state.values() for value in held.values())
        self.storages.note((s for s in states if isinstance(s, Tensor)), "optimizer state")
        optimizer.zero_grad()
        self.stepping = ""

    # What is held ---------------------------------------------------------------------------------

    def what(self) -> str:
        """What a storage is that is made now."""
        if self.stepping:
            return "copies in the optimizer"
        passing = _in_backward()
        if self.running:
            kind = "recomputed activations" if passing else "activations"
            return f"{kind} of {self.running[-1]}"
        return "gradients of activations" if passing else "the batch"

    @contextmanager
    def _watched(self, run: Run, names: dict[int, str]) -> Iterator[None]:
        """Follows which module runs and where backward is."""
        call = nn.Module.__call__
        storages = self.storages

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = names.get(id(module))
            if name is None:
                return call(module, *args, **kwargs)
            self.running.append(name)
            try:
                return call(module, *args, **kwargs)
            finally:
                self.running.pop()

        handles = []
        blocks = named_modules(run.model)
        for name in self.job.begins:
            handles.append(blocks[name].register_forward_pre_hook(self._began))
        for name, at in self.job.edges.items():
            handles.append(blocks[name].register_forward_hook(partial(self._turned, at)))
        with mock.patch.object(nn.Module, "__call__", called), storages.counting():
            yield
        for handle in handles:
            handle.remove()

    def _began(self, *_: Any) -> None:
        if not _in_backward():
            self.storages.mark("loss")

    def _turned(self, at: str, _module: Any, _args: Any, output: Any) -> None:
        """From the gradient of a block's output on, backward is at another place."""
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad and not _in_backward():
            first.register_hook(lambda _: self.storages.mark(at))


def _alike(every: list[Any], own: Any, *_: Any) -> None:
    """In the place of what other ranks say: what this one does."""
    every[:] = [own] * len(every)


def _in_backward() -> bool:
    """Whether the autograd engine runs, which on the CPU is in this thread."""
    return torch._C._current_autograd_node() is not None


def _model(job: RankJob) -> nn.Module:
    """The real model on meta, training."""
    prepared = prepare(config_of(job.config, "the model"), Sink())
    if prepared is None:
        raise ValueError("planc cannot build the model")
    with torch.device("meta"):
        model: nn.Module = training_model(*prepared, job.step.dtype, job.step.attention)
    return model


def _zero(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()


def _layer(name: str) -> str:
    """The kind of layer that a module is in, or its own name outside layers."""
    head, number, _ = generic(name).partition(".*")
    return head + number


if __name__ == "__main__":
    sys.exit(main())
