"""What the processes of the truth do: a training run as docs/training.md has it, and its reference.

Two steps of AdamW; the first accumulates two passes. Of these, the one has padding on the left and
labels that are ignored unevenly over the data ranks, the other two packed documents in each row,
where the model takes such inputs. Nothing of planc's own trial is used, so that the two judge
each other; adapters, states that end with documents, and slots of experts are planc's in the single
process too.
"""

import contextlib
import datetime
import inspect
import json
import math
import sys

import numerics
import torch
from numerics import error, gradients_of, plain, whole
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from truth import LIMITS, SECONDS, WORLD, imported

import planc
from planc.diagnostics.diagnostic import Sink
from planc.ops.context import ContextParallel
from planc.ops.document import loads
from planc.ops.expert_capacity import LimitExperts
from planc.ops.freeze import Freeze
from planc.ops.fsdp import Divide, FullyShard
from planc.ops.lora import Adapt
from planc.proxy.input_search import BatchShape, rank_slice
from planc.runtime.executor import add_adapters
from planc.runtime.standalone.documents import reset_states
from planc.runtime.standalone.expert_capacity import limit_experts
from planc.runtime.standalone.shards import in_own_order, rank_orders

COUNT = "num_items_in_batch"
IGNORED = -100
ROWS, LENGTH = 4, 16


def prepare():
    """What is done once, before anything forks."""
    torch.set_num_threads(1)


def lowered(job):
    found = loads(job.document, "mutant", Sink())
    assert found is not None
    return found


def wanted(job):
    """What the single process depends on."""
    plan = lowered(job)
    every = [job.values, frozen(plan), divided(plan), adapters(plan), plan.state_updates]
    every += [[*op.modules.names(), op.settings] for op in plan.find_ops(LimitExperts)]
    return json.dumps(every, sort_keys=True)


def frozen(plan):
    """What the plan freezes and unfreezes, in order."""
    ops = [op for op in plan.ops if isinstance(op, Freeze)]
    return [[op.trainable, sorted(op.modules.names())] for op in ops]


def adapters(plan):
    """What the plan adapts, in words."""
    return [repr(op) for op in plan.ops if isinstance(op, Adapt)]


def divided(plan):
    """The plan's gradients over the mean ones: docs/language/fsdp.md has `divide = N`."""
    factors = [op.factor for op in plan.ops if isinstance(op, Divide)]
    return plan.axis_size(*plan.averaged_axes) / factors[-1] if factors else 1.0


def rough(plan):
    """Whether gradients are reduced in 16 bits."""
    return any(isinstance(op, FullyShard) and op.reduce not in (None, "float32") for op in plan.ops)


# The model and its inputs ------------------------------------------------------------------------


def build(values):
    """The model in float32, with weights that are nowhere 0 or 1."""
    if "_class_name" in values:
        from planc.proxy.diffusers_model import DiffusersBuilder

        return DiffusersBuilder(values).build(0)
    return numerics.build_values(values)


def batch(values, config, seed):
    """One batch of all rows."""
    if "_class_name" in values:
        from planc.proxy.diffusers_model import DiffusersBuilder

        return DiffusersBuilder(values).sample(BatchShape(rows=ROWS, seed=seed))
    if hasattr(config, "vision_config"):
        from planc.proxy.transformers_model import TransformersBuilder

        return TransformersBuilder(values).sample(BatchShape(rows=ROWS, seed=seed))
    tokens, labels = numerics.data(config.get_text_config().vocab_size, seed)
    return {"input_ids": tokens, "labels": labels}


