"""Counts the bytes that each pipeline rank holds in a step, by running it.

Bytes of each moment are a constant and a multiple of the layers, as long as layers of the same
kinds follow each other. So a deep model is run with a few layers, and with one period of them
more; where that cannot be done, as it is. A pipeline's microbatches do the same, once as many as
its schedule keeps are on the way.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from planc.compiler import Compiled, compile
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Span
from planc.ir.nodes import Plan
from planc.ir.stand_in import kinds_of
from planc.model import cache
from planc.model.facts import Modules, most_stored
from planc.model.layer_kinds import block_lists, length
from planc.model.load import load_values
from planc.model.module_table import puts_images
from planc.ops.document import dumps
from planc.ops.lowered import Lowered
from planc.ops.pipeline import Pipeline, stages_of_rank
from planc.ops.registry import AnyOp
from planc.proxy.depth import Depth
from planc.sections import Hook
from planc.simulate.rank_job import RankJob, RankRunner, RankStep
from planc.tools.measure.images import grid_step, image_grid, image_shape

LEAST = 3
"""Periods of layers that are left: the first, the last and one between them. With one more, the
most that is held between them grows at its first layer or at its last one, whichever grows more,
and so it does with every other one.
"""


FILLED = 4
"""The rounds of microbatches, one for each pipeline rank, after which every further round holds the
same number of bytes more: schedules of two stages a rank have up to two rounds in flight.
"""


Held = Sequence[tuple[str, Mapping[str, int]]]
"""Moments by their names, in order, each with bytes by what they are."""


class OutOfMemory(NamedTuple):
    """A failed allocation of a device: the moment, the tensor to be made, torch's message."""

    moment: str
    what: str
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedRank:
    """
    Args:
        place: in the pipeline.
        moments: by their names, in the order of a step, what is held then: bytes by what they are.
        layers: the numbers of layers that were run; all of them where there is only one number.
        microbatches: the same of those of a pipeline.
        seconds: of the parts of a step, on a device.
        reserved: bytes that the allocator of CUDA took of the device; 0 elsewhere.
        missed: where a device had no more memory.
    """

    place: int
    moments: Mapping[str, Mapping[str, int]]
    layers: tuple[int, ...]
    microbatches: tuple[int, ...] = (1,)
    seconds: Mapping[str, float] = field(default_factory=dict)
    reserved: int = 0
    missed: OutOfMemory | None = None

    @property
    def largest(self) -> str:
        """The moment at which most is held."""
        return max(self.moments, key=self.bytes_at)

    @property
    def peak(self) -> int:
        """The most bytes that it holds."""
        return self.bytes_at(self.largest)

    def bytes_at(self, moment: str) -> int:
        """Bytes at a moment."""
        return sum(self.moments[moment].values())


class NotCountedError(Exception):
    """Why a rank cannot be counted.

    Args:
        reason: in words.
        where: the lines of the plan that are the reason, if some are.
    """

    def __init__(self, reason: str, *where: Span) -> None:
        super().__init__(reason)
        self.where = where

    def report(self, sink: Sink) -> None:
        """Reports PL727."""
        message = f"one rank alone cannot run this step: {self}"
        help = "`planc estimate` needs no run"
        sink.error("PL727", message, *self.where, help=help)


def count(
    compiled: Compiled,
    step: RankStep,
    runner: RankRunner | None = None,
    *,
    exact: bool = False,
    places: Sequence[int] = (),
    device: str = "",
    allow_code: bool = False,
) -> list[CountedRank]:
    """Runs each pipeline rank once, separately.

    Args:
        compiled: a plan without errors, for a transformers model.
        step: of one rank.
        runner: that runs the ranks of several plans; by default one of its own.
        exact: whether all layers are run.
        places: the pipeline ranks to run; none for all.
        device: `cpu` or `cuda`, which runs all layers on memory of its own; empty for fake tensors.
        allow_code: whether Python code that the plan names may be run.

    Raises:
        NotCountedError: the plan or the model cannot be run so.
    """
    require_runnable(compiled, device)
    _require_images(compiled, step, device)
    if compiled.lowered and (code := compiled.lowered.code) and not allow_code:
        raise NotCountedError(f"{code[0]} is code, imported only with --allow-code")
    with nullcontext(runner) if runner else RankRunner() as running:
        every_layer = exact or bool(device)
        work = _Work(compiled, step, running, every_layer, device, allow_code)
        pipeline_ranks = range(work.places)
        if other := [place for place in places if place not in pipeline_ranks]:
            raise NotCountedError(
                f"the pipeline has ranks 0 to {pipeline_ranks[-1]}, and no {other[0]}"
            )
        return [work.rank(place) for place in places or pipeline_ranks]


