"""Hardware and stack profiles: TOML files with the constants of the model, each with its source.

A profile is named by the file that ships in `profiles/`, or by a path to the user's own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from planc.diagnostics.diagnostic import Sink, did_you_mean

FOLDER = Path(__file__).parent / "profiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A cluster of equal nodes. Bandwidths are bus bandwidths, as nccl-tests gives them.

    Args:
        ranks_per_node: accelerators that the fast links join.
        processors: multiprocessors of an accelerator; products are computed in tiles on them.
        memory_gib: of an accelerator.
        context_gib: taken outside the allocator, by the driver's context and by NCCL.
        matmul_tflops: sustained by large products in 16 bits.
        tensorwise_tflops, rowwise_tflops, mxfp8_tflops: likewise in 8 bits, by recipe; 0 where
            there are no such products.
        kernel_us: the time of a kernel besides the roofline.
        attention_fraction: what a flash kernel reaches of `matmul_tflops`.
        memory_gb_s: sustained by memory-bound kernels.
        launch_us: CPU time of one eager operator, Python and autograd included.
        node_gb_s, node_reduce_gb_s, node_latency_us: of collectives in a node: gathers and
            scatters, all-reduces, and a step of a ring.
        network_gb_s, network_reduce_gb_s, network_latency_us: the same across nodes, when all
            ranks of a node take part.
        inner_latency_us: of a step in a node, of a ring across nodes; 0 for that across nodes.
        start_us: of a ring, before its first step.
        exchange_us: of an all-to-all, whose messages go at once.
        peak_tflops: of the data sheet, which MFU is relative to.
        host_gb_s: of copies between an accelerator and pinned memory of the host.
        host_memory_gb_s: an accelerator's share of what the host's cores read and write.
        devices: the names that torch has for the accelerator, separated by commas.
    """

    name: str
    ranks_per_node: int
    processors: int
    memory_gib: float
    context_gib: float
    matmul_tflops: float
    kernel_us: float
    attention_fraction: float
    memory_gb_s: float
    launch_us: float
    node_gb_s: float
    node_reduce_gb_s: float
    node_latency_us: float
    network_gb_s: float
    network_reduce_gb_s: float
    network_latency_us: float
    peak_tflops: float
    inner_latency_us: float = 0
    start_us: float = 0
    exchange_us: float = 60
    host_gb_s: float = 24
    host_memory_gb_s: float = 25
    devices: str = ""
    tensorwise_tflops: float = 0
    rowwise_tflops: float = 0
    mxfp8_tflops: float = 0
    sources: dict[str, str] = field(default_factory=dict, compare=False)

    def rate(self, recipe: str) -> float:
        """TFLOP/s of large fp8 matmuls with a recipe of a `matmul` section; 0 for none."""
        return float(getattr(self, f"{recipe}_tflops"))

    def without_collectives(self) -> Hardware:
        """The same machine with collectives that take no time, so that they hide no computation."""
        return replace(
            self,
            node_gb_s=inf,
            node_reduce_gb_s=inf,
            node_latency_us=0.0,
            network_gb_s=inf,
            network_reduce_gb_s=inf,
            network_latency_us=0.0,
            inner_latency_us=0.0,
            start_us=0.0,
            exchange_us=0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The bytes that kernels of layers keep and move, and their speed.

    Args:
        fused: whether a norm, a rotary embedding, an activation, a router and the loss are one
            kernel each; else they keep and move what the model's operators do.
        norm_output, activation_output: the share of what these write that is kept for backward,
            rather than recomputed.
        norm_moved: elements that a norm moves for each one of its input, with a residual sum.
        attention_moved: elements moved for each one of queries, keys and values.
        activation_moved: elements moved for each one that an activation reads or writes.
        expert_moved: elements that permutations move for each one of the rows of experts.
        dispatch_once: whether a token is sent once to each node of its experts; else once for each
            expert.
        router_moved: elements moved for each token and expert.
        loss_kept, loss_transient: bytes of a logit that stay until backward, and that exist for a
            moment besides.
        loss_moved: bytes of a logit that the forward pass moves, of which backward moves twice.
        joins_products: whether products of one input are one kernel: those for queries, keys and
            values, and those for a gate and what it scales.
        matmul_pace: the speed of products relative to the hardware's measured one.
        attention_share: what a flash kernel reaches of the hardware's `matmul_tflops` on long
            rows; 0 for the hardware's `attention_fraction`, whatever the length.
        attention_keys: the number of keys at which it reaches half of that.
        attention_backward: the seconds of its backward pass relative to the forward one's, on long
            rows.
        attention_backward_keys: the number of keys at which the backward pass reaches half of its
            rate.
        expert_rows: the rows of an expert at which grouped products reach half of their rate.
        repeats_last: whether a checkpoint repeats the last product of a layer. torch's checkpoint
            stops at the last tensor that backward needs, which is its input, unless the product is
            part of a larger autograd function.
        layer_ms, expert_layer_ms: the least time of a layer, forward and backward, which the host
            takes to launch it: without experts, and with them.
        expert_ms: the time that the host takes besides for each expert of the rank.
    """

    name: str
    fused: bool
    matmul_pace: float
    attention_share: float
    attention_keys: float
    attention_backward: float
    expert_rows: float
    layer_ms: float
    expert_layer_ms: float
    expert_ms: float = 0
    attention_backward_keys: float = 0
    joins_products: bool = False
    repeats_last: bool = False
    norm_output: float = 1
    activation_output: float = 1
    norm_moved: float = 0
    attention_moved: float = 0
    activation_moved: float = 0
    expert_moved: float = 0
    dispatch_once: bool = False
    router_moved: float = 0
    loss_kept: float = 0
    loss_transient: float = 0
    loss_moved: float = 0
    sources: dict[str, str] = field(default_factory=dict, compare=False)


EAGER = Kernels(
    name="eager",
    fused=False,
    matmul_pace=1,
    attention_share=0,
    attention_keys=0,
    attention_backward=3,
    expert_rows=0,
    layer_ms=0,
    expert_layer_ms=0,
)
"""The model's own operators: the profile `eager`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The overheads and the overlap of the software.

    Args:
        matmul_pace: the speed of its matmuls relative to the hardware's measured ones.
        attention_pace: the speed of its flash kernel relative to the best kernel of the hardware.
        launches_a_collective: operators' worth of CPU time of one collective.
        loss_transient: bytes a logit that exist for a moment beside those that stay until backward.
        launches_a_unit: operators' worth of CPU time of FSDP's hooks of one unit and pass.
        parameter_passes: bytes read and written for one parameter of a micro-batch, to accumulate
            its gradient; under FSDP those of its copies come on top.
        gather_passes, reduce_passes: bytes read and written for one parameter of an FSDP unit in an
            all-gather and a reduction of gradients, besides the collective.
        accumulation_passes: the same to add a gradient to one that is not reduced yet.
        shard_passes: the same for one parameter of a rank's shard, in a micro-batch.
        optimizer_passes: how often a step reads or writes an element as wide as what it steps.
        optimizer_copies: copies of the parameters that a step holds for a moment.
        tensor_overlap, data_overlap: the share of collectives' time that compute hides.
        data_contention: the share of the hidden time of data-parallel collectives across nodes by
            which they slow the compute that hides them.
        overlaps_scatter: whether the last backward pass hides ZeRO-1's collectives, as those of
            replicas, by `data_overlap`.
        stall_us: what one rank of a tensor group delays a collective by, while a pipeline
            communicates across nodes.
        memory_margin: the share of memory that allocations can fill before fragmentation ends it.
        kernels: of the layers; no field of a stack's file.
    """

    name: str
    matmul_pace: float
    attention_pace: float
    launches_a_collective: int
    launches_a_unit: int
    loss_transient: float
    parameter_passes: float
    gather_passes: float
    reduce_passes: float
    accumulation_passes: float
    shard_passes: float
    optimizer_passes: float
    optimizer_copies: float
    tensor_overlap: float
    data_overlap: float
    stall_us: float
    memory_margin: float
    data_contention: float = 0
    overlaps_scatter: bool = False
    kernels: Kernels = EAGER
    sources: dict[str, str] = field(default_factory=dict, compare=False)

    def with_kernels(self, kernels: Kernels) -> Stack:
        """The stack with other kernels of layers."""
        transient = kernels.loss_transient if kernels.fused else self.loss_transient
        return replace(self, kernels=kernels, loss_transient=transient)


P = TypeVar("P", Hardware, Stack, Kernels)

LIMITS: dict[str, tuple[float, float]] = {
    "ranks_per_node": (1, 1024),
    "processors": (1, 4096),
    "memory_gib": (0.1, 4096),
    "context_gib": (0, 64),
    "attention_fraction": (0.01, 1),
    "kernel_us": (0, 1e4),
    "tensorwise_tflops": (0, 1e6),
    "rowwise_tflops": (0, 1e6),
    "mxfp8_tflops": (0, 1e6),
    "launch_us": (0, 1e5),
    "node_latency_us": (0, 1e6),
    "network_latency_us": (0, 1e6),
    "inner_latency_us": (0, 1e6),
    "start_us": (0, 1e6),
    "exchange_us": (0, 1e6),
    "data_contention": (0, 1),
    "tensor_overlap": (0, 1),
    "data_overlap": (0, 1),
    "memory_margin": (0.1, 1),
    "norm_output": (0, 1),
    "activation_output": (0, 1),
    "attention_share": (0, 1),
}
"""The range of each number of a profile; others are positive, and those of a stack not negative."""

_POSITIVE, _PASSES = (1e-3, 1e6), (0.0, 1e6)


def hardware(name: str, sink: Sink, changes: Sequence[str] = ()) -> Hardware | None:
    """The profile of that name or path; None after errors.

    Args:
        changes: `FIELD=VALUE` of fields that are other ones.
    """
    return _read(name, Hardware, "ranks_per_node", sink, changes)


def stack(name: str, sink: Sink) -> Stack | None:
    return _read(name, Stack, "launches_a_unit", sink)


def kernels(name: str, sink: Sink) -> Kernels | None:
    return _read(name, Kernels, "expert_rows", sink)


def shipped_profiles(marker: str = "ranks_per_node") -> tuple[str, ...]:
    """The names of the profiles in `profiles/` that have the field."""
    files = sorted(FOLDER.glob("*.toml"))
    return tuple(f.stem for f in files if f"\n{marker} = " in f.read_text())


def _read(
    name: str, kind: type[P], marker: str, sink: Sink, changes: Sequence[str] = ()
) -> P | None:
    own = Path(name)
    path = own if own.suffix == ".toml" else FOLDER / f"{name}.toml"
    what = kind.__name__.lower()
    if not path.is_file() or (path.parent == FOLDER and path.stem not in shipped_profiles(marker)):
        sink.error(
            "PL700",
            f"there is no {what} profile {name}",
            help=f"name one of {', '.join(shipped_profiles(marker))}, or the path of a .toml file",
        )
        return None
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        sink.error("PL700", f"{name} cannot be read: {error}", help="a profile is a TOML file")
        return None
    for change in changes:
        key, _, value = change.partition("=")
        if key not in (names := [f.name for f in fields(kind)]):
            help = did_you_mean(key, names, f"name one of the fields of {path.name}")
            sink.error("PL701", f"{key} is not a field of a {what} profile", help=help)
            return None
        table[key] = _number(value)
    if changes and isinstance(table.get("name"), str):
        table["name"] += f" with {', '.join(changes)}"
    return _check(name, kind, table, sink)


def _number(text: str) -> int | float | str:
    """The number that a text is; another text as it is."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _check(name: str, kind: type[P], table: dict[str, Any], sink: Sink) -> P | None:
    """The profile, if every field is there, of its type, and possible."""
    types = {f.name: str(f.type) for f in fields(kind) if f.name != "kernels"}
    needed = {f.name for f in fields(kind) if f.default is MISSING}
    problems = [f"{key} is not a field" for key in table if key not in types]
    for key, type_ in types.items():
        if key == "sources":
            problems += _unknown_sources(table.get(key, {}), types)
        elif key not in table:
            problems += [f"{key} is missing"] if key in needed else []
        else:
            problems += _problems(key, type_, table[key], kind)
    if not problems and kind is Hardware:
        problems += _absurd(table)
    if problems:
        sink.error(
            "PL701",
            f"the {kind.__name__.lower()} profile {name} cannot be used: {problems[0]}",
            facts=tuple(problems[1:6]),
            help="copy a profile that ships with planc and change its numbers",
        )
        return None
    return kind(**table)


def _problems(key: str, type_: str, value: Any, kind: type) -> list[str]:
    if type_ in ("bool", "str"):
        right = isinstance(value, bool if type_ == "bool" else str)
        return [] if right else [f"{key} is {value!r}, not a {type_}"]
    if isinstance(value, bool) or not isinstance(value, int if type_ == "int" else (int, float)):
        return [f"{key} is {value!r}, not {'an int' if type_ == 'int' else 'a number'}"]
    low, high = LIMITS.get(key, _POSITIVE if kind is Hardware else _PASSES)
    return [] if low <= value <= high else [f"{key} is {value}, not between {low:g} and {high:g}"]


def _unknown_sources(sources: Any, types: Mapping[str, str]) -> list[str]:
    """`sources` says of fields where they come from."""
    if not isinstance(sources, dict):
        return [f"sources is {sources!r}, not a table"]
    unknown = [f"{key} of sources is not a field" for key in sources if key not in types]
    texts = (key for key, value in sources.items() if not isinstance(value, str))
    return [*unknown, *(f"{key} of sources is {sources[key]!r}, not a text" for key in texts)]


def _absurd(table: Mapping[str, Any]) -> list[str]:
    """Numbers of hardware that are possible alone, and not together."""
    problems = []
    memory, context = table["memory_gib"], table["context_gib"]
    if context >= memory:
        problems.append(f"context_gib is {context}, which leaves nothing of memory_gib = {memory}")
    rate, peak = table["matmul_tflops"], table["peak_tflops"]
    if rate > 2 * peak:
        problems.append(f"matmul_tflops is {rate}, more than twice peak_tflops = {peak}")
    return problems
