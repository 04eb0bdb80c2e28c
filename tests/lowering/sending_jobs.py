"""What test_sends.py runs on every rank: a step's collectives, counted and told."""

from collections import Counter

import torch
import transformers
from numerics import MODELS, build, values_of
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import planc
from planc.compiler import compile_plan
from planc.diagnostics.diagnostic import Sink
from planc.ir.parameter_owners import owned_modules
from planc.lowering.backward import Backward
from planc.lowering.collectives import step_collectives
from planc.lowering.pipeline_collectives import arguments_of
from planc.lowering.step import EXCHANGE, GATHER, REDUCE, SCATTER, SEND, Step
from planc.model.module_table import facts_of
from planc.model.sources.diffusers import normal
from planc.ops.lora import Adapt
from planc.ops.optimizer import Optimize
from planc.proxy.diffusers_model import DiffusersBuilder

KINDS = {
    "all_gather_into_tensor": GATHER,
    "_allgather_base_": GATHER,
    "reduce_scatter_tensor": SCATTER,
    "_reduce_scatter_base_": SCATTER,
    "all_reduce": REDUCE,
    "allreduce_": REDUCE,
    "alltoall_base_": EXCHANGE,
    "send": SEND,
}
LENGTH = 16
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "attention_dropout": 0.0,
}


def _tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _group(values):
    for value in reversed(values):
        if isinstance(value, str) and value:
            return distributed.distributed_c10d._resolve_process_group(value)
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return distributed.ProcessGroup.unbox(value)
    raise AssertionError(values)


class Sizes(TorchDispatchMode):
    """The bytes of every collective, by kind and ranks: what `CommDebugMode` does not say.

    Sums of one or two numbers are the loop's: the batches and tokens of the step, and its loss.
    """

    def __init__(self):
        super().__init__()
        self.found, self.calls = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):  # to see what it sends itself
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        kind = KINDS.get(func.overloadpacket.__name__)
        if kind and func.namespace in ("c10d", "_c10d_functional"):
            ranks = tuple(
                distributed.get_process_group_ranks(_group((*args, *(kwargs or {}).values())))
            )
            given = args[1:2] if kind == EXCHANGE else (args, out)
            size = max(t.numel() * t.element_size() for t in _tensors(given))
            self.calls += kind != SEND
            if kind != REDUCE or size > 16:
                self.found[kind, ranks, size] += 1
        return out


def _along(run, axes):
    """The ranks of this rank's group along some axes."""
    known = {a.name for a in run.lowered.axes}
    if not {*axes} <= known:
        return tuple(distributed.get_process_group_ranks(run.meshes[axes[0]].get_group()))
    names = [a.name for a in run.lowered.axes]
    at = [
        slice(None) if name in axes else place
        for name, place in zip(names, run.mesh.get_coordinate(), strict=True)
    ]
    return tuple(run.mesh.mesh[tuple(at)].flatten().tolist())