def _require_images(compiled: Compiled, step: RankStep, device: str) -> None:
    """Refuses images where it is not known how large they are, or which tokens are theirs."""
    facts = compiled.facts
    if step.image_size and not step.images:
        raise NotCountedError("an image size is of images, and the step has none: pass --images")
    if not step.images or facts is None:
        return
    if device:
        raise NotCountedError("images are run on fake tensors alone: random tokens are of none")
    if next(puts_images(facts), None) is None:
        raise NotCountedError("it is no model that puts images among tokens as planc knows it")
    shape = image_shape(facts.config)
    if shape is None:
        _require_grid(facts.config, step)
    elif step.image_size:
        size = f"{shape[1]} x {shape[2]}"
        raise NotCountedError(f"its configuration states the size of images, {size} pixels")


def _require_grid(config: Mapping[str, Any], step: RankStep) -> None:
    """Refuses images that are not grids of whole patches, or that a row of tokens cannot hold."""
    side = grid_step(config)
    if side is None or "image_token_id" not in config:
        raise NotCountedError("its configuration does not say how large images are")
    if not step.image_size:
        option = f"`--image-size {8 * side}x{8 * side}`"
        raise NotCountedError(
            f"its configuration does not say how large images are, as {option} does"
        )
    if any(pixels % side for pixels in step.image_size):
        raise NotCountedError(f"each side of its images has a multiple of {side} pixels")
    grid = image_grid(config, step.image_size)
    if grid and step.images * (grid.tokens + 1) > step.tokens:
        fits = f"{grid.tokens} tokens each, do not fit in a row of {step.tokens}"
        raise NotCountedError(f"{step.images} images, {fits}")


def require_runnable(compiled: Compiled, device: str = "") -> None:
    """Refuses what a rank alone, on a device or without values, cannot run."""
    facts, plan = compiled.facts, compiled.plan
    if facts is None or plan is None or compiled.lowered is None:
        raise NotCountedError("a lowered plan does not say how its modules are split")
    user_defined = bool(facts.code) or facts.user_model is not None
    reasons = {
        cache.not_installed(): cache.missing(),
        "it is not a transformers model that planc can build": user_defined
        or "model_type" not in facts.config,
        "it has no list of blocks": not any(block_lists(facts.model)),
    }
    for reason, applies in reasons.items():
        if applies:
            raise NotCountedError(reason)
    for reason, lines in _not_run(plan, compiled.lowered, device):
        if lines:
            raise NotCountedError(reason, *lines)


_OBSTACLES = Hook[Callable[[Plan], Iterator[tuple[str, list[Span]]]]](
    "estimate", "measurement_obstacles"
)


def _not_run(plan: Plan, lowered: Lowered, device: str) -> Iterator[tuple[str, list[Span]]]:
    """Yields the parts of a plan that one rank alone cannot run, each with the lines that ask for
    it.
    """
    section, backend = plan.fsdp, lowered.backend
    name = backend.TITLE if backend else ""
    yield f"{name} needs its library and all ranks", [op.origin for op in [backend] if op]
    shown = "bytes and times are told apart by modules, and compiled blocks show none"
    compiled = shown if device else "compiled code does not run on fake tensors"
    yield compiled, [op.origin for op in plan.compilations]
    for reasons in _OBSTACLES.find_all(plan.sections):
        yield from reasons(plan)
    offloaded = [rule.origin for rule in plan.checkpoint_rules if rule.hosts]
    shards = [section.offload.origin] if section and section.offload else []
    yield "what is offloaded is not on the device", [*shards, *offloaded]
    quantized = [op.origin for op in lowered.ops if op.READS_VALUES]
    yield "quantized weights have values", quantized


