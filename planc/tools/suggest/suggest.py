"""`planc suggest`: the fastest plans that fit, found by trying what a family's plan can choose."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from planc import compiler
from planc.compiler import complete_plan
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.elaborate.evaluate import evaluate, truth
from planc.elaborate.scope import Definition, Scope
from planc.elaborate.settings import EP, ETP, RECOMPUTE, REDUCE_DTYPE
from planc.files.project import ProjectError
from planc.files.resources import PLANS
from planc.ir.mesh_axes import EXPERTS
from planc.ir.nodes import Plan
from planc.ir.optimizer_dtype import assume_fp32_steps
from planc.model.facts import Facts
from planc.syntax import ast
from planc.syntax.parse import parse
from planc.syntax.plan_files import locate, plan_of_family
from planc.tools.estimate import profiles
from planc.tools.estimate.answer import Request, hardware_of, stack_of
from planc.tools.estimate.counted import by_rows
from planc.tools.estimate.from_plan import Batch
from planc.tools.estimate.kept_tensors import count
from planc.tools.estimate.memory import GIB
from planc.tools.suggest.candidates import WAYS_OUT, Candidate, Candidates, Tally
from planc.tools.suggest.choice import Choice, Space
from planc.tools.suggest.measured import run_first
from planc.tools.suggest.search import Found, search, search_one_mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The arguments of a search.

    Args:
        plan: the plan to extend, None for the one that ships for the family.
        request: the batch and the profiles; its micro-batches are those of `micro_batches`.
        folder: where the plan will be, which `extend` is relative to.
        micro_batches: of a step, None to search them.
        settings: `name=value` for axes and options that stay as they are.
        requires: conditions over axes, options and `config.*`.
        compare: settings of meshes to compare the fastest plan with, as `tp=2 pp=8`.
        run: whether a rank of the first plans is run, to count what it holds.
        budgets: whether the first plans also get a budget for what their layers keep.
    """

    plan: str | None
    world_size: int
    request: Request
    folder: str = "."
    micro_batches: int | None = None
    settings: Sequence[str] = ()
    requires: Sequence[str] = ()
    compare: Sequence[str] = ()
    run: bool = False
    budgets: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The fastest plan with some settings, besides those of the search.

    Args:
        settings: as in `Asked.compare`.
        best: the fastest plan that fits; None if none does.
        nearest: the plan that needs the least memory, if none fits and some can be estimated.
        reason: the first reason for which there is no plan, if none can be estimated.
    """

    settings: str
    best: Candidate | None = None
    nearest: Candidate | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """
    Args:
        candidates: that were searched.
        experts: whether a plan can divide experts among ranks.
        coarser: the best plan with gradients reduced in 16 bits, if its own are reduced in 32.
        compared: the fastest plans on the meshes of `Asked.compare`.
        assumes_fp32: whether it is assumed that the optimizer steps fp32.
    """

    asked: Asked
    facts: Facts
    base: str
    hardware: profiles.Hardware
    stack: profiles.Stack
    candidates: Candidates
    found: Found
    coarser: Candidate | None = None
    compared: tuple[Compared, ...] = ()
    assumes_fp32: bool = False
    experts: bool = False

    @property
    def plan(self) -> str:
        """The text of the fastest plan, with a comment on what it is the fastest for."""
        best, batch = self.found.best[0], self.asked.request.batch
        assert batch is not None
        rows = f"{batch.global_batch} x {batch.sequence} tokens a step"
        if best.micro_batches > 1:
            rows += f" in {best.micro_batches} micro-batches"
        ranks = f"{self.asked.world_size:,} ranks of {self.hardware.name}"
        header, _, rest = best.text.partition("\n")
        return f"{header}\n\n# Written by planc suggest for {ranks}, {best.axes}: {rows}.\n{rest}"


def suggest(
    facts: Facts,
    asked: Asked,
    sink: Sink,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Suggestion | None:
    """The fastest plans for a model; None after an error.

    Args:
        sink: receives PL710 (no plan to extend), PL711 (a requirement), PL712 (nothing fits), and
            what is wrong with the plan that is extended.
        progress: is told how many of how many parts are done.
    """
    request, batch = asked.request, asked.request.batch
    hardware, files = hardware_of(request, sink), _files(facts, asked, sink)
    space = _space(facts, asked, files, sink) if files else None
    stack = stack_of(request, space.plan, sink) if space else None
    if not (hardware and stack and files and space and batch):
        return None
    conditions = _conditions(space, facts, sink)
    if conditions is None:
        return None
    candidates = Candidates(
        space=space,
        files=files,
        facts=facts,
        batch=batch,
        hardware=hardware,
        stack=stack,
        optimizer=request.optimizer,
        count=by_rows(partial(count, facts, sink, attention=request.attention)),
        violated=lambda choice: _violations(choice, space, facts, conditions),
        micro_batches=asked.micro_batches,
    )
    found = search(candidates, progress, budgets=asked.budgets)
    compared = _compare(candidates, asked, sink)
    if not found.best:
        _nothing(found.tally, sink)
    if not found.best or compared is None:
        return None
    return Suggestion(
        asked=asked,
        facts=facts,
        base=space.name,
        hardware=hardware,
        stack=stack,
        candidates=candidates,
        found=found,
        coarser=_coarser(candidates, found.best[0]),
        compared=compared,
        assumes_fp32=assume_fp32_steps(space.plan, facts) is not None,
        experts=space.experts is not None,
    )


def run_best(made: Suggestion, sink: Sink) -> Suggestion | None:
    """The suggestion without plans that need more memory when a rank of them is run than is usable;
    its first plan was run. None if none is left (PL712).

    Nothing is run without `Asked.run`, or for kernels that are not the model's own operators.
    """
    if not made.asked.run or made.stack.kernels.fused:
        return made
    best = tuple(run_first(made.candidates, made.found.best, made.asked.request))
    if not best:
        _nothing(made.found.tally, sink)
        return None
    return replace(made, found=replace(made.found, best=best))


def _files(facts: Facts, asked: Asked, sink: Sink) -> tuple[ast.File, ...]:
    name = asked.plan or _of_model(facts)
    if asked.plan is None and not compiler.read(name, Sink()):
        sink.error(
            "PL710",
            f"no plan ships for {facts.family}",
            help="name one to extend; `planc init` drafts one",
        )
        return ()
    read = compiler.read(name, sink)
    if read is None or isinstance(read, tuple):
        return read or ()
    sink.error("PL710", f"{name} is lowered already", help="name the plan it was lowered from")
    return ()


def _space(facts: Facts, asked: Asked, files: tuple[ast.File, ...], sink: Sink) -> Space | None:
    def plan(settings: Sequence[str], into: Sink) -> Plan | None:
        return complete_plan(files, facts, into, world_size=asked.world_size, settings=settings)

    before = sink.errors
    default, given = plan((), sink), plan(asked.settings, sink)
    if default is None or given is None or sink.errors > before:
        return None
    names = [s.partition("=")[0].strip() for s in asked.settings]
    fixed = {n: given.options.get(n, given.mesh.size(n)) for n in names}
    on = [f"{RECOMPUTE.word}=true"] if RECOMPUTE.word in default.options else None
    with_all = plan(on, Sink()) if on else None
    name = _extend_name(asked.plan or _of_model(facts), asked.folder)
    if name is None:
        sink.error("PL710", f"{asked.plan} is no file", help="a plan extends a file by its path")
        return None
    return Space(
        plan=with_all or default,
        defaults=default.options,
        **_extents(files, facts, asked, default),
        batch=asked.request.batch or Batch(global_batch=1, sequence=1),
        name=name,
        family=facts.family,
        world_size=asked.world_size,
        fixed=fixed,
        requires=tuple(asked.requires),
    )


def _extents(
    files: tuple[ast.File, ...], facts: Facts, asked: Asked, default: Plan
) -> dict[str, Any]:
    """The axes that a plan can have, and the options that make them, found by setting them."""

    def plan(settings: Mapping[str, object]) -> Plan | None:
        words = [f"{name}={value}" for name, value in settings.items()]
        size = asked.world_size * 2 ** len(settings)
        return complete_plan(files, facts, Sink(), world_size=size, settings=words)

    ones = [
        n for n, v in default.options.items() if isinstance(v, int) and v == 1 and v is not True
    ]
    made = [(name, plan({name: 2})) for name in ones]
    optional = tuple(n for n in default.mesh.left_out if n not in (EP.word, ETP.word))
    sizing = {
        axis.name: name
        for name, other in made
        for axis in (other.mesh.axes if other else ())
        if default.mesh.axis(axis.name) is None
    }
    wide, divided = plan(dict.fromkeys((*sizing.values(), *optional), 2)), plan({EXPERTS: 2})
    axes = wide.mesh.axes if wide else default.mesh.axes
    return {
        "axes": tuple(replace(a, size=1) if a.name in (*sizing, *optional) else a for a in axes),
        "sizing": sizing,
        "optional": optional,
        "exchange": next((r.op.attention for r in wide.context if r.op), "") if wide else "",
        "experts": divided.mesh.experts if divided and divided.experts else None,
    }


def _of_model(facts: Facts) -> str:
    """A name of the plan for a model: its family where several or none are for it, which `read`
    reports.
    """
    with suppress(ProjectError):
        if (place := plan_of_family(*facts.names)) and place.path:
            return str(place.path)
    return facts.family


def _extend_name(plan: str, folder: str) -> str | None:
    """The name of a plan in `extend` from a folder; None for standard input and revisions."""
    place = locate(plan)
    if place is None or place.path is None or place.revision:
        return None
    ships = place.path.parent == PLANS
    return place.path.name if ships else os.path.relpath(place.path, folder)


def _compare(candidates: Candidates, asked: Asked, sink: Sink) -> tuple[Compared, ...] | None:
    """The fastest plans with the settings to compare with; None after an error."""
    others = [_with_settings(text, candidates, asked, sink) for text in asked.compare]
    compared = tuple(other for other in others if other)
    return compared if len(compared) == len(others) else None


def _with_settings(text: str, candidates: Candidates, asked: Asked, sink: Sink) -> Compared | None:
    """Searches the mesh of some settings in full; None after an error.

    Axes that the settings do not name have one rank, but for the one that takes the rest.
    """
    own = replace(asked, settings=[*asked.settings, *text.replace(",", " ").split()])
    space = _space(candidates.facts, own, candidates.files, sink)
    if space is None:
        return None
    here = candidates.of_space(space.fix_other_axes())
    best, nearest = search_one_mesh(here)
    reason = next((f"{r}: {e.example}" for r, e in here.tally.excluded.items()), "no mesh is legal")
    return Compared(settings=text, best=best, nearest=nearest, reason=reason)


# Requirements ------------------------------------------------------------------------------------


def _conditions(space: Space, facts: Facts, sink: Sink) -> dict[str, ast.Expr] | None:
    """Each requirement as an expression that has a value on a first mesh; None after PL711."""
    found: dict[str, ast.Expr] = {}
    for text in space.requires:
        inner = Sink()
        file = parse(Source(f"--require {text}", f'require {text} "asked for"\n'), Sink())
        required = [s for s in file.statements if isinstance(s, ast.Require)]
        value, why = None, "it is no expression"
        if len(required) == 1 and required[0].message == "asked for":
            found[text] = required[0].condition
            choice = space.probe(next(space.meshes(), ()), {})
            value = truth(found[text], _scope(choice, space, facts, inner))
        error = next(iter(inner), None)
        if value is None:
            sink.error(
                "PL711",
                f"`{text}` is not a condition: {error.message if error else why}",
                help=(error and error.help) or "write one over axes and options: `tp <= 8`",
            )
            return None
    return found


def _violations(
    choice: Choice, space: Space, facts: Facts, conditions: dict[str, ast.Expr]
) -> frozenset[str]:
    scope = _scope(choice, space, facts, Sink()) if conditions else None
    return frozenset(t for t, c in conditions.items() if scope and truth(c, scope) is not True)


def _scope(choice: Choice, space: Space, facts: Facts, sink: Sink) -> Scope:
    """The names that a plan's `require` can use, with the values of a choice."""
    mesh = space.mesh(choice.sizes)
    scope = Scope(facts=facts, sink=sink, evaluate=evaluate, solve=lambda: mesh)
    divided = (space.experts.ranks.name,) if space.experts else ()
    scope.axis_names = (*(a.name for a in space.axes), *divided)
    origin = space.plan.origin
    for name, value in {**space.defaults, **space.values(choice)}.items():
        literal = ast.Literal(origin=origin, value=value)  # type: ignore[arg-type]
        scope.define(Definition(name=name, kind="option", value=literal, origin=origin))
    return scope


