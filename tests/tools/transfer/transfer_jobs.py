"""Training runs on processes, whose weights an engine in the test's process gets."""

from dataclasses import astuple

import torch
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM

import planc
from planc.diagnostics.diagnostic import PlanError

ADAPTED = """plan tuned for llama

extend "llama"

adapters {
    $blocks.self_attn.{q,k,v,o}_proj : lora(rank = 4, alpha = 8, init = random)
    $blocks.mlp.{gate,up,down}_proj  : lora(rank = 6, init = random)
}
"""


def build(config, seed=0):
    torch.manual_seed(seed)
    values = {k: v for k, v in config.items() if k != "model_type"}
    config = AutoConfig.for_model(config["model_type"], **values)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def started(config, sets, plan=None):
    sets = [*sets, "param_dtype=fp32", "recompute=false"]
    return planc.apply(build(config), plan, overrides=sets, compare=0, require="nothing")


def change(run):
    """A step of training that changes every weight."""
    with torch.no_grad():
        for number, parameter in enumerate(run.model.parameters()):
            parameter.mul_(1 + 0.01 * (number + 1))


def publish(config, sets, serve, folder, address, plan=None, adapters=None, bucket=8192, times=2):
    """Publishes and exports, as often as is asked; the bytes and messages of this rank."""
    run = started(config, sets, plan)
    transfer = run.transfer(serve, address=address, bucket=bucket, adapters=adapters, seconds=60)
    for time in range(times):
        transfer.publish()
        run.export(f"{folder}/{time}", adapters=adapters)
        distributed.barrier()
        change(run)
    counts = transfer.counts
    transfer.close()
    return counts.bytes, counts.messages, counts.peak


def colocated(config, sets, serve, folder):
    """This rank's tensors of the engine after two publishes, and the bytes that it sent."""
    run = started(config, sets)
    transfer = run.transfer(serve, bucket=8192, seconds=60)
    transfer.publish()
    change(run)
    transfer.publish()
    run.export(folder)
    found = {name: tensor.clone() for name, tensor in transfer.engine.tensors.items()}
    transfer.close()
    return found, transfer.counts.bytes, transfer.engine.version


def stopped(config, sets, serve, address, rank):
    """What ranks say where one of them leaves in the place of its second publish."""
    run = started(config, sets)
    transfer = run.transfer(serve, address=address, bucket=8192, seconds=20)
    transfer.publish()
    if distributed.get_rank() == rank:
        transfer.close()
        return ""
    try:
        transfer.publish()
    except PlanError as error:
        return str(error)
    return "published"


def refused(config, sets, serve, address):
    """What ranks say where the engine does not fit."""
    run = started(config, sets)
    try:
        run.transfer(serve, address=address, seconds=20)
    except PlanError as error:
        return str(error)
    return "joined"


def to_plan(config, sets, folder, address):
    """Publishes to the shards of the family's own plan on two ranks."""
    run = started(config, sets)
    transfer = run.transfer(
        "llama",
        address=address,
        world_size=2,
        overrides=["param_dtype=fp32", "tp=1"],
        bucket=8192,
        seconds=60,
    )
    transfer.publish()
    run.export(f"{folder}/0")
    transfer.close()


def full_weights(config, sets, folder, plan=None, adapters=None):
    """The metadata of a weight source, and the tensors that this rank yields twice."""
    run = started(config, sets, plan)
    source = run.weight_source(adapters=adapters)
    found = []
    for time in range(2):
        found.append({name: tensor.clone() for name, tensor in source.iter_full()})
        run.export(f"{folder}/{time}", adapters=adapters)
        change(run)
    return [astuple(meta) for meta in source.metadata], found


def publish_changes(config, sets, serve, folder, address):
    """Publishes all weights, those with some changes, and unchanged ones; the bytes of each."""
    run = started(config, sets)
    transfer = run.transfer(serve, address=address, bucket=1 << 16, seconds=60, delta=True)
    found = []
    for time in range(3):
        before = transfer.counts.bytes
        transfer.publish()
        found.append(transfer.counts.bytes - before)
        run.export(f"{folder}/{time}")
        distributed.barrier()
        if time == 0:
            with torch.no_grad():
                for name, parameter in run.model.named_parameters():
                    if "layers.1" in name and ("up_proj" in name or "norm" in name):
                        parameter.mul_(1.5)
    transfer.close()
    return found, transfer.counts.peak
