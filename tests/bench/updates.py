"""A step of Muon by its owners, beside torch's Muon on DTensors and beside ranks that gather.

`steps.py muon REPEAT` and `steps.py "muon tp" REPEAT` have the three take turns on four processes:
the matrices of a llama, 3.2 MB in float32, on dp_shard 4 or on dp_shard 2 and tp 2.
"""

import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Replicate
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import planc

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
PLAN = """plan muon for llama

extend "llama"

optimizer {
    root                             : adamw
    $blocks.self_attn.{q,k,v,o}_proj : muon
    $blocks.mlp.{gate,up,down}_proj  : muon
}
"""
LR, DECAY = 1e-3, 0.1
IN_FLOAT32 = mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
"""torch's Muon iterates in bfloat16, 8e-2 of a change away: here all iterate in float32."""
PASSES = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_reduce": 2}
"""How often a ring sends all but one rank's part of the larger of input and output."""
OTHERS = {"wait_tensor", "_wrap_tensor_autograd"}
"""Ops of the namespaces of collectives that send nothing."""


class Traffic(TorchDispatchMode):
    """The bytes that this rank sends in collectives, and their number."""

    def __init__(self):
        super().__init__()
        self.bytes = self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:  # it runs first, and its collectives come here
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in OTHERS:
            self.bytes += sent(name, args, out)
            self.calls += 1
        return out


def sent(name, args, out):
    """The bytes that a rank sends in a collective."""
    if name == "alltoall_base_":
        _, given, group, _, sizes, *_ = args
        own = sizes[distributed.ProcessGroup.unbox(group).rank()]
        return (sum(sizes) - own) * given.element_size()
    group = distributed.distributed_c10d._resolve_process_group(args[-1])
    largest = max(t.numel() * t.element_size() for t in (args[0], out))
    return PASSES[name] * largest * (group.size() - 1) // group.size()


def model(*settings):
    """A model with gradients of its matrices alone, and its run."""
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**SHAPE)).train()
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "muon.plan"
        plan.write_text(PLAN)
        overrides = ["param_dtype=fp32", "recompute=false", *settings]
        run = planc.apply(made, plan, overrides=overrides, device_type="cpu", compare=0)
    ids = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(run.data_rank))
    run.forward_backward([{"input_ids": ids, "labels": ids}])
    for name, parameter in made.named_parameters():
        if "_proj" not in name:
            parameter.grad = None
    return made, run


def matrices(made):
    return [p for p in made.parameters() if p.grad is not None]


def by_owners(made, run):
    return run.optimizer(lr=LR, weight_decay=DECAY).step


def on_dtensors(made, run):
    optimizer = torch.optim.Muon(matrices(made), lr=LR, weight_decay=DECAY)

    def step():
        with IN_FLOAT32:
            optimizer.step()

    return step


def gathered(made, run):
    """Every rank gathers every matrix, and takes its shard of the result."""
    every = [(p, torch.zeros_like(p)) for p in matrices(made)]

    @torch.no_grad()
    def step():
        for p, momentum in every:
            momentum.lerp_(p.grad, 0.05)
            whole = p.grad.lerp(momentum, 0.95).full_tensor()
            with IN_FLOAT32:
                turned = _zeropower_via_newtonschulz(whole, (3.4445, -4.7750, 2.0315), 5, 1e-7)
            mesh = p.device_mesh
            update = DTensor.from_local(turned, mesh, [Replicate()] * mesh.ndim, run_check=False)
            p.mul_(1 - LR * DECAY)
            rate = LR * max(1, p.shape[0] / p.shape[1]) ** 0.5
            p.add_(update.redistribute(placements=p.placements), alpha=-rate)

    return step


WAYS = {"owners": by_owners, "dtensors": on_dtensors, "gathered": gathered}


def updates(*settings):
    """The steps, after a first one of each, which must change the matrices alike."""
    steps, changed = {}, {}
    for name, way in WAYS.items():
        made, run = model(*settings)
        steps[name] = way(made, run)
        before = [p.to_local().clone() for p in matrices(made)]
        steps[name]()
        after = [p.to_local() for p in matrices(made)]
        changed[name] = [b - a for a, b in zip(after, before, strict=True)]
    for name, changes in changed.items():
        for mine, other in zip(changed["owners"], changes, strict=True):
            error = float((mine - other).norm() / mine.norm())
            assert error < 1e-3, f"owners and {name} differ by {error:.1e} of a change"
    return steps


def traffic(steps):
    """Bytes that this rank sends, and collectives, of a step of each."""
    found = {}
    for name, step in steps.items():
        with Traffic() as counted:
            step()
        found |= {f"{name} bytes": counted.bytes, f"{name} calls": counted.calls}
    return found


UPDATES = {"muon": updates, "muon tp": partial(updates, "tp=2")}
