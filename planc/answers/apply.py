"""The Python API: what `import planc` offers.

Each function takes the arguments of the command of its name, and raises one `PlanError` with every
diagnostic of the run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from planc.compiler import Compiled, Draft, compile_plan
from planc.diagnostics.diagnostic import Diagnostic, PlanError, Sink, one_of
from planc.diagnostics.notebook import DRAW, TEXT
from planc.model import cache
from planc.ops.document import digest
from planc.ops.lowered import Lowered
from planc.simulate.time_limit import SECONDS
from planc.syntax import ast, plan_files
from planc.tools.init.parsed import parsed

if TYPE_CHECKING:
    from torch import nn

    from planc.diffing.compare import Delta
    from planc.ir.nodes import Plan
    from planc.model.facts import Facts
    from planc.proof.checked import Findings
    from planc.runtime.known_verdict import KnownVerdict, Required
    from planc.runtime.run import Run
    from planc.tools.estimate.expected import ExpectedNumbers

_log = logging.getLogger("planc")
Overrides = str | Iterable[str] | Mapping[str, Any]
"""`name=value` for mesh axes and options: one, several, or as a mapping."""


def check(
    model: str | os.PathLike[str] | nn.Module,
    plan: str | os.PathLike[str] | None = None,
    *,
    world_size: int | None = None,
    overrides: Overrides = (),
    allow_code: bool = False,
    level: str = "flow",
    inputs: Mapping[str, Any] | Callable[[int, int], Mapping[str, Any]] | None = None,
    loss: Callable[[Any, Mapping[str, Any]], Any] | None = None,
    time_limit: float = SECONDS,
) -> Findings:
    """Every finding about a plan for a model; empty without findings. `print` shows what
    `planc check` does.

    The verdict is kept, and `apply` finds it for the same code of the model.

    Args:
        model: a folder with `config.json`, a JSON file, a cached hub name, a shipped model's name,
            or a module (on any device, meta too). A module of one's own is proved as it is, on a
            copy, if it is small enough.
        plan: a path, the name of a plan, or `REV:path`; by default the plan of the model's family:
            one of the project's own folders, else a shipped one, else a draft as `init` writes it.
        world_size: the number of ranks.
        overrides: `name=value` for mesh axes and options: a text, several, or a mapping.
        allow_code: whether Python code that `model` or the plan names may be run.
        level: `flow`; `structure` to leave out the simulated run of a shrunken model; or `order`,
            which also runs each rank of a small mesh alone, and looks whether the collectives of
            all of them fit together.
        inputs: what the forward of a module takes, by argument: an example, or a function of a
            number of rows and a seed that makes one; tensors have rows on dim 0. The module is then
            proved as it is, whatever library it is from. A module may say it itself, by a method
            `planc_inputs(rows, seed)`.
        loss: of the module's output and the inputs, a mean over rows; by default the loss that it
            returns, else that of its output. A module may have a method `planc_loss(output,
            inputs)`.
        time_limit: seconds of processor time for each simulated run.

    Raises:
        ValueError: there is no such level, inputs or a loss are for the name of a model, or the
            time limit is not positive.
    """
    from planc.proof.checked import LEVELS, Findings, known_certificate, summary
    from planc.proof.in_subprocess import record
    from planc.proof.layout_flow import flow
    from planc.proof.split_remedy import explain_splits
    from planc.simulate.time_limit import limited

    if not time_limit > 0:
        raise ValueError(f"time_limit is a positive number of seconds, not {time_limit!r}")
    if level not in LEVELS:
        raise ValueError(f"a level is {one_of(LEVELS)}, not {level!r}")
    if inputs is not None or loss is not None:
        if isinstance(model, str | os.PathLike):
            raise ValueError("inputs and a loss are for a module, and not for a name")
        model = replace(_facts_of(model), user_model=model, inputs_and_loss=(inputs, loss))
    draft = parsed if level != "structure" else None
    compiled, sink = compiled_for(model, plan, world_size, overrides, allow_code, draft=draft)
    verdict = None
    if level != "structure" and compiled.lowered is not None:
        with limited(time_limit):
            verdict = flow(compiled, sink, allow_code=allow_code, draft=parsed)
        record(compiled, verdict, sink)
    elif level != "structure":
        explain_splits(compiled, sink, parsed)
    also = ""
    if level == "order" and compiled.lowered is not None:
        from planc.tools.order.findings import order

        also = f", {order(compiled, sink, allow_code=allow_code).text}"
    proof = known_certificate(compiled, sink)
    findings = Findings(sink)
    findings.lines = summary(compiled, proof, verdict, also)
    return findings


def lower(
    model: str | os.PathLike[str] | nn.Module,
    plan: str | os.PathLike[str] | None = None,
    *,
    world_size: int | None = None,
    overrides: Overrides = (),
    allow_code: bool = False,
) -> Lowered:
    """The lowered plan: what `apply` runs; `.findings` is what the compiler and the structural
    checks say of it. Arguments as for `check`.

    Raises:
        PlanError: the plan has errors.
    """
    return _lowered(*compiled_for(model, plan, world_size, overrides, allow_code))


def diff(old: Lowered, new: Lowered) -> Delta:
    """The changes from one lowered plan to another; `.same` says whether anything does.

    Raises:
        TypeError: a side is no lowered plan, such as the name of a plan.
    """
    from planc.diffing.compare import compare

    for side in (old, new):
        if not isinstance(side, Lowered):
            kind = type(side).__name__
            raise TypeError(f"diff compares lowered plans, as `planc.lower` gives them, not {kind}")
    return compare(old, new)


def apply(
    model: nn.Module,
    plan: str | os.PathLike[str] | Lowered | None = None,
    *,
    overrides: Overrides = (),
    world_size: int | None = None,
    device_type: str | None = None,
    allow_code: bool = False,
    require: Required | None = None,
    prove: bool = False,
    compare: int = 2,
    watchdog: float | None = None,
    metrics: bool = False,
) -> Run:
    """Parallelizes a model over the ranks of this run, in place, according to a plan.

    What `planc check` and `planc verify` found of the plan on this machine is looked up by its
    digest and by the functions that the model runs; rank 0 logs it, with every warning of the
    checks. Nothing is simulated unless asked.

    Args:
        model: a module with parameters on meta, CPU or CUDA that is not parallel yet.
        plan: a path, the name of a plan, a lowered JSON file, or a lowered plan; by default the
            plan of the model's family: one of the project's own folders, else a shipped one, else a
            draft as `init` writes it, which rank 0 writes and proves while the others wait.
        overrides: `name=value` for mesh axes and options: a text, several, or a mapping.
        world_size: the number of ranks; by default that of the process group, else that of
            torchrun's environment, else 1.
        device_type: `cpu` or `cuda`; by default the device of the model.
        allow_code: whether custom styles of the plan (`style NAME = python "..."`) may be imported.
        require: `proved` or `verified`, the least that must be known of the plan; by default it
            must not be known to be refuted, and `nothing` applies even such a plan.
        prove: whether rank 0 proves a plan of which nothing is known, as `planc check` does, in a
            process of its own, where the script has code of its own in a copy of this one; the
            other ranks wait for it, at most nine minutes.
        compare: the number of first forward passes in which ranks compare their inputs, those of
            the tensor axes and those of the innermost data axis; 0 compares neither these nor the
            weights that the ranks have built.
        watchdog: seconds. Where no collective of this rank has moved for so long, a thread writes
            what it waits for into the folder `planc-hang`, or that which the environment variable
            PLANC_HANG_DIR names, for `planc hang`; the run goes on. By default the number in the
            variable PLANC_WATCHDOG, which files of `planc launch` set, else no such thread.
        metrics: whether training steps count what `run.metrics()` says: one sum over all ranks at
            the end of each, and one for each mixture's module in a pass.

    Returns:
        The handle of the run: `.model`, `.mesh`, `.data_rank`, `.data_size`, `.describe()`,
        `.summary()`.

    Raises:
        PlanError: the plan has errors, it is refuted or less is known of it than required, the
            ranks disagree, or torch refused an operation or is not installed. In the first forward
            passes: the ranks have different inputs (PL483), or different weights (PL484).
        TypeError: the model is no module.
        ValueError: there is no such requirement, a plan that is lowered already is to be proved, or
            a watchdog has no time or nothing to read.
    """
    watchdog = _can_be_asked(model, require, prove, plan, watchdog)
    from planc.runtime.executor import apply_lowered
    from planc.runtime.meshes import device_of, no_group_after_an_error
    from planc.runtime.preconditions import announce, require_not_parallel
    from planc.runtime.safeguards.guards import require_unwrapped
    from planc.runtime.uncaught import print_errors_once
    from planc.simulate.verdict_store import recall

    with print_errors_once(), no_group_after_an_error():
        try:
            require_not_parallel(model)
            require_unwrapped(model)
            facts = _facts_of(model)
            if not isinstance(plan, Lowered):
                size = world_size or _of_the_run("WORLD_SIZE", 1)
                draft = partial(_draft_of_rank_0, device=device_of(model, device_type))
                compiled, sink = compiled_for(facts, plan, size, overrides, allow_code, draft=draft)
                lowered = _lowered(compiled, sink, chosen=plan is None)
                prove = prove or plan_files.drafted(compiled.files)
            else:
                compiled, lowered = None, plan
            known = recall(lowered, facts, plan_files.digest(compiled and compiled.files))
            if prove and compiled is not None and known.level == "unproved":
                known = _proved_by_rank_0(compiled, known, allow_code)
        except Exception as error:
            announce(error, device_of(model, device_type))
            raise
        _warn(lowered.findings, known)
        run = apply_lowered(
            model,
            lowered,
            digest=digest(lowered),
            device_type=device_type,
            allow_code=allow_code,
            known=known,
            require=require,
            compare=compare,
            metrics=metrics,
        )
        return _completed(run, compiled, watchdog)


def _can_be_asked(
    model: object, require: Required | None, prove: bool, plan: object, watchdog: float | None
) -> float | None:
    """Checks what is asked; returns the time of the watchdog."""
    cache.require_torch("planc.apply")
    from planc.runtime.known_verdict import known_requirement
    from planc.runtime.launchers import require_known_to_torch

    if not hasattr(model, "named_modules"):
        raise TypeError(f"apply takes an nn.Module, not {type(model).__name__}")
    known_requirement(require)
    if prove and isinstance(plan, Lowered):
        raise ValueError("prove takes the plan by its path or name, not a lowered one")
    require_known_to_torch()
    watchdog = _seconds_of(watchdog)
    if watchdog is not None:
        from planc.runtime.safeguards.watchdog import require_usable

        require_usable(watchdog)
    return watchdog


def _seconds_of(watchdog: float | None) -> float | None:
    """The time of a watchdog, given or set in the environment, where 0 is none."""
    text = os.environ.get("PLANC_WATCHDOG") if watchdog is None else None
    if not text:
        return watchdog
    try:
        return float(text) or None
    except ValueError:
        raise ValueError(f"PLANC_WATCHDOG is a number of seconds, not {text!r}") from None


def _completed(run: Run, compiled: Compiled | None, watchdog: float | None) -> Run:
    """The run, watched, with what its summary says of the plan's text and of the overrides."""
    if watchdog is not None:
        from planc.runtime.safeguards.watchdog import Watchdog

        Watchdog(run.lowered, run.digest, watchdog).start()
    if compiled is None or compiled.applied is None:
        return run
    if run.steps.meter:
        run.steps.meter.expected = _expected(run, *compiled.applied)
    text = plan_files.digest(compiled.files) or None
    return replace(run, sets=compiled.settings, plan_digest=text)


