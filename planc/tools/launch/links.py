"""Measures an all-reduce on each axis of the mesh, in three sizes, and finds slow groups."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from planc.diagnostics.diagnostic import Diagnostic, Label, one_of
from planc.ops import phrases
from planc.ops.lowered import Lowered, MeshAxis
from planc.runtime.preconditions import problem
from planc.tools.launch.facts import device
from planc.tools.launch.peers import Peers

SIZES = {"cpu": (2**10, 2**18, 2**22), "cuda": (2**10, 2**20, 2**27)}
"""Bytes of a message."""
_PASSES = 6
_SLOW, _FLOOR = 3.0, {"cpu": 0.05, "cuda": 0.002}
"""A group is slow that takes so many times as long as the others of its axis, and so much longer in
seconds: processes that share cores wait for each other."""


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds of an all-reduce on the group of an axis, for each size, as this rank saw them."""

    axis: str
    group: tuple[int, ...]
    seconds: tuple[float, ...]


def measure_links(lowered: Lowered, ranks: Peers) -> list[Link]:
    """The links of this rank. Every rank calls it, and `distributed` is started."""
    names, sizes = zip(*((axis.name, axis.size) for axis in lowered.axes), strict=True)
    ranks.report_activity("making the mesh")
    mesh = init_device_mesh(device(), sizes, mesh_dim_names=names)
    links = []
    for axis in wide(lowered):
        group = mesh[axis.name].get_group()
        members = tuple(distributed.get_process_group_ranks(group))
        times = []
        for size in SIZES[device()]:
            ranks.report_activity(
                f"all-reduce of {phrases.size(size)} on {axis.name} {list(members)}"
            )
            times.append(_all_reduce(torch.ones(size // 4, device=device()), group))
        links.append(Link(axis.name, members, tuple(times)))
    return links


def _all_reduce(value: torch.Tensor, group: Any) -> float:
    """The seconds of the fastest pass: what else runs on the machine does not count."""
    times = []
    for _ in range(_PASSES):
        began = time.perf_counter()
        distributed.all_reduce(value, group=group)
        if value.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def wide(lowered: Lowered) -> list[MeshAxis]:
    """The axes with several ranks."""
    return [axis for axis in lowered.axes if axis.size > 1]


def slow(lowered: Lowered, seen: list[list[Link]], hosts: list[str]) -> Iterator[Diagnostic]:
    """Groups that are slow beside the others of their axis, and the rank that is in all of them.

    Args:
        seen: the links of each rank.
        hosts: of each rank.
    """
    judged: dict[int, list[bool]] = {}
    findings: list[tuple[tuple[int, ...], Diagnostic]] = []
    for at, axis in enumerate(wide(lowered)):
        seconds_by_group = {links[at].group: links[at].seconds for links in reversed(seen)}
        for group, taken in seconds_by_group.items() if len(seconds_by_group) > 1 else ():
            others = [seconds for other, seconds in seconds_by_group.items() if other != group]
            text = _slowdown(taken, tuple(map(median, zip(*others, strict=True))), axis.name)
            for rank in group:
                judged.setdefault(rank, []).append(bool(text))
            if text:
                where = one_of(dict.fromkeys(hosts[rank] for rank in group), last="and")
                findings.append((group, _slow(f"ranks {list(group)} on {where} {text}", axis)))
    ranks = [rank for rank, groups in judged.items() if len(groups) > 1 and all(groups)]
    for rank in ranks:
        yield _slow(f"rank {rank} on {hosts[rank]} is slow on each axis that it is on")
    yield from (finding for group, finding in findings if not {*group} & {*ranks})


def _slowdown(taken: tuple[float, ...], usual: tuple[float, ...], axis: str) -> str:
    """Describes the smallest message size at which a group is slower than the other groups of its
    axis; empty if it is not.
    """
    for size, seconds, other in zip(SIZES[device()], taken, usual, strict=True):
        if seconds > _SLOW * other and seconds - other > _FLOOR[device()]:
            what = (
                f"need {seconds * 1e3:.1f} ms for an all-reduce of {phrases.size(size)} on {axis}"
            )
            return f"{what}, and the other groups {other * 1e3:.1f} ms"
    return ""


def _slow(text: str, axis: MeshAxis | None = None) -> Diagnostic:
    labels = (Label(span=axis.origin, text="the axis"),) if axis and axis.place else ()
    help = "compare the node and its links with the others, or leave it out"
    return problem("PL645", text, *labels, help=help)
