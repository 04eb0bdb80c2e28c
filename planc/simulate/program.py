"""The program of a simulation: the steps of one rank, and of the reference run in one process.

`planc check` runs it with threads as ranks, `planc verify` with processes. A rank applies the plan,
then trains two steps: the first of two accumulated passes, with gradients, their norm and
clipping; then the second; then the parameters are compared.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from planc.ops.base import Op
from planc.ops.expert_capacity import LimitExperts
from planc.ops.lowered import Lowered
from planc.ops.registry import AnyOp
from planc.runtime.collectives import named_modules
from planc.runtime.run import Run
from planc.runtime.sharded_tensors import sharded_like
from planc.runtime.standalone.documents import reset_states
from planc.runtime.standalone.expert_capacity import limit_experts
from planc.runtime.standalone.kept_states import state_values
from planc.runtime.standalone.optimizer import PlannedOptimizer, planned_optimizer
from planc.runtime.standalone.pipeline import stages_of
from planc.runtime.standalone.shards import in_own_order, rank_orders, select_ranges, slices_of
from planc.sections import Hook
from planc.simulate.batches import COUNT, Batches
from planc.simulate.coupled_rows import (
    UnevenUse,
    UsedParameters,
    copy_buffers,
    coupling_module,
    restore_buffers,
    row_buffers,
)
from planc.simulate.numerics import FLOOR, full_copy, gradient_scale, parameters_by_name, relative
from planc.simulate.outcome import LIMIT
from planc.simulate.random_numbers import DifferentDraw, EqualNumbers, Recorded, Replayed
from planc.simulate.sequence_parts import RankPart, mean_of_parts, part_rank, parts_of
from planc.simulate.trace import Trace, caller
from planc.simulate.trial_part import separate_ops

RATE = 1e-3
EPSILON = 1e-6
"""AdamW's epsilon. With torch's 1e-8, a gradient that is zero up to rounding changes a weight as
much as a real one, so the steps would compare noise."""
DECAY = 1e-2
MAX_NORM = 1.0
SEED = 1000
"""The seed of rank 0 in training; rank `r` has `SEED + r`."""

DRAWS_PARTS = "it uses random numbers, which differ between ranks with sequence shards"

Tensors = dict[str, torch.Tensor]


class SingleError(Exception):
    """The model does not train in a single process, so there is no reference."""


@dataclass(slots=True, kw_only=True)
class RankResult:
    """The results of one rank.

    Args:
        data_rank, part_rank: the rows that it read, and the part of their tokens that it has.
        parts: these tokens of each pass of the first step; empty where it has all.
        phase: `apply`, `parallel`, then `done`.
        traces, logits, losses: of each pass of the first step; no logits where the head computes
            the loss.
        gradients, parameters: full tensors by name: of the first step, unclipped; after the last.
        states: those of the plan's own optimizer, `NAME (STATE)`; of others, their gradients tell.
        norms: of the gradients of each step.
        drawn: the random numbers of each forward pass, of all steps.
    """

    data_rank: int = 0
    part_rank: int = 0
    parts: list[RankPart] = field(default_factory=list)
    phase: str = "apply"
    traces: list[Trace] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: Tensors = field(default_factory=dict)
    norms: list[torch.Tensor] = field(default_factory=list)
    parameters: Tensors = field(default_factory=dict)
    states: Tensors = field(default_factory=dict)
    drawn: list[list[torch.Tensor]] = field(default_factory=list)

    def local_logits(self, logits: list[torch.Tensor]) -> list[torch.Tensor]:
        """Its parts of the logits of a single process."""
        if not (self.parts and logits):
            return logits
        return [part.local_part(rows) for part, rows in zip(self.parts, logits, strict=True)]

    def of_trace(self, number: int, trace: Trace) -> Trace:
        """Its part of what a pass of a single process showed."""
        return self.parts[number].of_trace(trace, self.traces[number]) if self.parts else trace

    def where(self) -> tuple[str, str]:
        """The module that runs now, and the line of the model's code."""
        running = self.traces[-1].running if self.traces else []
        return (running[-1] if running else ""), caller()


