"""What test_adapting runs on every rank: a plan with adapters beside peft in one process."""

import os
import re
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numerics
import torch
from torch import distributed
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor

import planc
from planc.ops.load import Load
from planc.ops.lora import MAGNITUDE
from planc.ops.pipeline import Pipeline
from planc.ops.tensor_parallel import Parallelize
from planc.runtime.standalone.shards import (
    in_own_order,
    is_adapter,
    named_tensors,
    plain_name,
    rank_orders,
)
from planc.simulate.random_numbers import Recorded, Replayed

PLAN = """plan tuned for {family}, qwen2

extend "{family}.plan"

adapters {{
{body}
}}
"""
LLAMA = """
    $blocks.self_attn.{q,k,v,o}_proj : lora(rank = 4, alpha = 8, init = random)
    $blocks.mlp.{gate,up,down}_proj  : lora(rank = 6, init = random)
    lm_head                         : lora(rank = 3, init = random)
"""
DORA = LLAMA.replace("init = random", "init = random, dora = true")
TARGETS = (  # by hand: what the rules above say, in peft's words, one call each
    (r"model\.layers\.\d\.self_attn\.[qkvo]_proj", 4, 8),
    (r"model\.layers\.\d\.mlp\.(gate|up|down)_proj", 6, 6),
    ("lm_head", 3, 3),
)


def single(family, targets=TARGETS, init=False, first=0, **config):
    """The model with peft's adapters, in this process alone.

    Args:
        config: of all, beside rank and alpha: `use_dora`, whose magnitudes begin as random as the
            factors, `use_rslora`, `lora_dropout`.
    """
    model = numerics.build(family)
    for seed, (pattern, rank, alpha) in enumerate(targets, first):
        own = {"r": rank, "lora_alpha": alpha, "init_lora_weights": init, **config}
        numerics.inject(model, pattern, seed, **own)
        for name, parameter in model.named_parameters() if init is False else ():
            if re.fullmatch(rf"({pattern})\.lora_magnitude_vector\..*", name):
                generator = torch.Generator().manual_seed((seed << 32) + crc32(name.encode()))
                factors = torch.rand(parameter.shape, generator=generator) + 0.5
                parameter.data *= factors
    return model


def config_of(body):
    """What some rules say beside rank and alpha, in peft's words."""
    dropout = re.search(r"dropout = ([0-9.]+)", body)
    return {
        "use_dora": "dora = true" in body,
        "use_rslora": "rslora = true" in body,
        "lora_dropout": float(dropout[1]) if dropout else 0.0,
    }


def written(family, body):
    """A plan of these adapters over the family's, as a file of this rank's own."""
    path = Path(f"/tmp/planc-adapters-{os.getpid()}.plan")
    path.write_text(PLAN.format(family=PLANS.get(family, family), body=body))
    return str(path)


def lowered(family, body, overrides):
    path = written(family, body)
    try:
        return planc.lower(numerics.build(family), path, world_size=4, overrides=overrides)
    finally:
        Path(path).unlink()


def compare(
    overrides, family="llama", body=LLAMA, targets=TARGETS, script=False, restyle=None, seed=0
):
    """How far a plan with adapters is from peft in one process, on this rank.

    Args:
        restyle: (the end of a path, a style of planc's, or None for none at all), to break one
            derived style on purpose.
    """
    right_model = single(family, targets, first=seed, **config_of(body))
    tokens, labels = numerics.data(right_model.config.vocab_size)
    plan = lowered(family, body, overrides)
    if restyle:
        plan = plan.map_ops(lambda _: tuple(restyled(plan.ops, *restyle)))
    model = numerics.build(family)
    torch.manual_seed(7 + distributed.get_rank())
    rank, size = (numerics.by_script if script else numerics.by_planc)(model, plan)
    rows = numerics.BATCH // size
    mine = slice(rank * rows, (rank + 1) * rows)
    with Recorded() as recorded:
        output = model(input_ids=tokens[mine], labels=labels[mine])
    output.loss.backward()
    drawn = [None] * distributed.get_world_size()
    distributed.all_gather_object(drawn, recorded.drawn)
    assert any(drawn) == ("dropout" in body)
    with Replayed(of_all_rows(drawn, size), lambda: ("", "")) as replayed:
        right = right_model(input_ids=tokens, labels=labels, use_cache=False)
    right.loss.backward()
    compared = differences(model, output, right_model, right, mine)
    reference = [p.grad for p in right_model.parameters() if p.requires_grad]
    assert all(g.abs().max() > 0 for g in reference), "a gradient that says nothing"
    return {**compared, "unlike": sorted({one.problem for one in replayed.different_draws})}


