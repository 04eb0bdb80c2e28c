"""`planc preflight`: what every rank of a job checks before it trains."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore

from planc.compiler import Compiled
from planc.diagnostics.diagnostic import Severity, Sink, first_line
from planc.model.fused_kernels import hide
from planc.ops import phrases
from planc.ops.lowered import Lowered
from planc.runtime.weights.loading import Compared
from planc.tools.launch import links, proxy_training
from planc.tools.launch.facts import RankFacts, device, facts
from planc.tools.launch.judge import Needed, differing, judge_ranks
from planc.tools.launch.links import Link
from planc.tools.launch.peers import Peers
from planc.tools.launch.proxy_training import ProxyTraining

NOT_TRIED = ProxyTraining(reason="something else is wrong")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """
    Args:
        files: files and folders that must be equal on all nodes.
        compare: how much of a folder of weights is read.
        save: the folder that the run saves to; empty for none.
        digest: of the plan that the job was written for; empty for any.
        needed: what the plan needs of a rank.
        allow_code: whether the plan's custom styles may be imported.
    """

    files: tuple[str, ...]
    compare: Compared
    save: str
    digest: str
    needed: Callable[[Compiled], Needed]
    allow_code: bool = False


@dataclass(slots=True, kw_only=True)
class Report:
    """The results of rank 0 so far: a rank that is missed ends it at any time.

    Args:
        sink: the findings.
        seconds: that it took.
        lowered: the plan of rank 0; None where it was not compiled.
        facts: those that each rank reported.
        seen: the links of each rank; empty where no collective was tried.
        needed: bytes.
        small: the proxy model that all ranks have trained.
    """

    sink: Sink = field(default_factory=Sink)
    seconds: float = 0.0
    lowered: Lowered | None = None
    facts: Sequence[RankFacts] = ()
    seen: Sequence[Sequence[Link]] = ()
    needed: Needed = field(default_factory=Needed)
    small: ProxyTraining = NOT_TRIED

    @property
    def document(self) -> dict[str, Any]:
        """The fields of the JSON document besides the findings."""
        return {
            "passed": not self.sink.has_errors,
            "seconds": round(self.seconds, 1),
            "needed": asdict(self.needed),
            "ranks": [facts.document() for facts in self.facts],
            "links": [[asdict(link) for link in links_of_rank] for links_of_rank in self.seen],
            "small_model": self.small.document(),
        }

    def lines(self) -> Iterator[str]:
        """The report as text, below its findings."""
        how = "failed" if self.sink.has_errors else "passed"
        if self.lowered is None or not self.facts:
            yield f"preflight {how} in {self.seconds:.1f} s"
            return
        hosts = len({facts.host for facts in self.facts})
        ranks = f"{len(self.facts)} rank{'s' * (len(self.facts) > 1)}"
        on = f"{ranks} on {hosts} node{'s' * (hosts > 1)}"
        mesh = phrases.mesh(self.lowered.axes)
        yield f"preflight of {self.lowered.plan} on {mesh}, {on}: {how} in {self.seconds:.1f} s"
        versions = self.facts[0].versions.items()
        yield f"  plan      {self.facts[0].plan[:12]}"
        yield "  versions  " + ", ".join(f"{name} {version}" for name, version in versions)
        yield f"  files     {len(self.facts[0].files)} compared on every rank"
        yield from self._free("memory", self.needed.memory)
        yield from self._free("disk", self.needed.disk)
        yield f"  model     proxy model {self.small}"
        if not self.seen:
            yield "  links     not measured"
            return
        for at, axis in enumerate(links.wide(self.lowered)):
            slowest = [
                max(times)
                for times in zip(
                    *(links_of_rank[at].seconds for links_of_rank in self.seen), strict=True
                )
            ]
            sizes = zip(links.SIZES[device()], slowest, strict=True)
            said = ", ".join(f"{phrases.size(n)} {s * 1e3:.2f} ms" for n, s in sizes)
            yield f"  {axis.name:9} all-reduce of {said}  {axis.place}".rstrip()

    def _free(self, what: str, needed: int) -> Iterator[str]:
        free = [value for f in self.facts if (value := getattr(f, what)) is not None]
        if free and needed:
            has = f"at least {phrases.size(min(free))} free"
            yield f"  {what:9} {has}, {phrases.size(needed)} needed on each rank"


def preflight(
    ranks: Peers, compiled: Callable[[Sink], Compiled], asked: Wanted, report: Report
) -> None:
    """Checks this job; every rank calls it, and that of rank 0 fills its report."""
    ranks.report_activity("reading the plan")
    plan = compiled(report.sink)
    error = next((d.one_line for d in report.sink if d.severity is Severity.ERROR), "")
    ranks.report_activity("reading files")
    local_facts = facts(plan.digest, error, asked.files, asked.compare, asked.save)
    report.lowered = plan.lowered
    report.sink = Sink() if plan.lowered else report.sink  # of all ranks
    report.facts = [RankFacts(**told) for told in ranks.gather("facts", local_facts.document())]
    if report.facts and plan.lowered:
        report.needed = asked.needed(plan)
        report.sink.add(*differing(report.facts, plan.lowered, asked.digest))
    fits = ranks.broadcast("whether the plan is the same everywhere", not report.sink.has_errors)
    if report.facts and plan.lowered:
        report.sink.add(*judge_ranks(report.facts, plan.lowered, report.needed))
    if fits and plan.lowered:
        try:
            _together(ranks, plan, asked, report)
        except Exception as error:  # often because another rank is gone
            ranks.report_failure(first_line(error))
            raise
        ranks.report_activity("leaving the process group")
        distributed.destroy_process_group()
    report.seconds = ranks.seconds


def _together(ranks: Peers, plan: Compiled, asked: Wanted, report: Report) -> None:
    """Runs the checks that need all ranks: their links, and the training of a proxy model."""
    assert plan.lowered is not None
    report.seen = _links(plan.lowered, ranks)
    if report.seen:
        report.sink.add(*links.slow(plan.lowered, report.seen, [f.host for f in report.facts]))
    if ranks.broadcast("whether all else is right", not report.sink.has_errors):
        report.small = proxy_training.train(plan, ranks, allow_code=asked.allow_code)
        report.sink.add(*report.small.findings)


def _links(lowered: Lowered, ranks: Peers) -> list[list[Link]]:
    """The links of all ranks, on rank 0."""
    ranks.report_activity("starting the process group")
    _start(ranks)
    local_links = links.measure_links(lowered, ranks)
    told = ranks.gather("links", [asdict(link) for link in local_links])
    return [[Link(o["axis"], (*o["group"],), (*o["seconds"],)) for o in mine] for mine in told]


def _start(ranks: Peers) -> None:
    if device() == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        hide()
    distributed.init_process_group(
        distributed.get_default_backend_for_device(device()),
        rank=ranks.rank,
        world_size=ranks.world_size,
        store=PrefixStore("group", ranks.store),
        timeout=timedelta(seconds=2 * ranks.limit),  # the watch of rank 0 comes first
    )
