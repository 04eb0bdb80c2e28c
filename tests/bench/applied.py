"""Seconds of processor time that `planc.apply` takes, beside the same torch calls written by hand.

A 126-layer, 405B-shaped llama on meta, 64 ranks (tp 8, dp_shard 8) on a fake process group.
"""

import json
import statistics
import sys
import time

import torch
from torch import distributed
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

import planc
from planc.files.resources import PLANS


def build():
    config = AutoConfig.for_model(
        **json.loads((PLANS / "models" / "llama-3.1-405b.json").read_text())
    )
    with torch.device("meta"), no_init_weights():
        return LlamaForCausalLM(config)


def by_hand(model, sizes=(1, 8, 8), param=torch.bfloat16):
    """As torchtitan would write it: the same calls in the same order."""
    model.config.use_cache = False
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    tp = mesh["tp"]
    for block in model.model.layers:
        parallelize_module(
            block,
            tp,
            {
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "input_layernorm": SequenceParallel(),
                "post_attention_layernorm": SequenceParallel(),
                "self_attn.o_proj": RowwiseParallel(
                    output_layouts=Shard(1), use_local_output=False
                ),
                "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
                "self_attn": PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": Shard(1)},
                    desired_input_kwarg_layouts={"hidden_states": Replicate()},
                ),
                "mlp": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
            },
        )
    parallelize_module(
        model,
        tp,
        {
            "model.embed_tokens": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
            ),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    layers = model.model.layers
    for i, block in enumerate(layers):
        layers[i] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=torch.float32)
    data = mesh["dp_shard"]
    for i, block in enumerate(layers):
        last = i == len(layers) - 1
        fully_shard(block, mesh=data, mp_policy=policy, reshard_after_forward=not last)
    fully_shard(model.model.embed_tokens, mesh=data, mp_policy=policy, reshard_after_forward=True)
    fully_shard(
        [model.model.norm, model.lm_head],
        mesh=data,
        mp_policy=policy,
        reshard_after_forward=False,
    )
    fully_shard(model, mesh=data, mp_policy=policy, reshard_after_forward=False)


def by_planc(model):
    planc.apply(model, "llama", overrides=["tp=8"], device_type="cpu")


def main():
    repeat = int(sys.argv[1])
    distributed.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    seconds = {"hand": [], "planc": []}
    for turn in range(repeat + 1):
        for name, way in (("hand", by_hand), ("planc", by_planc)):
            model = build()
            start = time.process_time()
            way(model)
            taken = time.process_time() - start
            if turn:
                seconds[name].append(taken)
    print(json.dumps({name: statistics.median(values) for name, values in seconds.items()}))


if __name__ == "__main__":
    main()
