"""The Python API: what `import planc` offers.

Each function takes the arguments of the command of its name, and raises one `PlanError` with every
diagnostic of the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from planc.compiler import Compiled, compile_plan
from planc.diagnostic import Diagnostic, PlanError, Sink
from planc.ops.document import digest
from planc.ops.lowered import Lowered

if TYPE_CHECKING:
    from torch import nn

    from planc.diffing.compare import Delta
    from planc.model.facts import Facts
    from planc.runtime.run import Run


def check(
    model: str | nn.Module,
    plan: str,
    *,
    world_size: int | None = None,
    overrides: Iterable[str] = (),
    allow_code: bool = False,
    level: str = "flow",
) -> tuple[Diagnostic, ...]:
    """Every finding about a plan for a model; empty without findings.

    Args:
        model: a folder with `config.json`, a JSON file, a cached hub name, a shipped model's name,
            or a module (on any device, meta too).
        plan: a path, the name of a shipped plan, or `REV:path`.
        world_size: the number of ranks.
        overrides: `name=value` for mesh axes and options.
        allow_code: whether Python code that `model` or the plan names may be run.
        level: `flow`, or `structure` to leave out the simulated run of a shrunken model.

    Raises:
        ValueError: there is no such level.
    """
    from planc.proof.layout_flow import flow

    if level not in ("flow", "structure"):
        raise ValueError(f"a level is `flow` or `structure`, not {level!r}")
    compiled, sink = _compiled(model, plan, world_size, overrides, allow_code)
    if level == "flow" and compiled.lowered is not None:
        flow(compiled, sink, allow_code=allow_code)
    return tuple(sink)


def lower(
    model: str | nn.Module,
    plan: str,
    *,
    world_size: int | None = None,
    overrides: Iterable[str] = (),
    allow_code: bool = False,
) -> Lowered:
    """The lowered plan: what `apply` runs. Arguments as for `check`.

    Raises:
        PlanError: the plan has errors.
    """
    compiled, sink = _compiled(model, plan, world_size, overrides, allow_code)
    if compiled.lowered is None:
        raise PlanError(sink)
    return compiled.lowered


def diff(old: Lowered, new: Lowered) -> Delta:
    """What changes from one lowered plan to another; `.same` says whether anything does."""
    from planc.diffing.compare import compare

    return compare(old, new)


def apply(
    model: nn.Module,
    plan: str | Lowered,
    *,
    overrides: Iterable[str] = (),
    world_size: int | None = None,
    device_type: str | None = None,
    allow_code: bool = False,
) -> Run:
    """Parallelizes a model over the ranks of this run, in place, according to a plan.

    Args:
        model: a module with parameters on meta, CPU or CUDA that is not parallel yet.
        plan: a path, the name of a shipped plan, a lowered JSON file, or a lowered plan.
        overrides: `name=value` for mesh axes and options.
        world_size: the number of ranks; by default that of the process group, else that of
            torchrun's environment, else 1.
        device_type: `cpu` or `cuda`; by default the device of the model.
        allow_code: whether custom styles of the plan (`style NAME = python "..."`) may be imported.

    Returns:
        The handle of the run: `.model`, `.mesh`, `.data_rank`, `.data_size`, `.describe()`.

    Raises:
        PlanError: the plan has errors, the ranks disagree, or torch refused an operation.
    """
    from planc.emit.text import render
    from planc.runtime import announce, apply_lowered, device_of, require_not_parallel

    try:
        require_not_parallel(model)
        if isinstance(plan, str):
            size = world_size or _ranks()
            lowered = lower(model, plan, world_size=size, overrides=overrides)
        else:
            lowered = plan
        own = digest(lowered)
    except Exception as error:
        announce(error, device_of(model, device_type))
        raise
    return apply_lowered(
        model,
        lowered,
        digest=own,
        device_type=device_type,
        describe=lambda: render(lowered, digest=own),
        allow_code=allow_code,
    )


def _ranks() -> int:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return int(os.environ.get("WORLD_SIZE", "1"))


def _compiled(
    model: str | nn.Module,
    plan: str,
    world_size: int | None,
    settings: Iterable[str],
    allow_code: bool,
) -> tuple[Compiled, Sink]:
    sink = Sink()
    facts = _facts(model)
    settings = tuple(settings)
    compiled = compile_plan(
        facts, plan, sink, world_size=world_size, settings=settings, allow_code=allow_code
    )
    return compiled, sink


def _facts(model: Any) -> str | Facts:
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    from planc.model.module_table import facts_of

    return facts_of(model, config=getattr(model, "config", None), config_name="model.config")