def _expected(run: Run, plan: Plan, facts: Facts) -> ExpectedNumbers:
    """The estimated numbers of this rank."""
    from planc.tools.estimate.expected import ExpectedNumbers

    axis = run.lowered.pipeline.axis if run.lowered.pipeline else None
    config = getattr(run.model, "config", None)
    eager = getattr(config, "_attn_implementation", None) == "eager"
    return ExpectedNumbers(
        plan=plan,
        facts=facts,
        lowered=run.lowered,
        place=run.mesh.get_local_rank(axis) if axis else 0,
        attention="eager" if eager else "sdpa",
    )


def _draft_of_rank_0(facts: Facts, *, device: str) -> tuple[ast.File, ...] | None:
    from planc.tools.init.on_rank_0 import parsed_for_run  # which imports the whole proof

    return parsed_for_run(facts, device)


def _proved_by_rank_0(compiled: Compiled, known: KnownVerdict, allow_code: bool) -> KnownVerdict:
    """On rank 0 the verdict of layout flow, which `apply` shares; elsewhere what is known."""
    from planc.proof.in_subprocess import prove_in_subprocess

    rank = _of_the_run("RANK", 0)
    _log.info("rank 0 proves the plan%s", "" if rank == 0 else f", and rank {rank} waits for it")
    return prove_in_subprocess(compiled, allow_code=allow_code) if rank == 0 else known


