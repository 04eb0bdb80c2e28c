"""The table by which weights reach a serving engine: `planc.transfer_table`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planc.answers.target import Overrides, compile_for, settings_of
from planc.compiler import Compiled, compile, read
from planc.diagnostics.diagnostic import Diagnostic, PlanError, Sink
from planc.ir.engine_layout import engine_side
from planc.ir.patches import BUCKET, HeldPatch, TransferSide
from planc.ir.serving import serving_of
from planc.model.cache import require_torch
from planc.model.hub_tensors import UnknownHubError
from planc.tools.estimate.profiles import Hardware
from planc.tools.estimate.profiles import hardware as hardware_profile
from planc.tools.transfer import document
from planc.tools.transfer.held import NotSlicesError, full_tensors, training_side
from planc.tools.transfer.table import TransferTable, table_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from planc.runtime.sends_weights import Planner
    from planc.runtime.transfer import EngineWeights

_SERVE = "serve."


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A table, what is sent by it, and the names of both sides.

    Args:
        seconds: estimated, by the name of the profile whose links it is for.
    """

    table: TransferTable
    traffic: document.Traffic
    names: Mapping[str, str]
    seconds: Mapping[str, float]
    findings: tuple[Diagnostic, ...] = ()

    @property
    def document(self) -> dict[str, Any]:
        """The table as JSON values, by `grammars/transfer.schema.json`."""
        return document.document(self.table, self.traffic, self.names)

    def __str__(self) -> str:
        return "\n".join(document.lines(self.table, self.traffic, self.names, self.seconds))


def transfer_table(
    model: str | os.PathLike[str] | nn.Module,
    plan: str | os.PathLike[str] | None,
    serve: str | os.PathLike[str],
    *,
    world_size: int,
    serve_world_size: int | None = None,
    overrides: Overrides = (),
    bucket: int = BUCKET,
    hardware: str = "h100-8x",
    allow_code: bool = False,
) -> Transfer:
    """The table by which weights of a training plan reach the ranks of a serving engine.

    Args:
        model, plan, world_size: the training plan, as for `check`.
        serve: a plan with a serve section, or another training plan.
        serve_world_size: the number of ranks of the latter.
        overrides: of the training plan; those that begin with `serve.` are of the other plan.
        bucket: the bytes that a rank sends or receives at once.
        hardware: the profile whose links the time is estimated for.

    Raises:
        PlanError: a plan has errors, or holds no slices that follow from its lines (PL695).
    """
    serve_settings, other = split_settings(settings_of(overrides))
    compiled, sink = compile_for(model, plan, world_size, serve_settings, allow_code)
    transfer = transfer_of(
        compiled,
        os.fspath(serve),
        sink,
        settings=other,
        size=serve_world_size,
        bucket=bucket,
        hardware=hardware,
    )
    if transfer is None:
        raise PlanError(sink)
    return transfer


def join_transfer(
    address: str,
    *,
    rank: int,
    tensors: Mapping[str, Tensor] | None = None,
    seconds: float = 300.0,
) -> EngineWeights:
    """Joins the transfer of a training run as one rank of the engine (`run.transfer`).

    Args:
        address: `host:port`, as the training run names it.
        rank: of the engine: its number among groups of data ranks times tp, plus its rank of tp.
        tensors: the parameters and buffers by their names, which are written in place; by default
            they are allocated on the CPU. Padding must be zero.
        seconds: after which a process that does not answer counts as lost.

    Returns:
        `.receive()` waits for a `publish()` and returns its number, `.tensors` has the weights.

    Raises:
        PlanError: PL697, names, shapes or dtypes are not those of the table; PL698, a process did
            not join.
    """
    require_torch("planc.join_transfer")
    from planc.runtime.transfer import join

    return join(address, rank=rank, tensors=tensors, seconds=seconds)


