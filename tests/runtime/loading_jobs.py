"""What test_loading.py runs on every rank."""

import gc
import shutil
from pathlib import Path
from zlib import crc32

import torch
import transformers
from numerics import MODELS, build, data, error, gradients_of, whole
from safetensors.torch import load_file, save_file
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from training_jobs import mine
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import planc
from planc.emit.python.script import render
from planc.runtime.standalone import shards
from planc.runtime.weights.loading import load_files


def written(model, folder, changes=None, shard_size="100KB"):
    """A folder as transformers writes it; by rank 0, and all wait."""
    if distributed.get_rank() == 0:
        build(model, **(changes or {})).save_pretrained(folder, max_shard_size=shard_size)
    distributed.barrier()


def on_meta(model, changes=None, dtype=torch.float32):
    config = transformers.AutoConfig.for_model(**{**MODELS[model], **(changes or {})})
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return made.to(dtype).train()


def fresh(model, plan, overrides, changes=None, meta=True):
    made = on_meta(model, changes) if meta else build(model, **(changes or {}))
    if not meta:
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.fill_(7.0)
    return planc.apply(made, plan, overrides=overrides, device_type="cpu", allow_code=True)


def same(run, single):
    """Whether every parameter and buffer is the single process's, bit for bit."""
    mine, right = run.full_state_dict(every_rank=True), single.state_dict()
    assert mine.keys() == right.keys()
    different = [n for n in right if not torch.equal(mine[n], right[n])]
    buffers = {shards.plain_name(n): b for n, b in run.model.named_buffers()}
    expected = dict(single.named_buffers())
    assert buffers.keys() == expected.keys()
    different += [n for n in expected if not torch.equal(whole(buffers[n]), expected[n])]
    return different


