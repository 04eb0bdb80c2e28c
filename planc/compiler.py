"""The compiler on one page: text -> AST -> IR -> checks -> lowered ops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planc.checks import check
from planc.diagnostic import Sink
from planc.lowering import lower, lowered_file
from planc.model.facts import Facts
from planc.model.load import load
from planc.ops.document import digest
from planc.ops.lowered import Lowered
from planc.plan import elaborate
from planc.plan.ir import Plan
from planc.syntax.plan_files import read


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What one run of the compiler gives.

    Args:
        facts: the model, None where it could not be read.
        plan: what the plan means, None where it has no mesh or no header.
        lowered: the operations, None where there was an error.
    """

    facts: Facts | None = None
    plan: Plan | None = None
    lowered: Lowered | None = None

    @property
    def digest(self) -> str:
        return digest(self.lowered) if self.lowered else ""


def compile_plan(
    model: str | Facts,
    plan: str,
    sink: Sink,
    *,
    world_size: int | None = None,
    settings: Iterable[str] = (),
    allow_code: bool = False,
) -> Compiled:
    """Runs the pipeline; every finding of every stage that could run goes to the sink.

    Args:
        model: what `planc.model.load.load` takes, or the facts of a model at hand.
        plan: a path, `-`, a shipped plan's name, `REV:path`, or a lowered JSON file.
        sink: receives the findings.
        world_size: the number of ranks.
        settings: `name=value` for options and mesh axes.
        allow_code: whether the model may be code that is run to build it.
    """
    settings = tuple(settings)
    if plan.endswith(".json"):
        known = load(model, sink, allow_code=allow_code) if isinstance(model, str) else model
        lowered = lowered_file.read(plan, known, world_size, settings, sink)
        return Compiled(facts=known, lowered=None if sink.failed else lowered)
    files = read(plan, sink)
    unparsed = sink.failed
    facts = load(model, sink, allow_code=allow_code) if isinstance(model, str) else model
    if facts is None or unparsed or not files:
        return Compiled(facts=facts)
    if world_size is not None and world_size < 1:
        sink.error("PL301", f"the world size is a positive number of ranks, not {world_size}")
        return Compiled(facts=facts)
    ir = elaborate(files, facts, sink, world_size=world_size, settings=settings)
    if ir is None:
        return Compiled(facts=facts)
    check(ir, facts, sink)
    return Compiled(facts=facts, plan=ir, lowered=None if sink.failed else lower(ir, facts))