def differences(model, output, right_model, right, mine):
    """How far a rank's logits, loss and gradients are from those of one process.

    Args:
        mine: the rank's rows of the whole batch.
    """
    loss = numerics.whole(output.loss).clone()
    distributed.all_reduce(loss)
    loss /= distributed.get_world_size()
    reference = {n: p.grad for n, p in right_model.named_parameters() if p.requires_grad}
    computed = gradients(model)
    assert computed.keys() == reference.keys()
    errors = {n: numerics.error(g, reference[n]) for n, g in computed.items()}
    worst = max(errors, key=errors.get)
    return {
        "logits": numerics.error(output.logits, right.logits[mine].detach()),
        "loss": numerics.error(loss, right.loss.detach()),
        "gradient": errors[worst],
        "worst": worst,
        "count": len(errors),
        "bits": numerics.bits(output.logits, loss, *computed.values()),
    }


def of_all_rows(drawn, size):
    """What ranks drew, those of other rows joined: one list for each rank of the same rows."""
    ranks = len(drawn) // size
    return [
        [torch.cat(parts) for parts in zip(*drawn[first::ranks], strict=True)]
        for first in range(ranks)
    ]


def gradients(model, alike=True):
    """Whole gradients of what is trained; nothing else has one. All ranks have the same ones, but
    in stages, and where a test breaks them (`alike=False`).
    """
    found, order = {}, rank_orders(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, f"{name} is frozen and has a gradient"
            continue
        grad = parameter.grad
        assert grad is not None, f"{name} has no gradient"
        partial = isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)
        assert not partial, f"the gradient of {name} is a part of a sum"
        if alike:
            same(grad, name)
        plain = plain_name(name)
        found[plain] = in_own_order(numerics.whole(grad), order.get(plain))
    return found


def same(grad, name):
    """What is whole on the ranks of tp is the same there, bit for bit."""
    full = numerics.whole(grad).contiguous()
    everyone = [torch.empty_like(full) for _ in range(distributed.get_world_size())]
    distributed.all_gather(everyone, full)
    assert all(torch.equal(other, full) for other in everyone), f"{name} differs between ranks"


def restyled(ops, end, style):
    met = False
    for op in ops:
        if isinstance(op, Parallelize) and str(op.modules).endswith(end):
            met = True
            if style is not None:
                yield replace(op, style=style)
        else:
            yield op
    assert met, f"nothing is named {end}"


# Files -------------------------------------------------------------------------------------------


def stepped(run, model):
    """One step of training, so that no adapter is as it began."""
    tokens, labels = numerics.data(model.config.vocab_size)
    rows = numerics.BATCH // run.data_size
    mine = slice(run.data_rank * rows, (run.data_rank + 1) * rows)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    run.forward_backward([{"input_ids": tokens[mine], "labels": labels[mine]}])
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def logits(model, rows=slice(None)):
    tokens, _ = numerics.data(model.config.vocab_size)
    with torch.no_grad():
        return numerics.whole(model(input_ids=tokens[rows], use_cache=False).logits)


def applied(overrides, family="llama", body=LLAMA, meta=False, model=None):
    plan = lowered(family, body, overrides)
    model = model or numerics.build(family)
    if meta:
        with torch.device("meta"):
            model = type(model)(model.config)
    return planc.apply(model, plan, device_type="cpu")


def begins(overrides, body=LLAMA, count=30):
    """Whether adapters begin with the values that peft draws in one process, layer by layer."""
    mine = applied(overrides, body=body).full_state_dict(every_rank=True)
    peft = single("llama", init=body.count("init = random") == 0, **config_of(body))
    right = {plain_name(n): t for n, t in peft.state_dict().items()}
    assert mine.keys() == right.keys() and sum("lora_" in n for n in mine) == count
    return all(torch.equal(mine[n], right[n]) for n in mine)


