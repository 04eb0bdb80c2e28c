"""Weights of a run, sent to the ranks of a serving engine as its layers hold them."""

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn

from planc.diagnostics.diagnostic import PlanError
from planc.ir.patches import RankTensor, TransferSide
from planc.runtime.preconditions import stop
from planc.runtime.sharded_tensors import reshard
from planc.runtime.standalone import shards
from planc.runtime.transfer_fp8 import BlockQuantizer
from planc.runtime.transfer_messages import Channel, Counts, ProcessRoles, Values, exchange
from planc.runtime.weights.peft_files import changes, merge_findings
from planc.tools.transfer import document
from planc.tools.transfer.table import TransferTable


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Both sides of a transfer and its table, as `planc transfer` computes them.

    Args:
        fp8: the rows and columns that share a scale in weights that are quantized; 0 for none.
    """

    table: TransferTable
    sources: TransferSide
    targets: TransferSide
    fp8: int = 0


@dataclass(kw_only=True)
class EngineWeights:
    """The tensors of one rank of an engine, which a training run writes.

    Attributes:
        version: the number of complete transfers; 0 before the first one.
    """

    channel: Channel
    roles: ProcessRoles
    _tensors: Mapping[str, Tensor]
    version: int = 0
    _whole: bool = True

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors by the engine's names.

        Raises:
            PlanError: PL698, a transfer stopped in the middle: some are old, and some are new.
        """
        if not self._whole:
            text = f"the transfer after version {self.version} did not complete"
            help = "join with a new `run.transfer` and `planc.join_transfer`, and publish"
            raise stop("PL698", text, help=help)
        return self._tensors

    @property
    def counts(self) -> Counts:
        return self.channel.counts

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def receive(self) -> int:
        """Receives the weights of one `publish`; returns the version.

        Raises:
            PlanError: PL698, another process stopped; the tensors are then marked as incomplete.
        """
        return self._receive(_nothing)

    def _receive(self, values: Callable[[Iterable[str]], Values]) -> int:
        self._whole = False
        _exchange(self, values, self._tensors)
        self.version, self._whole = self.version + 1, True
        return self.version

    def close(self) -> None:
        """Leaves the transfer."""
        self.channel.close()


def _exchange(
    side: "EngineWeights | WeightTransfer",
    values: Callable[[Iterable[str]], Values],
    targets: Mapping[str, Tensor],
) -> None:
    """One transfer; complete only after all processes say that theirs is.

    Raises:
        PlanError: PL698, a process stopped: the first error of all processes.
    """
    try:
        exchange(side.channel, side.roles, values, targets)
        side.channel.agree("done", about="before the transfer was complete")
    except BaseException as error:
        if (first := side.channel.leave(error)) is not None:
            raise first from None
        raise


def _nothing(_names: Iterable[str]) -> Values:
    def value(name: str) -> Tensor:
        raise AssertionError(name)

    return value


@dataclass(kw_only=True)
class WeightTransfer:
    """The training side of a transfer, on one rank.

    Attributes:
        engine: the engine's tensors on this process, where it has both sides; else None.
    """

    model: nn.Module
    planned: TransferPlan
    channel: Channel
    roles: ProcessRoles
    adapters: str | None
    engine: EngineWeights | None = None

    @property
    def counts(self) -> Counts:
        return self.channel.counts

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def publish(self) -> None:
        """Sends the weights as they are now; all ranks of both sides take part.

        Raises:
            PlanError: PL698, another process stopped.
        """
        reshard(self.model)
        merged = self.adapters == "merged"
        values = _Weights(self.model, merged=merged, quantized=self.planned)
        if self.engine is not None:
            self.engine._receive(values.of_bucket)
        else:
            _exchange(self, values.of_bucket, {})

    def close(self) -> None:
        """Leaves the transfer."""
        self.channel.close()


