"""The mesh as a picture: nodes, their ranks, and the groups in which a rank communicates."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from planc.ops.lowered import Lowered
from planc.ops.registry import units_of
from planc.tools.show.html import Html, tag

WIDTH, _CELL, _MOST = 860, 30, 15  # pixels of a picture and of a rank; nodes that are drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks that communicate: those that differ along some axes alone.

    Args:
        names: as operations say them; an axis of experts consists of several `axes`.
        size, stride: the number of ranks, and the distance of neighbors along `axes` as one.
        near: the number of ranks that are on the node of rank 0.
        sends: what, in words.
        sent: bytes that a rank sends in a step; 0 where they are not estimated.
    """

    names: tuple[str, ...]
    axes: tuple[str, ...]
    size: int
    stride: int
    near: int = 0
    sends: str
    sent: float

    def key(self, place: Mapping[str, int], sizes: Mapping[str, int]) -> str:
        """Equal for the places of one group's ranks."""
        along = 0
        for name in self.axes:
            along = along * sizes[name] + place[name]
        rest = (str(at) for name, at in place.items() if name not in self.axes)
        return "-".join([*rest, f"{along // (self.size * self.stride)}-{along % self.stride}"])


def groups(lowered: Lowered, per_node: int, sent: Mapping[str, float]) -> tuple[RankGroup, ...]:
    """The groups of more than one rank, those of neighbors first.

    Args:
        per_node: ranks of a node.
        sent: bytes of a step by the names of axes, joined with ` x `.
    """

    def wide(name: str) -> bool:
        return lowered.axis_size(name) > 1

    sends: dict[tuple[str, ...], dict[str, None]] = {}
    for names, words in _sends(lowered):
        if several := tuple(filter(wide, names)):
            sends.setdefault(several, {})[words] = None
    known = {tuple(filter(wide, names.split(" x "))): size for names, size in sent.items()}
    rank_groups, sizes, experts = [], {a.name: a.size for a in lowered.axes}, lowered.experts
    ranks = [places(lowered, rank) for rank in range(min(per_node, lowered.world_size))]
    for names, told in sends.items():
        axes, stride = tuple(n for n in sizes if n in names), 1
        if experts and {experts.ranks.name, experts.rest.name} & set(names):
            axes = experts.axes
            stride = 1 if experts.ranks.name in names else experts.ranks.size
        group = RankGroup(
            names=names,
            axes=axes,
            size=lowered.axis_size(*names),
            stride=stride,
            sends="; ".join(told),
            sent=known.get(names, 0),
        )
        keys = [group.key(place, sizes) for place in ranks]
        rank_groups.append(replace(group, near=keys.count(keys[0])))
    return tuple(sorted(rank_groups, key=lambda g: (-g.near, g.size)))


def _sends(lowered: Lowered) -> Iterator[tuple[tuple[str, ...], str]]:
    """(axes, what their ranks send) of each operation."""
    for op in lowered.ops:
        if op.CARRIES:
            yield op.split_axes, op.CARRIES
        for unit in units_of(op):
            yield unit.shard, "parameters before use, gradients after"
            yield unit.replicate, "gradients, to average them"


def places(lowered: Lowered, rank: int) -> dict[str, int]:
    """The coordinate of a rank along each axis."""
    place = {}
    for axis in reversed(lowered.axes):
        rank, place[axis.name] = divmod(rank, axis.size)
    return {axis.name: place[axis.name] for axis in lowered.axes}


def nodes(
    lowered: Lowered, per_node: int, talks: tuple[RankGroup, ...]
) -> tuple[tuple[Html, ...], int]:
    """Each node as an `<svg>`, and pixels of them all in a picture: the groups of rank 0 in color.

    A page wraps them: their places in a picture mean nothing there.
    """
    world, pipeline = lowered.world_size, lowered.pipeline
    sizes = {a.name: a.size for a in lowered.axes}
    per_node = min(per_node, world)
    columns = min(per_node, 4)
    width, height = max(columns, 2) * _CELL + 16, -(-per_node // columns) * _CELL + 28
    first = [group.key(places(lowered, 0), sizes) for group in talks]

    def cell(rank: int) -> Html:
        row, column = divmod(rank % per_node, columns)
        place = places(lowered, rank)
        keys = [group.key(place, sizes) for group in talks]
        same = (f"gpu g{i}" for i, key in enumerate(keys) if key == first[i])
        stage = f"strip s{place[pipeline.axis] % 8}" if pipeline else "strip"
        told = ", ".join(f"{name} {at}" for name, at in place.items())
        parts = (
            tag("title", f"rank {rank}: {told}"),
            tag("rect", width=_CELL - 4, height=_CELL - 4, rx=6),
            tag("text", str(rank), x=_CELL // 2 - 2, y=_CELL // 2 + 2),
            tag("rect", class_=stage, x=5, y=_CELL - 9, width=_CELL - 14, height=3),
        )
        at = f"translate({10 + column * _CELL} {18 + row * _CELL})"
        kind = next(same, "gpu") if rank else "gpu me"
        return tag("g", *parts, class_=kind, data_keys=" ".join(keys), transform=at)

    def node(number: int) -> Html:
        ranks = range(number * per_node, min(world, (number + 1) * per_node))
        box = tag("rect", class_="node", x=1, y=1, width=width - 2, height=height - 2, rx=10)
        head = tag("text", f"node {number}", class_="head", x=10, y=13)
        at = {"x": number % across * (width + 8), "y": number // across * (height + 8)}
        return tag("svg", box, head, *map(cell, ranks), width=width, height=height, **at)

    count, across = min(-(-world // per_node), _MOST), WIDTH // (width + 8)
    return tuple(map(node, range(count))), -(-count // across) * (height + 8)
