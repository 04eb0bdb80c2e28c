"""What test_apply runs on every rank."""

import gc
import logging
from dataclasses import replace
from pathlib import Path

import numerics
import torch
from torch import distributed

import planc
from planc.diagnostics.source import Span
from planc.ops.document import dumps
from planc.ops.tensor_parallel import Parallelize
from planc.runtime.executor import apply_lowered


def apply(overrides, model=None):
    return planc.apply(
        model or numerics.build("llama"), "llama", overrides=overrides, device_type="cpu"
    )


def handle(overrides):
    run = apply(overrides)
    return {
        "data": (run.data_rank, run.data_size),
        "mesh": dict(zip(run.mesh.mesh_dim_names, run.mesh.shape, strict=True)),
        "data_mesh": run.data_mesh.size(),
        "text": run.describe(),
        "digest": run.digest,
    }


def collected(overrides, ranks):
    """Two runs, one after the other; what is left of the first is collected on some ranks alone.

    Returns:
        Whether the second run has the mesh of the first, where that is kept; and the process
        groups that this rank has made by now, which name the next one.
    """
    first = apply(overrides)
    kept = None if distributed.get_rank() in ranks else first
    del first
    gc.collect()
    second = apply(overrides)
    return (
        kept is not None and second.mesh is kept.mesh,
        distributed.distributed_c10d._world.group_count,
    )


def logged(overrides):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("planc")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    apply(overrides)
    logger.removeHandler(handler)
    return lines


def named(folder, overrides):
    """A shipped name, a path, a lowered plan, and a lowered JSON file."""
    from planc.files.resources import PLANS

    lowered = planc.lower(numerics.build("llama"), "llama", world_size=4, overrides=overrides)
    file = Path(folder) / f"{distributed.get_rank()}.json"
    file.write_text(dumps(lowered))
    digests = []
    for plan in ("llama", str(PLANS / "llama.plan"), lowered, str(file)):
        own = overrides if isinstance(plan, str) and not plan.endswith(".json") else ()
        run = planc.apply(numerics.build("llama"), plan, overrides=own, device_type="cpu")
        digests.append(run.digest)
    return digests


def untouched(model):
    """Whether a model is as transformers built it."""
    plain = all(type(p) is torch.nn.Parameter for p in model.parameters())
    return plain and model.config.use_cache


CUSTOM = """plan p for llama
style own = python "torch.distributed.tensor.parallel:ColwiseParallel"
mesh {
    tp = 4
}
tensor on tp {
    model.layers.*.mlp.up_proj : own
}
"""


def disagree():
    model = numerics.build("llama")
    try:
        apply([f"tp={1 + distributed.get_rank() % 2}"], model)
    except planc.PlanError as error:
        return str(error), untouched(model)
    raise AssertionError("the ranks agreed")


def another_model():
    wide = distributed.get_rank() == 2
    model = numerics.build("llama", intermediate_size=128 if wide else 96)
    lowered = planc.lower(numerics.build("llama"), "llama", world_size=4, overrides=["tp=2"])
    try:
        planc.apply(model, lowered, device_type="cpu")
    except planc.PlanError as error:
        assert untouched(model)
        return str(error)
    raise AssertionError("a rank with another model went on")


def twice(overrides):
    model = numerics.build("llama")
    apply(overrides, model)
    apply(overrides, model)


def wrong_world():
    lowered = planc.lower(numerics.build("llama"), "llama", world_size=8)
    planc.apply(numerics.build("llama"), lowered, device_type="cpu")


def refused():
    """A style that torch refuses, put into a lowered plan behind the back of the checks."""
    model = numerics.build("llama")
    lowered = planc.lower(model, "llama", world_size=4, overrides=["tp=2"])
    styled = [op for op in lowered.ops if isinstance(op, Parallelize)]
    norm = next(op.modules for op in styled if str(op.modules) == "model.norm")
    bad = replace(styled[0], modules=norm, shapes=(), origin=Span.from_place("mine.plan:8"))
    apply_lowered(model, lowered.map_ops(lambda _: (bad,)), digest="same", device_type="cpu")


def wrong_on_one(folder, how):
    """A mistake on rank 2 alone: what each rank raises, and whether its model is untouched."""
    alone, path = distributed.get_rank() == 2, Path(folder) / f"{distributed.get_rank()}.plan"
    path.write_text(CUSTOM)
    model = numerics.build("llama")
    if alone and how == "plan":
        path.write_text(f"{CUSTOM}fsdp on dp {{\n}}\n")
    if alone and how == "file":
        path.unlink()
    if alone and how == "model":
        model.config.to_dict = lambda: {}["its configuration"]
    allowed = not (alone and how == "code")
    try:
        planc.apply(model, str(path), device_type="cpu", allow_code=allowed)
    except Exception as error:
        return f"{type(error).__name__}: {error}", untouched(model)
    return "", untouched(model)


def wrong_plan():
    text = "plan w for llama\nmesh {\n dp_shard = auto\n}\nfsdp on dp_shard {\n lm_hed : unit\n"
    path = Path(f"/tmp/planc-wrong-{distributed.get_rank()}.plan")
    path.write_text(text + " root : units\n}\n")
    try:
        planc.apply(numerics.build("llama"), str(path), device_type="cpu")
    finally:
        path.unlink()


def embeddings_given(overrides):
    """What a call with plain `inputs_embeds` raises, and how far one with a DTensor is off."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    ids = torch.arange(16).reshape(2, 8)
    whole = numerics.build("llama").get_input_embeddings()(ids).detach()
    model = numerics.build("llama")
    run = apply(overrides, model)
    told = ""
    try:
        model(inputs_embeds=whole)
    except planc.PlanError as error:
        told = str(error)
    right = model(input_ids=ids).logits
    split = DTensor.from_local(whole, run.meshes["tp"], [Replicate()])
    given = split.redistribute(placements=[Shard(1)])
    return told, float((model(inputs_embeds=given).logits - right).abs().max())


def wrapped_afterwards(overrides):
    """What peft and torch.compile of a model under a plan raise, and how far it is off then."""
    import peft

    ids = torch.arange(16).reshape(2, 8)
    right = numerics.build("llama")(input_ids=ids).logits.detach()
    models = [numerics.build("llama") for _ in range(3)]
    for model in models:
        apply(overrides, model)
    told = []
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    for wrapped in (
        peft.get_peft_model(models[0], lora),
        peft.inject_adapter_in_model(lora, models[1]),
        torch.compile(models[2], backend="eager"),
    ):
        try:
            wrapped(input_ids=ids)
            told.append("")
        except Exception as error:
            told.append(str(error))
    peft.get_peft_model(numerics.build("llama"), lora)(input_ids=ids)  # a model of its own
    return told, float((models[2](input_ids=ids).logits - right).abs().max())


def embeddings_alone(overrides):
    """What a call with plain `inputs_embeds` raises, and how far it is off."""
    ids = torch.arange(16).reshape(2, 8)
    whole = numerics.build("llama").get_input_embeddings()(ids).detach()
    model = numerics.build("llama")
    apply(overrides, model)
    try:
        given = model(inputs_embeds=whole).logits
    except planc.PlanError as error:
        return str(error), 1.0
    return "", float((given - model(input_ids=ids).logits).abs().max())
