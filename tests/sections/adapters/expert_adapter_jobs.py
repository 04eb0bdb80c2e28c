"""What test_lora_experts runs on every rank: adapters of experts beside peft in one process.

peft before 0.19 takes weights [experts, out, in] for [experts, in, out], so its A and B are in each
other's place there; the values are put where they belong, by hand.
"""

import json
from dataclasses import replace
from pathlib import Path

import adapter_jobs
import numerics
import peft
import torch
from safetensors.torch import load_file, save_file
from torch import distributed

import planc
from planc.ops.lora import Adapt
from planc.ops.tensor_parallel import Parallelize
from planc.runtime.standalone.shards import plain_name

EXPERTS = "    $experts : lora(rank = 3, alpha = 6, init = random)\n"
WITH_ATTENTION = EXPERTS + "    $blocks.self_attn.o_proj : lora(rank = 4, init = random)\n"
SWAPS = tuple(map(int, peft.__version__.split(".")[:2])) < (0, 19)
WEIGHTS = ("gate_up_proj", "down_proj")


def turned(module):
    return getattr(module, "is_transposed", False)


def experts_of(model):
    """The fused experts of a model, by name."""
    return {n: m for n, m in model.named_modules() if n.endswith("mlp.experts") and m._parameters}


def to_peft(a, b, transposed, swaps=SWAPS):
    """Factors [experts, in, rank] and [experts, out, rank] -> peft's two matrices."""
    if swaps and not transposed:
        a, b = b, a
    one = torch.cat([expert.T for expert in a])  # [experts * rank, in]
    return one, torch.stack([*b], -1).flatten(1)  # [out, rank, experts] -> [out, rank * experts]


def from_peft(one, two, experts, transposed):
    """The inverse."""
    a = torch.stack([part.T for part in one.chunk(experts)])
    b = torch.stack([two.unflatten(1, (-1, experts))[..., e] for e in range(experts)])
    return (b, a) if SWAPS and not transposed else (a, b)


def wrapper(name, weight, weights=WEIGHTS):
    """peft's name of the wrapper for a weight: the last one is outermost."""
    return name + ".base_layer" * (len(weights) - 1 - weights.index(weight))


def single(family, start, adapts, **changes):
    """peft's model in this process alone, with the values of a run."""
    model = numerics.build(family, **changes)
    transposed = {name: turned(module) for name, module in experts_of(model).items()}
    own = {}
    for op in adapts:
        if op.parameters:
            ends = [f"mlp.experts.{weight}" for weight in op.parameters]
            config = peft.LoraConfig(
                target_modules=[], target_parameters=ends, r=op.rank, lora_alpha=op.alpha,
                use_rslora=op.rslora,
            )  # fmt: skip
            names = [
                (name, weight, op.parameters) for name in transposed for weight in op.parameters
            ]
        else:
            config = peft.LoraConfig(
                target_modules=op.pattern, r=op.rank, lora_alpha=op.alpha, use_rslora=op.rslora
            )
            names = []
        peft.inject_adapter_in_model(config, model)
        parameters = dict(model.named_parameters())
        for name, weight, weights in names:
            ours = [f"{name}.{weight}_lora_{half}" for half in "AB"]
            where = wrapper(name, weight, weights)
            theirs = [parameters[f"{where}.lora_{half}.default.weight"] for half in "AB"]
            own[tuple(ours)] = (theirs, transposed[name])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if plain_name(name) in start:
                parameter.copy_(start[plain_name(name)])
        for ours, (theirs, whether) in own.items():
            for mine, value in zip(
                theirs, to_peft(*(start[n] for n in ours), whether), strict=True
            ):
                mine.copy_(value)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model, own


def seen(model, own, get):
    """Something of each adapter's parameters in peft's model, by planc's names and shapes."""
    wrapped = {id(p) for theirs, _ in own.values() for p in theirs}
    found = {
        plain_name(n): get(p).clone()
        for n, p in model.named_parameters()
        if "lora_" in n and id(p) not in wrapped
    }
    for ours, ((a, b), whether) in own.items():
        experts = next(iter(experts_of(model).values()), None)
        count = getattr(experts, "num_experts", 4)
        found |= zip(ours, from_peft(get(a), get(b), count, whether), strict=True)
    return found