@dataclass(slots=True, kw_only=True)
class Reference:
    """The results of the single process.

    Args:
        passes: what each data rank's rows gave, by data rank.
        before: the parameters that the plan's Muon or a class steps, before the first step.
        steered: the clipped gradients of each step, of what a class of the user's steps, or has
            states in 8 bits: a class
            may enlarge rounding to a whole step, as one that takes signs does of a gradient that
            is zero, so that ranks step with the same ones. They are compared by themselves.
        whole: the gradients of the first step with all rows of a pass in one batch, which differ
            from the sum over the data ranks' rows where a loss is no mean over tokens.
        by_rank: that sum with equal random numbers in all rows, where the model uses random
            numbers; `whole` has them too.
        row_buffers: the buffers that a forward pass computes from its rows.
        recomputed: a module that the model's own code runs again in the backward pass.
        uneven: the parameters that the rows of some data ranks use, and those of others do not.
        coupling: the first module that mixes rows, where `whole` differs; None if the loss does.
        draws: whether the model uses random numbers.
        different_draws: random numbers of the ranks that are not those of the plain model.
    """

    passes: list[RankResult]
    gradients: Tensors = field(default_factory=dict)
    norms: list[torch.Tensor] = field(default_factory=list)
    parameters: Tensors = field(default_factory=dict)
    states: Tensors = field(default_factory=dict)
    before: Tensors = field(default_factory=dict)
    steered: list[Tensors] = field(default_factory=list)
    whole: Tensors = field(default_factory=dict)
    by_rank: Tensors = field(default_factory=dict)
    row_buffers: tuple[str, ...] = ()
    uneven: tuple[UnevenUse, ...] = ()
    coupling: str | None = None
    recomputed: str = ""
    draws: bool = False
    different_draws: list[DifferentDraw] = field(default_factory=list)

    def of_whole_batches(self) -> tuple[str, float]:
        """The gradient that differs most where a pass has the rows of all data ranks, and by how
        much.
        """
        right, whole = self.by_rank or self.gradients, self.whole
        top = max((float(g.abs().max()) for g in right.values()), default=0.0)
        errors = {n: relative(whole[n], right[n], top * FLOOR) for n in right if n in whole}
        name = max(errors, key=errors.__getitem__, default="")
        return name, errors.get(name, 0.0)


def train_single(
    model: nn.Module, batches: Batches, lowered: Lowered, ranks: Sequence[RankResult] = ()
) -> Reference:
    """Trains the model, from `apply_for_reference`, in this process: the same rows, normalized over
    all of them.

    `ranks` are the ranks whose random numbers are reused; without any, the process generates them.
    Raises SingleError: the model has no loss, no gradient, or a value that is not finite.
    """
    reference = Reference(passes=[RankResult(data_rank=d) for d in range(batches.ranks)])
    optimizer = _single_optimizer(model, lowered)
    reference.before, used = _parameters_of(_changes, model, optimizer), UsedParameters()
    parts, each = _microbatches(lowered, batches)
    share = gradient_scale(lowered) / batches.ranks * each
    heads = lowered.loss_heads
    _as_planned(model, lowered)
    for number, step in enumerate(batches.steps):
        for at, batch in enumerate(step):
            for part in range(batches.ranks * parts):
                result = reference.passes[rank := part // parts]
                inputs = {**batch.of_rank(part, batches.ranks * parts), **batches.extra(number)}
                drawn = [r.drawn[len(result.drawn)] for r in ranks if r.data_rank == rank]
                draws = Replayed(drawn, result.where) if drawn else Recorded()
                result.drawn.append(getattr(draws, "drawn", []))
                with draws:
                    loss = _forward(model, inputs, result if number == 0 else None)
                backward, noted = Trace(), used.record(model, number, at, rank)
                used.looked |= getattr(draws, "looked", False)
                with backward.watch(named_modules(model)), noted:
                    if loss.requires_grad:  # text alone reaches nothing that trains in a tower
                        (loss * (share * batches.weight(number))).backward()
                reference.draws = reference.draws or bool(drawn or result.drawn[-1])
                reference.different_draws += getattr(draws, "different_draws", [])
                reference.recomputed = reference.recomputed or next(iter(backward.calls), "")
        if number == 0:
            reference.gradients = _gradients(model)
            _as_one_step(reference, batches, lowered, each)
            _other_batches(reference, used, model, batches, lowered)
        if batches.gradients_alone:
            break
        reference.norms.append(_step(model, optimizer, reference))
    if not batches.gradients_alone:
        reference.parameters, reference.states = _parameters(model), _states(model, optimizer)
    reference.uneven = used.uneven(lowered)
    _require_finite(reference)
    for result in reference.passes if heads else ():
        result.logits.clear()  # the ranks compute none
    return reference


def _microbatches(lowered: Lowered, batches: Batches) -> tuple[int, float]:
    """Into how many passes the single process cuts the rows of a data rank, and the weight of each:
    into a pipeline's microbatches where results depend on all rows of a pass.
    """
    separate, pipeline = separate_ops(lowered), lowered.pipeline
    parts = pipeline.microbatches if separate and pipeline is not None else 1
    return parts, 1.0 if batches.counted else 1 / parts


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, reference: Reference) -> Tensor:
    """The norm of all gradients, with which the optimizer has stepped."""
    trained = [p for p in model.parameters() if p.grad is not None]
    norm: Tensor = nn.utils.clip_grad_norm_(trained, MAX_NORM)
    sensitive = _parameters_of(_is_sign_sensitive, model, optimizer)
    reference.steered.append({n: g for n, g in _gradients(model).items() if n in sensitive})
    optimizer.step()
    optimizer.zero_grad()
    return norm


