"""What test_fourbit runs on every rank: a plan with 4-bit weights beside peft and bitsandbytes."""

import re
from dataclasses import replace
from pathlib import Path

import adapting
import bitsandbytes
import numerics
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import distributed
from torch.distributed.tensor import DTensor

import planc
from planc.lowering.ops import Quantize
from planc.runtime.quantising import packed

BODY = """
    $block.self_attn.{q,k,v,o}_proj : qlora(rank = 4, alpha = 8, block = 32, init = random)
    $block.mlp.{gate,up,down}_proj  : qlora(rank = 6, quant = fp4, init = random)
    lm_head                         : lora(rank = 3, init = random)
"""
TARGETS = (  # by hand: (layers, rank, alpha, quant, block) of the rules above
    (r"model\.layers\.\d\.self_attn\.[qkvo]_proj", 4, 8, "nf4", 32),
    (r"model\.layers\.\d\.mlp\.(gate|up|down)_proj", 6, 6, "fp4", 64),
    ("lm_head", 3, 3, None, 0),
)
CHANGES = {"intermediate_size": 128}
NAMES = 2 * (7 * 2 + 1)


def quantised(linear, quant, block, double, storage, compute):
    """bitsandbytes' own layer in place of a linear one."""
    made = bitsandbytes.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=compute,
        compress_statistics=double,
        quant_type=quant,
        quant_storage=storage,
    )
    made.weight = bitsandbytes.nn.Params4bit(
        linear.weight.data.clone(),
        blocksize=block,
        compress_statistics=double,
        quant_type=quant,
        quant_storage=storage,
        module=made,
    )
    made.bias = linear.bias
    return made.to("cpu").train()


def single(family, dtype, double, changes, storage, compute):
    """The model with layers of bitsandbytes and adapters of peft, in this process alone."""
    model = numerics.build(family, **changes).to(dtype)
    for pattern, *_, quant, block in TARGETS:
        for name, module in list(model.named_modules()):
            if quant and re.fullmatch(pattern, name):
                layer = quantised(module, quant, block, double, storage, compute)
                model.set_submodule(name, layer)
    model.is_loaded_in_4bit = True
    for seed, (pattern, rank, alpha, _, _) in enumerate(TARGETS):
        config = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=pattern, init_lora_weights=False
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model)
    return model


def lowered(family, body, overrides, changes):
    path = adapting.written(family, body)
    try:
        model = numerics.build(family, **changes)
        return planc.lower(model, path, world_size=4, overrides=overrides)
    finally:
        Path(path).unlink()


def compare(
    overrides,
    family="llama",
    extra="",
    double=False,
    compute=None,
    storage="float32",
    dtype="float32",
    script=False,
    changes=CHANGES,
    block=None,
    steps=2,
):
    """How far a plan is from one process; that steps of training leave its 4-bit weights alone."""
    body = BODY.replace("init = random)", f"init = random{extra})", 2)
    kept, kind = getattr(torch, storage), getattr(torch, dtype)
    right_model = single(family, kind, double, changes, kept, compute and getattr(torch, compute))
    tokens, labels = numerics.data(right_model.config.vocab_size)
    right = right_model(input_ids=tokens, labels=labels, use_cache=False)
    right.loss.backward()
    plan = lowered(family, body, overrides, changes)
    if block:  # to break the plan on purpose
        ops = (replace(o, block=block) if isinstance(o, Quantize) else o for o in plan.ops)
        plan = replace(plan, ops=tuple(ops))
    model = numerics.build(family, **changes).to(kind)
    rank, size = (numerics.by_script if script else numerics.by_planc)(model, plan)
    rows = numerics.BATCH // size
    mine = slice(rank * rows, (rank + 1) * rows)
    output = model(input_ids=tokens[mine], labels=labels[mine])
    output.loss.backward()
    loss = numerics.whole(output.loss).clone()
    distributed.all_reduce(loss)
    loss /= distributed.get_world_size()
    reference = {n: p.grad for n, p in right_model.named_parameters() if p.requires_grad}
    assert all(".lora_" in n for n in reference)
    own = adapting.gradients(model)
    assert own.keys() == reference.keys()
    errors = {n: numerics.error(g, reference[n]) for n, g in own.items()}
    worst = max(errors, key=errors.get)
    return {
        "logits": numerics.error(output.logits, right.logits[mine].detach()),
        "loss": numerics.error(loss, right.loss.detach()),
        "gradient": errors[worst],
        "worst": worst,
        "count": len(errors),
        "bits": numerics.bits(output.logits, loss, *own.values()),
        "unchanged": unchanged(model, right_model, tokens[mine], labels[mine], steps),
    }


def bytes_of(model):
    """This rank's 4-bit weights, as bytes."""
    return {
        n: (p.to_local() if isinstance(p, DTensor) else p).detach().clone().view(torch.uint8)
        for n, p in model.named_parameters()
        if p.shape[-1] == 1 and p.ndim == 2
    }


def unchanged(model, right, tokens, labels, steps):
    """Whether steps leave 4-bit weights as they were; how many they are."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    before = bytes_of(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        optimizer.step()
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    after = bytes_of(model)
    assert all(torch.equal(before[n], after[n]) for n in before)
    return len(before)


def same_bytes(overrides, storage="float32"):
    """The shards put together are what bitsandbytes makes of the whole weights, bit for bit."""
    model = numerics.build("llama", **CHANGES).to(getattr(torch, storage))
    alone = single("llama", getattr(torch, storage), False, CHANGES, getattr(torch, storage), None)
    run = planc.apply(model, lowered("llama", BODY, overrides, CHANGES), device_type="cpu")
    found = packed(run.model)
    for name, layer in found.items():
        whole = numerics.whole(layer.weight).contiguous().view(torch.uint8)
        own = alone.get_submodule(name.removesuffix(".weight")).base_layer
        right = own.weight.detach().view(torch.uint8)
        assert torch.equal(whole, right), name
        assert torch.equal(layer.quant_state.absmax, own.weight.quant_state.absmax)
    return len(found)