def untouched(kind, changes):
    """A model of a class of transformers, or of a family of `families.py`."""
    if kind in MODELS:
        return build(kind, **(changes or {}))
    name = f"{kind}TextConfig" if hasattr(transformers, f"{kind}TextConfig") else f"{kind}Config"
    config = getattr(transformers, name)(**{**SIZES, **(changes or {})})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def counted(kind, plan, settings, rows, changes=None, passes=1):
    """What a step sent and what was told, each {(kind, ranks, bytes): times}, and the number of
    collectives that `CommDebugMode` counts beside that of those that were seen here.
    """
    torch.manual_seed(0)
    model = untouched(kind, changes)
    config = model.config
    run = planc.apply(model, plan, overrides=settings, device_type="cpu", compare=0)
    ids = torch.randint(1, 96, (rows // run.data_size, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    optimizer = run.optimizer(lr=1e-3) if run.lowered.has(Optimize) else None

    def step():
        run.forward_backward([batch] * passes)
        if optimizer:
            optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None

    step()
    sizes, debug = Sizes(), CommDebugMode()
    with sizes:
        step()
    # it loses count of modules that take others' places, and of those that run again or whose
    # gradients wait for others
    alone = chunked(run) or any(op.dora and op.dropout for op in run.lowered.find_ops(Adapt))
    if run.lowered.pipeline is None and passes == 1 and not alone:
        with debug:
            step()
    given = {"batch": rows * passes, "sequence": LENGTH, "micro_batches": passes}
    other = untouched(kind, changes)
    facts = facts_of(other, config=other.config, config_name="config")
    done = compile_plan(facts, plan, Sink(), world_size=4, settings=settings)
    assert done.lowered.ops == run.lowered.ops
    step = Step(
        lowered=run.lowered,
        config=config.to_dict(),
        backward=Backward(owned_modules(*done.applied)),
        arguments=arguments_of(run.lowered.pipeline, facts),
        **given,
    )
    told = Counter()
    for one in step_collectives(step):
        ranks = _along(run, one.axes)
        if one.among is not None:
            count, every = one.among
            own = ranks.index(distributed.get_rank())
            first = own % every if every > 1 else own // count * count
            ranks = ranks[first : first + count * every : every]
        told[one.kind, ranks, one.size] += one.times
    calls = sizes.calls if alone else debug.get_total_counts()
    return dict(sizes.found), dict(told), (calls, sizes.calls)


def counted_images(name, plan, settings):
    """What the ranks of `cp` sent in a pass of a model of diffusers, and what was told, each
    {(kind, bytes): times}.
    """
    model = build(name)
    run = planc.apply(model, plan, overrides=settings, device_type="cpu", compare=0)
    every = DiffusersBuilder(values_of(name)).sample()
    rows, count = len(every["target"]), LENGTH
    given = {n: v.chunk(run.data_size)[run.data_rank] for n, v in every.items()}
    sizes = Sizes()
    model(**given).loss.backward()
    with sizes:
        model(**given).loss.backward()
    values = normal(model.config, values_of(name)["_class_name"])
    step = Step(lowered=run.lowered, config=values, batch=rows, sequence=count)
    told, group = Counter(), _along(run, ("cp",))
    for one in step_collectives(step):
        if one.axes == ("cp",):
            told[one.kind, one.size] += one.times
    found = {(kind, size): n for (kind, ranks, size), n in sizes.found.items() if ranks == group}
    return found, dict(told)


def counted_features(name, plan, settings, axis):
    """What the ranks of an axis sent in a pass of a model of images that they divide, and what was
    told of it for rows that are images alone, each {(kind, bytes): times}; and the share of the
    tokens that are of images.
    """
    from tower_jobs import batch_of, of_rank

    model = build(name)
    run = planc.apply(model, plan, overrides=settings, device_type="cpu", compare=0)
    batch = batch_of(name, (1, 1, 1, 1), padded=False)
    given = run.batch(of_rank(batch, run.data_rank, run.data_size))
    sizes = Sizes()
    model(**given).loss.backward()
    with sizes:
        model(**given).loss.backward()
    ids = batch.inputs["input_ids"]
    rows, length = ids.shape
    shape = {"batch": rows, "sequence": length}
    step = Step(lowered=run.lowered, config=model.config.to_dict(), **shape, computes="float32")
    told, group = Counter(), _along(run, (axis,))
    for one in step_collectives(step):
        if one.axes == (axis,) and one.word == "images":
            told[one.kind, one.size] += one.times
    found = {(kind, size): n for (kind, ranks, size), n in sizes.found.items() if ranks == group}
    share = (ids == model.config.image_token_id).sum().item() / ids.numel()
    return found, dict(told), share


def chunked(run):
    """Whether tokens go to experts in chunks."""
    return any(getattr(op, "chunks", 1) > 1 for op in run.lowered.ops)
