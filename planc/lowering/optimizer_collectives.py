"""The collectives of Muon in a step: all shards of its matrices to their owners, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from planc.ir.parameter_owners import divided_by, inner_first
from planc.lowering.step import EXCHANGE, Sent, Step
from planc.model.facts import DTYPE_BYTES, Modules, Parameter
from planc.ops.base import Op
from planc.ops.fsdp import FullyShard, Spread
from planc.ops.lowered import Stage
from planc.ops.optimizer import BUCKET, Cut, Muon, Optimize

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """Parameters of like modules that Muon steps alike.

    Args:
        op: the operation that steps them.
        parameter: with the dtype in which it is stepped; None where only its name is known.
        cut: the matrices in it.
        count: of the modules.
        axes: whose ranks hold pieces of each.
    """

    op: Optimize
    parameter: Parameter | None
    cut: Cut
    count: int
    axes: Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Equal buckets of matrices that Muon steps alike on the ranks of one place.

    Args:
        matrices: in all of them.
        count: of the buckets.
        size: bytes of a rank's shards in one, the mean of the ranks; None where that is not known.
    """

    matrices: tuple[Matrices, ...]
    count: int
    size: int | None

    @property
    def communication(self) -> Sent:
        """Its shards to the owners of the matrices, and back."""
        first = self.matrices[0]
        return Sent(
            word=first.op.WORD,
            where=f"{sum(matrix.count for matrix in self.matrices):,} weights that muon steps",
            kind=EXCHANGE,
            axes=first.axes,
            times=2 * self.count,
            size=self.size,
        )


def optimizer_collectives(op: Optimize, step: Step) -> Iterator[Sent]:
    """Two all-to-alls for each bucket, told by the first operation whose matrices are in it."""
    places = [stage for stage in step.lowered.stages if op in stage.ops]
    for stage in places[:1]:
        yield from (b.communication for b in buckets_of(stage, step) if b.matrices[0].op is op)


def buckets_of(stage: Stage, step: Step) -> Iterator[Buckets]:
    """The buckets of one pipeline rank."""
    groups: dict[object, list[Matrices]] = {}
    for matrices in _matrices(stage, step):
        groups.setdefault(_alike(matrices), []).append(matrices)
    for group in groups.values():
        ranks, known = step.lowered.axis_size(*group[0].axes), group[0].parameter
        elements = sum(
            matrices.parameter.numel * matrices.count for matrices in group if matrices.parameter
        )
        count = max(1, -(-elements // (BUCKET * ranks)))
        size = elements * DTYPE_BYTES[known.dtype] // (ranks * count) if known else None
        yield Buckets(matrices=tuple(group), count=count, size=size)


def _alike(matrices: Matrices) -> object:
    """The key that is equal for parameters of one bucket."""
    algorithm, op = matrices.op.algorithm, matrices.op
    assert isinstance(algorithm, Muon)
    dtype = matrices.parameter and matrices.parameter.dtype
    return replace(algorithm, units=()), op.lr, op.weight_decay, op.state, matrices.axes, dtype


def _matrices(stage: Stage, step: Step) -> Iterator[Matrices]:
    """Yields the matrices that Muon steps on one pipeline rank."""
    load = step.lowered.load.dtype
    splits = [op for op in stage.ops if op.weight_shapes]
    placed = _placements(stage)
    for op in stage.ops:
        if not isinstance(op, Optimize) or not isinstance(op.algorithm, Muon):
            continue
        for modules, place in divided_by(op.modules, placed):
            around = place.shard if place else ()
            for name, cut in op.algorithm.units:
                parameter = modules.module.parameter(name)
                if parameter and load:
                    parameter = replace(parameter, dtype=parameter.cast(load))
                for part, axes in _split(modules, name, splits):
                    wide = (a for a in (*around, *axes) if step.wide((a,)))
                    yield Matrices(
                        op=op,
                        parameter=parameter,
                        cut=cut,
                        count=len(part),
                        axes=tuple(dict.fromkeys(wide)),
                    )


def _placements(stage: Stage) -> list[tuple[Modules, FullyShard | Spread | None]]:
    """The units of FSDP, the spreads in them and what they ignore, inner ones first."""
    units = [op for op in stage.ops if isinstance(op, FullyShard)]
    placements: list[tuple[Modules, FullyShard | Spread | None]] = []
    for unit in units:
        placements += [(modules, None) for modules in unit.ignored]
        placements += [(spread.modules, spread) for spread in reversed(unit.spreads)]
    return inner_first([*placements, *((m, unit) for unit in units for m in unit.members)])


def _split(modules: Modules, name: str, ops: Sequence[Op]) -> Iterator[tuple[Modules, Axes]]:
    """The modules, divided by the axes over which operations split their parameter."""
    parts: list[tuple[Modules, Axes]] = [(modules, ())]
    for op in ops:
        if len(op.about.path) != len(modules.path):
            continue
        shape = next((s for s in op.weight_shapes if s.name == name), None)
        if shape is None or prod(shape.local) == prod(shape.shape):
            continue
        parts = [
            (part, (*axes, *op.split_axes) if inside else axes)
            for divided, axes in parts
            for part, inside in divided_by(divided, [(op.about, op)])
        ]
    yield from parts
