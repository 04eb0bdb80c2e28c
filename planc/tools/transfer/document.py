"""The output of `planc transfer`: a table as text, and as JSON for other projects."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planc.ir.patches import Box, Index, Patch
from planc.ops import phrases
from planc.tools.transfer.table import BucketLoad, Move, TransferTable, WeightFlow, buckets

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The messages of a transfer.

    Args:
        most: the bytes of a bucket.
        buckets: their number.
        messages: one for each pair of ranks in a bucket.
        sent, received: bytes, by rank.
        slowest: for each bucket the most bytes that a rank sends or receives.
    """

    most: int
    buckets: int
    messages: int
    sent: Mapping[int, int]
    received: Mapping[int, int]
    slowest: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return sum(self.sent.values())

    @property
    def imbalance(self) -> float:
        """The bytes of the busiest sender over the mean of all."""
        return max(self.sent.values(), default=0) * len(self.sent) / max(self.bytes, 1)


def traffic_of(table: TransferTable, most: int) -> Traffic:
    """Counts what is sent in buckets of at most `most` bytes."""
    sent, received = dict[int, int](), dict[int, int]()
    slowest, messages = list[int](), 0

    def note(load: BucketLoad) -> None:
        nonlocal messages
        slowest.append(load.most)
        messages += load.pairs.bit_count()
        for total, added in ((sent, load.sent), (received, load.received)):
            for rank, size in added.items():
                total[rank] = total.get(rank, 0) + size

    count = sum(1 for _ in buckets(table, most, note))
    return Traffic(
        most=most,
        buckets=count,
        messages=messages,
        sent=sent,
        received=received,
        slowest=tuple(slowest),
    )


def document(table: TransferTable, traffic: Traffic, names: Mapping[str, str]) -> dict[str, Any]:
    """The table as JSON values.

    Args:
        names: `model`, and the names of both sides, `source` and `target`.
    """
    values = table_values(table)
    return {
        "format_version": FORMAT_VERSION,
        "model": names["model"],
        "source": {"name": names["source"], **values["source"]},
        "target": {"name": names["target"], **values["target"]},
        "digest": digest(table),
        "colocated": values["colocated"],
        "traffic": {
            "bytes": traffic.bytes,
            "imbalance": round(traffic.imbalance, 4),
            "bucket_bytes": traffic.most,
            "buckets": traffic.buckets,
            "messages": traffic.messages,
            "sent": [traffic.sent.get(rank, 0) for rank in range(table.sources)],
            "received": [traffic.received.get(rank, 0) for rank in range(table.targets)],
        },
        "tensors": values["tensors"],
    }


def table_values(table: TransferTable) -> dict[str, Any]:
    """The part of the JSON values that `table_from` reads."""
    return {
        "source": {"ranks": table.sources},
        "target": {"ranks": table.targets},
        "colocated": sorted(map(list, table.same.items())),
        "tensors": [_tensor(flow) for flow in table.flows],
    }


def digest(table: TransferTable) -> str:
    """Identifies a table: equal on all processes of both sides, or nothing is sent."""
    whole = hashlib.sha256(f"{table.sources} {table.targets}".encode())
    for flow in table.flows:
        whole.update(json.dumps(_tensor(flow), separators=(",", ":")).encode())
    whole.update(json.dumps(sorted(table.same.items())).encode())
    return whole.hexdigest()


def table_from(text: Mapping[str, Any]) -> TransferTable:
    """The table of a document."""
    same = dict(text["colocated"])
    return TransferTable(
        sources=text["source"]["ranks"],
        targets=text["target"]["ranks"],
        flows=tuple(_flow(one, same) for one in text["tensors"]),
        same=same,
    )


def _flow(text: Mapping[str, Any], same: Mapping[int, int]) -> WeightFlow:
    return WeightFlow(
        hub=text["name"],
        indices=tuple(map(tuple, text["layers"])),
        wire=text["dtype"],
        moves=tuple(
            Move(
                number=number,
                box=_box(move["box"]),
                sources=tuple(move["from"]["ranks"]),
                targets=tuple(move["to"]["ranks"]),
                of=_patch(text["name"], move, "from"),
                to=_patch(text["name"], move, "to"),
            )
            for number, move in enumerate(text["moves"])
        ),
        same=same,
    )