def saved(folder, overrides, others, named="qwen2"):
    """Adapters out of one plan: peft reads them, and so does another plan; bit for bit."""
    from peft import PeftModel

    family, body, _ = CASES[named]
    run = applied(overrides, family, body)
    stepped(run, run.model)
    run.save_adapters(folder)
    mine = run.full_state_dict(every_rank=True)
    trained = {n: t for n, t in mine.items() if ".lora_" in n}
    assert trained and not any("base_layer" in n for n in mine)
    read = PeftModel.from_pretrained(numerics.build(family), folder, autocast_adapter_dtype=False)
    theirs = {
        n.removeprefix("base_model.model."): p for n, p in read.named_parameters() if ".lora_" in n
    }
    if "train {" in body:  # what peft calls modules to save
        beside = [n for n in mine if n.startswith(("model.norm", "model.embed_tokens"))]
        trained |= {n: mine[n] for n in beside}
        for name, parameter in read.named_parameters():
            if ".modules_to_save." in name:
                plain = name.replace(".modules_to_save.default", "")
                theirs[plain.removeprefix("base_model.model.")] = parameter
    assert theirs.keys() == trained.keys()
    assert all(torch.equal(theirs[n], trained[n]) for n in trained)
    other = applied(others, family, body)
    other.load_adapters(folder)
    again = other.full_state_dict(every_rank=True)
    assert all(torch.equal(again[n], trained[n]) for n in trained)
    rows = numerics.BATCH // other.data_size
    part = slice(other.data_rank * rows, (other.data_rank + 1) * rows)
    read.eval(), other.model.eval()
    staged = other.lowered.has(Pipeline)  # a rank has no logits
    return {
        "logits": 0 if staged else numerics.error(logits(other.model, part), logits(read)[part]),
        "files": sorted(p.name for p in Path(folder).iterdir()),
        "config": (Path(folder) / "adapter_config.json").read_text(),
    }


