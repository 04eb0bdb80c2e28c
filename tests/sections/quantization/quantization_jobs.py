"""Jobs of test_quantization: a plan with 4-bit weights beside peft and bitsandbytes."""

import gc
import re
import weakref
from dataclasses import replace
from pathlib import Path

import adapter_jobs
import bitsandbytes
import numerics
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

import planc
from planc.runtime.standalone.shards import four_bit_layers, fsdp_units
from planc.sections.quantization.ops import Quantize

BODY = """
    $blocks.self_attn.{q,k,v,o}_proj : qlora(rank = 4, alpha = 8, block = 32, init = random)
    $blocks.mlp.{gate,up,down}_proj  : qlora(rank = 6, quant = fp4, init = random)
    lm_head                         : lora(rank = 3, init = random)
"""
TARGETS = (  # by hand: (layers, rank, alpha, quant, block) of the rules above
    (r"model\.layers\.\d\.self_attn\.[qkvo]_proj", 4, 8, "nf4", 32),
    (r"model\.layers\.\d\.mlp\.(gate|up|down)_proj", 6, 6, "fp4", 64),
    ("lm_head", 3, 3, None, 0),
)
CHANGES = {"intermediate_size": 128}
NAMES = 2 * (7 * 2 + 1)


def quantized(linear, quant, block, double, storage, compute):
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
                layer = quantized(module, quant, block, double, storage, compute)
                model.set_submodule(name, layer)
    model.is_loaded_in_4bit = True
    for seed, (pattern, rank, alpha, _, _) in enumerate(TARGETS):
        numerics.inject(model, pattern, seed, r=rank, lora_alpha=alpha, init_lora_weights=False)
    return model


def lowered(family, body, overrides, changes):
    path = adapter_jobs.written(family, body)
    try:
        model = numerics.build(family, **changes)
        return planc.lower(model, path, world_size=4, overrides=overrides)
    finally:
        Path(path).unlink()


