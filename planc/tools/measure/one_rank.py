"""One rank of a plan on torch's fake process group and fake tensors: `python -m
planc.tools.measure.one_rank` reads jobs, one line of JSON each, and answers each with a line.

Every rank is a fork of its own: torch's caches of DTensor keep meshes, so a process can be a rank
once. CUDA does not survive a fork, and an import may start it: a rank on it is a process that
imports anew, with the argument `alone`. This module imports torch.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

# torch reads them when it is imported: the profiler says when it begins, and that a block is older
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from torch import Tensor, distributed, nn

from planc.compat.fake_ranks import FakeStore  # and _dynamo, which a first step would import
from planc.compat.fakes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from planc.diagnostics.diagnostic import Sink
from planc.model.config import config_of
from planc.model.facts import generic
from planc.model.fused_kernels import hide
from planc.model.sources.huggingface import prepare, quiet, training_model
from planc.ops.document import loads
from planc.ops.lowered import Lowered
from planc.proxy.input_search import forward_arguments
from planc.proxy.stack_frames import of_a_model
from planc.runtime.collectives import Collectives, named_modules
from planc.runtime.executor import apply_lowered
from planc.runtime.run import Run
from planc.runtime.standalone.kept_states import KeptState
from planc.simulate.fake_ranks import FakeFloats, isolate_rank, sent_by, with_memory
from planc.simulate.rank_job import RankJob, RankRunner
from planc.tools.measure.allocations import Allocations, Clock, CudaAllocations
from planc.tools.measure.calls import BlockCalls
from planc.tools.measure.images import ImageGrid, image_grid, image_shape
from planc.tools.measure.storages import Storages

_OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, foreach=True),
    "adam": partial(torch.optim.Adam, foreach=True),
    "sgd": partial(torch.optim.SGD, foreach=True),
    "momentum": partial(torch.optim.SGD, momentum=0.9, foreach=True),
}


_KINDS = ("token_type_ids", "mm_token_type_ids")
"""Arguments that say which tokens are of images."""
TIMED_STEPS, TIMED_SECONDS = 5, 10.0
"""The most steps that are timed, and the seconds after which no other one begins."""


def main() -> int:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # what torch says of fakes is not about the plan
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a model may print
    for line in sys.stdin:
        job = RankJob.loads(line)
        if sys.argv[1:]:  # one job alone
            print(json.dumps(_answer(job)), file=answers)
            return 0
        if job.device == "cuda":
            words = [sys.executable, "-P", "-W", "ignore", "-m", RankRunner.MODULE, "alone"]
            ran = subprocess.run(words, check=False, input=line, stdout=subprocess.PIPE, text=True)
            _report(ran.stdout, ran.returncode, answers)
            continue
        hide()
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
        _report(text, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), answers)
    return 0


def _report(text: str, status: int, answers: TextIO) -> None:
    print(text.strip() or json.dumps({"error": f"it ended with code {status}"}), file=answers)
    answers.flush()


def _answer(job: RankJob) -> dict[str, Any]:
    try:
        return _Rank(job).answer()
    except Exception as error:
        if os.environ.get("PLANC_TRACEBACK"):
            traceback.print_exc()
        return {"error": why(error)}


def why(error: Exception) -> str:
    """Why a rank cannot be run, with the line of the model's code that it is at."""
    stack = traceback.extract_tb(error.__traceback__)
    model_frames = [frame for frame in stack if of_a_model(frame.filename)]
    at = f"{Path(model_frames[-1].filename).name}:{model_frames[-1].lineno}" if model_frames else ""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        text = f"`{model_frames[-1].line}`, {at}," if model_frames else "the model's code"
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
        self.passing = 0
        self.failed = ""
        self.clock: Clock | None = None
        self.takes: tuple[str, ...] = ()
        self.device = job.device or "cpu"
        self.form = job.form or None
        kinds = {"cpu": Allocations, "cuda": CudaAllocations}
        counts = Storages if job.calls else kinds.get(job.device, Storages)
        self.held: Storages | Allocations = counts(self.what)

    def answer(self) -> dict[str, Any]:
        job = self.job
        if self.device == "cuda" and not torch.cuda.is_available():
            return {"error": "torch finds no CUDA device here"}
        distributed.init_process_group(
            "fake", rank=job.rank, world_size=self.lowered.world_size, store=FakeStore()
        )
        mode = FakeFloats if job.step.image_size else FakeTensorMode
        fake = nullcontext() if job.device else mode(allow_non_fake_inputs=True)
        # by default backward of CUDA runs in a thread of its own, of which modules do not know
        with torch.autograd.set_multithreading_enabled(False):
            if job.calls:
                return self._block_calls(fake)
            return self._record_calls(fake) if job.order else self._measure(fake)

    def _apply(self) -> tuple[Run, dict[int, str]]:
        """The model without memory, as the plan has it, and the kinds of its modules."""
        job = self.job
        model = _model(job)
        self.takes = forward_arguments(type(model))
        names = {id(m): _layer(n) for n, m in named_modules(model).items()}
        names[id(model)] = type(model).__name__
        run = apply_lowered(
            model, self.lowered, digest=job.digest, device_type=self.device, allow_code=job.code
        )
        return run, names

    def _record_calls(self, fake: AbstractContextManager[object]) -> dict[str, Any]:
        """The calls of the rank in its first step, and in another."""
        run, _ = self._apply()
        names = {id(module): name for name, module in named_modules(run.model).items()}
        noted = Collectives(names, lambda: self.stepping)
        steps = []
        with quiet(), fake:
            self._allocate(run.model)
            optimizer, batches = self._optimizer(run), self._batches()
            with isolate_rank(run, self.form), noted.recording():
                for _ in range(2):
                    before = len(noted.calls)
                    self._step(run, optimizer, batches)
                    steps.append(noted.calls[before:])
        return {"steps": steps, "form": sent_by(run)}

    def _block_calls(self, fake: AbstractContextManager[object]) -> dict[str, Any]:
        """The calls of checkpointed modules in a forward pass."""
        run, _ = self._apply()
        names = {id(module): name for name, module in named_modules(run.model).items()}
        noted = BlockCalls(names, self.job.calls)
        with quiet(), fake:
            self._allocate(run.model)
            optimizer, batches = self._optimizer(run), self._batches()
            beside = isolate_rank(run, None, values=bool(self.job.device))
            with beside, self.held.counting(), noted.noting():
                self._step(run, optimizer, batches)
        return noted.answer()

    def _measure(self, fake: AbstractContextManager[object]) -> dict[str, Any]:
        """The memory of two steps, and on a device the seconds of some more."""
        values = bool(self.job.device)
        answer: dict[str, Any] = {}
        try:
            with ExitStack() as around, ExitStack() as counted:
                if values:  # what a plan makes while it is applied is held too
                    counted.enter_context(self.held.counting())
                self.held.mark("parameters")
                run, names = self._apply()
                beside = isolate_rank(run, self.form, values=values)
                for context in (quiet(), fake, self._watch(run, names), beside):
                    around.enter_context(context)
                around.enter_context(self.held.with_host())
                if not values:
                    counted.enter_context(self.held.counting())
                self._allocate(run.model)
                optimizer, batches = self._optimizer(run), self._batches()
                self.held.note([*run.model.parameters(), *run.model.buffers()], "parameters")
                for _ in range(2):
                    self._step(run, optimizer, batches)
                counted.close()
                answer["form"] = sent_by(run)
                if values:
                    answer["seconds"] = self._time_steps(run, optimizer, batches)
        except RuntimeError as error:
            answer["missed"] = (self.failed or self.what(), _no_memory(error))
        if self.device == "cuda":
            answer["reserved"] = torch.cuda.max_memory_reserved()
        return answer | {"moments": [*self.held.moments()]}

    def _time_steps(
        self, run: Run, optimizer: Any, batches: list[dict[str, Tensor]]
    ) -> dict[str, float]:
        """Seconds of the parts of the fastest of some steps."""
        timings: list[dict[str, float]] = []
        end = time.perf_counter() + TIMED_SECONDS
        while len(timings) < TIMED_STEPS and (not timings or time.perf_counter() < end):
            self.clock = Clock(self.device)
            self.record_part()
            self._step(run, optimizer, batches)
            self.clock.start_part("end")
            timings.append(self.clock.spent())
        self.clock = None
        return min(timings, key=lambda parts: sum(parts.values()))

    def _allocate(self, model: nn.Module) -> None:
        """Gives the model memory; values that are no numbers would meet routers."""
        with_memory(model, self.device)
        if self.job.device:
            generator = torch.Generator(self.device).manual_seed(0)
            with torch.no_grad():
                for buffer in model.buffers():
                    buffer.zero_()
                for parameter in model.parameters():
                    local = getattr(parameter, "_local_tensor", parameter)
                    if local.is_floating_point():
                        local.normal_(std=0.02, generator=generator)

    def _batches(self) -> list[dict[str, Tensor]]:
        step = self.job.step
        passes = step.micro_batches
        if not self.job.device:  # those after the second hold what that one holds
            passes = min(2, passes)
        if grid := image_grid(self.job.config, step.image_size):
            return [self._with_grids(grid) for _ in range(passes)]
        size = (passes, step.rows, step.tokens)
        if self.job.device and not self.job.order:
            tokens = torch.randint(self._words(), size, device=self.device)
        else:
            tokens = torch.zeros(size, dtype=torch.long, device=self.device)
        return [{"input_ids": ids, "labels": ids, **self._images(ids)} for ids in tokens]

    def _with_grids(self, grid: ImageGrid) -> dict[str, Tensor]:
        """A batch of images and their placeholders, whose integers have values: the model's code
        reads them.
        """
        step = self.job.step
        count = step.rows * step.images
        pixels = torch.zeros(count * grid.rows * grid.columns, grid.width)
        with unset_fake_temporarily():
            tokens = torch.zeros(step.rows, step.tokens, dtype=torch.long)
            for image in range(step.images):  # a token of text separates them
                begin = image * (grid.tokens + 1) + 1
                tokens[:, begin : begin + grid.tokens] = grid.token
            kinds = (tokens == grid.token).long()
            grids = torch.tensor([[1, grid.rows, grid.columns]] * count)
        images = {"pixel_values": pixels, "image_grid_thw": grids}
        return {
            "input_ids": tokens,
            "labels": tokens,
            **images,
            **{name: kinds for name in _KINDS if name in self.takes},
        }

    def _images(self, tokens: Tensor) -> dict[str, Tensor]:
        """Images of a batch, and what its tokens are; the places of images have no values."""
        shape = image_shape(self.job.config)
        if not self.job.step.images or shape is None:
            return {}
        pixels = torch.zeros(len(tokens) * self.job.step.images, *shape)
        kinds = {n: torch.zeros_like(tokens) for n in _KINDS if n in self.takes}
        return {"pixel_values": pixels, **kinds}

    def _words(self) -> int:
        config = self.job.config
        return int((config.get("text_config") or config)["vocab_size"])

    def _optimizer(self, run: Run) -> Any:
        if self.lowered.optimizer_rules:  # it reads which ranks a mesh has, and asks the others
            asked = mock.patch.object(distributed, "all_gather_object", _alike)
            with unset_fake_temporarily(), asked:
                return run.optimizer(lr=1e-4)
        trained = [p for p in run.model.parameters() if p.requires_grad]
        return run.optimizer(_OPTIMIZERS[self.job.step.optimizer](trained, lr=1e-4))

    def _step(self, run: Run, optimizer: Any, batches: list[dict[str, Tensor]]) -> None:
        self.held.mark("loss")
        run.forward_backward(batches)
        grads = (p.grad for p in run.model.parameters())
        self.held.note((g for g in grads if g is not None), "gradients")
        self.held.mark("optimizer step")
        self._stepping("clipping")
        run.clip_grad_norm_(1.0)
        self._stepping("optimizer")
        optimizer.step()
        states = (value for held in optimizer.state.values() for value in held.values())
        self.held.note((t for s in states for t in _on_device(s)), "optimizer state")
        optimizer.zero_grad()
        self._stepping("")

    # What runs ------------------------------------------------------------------------------------

    def what(self) -> str:
        """The kind of a storage that is made now."""
        if self.stepping:
            return "copies in the optimizer"
        if self.running:
            kind = "recomputed activations" if self.passing else "activations"
            return f"{kind} of {self.running[-1]}"
        return "gradients of activations" if self.passing else "the batch"

    def part(self) -> str:
        """The part of a step that runs now."""
        if self.stepping:
            return self.stepping
        if self.running:
            return f"{'recomputation' if self.passing else 'forward'} of {self.running[-1]}"
        return "backward" if self.passing else "between passes"

    def record_part(self) -> None:
        """Tells that another part runs."""
        self.held.record_part()
        if self.clock:
            self.clock.start_part(self.part())

    def _stepping(self, what: str) -> None:
        self.stepping = what
        self.record_part()

    @contextmanager
    def _guard_part(self) -> Iterator[None]:
        """Surrounds a part, and says the innermost one that fails."""
        self.record_part()
        try:
            yield
        except Exception:
            self.failed = self.failed or self.what()
            raise

    @contextmanager
    def _watch(self, run: Run, names: dict[int, str]) -> Iterator[None]:
        """Follows which module runs and where backward is."""
        call, backward = nn.Module.__call__, torch.autograd._engine_run_backward

        def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = names.get(id(module))
            if name is None:
                return call(module, *args, **kwargs)
            self.running.append(name)
            try:
                with self._guard_part():
                    return call(module, *args, **kwargs)
            finally:
                self.running.pop()
                self.record_part()

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            self.passing += 1
            try:
                with self._guard_part():
                    return backward(*args, **kwargs)
            finally:
                self.passing -= 1
                self.record_part()

        handles = []
        blocks = named_modules(run.model)
        for name in self.job.begins:
            handles.append(blocks[name].register_forward_pre_hook(self._began))
        for name, at in self.job.edges.items():
            handles.append(blocks[name].register_forward_hook(partial(self._mark_backward, at)))
        with (
            mock.patch.object(nn.Module, "__call__", call_module),
            mock.patch.object(torch.autograd, "_engine_run_backward", run_backward),
        ):
            yield
        for handle in handles:
            handle.remove()

    def _began(self, *_: Any) -> None:
        if not self.passing:
            self.held.mark("loss")

    def _mark_backward(self, at: str, _module: Any, _args: Any, output: Any) -> None:
        """From the gradient of a block's output on, backward is at another place."""
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad and not self.passing:
            first.register_hook(lambda _: self.held.mark(at))


def _no_memory(error: Exception) -> str:
    """The message of an allocator without enough memory.

    Raises:
        Exception: the error, which is another one.
    """
    text = str(error).partition(chr(10))[0]
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
        return text
    raise error


def _alike(objects: list[Any], value: Any, *_: Any) -> None:
    """Replaces an exchange of objects: every rank has this one's."""
    objects[:] = [value] * len(objects)


def _model(job: RankJob) -> nn.Module:
    """The real model on meta, training."""
    prepared = prepare(config_of(job.config, "the model"), Sink())
    if prepared is None:
        raise ValueError("planc cannot build the model")
    with torch.device("meta"):
        model: nn.Module = training_model(*prepared, job.step.dtype, job.step.attention)
    return model


def _on_device(state: Any) -> list[Tensor]:
    """The tensors of an optimizer's state that are on the device."""
    if isinstance(state, KeptState):
        return [] if state.host else state.parts
    return [state] if isinstance(state, Tensor) else []


def _layer(name: str) -> str:
    """The kind of layer that a module is in, or its own name outside layers."""
    head, number, _ = generic(name).partition(".*")
    return head + number


if __name__ == "__main__":
    sys.exit(main())
