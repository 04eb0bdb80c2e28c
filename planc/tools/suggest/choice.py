"""The choices that a search can make for a plan, and the text of the plan that makes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from planc.checks.queries import divisors
from planc.elaborate.settings import (
    BY,
    LOSS_CHUNKS,
    MICROBATCHES,
    RECOMPUTE,
    SCHEDULE,
    SEQUENCE,
    STAGES_ROWS,
    STAGES_SEQ,
)
from planc.ir.nodes import Mesh, Plan, Unit
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.base import AxisRole
from planc.ops.lowered import ExpertMesh, MeshAxis
from planc.ops.phrases import literal
from planc.tools.estimate.from_plan import Batch

LARGEST = {AxisRole.TENSOR: 64, AxisRole.SEQUENCE: 64, AxisRole.EXPERT: 512, AxisRole.STAGE: 64}
"""The largest size of an axis that is tried; data axes have no limit."""

EXTENDED = (AxisRole.STAGE, AxisRole.SEQUENCE, AxisRole.EXPERT)
"""Axes that begin at one rank; their sizes are tried on the best meshes, one axis at a time."""

TOKENS = 8192
"""The most tokens of a pipeline's microbatch, where a row has no more."""

CHUNKS = (0, 2, 8)
"""The values of `loss_chunks` that are tried. Precision is not searched: it changes what the model
learns."""

SAVES = ("attention", "attention, matmul(every = 2)", "attention, matmul")
"""The operations that selective checkpointing saves, from the least memory to the least time."""

SCHEDULES = ("1f1b", "interleaved_1f1b")
"""The pipeline schedules that are tried; the others need their units gathered."""

LEANEST = {RECOMPUTE.word: True, SEQUENCE.word: SEQUENCE.default, LOSS_CHUNKS.word: CHUNKS[-1]}
FASTEST = {RECOMPUTE.word: False, SEQUENCE.word: SEQUENCE.default, LOSS_CHUNKS.word: 0}