def compare(
    overrides,
    family="llama",
    extra="",
    more="",
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
    body = BODY.replace("init = random)", f"init = random{extra})", 2) + more
    kept, kind = getattr(torch, storage), getattr(torch, dtype)
    right_model = single(family, kind, double, changes, kept, compute and getattr(torch, compute))
    tokens, labels = numerics.data(right_model.config.vocab_size)
    right = right_model(input_ids=tokens, labels=labels, use_cache=False)
    right.loss.backward()
    plan = lowered(family, body, overrides, changes)
    if block:  # to break the plan on purpose
        ops = (replace(o, block=block) if isinstance(o, Quantize) else o for o in plan.ops)
        plan = plan.map_ops(lambda _: tuple(ops))
    model = numerics.build(family, **changes).to(kind)
    rank, size = (numerics.by_script if script else numerics.by_planc)(model, plan)
    rows = numerics.BATCH // size
    mine = slice(rank * rows, (rank + 1) * rows)
    output = model(input_ids=tokens[mine], labels=labels[mine])
    output.loss.backward()
    assert all(".lora_" in n for n, p in right_model.named_parameters() if p.requires_grad)
    return {
        **adapter_jobs.differences(model, output, right_model, right, mine),
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
    found = four_bit_layers(run.model)
    for name, layer in found.items():
        whole = numerics.whole(layer.weight).contiguous().view(torch.uint8)
        own = alone.get_submodule(name.removesuffix(".weight")).base_layer
        right = own.weight.detach().view(torch.uint8)
        assert torch.equal(whole, right), name
        assert torch.equal(layer.quant_state.absmax, own.weight.quant_state.absmax)
    return len(found)


# Memory and files --------------------------------------------------------------------------------


def applied(overrides, meta=False, body=BODY, changes=CHANGES):
    plan = lowered("llama", body, overrides, changes)
    model = numerics.build("llama", **changes)
    if meta:
        with torch.device("meta"):
            model = type(model)(model.config).train()
    return planc.apply(model, plan, device_type="cpu")


def no_copies(overrides):
    """What a rank keeps of the weights: (bytes in 4 bits, of their scales, of them whole)."""
    model = numerics.build("llama", **CHANGES)
    names = [n for n, _ in model.named_parameters() if re.search(r"(self_attn|mlp)\.", n)]
    whole = [weakref.ref(model.get_parameter(n)) for n in names]
    full = sum(model.get_parameter(n).nbytes for n in names)
    run = planc.apply(model, lowered("llama", BODY, overrides, CHANGES), device_type="cpu")
    tokens, labels = numerics.data(model.config.vocab_size)
    model(input_ids=tokens[:1], labels=labels[:1]).loss.backward()
    for unit in fsdp_units(model):
        unit.reshard()
    gc.collect()
    assert all(ref() is None for ref in whole), "a whole weight is still there"
    kept = four_bit_layers(run.model).values()
    column = sum(layer.weight.to_local().untyped_storage().nbytes() for layer in kept)
    return column, sum(layer.quant_state.absmax.nbytes for layer in kept), full


def from_meta(folder, overrides, weights):
    """A model on meta takes whole weights from files and keeps the very bytes of one on the CPU."""
    run = applied(overrides)
    if distributed.get_rank() == 0 and not Path(folder).exists():
        numerics.build("llama", **CHANGES).save_pretrained(folder)
    distributed.barrier()
    other = applied(overrides, meta=True)
    other.load(folder, weights=weights)
    one, two = four_bit_layers(run.model), four_bit_layers(other.model)
    assert one.keys() == two.keys() and len(one) == 14
    for name, layer in one.items():
        mine, theirs = (m.weight.to_local().view(torch.uint8) for m in (layer, two[name]))
        assert torch.equal(mine, theirs) and mine.numel()
        assert torch.equal(layer.quant_state.absmax, two[name].quant_state.absmax)
    rows = slice(run.data_rank, run.data_rank + 1)
    return torch.equal(adapter_jobs.logits(run.model, rows), adapter_jobs.logits(other.model, rows))


def script_from_meta(folder, overrides, weights):
    return adapter_jobs.script_from_meta(folder, overrides, weights, body=BODY, changes=CHANGES)


def saved(folder, overrides, others):
    """Adapters out of one plan: peft reads them onto layers of bitsandbytes, and another plan."""
    from peft import PeftModel

    run = applied(overrides)
    adapter_jobs.stepped(run, run.model)
    run.save_adapters(folder)
    base = single("llama", torch.float32, False, CHANGES, torch.float32, None)
    for name, module in list(base.named_modules()):
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            base.set_submodule(name, module.base_layer)
    read = PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).train()
    other = applied(others)
    other.load_adapters(folder)
    rows = numerics.BATCH // other.data_size
    part = slice(other.data_rank * rows, (other.data_rank + 1) * rows)
    right = adapter_jobs.logits(read)[part]
    fresh = adapter_jobs.logits(applied(others).model, part)
    return numerics.error(adapter_jobs.logits(other.model, part), right), numerics.error(
        fresh, right
    )


def resumed(folder, overrides, others):
    """A checkpoint without 4-bit weights goes on under another plan."""
    run = applied(overrides)
    optimizer = adapter_jobs.stepped(run, run.model)
    run.save(f"{folder}/run", optimizer=optimizer, step=1)
    mine = run.full_state_dict(every_rank=True)
    assert not set(four_bit_layers(run.model)) & mine.keys()
    assert sum(".lora_" in n for n in mine) == NAMES
    other = applied(others)
    second = torch.optim.AdamW([p for p in other.model.parameters() if p.requires_grad], lr=0.05)
    assert other.load(f"{folder}/run", optimizer=second) == 1
    again = other.full_state_dict(every_rank=True)
    assert all(torch.equal(mine[n], again[n]) for n in mine)
    rows = slice(0, 1)
    return numerics.error(
        adapter_jobs.logits(other.model, rows), adapter_jobs.logits(run.model, rows)
    )


def refused(folder, overrides):
    """The codes of what 4-bit weights can't do."""
    codes = []

    def code(call, *arguments, **named):
        try:
            call(*arguments, **named)
        except planc.PlanError as error:
            codes.append([d.code for d in error.diagnostics])

    run = applied(overrides)
    for adapters in ("merged", "left_out"):
        code(run.export, f"{folder}/export", adapters=adapters)
    run.save(f"{folder}/run")
    code(applied(overrides, meta=True).load, f"{folder}/run")
    whole = planc.apply(numerics.build("llama", **CHANGES), "llama", device_type="cpu")
    whole.save(f"{folder}/whole")
    code(run.load, f"{folder}/whole")
    small = numerics.build("llama", intermediate_size=64)
    if distributed.get_rank() == 0:
        small.save_pretrained(f"{folder}/small")
    distributed.barrier()
    code(run.load, f"{folder}/small")
    return codes
