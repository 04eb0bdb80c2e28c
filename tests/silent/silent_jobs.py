"""What `make silent` runs on every rank: the truth, and what planc says at run time."""

import json
import linecache
import re
import traceback
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import silent_faults
import silent_loud_scripts
import silent_scripts
import silent_trainers
import torch
from numerics import data, error
from safeguard_jobs import logged
from silent_trainers import OfTrainer
from torch import _meta_registrations, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

import planc
from planc.diagnostics.codes import CODES
from planc.diagnostics.diagnostic import Sink
from planc.model.sources.diffusers import normal
from planc.ops.document import digest, loads
from planc.ops.optimizer import Optimize
from planc.proxy.diffusers_model import DiffusersBuilder
from planc.proxy.input_search import BatchShape
from planc.proxy.transformers_model import TransformersBuilder
from planc.proxy.user_model import builder_of
from planc.runtime.executor import apply_for_reference, apply_lowered
from planc.runtime.standalone.documents import reset_states
from planc.runtime.standalone.images import placeholders
from planc.runtime.standalone.optimizer import planned_optimizer
from planc.runtime.standalone.shards import in_own_order, plain_name, rank_orders
from planc.sections.loss.ops import ChunkLoss
from planc.sections.loss.runtime import change_reference
from planc.sections.matmul.ops import LowPrecision
from planc.simulate import worker
from planc.simulate.launcher import Job
from planc.simulate.numerics import for_trial, in_float64
from planc.simulate.trial_part import trial_part, with_random_adapters

PADS = 2
IMAGES = ((1, 2, 0, 1), (0, 1, 1, 0), (2, 0, 0, 1))
IGNORED = -100