class _Weights:
    """The local tensors of a rank, with merged adapters and in fp8 where they are asked for."""

    def __init__(self, model: nn.Module, *, merged: bool, quantized: TransferPlan) -> None:
        self.tensors = dict(shards.named_tensors(model))
        self.orders = shards.rank_orders(model)
        self.changes = changes(model) if merged else {}
        rank, block = distributed.get_rank(), quantized.fp8
        self.fp8 = BlockQuantizer(self.tensors, quantized.sources, rank, block) if block else None

    def of_bucket(self, names: Iterable[str]) -> Values:
        """The tensors of a bucket. A change by an adapter is computed by all ranks that hold the
        weight, whether they send it or not: its factors are gathered by all.
        """
        made = dict[str, Tensor]()
        for name in names:
            if self.fp8 is not None and self.fp8.makes(name):
                made[name] = self.fp8.make(name, self._local)
            elif name in self.changes:
                made[name] = self._merge(name)

        def value(name: str) -> Tensor:
            return made[name] if name in made else shards.part_of(self.tensors[name])

        return value

    def _local(self, name: str) -> Tensor:
        """The shard of a weight before it is quantized."""
        return self._merge(name) if name in self.changes else shards.part_of(self.tensors[name])

    def _merge(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        ranges = shards.slices_of(tensor, self.orders.get(name))
        return shards.part_of(tensor) + shards.select_ranges(self.changes[name](), ranges)


# Joining -----------------------------------------------------------------------------------------


def start_transfer(
    model: nn.Module,
    planned: TransferPlan,
    *,
    address: str | None,
    bucket: int,
    seconds: float,
    adapters: Literal["merged", "left_out"] | None,
    tensors: Mapping[str, Tensor] | None,
    delta: bool,
) -> WeightTransfer:
    """Joins the processes of both sides; every rank of the run calls it.

    Raises:
        PlanError: PL189, PL686, adapters or compressed weights that cannot be sent; PL697, the
            sides do not fit each other; PL698, a process did not join.
    """
    rank, table = distributed.get_rank(), planned.table
    if found := merge_findings(model, adapters):
        raise PlanError(found)
    shared = address is None
    if shared and table.targets != table.sources:
        ranks = f"the engine has {table.targets} ranks, and the run {table.sources}"
        raise stop("PL697", ranks, help="pass `address`, for an engine of other processes")
    store = _store(address, rank, seconds)
    if rank == 0:
        store.set("table", _encode(planned, bucket=bucket, delta=delta))
    names = _process_names(table, shared=shared)
    channel = Channel(
        store=store,
        process=rank,
        names=names,
        seconds=seconds,
        table=table,
        bucket=bucket,
        delta=delta,
    )
    roles = _roles(table, shared=shared, source=rank, target=rank if shared else None)
    wrong = _local_faults(model, planned.sources.tensors_of(rank))
    engine = None
    if shared:
        own = planned.targets.tensors_of(rank)
        tensors = _allocate(own) if tensors is None else tensors
        wrong = wrong or _engine_faults(tensors, own)
        engine = EngineWeights(channel=channel, roles=roles, _tensors=tensors)
    _agree(channel, document.digest(table), wrong)
    return WeightTransfer(
        model=model,
        planned=planned,
        channel=channel,
        roles=roles,
        adapters=adapters,
        engine=engine,
    )


def _encode(planned: TransferPlan, *, bucket: int, delta: bool) -> bytes:
    """The table, and what else the engine's processes have to know."""
    content = {
        **document.table_values(planned.table),
        "bucket": bucket,
        "delta": delta,
        "engine": [_describe(tensor) for tensor in planned.targets.tensors],
    }
    return zlib.compress(json.dumps(content).encode())


def join(
    address: str, *, rank: int, tensors: Mapping[str, Tensor] | None, seconds: float
) -> EngineWeights:
    """Joins the transfer of a training run; see `planc.join_transfer`."""
    store = _store(address, None, seconds)
    store.wait(["table"], timedelta(seconds=seconds))
    content = json.loads(zlib.decompress(store.get("table")))
    table = document.table_from(content)
    tensors_of_all = tuple(map(_read_tensor, content["engine"]))
    own = TransferSide(size=table.targets, held=(), tensors=tensors_of_all).tensors_of(rank)
    names = _process_names(table, shared=False)
    channel = Channel(
        store=store,
        process=table.sources + rank,
        names=names,
        seconds=seconds,
        table=table,
        bucket=content["bucket"],
        delta=content["delta"],
    )
    tensors = _allocate(own) if tensors is None else tensors
    _agree(channel, document.digest(table), _engine_faults(tensors, own))
    roles = _roles(table, shared=False, source=None, target=rank)
    return EngineWeights(channel=channel, roles=roles, _tensors=tensors)


def _store(address: str | None, rank: int | None, seconds: float) -> Any:
    """The store at an address, which rank 0 of the run starts; without one at a free port."""
    limit = timedelta(seconds=seconds)
    if address is not None:
        host, _, port = address.rpartition(":")
        return distributed.TCPStore(host, int(port), None, rank == 0, limit, False)
    started = distributed.TCPStore("127.0.0.1", 0, None, True, limit, False) if rank == 0 else None
    places = [started.host, started.port] if started else [None, None]
    distributed.broadcast_object_list(places, 0)
    return started or distributed.TCPStore(places[0], places[1], None, False, limit, False)


def _roles(
    table: TransferTable, *, shared: bool, source: int | None, target: int | None
) -> ProcessRoles:
    first = 0 if shared else table.sources
    return ProcessRoles(
        source=source,
        target=target,
        sources=tuple(range(table.sources)),
        targets=tuple(range(first, first + table.targets)),
    )


def _process_names(table: TransferTable, *, shared: bool) -> tuple[str, ...]:
    training = tuple(f"rank {rank} of the training run" for rank in range(table.sources))
    engine = tuple(f"rank {rank} of the engine" for rank in range(table.targets))
    return training if shared else (*training, *engine)


def _agree(channel: Channel, digest: str, wrong: str) -> None:
    """Raises PL697 on all processes if one has a fault, or another table."""
    found = channel.agree(json.dumps([digest, wrong]), about="before it had compared the table")
    pairs = [json.loads(text) for text in found]
    for name, (other, fault) in zip(channel.names, pairs, strict=True):
        if fault or other != pairs[0][0]:
            channel.close()
            text = fault or "it has another table: its plan, sizes or version of planc differ"
            raise stop("PL697", f"{name}: {text}", help="nothing was sent")


def _local_faults(model: nn.Module, wanted: Mapping[str, RankTensor]) -> str:
    """The first tensor of this rank that is not as the plan says; empty for none."""
    tensors, orders = dict(shards.named_tensors(model)), shards.rank_orders(model)
    scalars = shards.scalars_of(model)
    for name, own in wanted.items():
        if name not in tensors:
            return f"the model lacks {name}"
        kind = str(tensors[name].dtype).removeprefix("torch.")
        if kind != own.dtype:
            return f"{name} is {kind}, and the plan has {own.dtype}"
        ranges = () if name in scalars else shards.slices_of(tensors[name], orders.get(name))
        if ranges != own.ranges and 0 not in own.shape:
            return f"{name} has the slices {ranges}, and the plan {own.ranges}"
    return ""


def _engine_faults(tensors: Mapping[str, Tensor], wanted: Mapping[str, RankTensor]) -> str:
    """The first tensor of the engine that is not as the table says; empty for none."""
    for name in (*wanted, *tensors):
        own, tensor = wanted.get(name), tensors.get(name)
        if own is None:
            return f"the table lacks {name}, which the engine has"
        if tensor is None:
            return f"the engine lacks {name}, which the table has"
        kind = str(tensor.dtype).removeprefix("torch.")
        if (tuple(tensor.shape), kind) != (own.shape, own.dtype):
            shapes = f"{list(tensor.shape)} {kind}, and the table has {list(own.shape)} {own.dtype}"
            return f"{name} is {shapes}"
    return ""


def _describe(tensor: RankTensor) -> list[Any]:
    return [tensor.key, tensor.shape, tensor.dtype, tensor.indices, tensor.ranks]


def _read_tensor(values: Sequence[Any]) -> RankTensor:
    """Reads the JSON values that `_describe` has written."""
    key, shape, dtype, indices, ranks = values
    return RankTensor(
        key=key,
        shape=tuple(shape),
        dtype=dtype,
        indices=tuple(map(tuple, indices)),
        ranks=tuple(ranks),
    )


def _allocate(wanted: Mapping[str, RankTensor]) -> dict[str, Tensor]:
    """Zeros of the shapes and dtypes of a rank; padding stays zero."""
    return {n: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for n, t in wanted.items()}