def _warn(findings: Iterable[Diagnostic], known: KnownVerdict) -> None:
    """Logs each warning on rank 0, but for those that a proof overrules."""
    from planc.diagnostics import render
    from planc.diagnostics.codes import PRESUMED

    if _of_the_run("RANK", 0) != 0:
        return
    overruled = PRESUMED if known.level in ("proved", "verified") else frozenset()
    for finding in findings:
        if finding.severity == "warning" and finding.code not in overruled:
            _log.warning("%s", render([finding], "concise").rstrip())


def _of_the_run(name: Literal["RANK", "WORLD_SIZE"], alone: int) -> int:
    """A number of the process group, else of torchrun's environment, else of a single process."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        of = {"RANK": distributed.get_rank, "WORLD_SIZE": distributed.get_world_size}
        return int(of[name]())
    return int(os.environ.get(name, alone))


def _lowered(compiled: Compiled, sink: Sink, *, chosen: bool = False) -> Lowered:
    """The lowered plan; rank 0 says which one was `chosen`, as the commands do."""
    if compiled.lowered is None:
        raise PlanError(sink)
    own = compiled.files if isinstance(compiled.files, tuple) else ()
    if chosen and own and not plan_files.drafted(own) and _of_the_run("RANK", 0) == 0:
        name, family = own[-1].origin.source.name, compiled.facts and compiled.facts.family
        _log.warning("the plan is %s, for %s", name, family)
    return replace(compiled.lowered, findings=tuple(sink))


def compiled_for(
    model: str | os.PathLike[str] | nn.Module | Facts,
    plan: str | os.PathLike[str] | None,
    world_size: int | None,
    overrides: Overrides,
    allow_code: bool,
    *,
    draft: Draft | None = None,
) -> tuple[Compiled, Sink]:
    """A plan compiled for a model, and what is found; of a family without a plan its `draft`.

    Raises:
        TypeError: an argument is of another type than it says.
    """
    if not isinstance(plan, str | os.PathLike | None):
        raise TypeError(f"a plan is a path or a name, not {type(plan).__name__}")
    if isinstance(plan, str) and "\n" in plan:
        raise TypeError("a plan is a path or a name, not the text of a plan: write it to a file")
    if not isinstance(world_size, int | None) or isinstance(world_size, bool):
        raise TypeError(f"world_size is a number of ranks, not {world_size!r}")
    sink = Sink()
    compiled = compile_plan(
        model_of(model),
        None if plan is None else os.fspath(plan),
        sink,
        world_size=world_size,
        settings=settings_of(overrides),
        allow_code=allow_code,
        draft=draft,
    )
    return compiled, sink


def settings_of(overrides: Overrides) -> tuple[str, ...]:
    """Overrides as texts `name=value`.

    Raises:
        TypeError: they are neither texts nor a mapping.
    """
    if isinstance(overrides, Mapping):
        words = {n: str(v).lower() if isinstance(v, bool) else v for n, v in overrides.items()}
        return tuple(f"{name}={value}" for name, value in words.items())
    if isinstance(overrides, str):
        return (overrides,)
    found = tuple(overrides) if isinstance(overrides, Iterable) else (overrides,)
    if not all(isinstance(one, str) for one in found):
        raise TypeError(f"overrides are texts `name=value`, or a mapping, not {overrides!r}")
    return found


def model_of(model: Any) -> str | Facts:
    """The name of a model, or the facts of a module.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    from planc.model.facts import Facts

    if isinstance(model, Facts):
        return model
    if not hasattr(model, "named_modules"):
        raise TypeError(f"a model is a folder, a name, or an nn.Module, not {type(model).__name__}")
    return _facts_of(model)


