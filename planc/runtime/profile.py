"""A trace of some steps by torch's profiler, whose ranges have the plan's lines.

A module that a line decides has a range around its forward and its recomputation, and so has each
collective, in backward and in FSDP's units too: which line it is of follows as for `planc hang`.
Nothing of this is left on the model.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import distributed, nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from planc.lowering.rank_calls import Groups, RankCall, calls, kind_text, pipeline_rank_of
from planc.ops.base import Op
from planc.ops.lowered import Lowered
from planc.runtime.collectives import Collectives, named_modules

_log = logging.getLogger("planc")
_ACTIVE = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


class StepProfile:
    """The profile of a rank.

    Attributes:
        path: of its trace; None on a rank that writes none.
    """

    def __init__(self, path: Path | None, ranges: LineRanges | None, profiler: Any) -> None:
        self.path, self.ranges, self.profiler = path, ranges, profiler
        self.naming = ExitStack()

    def step(self) -> None:
        """A step of the training loop has ended."""
        if self.profiler is not None:
            self.naming.close()
            self.profiler.step()
            self.name()

    def name(self) -> None:
        """Names ranges where the step that begins is recorded."""
        if self.ranges is not None and self.profiler.current_action in _ACTIVE:
            self.naming.enter_context(self.ranges.name_ranges())


@contextmanager
def profiling(
    model: nn.Module,
    lowered: Lowered,
    device: str,
    folder: Path,
    *,
    steps: tuple[int, int, int],
    every_rank: bool,
    options: dict[str, Any],
) -> Iterator[StepProfile]:
    """Implements `Run.profile`; `steps` are those that wait, warm up and are recorded."""
    rank = distributed.get_rank()
    if rank and not every_rank:
        yield StepProfile(None, None, None)
        return
    wait, warmup, active = steps
    path = folder / f"rank_{rank}.json"

    def write(profiler: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        written.append(path)

    written: list[Path] = []
    cuda = [ProfilerActivity.CUDA] if device == "cuda" else []
    plan = schedule(wait=wait, warmup=warmup, active=active, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU, *cuda], schedule=plan, on_trace_ready=write, **options
    ) as profiler:
        step_profile = StepProfile(path, LineRanges(model, lowered, rank), profiler)
        step_profile.name()
        with step_profile.naming:
            yield step_profile
    if not written:
        least = wait + warmup
        _log.warning("no trace was written: call its `step()` after each of %d steps", least + 1)


class LineRanges(Collectives):
    """Names what runs by the plan's lines.

    Args:
        rank: of the mesh.
    """

    def __init__(self, model: nn.Module, lowered: Lowered, rank: int) -> None:
        names = {id(module): name for name, module in named_modules(model).items()}
        super().__init__(names, lambda: "")
        self.lowered, self.rank, self.groups = lowered, rank, Groups(lowered)
        self.compiled = bool(lowered.compilations)
        self.lines: dict[str, list[str]] = defaultdict(list)
        for op in lowered.stages[pipeline_rank_of(lowered, rank)].ops:
            for name in (name for modules in op.traced_modules for name in modules.names()):
                self.lines[name].append(f"{_place(op)} {name or 'the model'} {op.short_name}")

    @contextmanager
    def name_ranges(self) -> Iterator[None]:
        """Names what runs inside. Compiled code runs only where no mode sees its operators, so its
        plan's collectives have torch's own names.
        """
        with self.following(), nullcontext() if self.compiled else self:
            yield

    def entering(self, name: str) -> AbstractContextManager[object]:
        return _ranges(self.lines.get(name, ()))

    def calling(self, call: dict[str, Any] | None) -> AbstractContextManager[object]:
        if call is None:
            return nullcontext()
        [rank_call] = calls([call], self.rank, self.lowered, self.groups)
        return _ranges([label(rank_call)])


@contextmanager
def _ranges(labels: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for each in labels:
            stack.enter_context(record_function(each))
        yield


def label(call: RankCall) -> str:
    """`plans/llama.plan:12 model.layers.0.mlp.down_proj rowwise reduce-scatter over tp (forward)`;
    without a line where the training loop makes the call.
    """
    what = f"{kind_text(call.kind)} over {call.over}"
    if call.op is None:
        return f"no line: {what}"
    at = call.unit if call.gathers_unit else call.module
    words = (_place(call.op), at, call.op.short_name, what)
    return " ".join(filter(None, words)) + f" ({call.during})" * bool(call.during)


def _place(op: Op) -> str:
    return op.place or "inferred"