Sizes = tuple[tuple[str, int], ...]
"""Mesh axes by name, outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """
    Args:
        sizes: of the mesh axes that are not `auto`, and of the ranks that divide experts, by name.
        options: of the searched options, by name.
        save: what a checkpointed layer saves, as in `ops(save = [...])`; empty for the plan's way.
        resident: whether the units of blocks stay gathered until their backward pass.
        budget: a share of what checkpointed layers would keep, and the rows and tokens of a pass.
    """

    sizes: Sizes
    options: tuple[tuple[str, object], ...]
    save: str = ""
    resident: bool = False
    budget: tuple[float, int, int] | None = None

    @property
    def action(self) -> str:
        """The checkpointing of layers; empty for the plan's own."""
        if self.budget:
            share, rows, tokens = self.budget
            return f"budget({share:g}, rows = {rows}, seq = {tokens})"
        return f"ops(save = [{self.save}])" if self.save else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All choices that extend one plan.

    Args:
        plan: the base without settings, with checkpointing where it has an option for it.
        defaults: the values of the plan's options without settings.
        axes: of the mesh, also those that an option makes.
        sizing: the options that make an axis and set its size, by the axis.
        optional: the axes that the mesh has where they have more than one rank.
        exchange: what attention exchanges between ranks with parts of sequences.
        experts: the name and the axes of ranks that can divide experts, None without any.
        name: of the plan in `extend`.
        family: of the model.
        fixed: axes and options that the user sets.
        requires: conditions that the user asks for, as in `require`.
    """

    plan: Plan
    defaults: Mapping[str, object]
    axes: tuple[MeshAxis, ...]
    sizing: Mapping[str, str]
    optional: tuple[str, ...]
    exchange: str
    experts: ExpertMesh | None
    batch: Batch
    name: str
    family: str
    world_size: int
    fixed: Mapping[str, object]
    requires: tuple[str, ...] = ()

    @property
    def rest_axis(self) -> MeshAxis:
        """The axis that takes the ranks that the others leave."""
        data = [a for a in self.axes if a.role is AxisRole.DATA]
        return next((a for a in self.axes if a.inferred), (data or list(self.axes))[-1])

    def meshes(self) -> Iterator[Sizes]:
        """Every mesh whose product is the world size, with one rank along the extended axes."""
        others = [a for a in self.axes if a.name != self.rest_axis.name]
        for sizes in product(*(self._sizes(a) for a in others)):
            yield from self._complete_sizes({a.name: s for a, s in zip(others, sizes, strict=True)})

    def _complete_sizes(self, given: Mapping[str, int]) -> Iterator[Sizes]:
        """The sizes with that of the rest, if the world size is a multiple of their product."""
        rest, ranks = self.rest_axis, {a.name for a in self.axes if a.name != self.rest_axis.name}
        left, over = divmod(self.world_size, prod(n for name, n in given.items() if name in ranks))
        if over or self.fixed.get(rest.name, left) != left:
            return
        sizes = {name: n for name, n in given.items() if name != rest.name}
        if not rest.inferred or rest.name in self.fixed:
            sizes[rest.name] = left
        if self.experts:
            name = self.experts.ranks.name
            sizes[name] = int(self.fixed.get(name, given.get(name, 1)))  # type: ignore[call-overload]
            inside = prod({**sizes, rest.name: left}.get(a, 1) for a in self.experts.axes)
            if inside % sizes[name]:
                return
        yield tuple(sizes.items())

    def fix_other_axes(self) -> Space:
        """The space in which axes that the user does not set have one rank, but for data axes."""
        sized = [a for a in self.axes if a.role in LARGEST and a.name != self.rest_axis.name]
        names = [self.sizing.get(a.name, a.name) for a in sized]
        names += [self.experts.ranks.name] if self.experts else []
        return replace(self, fixed={**dict.fromkeys(names, 1), **self.fixed})

    def neighbors(self, sizes: Sizes) -> Iterator[list[Sizes]]:
        """The meshes with another size of one of the extended axes: for each axis those with more
        ranks and those with fewer, the nearest first.
        """
        for axis in (a for a in self.axes if a.role in EXTENDED and a.name != self.rest_axis.name):
            others = list(self._resize(sizes, axis))
            here = dict(sizes).get(axis.name, 1)
            yield [o for o in others if dict(o)[axis.name] > here]
            yield [o for o in reversed(others) if dict(o)[axis.name] < here]

    def expert_divisions(self, sizes: Sizes) -> list[Sizes]:
        """The mesh with each other number of ranks that divide its experts, the fewest first."""
        divisions = self._resize(sizes, self.experts.ranks) if self.experts else ()
        return [other for other in divisions if other != sizes]

    def _resize(self, sizes: Sizes, axis: MeshAxis) -> Iterator[Sizes]:
        """The meshes with each size of an extended axis, the smallest first; none where the plan or
        the user fixes it.
        """
        if self.sizing.get(axis.name, axis.name) not in self.fixed:
            for n in divisors(self.world_size, LARGEST[axis.role]):
                yield from self._complete_sizes({**dict(sizes), axis.name: n})

    def _sizes(self, axis: MeshAxis) -> tuple[int, ...]:
        given = self.fixed.get(self.sizing.get(axis.name, axis.name))
        if isinstance(given, int):
            return (given,)
        if axis.role in EXTENDED:
            return (1,)
        return divisors(self.world_size, LARGEST.get(axis.role, self.world_size))

    def alike(self, choice: Choice) -> Choice:
        """The choice without replicas: what one rank computes and keeps is the same."""
        if not self.rest_axis.inferred or self.rest_axis.name in self.fixed:
            return choice
        data = {a.name for a in self.axes if a.role is AxisRole.DATA} - set(self.fixed)
        sizes = tuple((n, 1 if n in data else size) for n, size in choice.sizes)
        return replace(choice, sizes=sizes)

    def mesh(self, sizes: Sizes) -> Mesh:
        """The plan's mesh with other sizes."""
        rest = self.rest_axis.name
        given = dict.fromkeys((a.name for a in self.axes), 1) | dict(sizes)
        ranks = (given[a.name] for a in self.axes if a.name != rest)
        given[rest] = self.world_size // prod(ranks)
        optional_axes = (*self.sizing, *self.optional)
        axes = (a for a in self.axes if given[a.name] > 1 or a.name not in optional_axes)
        has_experts = self.experts is not None and given.get(self.experts.ranks.name, 1) > 1
        divided = self.experts if has_experts else None
        return replace(self.plan.mesh, axes=tuple(axes), experts=divided).with_sizes(given)

    def choices(self, sizes: Sizes) -> Iterator[Choice]:
        """The ways to checkpoint and to compute the loss on one mesh."""
        name = LOSS_CHUNKS.word
        for chunks in CHUNKS if self._open(name) else (None,):
            loss = {} if chunks is None else {name: chunks}
            for way, save in self._ways():
                probe = self.probe(sizes, FASTEST | loss | way)
                yield replace(probe, save=save)

    def variations(self, choice: Choice) -> Iterator[Choice]:
        """A choice with another rule for resharding, and with sequence parallelism or without."""
        if any(self._lists()):
            yield replace(choice, resident=not choice.resident)
        options, microbatches, schedule = dict(choice.options), MICROBATCHES.word, SCHEDULE.word
        changes: dict[str, Iterable[object]] = {}
        if microbatches in options:
            count = int(str(options[microbatches]))
            changes[microbatches] = {max(1, count // 2), count * 2}
            changes[schedule] = SCHEDULES if self._open(schedule) else ()
            changes[BY.word] = (BY.default, "work") if self._open(BY.word) else ()
        split = self.mesh(choice.sizes).size(*self._axis_names(AxisRole.TENSOR)) > 1
        if split and self._open(SEQUENCE.word):
            changes[SEQUENCE.word] = (SEQUENCE.default, False)
        for name, values in changes.items():
            yield from (
                replace(choice, options=tuple({**options, name: value}.items()))
                for value in values
                if value != options.get(name, self.defaults.get(name))
            )

    def balance_stages(self, choice: Choice, rows: int) -> Choice | None:
        """A choice with stages that take as much time each, for passes of so many rows; None where
        its stages cannot be cut so.
        """
        way = {
            BY.word: "balanced",
            STAGES_ROWS.word: rows,
            STAGES_SEQ.word: self.batch.sequence,
        }
        if MICROBATCHES.word not in dict(choice.options) or not all(map(self._open, way)):
            return None
        return replace(choice, options=tuple({**dict(choice.options), **way}.items()))

    def probe(self, sizes: Sizes, wanted: Mapping[str, object]) -> Choice:
        """The choice with some options, where the plan has them; the others stay."""
        options = {name: value for name, value in wanted.items() if self._open(name)}
        mesh, microbatches = self.mesh(sizes), MICROBATCHES.word
        if mesh.size(*self._axis_names(AxisRole.STAGE)) > 1 and self._open(microbatches):
            rows = self.batch.global_batch // mesh.size(*self._axis_names(AxisRole.DATA))
            largest = max(1, TOKENS // self.batch.sequence)
            options[microbatches] = rows // divisors(rows, largest)[-1] if rows else 1
            if self._open(BY.word):
                options[BY.word] = "work"
        return Choice(sizes=sizes, options=tuple(options.items()))

    def _axis_names(self, role: AxisRole) -> tuple[str, ...]:
        return tuple(a.name for a in self.axes if a.role is role)

    def _open(self, name: str) -> bool:
        return name in self.plan.options and name not in self.fixed

    def _ways(self) -> Iterator[tuple[dict[str, object], str]]:
        """Options and saved operators of each way to checkpoint."""
        on: dict[str, object] = {}
        if self._open(RECOMPUTE.word):
            yield {RECOMPUTE.word: False}, ""
            on = {RECOMPUTE.word: True}
        yield on, ""
        if self.fixed.get(RECOMPUTE.word, True) and self._rules():
            yield from ((on, save) for save in SAVES)

    def checkpoints(self, choice: Choice) -> bool:
        """Whether a choice checkpoints layers in a way that the search can change."""
        on = dict(choice.options).get(RECOMPUTE.word, self.fixed.get(RECOMPUTE.word, True))
        return bool(on and self._rules())

    def _rules(self) -> tuple[Checkpoint, ...]:
        return tuple(rule for rule in self.plan.checkpoint_rules if not rule.save)

    def _lists(self) -> Iterator[Unit]:
        """Units of the entries of a list that are resharded after forward."""
        for unit in self.plan.fsdp.units if self.plan.fsdp else ():
            if unit.reshard is True and not unit.group and len(unit.members[0]) > 1:
                yield unit

    def words(self, choice: Choice) -> str:
        """Describes a choice besides the mesh; options at their defaults are left out."""
        options = dict(choice.options)
        way = f"save {choice.save}" if choice.save else "full"
        way = choice.action if choice.budget else way
        known = RECOMPUTE.word in self.plan.options or self.plan.checkpoint_rules
        on = options.pop(RECOMPUTE.word, self.fixed.get(RECOMPUTE.word, True))
        words = [f"checkpoint {way if on else 'none'}"] if known else []
        changed = {n: v for n, v in options.items() if v != self.defaults[n]}
        name = self.experts.ranks.name if self.experts else ""
        if (divided := dict(choice.sizes).get(name, 1)) > 1:
            words.append(f"{name} {divided}")
        words += [f"{name} = {literal(value)}" for name, value in changed.items()]
        return "; ".join([*words, *(["reshard = never"] if choice.resident else [])])

    def values(self, choice: Choice) -> dict[str, object]:
        """The options of a choice, those that make its axes, and those that the user sets."""
        sizes = {o: n for a, n in choice.sizes if (o := self.sizing.get(a))}
        given = {n: v for n, v in self.fixed.items() if n in self.defaults}
        return {**dict(choice.options), **sizes, **given}

    # The text -----------------------------------------------------------------------------------

    def text(self, choice: Choice) -> str:
        """The plan that extends the base by a choice, before it is laid out."""
        return "\n\n".join(self.parts(choice)) + "\n"

    def parts(self, choice: Choice) -> tuple[str, ...]:
        """Its statements, those about one thing together: many choices share them."""
        parts = [f"plan suggested for {self.family}", f'extend "{self.name}"']
        changed = [(n, v) for n, v in self.values(choice).items() if v != self.defaults[n]]
        parts.append("\n".join(f"override option {n} = {literal(v)}" for n, v in changed))
        sizes = {a.name: a.size for a in self.plan.mesh.axes}
        axis_sizes = [(n, s) for n, s in choice.sizes if n not in self.sizing]
        axes = [(f"override {n}", str(s)) for n, s in axis_sizes if s != sizes.get(n, 1)]
        parts.append(_block("mesh", axes, " = "))
        if choice.action:
            rules = [(f"override {rule.modules}", choice.action) for rule in self._rules()]
            parts.append(_block("checkpoint", rules))
        if choice.resident and self.plan.fsdp:
            where = self.plan.fsdp.origin
            header = where.source.line(where.line).partition("{")[0].strip()
            units = [(f"override {u.members[0]}", _resident(u)) for u in self._lists()]
            parts.append(_block(header, units))
        parts.append("\n".join(f'require {r} "asked for: {_quote(r)}"' for r in self.requires))
        return tuple(part for part in parts if part)


def _resident(unit: Unit) -> str:
    """The action of a unit's line, with `reshard = never`."""
    return f"unit({', '.join(({**unit.explicit, 'reshard': 'reshard = never'}).values())})"


def _quote(text: str) -> str:
    return text.replace('"', "'")


def _block(header: str, lines: list[tuple[str, str]], between: str = " : ") -> str:
    """`header { ... }`; empty without lines."""
    inside = "".join(f"    {left}{between}{right}\n" for left, right in lines)
    return f"{header} {{\n{inside}}}" if lines else ""
