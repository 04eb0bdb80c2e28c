"""Conditions that every rank checks before a plan is applied, and before its modules are
compiled.
"""

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, cast

from torch import distributed, nn

from planc.diagnostics.diagnostic import Diagnostic, Label, PlanError, Severity, one_of
from planc.model.facts import Modules, below
from planc.model.module_table import already_parallel
from planc.ops.activation_checkpoint import Checkpoint
from planc.ops.base import Op
from planc.ops.call import Context, modules_of
from planc.ops.lora import MAGNITUDE
from planc.ops.lowered import Lowered
from planc.runtime.calls import import_error
from planc.runtime.meshes import start
from planc.runtime.standalone.pipeline import Stages
from planc.runtime.standalone.shards import is_adapter
from planc.sections import Hook

_log = logging.getLogger("planc")

T = TypeVar("T")
_MOST = 8  # findings about a wrong model


def problem(code: str, message: str, *labels: Label, help: str | None = None) -> Diagnostic:
    """A finding of the runtime: about an operation, whose place its message has, or about the
    script, whose line is its label.
    """
    return Diagnostic(code=code, severity=Severity.ERROR, message=message, labels=labels, help=help)


def stop(code: str, message: str, *labels: Label, help: str | None = None) -> PlanError:
    """The error of one finding."""
    return PlanError([problem(code, message, *labels, help=help)])


def warning(
    code: str, message: str, *labels: Label, help: str | None = None, stages: Stages | None = None
) -> None:
    """Logs a finding on rank 0; of a last stage, which rank 0 may not have, on its counterpart."""
    group = None if stages is None else stages.mesh.get_group()
    here = [distributed.get_rank()] if group is None else distributed.get_process_group_ranks(group)
    if 0 in here:
        finding = problem(code, message, *labels, help=help)
        _log.warning("%s", replace(finding, severity=Severity.WARNING).one_line)


def require_not_parallel(model: nn.Module) -> None:
    """Checks that no parallelism was applied to a model.

    Raises:
        PlanError: PL493, the model is parallel already.
    """
    if reason := already_parallel(model):
        message = f"this model is already parallel: {reason}"
        raise stop("PL493", message, help="apply a plan once, to a model that is not parallel yet")


