"""llama for LlamaForCausalLM on 64 ranks.

Written by planc from the lowered plan 3e920e398e5b; it needs torch alone.

    model = parallelize(model, build_mesh("cuda"))
"""

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

MESH = {
    "dp_replicate": 1,  # plans/blocks.plan:9
    "dp_shard": 8,  # plans/blocks.plan:10
    "tp": 8,  # --set tp=8
}


def build_mesh(device_type="cuda"):
    """The device mesh, axes outermost first."""
    sizes, names = tuple(MESH.values()), tuple(MESH)
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def check_ids(module, name):
    """Raises on ids outside an embedding that is split by the vocabulary.

    Its lookup masks ids of other ranks, and thus an id that no rank holds gives zeros.
    """

    def check(module, args):
        ids = args[0].to_local() if isinstance(args[0], DTensor) else args[0]
        # a later stage has no weight
        rows = len(module.weight) or module.num_embeddings
        known = ((ids >= 0) & (ids < rows)).all()
        torch._assert_async(known, f"an id of `{name}` is not in [0, {rows})")

    module.register_forward_pre_hook(check)


def keep_class_names(model):
    """Gives the subclasses that FSDP creates the names of the model's classes.

    Libraries look for the name of a class in a list: the `Trainer` of transformers
    shifts the labels of a smoothed loss only if the name is that of a causal model.
    """
    for kind in {type(module) for module in model.modules()}:
        if issubclass(kind, FSDPModule):
            original = kind.__mro__[kind._orig_cls_mro_index]
            for name in ("__name__", "__qualname__", "__module__"):
                setattr(kind, name, getattr(original, name))


JOINED = "_joined_passes"


def shards_at_rest(model):
    """Makes modules list shards between passes.

    After a pass without gradients all units are resharded. After one with gradients,
    units that stay unsharded keep what they have gathered for the backward pass, and
    modules list their shards until then. Each pass gathers anew, on all ranks, whatever
    a rank did since the last one.

    Args:
        model: the outermost unit, with all units inside.
    """
    _fsdp_param_group.RegisterPostBackwardFunction = PostBackward
    units = fsdp_units(model)
    for group in [group for unit in units for group in groups_of(unit)]:
        group.pre_backward = once_differentiated(
            listed_again(group, group.pre_backward)
        )
        group.pre_forward = listed_again(group, group.pre_forward)
        if stacks := [each for each in group.fsdp_params if is_stack(each)]:
            group.post_backward = fill_unused_gradients(group, stacks)
        group.post_backward = if_gathered(group, group.post_backward)
    model.register_forward_pre_hook(before_pass, prepend=True)
    model.register_forward_hook(after_pass, always_call=True)
    for part in model.children():
        inner = InnerPass(model)
        part.register_forward_pre_hook(inner.before, prepend=True, with_kwargs=True)
        part.register_forward_hook(inner.after, always_call=True)


class PostBackward(torch.autograd.Function):  # type: ignore[misc]
    """Torch's `RegisterPostBackwardFunction`, except that an input that a unit does not
    use gets no gradient. Torch makes zeros, for a DTensor too a plain tensor, which its
    other gradients can't be added to.
    """

    @staticmethod
    def forward(ctx, group, *inputs):
        ctx.group = group
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx, *gradients):
        ctx.group.post_backward()
        return (None, *gradients)