# -------------------------------------------------------------------------------------------------


def _coarser(candidates: Candidates, best: Candidate) -> Candidate | None:
    """The best plan with gradients reduced in bf16."""
    space, name = candidates.space, REDUCE_DTYPE.word
    if space.defaults.get(name) != "fp32" or name in space.fixed:
        return None
    choice = replace(best.choice, options=(*best.choice.options, (name, "bf16")))
    found = candidates.verify(replace(best, choice=choice))
    return found if found and found.seconds < best.seconds else None


def _nothing(tally: Tally, sink: Sink) -> None:
    near, excluded = tally.nearest, tally.excluded
    most = max(excluded, key=lambda reason: excluded[reason].count, default="")
    help = WAYS_OUT.get(most, "use more ranks, a smaller batch or sequence, or fewer requirements")
    needs = most if most in WAYS_OUT else "no mesh is legal"
    if near:
        room = near.estimate.usable / GIB
        needs = f"the leanest needs {near.peak:.1f} GiB of the usable {room:.1f}"
    elif tally.tried and not excluded:
        needs = "what the model's layers compute and keep is unknown"
        help = "`planc estimate` says of one plan what is known: parameters and optimizer state"
    sink.error(
        "PL712",
        f"none of {tally.tried:,} plans can be used: {needs}",
        facts=(
            *((f"the leanest: {near.label}",) if near else ()),
            *(f"{n.count:,} x {reason}: {n.example}" for reason, n in excluded.items()),
        ),
        help=help,
    )
