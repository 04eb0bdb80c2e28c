"""t for LlamaForCausalLM on 8 ranks.

Written by planc from the lowered plan 1da3a311fc3c; it needs CUDA, megatron_fsdp and
torch alone.

    model = parallelize(model, build_mesh("cuda"))
"""

import megatron_fsdp
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

MESH = {
    "dp_replicate": 2,  # t.plan:3
    "dp_shard": 2,  # t.plan:4
    "dp_in": 2,  # t.plan:5
}


def build_mesh(device_type="cuda"):
    """The device mesh, axes outermost first."""
    sizes, names = tuple(MESH.values()), tuple(MESH)
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def unit_classes(model, names):
    """The classes of a model's modules with one of these names, in the names' order."""
    found = {
        type(module) for module in model.modules() if type(module).__name__ in names
    }
    return sorted(found, key=lambda cls: (names.index(cls.__name__), cls.__module__))


def in_place(model, wrapped):
    """Makes the model callable without its wrapper; unprepared optimizers raise."""
    from weakref import WeakSet, ref

    from torch.optim.optimizer import register_optimizer_step_pre_hook

    model.register_forward_pre_hook(
        lambda *_: wrapped._replace_param_with_raw_if_needed(), prepend=True
    )
    known = WeakSet()
    wrapped.optimizers = known
    mine = ref(wrapped)

    def guard(optimizer, args, kwargs):
        owner = getattr(
            optimizer.param_groups[0]["params"][0], "_megatron_fsdp_model", None
        )
        if owner is not None and owner is mine() and optimizer not in known:
            raise RuntimeError(
                "this optimizer would not update the weights of Megatron-FSDP: "
                "pass it to planc's `run.optimizer`, or to "
                f"`{prepare_optimizer.__name__}`, before it steps"
            )

    register_optimizer_step_pre_hook(guard)


def prepare_optimizer(optimizer):
    """Prepares an optimizer of the model's parameters, and returns it.

    To create its state, the package would make a step with zero gradients, which
    decays weights and counts as a step: that step is skipped.
    """
    import megatron_fsdp

    owner = optimizer.param_groups[0]["params"][0]._megatron_fsdp_model
    owner.optimizers.add(optimizer)
    optimizer.step = lambda: None
    return megatron_fsdp.fully_shard_optimizer(optimizer)


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
    for holder in (config, *held):
        if isinstance(holder, type(config)):
            setattr(holder, name, value)


def configure(model):
    """Sets configuration fields that training needs."""
    set_config(model, "use_cache", False)  # training keeps no key/value cache


def shard(model, mesh):
    """Shards the model with Megatron-FSDP."""
    # a separate mesh, with the tensor dimension that the package requires
    ranks = mesh.mesh.reshape(2, 4, 1)
    policy = megatron_fsdp.MixedPrecisionPolicy(
        main_params_dtype=torch.float32,
        main_grads_dtype=torch.float32,
        grad_comm_dtype=None,
    )
    data = DeviceMesh(
        mesh.device_type,
        ranks,
        mesh_dim_names=("dp_replicate", "dp_shard_dp_in", "tp_of_one"),
    )
    hybrid = data["dp_replicate", "dp_shard_dp_in"]._flatten("hybrid").get_group()
    # t.plan:8
    wrapped = megatron_fsdp.fully_shard_model(
        module=model,
        device_mesh=data,
        dp_shard_dim="dp_shard_dp_in",
        dp_outer_dim="dp_replicate",
        hybrid_fsdp_group=hybrid,
        tp_dim="tp_of_one",
        fsdp_unit_modules=unit_classes(model, ["LlamaDecoderLayer"]),
        zero_dp_strategy="optim_grads_params",
        outer_dp_sharding_strategy="no_shard",
        device=torch.device(mesh.device_type, torch.cuda.current_device()),
        mixed_precision_policy=policy,
        disable_bucketing=True,
    )
    in_place(model, wrapped)


def parallelize(model, mesh=None):
    """Parallelizes the model over the mesh, in place, and returns it."""
    mesh = build_mesh() if mesh is None else mesh
    configure(model)
    shard(model, mesh)
    return model