class InnerPass:
    """Runs the hooks of the outermost unit where a script calls a part of the model by
    itself, as reward and value heads do: torch finds all units by the first call of it.
    """

    def __init__(self, model):
        self.model = model
        self.runs = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(self, _part, args, kwargs):
        state = self.model._get_fsdp_state()
        self.runs = False
        if state._training_state == TrainingState.PRE_BACKWARD:
            reset_failed_pass(self.model)
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward or state._training_state != TrainingState.IDLE:
            return None
        self.runs = True
        before_pass(self.model, args)
        return state._pre_forward(self.model, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(self, _part, args, output):
        if not self.runs:
            return None
        self.runs = False
        state = self.model._get_fsdp_state()
        output = state._post_forward(self.model, args, output)
        after_pass(self.model, args, output)
        return output


@torch.compiler.disable  # type: ignore[untyped-decorator]
def before_pass(model, _args):
    if getattr(model, JOINED, False):
        return
    reset_failed_pass(model)
    reshard_units(model)
    if torch.is_inference_mode_enabled():
        gathered_once(model)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def after_pass(model, _args, _output):
    if getattr(model, JOINED, False):
        return
    if model._get_fsdp_state()._training_state == TrainingState.FORWARD:
        reset_failed_pass(model)  # the forward pass raised
    if not torch.is_grad_enabled():
        reshard_units(model)
        return
    for unit in fsdp_units(model):
        for group in groups_of(unit):
            for each in group.fsdp_params if not group.is_sharded else ():
                each._setattr_on_modules(each.sharded_param)


def reset_failed_pass(model):
    """Resets the units after a forward or backward pass that raised.

    Torch takes the next pass for a part of that one: the gradients of units whose
    backward pass was not complete remain on the rank, and parameters have none. What a
    backward pass that raised has added to gradients is discarded, as `zero_grad` clears
    only gradients of shards.
    """
    if torch._C._current_graph_task_id() != -1:
        return
    units = fsdp_units(model)
    for unit in (unit for unit in units if unit._get_fsdp_state()._is_root):
        state = unit._get_fsdp_state()
        interrupted = state._state_ctx.post_backward_final_callback_queued
        if not interrupted and state._training_state == TrainingState.IDLE:
            continue
        unit.reset_iter_state()
        groups = [group for inner in fsdp_units(unit) for group in groups_of(inner)]
        for each in (p for g in groups for p in g.fsdp_params if interrupted):
            each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None


def listed_again(group, plain):
    """A method of a group that first lists what stayed unsharded, for the model's code:
    a block may be recomputed before the backward pass of a unit inside it.
    """

    def call(*args):
        for each in group.fsdp_params if group.is_unsharded else ():
            each._setattr_on_modules(each._unsharded_param)
        return plain(*args)

    return call


def once_differentiated(plain):
    """A group's `pre_backward` that refuses second derivatives."""

    def pre_backward(*args):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True): FSDP gathers weights and sums gradients "
                "outside of autograd, so second derivatives would be incomplete"
            )
        plain(*args)

    return pre_backward


def was_gathered(group):
    """Whether a pass has gathered a group's parameters so far."""
    return all(hasattr(each, "_unsharded_param") for each in group.fsdp_params)


def if_gathered(group, plain):
    """A group's `post_backward`, but of a group that no pass has gathered so far, as a
    tower's before the first image: torch takes it for gathered in accumulated passes.
    """

    def post_backward(*args):
        if was_gathered(group):
            plain(*args)

    return post_backward


def is_stack(each):
    """Whether a parameter holds the matrices of experts, which rows choose from: its
    module says so by its class or an attribute. A parameter of another module that has
    no gradient on one rank has none on any, as the pooling head of a tower.
    """
    module = each._module_info.module
    names = " ".join([type(module).__name__, *vars(module)])
    return each.sharded_param.ndim > 2 and "expert" in names.lower()


def fill_unused_gradients(group, stacks):
    """A group's `post_backward` that first makes the gradients of stacks whose module
    ran, and from which no row of this rank has chosen: torch reduces what a rank has,
    so that ranks would send buffers of different sizes.
    """
    plain = group.post_backward
    used = set()

    def uses(module, _args):
        if torch.is_grad_enabled():
            used.add(module)

    for module in {each._module_info.module for each in stacks}:
        module.register_forward_pre_hook(uses)

    def post_backward(*args):
        ran = group._training_state == TrainingState.PRE_BACKWARD
        for each in stacks if ran else ():
            whole = each.unsharded_param
            missing = whole.grad is None and each.unsharded_accumulated_grad is None
            if missing and whole.requires_grad and each._module_info.module in used:
                whole.grad = torch.zeros_like(whole)
        if group.reduce_grads:  # of microbatches the last
            used.clear()
        plain(*args)

    return post_backward