def batches(model, lowered):
    """Two steps: of two passes (padding and uneven labels; packed documents, or images on other
    rows), and of one.

    For fp8 matmuls, which take multiples of 32 tokens, rows have twice the tokens. In
    float64 padding is on the right: a query that sees nothing is NaN there.
    """
    eight = lowered.has(LowPrecision)
    right = eight or coded(lowered)
    if not hasattr(model.config, "get_text_config"):
        made = [images_to_denoise(model, seed) for seed in range(3)]
        return [made[:2], made[2:]]
    if placeholders(model.config):
        made = [with_images(model.config, seed, of_rows) for seed, of_rows in enumerate(IMAGES)]
    else:
        made = [text(model.config.get_text_config().vocab_size, n, eight) for n in range(3)]
    rows, length = made[0]["input_ids"].shape
    made[0]["labels"][: rows // 2, :-1] = IGNORED
    if not placeholders(model.config):
        made[0]["attention_mask"] = torch.ones(rows, length, dtype=torch.long)
        made[0]["attention_mask"][0, slice(-PADS, None) if right else slice(PADS)] = 0
        first = length // 2 - 1
        positions = torch.cat([torch.arange(first), torch.arange(length - first)])
        made[1]["position_ids"] = positions.expand(rows, -1).contiguous()
    return [made[:2], made[2:]]


def text(vocabulary, seed, wide):
    """The tokens and labels of a pass, in rows of one length or, if `wide`, of two."""
    parts = [data(vocabulary, n) for n in (seed, seed + 3)[: 1 + wide]]
    tokens, labels = (torch.cat(some, dim=1) for some in zip(*parts, strict=True))
    return {"input_ids": tokens, "labels": labels}


def with_images(config, seed, images):
    """A pass whose rows have so many images each."""
    shape = BatchShape(rows=len(images), length=32, seed=seed, images=images)
    return TransformersBuilder(config.to_dict()).sample(shape)


def images_to_denoise(model, seed):
    """A pass of a model of diffusers; text has two lengths where there is a mask of it."""
    kind = next(k for k in type(model).__mro__ if k.__module__.startswith("diffusers."))
    values = normal(model.config, kind.__name__)
    return DiffusersBuilder(values).sample(BatchShape(seed=seed))


def read_by(script, model, lowered):
    """The passes of each step, as a script reads them."""
    return [[script.batch(b) for b in passes] for passes in batches(model, lowered)]


def counted(passes, script):
    """How a model counts a step's labels; a model of images takes the mean over its outputs."""
    if "labels" not in passes[0]:
        return {}
    return {"num_items_in_batch": sum(script.valid(b) for b in passes).float()}


def stepper(model, lowered, run=None):
    """The plan's own optimizer, on whole parameters or those of a run; AdamW where it has none."""
    if not lowered.has(Optimize):
        return adamw(model)
    return planned_optimizer(model, 1e-2) if run is None else run.optimizer(lr=1e-2)


def adamw(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, eps=1e-6, foreach=False)


def exact(model, lowered):
    """The model as a trial runs it; in float64 too where states are in 8 bits, of which single
    numbers on the border between two fall to either side by the rounding of float32 alone.
    """
    return in_float64(model) if coded(lowered) else for_trial(model, lowered)


def coded(lowered):
    """Whether states are in 8 bits."""
    return any(op.block for op in lowered.ops if isinstance(op, Optimize))


def trained_alone(model, lowered, script):
    """Logits, loss, gradients, norms and parameters of a single process."""
    if isinstance(script, OfTrainer):
        return trained_by_trainer(model, script)[1]
    found = {"logits": [], "loss": 0.0, "gradients": {}, "norms": []}
    optimizer = stepper(model, lowered)
    script.change(model)
    for step, passes in enumerate(read_by(script, model, lowered)):
        given = counted(passes, script)
        for batch in by_data_rank(passes, lowered):
            output = script.forward(model, batch, given)
            loss = output.loss if given else output.loss / len(passes)
            loss.backward()
            if step == 0:
                found["logits"] += logits_of(output)
                found["loss"] += loss.detach()
        script.finish(model)
        if step == 0:
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            found["gradients"] = {plain_name(n): g.clone() for n, g in grads.items()}
        with_gradient = [p for p in model.parameters() if p.grad is not None]
        found["norms"].append(nn.utils.clip_grad_norm_(with_gradient, silent_scripts.MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    found["parameters"] = {plain_name(n): p.detach() for n, p in model.named_parameters()}
    return found


def by_data_rank(passes, lowered):
    """The passes; in the rows of a data rank each where products are in 8 bits, since scales are of
    the rows of a pass.
    """
    ranks = lowered.axis_size(*lowered.averaged_axes) if lowered.has(LowPrecision) else 1
    for batch in passes:
        parts = {name: value.chunk(ranks) for name, value in batch.items()}
        yield from ({n: part[rank] for n, part in parts.items()} for rank in range(ranks))


def logits_of(output):
    """The logits of a pass; none where the loss is computed in chunks."""
    return [] if output.get("logits") is None else [whole(output.logits)]


@cache
def reference(model, right, changes, script):
    """What a single process trains under a right plan with a script; `changes` as JSON."""
    lowered, loop = read(right), script_of(script)
    made = exact(silent_scripts.Script().build(model, json.loads(changes)), lowered)
    loop.prepare(made)
    losses = lowered.find_ops(ChunkLoss)
    for op in losses:
        change_reference(made, op)
    made = apply_for_reference(made, lowered)
    reset_states(made, *lowered.state_updates)
    found = trained_alone(made, lowered, loop)
    ranks = len(found["logits"]) // 2  # that have the rows of each of two passes
    if ranks > 1:
        found["logits"] = [torch.cat(found["logits"][n : n + ranks]) for n in (0, ranks)]
    return {**found, "logits": []} if losses else found


def trained(run, script, optimizer):
    """The same of a parallel model, on this rank; logits of its own rows, where it computes these
    whole, and gradients of its own stage.
    """
    found = {"logits": [], "loss": torch.zeros(()), "gradients": {}, "norms": []}
    model = run.model
    if type(script).change is not silent_scripts.Script.change:
        # after a pass, when FSDP has taken the parameters that it computes with
        run.evaluate([script.rows(run, batches(model, run.lowered)[0][0])])
        script.change(model, run)
    for step, passes in enumerate(read_by(script, model, run.lowered)):
        mine = [script.rows(run, batch) for batch in passes]
        if script.one_loop(run):
            loss = run.forward_backward(mine)
            found["loss"] += loss if step == 0 else 0
            mine = []
        count = script.count(run, mine) if mine else None
        extra = {} if count is None else {"num_items_in_batch": count}
        for at, batch in enumerate(mine):
            torch.manual_seed(10 * step + at)  # what a pass before drew changes nothing
            with script.sync(run, at == len(mine) - 1):
                output = script.forward(model, batch, extra)
                loss = output.loss * script.weight(run, len(mine))
                loss.backward()
            if step == 0:
                found["logits"] += [] if script.splits(run) else logits_of(output)
                found["loss"] += whole(loss)
        script.finish(model)
        if step == 0:
            found["gradients"] = full_gradients(model)
        found["norms"].append(whole(script.clip(run)))
        optimizer.step()
        optimizer.zero_grad()
    found["parameters"] = script.saved(run)
    return found


def trained_by_trainer(model, script, **plan):
    """(the Trainer of a script, what it trained): in one process, or on this rank of a plan."""
    passes = [text(model.config.vocab_size, seed, False) for seed in (0, 2)]
    passes[0]["labels"][: len(passes[0]["labels"]) // 2, :-1] = IGNORED
    rows = [
        {name: tensor[row] for name, tensor in batch.items()}
        for batch in passes
        for row in range(len(batch["labels"]))
    ]
    trainer, gradients = script.train(model, rows, full_gradients, **plan)
    loss, norms = (silent_trainers.logged(trainer, name) for name in ("loss", "grad_norm"))
    found = {"logits": [], "loss": loss[0], "gradients": gradients, "norms": norms}
    if plan:
        return trainer, {**found, "parameters": script.saved(trainer.planc_run)}
    weights = {plain_name(n): p.detach() for n, p in model.named_parameters()}
    return trainer, {**found, "parameters": weights}


def whole(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


def full_gradients(model):
    """The gradient of each parameter, by its name before wrapping."""
    orders, found = rank_orders(model), {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            own = plain_name(name)
            found[own] = in_own_order(whole(parameter.grad), orders.get(own))
    return found


def differences(mine, right, rows, stage=False):
    """Relative errors of this rank."""
    logits = zip(mine["logits"], right["logits"], strict=bool(mine["logits"]))
    wanted = {n: t for n, t in right["gradients"].items() if not stage or n in mine["gradients"]}
    saved = {n: t for n, t in mine["parameters"].items() if n in right["parameters"]}
    return {
        "logits": max((off(m, r[rows]) for m, r in logits), default=0.0),
        "loss": off(mean(mine["loss"]), right["loss"]),
        "gradients": worst(mine["gradients"], wanted),
        "norm": max(map(off, mine["norms"], right["norms"])),
        "parameters": worst(saved, right["parameters"]),
    }


def mean(loss):
    """The loss of all ranks: those with the same rows have the same."""
    total = loss.clone()
    distributed.all_reduce(total)
    return total / distributed.get_world_size()


def off(mine, right, least=1e-12):
    same = mine.shape == right.shape
    return error(mine.float(), right.float(), least) if same else float("inf")


def worst(mine, right):
    least = 1e-3 * max(t.abs().max().item() for t in right.values())
    missing = mine.keys() ^ right.keys()
    return float("inf") if missing else max(off(mine[n], right[n], least) for n in right)


def read(document):
    """A lowered plan, with adapters in which every error shows, and emulated fp8 matmuls."""
    lowered = loads(document, "case", Sink())
    if lowered.has(LowPrecision) or coded(lowered):
        return trial_part(lowered, section="matmul")
    return with_random_adapters(lowered)


def run_of(model, lowered, loop, changes, *, seed=7):
    """(the handle of a run of a lowered plan, what it trained), whatever planc says of the plan."""
    made = exact(loop.build(model, changes), lowered)
    before = type(made)
    loop.prepare(made)
    if type(made) is not before:  # a plan is lowered for the class that it is applied to
        lowered = replace(lowered, model=type(made).__name__)
    early = loop.optimizer(made)
    torch.manual_seed(seed + distributed.get_rank())
    terms = {"device_type": "cpu", "allow_code": True}  # a style of torchao's
    if isinstance(loop, OfTrainer):
        return run_of_trainer(made, lowered, loop, terms)
    run = apply_lowered(made, lowered, digest=digest(lowered), **terms)
    with_the_checks_of_a_gpu(made)
    return run, trained(run, loop, early or stepper(made, lowered, run))


def run_of_trainer(model, lowered, loop, terms):
    """The same by planc's Trainer, which applies the plan."""

    def apply(model, *_plan, **_options):
        return apply_lowered(model, lowered, digest=digest(lowered), **terms)

    with mock.patch.object(planc, "apply", apply):
        trainer, found = trained_by_trainer(model, loop, plan="llama")
    return trainer.planc_run, found


def with_the_checks_of_a_gpu(model):
    """Has layers in fp8 raise where torch's product does on a GPU, which no CPU path checks."""

    def check(layer, _):
        weight = layer.weight
        rows, columns = (weight.to_local() if isinstance(weight, DTensor) else weight).shape
        with FakeTensorMode():
            like = {"dtype": torch.float8_e4m3fn, "device": "cuda"}
            mine, right = torch.empty(32, columns, **like), torch.empty(rows, columns, **like).t()
            scale = torch.empty((), device="cuda")
            _meta_registrations.meta_scaled_mm(mine, right, scale, scale)

    for layer in model.modules():
        if type(layer).__name__ == "Float8Linear":
            layer.register_forward_pre_hook(check)


def script_class(name):
    """The class of a training loop."""
    files = (silent_scripts, silent_loud_scripts, silent_trainers)
    return next(getattr(file, name) for file in files if hasattr(file, name))


def script_of(name):
    return script_class(name)()


def truth(model, document, right, fault="", script="Script", changes=None, bare=False):
    """How far a lowered plan is from a single process that trains what the right plan trains.

    Nothing compares the ranks' inputs and weights, and if `bare` nothing looks at what the script
    does with the model. Where a single process raises, the name of its error is all: `{"alone":
    name}`.
    """
    loop = script_of(script)
    safeguards = "without_safeguards" if bare else ""
    with silent_faults.installed(fault), silent_faults.installed(safeguards):
        run, mine = run_of(model, read(document), loop, changes or {})
    if loop.raises:
        return {"alone": error_alone(model, right, changes, script)}
    return compared(run, mine, reference(model, right, json.dumps(changes or {}), script))


def error_alone(model, right, changes, script):
    """The type of the error that a single process raises."""
    try:
        reference(model, right, json.dumps(changes or {}), script)
    except Exception as error:
        return type(error).__name__
    raise AssertionError(f"{script}: a single process raises nothing")


def compared(run, mine, wanted):
    """The differences of what a run has trained on this rank."""
    rank, count = run.data_rank, run.data_size
    size = len(mine["logits"][0]) if mine["logits"] else 0
    if size and size != len(wanted["logits"][0]) // count:  # a sampler of its own: rows by process
        rank = distributed.get_rank()
    stage = run.lowered.pipeline is not None
    return differences(mine, wanted, slice(rank * size, (rank + 1) * size), stage)


def truth_beside(model, document, right, changes=None):
    """How far a lowered plan is from the right one on the same ranks, with the same seeds."""
    loop = silent_scripts.Script()
    _, wanted = run_of(model, read(right), loop, changes or {})
    _, mine = run_of(model, read(document), loop, changes or {})
    wanted["loss"] = mean(wanted["loss"])
    return differences(mine, wanted, slice(None))


def applied(model, plan, settings, loop, changes):
    """(the handle of `planc.apply`, what a script trained with it)."""
    made = loop.build(model, changes)
    loop.prepare(made)
    if isinstance(loop, OfTrainer):
        trainer, found = trained_by_trainer(made, loop, plan=plan, overrides=[*settings])
        return trainer.planc_run, found
    early = loop.optimizer(made)
    run = planc.apply(made, plan, overrides=settings, device_type="cpu")
    planned = run.lowered.has(Optimize)
    optimizer = run.optimizer(lr=1e-2) if planned else run.optimizer(early or adamw(made))
    return run, trained(run, loop, optimizer)


def said(model, plan, settings, fault="", script="Script", changes=None):
    """(code, line of the script, message) of what `planc.apply` or the loop raises, else of
    warnings of the run. An error that a single process raises too, or that planc raises without a
    code, has its type for a code.
    """
    loop = script_of(script)
    try:
        with silent_faults.installed(fault), logged() as lines:
            applied(model, plan, settings, loop, changes or {})
    except planc.PlanError as found:
        return [(d.code, line_of(d), d.message) for d in found.diagnostics]
    except Exception as error:
        if type(error).__name__ not in (loop.raises, loop.refused):
            raise
        return [(type(error).__name__, innermost(error), str(error))]
    return list(warned(text for _, text in lines))


def innermost(error):
    """The innermost line of the script that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    return next(
        f.line for f in reversed(frames) if Path(f.filename).parent == Path(__file__).parent
    )


def truth_applied(model, plan, settings, right, script="Script", changes=None):
    """The differences of a script under `planc.apply`, with all its safeguards."""
    run, mine = applied(model, plan, settings, script_of(script), changes or {})
    return compared(run, mine, reference(model, right, json.dumps(changes or {}), script))


def line_of(found):
    """The line of the script that a finding of the run is at."""
    return found.labels[0].span.text if found.labels else ""


def warned(lines):
    """The same of what is logged: `PLACE: warning[CODE]: MESSAGE`."""
    for text in lines:
        named = re.match(r"(?:(\S+):(\d+): )?warning\[(PL\d+)\]: (.*)", text)
        if named and CODES[named[3]].phase == "runtime":
            place = linecache.getline(named[1], int(named[2])).strip() if named[1] else ""
            yield named[3], place, named[4]


def verified(config, document, limits, fault=""):
    """What `planc verify` measures on this rank, for one seed."""
    lowered = loads(document, "case", Sink())
    job = Job(
        config=config,
        lowered=document,
        digest=digest(lowered),
        ranks=lowered.world_size,
        seeds=(0,),
        limits=limits,
        folder="",
        seconds=60.0,
    )
    worker._MAKERS[job.digest] = builder_of(config, "")
    found = {"device": "cpu"}
    with silent_faults.installed(fault):
        worker.compare_with_reference(job, found)
    return found
