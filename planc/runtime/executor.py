"""Runs a lowered plan on a model: exactly the operations of the list, in its order."""

import logging
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import assert_never

from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.optim import Optimizer

from planc.compat import rows
from planc.compat.names import missing_name
from planc.compat.recompute import CheckpointWrapper
from planc.diagnostics.diagnostic import PlanError, first_line
from planc.model import cache
from planc.model.sources.isolation import quiet_imports
from planc.ops import phrases
from planc.ops.base import AxisRole, Op
from planc.ops.call import Assign, Each, Members, MeshOf, Once, ParameterRef
from planc.ops.lora import Adapt
from planc.ops.lowered import Lowered
from planc.ops.optimizer import OptimizerClass
from planc.runtime import gradients, preconditions
from planc.runtime.calls import Values, function_of, resolve
from planc.runtime.garbage import without_collection
from planc.runtime.known_verdict import KnownVerdict, Required, accept, strongest
from planc.runtime.lora import remember
from planc.runtime.meshes import Meshes, device_of, mesh_in_use, no_group_after_an_error, start
from planc.runtime.metrics import Experts, Meter, experts_of
from planc.runtime.own_optimizers import require_arguments
from planc.runtime.preconditions import announce, op_name, ready, stop, warning
from planc.runtime.run import Run
from planc.runtime.safeguards.guards import Applied, guard
from planc.runtime.safeguards.inputs import PassComparison, comparison, same_batches, watch
from planc.runtime.safeguards.weights import unequal, weight_sums
from planc.runtime.sharded_tensors import SHARDED_BY
from planc.sections import Hook

_log = logging.getLogger("planc")
_VIEW = r"FSDP2-wrapped module .* returned a view tensor"
"""FSDP's warning of operations in place on what a unit returns: torch refuses these where it is the
local part of a DTensor, and every rank would say it of the units of a tensor section.
"""


@no_group_after_an_error()
def apply_lowered(
    model: nn.Module,
    lowered: Lowered,
    *,
    digest: str,
    device_type: str | None = None,
    allow_code: bool = False,
    known: KnownVerdict | None = None,
    require: Required | None = None,
    compare: int = 0,
    metrics: bool = False,
) -> Run:
    """Parallelizes a model over the ranks of this run, in place.

    It uses the default process group, or starts one: torchrun's, or a group of one rank.

    Args:
        model: on meta, CPU or CUDA, not parallel yet.
        digest: the digest of `lowered`, which must be equal on all ranks.
        device_type: `cpu` or `cuda`; by default the model's, or for one on meta `cuda` if
            available.
        known: what proofs say of the plan, as far as this rank knows; None to ask for nothing.
        require: what they must say; None for a plan that is not known to be refuted.
        compare: the number of first forward passes in which ranks compare their inputs, those of
            the tensor axes and those of the innermost data axis; 0 compares neither these nor the
            weights that the ranks have built, nor in all passes which kinds of inputs data ranks
            pass.
        metrics: whether what steps do is counted, on all ranks where one of them asks.

    Raises:
        PlanError: PL172 (a custom style), PL480 to PL482 (too little is known of the plan), PL485
            (compiled attention on the CPU), PL490 (world size), PL491 (digests differ), PL493
            (parallel already), PL494 (another model), PL495 (no process group or mesh), PL499
            (its backend cannot run), before the model is changed; PL492 (torch refused).
    """
    began = time.perf_counter()
    before = tuple(weakref.ref(p) for p in model.parameters())
    device = device_of(model, device_type)
    _require(model, lowered, device, allow_code)
    with without_collection():
        modules, meshes, known, first, experts = _prepare(
            model, lowered, digest, device, known, require=require, compare=compare, metrics=metrics
        )
        worker = Worker(model, modules, meshes, lowered)
        for op in meshes.stage.ops:
            worker.run_checked(op)
        if lowered.backend:
            SHARDED_BY[model] = lowered.backend.part("runtime")
        watch(model, first)
        changes = guard(
            Applied(model=model, modules=modules, lowered=lowered, known=known, compare=compare)
        )
        if lowered.split_axes(AxisRole.TENSOR):
            warnings.filterwarnings("ignore", _VIEW, UserWarning)
        gradients.clear_unreduced(model, model)
    if distributed.get_rank() == 0:
        _tell(lowered, digest, known, time.perf_counter() - began)
    run = Run(
        model=model,
        lowered=lowered,
        digest=digest,
        meshes=meshes,
        first=first,
        batches=same_batches(lowered, meshes, compare),
        replaced=_replaced_parameters(before, model),
        known=known,
        changes=changes,
    )
    if experts is not None:
        run.steps.meter = Meter(lowered, meshes.root, experts)
    return run