def gathered_once(model):
    """Gathers units for the first time outside inference mode: torch keeps the tensors
    that it gathers into, and those made in inference mode can never be trained.
    """
    with torch.inference_mode(False):
        for unit in fsdp_units(model):
            if not all(map(was_gathered, groups_of(unit))):
                unit.unshard()
                unit.reshard()


def fsdp_units(model):
    """Every FSDP unit, outer before inner."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard_units(model):
    """Reshards all units: modules list shards, and nothing stays unsharded."""
    for unit in fsdp_units(model):
        unit.reshard()


def groups_of(unit):
    """The parameter groups of an FSDP unit, which torch has no public name for."""
    return list(unit._get_fsdp_state()._fsdp_param_groups)


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


def tensor_parallel(model, mesh):
    """Shards weights and activations over the tensor axes."""
    tp_mesh = mesh["tp"]
    parallelize_module(
        model,
        tp_mesh,
        {
            # plans/decoder.plan:9
            "model.embed_tokens": RowwiseParallel(
                input_layouts=Replicate(),
                output_layouts=Shard(1),
                use_local_output=False,
            ),
            # plans/decoder.plan:10
            "lm_head": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Replicate(),
            ),
            "model.norm": SequenceParallel(),  # plans/blocks.plan:19
        },
    )
    for block in model.model.layers:
        parallelize_module(
            block,
            tp_mesh,
            {
                "self_attn.q_proj": ColwiseParallel(),  # plans/llama.plan:7
                "self_attn.k_proj": ColwiseParallel(),  # plans/llama.plan:7
                "self_attn.v_proj": ColwiseParallel(),  # plans/llama.plan:7
                "mlp.gate_proj": ColwiseParallel(),  # plans/llama.plan:7
                "mlp.up_proj": ColwiseParallel(),  # plans/llama.plan:7
                # plans/llama.plan:8
                "self_attn.o_proj": RowwiseParallel(
                    output_layouts=Shard(1),
                    use_local_output=False,
                ),
                # plans/llama.plan:8
                "mlp.down_proj": RowwiseParallel(
                    output_layouts=Shard(1),
                    use_local_output=False,
                ),
                "input_layernorm": SequenceParallel(),  # plans/blocks.plan:19
                # plans/llama.plan:7
                "self_attn": PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": Shard(1)},
                    desired_input_kwarg_layouts={"hidden_states": Replicate()},
                ),
                "post_attention_layernorm": SequenceParallel(),  # plans/blocks.plan:19
                # plans/llama.plan:7
                "mlp": PrepareModuleInput(
                    input_layouts=(Shard(1),),
                    desired_input_layouts=(Replicate(),),
                ),
            },
        )
    check_ids(model.model.embed_tokens, "model.embed_tokens")  # plans/decoder.plan:9


def checkpoint(model):
    """Recomputes activations in the backward pass, to save memory."""
    for i, block in enumerate(model.model.layers):  # plans/blocks.plan:43
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
    for i in range(0, 31):  # plans/blocks.plan:52
        fully_shard(model.model.layers[i], **fsdp, reshard_after_forward=True)
    # plans/blocks.plan:52
    fully_shard(model.model.layers[31], **fsdp, reshard_after_forward=False)
    # plans/decoder.plan:23
    fully_shard(model.model.embed_tokens, **fsdp, reshard_after_forward=True)
    # plans/decoder.plan:24
    fully_shard([model.model.norm, model.lm_head], **fsdp, reshard_after_forward=False)
    fully_shard(model, **fsdp, reshard_after_forward=False)  # plans/blocks.plan:53
    shards_at_rest(model)


def parallelize(model, mesh=None):
    """Parallelizes the model over the mesh, in place, and returns it."""
    mesh = build_mesh() if mesh is None else mesh
    configure(model)
    tensor_parallel(model, mesh)
    checkpoint(model)
    shard(model, mesh)
    keep_class_names(model)
    return model