def _as_one_step(reference: Reference, batches: Batches, lowered: Lowered, each: float) -> None:
    """A pipeline has the loss of the first step as a whole, and no logits; `each` as of a pass."""
    if lowered.pipeline is None:
        return
    losses = [loss for result in reference.passes for loss in result.losses]
    total = torch.stack(losses).sum() * (batches.weight(0) / batches.ranks * each)
    for result in reference.passes:
        result.losses, result.logits = [total], []


def seed_rank(rank: int) -> None:
    """Seeds a rank before the plan is applied: otherwise than the others, as in a real run."""
    torch.random.default_generator.manual_seed(SEED + rank)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(SEED + rank)


def _other_batches(
    reference: Reference, used: UsedParameters, model: nn.Module, batches: Batches, lowered: Lowered
) -> None:
    """Runs a model on all rows in one batch, and one without random numbers on each row alone where
    its code can see numbers; its gradients and buffers are put back.
    """
    if batches.ranks == 1 or separate_ops(lowered):
        return  # results of a separate simulation may depend on all rows of a pass
    first, extra = batches.steps[0][0], batches.extra(0)
    gradients, buffers = {p: p.grad for p in model.parameters()}, copy_buffers(model)
    scale = gradient_scale(lowered)
    with EqualNumbers() if reference.draws else contextlib.nullcontext():
        if reference.draws:
            reference.by_rank = _gradients_in_parts(model, batches, scale, batches.ranks)
        reference.whole = _gradients_in_parts(model, batches, scale, 1)
        if reference.of_whole_batches()[1] > LIMIT:
            reference.coupling = coupling_module(model, first, extra, batches.ranks)
        if restore_buffers(model, buffers):
            reference.row_buffers = row_buffers(model, first, extra, batches.ranks)
    if used.looked and not reference.draws:
        used.of_rows(model, first, lambda inputs: _forward(model, {**inputs, **extra}, None))
        restore_buffers(model, buffers)
    for parameter, gradient in gradients.items():
        parameter.grad = gradient


def _gradients_in_parts(model: nn.Module, batches: Batches, scale: float, parts: int) -> Tensors:
    """The gradients of the first step with the rows of a pass in equal parts, one after another."""
    model.zero_grad(set_to_none=True)
    extra = {name: value * batches.ranks / parts for name, value in batches.extra(0).items()}
    for batch in batches.steps[0]:
        for part in range(parts):
            inputs = batch.inputs if parts == 1 else batch.of_rank(part, parts)
            loss = _forward(model, {**inputs, **extra}, None)
            if loss.requires_grad:
                (loss * (scale / parts * batches.weight(0))).backward()
    return _gradients(model)