def ready(
    model: nn.Module, lowered: Lowered, digest: str, also: Any
) -> tuple[dict[str, nn.Module], list[Any]]:
    """The modules of a model by name, once every rank has checked that the plan fits; and what each
    rank says (`also`) besides, by rank. A finding on one rank raises on every rank, so that none
    waits forever.

    Raises:
        PlanError: PL490, another number of ranks; PL491, the digests differ; PL493, the model is
            parallel already; PL494, the plan was lowered for another model.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    findings = list(_world(lowered)) or list(_fits(model, lowered, modules))[:_MOST]
    return modules, _agree(digest, findings, also)


class AnnouncedError(PlanError):
    """An error that all ranks raise, so that none has to be told of it."""


def _in_a_group() -> bool:
    """Whether there is a process group, or torchrun asks for one of several ranks."""
    several = "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    return distributed.is_initialized() or several


def announce(error: Exception, device_type: str) -> None:
    """Tells the other ranks why this one cannot apply its plan; they wait for it in `ready`.

    A no-op where there are no others: outside a process group that exists or that torchrun asks
    for. The caller raises the error afterwards.

    Args:
        error: what this rank is about to raise.
        device_type: where the process group works, if it has to be started for this.
    """
    if isinstance(error, AnnouncedError) or not _in_a_group():
        return
    start(device_type)
    errors = list(error.diagnostics) if isinstance(error, PlanError) else []
    errors = [d for d in errors if d.severity is Severity.ERROR]
    try:
        _agree("", errors or [problem("PL900", f"{type(error).__name__}: {error}")])
    except PlanError as agreed:  # this rank's own error says more
        if isinstance(error, PlanError):
            error.rank = agreed.rank


def members_of(op: Op, context: Context) -> Iterator[Modules]:
    """The module sets that an operation works on."""
    yield from op.whole_call_modules
    for step in op.calls(context):
        yield from modules_of(step)


def op_name(op: Op) -> str:
    """An operation in a message: its torch call, and the line of the plan."""
    return f"{op.call_name} ({op.place})" if op.place else op.call_name


# This rank ---------------------------------------------------------------------------------------


def _world(lowered: Lowered) -> Iterator[Diagnostic]:
    size = distributed.get_world_size()
    if size == lowered.world_size:
        return
    axes = " * ".join(f"{a.name} {a.size}" for a in lowered.axes)
    alone = size == 1 and "WORLD_SIZE" not in os.environ
    yield problem(
        "PL490",
        f"the plan is lowered for {lowered.world_size:,} ranks ({axes}), and this run has {size:,}",
        help="start it with torchrun and as many ranks as the plan has"
        if alone
        else "lower it for this world size, or start as many ranks",
    )


_MODEL_PROBLEMS = Hook[Callable[[nn.Module, Lowered], Iterator[Diagnostic]]](
    "runtime", "model_problems"
)


def _fits(
    model: nn.Module, lowered: Lowered, modules: dict[str, nn.Module]
) -> Iterator[Diagnostic]:
    try:
        require_not_parallel(model)
    except PlanError as error:
        yield from error.diagnostics
        return
    if type(model).__name__ != lowered.model:
        name = type(model).__name__
        yield problem("PL494", f"the plan was lowered for {lowered.model}, and this is {name}")
        return
    if lowered.load.meta:
        full = next((n for n, p in model.named_parameters() if not p.is_meta), None)
        if full is not None:
            message = f"the plan starts on the meta device, and {full} is already allocated"
            help = 'build the model inside `with torch.device("meta"):`'
            yield problem("PL474", message, help=help)
            return
    asked = _MODEL_PROBLEMS.find_all(lowered.sections)
    if findings := [finding for problems in asked for finding in problems(model, lowered)]:
        yield from findings
        return
    modules = {**modules, **dict(_inside_adapters(lowered, modules))}
    context = lowered.context()
    for op in lowered.ops:
        # a set has modules of one structure, so all of them have the same mismatch
        text = next(_misfits(op, context, modules), None)
        if text:
            message = f"{op_name(op)}: {text}"
            yield problem("PL494", message, help="lower the plan for this model's configuration")


def _inside_adapters(
    lowered: Lowered, modules: dict[str, nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules that adapters will add; those of their parameters are placeholders."""
    for op in lowered.adapters:
        for name in op.names() if not op.parameters else ():
            if name in modules:
                yield f"{name}.base_layer", modules[name]
                for inner in ("lora_A", "lora_B", *([MAGNITUDE] if op.dora else [])):
                    yield f"{name}.{inner}.default", nn.Module()


def _misfits(op: Op, context: Context, modules: dict[str, nn.Module]) -> Iterator[str]:
    """The modules, fields and parameters that an operation names and the model lacks."""
    for name in (n for members in members_of(op, context) for n in members.names()):
        if name not in modules:
            yield f"the model has no module {name!r}"
        elif type(modules[name]) is not nn.Module:
            yield from _shapes(op, name, modules[name])
    yield from op.misfits(modules)


def _shapes(op: Op, name: str, module: nn.Module) -> Iterator[str]:
    for parameter_name, shape in op.required_shapes.items():
        parameter = module._parameters.get(parameter_name)
        actual = None if parameter is None else tuple(parameter.shape)
        if actual != shape and not is_adapter(parameter_name):
            shown = list(actual) if actual is not None else "missing"
            yield f"{name}.{parameter_name} is {shown}, and the plan was lowered for {list(shape)}"


# All ranks ---------------------------------------------------------------------------------------


def of_all_ranks(value: T, group: Any = None) -> list[T]:
    """The objects of every rank of a group, by rank; a collective if there are several."""
    values = [value] * distributed.get_world_size(group)
    if len(values) > 1 and distributed.get_backend(group) != "fake":
        distributed.all_gather_object(values, value, group=group)
    return values


def of_rank_0(make: Callable[[], T], device_type: str) -> T:
    """Calls a function on rank 0, and returns its result on every rank. All ranks of a run that has
    started, or that torchrun starts, wait for it here.

    Raises:
        AnnouncedError: a rank has an error, or applies a plan and asks for none of this.
    """
    if not _in_a_group():
        return make()
    start(device_type)
    try:
        result = make() if distributed.get_rank() == 0 else None
        return cast(T, _agree("a draft", [], result)[0])
    except PlanError as error:
        raise AnnouncedError(error.diagnostics, error.rank) from None