def _replaced_parameters(
    before: Iterable[weakref.ref[nn.Parameter]], model: nn.Module
) -> tuple[weakref.ref[nn.Parameter], ...]:
    """Weak references to the parameters that the plan replaced.

    Parameters that the model still has are left out: `run.load` swaps their tensors, which torch
    refuses if there is a weak reference.
    """
    kept = {id(parameter) for parameter in model.parameters()}
    return tuple(r for r in before if (p := r()) is not None and id(p) not in kept)


_REQUIRE = Hook[Callable[[Lowered, str], None]]("runtime", "require")


def _require(model: nn.Module, lowered: Lowered, device: str, allow_code: bool) -> None:
    """Raises on all ranks if a plan needs something that one rank's machine lacks."""
    try:
        _code(lowered, allow_code)
        preconditions.require_packages(lowered)
        for require in _REQUIRE.find_all(lowered.sections):
            require(lowered, device)
        if lowered.backend:
            lowered.backend.part("runtime").require(device)
        preconditions.require_recomputable(model, lowered, device)
    except Exception as error:
        announce(error, device)
        raise


def _code(lowered: Lowered, allowed: bool) -> None:
    optimizers = {optimizer_class.path for optimizer_class in lowered.optimizer_classes}
    for path in lowered.code:
        what, kind = ("optimizer", Optimizer) if path in optimizers else ("style", ParallelStyle)
        if not allowed:
            message = f"the plan has a custom {what}, {path}, which is code"
            help = "review it, then allow it: `planc.apply(..., allow_code=True)`"
            raise stop("PL172", message, help=help)
        try:
            if not (
                isinstance(optimizer_class := resolve(path), type)
                and issubclass(optimizer_class, kind)
            ):
                raise TypeError(f"it is not a {_KINDS[what]}")
        except Exception as error:
            text = f"{type(error).__name__}: {first_line(error)}"
            raise stop("PL172", f"the {what} {path} cannot be imported: {text}") from error
    for op in lowered.optimizer_rules:
        if isinstance(op.algorithm, OptimizerClass):
            require_arguments(op, op.algorithm)


_KINDS = {
    "optimizer": "torch.optim.Optimizer",
    "style": "torch.distributed.tensor.parallel.ParallelStyle",
}


def _prepare(
    model: nn.Module,
    lowered: Lowered,
    digest: str,
    device: str,
    known: KnownVerdict | None,
    *,
    require: Required | None,
    compare: int,
    metrics: bool,
) -> tuple[dict[str, nn.Module], Meshes, KnownVerdict | None, PassComparison, Experts | None]:
    """Checks the model and creates the meshes, and the process group where there is none; also what
    all ranks know of the plan, what they compare when the model runs first, and the experts whose
    tokens are counted, None where no rank asks for metrics.
    """
    sums = weight_sums(model) if compare > 0 and lowered.world_size > 1 else None
    try:
        start(device)
        shared = mesh_in_use(lowered, device)
        local = known, sums.total if sums else "", shared is not None, metrics
        modules, told = ready(model, lowered, digest, local)
        verdicts, totals, shares, asked = zip(*told, strict=True)
        known = strongest(verdicts)
        accept(known, require)
        meshes = Meshes(lowered, device, shared if all(shares) else None)
    except PlanError:
        raise
    except Exception as error:
        raise stop("PL495", f"no process group or mesh on {device}: {first_line(error)}") from error
    first = comparison(model, lowered, meshes, compare)
    if sums is not None and all(totals):
        first.weights.built = unequal(model, lowered, sums, totals, device)
    return modules, meshes, known, first, experts_of(modules, lowered) if any(asked) else None


def _tell(lowered: Lowered, digest: str, known: KnownVerdict | None, taken: float) -> None:
    """Logs that a plan is applied, and the verdict on it, as a warning if it is not proved."""
    plan, mesh = (lowered.plan, digest[:12]), phrases.mesh(lowered.axes)
    _log.info("plan %s (%s) applied to %s on %s in %.2f s", *plan, lowered.model, mesh, taken)
    if message := rows.untested_message(cache.environment()):
        warning("PL744", message)
    if known is not None:
        level = logging.INFO if known.level in ("proved", "verified") else logging.WARNING
        text = "; ".join(filter(None, (known.text, lowered.summed_gradients)))
        _log.log(level, "plan %s (%s): %s", *plan, text)


