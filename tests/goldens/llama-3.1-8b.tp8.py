"""llama for LlamaForCausalLM on 64 ranks.

Written by planc from the lowered plan 5a041b22a2bf; it needs torch alone.

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
    "dp_replicate": 1,  # plans/llama.plan:18
    "dp_shard": 8,  # plans/llama.plan:19
    "tp": 8,  # --set tp=8
}


def build_mesh(device_type="cuda"):
    """The device mesh, axes outermost first."""
    sizes, names = tuple(MESH.values()), tuple(MESH)
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def set_config(model, path, value):
    """Sets a field of a configuration, and of every copy of it that modules hold.

    An encoder and a decoder read copies of their own, as in T5.

    Args:
        model: its `config` has the field.
        path: the field, `use_cache` or `text_config.use_cache`.
        value: what it is set to.
    """
    *owners, name = path.split(".")
    config = model.config
    for owner in owners:
        config = getattr(config, owner)
    held = (getattr(module, "config", None) for module in model.modules())
    for one in (config, *held):
        if isinstance(one, type(config)):
            setattr(one, name, value)


def configure(model):
    """Sets configuration fields that training needs."""
    set_config(model, "use_cache", False)  # training keeps no key/value cache


def tensor_parallel(model, mesh):
    """Shards weights and activations over the tensor axes."""
    tp_mesh = mesh["tp"]
    for block in model.model.layers:
        parallelize_module(
            block,
            tp_mesh,
            {
                "self_attn.q_proj": ColwiseParallel(),  # plans/llama.plan:39
                "self_attn.k_proj": ColwiseParallel(),  # plans/llama.plan:39
                "self_attn.v_proj": ColwiseParallel(),  # plans/llama.plan:39
                "mlp.gate_proj": ColwiseParallel(),  # plans/llama.plan:40
                "mlp.up_proj": ColwiseParallel(),  # plans/llama.plan:40
                "input_layernorm": SequenceParallel(),  # plans/llama.plan:42
                "post_attention_layernorm": SequenceParallel(),  # plans/llama.plan:42
                # plans/llama.plan:43
                "self_attn": PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": Shard(1)},
                    desired_input_kwarg_layouts={"hidden_states": Replicate()},
                ),
                # plans/llama.plan:44
                "self_attn.o_proj": RowwiseParallel(
                    output_layouts=Shard(1),
                    use_local_output=False,
                ),
                # plans/llama.plan:45
                "mlp": PrepareModuleInput(
                    input_layouts=(Shard(1),),
                    desired_input_layouts=(Replicate(),),
                ),
                # plans/llama.plan:46
                "mlp.down_proj": RowwiseParallel(
                    output_layouts=Shard(1),
                    use_local_output=False,
                ),
            },
        )
    parallelize_module(
        model,
        tp_mesh,
        {
            # plans/llama.plan:53
            "model.embed_tokens": RowwiseParallel(
                input_layouts=Replicate(),
                output_layouts=Shard(1),
                use_local_output=False,
            ),
            "model.norm": SequenceParallel(),  # plans/llama.plan:54
            # plans/llama.plan:55
            "lm_head": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Replicate(),
            ),
        },
    )


def checkpoint(model):
    """Recomputes activations in the backward pass, to save memory."""
    for i, block in enumerate(model.model.layers):  # plans/llama.plan:70
        model.model.layers[i] = checkpoint_wrapper(
            block,
            checkpoint_impl=CheckpointImpl.NO_REENTRANT,
        )


def shard(model, mesh):
    """Shards parameters, gradients and optimizer state."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
    )
    fsdp = {"mesh": mesh["dp_shard"], "mp_policy": policy}
    for i in range(0, 31):  # plans/llama.plan:76
        fully_shard(model.model.layers[i], **fsdp, reshard_after_forward=True)
    # plans/llama.plan:76
    fully_shard(model.model.layers[31], **fsdp, reshard_after_forward=False)
    # plans/llama.plan:80
    fully_shard(model.model.embed_tokens, **fsdp, reshard_after_forward=True)
    # plans/llama.plan:81
    fully_shard([model.model.norm, model.lm_head], **fsdp, reshard_after_forward=False)
    fully_shard(model, **fsdp, reshard_after_forward=False)  # plans/llama.plan:83


def parallelize(model, mesh=None):
    """Parallelizes the model over the mesh, in place, and returns it."""
    mesh = build_mesh() if mesh is None else mesh
    configure(model)
    tensor_parallel(model, mesh)
    checkpoint(model)
    shard(model, mesh)
    return model
