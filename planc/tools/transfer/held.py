"""The slices of the files' tensors that the ranks of a training plan hold, without a run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from planc.ir.local_shapes import local_shape, split_by_rules, split_dim, splitting
from planc.ir.nodes import Mesh, Plan, SpreadRule, TensorRule, Unit
from planc.ir.parameter_owners import Owned, owned_modules
from planc.ir.patches import (
    FP8,
    Box,
    HeldPatch,
    Index,
    Patch,
    Range,
    RankTensor,
    TransferSide,
    scale_name,
)
from planc.lowering.stages import elsewhere, of_ranks
from planc.model.facts import Facts, Modules
from planc.model.hub_pieces import HubPiece, Shape
from planc.model.hub_tensors import HubWeight, hub_tensors, indices_of
from planc.ops.contract import part_sizes

Ranges = tuple[Range, ...]


class NotSlicesError(Exception):
    """A plan whose ranks hold no slices that follow from its lines, with the reason."""


def training_side(
    plan: Plan, facts: Facts, scales: Mapping[str, Shape] | None = None
) -> TransferSide:
    """Lays out the tensors of a model's files over the ranks of a training plan.

    Args:
        plan: without adapters; its mesh has all ranks.
        facts: the model, without adapters.
        scales: the shapes of the scales of weights that ranks quantize to fp8 for a transfer, by
            the names of the scales.

    Raises:
        NotSlicesError: another library shards the weights.
        UnknownHubError: the tensors of the model's files are not known.
    """
    if plan.fsdp is not None and plan.fsdp.backend is not None:
        raise NotSlicesError("another library than torch's FSDP shards the weights")
    weights, held, tensors = hub_tensors(facts), list[HeldPatch](), list[RankTensor]()
    for place, (own_plan, own_facts) in enumerate(of_ranks(plan, facts)):
        stage = _Stage(own_plan, own_facts, place)
        for weight in weights:
            for shard in stage.shards(weight):
                held += shard.patches(scales or {})
                tensors += shard.tensors()
    return TransferSide(size=plan.mesh.world_size, held=tuple(held), tensors=tuple(tensors))


def full_tensors(side: TransferSide, facts: Facts) -> tuple[HeldPatch, ...]:
    """The tensors of a model's files as blocks of the model's full tensors, in the model's order.

    Args:
        side: the training side, whose ranks hold shards of the tensors.
        facts: the model, without adapters.
    """
    owners: dict[tuple[str, Index], tuple[set[int], str]] = {}
    for tensor in side.tensors:
        for index in tensor.indices:
            owners.setdefault((tensor.key, index), (set(), tensor.dtype))[0].update(tensor.ranks)
    patches = list[HeldPatch]()
    for weight in hub_tensors(facts):
        key, box = _key(weight), tuple((0, size) for size in weight.shape)
        for index in indices_of(weight.modules):
            ranks, dtype = owners[key, index]
            for piece in weight.pieces:
                patch = _patch(piece, key, box, box)
                assert patch is not None
                held = HeldPatch(
                    patch=patch, indices=(index,), ranks=tuple(sorted(ranks)), dtype=dtype
                )
                patches.append(held)
    return tuple(patches)


def _key(weight: HubWeight) -> str:
    """The name of a tensor of the model, with `{}` for the indices of layers."""
    parts = weight.modules.path
    path = ("{}" if not isinstance(s, str) or s.isdecimal() else s for s in parts)
    return ".".join((*path, weight.name))


@dataclass(frozen=True, slots=True)
class _Cut:
    """A dim that ranks divide: the axes, the dim, and the sizes of its packed parts."""

    axes: tuple[str, ...]
    dim: int
    parts: tuple[int, ...] = ()


class _Stage:
    """The ranks of a pipeline rank's stages."""

    def __init__(self, plan: Plan, facts: Facts, place: int) -> None:
        self.plan, self.owners = plan, owned_modules(plan, facts)
        self.splits = splitting(plan)
        op = plan.pipeline.op if plan.pipeline else None
        self.gone = tuple(elsewhere(op)) if op else ()
        mesh = plan.mesh
        self.ranks = tuple(
            rank
            for rank in range(mesh.world_size)
            if op is None or _coordinate(rank, (op.axis,), mesh) == place
        )

    def shards(self, weight: HubWeight) -> Iterator["_Shards"]:
        """The shards of a weight, of modules under the same rules together."""
        if weight.buffer:
            if here := weight.modules.parts_outside(self.gone):
                yield _Shards(self, weight, here, (), weight.dtype)
            return
        modules_by_cuts: dict[tuple[tuple[_Cut, ...], str], list[Modules]] = {}
        for owned in self.owners:
            both = owned.modules.overlap(weight.modules)
            for modules, rules in split_by_rules(both, self.splits) if both else ():
                parameter = modules.module.parameter(weight.name)
                assert parameter is not None
                kind = tuple(self._cuts(owned, weight, rules)), self.plan.dtype(parameter)
                modules_by_cuts.setdefault(kind, []).append(modules)
        for (cuts, dtype), sets in modules_by_cuts.items():
            yield _Shards(self, weight, tuple(sets), cuts, dtype)

    def _cuts(self, owned: Owned, weight: HubWeight, rules: Sequence[TensorRule]) -> Iterator[_Cut]:
        """The cuts of tensor and expert parallelism, then that of FSDP."""
        parameter = owned.modules.module.parameter(weight.name)
        assert parameter is not None
        for rule in rules if weight.shape else ():
            if (split := rule.split(parameter)) is not None:
                parts = part_sizes(split, weight.shape[split.dim]) if split.is_packed else ()
                yield _Cut((rule.axis,), split.dim, parts)
        placed: Unit | SpreadRule | None = owned.spread or owned.unit
        if owned.unit is None or placed is None or self.plan.fsdp is None or not weight.shape:
            return
        axes = self.plan.fsdp.axes(placed)[0]
        count = self.plan.mesh.size(*self.plan.mesh.expand(axes))
        if count > 1:
            local = local_shape(parameter, rules, self.plan)
            dim = placed.shard_dim if split_dim(local, placed.shard_dim, count) else 0
            yield _Cut(tuple(axes), dim)