def batches(values, model):
    """Two accumulated passes, then one; and whether the loss takes a number of tokens."""
    one, two, three = (batch(values, getattr(model, "config", None), seed) for seed in (3, 4, 5))
    counted = counts(model, one)
    if set(one) == {"input_ids", "labels"}:
        mask = torch.ones_like(one["input_ids"])
        mask[0, :2], mask[2, :3] = 0, 0
        one = taken(model, one, {"attention_mask": mask}, mask == 0)
        first = torch.arange(LENGTH // 2 - 1)
        positions = torch.cat([first, torch.arange(LENGTH - len(first))]).expand(ROWS, -1)
        earlier = (torch.arange(LENGTH) < len(first)).expand(ROWS, -1)
        two = taken(model, two, {"position_ids": positions.contiguous()}, earlier)
    if counted:
        one["labels"] = one["labels"].clone()
        one["labels"][: ROWS // 2, :-1] = IGNORED
    return [[one, two], [three]], counted


def taken(model, given, more, hidden):
    """The inputs with more of them, if the model runs with these, and the tokens elsewhere do not
    see the hidden ones: planc.apply refuses such rows of other models (PL517, PL518).
    """
    if not set(more) <= set(inspect.signature(model.forward).parameters):
        return given
    both, ids = {**given, **more}, given["input_ids"]
    other = {**both, "input_ids": torch.where(hidden, ids.flip(0), ids)}
    try:
        with torch.no_grad():
            first, second = model(**both), model(**other)
    except Exception:
        return given
    apart = torch.allclose(first.logits[~hidden], second.logits[~hidden], atol=1e-5)
    return both if apart and torch.isfinite(first.loss) else given


def counts(model, given):
    """Whether the model divides the sum of its loss by a number of tokens."""
    try:
        with torch.no_grad():
            one, two = (model(**given, **{COUNT: n}).loss.item() for n in (1.0, 2.0))
            mean = model(**given).loss.item()
    except Exception:
        return False
    return abs(one / two - 2) < 0.01 and one > 2 * mean


def valid(labels):
    return int((labels[..., 1:] != IGNORED).sum())


class Routes:
    """The experts that each token is sent to, by experts module, in the order of the passes.

    16-bit gradients move weights by up to 1 / 256 of a step, and a token whose two best experts are
    that close may then take the other one: its logits change by any amount, in a right run as well.
    """

    def __init__(self, model):
        self.passes = []
        for name, module in model.named_modules():
            if any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._hook(plain(name)), with_kwargs=True)

    def _hook(self, name):
        """Keeps the integers [tokens, k] that fused experts are given: the chosen ones of each; not
        where one call makes all passes.
        """

        def note(_, args, kwargs):
            for given in (*args, *kwargs.values()) if self.passes else ():
                matrix = isinstance(given, torch.Tensor) and given.dim() == 2
                if matrix and not given.is_floating_point():
                    self.passes[-1][name] = given.detach().sort(-1).values

        return note

    def begin(self):
        self.passes.append({})


# One process -------------------------------------------------------------------------------------


def single(job, path):
    """Trains without the plan, and writes all that the ranks compare with."""
    plan = lowered(job)
    model = add_adapters(build(job.values), plan)
    reset_states(model, *plan.state_updates)  # in one process states of documents leak
    for op in plan.find_ops(LimitExperts):  # an expert has the slots of whole rows
        limited = [model.get_submodule(name) for name in op.modules.names()]
        limit_experts(model, limited, **op.settings)
    steps, counted = batches(job.values, model)
    for trainable, names in frozen(plan):
        for name in names:
            model.get_submodule(name).requires_grad_(trainable)
    optimizer = adamw(model)
    routes = Routes(model)
    found = {"steps": steps, "counted": counted, "logits": [], "losses": [], "norms": []}
    for number, step in enumerate(steps):
        extra = {COUNT: sum(valid(one["labels"]) for one in step)} if counted else {}
        extra |= {} if "_class_name" in job.values else {"use_cache": False}
        for one in step:
            routes.begin()
            output = model(**one, **extra)
            loss = output.loss if counted else output.loss / len(step)
            (loss * divided(plan)).backward()
            found["logits"].append(output.logits.detach())
            found["losses"].append(loss.detach())
        if number == 0:
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            found["gradients"] = grads
        found["norms"].append(clipped(model))
        optimizer.step()
        optimizer.zero_grad()
    found["tied"] = tied(model)
    found["parameters"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert grads and all(torch.isfinite(g).all() for g in grads.values())
    found["modules"], found["routes"] = list(sys.modules), routes.passes
    torch.save(found, path)


def tied(model):
    """The other names of tied parameters: those under which a later stage has them."""
    names = {id(p): n for n, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {n: names[id(p)] for n, p in every if n != names[id(p)]}


def keep(path):
    """What `single` wrote."""
    found = torch.load(path, weights_only=False)
    imported(found.pop("modules"))
    return found


def adamw(model):
    """AdamW, with a group for each mesh: `foreach` is fast, and takes no parameters of two."""
    groups = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    some = [{"params": group} for group in groups.values()]
    return torch.optim.AdamW(some, lr=1e-3, eps=1e-6, foreach=True)


def clipped(model):
    trained = [p for p in model.parameters() if p.grad is not None]
    return nn.utils.clip_grad_norm_(trained, 1.0)


# Four processes ----------------------------------------------------------------------------------


def train(job, reference, rank, path):
    """Trains as one of the ranks, and writes how far it is from the single process."""
    store = distributed.FileStore(str(path.with_name("store")), WORLD)
    late = datetime.timedelta(seconds=SECONDS)
    distributed.distributed_c10d.default_pg_timeout = late
    distributed.init_process_group("gloo", rank=rank, world_size=WORLD, store=store, timeout=late)
    plan = lowered(job)
    model = build(job.values)
    run = planc.apply(model, plan, device_type="cpu")
    routes = Routes(model)
    mine = Mine(reference, run, routes if rough(plan) else None)
    optimizer = run.optimizer(adamw(model))
    for number, step in enumerate(reference["steps"]):
        given = [rank_slice(one, run.data_rank, run.data_size) for one in step]
        extra = {}
        if reference["counted"]:
            extra[COUNT] = run.num_items_in_batch(*(one["labels"] for one in given))
        if in_parts(plan):
            mine.stepped(run.forward_backward(given), len(given))
        else:
            passes(model, run, given, extra, routes, mine)
        if number == 0:
            mine.gradients(model)
        mine.normed(whole(run.clip_grad_norm_(1.0)))
        optimizer.step()
        optimizer.zero_grad()
    mine.parameters(model)
    found = {"errors": mine.errors, "worst": mine.worst, "rough": rough(plan)}
    path.write_text(json.dumps({**found, "modules": list(sys.modules)}))
    distributed.barrier()


def in_parts(plan):
    """Whether a rank has a part of the blocks, or of every sequence: one call makes the passes."""
    return plan.pipeline is not None or any(isinstance(op, ContextParallel) for op in plan.ops)


def passes(model, run, given, extra, routes, mine):
    """The passes of a step one by one."""
    for at, one in enumerate(given):
        routes.begin()
        with contextlib.nullcontext() if at == len(given) - 1 else run.no_sync():
            output = model(**one, **extra)
            loss = output.loss if COUNT in extra else output.loss / len(given)
            loss.backward()
        mine.passed(output.logits, loss)


class Mine:
    """What one rank has of each kind, beside the single process.

    Args:
        routes: the experts of this run's tokens, where the plan reduces in 16 bits: in the second
            step a token with other experts than the single process' is counted, its logits are not
            compared.
    """

    def __init__(self, reference, run, routes):
        self._right, self._run, self._at, self._norm = reference, run, 0, 0
        self._routes = routes
        self.errors = dict.fromkeys(LIMITS, 0.0)
        self.worst = ""

    def _told(self, kind, value):
        self.errors[kind] = max(self.errors[kind], value if math.isfinite(value) else math.inf)

    def passed(self, logits, loss):
        """The outputs of one pass; the loss is compared as the mean over all ranks.

        A plan with a loss section has no logits.
        """
        rows = self._right["logits"][self._at].chunk(self._run.data_size)[self._run.data_rank]
        later = self._at >= len(self._right["steps"][0])
        if logits is not None:
            same = self._routed(rows.shape[:-1]) if later else torch.ones(rows.shape[:-1]).bool()
            self._told("routes", 1 - same.float().mean().item())
            self._told("later" if later else "logits", error(logits[same], rows[same]))
        mean = whole(loss).clone()
        distributed.all_reduce(mean)
        right = self._right["losses"][self._at]
        self._told("later" if later else "loss", error(mean / WORLD, right))
        self._at += 1

    def stepped(self, loss, count):
        """The loss of a whole step, where its passes have no outputs to compare."""
        right = sum(self._right["losses"][self._at : self._at + count])
        self._told("later" if self._at else "loss", error(loss, right))
        self._at += count

    def _routed(self, shape):
        """Which tokens have the experts that they have in the single process."""
        same = torch.ones(shape).bool()
        for name, mine in self._routes.passes[self._at].items() if self._routes else ():
            right = self._right["routes"][self._at][name]
            right = right.chunk(self._run.data_size)[self._run.data_rank]
            same &= (whole(mine) == right).all(-1).reshape(shape)
        return same

    def normed(self, norm):
        self._told("norm", error(norm, self._right["norms"][self._norm]))
        self._norm += 1

    def gradients(self, model):
        right = self._right["gradients"]
        has = {plain(n) for n, p in model.named_parameters() if p.grad is not None}
        mine = gradients_of(model, has) if {self._name(n) for n in has} <= right.keys() else {}
        self._tensors("gradient", model, mine, right)

    def parameters(self, model):
        orders = rank_orders(model)
        mine = {plain(n): p for n, p in model.named_parameters()}
        mine = {n: in_own_order(whole(p), orders.get(n)) for n, p in mine.items()}
        self._tensors("parameters", model, mine, self._right["parameters"])

    def _name(self, name):
        return self._right["tied"].get(name, name)

    def _tensors(self, kind, model, mine, right):
        """Errors by name; some gradients are 0 but for rounding.

        A rank has those of its own stage's parameters, and all ranks together have them all.
        """
        mine = {self._name(n): t for n, t in mine.items()}
        own = {self._name(plain(n)) for n, _ in model.named_parameters()} & right.keys()
        held = [None] * WORLD
        distributed.all_gather_object(held, own)
        if odd := (mine.keys() ^ own) | (set().union(*held) ^ right.keys()):
            self.worst = self.worst or f"{kind} of {sorted(odd)[:3]}"
            self._told(kind, math.inf)
            return
        right = {n: right[n] for n in mine}
        least = 1e-3 * max(t.abs().max().item() for t in right.values())
        off = {n: error(mine[n], right[n], least) for n in right}
        name = max(off, key=off.get)
        self.worst = self.worst or name
        self._told(kind, off[name])