def merged(folder, overrides, body=LLAMA):
    """An export with adapters merged is what peft's merge gives, bit for bit; with DoRA, which adds
    what it changes, but for rounding.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = applied(overrides, body=body)
    stepped(run, run.model)
    run.save_adapters(f"{folder}/adapters")
    try:
        run.export(f"{folder}/not")
        raise AssertionError("an export said nothing of adapters")
    except planc.PlanError as error:
        assert [d.code for d in error.diagnostics] == ["PL189"]
    run.export(f"{folder}/merged", adapters="merged")
    run.export(f"{folder}/base", adapters="left_out")
    peft = PeftModel.from_pretrained(numerics.build("llama"), f"{folder}/adapters")
    right = peft.merge_and_unload().state_dict()
    read = AutoModelForCausalLM.from_pretrained(f"{folder}/merged").state_dict()
    base = AutoModelForCausalLM.from_pretrained(f"{folder}/base").state_dict()
    plain = numerics.build("llama").state_dict()
    assert read.keys() == right.keys() == base.keys()
    different = [n for n in right if not torch.equal(right[n], plain[n])]
    assert len(different) == 15
    least = 1e-6 if "dora" in body else 0
    assert not [n for n in right if numerics.error(read[n], right[n]) > least]
    assert all(torch.equal(base[n], plain[n]) for n in plain)


def from_meta(folder, overrides, weights, body=LLAMA):
    """A model on meta takes the base weights from files; its adapters begin as on the CPU."""
    body = body.replace("init = random", "init = gaussian", 1)
    run = applied(overrides, body=body)
    if distributed.get_rank() == 0 and not Path(folder).exists():
        numerics.build("llama").save_pretrained(folder)
    distributed.barrier()
    other = applied(overrides, body=body, meta=True)
    other.load(folder, weights=weights)
    one, two = (r.full_state_dict(every_rank=True) for r in (run, other))
    assert one.keys() == two.keys()
    return all(torch.equal(one[n], two[n]) for n in one)


def script_from_meta(folder, overrides, weights, body=None, changes=None, broken=None):
    """(what a script's load_weights makes otherwise than apply, its error), of a model on meta."""
    from planc.emit.python.script import render

    body, changes = body or LLAMA.replace("init = random", "init = gaussian", 1), changes or {}
    path = written("llama", f"{body}}}\nload {{\n    weights = {weights}\n    init = meta\n")
    try:
        plan = planc.lower(
            numerics.build("llama", **changes), path, world_size=4, overrides=overrides
        )
    finally:
        Path(path).unlink()
    usual = tuple(op for op in plan.ops if not isinstance(op, Load))
    run = planc.apply(
        numerics.build("llama", **changes), plan.map_ops(lambda _: usual), device_type="cpu"
    )
    if distributed.get_rank() == 0:
        numerics.build("llama", **(broken or changes)).save_pretrained(folder)
    distributed.barrier()
    space = {}
    exec(compile(render(plan, digest="0" * 64), "emitted.py", "exec"), space)
    with torch.device("meta"):
        made = type(run.model)(run.model.config)
    space["parallelize"](made, space["build_mesh"]("cpu"))
    try:
        space["load_weights"](made, folder, "cpu")
    except ValueError as error:
        return [], str(error)
    one, two = (
        {n: p.to_local() if isinstance(p, DTensor) else p for n, p in m.named_parameters()}
        for m in (run.model, made)
    )
    assert one.keys() == two.keys()
    bits = [
        n for n in one if not torch.equal(*(t.detach().view(torch.uint8) for t in (one[n], two[n])))
    ]
    rows = slice(run.data_rank, run.data_rank + 1)
    same = torch.equal(logits(run.model.train(), rows), logits(made.train(), rows))
    return bits if same else [*bits, "logits"], ""


def other_base(folder, overrides, body):
    """What base weights that are loaded over others make of magnitudes that no file gave, and of
    those that one gave: those of a plan applied to the model with them, and none.
    """
    run, right = (applied(overrides, body=body, model=m) for m in (None, changed_base()))
    if distributed.get_rank() == 0:
        changed_base().save_pretrained(f"{folder}/base")
    distributed.barrier()
    run.load(f"{folder}/base")
    mine, new = (r.full_state_dict(every_rank=True) for r in (run, right))
    fresh = all(torch.equal(mine[n], new[n]) for n in new)
    stepped(run, run.model)
    run.save_adapters(f"{folder}/adapters")
    again = applied(overrides, body=body)
    before = again.full_state_dict(every_rank=True)
    again.load_adapters(f"{folder}/adapters")
    again.load(f"{folder}/base")
    kept, saved = (r.full_state_dict(every_rank=True) for r in (again, run))
    changed = any(not torch.equal(kept[n], before[n]) for n in kept if MAGNITUDE in n)
    return fresh, changed and all(torch.equal(kept[n], saved[n]) for n in saved)


def trained(overrides, named):
    """How far parameters are from those of peft in one process after two steps of AdamW."""
    family, body, targets = CASES[named]
    run, right = applied(overrides, family, body), single(family, targets, **config_of(body))
    tokens, labels = numerics.data(right.config.vocab_size)
    rows = numerics.BATCH // run.data_size
    mine = slice(run.data_rank * rows, (run.data_rank + 1) * rows)
    # where a gradient is 0 but for rounding, AdamW steps by its sign; not with so large an eps
    one, two = (
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01, eps=1e-3)
        for m in (run.model, right)
    )
    for _ in range(2):
        run.forward_backward([{"input_ids": tokens[mine], "labels": labels[mine]}])
        right(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
    found = run.full_state_dict(every_rank=True)
    wanted = {plain_name(n): t for n, t in right.state_dict().items()}
    assert found.keys() == wanted.keys()
    return max(numerics.error(found[n], wanted[n]) for n in found)


def resumed(folder, overrides, others, body=LLAMA):
    """A checkpoint under one plan goes on under another, optimizer and adapters included."""
    run = applied(overrides, body=body)
    optimizer = stepped(run, run.model)
    run.save(folder, optimizer=optimizer, step=1)
    mine = run.full_state_dict(every_rank=True)
    other = applied(others, body=body)
    second = torch.optim.AdamW([p for p in other.model.parameters() if p.requires_grad], lr=0.05)
    assert other.load(folder, optimizer=second) == 1
    again = other.full_state_dict(every_rank=True)
    assert all(torch.equal(mine[n], again[n]) for n in mine)
    return len(second.state)


def without_base(folder, overrides, others, body=LLAMA):
    """A checkpoint without the base model goes on under another plan, from its folder; and the
    findings of one that cannot.
    """
    base, folder = Path(folder) / "base", Path(folder) / "run"
    run = applied(overrides, body=body)
    if distributed.get_rank() == 0:
        numerics.build("llama").save_pretrained(base)
    optimizer = stepped(run, run.model)
    run.save(folder, optimizer=optimizer, step=1, frozen=False)
    kept = FileSystemReader(folder).read_metadata().state_dict_metadata
    stored = sorted(n.removeprefix("model.") for n in kept if n.startswith("model."))
    assert stored and all(map(is_adapter, stored))
    mine, found = run.full_state_dict(every_rank=True), []
    for how in ({"meta": True}, {"model": changed_base()}):
        other = applied(others, body=body, **how)
        before = [p.is_meta or numerics.whole(p).clone() for p in other.model.parameters()]
        try:
            other.load(folder)
        except planc.PlanError as error:
            found += [(d.code, d.message) for d in error.diagnostics]
        after = [p.is_meta or numerics.whole(p) for p in other.model.parameters()]
        assert all(a is b or torch.equal(a, b) for a, b in zip(before, after, strict=True))
    other = applied(others, body=body, meta=True)
    second = torch.optim.AdamW([p for p in other.model.parameters() if p.requires_grad], lr=0.05)
    other.load(base)
    assert other.load(folder, optimizer=second) == 1
    again = other.full_state_dict(every_rank=True)
    assert mine.keys() == again.keys() and all(torch.equal(mine[n], again[n]) for n in mine)
    return found


def changed_base():
    """The base model with two values of one frozen weight in each other's places."""
    model = numerics.build("llama")
    with torch.no_grad():
        rows = model.model.layers[1].mlp.up_proj.weight
        rows[[0, 5], 3] = rows[[5, 0], 3]
    return model


def a_script_froze(folder):
    """What a script froze after it was trained is in a checkpoint without frozen weights."""
    run = planc.apply(numerics.build("llama"), "llama", overrides=["tp=2"], device_type="cpu")
    run.model.model.norm.requires_grad_(False)
    run.save(folder, frozen=False)
    kept = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {n.removeprefix("model.") for n in kept} == {n for n, _ in named_tensors(run.model)}


def refused(folder, overrides):
    """What does not fit is said on every rank, and nothing is loaded."""
    run = applied(overrides)
    run.save_adapters(folder)
    codes = []
    bodies = (
        LLAMA.replace("alpha = 8", "alpha = 9"),
        LLAMA.replace("rank = 6", "rank = 5"),
        LLAMA.replace("{q,k,v,o}", "{q,k,v}"),
    )
    for body in bodies:
        other = applied(overrides, body=body)
        before = other.full_state_dict(every_rank=True)
        try:
            other.load_adapters(folder)
        except planc.PlanError as error:
            after = other.full_state_dict(every_rank=True)
            assert all(torch.equal(before[n], after[n]) for n in before)
            codes.append(sorted({d.code for d in error.diagnostics}))
    try:
        planc.apply(numerics.build("llama"), "llama", device_type="cpu").save_adapters(folder)
    except planc.PlanError as error:
        codes.append([d.code for d in error.diagnostics])
    return codes


def both(folder, overrides):
    body = LLAMA + "}\ntrain {\n    lm_head : trainable\n"
    try:
        applied(overrides, body=body).save_adapters(folder)
    except planc.PlanError as error:
        return [d.code for d in error.diagnostics]


def unsaved(folder, overrides, named):
    """The findings of saving adapters of a case."""
    family, body, _ = CASES[named]
    try:
        applied(overrides, family, body).save_adapters(folder)
    except planc.PlanError as error:
        return [d.code for d in error.diagnostics]


def dropped(overrides):
    """(what dropout changes, whether checkpointing changes nothing, eval's distance from peft)."""
    rule = "$blocks.{self_attn.o_proj,mlp.down_proj} : lora(rank = 4, init = random, dropout = 0.5)"
    found = []
    for checkpointing in ("true", "false"):
        run = applied([*overrides, f"recompute={checkpointing}"], body=rule)
        rows = slice(run.data_rank, run.data_rank + 1)
        tokens, labels = numerics.data(run.model.config.vocab_size)
        torch.manual_seed(7 + distributed.get_rank())
        output = run.model(input_ids=tokens[rows], labels=labels[rows])
        output.loss.backward()
        grads = {
            n: numerics.whole(p.grad) for n, p in run.model.named_parameters() if p.requires_grad
        }
        found.append((numerics.whole(output.logits), {plain_name(n): g for n, g in grads.items()}))
    (one, first), (two, second) = found
    alike = torch.equal(one, two) and all(torch.equal(first[n], second[n]) for n in first)
    run.model.eval()
    calm = logits(run.model, rows)
    targets = ((r"model\.layers\.\d\.(self_attn\.o_proj|mlp\.down_proj)", 4, 4),)
    right = single("llama", targets)
    return numerics.error(one, calm), alike, numerics.error(calm, logits(right, rows))


PHI3 = """
    $blocks.self_attn.{qkv,o}_proj   : lora(rank = 4, alpha = 8, init = random)
    $blocks.mlp.{gate_up,down}_proj  : lora(rank = 6, init = random)
    lm_head                         : lora(rank = 3, init = random)
"""
PHI3_TARGETS = (
    (r"model\.layers\.\d\.self_attn\.(qkv|o)_proj", 4, 8),
    (r"model\.layers\.\d\.mlp\.(gate_up|down)_proj", 6, 6),
    ("lm_head", 3, 3),
)
GPT2 = (
    "    transformer.h.*.{attn.c_attn,attn.c_proj,mlp.c_fc,mlp.c_proj} : "
    "lora(rank = 4, init = random)"
)
GPT2_TARGETS = ((r"transformer\.h\.\d\.(attn|mlp)\.c_\w+", 4, 4),)


COMPILED = "}\ncompile {\n    $blocks : block\n"


def with_dora(body, more=""):
    return body.replace("init = random", f"init = random, dora = true{more}")


CASES = {
    "own units": ("llama", LLAMA + "    units = own\n", TARGETS),
    "some layers": (
        "llama",
        """
    $blocks.**<Linear>                          : lora(rank = 5, alpha = 3, init = random)
    override model.layers[0].mlp.{gate,up}_proj : none
    seed = 11
""",
        (
            (
                r"model\.layers\.(0\.(self_attn\.._proj|mlp\.down_proj)|1\.(self_attn|mlp)\.\w+_proj)",
                5,
                3,
            ),
        ),
    ),
    "qwen2": ("qwen2", LLAMA, TARGETS),
    "beside": (
        "llama",
        LLAMA.rpartition("    lm_head")[0]
        + "}\ntrain {\n    model.norm : trainable\n    model.embed_tokens : trainable\n",
        TARGETS,
    ),
    "tied head": ("llama-tied", LLAMA, TARGETS),
    "packed": (
        "phi3",
        PHI3,
        PHI3_TARGETS,
    ),
    "conv1d": ("gpt2", GPT2, GPT2_TARGETS),
    "dora": ("llama", DORA, TARGETS),
    "dora compiled": ("llama", DORA + COMPILED, TARGETS),
    "dora on some": ("llama", DORA.replace("dora = true", "dora = false", 1), TARGETS),
    "dora rslora": ("llama", with_dora(LLAMA, ", rslora = true"), TARGETS),
    "dora biases": ("qwen2", DORA, TARGETS),
    "dora packed": ("phi3", with_dora(PHI3), PHI3_TARGETS),
    "dora conv1d": ("gpt2", with_dora(GPT2), GPT2_TARGETS),
    "dropout": ("llama", LLAMA.replace("init = random", "init = random, dropout = 0.2"), TARGETS),
    "dora dropout": ("llama", with_dora(LLAMA, ", dropout = 0.2"), TARGETS),
    "dora dropout biases": ("gpt2", with_dora(GPT2, ", dropout = 0.2"), GPT2_TARGETS),
    "embedding": (
        "llama",
        "    model.embed_tokens : lora(rank = 4, init = random)",
        ((r"model\.embed_tokens", 4, 4),),
    ),
}
"""(model, rules, what they say in peft's words) by name."""
PLANS = {"qwen2": "llama", "llama-tied": "llama"}


def case(name, overrides, script=False):
    family, body, targets = CASES[name]
    seed = 11 if "seed = 11" in body else 0
    return compare(overrides, family, body, targets, script=script, seed=seed)


def two_dtypes(overrides):
    """Adapters in fp32 beside frozen weights in bf16, in one unit: torch gathers both."""
    body = LLAMA.replace("init = random", "init = random, dtype = fp32")
    plan = lowered("llama", body, overrides)
    model = numerics.build("llama").to(torch.bfloat16)
    run = planc.apply(model, plan, device_type="cpu")
    before = run.full_state_dict(every_rank=True)
    stepped(run, run.model)
    after = run.full_state_dict(every_rank=True)
    dtypes = {n: (t.dtype, torch.equal(t, before[n])) for n, t in after.items()}
    assert all(
        v == ((torch.float32, False) if ".lora_" in n else (torch.bfloat16, True))
        for n, v in dtypes.items()
    ), dtypes
    alone = numerics.build("llama").to(torch.bfloat16)
    for seed, (pattern, rank, alpha) in enumerate(TARGETS):
        numerics.inject(alone, pattern, seed, r=rank, lora_alpha=alpha, init_lora_weights=False)
    for name, parameter in alone.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    again = planc.apply(numerics.build("llama").to(torch.bfloat16), plan, device_type="cpu")
    rows = numerics.BATCH // again.data_size
    part = slice(again.data_rank * rows, (again.data_rank + 1) * rows)
    return numerics.error(logits(again.model, part), logits(alone).float()[part])
