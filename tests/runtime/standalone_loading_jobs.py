"""The load section on every rank of a pool: what `Run.load` and the emitted Python make of it."""

from pathlib import Path
from unittest import mock

import torch
from loading_jobs import on_meta, written
from numerics import MODELS, build, error, gradients_of, whole
from safetensors.torch import save_file
from torch import distributed
from torch.distributed.tensor import DTensor

import planc
from planc.emit.python.script import render
from planc.runtime.standalone.shards import named_tensors, plain_name
from planc.runtime.weights import loading

MODELS["qwen3_moe"] = {
    "model_type": "qwen3_moe",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}

MODELS["ernie4_5_moe"] = {
    "model_type": "ernie4_5_moe",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_layer_start_index": 1,
}


def spread(model, plan, overrides=(), meta=True):
    made = on_meta(model) if meta else build(model)
    return planc.apply(made, plan, overrides=list(overrides), device_type="cpu")


def held(model):
    """Whole tensors by the names of the plain model, and buffers."""
    tensors = {n: whole(t) for n, t in named_tensors(model)}
    return tensors | {plain_name(n): whole(b) for n, b in model.named_buffers()}


def loaded(model, plan, folder, overrides=(), script=False):
    """Tensors that differ from the single process's, and the ways in which they were read."""
    written(model, folder)
    right = held(build(model))
    ways = []

    def watch(name):
        real = getattr(loading, name)
        return mock.patch.object(loading, name, lambda *a: (ways.append(name), real(*a))[1])

    if script:
        lowered = planc.lower(
            build(model), plan, world_size=distributed.get_world_size(), overrides=list(overrides)
        )
        space = {}
        exec(compile(render(lowered, digest="0" * 64), "emitted.py", "exec"), space)
        made = on_meta(model)
        space["parallelize"](made, space["build_mesh"]("cpu"))
        space["load_weights"](made, folder, "cpu")
    else:
        run = spread(model, plan, overrides)
        with watch("read_slices"), watch("read_rank0"):
            run.load(folder)
        made = run.model
    mine = held(made)
    assert mine.keys() == right.keys()
    assert not any(t.is_meta for t in [*made.parameters(), *made.buffers()])
    different = [
        n
        for n, t in right.items()
        if not torch.equal(mine[n], t.to(mine[n].dtype) if t.is_floating_point() else t)
    ]
    dtypes = {str(p.dtype) for p in made.parameters()}
    tokens = torch.arange(1, 17).reshape(1, 16)
    made(input_ids=tokens, labels=tokens).loss.backward()
    assert all(g.isfinite().all() for g in gradients_of(made).values())
    return different, sorted(set(ways)), sorted(dtypes)


def resumed(plan, folder, script=False):
    """A checkpoint of `save`, read under a plan that says weights = checkpoint."""
    run = spread("llama", plan.replace(".plan", ".old.plan"), meta=False)
    run.save(folder)
    right = held(build("llama"))
    if script:
        lowered = planc.lower(build("llama"), plan, world_size=4)
        space = {}
        exec(compile(render(lowered, digest="0" * 64), "emitted.py", "exec"), space)
        made = on_meta("llama")
        space["parallelize"](made, space["build_mesh"]("cpu"))
        space["load_weights"](made, folder, "cpu")
    else:
        new = spread("llama", plan)
        new.load(folder)
        made = new.model
    mine = held(made)
    return [n for n in right if not torch.equal(mine[n], right[n])]


def refused(plan, folder, how, model="llama"):
    """The findings of a call that the plan does not allow."""
    written(model, folder)
    try:
        if how == "memory":
            spread(model, plan, meta=False)
        else:
            spread(model, plan).load(folder, **({} if how == "folder" else {"weights": how}))
    except planc.PlanError as caught:
        return [(d.code, d.message) for d in caught.diagnostics]
    return []


def peaks(model, plan, folder, weights, changes):
    """Bytes: the peak of a load, this rank's shards, the largest tensor, and all of them."""
    from loading_jobs import peak

    written(model, folder, changes, shard_size="4MB")
    made = on_meta(model, changes)
    run = planc.apply(made, plan, device_type="cpu")
    most = peak(lambda: run.load(folder, weights=weights), folder)
    tensors = list(made.parameters())
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    sizes = [t.numel() * t.element_size() for t in tensors]
    own = sum(t.numel() * t.element_size() for t in local)
    return {"peak": most, "shard": own, "largest": max(sizes), "whole": sum(sizes)}