def train_rank(
    model: nn.Module,
    run: Run,
    batches: Batches,
    result: RankResult,
    *,
    traced: bool,
    draws: bool = False,
    steered: Sequence[Tensors] = (),
) -> None:
    """Trains a parallel model on one rank, as a training script does.

    Args:
        model: spread by the plan.
        batches: the batches of all data ranks.
        result: filled while the rank runs, so that what came before an error is known.
        traced: whether to record the inputs and outputs of modules, which gathers DTensors.
        draws: whether to record random numbers.
        steered: gradients of each step that replace the rank's own, as of `Reference`.
    """
    result.phase, result.data_rank = "parallel", run.data_rank
    result.part_rank = part_rank(run)
    optimizer = _rank_optimizer(model, run)
    for number, step in enumerate(batches.steps):
        if stages_of(model) is not None:
            loss = run.forward_backward(
                [batch.of_rank(run.data_rank, run.data_size) for batch in step]
            )
            result.losses += [full_copy(loss)] if number == 0 else []
        else:
            _accumulate(model, run, batches, number, result, traced=traced, draws=draws)
        if number == 0:
            result.gradients = _of_all_stages(_gradients(model), model)
        if batches.gradients_alone:
            break
        result.norms.append(full_copy(run.clip_grad_norm_(MAX_NORM)))
        if steered:
            _steer(model, steered[number])
        optimizer.step()
        optimizer.zero_grad()
    if not batches.gradients_alone:
        result.parameters = _of_all_stages(_parameters(model), model)
        result.states = _of_all_stages(_states(model, optimizer), model)
    result.phase = "done"


def _accumulate(
    model: nn.Module,
    run: Run,
    batches: Batches,
    number: int,
    result: RankResult,
    *,
    traced: bool,
    draws: bool,
) -> None:
    """Runs the gradient accumulation steps of a plan without stages, as a script's loop does."""
    step, weight = batches.steps[number], batches.weight(number)
    extra = dict[str, Any]()
    if batches.counted:
        mine = [one.of_rank(run.data_rank, run.data_size)["labels"] for one in step]
        extra[COUNT] = run.num_items_in_batch(*mine)
    for at, one in enumerate(step):
        last = at == len(step) - 1
        inputs = {**one.of_rank(run.data_rank, run.data_size), **extra}
        if number == 0:
            result.parts += parts_of(run, inputs)
        inputs = run.batch(inputs)
        with contextlib.nullcontext() if last else run.no_sync():
            with (recorded := Recorded()) if draws else contextlib.nullcontext():
                loss = _forward(model, inputs, result if number == 0 else None, traced=traced)
            result.drawn += [recorded.drawn] if draws else []
            (loss if weight == 1.0 else loss * weight).backward()
    if number == 0:
        result.losses = [mean_of_parts(run, loss) for loss in result.losses]


def _of_all_stages(local_tensors: Tensors, model: nn.Module) -> Tensors:
    """Returns the tensors of all pipeline stages by name; the given ones without a pipeline.

    If two stages have copies that differ, it keeps one that differs from the first copy, so that
    the comparison with the reference run shows the difference.
    """
    stages = stages_of(model)
    if stages is None:
        return local_tensors
    by_stage: list[Any] = [None] * stages.mesh.size()
    distributed.all_gather_object(by_stage, local_tensors, group=stages.mesh.get_group())
    joined: Tensors = {}
    for tensors in by_stage:
        for name, tensor in tensors.items():
            if name not in joined or not torch.equal(joined[name], tensor):
                joined[name] = tensor
    return joined


def _single_optimizer(model: nn.Module, lowered: Lowered) -> torch.optim.Optimizer:
    """The plan's own optimizer, on whole parameters; AdamW where it has none."""
    if not lowered.optimizer_rules:
        return _optimizer(model)
    return _without_noise(planned_optimizer(model, RATE, DECAY))