@dataclass(frozen=True, slots=True)
class _Shards:
    """A weight of like modules on the ranks of a stage."""

    stage: _Stage
    weight: HubWeight
    modules: tuple[Modules, ...]
    cuts: tuple[_Cut, ...]
    dtype: str

    @property
    def _key(self) -> str:
        return _key(self.weight)

    @property
    def _indices(self) -> tuple[Index, ...]:
        return tuple(sorted(index for modules in self.modules for index in indices_of(modules)))

    def _by_ranges(self) -> Mapping[tuple[Ranges, ...], list[int]]:
        """The ranks with the same ranges of each dim."""
        mesh, ranks = self.stage.plan.mesh, dict[tuple[Ranges, ...], list[int]]()
        at: dict[tuple[int, ...], tuple[Ranges, ...]] = {}
        for rank in self.stage.ranks:
            place = tuple(_coordinate(rank, cut.axes, mesh) for cut in self.cuts)
            if place not in at:
                at[place] = tuple(_ranges(self.weight.shape, self.cuts, place, mesh))
            ranks.setdefault(at[place], []).append(rank)
        return ranks

    def patches(self, scales: Mapping[str, Shape]) -> Iterator[HeldPatch]:
        indices = self._indices
        for ranges, ranks in self._by_ranges().items():
            for local, full in _blocks(ranges):
                for piece in self.weight.pieces:
                    if (patch := _patch(piece, self._key, local, full)) is not None:
                        dtype = FP8 if scale_name(piece.hub) in scales else self.dtype
                        yield HeldPatch(
                            patch=patch, indices=indices, ranks=tuple(ranks), dtype=dtype
                        )
        for name in (scale_name(piece.hub) for piece in self.weight.pieces):
            if name in scales:
                box = tuple((0, size) for size in scales[name])
                patch = Patch(hub=name, box=box, key=name, local=box, dims=(0, 1))
                yield HeldPatch(
                    patch=patch,
                    indices=indices,
                    ranks=self.stage.ranks,
                    dtype="float32",
                    scales=True,
                )

    def tensors(self) -> Iterator[RankTensor]:
        indices = self._indices
        for ranges, ranks in self._by_ranges().items():
            yield RankTensor(
                key=self._key,
                shape=tuple(
                    sum(stop - start for start, stop in dim_ranges) for dim_ranges in ranges
                ),
                dtype=self.dtype,
                indices=indices,
                ranks=tuple(ranks),
                ranges=ranges,
            )