def compare(family, overrides, body=EXPERTS, broken=None, script=False, changes=None):
    """How far three steps under a plan with adapters on experts are from peft in one process.

    Args:
        broken: a function of this file that makes the plan wrong; or `another expert`.
    """
    changes = changes or {}
    plan = lowered(family, body, overrides, changes)
    if broken in BROKEN:
        plan = plan.map_ops(lambda _: tuple(map(BROKEN[broken], plan.ops)))
    model = numerics.build(family, **changes)
    run = planc.apply(model, plan, device_type="cpu", require="nothing")
    start = run.full_state_dict(every_rank=True)
    adapts = [op for op in plan.ops if isinstance(op, Adapt)]
    right, own = single(family, start, adapts, **changes)
    if broken == "another expert":
        for name, parameter in run.model.named_parameters():
            if "gate_up_proj_lora_A" in name:
                local = getattr(parameter, "_local_tensor", parameter).data
                local.copy_(local.roll(1, 0))
    rows = numerics.BATCH // run.data_size
    mine = slice(run.data_rank * rows, (run.data_rank + 1) * rows)
    errors = {"loss": 0.0, "logits": 0.0, "gradient": 0.0}
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
        for m in (model, right)
    ]
    optimizers[0] = run.optimizer(optimizers[0])
    begun = seen(right, own, lambda p: p.detach())
    for step in range(3):
        tokens, labels = numerics.data(model.config.vocab_size, seed=step)
        output = right(input_ids=tokens, labels=labels, use_cache=False)
        output.loss.backward()
        if step == 0 and plan.pipeline is None:
            with torch.no_grad():
                logits = model(input_ids=tokens[mine], use_cache=False).logits
            errors["logits"] = numerics.error(logits, output.logits[mine].detach())
        loss = run.forward_backward([{"input_ids": tokens[mine], "labels": labels[mine]}])
        errors["loss"] = max(errors["loss"], numerics.error(loss, output.loss.detach()))
        if step == 0:
            wanted = seen(right, own, lambda p: p.grad)
            found = adapter_jobs.gradients(model, alike=False)
            assert found and found.keys() <= wanted.keys(), (sorted(found), sorted(wanted))
            each = {n: numerics.error(g, wanted[n]) for n, g in found.items()}
            errors["gradient"] = max(each.values())
            errors["worst"] = max(each, key=each.get)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    end, after = run.full_state_dict(every_rank=True), seen(right, own, lambda p: p.detach())
    errors["change"] = max(
        ((end[n] - t).norm() / (t - begun[n]).norm()).item() for n, t in after.items()
    )
    for name, value in numerics.build(family, **changes).state_dict().items():
        assert torch.equal(end[name], value), f"{name} is frozen and has changed"
    return errors | {"count": len(after)}


def lowered(family, body, overrides, changes=None):
    path = adapter_jobs.written(family, body)
    try:
        model = numerics.build(family, **(changes or {}))
        return planc.lower(model, path, world_size=4, overrides=overrides)
    finally:
        Path(path).unlink()


# On purpose --------------------------------------------------------------------------------------


def of_factors(change):
    def broken(op):
        if not isinstance(op, Parallelize) or not str(op.modules).endswith("mlp.experts"):
            return op
        layouts = tuple(
            (name, change(layout) if "_lora_" in name else layout)
            for name, layout in op.style.layouts
        )
        layouts = tuple((name, layout) for name, layout in layouts if layout is not None)
        return replace(op, style=replace(op.style, layouts=layouts))

    return broken


BROKEN = {
    "no parts": of_factors(lambda one: replace(one, parts=1)),
    "no sum": of_factors(lambda one: None if str(one) == "replicate" else one),
}


# Files -------------------------------------------------------------------------------------------


def run_of(family, overrides, body):
    plan = lowered(family, body, overrides)
    return planc.apply(numerics.build(family), plan, device_type="cpu", require="nothing")


def files(family, folder, overrides, others, body=WITH_ATTENTION):
    """Adapters out of one plan, read by peft, and back under another plan; and peft's own files.

    Returns:
        (distance of peft's logits, distance of another plan's, the configuration).
    """
    folder = Path(folder)
    run = run_of(family, overrides, body)
    adapter_jobs.stepped(run, run.model)
    run.save_adapters(folder / "ours")
    mine = run.full_state_dict(every_rank=True)
    config = json.loads((folder / "ours" / "adapter_config.json").read_text())
    if distributed.get_rank() == 0 and SWAPS and not any(map(turned, experts(family))):
        rewrite(folder)
    distributed.barrier()
    where = folder / ("before" if (folder / "before").exists() else "ours")
    read = peft.PeftModel.from_pretrained(
        numerics.build(family), where, autocast_adapter_dtype=False
    )
    distances = []
    for source in ("ours", where.name):
        other = run_of(family, others, body)
        other.load_adapters(folder / source)
        again = other.full_state_dict(every_rank=True)
        trained = [n for n in mine if "lora_" in n]
        other_values = [n for n in trained if not torch.equal(again[n], mine[n])]
        assert trained and not other_values, (source, other_values)
        rows = numerics.BATCH // other.data_size
        part = slice(other.data_rank * rows, (other.data_rank + 1) * rows)
        read.eval(), other.model.eval()
        right = adapter_jobs.logits(read)[part]
        distances.append(numerics.error(adapter_jobs.logits(other.model, part), right))
    return max(distances), config


def experts(family):
    return experts_of(numerics.build(family)).values()


