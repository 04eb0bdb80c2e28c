"""llama for LlamaForCausalLM on 64 ranks: dp_replicate 1 | dp_shard 8 | tp 8.

Written by planc from the lowered plan 6e1caac33e11; it needs torch alone.

    model = parallelize(model, build_mesh("cuda"))
"""

import torch
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

MESH = {
    "dp_replicate": 1,  # plans/llama.plan:10
    "dp_shard": 8,  # plans/llama.plan:11
    "tp": 8,  # --set tp=8
}


def build_mesh(device_type="cuda"):
    """The device mesh, axes outermost first."""
    sizes, names = tuple(MESH.values()), tuple(MESH)
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def configure(model, mesh):
    """What training needs of the configuration."""
    model.config.use_cache = False  # training keeps no key/value cache


def tensor_parallel(model, mesh):
    """Splits weights over the tensor axes."""
    tp = mesh["tp"]
    for block in model.model.layers:
        parallelize_module(
            block,
            tp,
            {
                "self_attn.q_proj": ColwiseParallel(),  # plans/llama.plan:17
                "self_attn.k_proj": ColwiseParallel(),  # plans/llama.plan:17
                "self_attn.v_proj": ColwiseParallel(),  # plans/llama.plan:17
                "mlp.gate_proj": ColwiseParallel(),  # plans/llama.plan:18
                "mlp.up_proj": ColwiseParallel(),  # plans/llama.plan:18
                "input_layernorm": SequenceParallel(),  # plans/llama.plan:20
                "post_attention_layernorm": SequenceParallel(),  # plans/llama.plan:20
                "self_attn": PrepareModuleInput(  # plans/llama.plan:21
                    input_kwarg_layouts={"hidden_states": Shard(1)},
                    desired_input_kwarg_layouts={"hidden_states": Replicate()},
                ),
                "self_attn.o_proj": RowwiseParallel(  # plans/llama.plan:22
                    output_layouts=Shard(1),
                    use_local_output=False,
                ),
                "mlp": PrepareModuleInput(  # plans/llama.plan:23
                    input_layouts=(Shard(1),),
                    desired_input_layouts=(Replicate(),),
                ),
                "mlp.down_proj": RowwiseParallel(  # plans/llama.plan:24
                    output_layouts=Shard(1),
                    use_local_output=False,
                ),
            },
        )
    parallelize_module(
        model,
        tp,
        {
            "model.embed_tokens": RowwiseParallel(  # plans/llama.plan:31
                input_layouts=Replicate(),
                output_layouts=Shard(1),
                use_local_output=False,
            ),
            "model.norm": SequenceParallel(),  # plans/llama.plan:32
            "lm_head": ColwiseParallel(  # plans/llama.plan:33
                input_layouts=Shard(1),
                output_layouts=Replicate(),
            ),
        },
    )


def checkpoint(model, mesh):
    """Computes activations again in backward."""
    for i, block in enumerate(model.model.layers):  # plans/llama.plan:42
        model.model.layers[i] = checkpoint_wrapper(
            block,
            checkpoint_impl=CheckpointImpl.NO_REENTRANT,
        )


def shard(model, mesh):
    """Shards parameters, gradients and optimizer state."""
    data = mesh["dp_shard"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i in range(0, 31):  # plans/llama.plan:48
        fully_shard(model.model.layers[i], mesh=data, reshard_after_forward=True, mp_policy=policy)
    fully_shard(  # plans/llama.plan:48
        model.model.layers[31],
        mesh=data,
        reshard_after_forward=False,
        mp_policy=policy,
    )
    fully_shard(  # plans/llama.plan:52
        model.model.embed_tokens,
        mesh=data,
        reshard_after_forward=True,
        mp_policy=policy,
    )
    # one unit: what is gathered together
    fully_shard(  # plans/llama.plan:53
        [model.model.norm, model.lm_head],
        mesh=data,
        reshard_after_forward=False,
        mp_policy=policy,
    )
    fully_shard(  # plans/llama.plan:55
        model,
        mesh=data,
        reshard_after_forward=False,
        mp_policy=policy,
    )


def parallelize(model, mesh):
    """Spreads the model over the mesh, in place."""
    configure(model, mesh)
    tensor_parallel(model, mesh)
    checkpoint(model, mesh)
    shard(model, mesh)
    return model
