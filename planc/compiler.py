"""The compiler on one page: text -> AST -> IR -> passes -> adapters -> checks -> budgets -> ops."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from planc.checks import check
from planc.diagnostics.diagnostic import Sink
from planc.elaborate import elaborate
from planc.elaborate.scope import Sizes
from planc.infer.apply_adapters import adapt_plan
from planc.infer.infer_layouts import infer_layouts
from planc.infer.section_rules import complete_rules
from planc.infer.shard_dims import choose_shard_dims
from planc.infer.stage_inputs import place_styled_inputs
from planc.ir.nodes import Plan
from planc.lowering import lower, lowered_file
from planc.model.facts import Facts
from planc.model.load import load
from planc.ops.document import digest
from planc.ops.lowered import Lowered
from planc.sections import Hook
from planc.syntax import ast, plan_files
from planc.tools.estimate.stages import with_timed_stages

Files = tuple[ast.File, ...] | lowered_file.LoweredFile
Draft = Callable[[Facts], tuple[ast.File, ...] | None]
Applied = tuple[Plan, Facts]
Pass = Callable[[Plan, Facts, Sink], Plan]
PASSES: tuple[Pass, ...] = (infer_layouts, complete_rules, place_styled_inputs, choose_shard_dims)
"""The passes that add to an elaborated plan what follows from its lines, in order."""
_CHOOSE = Hook[Callable[[Plan, Applied, Sink], tuple[Plan, Applied]]]("choice", "choose_rules")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The inputs of one run of the compiler, and how far it came.

    Args:
        files, facts: the parsed plan, bases first, or a lowered one; the model. None if unreadable.
        settings, world_size: `name=value` for options and axes; the number of ranks.
        plan: what the plan means, None where it has no mesh or no header, or is lowered already.
        applied, lowered: both with adapters, as checked; the operations, None after an error.
    """

    files: Files | None = None
    settings: tuple[str, ...] = ()
    world_size: int | None = None
    facts: Facts | None = None
    plan: Plan | None = None
    applied: Applied | None = None
    lowered: Lowered | None = None

    @property
    def digest(self) -> str:
        return digest(self.lowered) if self.lowered else ""


def read(plan: str, sink: Sink) -> Files | None:
    """A path, `-`, a shipped plan's name, `REV:path` or a lowered JSON file; None after errors."""
    before = sink.errors
    files = (lowered_file if plan.endswith(".json") else plan_files).read(plan, sink)
    return files if files and sink.errors == before else None


def complete_plan(
    files: Sequence[ast.File],
    facts: Facts,
    sink: Sink,
    *,
    world_size: int | None = None,
    settings: Sequence[str] = (),
    sizes: Sizes | None = None,
) -> Plan | None:
    """Elaborates a plan for one model on one mesh, and runs `PASSES`; arguments as of `elaborate`.

    Returns:
        None where the header or mesh is invalid.
    """
    plan = elaborate(files, facts, sink, world_size=world_size, settings=settings, sizes=sizes)
    if plan is not None:
        for run in PASSES:
            plan = run(plan, facts, sink)
    return plan


def compile(
    files: Files | None,
    facts: Facts | None,
    sink: Sink,
    *,
    world_size: int | None = None,
    settings: Sequence[str] = (),
    checks: Sink | None = None,
) -> Compiled:
    """Runs all stages that can run. Findings of checks with a sink of their own stop nothing."""
    done = Compiled(files=files, settings=tuple(settings), world_size=world_size, facts=facts)
    if isinstance(files, lowered_file.LoweredFile):
        return replace(done, lowered=lowered_file.fit(files, facts, world_size, settings, sink))
    before = sink.errors
    if files and facts and world_size is not None and world_size < 1:
        sink.error("PL301", f"the world size is a positive number of ranks, not {world_size}")
    if files is None or facts is None or sink.errors > before:
        return done
    plan = complete_plan(files, facts, sink, world_size=world_size, settings=settings)
    if plan is None:
        return done
    plan = with_timed_stages(plan, facts, sink)
    applied = adapt_plan(plan, facts)
    check(*applied, sink if checks is None else checks, bare=(plan, facts))
    for choose in _CHOOSE.find_all(plan.sections) if sink.errors == before else ():
        plan, applied = choose(plan, applied, sink)
    lowered = None if sink.errors > before else lower(*applied)
    return replace(done, plan=plan, applied=applied, lowered=lowered)


def compile_plan(
    model: str | Facts,
    plan: str | None,
    sink: Sink,
    *,
    world_size: int | None = None,
    settings: Sequence[str] = (),
    allow_code: bool = False,
    draft: Draft | None = None,
) -> Compiled:
    """Reads a plan (None for that of the model's family, else a draft), loads a model, compiles."""
    files = None if plan is None else read(plan, sink)
    facts = load(model, sink, allow_code=allow_code) if isinstance(model, str) else model
    if plan is None and facts is not None:
        files = plan_files.read_for(facts.names, sink, draft and partial(draft, facts))
    return compile(files, facts, sink, world_size=world_size, settings=settings)