def _agree(digest: str, findings: list[Diagnostic], also: Any = None) -> list[Any]:
    """Raises on every rank unless all ranks have the same digest and no findings; returns what
    each rank says besides, by rank. The digest is empty on a rank without a lowered plan.
    """
    code = findings[0].code if findings else ""
    everyone = of_all_ranks((digest, code, _in_one_line(findings), also))
    digests = [rank_digest for rank_digest, *_ in everyone]
    if all(digests) and len(set(digests)) > 1:
        different = one_of(_digests(digests), last="and")
        message = f"the ranks disagree on the lowered plan: {different}"
        help = "every rank must read the same plan, settings and model configuration"
        raise PlanError([problem("PL491", message, help=help)], rank=0)
    errors = [(code, message) for _, code, message, _ in everyone]
    if findings:
        raise PlanError(findings, rank=errors.index((code, _in_one_line(findings))))
    for rank, (code, message) in enumerate(errors):
        if code:
            text = f"rank {rank} cannot apply the plan: {message}"
            raise PlanError([problem(code, text)], rank=rank)
    return [said for *_, said in everyone]


def _in_one_line(findings: list[Diagnostic]) -> str:
    if not findings:
        return ""
    labels = findings[0].labels
    place = f"{labels[0].span.place}: " if labels else ""
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return f"{place}{findings[0].message}{more}"


def _digests(digests: list[str]) -> Iterator[str]:
    """Each digest, with enough digits to be unique, and the ranks that have it."""
    different = set(digests)
    enough = (n for n in range(12, 64) if len({d[:n] for d in different}) == len(different))
    length = next(enough, 64)
    for digest in dict.fromkeys(digests):
        ranks = [i for i, d in enumerate(digests) if d == digest]
        names = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
        yield f"{digest[:length]} on rank{'s' if len(ranks) > 1 else ''} {names}"


_ON_CPU = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def require_packages(lowered: Lowered) -> None:
    """Checks that the packages that the operations of a plan need can be imported.

    Raises:
        PlanError: PL187, PL627, PL685: a package cannot be imported.
    """
    for requirement in dict.fromkeys(r for op in lowered.ops for r in op.requirements):
        if error := import_error(requirement):
            text = requirement.finding(error)
            raise stop(requirement.code, text, help=requirement.help) from error


def require_recomputable(model: nn.Module, lowered: Lowered, device: str) -> None:
    """Checks that no compiled module recomputes torch's own attention beside DTensors on the CPU.

    Observed with torch 2.13 on two processes: `AssertionError: expected all
    tensors_saved_with_vc_check to be Tensors` in the first forward. That attention counts as
    random, so it is recomputed with the random state of the forward, which `functionalize_rng_ops`
    (torch/_functorch/partitioners.py) returns behind the device mesh that DTensors keep for the
    backward, where the caller looks for the mesh. On CUDA the state is no output of the graph.
    All of these run: attention that is saved, or eager; a checkpoint without attention; one rank; a
    compiled module inside a checkpointed one.

    Raises:
        PlanError: PL485.
    """
    if device != "cpu":
        return
    split = [n for op in lowered.styles for n in op.modules.names()]
    modules = dict(model.named_modules())
    for op, compiled, name, outer in _recomputed_attention(lowered):
        inner = modules.get(name)
        if inner and _attends(inner) and any(n == outer or below(n, outer) for n in split):
            raise stop(
                "PL485",
                f"torch cannot run the compiled {outer} ({compiled.place}) on the CPU: {name} "
                f"({op.place}) recomputes its attention, beside DTensors",
                help="save the attention, with `ops(save = [attention])` in the checkpoint "
                "section; or compile on CUDA alone, where this runs",
            )


def _recomputed_attention(lowered: Lowered) -> Iterator[tuple[Checkpoint, Op, str, str]]:
    """(checkpoint, compilation, names of both modules) where compiled attention is recomputed."""
    compiled = [(op, name) for op, modules in lowered.compilations for name in modules.names()]
    for op in lowered.checkpoint_ops if compiled else ():
        if not any(_ON_CPU in saved.ops for saved in op.save):
            for name in op.modules.names():
                for by, outer in compiled:
                    if name == outer or below(name, outer):
                        yield op, by, name, outer


def _attends(module: nn.Module) -> bool:
    return any(
        "Attention" in type(m).__name__
        and getattr(getattr(m, "config", None), "_attn_implementation", None) == "sdpa"
        for m in module.modules()
    )