def _rank_optimizer(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    if not run.lowered.optimizer_rules:
        return run.optimizer(_optimizer(model))
    return _without_noise(run.optimizer(lr=RATE, weight_decay=DECAY))


def _without_noise(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        if "eps" in group:
            group["eps"] = max(group["eps"], EPSILON)
    return optimizer


def _steer(model: nn.Module, gradients: Tensors) -> None:
    """Gives parameters their shards of these gradients."""
    orders = rank_orders(model)
    for name, p in parameters_by_name(model):
        if name in gradients and p.grad is not None:
            part = select_ranges(gradients[name], slices_of(p, orders.get(name))).clone()
            p.grad = sharded_like(part, p) if isinstance(p, DTensor) else part


def _changes(group: Mapping[str, Any]) -> bool:
    """Whether the change of a parameter is compared: it may be far less than the value."""
    return group.get("algorithm") in ("muon", "class")


def _is_sign_sensitive(group: Mapping[str, Any]) -> bool:
    """Whether a gradient that is off by a rounding may be another sign, or another code."""
    return group.get("algorithm") == "class" or "block" in group


def _parameters_of(
    wanted: Callable[[Mapping[str, Any]], bool], model: nn.Module, optimizer: torch.optim.Optimizer
) -> Tensors:
    """Copies of the parameters of some groups of the optimizer."""
    groups = (group for group in optimizer.param_groups if wanted(group))
    stepped = {id(p) for group in groups for p in group["params"]}
    return {n: p.detach().clone() for n, p in parameters_by_name(model) if id(p) in stepped}


IN_EIGHT_BITS = " in 8 bits"
"""In the name of a state."""


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The full states of the plan's own optimizer, but for numbers of steps. Those of rows or
    columns are in the model's order as they are; names tell which are in 8 bits.
    """
    if not isinstance(optimizer, PlannedOptimizer):
        return {}
    orders = rank_orders(model)
    return {
        f"{name} ({key}{IN_EIGHT_BITS * bool(getattr(kept, 'block', 0))})": in_own_order(
            full_copy(state.to(parameter.device)),  # kept on the host, where NCCL sends nothing
            orders.get(name) if state.shape == parameter.shape else None,
        )
        for name, parameter in parameters_by_name(model)
        for key, kept in sorted(optimizer.state.get(parameter, {}).items())
        for state in [state_values(kept, parameter)]
        if isinstance(state, Tensor) and state.dim()
    }


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over groups of parameters of one mesh each: torch's `fused` takes no others."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    kinds = [{"params": parameters} for parameters in groups.values()]
    return torch.optim.AdamW(kinds, lr=RATE, eps=EPSILON, fused=True)


def _forward(
    model: nn.Module, inputs: dict[str, Any], result: RankResult | None, *, traced: bool = True
) -> torch.Tensor:
    """The loss of one pass, whose outputs a result keeps."""
    trace = Trace()
    if result is not None:
        result.traces.append(trace)
    watched = trace.watch(named_modules(model)) if result is not None and traced else None
    with watched or contextlib.nullcontext():
        output = model(**inputs)
    loss = getattr(output, "loss", None)
    if loss is None:
        raise SingleError("its forward gives no loss")
    if result is not None:
        if getattr(output, "logits", None) is not None:
            result.logits.append(full_copy(output.logits))
        result.losses.append(full_copy(loss))
    kept: torch.Tensor = loss
    return kept


def _gradients(model: nn.Module) -> Tensors:
    orders = rank_orders(model)
    return {
        n: in_own_order(full_copy(p.grad), orders.get(n))
        for n, p in parameters_by_name(model)
        if p.grad is not None
    }


def _parameters(model: nn.Module) -> Tensors:
    orders = rank_orders(model)
    return {n: in_own_order(full_copy(p), orders.get(n)) for n, p in parameters_by_name(model)}


def _require_finite(reference: Reference) -> None:
    """Raises SingleError if there are no gradients or values that are not finite."""
    if not reference.gradients:
        raise SingleError("no parameter gets a gradient")
    logits = {f"the logits {i}": v for r in reference.passes for i, v in enumerate(r.logits)}
    losses = {f"the loss {i}": v for r in reference.passes for i, v in enumerate(r.losses)}
    for name, value in {**logits, **losses, **reference.gradients}.items():
        if not torch.isfinite(value).all():
            raise SingleError(f"{name} is not finite in one process")


_CHANGE_REFERENCE = Hook[Callable[[nn.Module, AnyOp], None]]("runtime", "change_reference")


def _as_planned(model: nn.Module, lowered: Lowered) -> None:
    """Gives a plain model what the plan changes of its numbers."""
    for op in lowered.ops:
        if change := _CHANGE_REFERENCE.find(op.SECTION):
            change(model, op)
    reset_states(model, *lowered.state_updates)
    limit_whole_rows(model, lowered.ops)


def limit_whole_rows(model: nn.Module, ops: Iterable[Op]) -> None:
    """Gives the experts of a plain model the slots that the plan gives them, in whole rows."""
    for op in ops:
        if isinstance(op, LimitExperts):
            modules = [model.get_submodule(name) for name in op.modules.names()]
            limit_experts(model, modules, **op.settings)
