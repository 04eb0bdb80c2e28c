"""What test_saving.py runs: on every rank of the pool, and in processes that die."""

import os
import signal
import sys
import threading
from pathlib import Path

import torch
from loading_jobs import fresh, same
from numerics import BATCH, build, data, error
from torch import distributed
from torch.distributed.tensor import DTensor
from training_jobs import applied

import planc
from planc.runtime.standalone.safetensors_files import tensors_in_folder
from planc.runtime.standalone.shards import plain_name, rank_orders, whole_of

FP32 = ["param_dtype=fp32", "recompute=false"]


def batch(run, seed):
    """This rank's rows of a batch; every rank of a data rank has the same."""
    tokens, labels = data(run.model.config.vocab_size, seed)
    rows = BATCH // run.data_size
    return [t[run.data_rank * rows :][:rows] for t in (tokens, labels)]


def steps(run, optimizer, first, last):
    """The mean loss of each step."""
    losses = []
    for seed in range(first, last):
        tokens, labels = batch(run, seed)
        loss = run.model(input_ids=tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        distributed.all_reduce(mean)
        losses.append(mean.item() / distributed.get_world_size())
    return losses


def made(run, kind="adamw"):
    if kind == "sgd":
        return torch.optim.SGD(run.model.parameters(), lr=0.05, momentum=0.9)
    decayed = [p for p in run.model.parameters() if p.ndim > 1]
    others = [p for p in run.model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3)


def resume(model, old, new, folder, *, changes=None, kind="adamw", meta=True):
    """Losses of six steps without a break, and of three and three with another plan between."""
    plan = model if model in ("gemma3", "gpt2", "phi3", "mixtral") else "llama"
    run = applied(model, plan, old, changes)
    right = steps(run, made(run, kind), 0, 6)
    run = applied(model, plan, old, changes)
    optimizer = made(run, kind)
    losses = steps(run, optimizer, 0, 3)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5  # a schedule's, which must come back with the state
    run.save(folder, optimizer=optimizer, step=3)
    for group in optimizer.param_groups:
        group["lr"] *= 2
    distributed.barrier()
    before = run.full_state_dict(every_rank=True)
    run = fresh(model, plan, new, changes, meta)
    optimizer = made(run, kind)
    step = run.load(folder, optimizer=optimizer)
    after = run.full_state_dict(every_rank=True)
    equal = all(torch.equal(before[n], after[n]) for n in before)
    rates = {group["lr"] for group in optimizer.param_groups}
    for group in optimizer.param_groups:
        group["lr"] *= 2
    losses += steps(run, optimizer, step, 6)
    return {"losses": losses, "right": right, "equal": equal, "step": step, "rates": rates}


class Stateful:
    """Has a value under a name of its own: a place in its data, as a data loader, or a tensor of
    which nobody can tell whose layout it has.
    """

    def __init__(self, mine):
        self.mine = mine

    def state_dict(self):
        return {"mine": self.mine}

    def load_state_dict(self, state):
        self.mine = state["mine"]


def more(folder):
    """What comes back of a schedule and of loaders, under this mesh and another one; and the codes
    of what cannot.
    """

    def others(run, place):
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return schedule, Stateful(place)

    def loaded(settings, *names):
        again = fresh("llama", "llama", [*FP32, *settings])
        schedule, loader = others(again, None)
        extra = {"schedule": schedule, "loader": loader, "unknown": Stateful(None)}
        try:
            again.load(folder, extra={name: extra[name] for name in names})
        except planc.PlanError as error:
            return [(d.code, d.message) for d in error.diagnostics]
        return schedule.last_epoch, loader.mine

    run = applied("llama", "llama", [*FP32, "tp=2"])
    schedule, loader = others(run, 100 + run.data_rank)
    for _ in range(3):
        schedule.step()
    run.save(folder, extra={"schedule": schedule, "loader": loader})
    return {
        "same": loaded(["tp=2"], "schedule", "loader"),
        "right": (3, 100 + run.data_rank),
        "schedule": loaded(["tp=1"], "schedule"),
        "loader": loaded(["tp=1"], "schedule", "loader"),
        "unknown": loaded(["tp=2"], "unknown"),
    }


class Average:
    """An average of the weights: named, as this rank's parts, or in a list as of torch_ema."""

    def __init__(self, model, kind):
        self.kind, self.count = kind, 0
        self.now = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        self.count += 1
        for name, parameter in model.named_parameters():
            self.now[name].lerp_(parameter.detach(), 0.3)

    def state_dict(self):
        now = {n: t.to_local() if self.parts(t) else t for n, t in self.now.items()}
        return {"count": self.count, "now": [*now.values()] if self.kind == "list" else now}

    def parts(self, tensor):
        return self.kind == "parts" and isinstance(tensor, DTensor)

    def load_state_dict(self, state):
        self.count, new = state["count"], state["now"]
        values = new if self.kind == "list" else [new[n] for n in self.now]
        for tensor, value in zip(self.now.values(), values, strict=True):
            (tensor.to_local() if self.parts(tensor) else tensor).copy_(value)


def extras(folder, model, plan, old, new, kinds=("names", "parts", "list")):
    """What goes on after a save with two optimizers, averages of three kinds, and a schedule: the
    weights and averages after four steps, and of a run that did not stop.
    """

    def begin(run):
        few = [p for n, p in run.model.named_parameters() if "norm" in n or n.endswith("bias")]
        rest = [p for p in run.model.parameters() if all(p is not other for other in few)]
        first, second = torch.optim.AdamW(rest, lr=3e-3), torch.optim.SGD(few, 0.5, momentum=0.9)
        second.add_param_group({"params": []})
        more = {kind: Average(run.model, kind) for kind in kinds}
        more |= {"second": second, "schedule": torch.optim.lr_scheduler.StepLR(second, 2)}
        return first, more

    def go_on(run, first, more, start, end):
        for seed in range(start, end):
            steps_of(run, seed, (first, more["second"]))
            more["schedule"].step()
            for kind in kinds:
                more[kind].update(run.model)

    def seen(run, more):
        out = dict(run.full_state_dict(every_rank=True))
        orders = rank_orders(run.model)
        for kind in kinds:
            for path, value in more[kind].now.items():
                name = plain_name(path)
                out[f"{kind} {name}"] = whole_of(value, orders.get(name)).clone()
        return {**out, "lr": torch.tensor(more["second"].param_groups[0]["lr"])}

    def furthest(some, other):
        assert some.keys() <= other.keys()  # a stage has averages of its own weights alone
        return max((some[n] - other[n]).abs().max().item() for n in some)

    run = applied(model, plan, [*FP32, *old])
    first, more = begin(run)
    go_on(run, first, more, 0, 2)
    run.save(folder, optimizer=first, step=2, extra=more)
    before = seen(run, more)
    go_on(run, first, more, 2, 4)
    right = seen(run, more)
    run = fresh(model, plan, [*FP32, *new])
    run.load(folder)  # averages begin from weights
    first, more = begin(run)
    run.load(folder, optimizer=first, extra=more)
    loaded = furthest(before, seen(run, more))
    go_on(run, first, more, 2, 4)
    return loaded, furthest(right, seen(run, more)), more["names"].count


def steps_of(run, seed, optimizers):
    tokens, labels = batch(run, seed)
    run.forward_backward([{"input_ids": tokens, "labels": labels}])
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def nameless(folder):
    """The codes and messages for a part of a tensor under a name of its own."""
    run = applied("llama", "llama", [*FP32, "tp=2", "dp_replicate=2", "dp_shard=1"])
    part = run.model.model.layers[0].mlp.gate_proj.weight.to_local()
    try:
        run.save(folder, extra={"odd": Stateful(part.detach())})
    except planc.PlanError as error:
        return [(d.code, d.message) for d in error.diagnostics], Path(folder).exists()
    return [], True


def names(folder):
    """The keys of a checkpoint, beside those of torch's own flattened state dicts."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
    )

    run = applied("llama-tied", "llama", ["param_dtype=fp32", "tp=2"])
    optimizer = made(run)
    steps(run, optimizer, 0, 1)
    run.save(folder, optimizer=optimizer, step=1)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    torchs = set(get_optimizer_state_dict(run.model, optimizer, options=options))
    stored = set(FileSystemReader(folder).read_metadata().state_dict_metadata)
    own = {k.removeprefix("optimizer.") for k in stored if k.startswith("optimizer.")}
    weights = {k.removeprefix("model.") for k in stored if k.startswith("model.")}
    return sorted(weights), own == torchs, sorted(own ^ torchs)[:4]


def torchs(folder):
    """A checkpoint that torch's own calls wrote, with bare names."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    run = applied("llama", "llama", ["param_dtype=fp32", "tp=2"])
    checkpoint.save(get_model_state_dict(run.model), checkpoint_id=folder)
    other = fresh("llama", "llama", ["param_dtype=fp32", "tp=1"])
    step = other.load(folder)
    return step, same(other, build("llama"))


def untrained(folder):
    """An optimizer without a step yet, saved and loaded, is as it was."""
    run = applied("llama", "llama", FP32)
    right = steps(run, made(run), 0, 2)
    run = applied("llama", "llama", FP32)
    run.save(folder, optimizer=made(run))
    run = fresh("llama", "llama", FP32)
    optimizer = made(run)
    assert run.load(folder, optimizer=optimizer) is None
    return right, steps(run, optimizer, 0, 2)


def refused(folder, what):
    """The findings of a load that does not fit a checkpoint of a llama without an optimizer."""
    run = applied("llama", "llama", FP32)
    if what == "other":
        (Path(folder) / "notes.txt").write_text("mine")
    else:
        run.save(folder, optimizer=made(run, "sgd") if what == "groups" else None)
    distributed.barrier()
    changes = {"intermediate_size": 128} if what == "shapes" else None
    run = fresh("llama", "llama", FP32, changes)
    optimizer = None if what in ("shapes", "other") else made(run)
    if what == "groups":
        optimizer = torch.optim.SGD([*run.model.parameters()][1:])
    if what == "cut":
        distributed.barrier()
        if distributed.get_rank() == 0:
            file = max(Path(folder).glob("*.distcp"))
            file.write_bytes(file.read_bytes()[:-2000])
            file.with_name("__0_0.distcp").unlink()
        distributed.barrier()
    try:
        if what == "other":
            run.save(folder)
        else:
            run.load(folder, optimizer=optimizer if what != "cut" else None)
    except planc.PlanError as caught:
        if what != "other":
            assert all(p.is_meta for p in run.model.parameters()), "half loaded"
        return [(d.code, d.message) for d in caught.diagnostics]
    return "loaded"


def export(model, overrides, folder, *, changes=None, shard_size=100_000):
    """Whether transformers reads bit for bit what was trained for a step; and the logits."""
    import transformers

    own = ("gemma3", "gpt2", "phi3", "mixtral", "qwen3_moe")
    plan = model if model in own else "llama"
    run = applied(model, plan, overrides, changes)
    steps(run, torch.optim.SGD(run.model.parameters(), lr=0.1), 0, 1)
    run.export(folder, shard_size=shard_size)
    right = run.full_state_dict(every_rank=True)
    read, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    got = read.state_dict()
    assert got.keys() == right.keys()
    different = [n for n in right if not torch.equal(got[n], right[n])]
    theirs = f"{folder}-of-transformers"
    build(model, **(changes or {})).save_pretrained(theirs)  # it writes on rank 0
    distributed.barrier()
    stored, hub = ({*tensors_in_folder(Path(f), [])} for f in (folder, theirs))
    tokens, _ = data(run.model.config.vocab_size)
    rows = batch(run, 3)[0]
    with torch.no_grad():
        mine = run.model(input_ids=rows).logits
        theirs = read(input_ids=rows, use_cache=False).logits
    try:
        run.export(folder)
    except planc.PlanError as caught:
        twice = [d.code for d in caught.diagnostics]
    problems = [k for k, v in info.items() if v]
    return {
        "different": different,
        "problems": problems,
        "names": sorted(stored ^ hub),
        "error": error(mine, theirs),
        "files": sorted(p.name for p in Path(folder).iterdir()),
        "twice": twice,
        "cache": read.config.use_cache,
        "tokens": len(tokens),
    }


def in_background(model, old, new, folder, kind):
    """A save in the background, which is written after two more steps; then resumed elsewhere."""
    from planc.runtime.weights import writing

    plan = model if model in ("phi3", "mixtral") else "llama"
    run = applied(model, plan, old)
    optimizer = made(run, kind)
    steps(run, optimizer, 0, 2)
    right = {n: t.clone() for n, t in run.full_state_dict(every_rank=True).items()}
    went_on, write, said = threading.Event(), writing.write, []

    def late(*args, **keywords):
        said.append(went_on.wait(60))
        return write(*args, **keywords)

    writing.write = late
    try:
        run.save(folder, optimizer=optimizer, step=2, asynchronous=True)
        losses = steps(run, optimizer, 2, 4)
        there = Path(folder).exists()
        went_on.set()
        run.finish_save()
    finally:
        writing.write = write
    other = fresh(model, plan, new)
    restored = made(other, kind)
    step = other.load(folder, optimizer=restored)
    got = other.full_state_dict(every_rank=True)
    equal = all(torch.equal(got[n], right[n]) for n in right)
    again = steps(other, restored, 2, 4)
    return {"said": said, "there": there, "step": step, "equal": equal, "losses": (losses, again)}


def background_fails(folder):
    """Codes of what the calls after a failed save raise, and what the folder then holds."""
    from torch.distributed import checkpoint

    run = applied("llama", "llama", FP32)
    optimizer = made(run)
    run.save(folder, optimizer=optimizer, step=1, asynchronous=True)
    run.finish_save()
    write = checkpoint.FileSystemWriter.write_data
    if distributed.get_rank() == 2:

        def full(*_):
            raise OSError(28, "No space left on device")

        checkpoint.FileSystemWriter.write_data = full
    run.save(folder, optimizer=optimizer, step=2, asynchronous=True)
    steps(run, optimizer, 0, 1)
    checkpoint.FileSystemWriter.write_data = write
    codes = []
    for call in (run.save, run.load):
        try:
            codes.append(call(folder, optimizer=optimizer))
        except planc.PlanError as error:
            codes.append([(d.code, d.message) for d in error.diagnostics])
    return codes


def doomed(rank, folder, store, moment):
    """Two ranks save a good checkpoint and then are killed in the midst of another save."""
    from torch.distributed import checkpoint

    distributed.init_process_group(
        "gloo", rank=rank, world_size=2, store=distributed.FileStore(store, 2)
    )
    run = applied("llama", "llama", [*FP32])
    optimizer = made(run)
    steps(run, optimizer, 0, 1)
    run.save(folder, optimizer=optimizer, step=1)
    steps(run, optimizer, 1, 2)

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "writing":  # the files are written, and the metadata that makes them one is not
        checkpoint.FileSystemWriter.finish = die
        if rank == 1:
            write = checkpoint.FileSystemWriter.write_data

            def half(self, plan, planner):
                future = write(self, plan, planner)
                future.wait()
                file = next(Path(self.path).glob("__1_*"))
                file.write_bytes(file.read_bytes()[:1000])
                die()

            checkpoint.FileSystemWriter.write_data = half
    elif moment == "renaming" and rank == 0:  # between the two renames
        rename = Path.rename

        def once(self, target):
            if self.name.endswith(".new"):
                die()
            return rename(self, target)

        Path.rename = once
    print("saving", flush=True)
    for step in range(2, 1000) if moment == "anytime" else ():
        run.save(folder, optimizer=optimizer, step=step)
        print(step, flush=True)
        steps(run, optimizer, step, step + 1)
    for step in range(2, 1000) if moment == "background" else ():
        run.save(folder, optimizer=optimizer, step=step, asynchronous=True)
        if step > 2:
            print(step - 1, flush=True)  # the one before is complete
        steps(run, optimizer, step, step + 1)
    run.save(folder, optimizer=optimizer, step=2)
    print("saved", flush=True)


def survived(folder):
    """What can be loaded after a kill: the step, and whether a second save then works."""
    run = fresh("llama", "llama", FP32)
    optimizer = made(run)
    step = run.load(folder, optimizer=optimizer)
    reference = applied("llama", "llama", FP32)
    ours = made(reference)
    steps(reference, ours, 0, step)
    right = reference.full_state_dict(every_rank=True)
    got = run.full_state_dict(every_rank=True)
    worst = max(error(got[n], right[n]) for n in right)
    losses = steps(run, optimizer, step, step + 1), steps(reference, ours, step, step + 1)
    run.save(folder, optimizer=optimizer, step=7)
    again = run.load(folder, optimizer=optimizer)
    left = sorted(p.name for p in Path(folder).parent.iterdir())
    return {"step": step, "worst": worst, "losses": losses, "again": again, "left": left}


if __name__ == "__main__":
    torch.set_num_threads(1)
    doomed(int(sys.argv[1]), *sys.argv[2:])


def empty_group(folder, overrides):
    """Losses of two steps without a break, and of one and one where a group has no parameters."""

    def begun():
        run = applied("llama", "llama", overrides)
        groups = [{"params": [*run.model.parameters()]}, {"params": [], "weight_decay": 0.5}]
        return run, torch.optim.AdamW(groups, lr=3e-3)

    run, optimizer = begun()
    right = steps(run, optimizer, 0, 2)
    run, optimizer = begun()
    losses = steps(run, optimizer, 0, 1)
    run.save(folder, optimizer=optimizer, step=1)
    run, optimizer = begun()
    step = run.load(folder, optimizer=optimizer)
    return right, losses + steps(run, optimizer, step, 2), optimizer.param_groups[1]["weight_decay"]