def load(
    model, plan, overrides, folder, *, weights="slices", changes=None, meta=True, single=False
):
    """Tensors that differ from the single process's after a load, and errors of a step."""
    written(model, folder, changes, shard_size="5GB" if single else "100KB")
    right = build(model, **(changes or {}))
    run = fresh(model, plan, overrides, changes, meta)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)  # made on meta, still good after
    assert run.load(folder, weights=weights) is None
    assert not any(t.is_meta for t in [*run.model.parameters(), *run.model.buffers()])
    different = same(run, right)
    tokens, labels = data(right.config.vocab_size)
    right(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
    a, b = mine(run, tokens, labels)
    run.model(input_ids=a, labels=b).loss.backward()
    reference = dict(right.named_parameters())
    gradients = gradients_of(run.model)
    assert gradients.keys() == reference.keys(), "a tie was lost"
    worst = max(error(g, reference[n].grad) for n, g in gradients.items())
    torch.optim.SGD(right.parameters(), lr=0.1).step()
    optimizer.step()
    stepped = run.full_state_dict(every_rank=True)
    worst = max(worst, *(error(stepped[n], reference[n]) for n in gradients))
    return different, worst, len(list(Path(folder).glob("*.safetensors")))


def in_fewer_bits(tensors, how, block):
    """Tensors as a quantized folder stores them, and what transformers makes of these."""
    stored, plain = {}, {}
    for name, value in tensors.items():
        if how == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, out = value.shape
            seeded = torch.Generator().manual_seed(crc32(name.encode()))
            shape = (experts, out, inner // 32)
            blocks = torch.randint(256, (*shape, 16), generator=seeded, dtype=torch.uint8)
            scales = torch.randint(119, 124, shape, generator=seeded, dtype=torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales).to(value.dtype)
        elif how == "fp8" and value.ndim == 2 and "layers" in name and "gate.weight" not in name:
            rows, columns = (-(-size // block) for size in value.shape)
            tiles = value.view(rows, block, columns, block)
            scale = tiles.abs().amax((1, 3)) / 448
            packed = (tiles / scale[:, None, :, None]).view(value.shape).to(torch.float8_e4m3fn)
            stored |= {name: packed, f"{name}_scale_inv": scale}
            plain[name] = Fp8Dequantize(None)._dequantize_one(packed, scale)
        else:
            stored[name] = plain[name] = value.clone()
    return stored, plain


def dequantize(model, overrides, folder, how, weights="slices"):
    """What differs after a quantized folder was loaded, from transformers' model of its values."""
    changes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    block, folder = 16, Path(folder)
    written(model, folder / "model", changes)
    files = sorted((folder / "model").glob("*.safetensors"))
    if distributed.get_rank() == 0:
        tensors = {n: t for file in files for n, t in load_file(file).items()}
        for name, each in zip(("bits", "plain"), in_fewer_bits(tensors, how, block), strict=True):
            (folder / name).mkdir()
            names = sorted(each, reverse=True)  # scales and values in different files
            for number in range(2):
                part = {n: each[n].contiguous() for n in names[number::2]}
                save_file(part, folder / name / f"part{number}.safetensors", {"format": "pt"})
        shutil.copy(folder / "model" / "config.json", folder / "plain")
        for file in (folder / "plain").glob("part*"):
            tensors |= load_file(file)
        save_file(tensors, folder / "plain" / "model.safetensors", {"format": "pt"})
    distributed.barrier()
    right = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "plain", dtype=torch.float32, attn_implementation="eager"
    )
    plan = folder / "mine.plan"
    if distributed.get_rank() == 0:
        section = f"load {{\n    weights = {weights}\n    dequantize = {how}\n}}\n"
        plan.write_text(f'plan mine for {model}\nextend "{model}.plan"\n{section}')
    distributed.barrier()
    made = on_meta(model, changes)
    made.config.quantization_config = {"quant_method": how, "weight_block_size": [block, block]}
    run = planc.apply(made, plan, overrides=overrides, device_type="cpu", require="nothing")
    run.load(folder / "bits")
    if model in ("llama", "gpt_oss"):  # the emitted script reads what has the model's names
        space = {}
        exec(compile(render(run.lowered, digest="0" * 64), "emitted.py", "exec"), space)
        other = on_meta(model, changes)
        space["parallelize"](other, space["build_mesh"]("cpu"))
        space["load_weights"](other, folder / "bits", "cpu")
        mine = run.full_state_dict(every_rank=True)
        theirs = {n: whole(t) for n, t in shards.named_tensors(other)}
        assert all(torch.equal(theirs[n], mine[n]) for n in mine)
    unsaid = fresh(model, model, overrides, changes)
    try:
        unsaid.load(folder / "bits", weights=weights)
    except planc.PlanError as error:
        said = [d.code for d in error.diagnostics]
    return same(run, right), said


def classifier(overrides):
    """A classification model on meta under a plan."""
    made = build("llama-classes")
    with torch.device("meta"):
        made = type(made)(made.config).float()
    return planc.apply(made, "classifier", overrides=overrides, device_type="cpu")


def new_head(folder, overrides, weights):
    """The head of a classification model that begins from a language model's weights, the same on
    all ranks; and the right one, of one process.
    """
    run = classifier(overrides)
    torch.manual_seed(distributed.get_rank())  # the ranks' generators differ
    run.load(folder, weights=weights, new=["score"], unused=["lm_head"])
    mine = run.full_state_dict(every_rank=True)
    head, right = mine.pop("score.weight"), build("llama").state_dict()
    assert mine.keys() == right.keys() - {"lm_head.weight"}
    assert all(torch.equal(mine[n], right[n]) for n in mine)
    single = build("llama-classes")
    torch.manual_seed(crc32(b"score"))  # of rank 0's seed, which is 0, and the name
    single._init_weights(single.score)
    assert not torch.equal(head, build("llama-classes").score.weight)
    return torch.equal(head, single.score.weight)


def not_new(folder):
    """The findings of loads that say what is not so; nothing is loaded."""
    run, found = classifier(["tp=2"]), []
    for given in (
        {"unused": ["lm_head"]},
        {"new": ["scor"], "unused": ["lm_head"]},
        {"new": ["score", "model.norm"], "unused": ["lm_head"]},
        {"new": ["score"], "unused": ["lm_head", "lm"]},
        {"new": ["score"]},
    ):
        try:
            run.load(folder, **given)
        except planc.PlanError as error:
            found.append([(d.code, d.message.replace(f"{folder} ", "")) for d in error.diagnostics])
        assert all(parameter.is_meta for parameter in run.model.parameters())
    return found


def stale(folder, kind, place=0.5, **more):
    """The codes and messages where rank 2 has a copy in which one value of a tensor differs; in a
    folder as transformers writes it, or a checkpoint.
    """
    rank = distributed.get_rank()
    own = Path(folder, "stale" if rank == 2 else "right")
    run = fresh("llama", "llama", ["tp=2"], changes := {"hidden_size": 256, "vocab_size": 4096})
    written("llama", Path(folder, "right"), changes, "5GB")
    if kind == "checkpoint":
        run.load(Path(folder, "right"))
        run.save(Path(folder, "right", "run"))
    if rank == 0:
        shutil.copytree(Path(folder, "right"), Path(folder, "stale"))
        pattern = "__0_0.distcp" if kind == "checkpoint" else "*.safetensors"
        file = next(Path(folder, "stale").rglob(pattern))
        if kind == "checkpoint":
            data = bytearray(file.read_bytes())
            data[len(data) // 3 :] = bytes(len(data) - len(data) // 3)
            file.write_bytes(data)
        else:
            tensors = load_file(file)
            flat = tensors["model.layers.1.mlp.up_proj.weight"].view(-1)
            flat[int(flat.numel() * place)] += 1
            save_file(tensors, file, metadata={"format": "pt"})
    distributed.barrier()
    try:
        run.load(own / "run" if kind == "checkpoint" else own, **more)
    except planc.PlanError as error:
        return [(d.code, d.message) for d in error.diagnostics]
    return []


def refused(model, plan, folder, *, weights="slices", meta=True, optimizer=False):
    """The findings of a load that must not touch the model; the folder is there already."""
    run = fresh(model, plan, ["param_dtype=fp32", "tp=2"], meta=meta)
    before = [(p.is_meta, None if p.is_meta else whole(p).clone()) for p in run.model.parameters()]
    made = torch.optim.SGD(run.model.parameters()) if optimizer else None
    try:
        run.load(folder, weights=weights, optimizer=made)
    except planc.PlanError as caught:
        found = [(d.code, d.message) for d in caught.diagnostics]
    else:
        return "loaded"
    for parameter, (was_meta, value) in zip(run.model.parameters(), before, strict=True):
        assert parameter.is_meta == was_meta
        assert was_meta or torch.equal(whole(parameter), value), "half loaded"
    return found


def garbage(folder):
    """A model with a buffer that nothing can compute again, and one that a method can."""
    from safetensors.torch import save_file
    from torch import nn

    class Known(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.arange(4.0), persistent=False)

        def reset_buffers(self):
            self.scale.copy_(torch.arange(4.0))

    class Lost(Known):
        def reset_buffers(self):
            self.scale.mul_(2)  # what was there before shows

    run = {}
    plan = Path(folder) / "plain.plan"
    for kind in (Known, Lost):
        torch.manual_seed(0)
        right = kind()
        if distributed.get_rank() == 0:
            plan.write_text(PLAIN.format(name=kind.__name__))
            save_file(right.state_dict(), Path(folder) / "model.safetensors")
        distributed.barrier()
        with torch.device("meta"):
            made = kind()
        handle = planc.apply(made, str(plan), device_type="cpu")
        try:
            handle.load(folder)
            run[kind.__name__] = same(handle, right)
        except planc.PlanError as caught:
            assert made.linear.weight.is_meta
            run[kind.__name__] = [(d.code, d.message) for d in caught.diagnostics]
        distributed.barrier()
    return run


PLAIN = """plan plain for {name}

mesh {{
    dp_shard = auto
}}

fsdp on dp_shard {{
    root : unit
}}
"""


def peak(work, folder):
    """The most bytes that torch's CPU allocator held at once during `work`, over those before.

    Every allocation and release is an event of the profiler, with its size. A mapped file is one
    too, as large as the file, though its pages are the page cache's: those are left out by size.
    """
    files = {file.stat().st_size for file in Path(folder).iterdir()}
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    found = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = most = 0
    for _, size in sorted(found, key=lambda pair: pair[0]):
        held += size if abs(size) not in files else 0
        most = max(most, held)
    return most


def memory(plan, overrides, folder, weights):
    """Bytes: the peak of a load, this rank's shards, the largest tensor, and all of them."""
    changes = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512}
    written("llama", folder, changes, shard_size="4MB")
    run = fresh("llama", plan, overrides, changes)
    most = peak(lambda: run.load(folder, weights=weights), folder)
    tensors = list(run.model.parameters())
    own = sum(
        (t.to_local() if isinstance(t, DTensor) else t).numel() * t.element_size() for t in tensors
    )
    sizes = [t.numel() * t.element_size() for t in tensors]
    return {"peak": most, "shard": own, "largest": max(sizes), "whole": sum(sizes)}


def quantized_memory(model, how, overrides, folder):
    """As `memory`, of weights in fewer bits."""
    changes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
    block, folder = 32, Path(folder)
    written(model, folder / "model", changes)
    if distributed.get_rank() == 0:
        files = (folder / "model").glob("*.safetensors")
        bits, _ = in_fewer_bits({n: t for f in files for n, t in load_file(f).items()}, how, block)
        (folder / "bits").mkdir()
        tensors = {n: t.contiguous() for n, t in bits.items()}
        save_file(tensors, folder / "bits" / "model.safetensors", {"format": "pt"})
        text = f'plan mine for {model}\nextend "{model}.plan"\nload {{ dequantize = {how} }}\n'
        (folder / "mine.plan").write_text(text)
    distributed.barrier()
    made = on_meta(model, changes)
    made.config.quantization_config = {"quant_method": how, "weight_block_size": [block, block]}
    plan = folder / "mine.plan"
    run = planc.apply(made, plan, overrides=overrides, device_type="cpu", require="nothing")
    most = peak(lambda: run.load(folder / "bits"), folder / "bits")
    tensors = list(run.model.parameters())
    parts = [(t.to_local() if isinstance(t, DTensor) else t) for t in tensors]
    own = sum(part.numel() * part.element_size() for part in parts)
    return {"peak": most, "shard": own, "largest": max(t.nbytes for t in tensors)}


def cast(folder):
    """Weights of bfloat16 in a model of float32, and the other way round."""
    from safetensors.torch import load_file, save_file

    written("llama", folder, shard_size="5GB")
    file = Path(folder) / "model.safetensors"
    right = load_file(file)
    distributed.barrier()
    if distributed.get_rank() == 0:
        save_file({n: t.bfloat16() for n, t in right.items()}, file)
    distributed.barrier()
    run = fresh("llama", "llama", ["tp=2"])
    run.load(folder)
    got = run.full_state_dict(every_rank=True)
    assert all(t.dtype == torch.float32 for t in got.values())
    up = all(torch.equal(got[n], right[n].bfloat16().float()) for n in right)
    distributed.barrier()
    if distributed.get_rank() == 0:
        save_file(right, file)
    distributed.barrier()
    run = planc.apply(
        on_meta("llama", dtype=torch.bfloat16), "llama", overrides=["tp=2"], device_type="cpu"
    )
    run.load(folder)
    got = run.full_state_dict(every_rank=True)
    return up, all(torch.equal(got[n], right[n].bfloat16()) for n in right)


def everywhere():
    """`slices_of` and `whole_of` for uneven shards of two meshes, laid out by FSDP itself."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    checked = 0
    for sizes in ((2, 2), (4, 1), (1, 4)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        for rows in (1, 2, 3, 5, 7, 9, 16, 33):
            full = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))
            layer = nn.Linear(3, rows, bias=False)
            with torch.no_grad():
                layer.weight.copy_(full)
            if sizes[1] > 1:
                parallelize_module(layer, mesh["tp"], ColwiseParallel())
            fully_shard(layer, mesh=mesh["dp"])
            part = layer.weight.detach()
            rebuilt = torch.full(tuple(part.to_local().shape), 9.0)
            for inner, outer in shards.blocks_of(shards.slices_of(part)):
                rebuilt[inner] = full[outer]
            assert torch.equal(rebuilt, part.to_local()), (sizes, rows)
            assert torch.equal(shards.select_ranges(full, shards.slices_of(part)), part.to_local())
            assert torch.equal(shards.whole_of(part), full), (sizes, rows)
            assert torch.equal(shards.added_up(part), full), (sizes, rows)
            checked += 1
    return checked


def own_buffers(folder):
    """The findings where each rank computes a buffer of its own."""
    from safetensors.torch import save_file
    from torch import nn

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.zeros(4), persistent=False)

        def reset_buffers(self):
            self.scale.fill_(float(distributed.get_rank() == 2))

    if distributed.get_rank() == 0:
        save_file(
            dict(nn.Linear(4, 4).named_parameters(prefix="linear")), f"{folder}/a.safetensors"
        )
    distributed.barrier()
    with torch.device("meta"):
        model = Odd()
    try:
        load_files(model, Path(folder), weights="slices", device="cpu")
    except planc.PlanError as caught:
        assert all(p.is_meta for p in model.parameters())
        return [(d.code, d.message) for d in caught.diagnostics]
    return []


def under_context(folder, plan, family="mixtral"):
    """Tensors that differ from the single process's where a model built on meta is loaded under a
    plan that splits sequences, and the losses of a step of both.
    """
    written(family, folder)
    single = build(family)
    run = planc.apply(on_meta(family), plan, device_type="cpu", require="nothing")
    run.load(folder)
    different = same(run, single)
    tokens, labels = data(single.config.vocab_size)
    rows = slice(run.data_rank * 4 // run.data_size, (run.data_rank + 1) * 4 // run.data_size)
    loss = run.forward_backward([{"input_ids": tokens[rows], "labels": labels[rows]}])
    return different, loss.item(), single(input_ids=tokens, labels=labels).loss.item()


def adapters(folder, stale=False):
    """What `run.load_adapters` raises where rank 2 has a copy of its own."""
    from adapter_jobs import LLAMA
    from adapter_jobs import written as plan_of

    model = planc.apply(build("llama"), plan_of("llama", LLAMA), device_type="cpu")
    model.save_adapters(folder)
    distributed.barrier()
    own = Path(folder)
    if stale and distributed.get_rank() == 2:
        own = Path(folder).with_name("stale")
        shutil.copytree(folder, own)
        (file,) = own.glob("*.safetensors")
        save_file({n: t + 1 for n, t in load_file(file).items()}, file)
    try:
        model.load_adapters(own)
    except planc.PlanError as error:
        return [(d.code, d.message) for d in error.diagnostics]
    tokens, labels = data(128)
    model.forward_backward([{"input_ids": tokens, "labels": labels}])
    return []