def _patch(hub: str, move: Mapping[str, Any], side: str) -> Patch:
    place = move[side]
    return Patch(
        hub=hub,
        box=_box(move["box"]),
        key=place["tensor"],
        local=_box(place["slices"]),
        dims=tuple(place["dims"]),
    )


def _box(ranges: Iterable[Sequence[int]]) -> Box:
    return tuple((start, stop) for start, stop in ranges)


def _tensor(flow: WeightFlow) -> dict[str, Any]:
    return {
        "name": flow.hub,
        "layers": [list(index) for index in flow.indices],
        "dtype": flow.wire,
        "moves": [
            {
                "box": _lists(move.box),
                "from": {"ranks": list(move.sources), **_place(move.of, move.box)},
                "to": {"ranks": list(move.targets), **_place(move.to, move.box)},
            }
            for move in flow.moves
        ],
    }


def _place(patch: Patch, box: Box) -> dict[str, Any]:
    return {"tensor": patch.key, "slices": _lists(patch.part(box)), "dims": list(patch.dims)}


def _lists(box: Box) -> list[list[int]]:
    return [[start, stop] for start, stop in box]


# Text --------------------------------------------------------------------------------------------


def lines(
    table: TransferTable, traffic: Traffic, names: Mapping[str, str], seconds: Mapping[str, float]
) -> Iterable[str]:
    """The table for a person: each kind of weight, and what is sent.

    Args:
        names: as of `document`.
        seconds: estimated, by the name of a profile.
    """
    yield (
        f"{names['source']}, {_count(table.sources, 'rank')} -> {names['target']}, "
        f"{_count(table.targets, 'rank')}"
    )
    yield ""
    rows = [("weights of the engine", "made of", "layers", "blocks", "sent")]
    rows += _rows(table.flows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        name, parts, *numbers = row
        cells = [name.ljust(widths[0]), parts.ljust(widths[1])]
        cells += [n.rjust(w) for n, w in zip(numbers, widths[2:], strict=True)]
        yield "  ".join(cells).rstrip()
    yield ""
    sent, received = traffic.sent.values(), traffic.received.values()
    yield f"sent      {phrases.size(traffic.bytes)} by {_count(len(sent), 'rank')}, {_spread(sent)}"
    yield f"          the busiest sends {traffic.imbalance:.2f} times the mean"
    yield f"received  by {_count(len(received), 'rank')}, {_spread(received)}"
    yield (
        f"buckets   {traffic.buckets:,} of at most {phrases.size(traffic.most)}, "
        f"{_count(traffic.messages, 'message')}"
    )
    for name, value in seconds.items():
        yield f"time      {value:.2g} s at least, by the links of {name}"


def _rows(flows: Sequence[WeightFlow]) -> Iterable[tuple[str, str, str, str, str]]:
    kinds: dict[tuple[str, tuple[Index, ...]], list[WeightFlow]] = {}
    for flow in flows:
        kinds.setdefault((flow.moves[0].to.key, flow.indices), []).append(flow)
    for (key, indices), some in kinds.items():
        parts = dict.fromkeys(_part(flow.hub, key) for flow in some)
        blocks = sum(len(flow.moves) for flow in some)
        size = sum(
            flow.bytes(move.box) * len(move.targets) * len(flow.indices)
            for flow in some
            for move in flow.moves
        )
        name = key.replace("{}", "*")
        yield name, ", ".join(parts), f"{len(indices):,}", f"{blocks:,}", phrases.size(size)


def _part(hub: str, key: str) -> str:
    """The layer of a file's tensor, as far as the engine's tensor has another name."""
    if hub == key:
        return "itself"
    parts = hub.split(".")[:-1]
    own = [p for p in key.split(".") if p != "{}"]
    rest = ["*" if p.isdecimal() else p for p in parts if p != "{}" and p not in own]
    return ".".join(rest)


def _spread(sizes: Iterable[int]) -> str:
    known = [*sizes]
    low, high = min(known, default=0), max(known, default=0)
    return (
        f"{phrases.size(high)} each"
        if low == high
        else f"{phrases.size(low)} to {phrases.size(high)} each"
    )


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' * (number != 1)}"