def rewrite(folder):
    """The files as peft before 0.19 writes them: A and B of experts in each other's place."""
    (folder / "before").mkdir()
    config = json.loads((folder / "ours" / "adapter_config.json").read_text())
    assert config["peft_version"] == "0.19.0"
    config["peft_version"] = peft.__version__
    (folder / "before" / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "ours" / "adapter_model.safetensors")
    for name in [n for n in tensors if ".experts" in n and n.endswith("lora_A.weight")]:
        other = name.replace("lora_A", "lora_B")
        patterns = config["rank_pattern"].items()
        rank = next((r for p, r in patterns if "experts" in p), config["r"])
        count = len(tensors[name]) // rank
        a = torch.stack([part.T for part in tensors[name].chunk(count)])
        two = tensors[other].unflatten(1, (-1, count))
        b = torch.stack([two[..., e] for e in range(count)])
        swapped = to_peft(a, b, False, swaps=True)
        tensors[name], tensors[other] = (t.contiguous() for t in swapped)
    save_file(tensors, folder / "before" / "adapter_model.safetensors", metadata={"format": "pt"})


def merged(family, folder, overrides):
    """An export with adapters merged: its logits are those with adapters; peft's merge agrees."""
    from transformers import AutoModelForCausalLM

    run = run_of(family, overrides, EXPERTS)
    adapter_jobs.stepped(run, run.model)
    run.export(folder, adapters="merged")
    adapts = [op for op in run.lowered.ops if isinstance(op, Adapt)]
    right, _ = single(family, run.full_state_dict(every_rank=True), adapts)
    read = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    plain = numerics.build(family)
    ours, theirs, base = (adapter_jobs.logits(m.eval()) for m in (read, right, plain))
    return numerics.error(ours, theirs), numerics.error(ours, base)


def resumed(family, folder, overrides, others):
    """A checkpoint goes on under another plan, and trains on as the first run does."""
    run = run_of(family, overrides, EXPERTS)
    optimizer = adapter_jobs.stepped(run, run.model)
    run.save(folder, optimizer=optimizer, step=1)
    other = run_of(family, others, EXPERTS)
    second = torch.optim.AdamW([p for p in other.model.parameters() if p.requires_grad], lr=0.05)
    assert other.load(folder, optimizer=second) == 1
    ends = []
    for one, stepping in ((run, optimizer), (other, second)):
        rows = numerics.BATCH // one.data_size
        mine = slice(one.data_rank * rows, (one.data_rank + 1) * rows)
        tokens, labels = numerics.data(one.model.config.vocab_size, seed=5)
        one.forward_backward([{"input_ids": tokens[mine], "labels": labels[mine]}])
        stepping.step()
        ends.append(one.full_state_dict(every_rank=True))
    return max(numerics.error(ends[1][n], ends[0][n]) for n in ends[0] if "lora_" in n)


def begins(folder, overrides, others):
    """Whether adapters begin with the same values under two plans, and from meta."""
    run = run_of("mixtral", overrides, EXPERTS)
    mine = run.full_state_dict(every_rank=True)
    two = run_of("mixtral", others, EXPERTS).full_state_dict(every_rank=True)
    if distributed.get_rank() == 0:
        numerics.build("mixtral").save_pretrained(folder)
    distributed.barrier()
    with torch.device("meta"):
        model = type(run.model)(run.model.config)
    plan = lowered("mixtral", EXPERTS, overrides)
    meta = planc.apply(model, plan, device_type="cpu", require="nothing")
    meta.load(folder)
    three = meta.full_state_dict(every_rank=True)
    assert mine.keys() == two.keys() == three.keys()
    return tuple(all(torch.equal(mine[n], other[n]) for n in mine) for other in (two, three))


def refused(folder, overrides):
    """The codes of files that do not fit: another rank, another scale, other weights."""
    run_of("mixtral", overrides, EXPERTS).save_adapters(folder)
    codes = []
    for body in (
        EXPERTS.replace("rank = 3, alpha = 6", "rank = 4, alpha = 8"),
        EXPERTS.replace("alpha = 6", "alpha = 6, rslora = true"),
        EXPERTS.replace("init", "parameters = down_proj, init"),
    ):
        other = run_of("mixtral", overrides, body)
        before = other.full_state_dict(every_rank=True)
        try:
            other.load_adapters(folder)
        except planc.PlanError as error:
            after = other.full_state_dict(every_rank=True)
            assert all(torch.equal(before[n], after[n]) for n in before)
            codes += sorted({d.code for d in error.diagnostics})
    return codes


def scripted(family, overrides):
    """Whether a script that is written of a plan computes the same as it, bit for bit."""
    plan, found = lowered(family, WITH_ATTENTION, overrides), []
    for make in (numerics.by_planc, numerics.by_script):
        model = numerics.build(family)
        rank, size = make(model, plan)
        rows = numerics.BATCH // size
        mine = slice(rank * rows, (rank + 1) * rows)
        tokens, labels = numerics.data(model.config.vocab_size)
        output = model(input_ids=tokens[mine], labels=labels[mine])
        output.loss.backward()
        found.append(
            numerics.bits(output.logits, output.loss, *adapter_jobs.gradients(model).values())
        )
    return found[0] == found[1]