class Worker:
    """Runs the calls of operations on a model, whose modules keep their names whatever wraps them;
    `at` are those that the current call works on, for messages.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: dict[str, nn.Module],
        meshes: Meshes | None,
        lowered: Lowered,
    ) -> None:
        self.model = model
        self.modules = modules
        self.at = ""
        variables: dict[str, object] = {"model": model}
        if meshes is not None:
            variables["mesh"] = meshes.root
        self._values = Values(variables, modules, meshes.mesh_of if meshes else _no_mesh)
        self._context = lowered.context(fills=True)

    def run_checked(self, op: Op) -> None:
        """Runs an operation; an exception of torch is reported at its module.

        Raises:
            PlanError: PL492; PL743 if a library lacks a private name.
        """
        try:
            self.run(op)
        except Exception as error:
            if missing_name(error):
                raise
            what = f"torch refused {op_name(op)} of {self.at or 'the model'}"
            raise stop("PL492", f"{what}: {first_line(error)}") from error

    def run(self, op: Op) -> None:
        self.at = ""
        for step in op.calls(self._context):
            match step:
                case Each():
                    self._run_each(step)
                case Once():
                    self._once(step)
                case Assign():
                    self._assign(step)
                case _:
                    assert_never(step)
        if isinstance(op, Adapt):
            remember(self.model, op)

    def _run_each(self, step: Each) -> None:
        """Makes the calls on each module, found by name: torch would search for a path again."""
        of = self._values
        prepared = [
            (function_of(c), [of.evaluate(v) for v in c.arguments], of.keywords(c.keywords))
            for c in step.calls
        ]
        for self.at in step.modules.names():
            for function, arguments, keywords in prepared:
                module = function(self.modules[self.at], *arguments, **keywords)
            if step.replaces:
                parent, _, last = self.at.rpartition(".")
                self._inner(parent).register_module(last, module)
                self.modules[self.at] = module

    def _once(self, step: Once) -> None:
        first = step.call.arguments[0]
        if isinstance(first, Members):
            self.at = f"[{', '.join(name for sets in first.sets for name in sets.names())}]"
        if not step.replaces:
            self._values.evaluate(step.call)
            return
        self.at = ", ".join(map(str, step.replaces))
        with quiet_imports(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tied layers, and Conv1D, which peft handles
            self._values.evaluate(step.call)
        for name in (name for sets in step.replaces for name in sets.names()):
            inner = self.model.get_submodule(name).named_modules()
            self.modules |= {f"{name}.{n}" if n else name: module for n, module in inner}

    def _assign(self, step: Assign) -> None:
        value = self._values.evaluate(step.value)
        if isinstance(step.target, ParameterRef):
            self.at = step.target.name
            owner, _, name = self.at.rpartition(".")
            setattr(self._inner(owner), name, value)
            return
        path, _, name = step.target.name.rpartition(".")
        owner = self._values.evaluate(step.target.owner)
        setattr(attrgetter(path)(owner) if path else owner, name, value)

    def _inner(self, name: str) -> nn.Module:
        """The module inside its checkpoint wrapper, which holds the children."""
        module = self.modules[name]
        wrapped = isinstance(module, CheckpointWrapper)
        return module._checkpoint_wrapped_module if wrapped else module


def _no_mesh(mesh: MeshOf) -> DeviceMesh:
    raise ValueError(f"{mesh} outside a mesh")


def apply_for_reference(model: nn.Module, lowered: Lowered) -> nn.Module:
    """Applies the operations that the reference run has too, and returns the model."""
    return _run_alone(model, lowered, (op for op in lowered.ops if op.ALONE))


def add_adapters(model: nn.Module, lowered: Lowered) -> nn.Module:
    """Applies only the adapters of a plan, and returns the model."""
    return _run_alone(model, lowered, lowered.adapters)


def _run_alone(model: nn.Module, lowered: Lowered, ops: Iterable[Op]) -> nn.Module:
    """Applies some operations of a plan in one process, and returns the model."""
    worker = Worker(model, dict(model.named_modules()), None, lowered)
    for op in ops:
        worker.run(op)
    return model