def untied(state):
    """Tensors in memory of their own, each under the first of its names."""
    first = {tensor.data_ptr(): name for name, tensor in reversed(state.items())}
    return {name: state[name].detach().clone().contiguous() for name in first.values()}


def emitted(model, plan, folder, way, overrides=("tp=2", "param_dtype=fp32"), broken=None):
    """Of the script: the tensors of its full state dict that differ, and the error of its logits.

    Args:
        way: `checkpoint`, what `Run.save` writes under another mesh; else safetensors in the
            model's own form.
        broken: makes the stored tensors wrong; then the script's error is what comes back.
    """
    single = build(model)
    right = {n: t.detach().contiguous() for n, t in single.state_dict().items()}
    stored = untied(right)
    if way == "checkpoint":
        family = model.partition("-")[0]
        planc.apply(build(model), family, overrides=["tp=1"], device_type="cpu").save(folder)
    elif distributed.get_rank() == 0:
        Path(folder).mkdir()
        save_file(broken(stored) if broken else stored, Path(folder) / "model.safetensors")
    distributed.barrier()
    made = on_meta(model)
    lowered = planc.lower(made, plan, world_size=4, overrides=list(overrides))
    space = {}
    exec(compile(render(lowered, digest="0" * 64), "emitted.py", "exec"), space)
    space["parallelize"](made, space["build_mesh"]("cpu"))
    try:
        space["load_weights"](made, str(folder), "cpu")
    except ValueError as caught:
        return str(caught)
    tokens = torch.arange(1, 17).reshape(1, 16)
    with torch.no_grad():
        wrong = error(made(input_ids=tokens).logits, single(input_ids=tokens).logits)
    if "full_state_dict" in space:
        got = space["full_state_dict"](made)
    else:
        got = {n: whole(t) for n, t in named_tensors(made)}
    if distributed.get_rank():
        return [], wrong
    assert got.keys() == right.keys()
    return [n for n in right if not torch.equal(got[n], right[n])], wrong


def refusing(model, plan, folder, weights):
    """What the script says of a checkpoint that does not fit, on every rank."""

    def broken(stored):
        stored["nobody.weight"] = stored.pop("model.embed_tokens.weight")
        stored["model.norm.weight"] = stored["model.norm.weight"][:-1].clone()
        del stored["lm_head.weight"]
        return stored

    return emitted(model, plan, folder, weights, overrides=(), broken=broken)


def one_by_one(model, plan, folder):
    """What the script says of experts that transformers wrote one by one."""
    written(model, folder)
    made = on_meta(model)
    lowered = planc.lower(made, plan, world_size=4)
    space = {}
    exec(compile(render(lowered, digest="0" * 64), "emitted.py", "exec"), space)
    space["parallelize"](made, space["build_mesh"]("cpu"))
    try:
        space["load_weights"](made, folder, "cpu")
    except ValueError as caught:
        return str(caught)
    return None


def islands(plan, folder, script=False):
    """What is not of the type that `from_pretrained(dtype=bfloat16)` gives it; the loss's error."""
    import transformers

    written("ernie4_5_moe", folder)
    single = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    distributed.barrier()
    made = on_meta("ernie4_5_moe")
    if script:
        if distributed.get_rank() == 0:
            stored = untied(build("ernie4_5_moe").state_dict())
            for file in Path(folder).iterdir():
                file.unlink()
            save_file(stored, Path(folder) / "model.safetensors")
        distributed.barrier()
        space = {}
        lowered = planc.lower(made, plan, world_size=4)
        exec(compile(render(lowered, digest="0" * 64), "emitted.py", "exec"), space)
        space["parallelize"](made, space["build_mesh"]("cpu"))
        space["load_weights"](made, folder, "cpu")
    else:
        planc.apply(made, plan, device_type="cpu").load(folder)
    right = {n: p.dtype for n, p in single.named_parameters()}
    other = {n for n, p in named_tensors(made) if p.dtype != right.get(n, p.dtype)}
    tokens = torch.arange(1, 17).reshape(1, 16)
    loss = made(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    same = single(input_ids=tokens, labels=tokens, use_cache=False).loss
    kept = sorted(n for n, dtype in right.items() if dtype == torch.float32)
    return kept, sorted(other), abs(loss.item() - same.item())
