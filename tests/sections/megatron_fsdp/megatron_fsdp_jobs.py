"""What test_megatron_fsdp.py runs on every rank."""

import contextlib
from pathlib import Path

import torch
from fake_cuda import without_cuda
from numerics import BATCH, MODELS, build, data, error
from torch import distributed
from torch.distributed.tensor import DTensor

import planc
from planc.emit.python.script import render

STEPS = 3


def optimizer_of(model, kind):
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1)
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def steps(model, optimizer, rows, passes, clip, no_sync=None):
    """The losses and norms of some steps, each of several passes over some rows of the batch."""
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for part in range(passes):
            tokens, labels = (t[rows] for t in data(model.config.vocab_size, step * passes + part))
            quiet = no_sync() if no_sync and part < passes - 1 else torch.enable_grad()
            with quiet:
                loss = model(input_ids=tokens, labels=labels, use_cache=False).loss / passes
                loss.backward()
            total += loss.item()
        norms.append(float(clip(0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


def train(model, plan, overrides=(), changes=None, passes=1, kind="sgd"):
    """The largest errors of losses, norms and final weights against one process."""
    single = build(model, **(changes or {}))
    own = optimizer_of(single, kind)
    clip = torch.nn.utils.clip_grad_norm_
    right = steps(single, own, slice(None), passes, lambda most: clip(single.parameters(), most))
    with without_cuda():
        made = build(model, **(changes or {}))
        run = planc.apply(made, plan, overrides=list(overrides), device_type="cpu")
        optimizer = run.optimizer(optimizer_of(made, kind))
        count = BATCH // run.data_size
        rows = slice(run.data_rank * count, (run.data_rank + 1) * count)
        losses, norms = steps(made, optimizer, rows, passes, run.clip_grad_norm_, run.no_sync)
        full = run.full_state_dict(every_rank=True)
    mesh = run.meshes["dp"]
    every = torch.tensor(losses)
    torch.distributed.all_reduce(every, group=mesh.get_group())
    every /= mesh.size()
    wanted = single.state_dict()
    return {
        "losses": max(abs(a - b) for a, b in zip(every.tolist(), right[0], strict=True)),
        "norms": max(abs(a - b) / b for a, b in zip(norms, right[1], strict=True)),
        "weights": max(error(full[name], value) for name, value in wanted.items()),
        "names": sorted(full) == sorted(wanted),
    }


def beside(model, plan, overrides=(), changes=None, dtype=None, passes=1):
    """The same errors against torch's FSDP under the same plan."""
    found = []
    for backend in ("torch", "megatron"):
        lines = Path(plan).read_text().splitlines(keepends=True)
        if backend == "torch":
            lines = [li for li in lines if not li.strip().startswith(("backend", "strategy"))]
        own = Path(plan).with_suffix(f".{distributed.get_rank()}.{backend}")
        own.write_text("".join(lines))
        with without_cuda() if backend == "megatron" else contextlib.nullcontext():
            made = build(model, **(changes or {}))
            if dtype:  # the same rounded values on both sides
                made = made.to(getattr(torch, dtype))
                made = made.float() if backend == "torch" else made
            run = planc.apply(made, str(own), overrides=list(overrides), device_type="cpu")
            optimizer = run.optimizer(optimizer_of(made, "adamw"))
            count = BATCH // run.data_size
            rows = slice(run.data_rank * count, (run.data_rank + 1) * count)
            losses, norms = steps(made, optimizer, rows, passes, run.clip_grad_norm_, run.no_sync)
            found.append((losses, norms, run.full_state_dict(every_rank=True)))
    (right, lengths, wanted), (losses, norms, full) = found
    return {
        "losses": max(abs(a - b) for a, b in zip(losses, right, strict=True)),
        "norms": max(abs(a - b) / b for a, b in zip(norms, lengths, strict=True)),
        "weights": max(error(full[name].float(), value.float()) for name, value in wanted.items()),
        "names": sorted(full) == sorted(wanted),
    }


def script(plan, overrides):
    """Whether the emitted Python trains bit for bit as `apply` does."""
    tokens, labels = data(MODELS["llama"]["vocab_size"])
    rows = slice(distributed.get_rank(), distributed.get_rank() + 1)
    ends = []
    with without_cuda():
        first, second = build("llama"), build("llama")
        run = planc.apply(first, plan, overrides=overrides, device_type="cpu")
        space = {}
        exec(render(run.lowered, digest=run.digest), space)
        space["parallelize"](second, space["build_mesh"]("cpu"))
        for model, ready in ((first, run.optimizer), (second, space["prepare_optimizer"])):
            optimizer = ready(optimizer_of(model, "adamw"))
            for _ in range(STEPS):
                model(input_ids=tokens[rows], labels=labels[rows], use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append([p.to_local().clone() for p in model.parameters()])
    return all(torch.equal(one, two) for one, two in zip(*ends, strict=True))


def refused(plan):
    """What comes of what a run cannot do: the code of the error, or a piece of its text."""
    found = {}
    tokens, labels = (t[:1] for t in data(MODELS["llama"]["vocab_size"]))
    with without_cuda():
        model = build("llama")
        run = planc.apply(model, plan, device_type="cpu")
        calls = {
            "unshard": run.unshard,
            "again": lambda: planc.apply(model, plan, device_type="cpu"),
        }
        for name, call in calls.items():
            try:
                call()
            except planc.PlanError as error:
                found[name] = error.diagnostics[0].code
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            said = "pass it to planc's `run.optimizer`"
            found["step"] = said if said in str(error) else str(error)
    return found


def losses_of(model, optimizer, first, rows):
    """The losses of two steps, from a number on."""
    found = []
    for step in (first, first + 1):
        tokens, labels = (t[rows] for t in data(model.config.vocab_size, step))
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return torch.tensor(found)


def by_one():
    """A model of one process after four steps, and the losses of all."""
    single = build("llama")
    own = optimizer_of(single, "adamw")
    losses = [losses_of(single, own, first, slice(None)) for first in (0, 2)]
    return single, losses


def applied(plan):
    made = build("llama")
    run = planc.apply(made, plan, device_type="cpu")
    return made, run, run.optimizer(optimizer_of(made, "adamw"))


def behind(losses, right):
    """How far the mean of all ranks' losses is off."""
    distributed.all_reduce(losses)
    return (losses / distributed.get_world_size() - right).abs().max().item()


def begin(plan, folder):
    _, (right, _) = by_one()
    rank = distributed.get_rank()
    with without_cuda():
        made, run, optimizer = applied(plan)
        losses = losses_of(made, optimizer, 0, slice(rank, rank + 1))
        run.save(folder, optimizer=optimizer, step=2)
    return {"error": behind(losses, right)}


def resume(plan, folder):
    single, (_, right) = by_one()
    rank = distributed.get_rank()
    with without_cuda():
        made, run, optimizer = applied(plan)
        with torch.no_grad():
            for parameter in made.parameters():  # what is not read would show
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).fill_(7.0)
        step = run.load(folder, optimizer=optimizer)
        losses = losses_of(made, optimizer, 2, slice(rank, rank + 1))
        full = run.full_state_dict(every_rank=True)
    wanted = single.state_dict()
    return {
        "step": step,
        "error": behind(losses, right),
        "weights": max(error(full[name], value) for name, value in wanted.items()),
    }


def files(plan, folder):
    """Whether weights are those of the files after `run.load`, and again after `run.export`."""
    right = build("llama")
    with torch.no_grad():
        for number, parameter in enumerate(right.parameters()):
            parameter.add_(number / 100)
    if distributed.get_rank() == 0:
        right.save_pretrained(folder)
    distributed.barrier()
    with without_cuda():
        made = build("llama")
        run = planc.apply(made, plan, device_type="cpu")
        run.load(folder)
        full = run.full_state_dict(every_rank=True)
        run.export(f"{folder}.new")
        tokens, _ = data(made.config.vocab_size)
        with torch.no_grad():
            logits = made(input_ids=tokens).logits
    distributed.barrier()
    again = type(right).from_pretrained(f"{folder}.new", attn_implementation="eager").state_dict()
    wanted = right.state_dict()
    with torch.no_grad():
        close = torch.equal(logits, right.train()(input_ids=tokens).logits)
    return {
        "loaded": all(torch.equal(full[n], v) for n, v in wanted.items()),
        "exported": all(torch.equal(again[n], v) for n, v in wanted.items()),
        "logits": close,
    }