def split_settings(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """The settings of the training plan, and those with `serve.` before them, of the other plan."""
    serve_settings = [text for text in settings if not text.startswith(_SERVE)]
    other = [text.removeprefix(_SERVE) for text in settings if text.startswith(_SERVE)]
    return serve_settings, other


def transfer_of(
    compiled: Compiled,
    serve: str,
    sink: Sink,
    *,
    settings: Sequence[str],
    size: int | None,
    bucket: int = BUCKET,
    hardware: str = "h100-8x",
) -> Transfer | None:
    """The transfer from a compiled training plan; None after findings."""
    profile = hardware_profile(hardware, sink)
    sides = _sides_of(compiled, serve, sink, settings=settings, size=size)
    if sides is None or profile is None:
        return None
    source, target, names, _ = sides
    table = table_of(source, target)
    traffic = document.traffic_of(table, bucket)
    seconds = {profile.name: _seconds(traffic, table, profile)}
    return Transfer(
        table=table, traffic=traffic, names=names, seconds=seconds, findings=tuple(sink)
    )


def _sides_of(
    compiled: Compiled, serve: str, sink: Sink, *, settings: Sequence[str], size: int | None
) -> tuple[TransferSide, TransferSide, dict[str, str], int] | None:
    """Both sides, their names, and the rows that share a scale; None after findings."""
    other = compile(read(serve, sink), compiled.facts, sink, world_size=size, settings=settings)
    target = None if sink.has_errors else _side(other, sink)
    scaled = (held.patch for held in target.held if held.scales) if target else ()
    scales: dict[str, tuple[int, ...]] = {}
    for patch in scaled:
        ends = zip(scales.get(patch.hub, (0, 0)), patch.box, strict=True)
        scales[patch.hub] = tuple(max(size, stop) for size, (_, stop) in ends)
    source = None if sink.has_errors else _side(compiled, sink, scales)
    if source is None or target is None:
        return None
    assert compiled.plan is not None and other.plan is not None and compiled.facts is not None
    engine = serving_of(other.plan)
    names = {
        "model": compiled.facts.name,
        "source": compiled.plan.name,
        "target": engine.engine_text() if engine else other.plan.name,
    }
    return source, target, names, engine.fp8 if engine else 0


def planner_of(compiled: Compiled) -> Planner:
    """Computes what is sent from a run of a compiled plan."""
    from planc.runtime.sends_weights import Planner
    from planc.runtime.transfer import TransferPlan

    def plan(serve: str, settings: Sequence[str], size: int | None, shared: bool) -> TransferPlan:
        sink = Sink()
        sides = _sides_of(compiled, serve, sink, settings=settings, size=size)
        if sides is None:
            raise PlanError(sink)
        source, target, _, fp8 = sides
        same = {rank: rank for rank in range(target.size)} if shared else {}
        table = table_of(source, target, same)
        return TransferPlan(table=table, sources=source, targets=target, fp8=fp8)

    def tensors() -> tuple[HeldPatch, ...]:
        side = _side(compiled, sink := Sink())
        if side is None or compiled.facts is None:
            raise PlanError(sink)
        return full_tensors(side, compiled.facts)

    return Planner(transfer=plan, full_tensors=tensors)


def _side(
    compiled: Compiled, sink: Sink, scales: Mapping[str, tuple[int, ...]] | None = None
) -> TransferSide | None:
    """The slices that the ranks of a plan hold; None after PL695."""
    plan, facts = compiled.plan, compiled.facts
    if plan is None or facts is None:
        message = "a lowered plan has no lines that say which slices ranks hold"
        sink.error("PL695", message, help="name the plan that it was lowered from")
        return None
    serving = serving_of(plan)
    try:
        if serving is not None:
            return engine_side(serving, facts, sink)
        return training_side(plan, facts, scales)
    except (NotSlicesError, UnknownHubError) as error:
        message = f"the slices that ranks of `{plan.name}` hold are not known: {error}"
        sink.error("PL695", message, plan.origin)
        return None


def _seconds(traffic: document.Traffic, table: TransferTable, profile: Hardware) -> float:
    """The time of the bytes of the busiest rank of each bucket, at the bandwidth of a rank."""
    inside = table.sources + table.targets <= profile.ranks_per_node
    network = profile.network_gb_s / profile.ranks_per_node
    rate = 1e9 * (profile.node_gb_s if inside else network)
    latency = 1e-6 * (profile.node_latency_us if inside else profile.network_latency_us)
    return sum(traffic.slowest) / rate + latency * traffic.buckets
