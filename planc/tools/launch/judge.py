"""Findings on the facts that the ranks of a job report."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from planc.diagnostics.diagnostic import Diagnostic, Label, one_of
from planc.ops import phrases
from planc.ops.base import AxisRole
from planc.ops.lowered import Lowered, MeshAxis
from planc.runtime.preconditions import problem
from planc.tools.launch.facts import RankFacts

T = TypeVar("T", bound=Hashable)
_SLOW, _FLOOR = 2.5, 0.005
"""A rank is slow that computes so many times as long as the median, and so much longer in
seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """Bytes that a rank needs of its device, and of the disk that it saves to; 0 where unknown."""

    memory: int = 0
    disk: int = 0


def differing(
    all_facts: Sequence[RankFacts], lowered: Lowered, digest: str
) -> Iterator[Diagnostic]:
    """Yields the reasons why ranks cannot form one mesh: other plans, versions or numbers of ranks.

    Args:
        lowered: the plan of rank 0.
        digest: the beginning of the digest that the job was written for, or of several with
            commas; empty for any.
    """
    if len(all_facts) != lowered.world_size:
        axes = phrases.mesh(lowered.axes)
        text = f"the plan is lowered for {lowered.world_size:,} ranks ({axes}), and this job has "
        yield problem("PL490", text + f"{len(all_facts):,}", help="start as many ranks")
    for facts, ranks in _odd(all_facts, [facts.error for facts in all_facts]):
        if facts.error:
            text = f"{_rank_names(ranks, all_facts)} cannot read the plan: {facts.error}"
            yield problem("PL491", text, help="give every node the same files and settings")
    plans = [facts.plan[:12] for facts in all_facts]
    for facts, ranks in _odd(all_facts, plans):
        if facts.plan:
            usual = _usual(plans)
            where = _rank_names(ranks, all_facts)
            text = f"the plan of {where} is {facts.plan[:12]}, elsewhere {usual}"
            yield problem("PL491", text, help="give every node the same files and settings")
    wanted = [prefix[:12] for prefix in digest.split(",")]
    if not _usual(plans).startswith((*wanted,)):
        plan = one_of(wanted)
        text = f"the job was written for plan {plan}, and the ranks have {_usual(plans)}"
        help = "`planc launch` writes the file anew; `planc diff` shows what has changed"
        yield problem("PL491", text, help=help)
    for name in all_facts[0].versions:
        values = [facts.versions.get(name, "none") for facts in all_facts]
        for facts, ranks in _odd(all_facts, values):
            version = facts.versions.get(name, "none")
            where = _rank_names(ranks, all_facts)
            text = f"{name} is {version} on {where}, elsewhere {_usual(values)}"
            yield problem("PL643", text, help="give every node the same environment")


def judge_ranks(
    all_facts: Sequence[RankFacts], lowered: Lowered, needed: Needed
) -> Iterator[Diagnostic]:
    """Yields all other findings: files, the places of ranks, memory, disk, speed."""
    for name in sorted({name for facts in all_facts for name in facts.files}):
        values = [facts.files.get(name, "not there") for facts in all_facts]
        read = [value for value in values if " " not in value]
        for facts, ranks in _odd(all_facts, values, _usual(read) if read else ""):
            file_digest = facts.files.get(name, "not there")
            what = file_digest if " " in file_digest else "another file"
            text = f"{name} is {what} on {_rank_names(ranks, all_facts)}"
            yield problem("PL461", text, help="copy the files to all nodes again")
    yield from _places(all_facts, lowered)
    for rank, facts in enumerate(all_facts):
        has = (("memory", facts.memory, needed.memory), ("disk", facts.disk, needed.disk))
        for what, free, need in has:
            if free is not None and free < need:
                text = f"rank {rank} on {facts.host} has {phrases.size(free)} of {what} free, and "
                help = "free it" if what == "disk" else "end what else runs there, or see "
                help += "" if what == "disk" else "`planc estimate` for a plan that needs less"
                yield problem("PL646", text + f"needs {phrases.size(need)}", help=help)
    usual = median(facts.compute for facts in all_facts)
    for rank, facts in enumerate(all_facts):
        if facts.compute > _SLOW * usual and facts.compute - usual > _FLOOR:
            times = f"{facts.compute / usual:.1f} times as long as the median"
            text = f"rank {rank} on {facts.host} computes {times} ({facts.compute * 1e3:.1f} ms)"
            yield problem("PL645", text, help="see what else runs there, and at which clock")


def _places(all_facts: Sequence[RankFacts], lowered: Lowered) -> Iterator[Diagnostic]:
    """LOCAL_WORLD_SIZE beside the ranks of a node, and tensor axes that leave their node, or the
    NVLink domain that has it.
    """
    on = Counter(facts.host for facts in all_facts)
    for facts, ranks in _odd(
        all_facts, [(f.local_world_size or on[f.host]) - on[f.host] for f in all_facts]
    ):
        text = f"LOCAL_WORLD_SIZE is {facts.local_world_size} on {_rank_names(ranks, all_facts)}"
        yield problem("PL643", f"{text}, where {on[facts.host]} ranks run", help="start them again")
    most = max(Counter(facts.place for facts in all_facts).values())
    for axis in lowered.axes:
        if axis.role is not AxisRole.TENSOR or axis.size > most:
            continue
        apart = [g for g in groups(lowered, axis) if len({all_facts[r].place for r in g}) > 1]
        if apart:
            members = [all_facts[rank] for rank in apart[0]]
            where = one_of(dict.fromkeys(facts.host for facts in members), last="and")
            if domains := dict.fromkeys(facts.nvlink for facts in members if facts.nvlink):
                where += f", in NVLink domain {one_of(domains, last='and')}"
            more = f", and {len(apart) - 1} more groups" if apart[1:] else ""
            text = f"the ranks {list(apart[0])} of {axis.name} are on {where}{more}"
            help = "number the ranks node by node, and make the axis an inner one of the mesh"
            labels = (Label(span=axis.origin),) if axis.place else ()
            yield problem("PL641", text, *labels, help=help)


def groups(lowered: Lowered, axis: MeshAxis) -> Iterator[tuple[int, ...]]:
    """The ranks along an axis, for each place on the others."""
    inner = lowered.stride(axis.name)
    for rank in range(lowered.world_size):
        if rank // inner % axis.size == 0:
            yield tuple(rank + place * inner for place in range(axis.size))


def _usual(values: Sequence[T]) -> T:
    return Counter(values).most_common(1)[0][0]


def _odd(
    all_facts: Sequence[RankFacts], values: Sequence[Hashable], usual: Hashable = None
) -> Iterator[tuple[RankFacts, tuple[int, ...]]]:
    """The ranks whose value is not the usual one, by default that of most: one of them, and all
    with the same value.
    """
    usual = _usual(values) if usual is None else usual
    for value in dict.fromkeys(values):
        if value != usual:
            ranks = tuple(rank for rank, other in enumerate(values) if other == value)
            yield all_facts[ranks[0]], ranks


def _rank_names(ranks: Sequence[int], all_facts: Sequence[RankFacts]) -> str:
    """`rank 5 on node1`, or `ranks 5, 6 and 7 on node1`."""
    numbers = one_of([str(r) for r in ranks[:6]] + (["more"] if ranks[6:] else []), last="and")
    hosts = one_of([*dict.fromkeys(all_facts[rank].host for rank in ranks)][:3], last="and")
    return f"rank{'s' * (len(ranks) > 1)} {numbers} on {hosts}"