def _facts_of(module: nn.Module) -> Facts:
    """Library models are proved on a small copy; models that run functions of the script's own are
    kept, to be run themselves or to compare a small one with them.
    """
    from planc.model.config import buildable
    from planc.model.module_table import facts_of
    from planc.model.own_code import own_code
    from planc.model.passed_arguments import name_passed_arguments

    name_passed_arguments(module)
    config = getattr(module, "config", None)
    facts = facts_of(module, config=config, config_name="model.config")
    if type(module).__module__.startswith("diffusers."):  # whose configuration names no class
        from planc.model.sources.diffusers import normal

        facts = replace(facts, config=normal(facts.config, facts.name))
    tied = _ties_head(module)
    if tied is not None and tied != bool(facts.config.get(_TIES)):
        facts = replace(facts, config={**facts.config, _TIES: tied})
    known = buildable(facts.config)
    facts = replace(facts, built=True, own_code=own_code(module, alone=not known))
    if known and not facts.own_code and not hasattr(module, "planc_inputs"):
        return facts
    return replace(facts, user_model=module)


_TIES = "tie_word_embeddings"
"""The field by which plans decide on one unit for the embedding and the head."""


def _ties_head(module: nn.Module) -> bool | None:
    """Whether the head of a model of transformers has the weight of the embedding; None without
    both. The configuration may state otherwise: a script can tie or untie them before `apply`.
    """
    if not hasattr(module, "save_pretrained"):
        return None
    try:
        layers: Any = module.get_input_embeddings(), module.get_output_embeddings()
    except (NotImplementedError, AttributeError):  # a model without an embedding
        return None
    weights = [getattr(layer, "weight", None) for layer in layers]
    if any(weight is None for weight in weights):
        return None
    return weights[0] is weights[1]


def _drawn(of: Lowered | Delta | Run) -> str:
    from planc.tools.show.changes import notebook

    return notebook(of)


def _written(of: Lowered | Delta | Run) -> str:
    from planc.diffing.compare import Delta
    from planc.diffing.render import render as changes
    from planc.emit.text import render

    if isinstance(of, Delta):
        return changes(of).rstrip()
    return (render(of, digest=digest(of)) if isinstance(of, Lowered) else of.describe()).rstrip()


DRAW[:], TEXT[:] = [_drawn], [_written]