def _coordinate(rank: int, axes: Sequence[str], mesh: Mesh) -> int:
    """The index of a rank along axes that are flattened to one, in the order of the mesh."""
    experts = mesh.experts
    if experts is not None and len(axes) == 1 and axes[0] in experts.sizes:
        inside = _coordinate(rank, experts.axes, mesh)
        count = experts.ranks.size
        return inside % count if axes[0] == experts.ranks.name else inside // count
    wanted, index, step = {*mesh.expand(axes)}, 0, mesh.world_size
    for axis in mesh.axes:
        step //= axis.size
        if axis.name in wanted:
            index = index * axis.size + rank // step % axis.size
    return index


def _ranges(
    shape: Shape, cuts: Sequence[_Cut], place: Sequence[int], mesh: Mesh
) -> Iterator[Ranges]:
    """The ranges of each dim at a place along the axes of the cuts."""
    dims: list[list[Ranges]] = [[((0, size),)] for size in shape]
    for cut, index in zip(cuts, place, strict=True):
        count = mesh.size(*mesh.expand(cut.axes))
        whole = dims[cut.dim]
        if cut.parts:
            ends = [sum(cut.parts[: n + 1]) for n in range(len(cut.parts))]
            whole = [((end - size, end),) for size, end in zip(cut.parts, ends, strict=True)]
        elif len(whole) > 1 and cut is cuts[-1]:  # FSDP shards what packed parts are together
            whole = [tuple(part_range for part in whole for part_range in part)]
        dims[cut.dim] = [_chunk(part, count, index) for part in whole]
    for parts in dims:
        yield _merge_adjacent(part_range for part in parts for part_range in part)


def _chunk(ranges: Ranges, count: int, index: int) -> Ranges:
    """The chunk of ranges for one of `count` ranks, as `torch.chunk` cuts them."""
    total = sum(stop - start for start, stop in ranges)
    size = -(-total // count)
    first, last = min(index * size, total), min((index + 1) * size, total)
    chunk, at = list[Range](), 0
    for start, stop in ranges:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            chunk.append((start + low, start + high))
        at += stop - start
    return tuple(chunk)


def _merge_adjacent(ranges: Iterable[Range]) -> Ranges:
    """Merges ranges that follow each other."""
    merged: list[Range] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return tuple(merged)


def _blocks(ranges: Sequence[Ranges]) -> Iterator[tuple[Box, Box]]:
    """The blocks of a shard: in it, and in the full tensor."""
    along = []
    for dim_ranges in ranges:
        at, pairs = 0, []
        for start, stop in dim_ranges:
            pairs.append(((at, at + stop - start), (start, stop)))
            at += stop - start
        along.append(pairs)
    for block in product(*along):
        yield tuple(here for here, _ in block), tuple(there for _, there in block)


def _patch(piece: HubPiece, key: str, local: Box, full: Box) -> Patch | None:
    """The part of a block that is in a piece; None if there is none."""
    box = [(0, 1)] * sum(dim is not None for dim in piece.dims)
    inside = list[Range]()
    for (here, _), (start, stop), first, size, dim in zip(
        local, full, piece.start, piece.size, piece.dims, strict=True
    ):
        low, high = max(start, first), min(stop, first + size)
        if low >= high:
            return None
        inside.append((here + low - start, here + high - start))
        if dim is not None:
            box[dim] = low - first, high - first
    return Patch(hub=piece.hub, box=tuple(box), key=key, local=tuple(inside), dims=piece.dims)
