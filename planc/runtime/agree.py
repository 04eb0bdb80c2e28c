"""What must hold before a model is touched: on this rank, and on all of them together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import distributed, nn

from planc.diagnostic import Diagnostic, PlanError, Severity, one_of
from planc.lowering.ops import FullyShard, Lowered, Op, Parallelize, Tie
from planc.model.facts import Modules
from planc.model.table import already_parallel


def stop(code: str, message: str, *, help: str | None = None) -> PlanError:
    """The error of the runtime: one diagnostic without a place."""
    return PlanError([Diagnostic(code=code, severity=Severity.ERROR, message=message, help=help)])


def fresh(model: nn.Module) -> None:
    """The model is as its maker built it.

    Raises:
        PlanError: PL493, it is parallel already.
    """
    found = already_parallel(model)
    if found:
        raise stop(
            "PL493",
            f"this model is parallel already: {found}",
            help="apply a plan once, to a model as transformers built it",
        )


def fits(model: nn.Module, lowered: Lowered) -> dict[str, nn.Module]:
    """Every module that the operations name, by name.

    Raises:
        PlanError: PL493, the model is parallel already; PL494, it is not the model that was
            lowered for.
    """
    fresh(model)
    if type(model).__name__ != lowered.model:
        raise stop(
            "PL494", f"the plan was lowered for {lowered.model}, this is {type(model).__name__}"
        )
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    for op in lowered.ops:
        for name in (n for members in members_of(op) for n in members.names()):
            if name not in modules:
                raise stop("PL494", f"{_what(op)}: the model has no module {name!r}")
        if isinstance(op, Parallelize):
            _shapes(op, modules)
        if isinstance(op, Tie):
            for name in (op.parameter, op.source):
                owner, _, last = name.rpartition(".")
                if owner not in modules or last not in modules[owner]._parameters:
                    raise stop("PL494", f"tie: the model has no parameter {name!r}")
    return modules


def members_of(op: Op) -> tuple[Modules, ...]:
    """The module sets that an operation works on."""
    if isinstance(op, FullyShard):
        return op.members
    modules: Modules | None = getattr(op, "modules", None)
    return (modules,) if modules is not None else ()


def _what(op: Op) -> str:
    return f"{type(op).__name__.lower()} ({op.place})" if op.place else type(op).__name__.lower()


def _shapes(op: Parallelize, modules: dict[str, nn.Module]) -> None:
    for name in op.modules.names():
        for shape in op.shapes:
            parameter = modules[name]._parameters.get(shape.name)
            actual = None if parameter is None else tuple(parameter.shape)
            if actual != shape.shape:
                shown = list(actual) if actual is not None else "missing"
                raise stop(
                    "PL494",
                    f"{_what(op)}: {name}.{shape.name} is {shown}, "
                    f"the plan was lowered for {list(shape.shape)}",
                    help="lower the plan for this model's configuration",
                )


def world(lowered: Lowered) -> None:
    """The process group has as many ranks as the mesh.

    Raises:
        PlanError: PL490.
    """
    size = distributed.get_world_size()
    if size != lowered.world_size:
        axes = " * ".join(f"{a.name} {a.size}" for a in lowered.axes)
        raise stop(
            "PL490",
            f"the plan is lowered for {lowered.world_size:,} ranks ({axes}), this run has {size:,}",
            help="lower it for this world size, or start as many ranks",
        )


def same(digest: str, problem: PlanError | None) -> None:
    """All ranks are about to do the same, or none does anything.

    Args:
        digest: of this rank's lowered plan.
        problem: what this rank alone found, so that the others don't wait for it in vain.

    Raises:
        PlanError: PL491 on every rank where the digests differ; this rank's own problem; PL494
            where another rank has one.
    """
    everyone: list[Any] = [(digest, str(problem) if problem else None)]
    if distributed.get_world_size() > 1 and distributed.get_backend() != "fake":
        everyone = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, (digest, str(problem) if problem else None))
    if problem:
        raise problem
    troubled = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(everyone) if text]
    if troubled:
        raise stop("PL494", f"another rank cannot apply the plan; {troubled[0]}")
    if len({d for d, _ in everyone}) > 1:
        groups = _groups([d for d, _ in everyone])
        told = one_of((f"{d[:12]} on {ranks}" for d, ranks in groups), last="and")
        raise stop(
            "PL491",
            f"the ranks disagree on the lowered plan: {told}",
            help="every rank must read the same plan, settings and model configuration",
        )


def _groups(digests: list[str]) -> Iterator[tuple[str, str]]:
    for digest in dict.fromkeys(digests):
        ranks = [i for i, d in enumerate(digests) if d == digest]
        names = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
        yield digest, f"rank{'s' if len(ranks) > 1 else ''} {names}"