class _Pattern(NamedTuple):
    """Windows of a list of blocks in which kinds repeat after `period` blocks: the first block of
    each, and how many times.
    """

    period: int = 1
    windows: tuple[tuple[int, int], ...] = ()

    def remaining_blocks(self, blocks: int, periods: Sequence[int]) -> list[int]:
        """The blocks that are left with so many periods of each window."""
        gone: set[int] = set()
        for (start, times), left in zip(self.windows, periods, strict=True):
            gone |= {*range(start + left * self.period, start + times * self.period)}
        return [i for i in range(blocks) if i not in gone]

    def with_periods(self, periods: Sequence[int]) -> _Pattern:
        """The pattern of the blocks that are left."""
        windows, gone = [], 0
        for (start, times), left in zip(self.windows, periods, strict=True):
            windows.append((start - gone, left))
            gone += (times - left) * self.period
        return _Pattern(self.period, tuple(windows))


def _pattern(kinds: Sequence[Any]) -> _Pattern | None:
    """The pattern that leaves the fewest blocks; None where none repeats often enough."""
    patterns: list[tuple[int, _Pattern]] = []
    for period in range(1, len(kinds) // (LEAST + 2) + 1):
        windows, at = [], 0
        while at < len(kinds):
            end = at
            while end + period < len(kinds) and kinds[end] == kinds[end + period]:
                end += 1
            times = (end + period - at) // period
            if end > at and times >= LEAST + 2:
                windows.append((at, times))
                end = at + times * period - 1
            at = end + 1
        pattern = _Pattern(period, tuple(windows))
        if windows:
            patterns.append(
                (len(pattern.remaining_blocks(len(kinds), [LEAST] * len(windows))), pattern)
            )
    return min(patterns)[1] if patterns else None


class _Chosen(Depth):
    """Keeps the blocks that are chosen of lists of one length."""

    def __init__(self, blocks: int, kept: list[int]) -> None:
        super().__init__(1, {}, {})
        self.chosen = {blocks: kept}

    def _of_list(self, kinds: list[str]) -> list[int]:
        return self.chosen.get(len(kinds), [*range(len(kinds))])

    def _kept_layers(
        self, _config: Any, depth: int, _columns: Any, _least: int
    ) -> tuple[list[int], dict[str, int]]:
        return self.chosen.get(depth, [*range(depth)]), {}

    def select_blocks(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration with these blocks, also in its nested ones."""
        selected = copy.deepcopy(dict(config))
        for name, value in config.items():
            if name.endswith("_config") and isinstance(value, Mapping):
                selected[name] = self.select_blocks(value)
        self.shrink(config, selected, dict)
        return selected


def shallower(compiled: Compiled, layers: int, sink: Sink, device: str = "") -> Compiled:
    """The same plan for the model with fewer layers, which lie evenly between the first and the
    last, so that each kind is there as often as in the model.

    Args:
        sink: receives what is wrong with the plan then.
        device: as of `count`.

    Raises:
        NotCountedError: the plan cannot be run so, the model has fewer layers, or none in a list.
    """
    require_runnable(compiled, device)
    assert compiled.facts is not None
    at = max(block_lists(compiled.facts.model), key=length)
    depth = length(at)
    if not 0 < layers <= depth:
        raise NotCountedError(f"the model has {depth} layers, and {layers} were asked for")
    last = max(1, layers - 1)
    kept = [round(i * (depth - 1) / last) for i in range(layers)]
    return _with_blocks(compiled, at, kept, sink) if layers < depth else compiled


def _with_blocks(compiled: Compiled, at: Modules, kept: list[int], sink: Sink) -> Compiled:
    """The plan for a model with some of the blocks of a list."""
    facts = compiled.facts
    assert facts is not None
    values = _Chosen(length(at), kept).select_blocks(facts.config)
    small = load_values({**values, "architectures": [facts.name]}, "few layers", sink)
    return compile(
        compiled.files,
        small,
        sink,
        world_size=compiled.world_size,
        settings=compiled.settings,
    )


@dataclass(slots=True)
class _Depth:
    """A model of some depth, compiled, with the pattern of its blocks."""

    compiled: Compiled
    blocks: int
    pattern: _Pattern


@dataclass(slots=True)
class _Work:
    compiled: Compiled
    step: RankStep
    runner: RankRunner
    exact: bool
    device: str
    allow_code: bool
    at: Modules = field(init=False)
    depths: list[tuple[_Depth, int]] = field(init=False)
    form: list[Any] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        facts, plan = self.compiled.facts, self.compiled.plan
        assert facts is not None and plan is not None
        self.at = max(block_lists(facts.model), key=length)
        kinds = kinds_of(self.at, plan, facts)
        pattern = _pattern(kinds) or _Pattern()
        shared = (
            plan.replaced or plan.optimizer
        )  # what all layers share, and lists of so many elements
        few = bool(pattern.windows) and not self.exact and not shared
        self.depths = [*self._shallow(kinds, pattern)] if few else []
        self.depths = self.depths or [(_Depth(self.compiled, len(kinds), pattern), 0)]

    @property
    def rounds(self) -> list[tuple[int, int]]:
        """Numbers of microbatches: enough to fill the pipeline, then a round more, each with how
        many rounds are left out; all where there are few, or no even rounds.
        """
        assert self.compiled.plan is not None
        rule, each, total = self.compiled.plan.pipeline, self.places, self.microbatches
        few = FILLED * each
        whole = self.exact or rule is None or rule.op.rank_passes or total % each
        if whole or total < 2 * few + each:
            return [(total, 0)]
        return [(few, 0), (few + each, (total - few) // each)]

    @property
    def microbatches(self) -> int:
        """The number of microbatches of the pipeline; 1 without one."""
        assert self.compiled.plan is not None
        rule = self.compiled.plan.pipeline
        return rule.op.microbatches if rule else 1

    @property
    def places(self) -> int:
        plan = self.compiled.plan
        assert plan is not None
        return plan.mesh.size(plan.pipeline.op.axis) if plan.pipeline else 1

    def _shallow(self, kinds: list[Any], pattern: _Pattern) -> Iterator[tuple[_Depth, int]]:
        """A model with few blocks, then those with one period more of some windows, each with how
        many periods are left out of these; nothing where a shallow model is another one.
        """
        times = [n for _, n in pattern.windows]
        depths = []
        for more in (0, *sorted({*times})):
            periods = [LEAST + (n == more) for n in times]
            kept = pattern.remaining_blocks(len(kinds), periods)
            compiled = _with_blocks(self.compiled, self.at, kept, Sink())
            if not compiled.lowered or compiled.plan is None or compiled.facts is None:
                return
            small = next(a for a in block_lists(compiled.facts.model) if a.path == self.at.path)
            if kinds_of(small, compiled.plan, compiled.facts) != [kinds[i] for i in kept]:
                return
            small_pattern = pattern.with_periods(periods)
            depths.append((_Depth(compiled, len(kept), small_pattern), max(0, more - LEAST)))
        yield from depths

    def rank(self, place: int) -> CountedRank:
        """Counts the memory of one pipeline rank."""
        if place and not self.form:  # what the first stage sends has the form of all
            self._run(self.depths[0][0], 0, "", self.rounds[0][0])
        rounds = self.rounds
        runs = [self._runs(place, many) for many, _ in rounds]
        held = [self._held_bytes(answers) for answers in runs]
        if _less(held):  # at other microbatches most is held then, and rounds are not alike
            rounds = [(self.microbatches, 0)]
            runs = [self._runs(place, self.microbatches)]
            held = [self._held_bytes(runs[0])]
        first, names = runs[0][0], [name for name, _ in runs[0][0]["moments"]]
        layers = tuple(d.blocks for d, _ in self.depths)
        missed = first.get("missed")
        return CountedRank(
            place=place,
            moments=dict(_grown(held, rounds)),
            layers=layers,
            microbatches=tuple(many for many, _ in rounds),
            seconds=first.get("seconds", {}),
            reserved=first.get("reserved", 0),
            missed=OutOfMemory(names[-1], *missed) if missed else None,
        )

    def _runs(self, place: int, microbatches: int) -> list[dict[str, Any]]:
        """The answers of a rank for the model of each depth."""
        return [self._run(depth, place, self.device, microbatches) for depth, _ in self.depths]

    def _held_bytes(self, answers: list[dict[str, Any]]) -> Held:
        """The memory of the rank in the full model."""
        return _largest(_grown([answer["moments"] for answer in answers], self.depths))

    def _run(self, depth: _Depth, place: int, device: str, microbatches: int) -> dict[str, Any]:
        plan, lowered = depth.compiled.plan, depth.compiled.lowered
        assert plan is not None and lowered is not None and depth.compiled.facts is not None
        facts, op = depth.compiled.facts, plan.pipeline
        rows = self.step.rows
        if op:
            rows = rows // op.op.microbatches * microbatches
            lowered = _with_microbatches(lowered, microbatches)
        dtype = self.step.dtype or most_stored(facts)
        answer = self.runner.ask(
            RankJob(
                step=replace(self.step, rows=rows, dtype=dtype),
                config={**facts.config, "architectures": [facts.name]},
                lowered=dumps(lowered),
                digest=depth.compiled.digest,
                rank=place * lowered.stride(op.op.axis) if op else 0,
                begins=tuple(
                    f"{self.at}.{first}" for first, _ in self._stage_starts(depth, plan, place)
                ),
                edges=dict(self._edges(depth, plan, place)),
                form=self.form if place else [],
                device=device,
                code=self.allow_code,
            )
        )
        if "error" in answer:
            raise NotCountedError(answer["error"])
        self.form = self.form or answer.get("form", [])
        return answer

    def _stage_starts(self, depth: _Depth, plan: Plan, place: int) -> list[tuple[int, int]]:
        """The first block of each stage of a rank, and the one after its last."""
        if plan.pipeline is None:
            return [(0, depth.blocks)]
        op = plan.pipeline.op
        stages = stages_of_rank(op.schedule, place, self.places, op.stages)
        return [(op.bounds[i], op.bounds[i + 1]) for i in stages]

    def _edges(self, depth: _Depth, plan: Plan, place: int) -> Iterator[tuple[str, str]]:
        """The blocks at which a moment of backward begins."""
        period = depth.pattern.period
        for first, end in self._stage_starts(depth, plan, place):
            yield f"{self.at}.{end - 1}", "backward of a layer"
            windows = [w for w in depth.pattern.windows if first <= w[0] < end]
            for start, times in windows:
                yield f"{self.at}.{start + (times - 1) * period - 1}", "backward of a layer"
            for at, (start, _) in enumerate(windows):
                moment = "backward of a layer" if at else "end of backward"
                yield f"{self.at}.{start + period - 1}", moment


def _grown(runs: Sequence[Held], parts: Sequence[tuple[object, int]]) -> Held:
    """The moments of a first run, each with what other runs hold more, as often as is left out.

    Args:
        runs: of different parts of a step or a model.
        parts: of each run, and how many are left out that are like what it has more.

    Raises:
        NotCountedError: the runs have other moments.
    """
    base, *others = runs
    names = [name for name, _ in base]
    if any([name for name, _ in run] != names for run in others):
        raise NotCountedError("its moments differ by what is run of it: use --exact")
    moments = []
    for at, (name, held) in enumerate(base):
        bytes_by_kind: Counter[str] = Counter(held)
        for run, (_, left) in zip(others, parts[1:], strict=True):
            more = Counter(run[at][1])
            more.subtract(held)
            for each, size in more.items():
                bytes_by_kind[each] += size * left
        moments.append((name, {what: size for what, size in bytes_by_kind.items() if size}))
    return moments


def _largest(moments: Held) -> Held:
    """The peak for each name: the moment that holds the most bytes. Omits the initial moment
    `parameters` if there are others.
    """
    peaks: dict[str, Mapping[str, int]] = {}
    for name, held in moments:
        if name == "parameters" and moments[1:]:
            continue
        if sum(held.values()) > sum(peaks.get(name, {}).values()):
            peaks[name] = held
    return [*peaks.items()]


def _less(runs: Sequence[Held]) -> bool:
    """Whether a part of what is held at a moment gets less from a run to the next one."""
    return any(
        name != other or any(size > more.get(what, 0) for what, size in held.items())
        for run, next_one in pairwise(runs)
        for (name, held), (other, more) in zip(run, next_one, strict=False)
    )


def _with_microbatches(lowered: Lowered, many: int) -> Lowered:
    """The plan with another number of microbatches."""

    def set_microbatches(op: AnyOp) -> AnyOp:
        return replace(op, microbatches=many) if isinstance(op, Pipeline) else op

    return lowered.map_ops(lambda ops: map(set_microbatches, ops))
