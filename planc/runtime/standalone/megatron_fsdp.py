"""Megatron-FSDP as a plan uses it; emitted scripts inline these definitions.

Source: megatron_fsdp 0.6.1. Its model is a wrapper whose forward puts the parameters that it
computes with in the place of those that the optimizer works on; a hook does the same for the model
itself, so that a training script goes on calling that.
"""

# A script has these without types, and only what it can import by itself.
# mypy: ignore-errors


def unit_classes(model, names):
    """The classes of a model's modules that have one of these names, in the names' order."""
    found = {type(module) for module in model.modules() if type(module).__name__ in names}
    return sorted(found, key=lambda cls: (names.index(cls.__name__), cls.__module__))


def in_place(model, wrapped):
    """Makes the model itself what one calls, and stops optimizers that were not handed over."""
    from weakref import WeakSet, ref

    from torch.optim.optimizer import register_optimizer_step_pre_hook

    model.register_forward_pre_hook(
        lambda *_: wrapped._replace_param_with_raw_if_needed(), prepend=True
    )
    wrapped.optimizers = known = WeakSet()
    mine = ref(wrapped)

    def guard(optimizer, args, kwargs):
        owner = getattr(optimizer.param_groups[0]["params"][0], "_megatron_fsdp_model", None)
        if owner is not None and owner is mine() and optimizer not in known:
            raise RuntimeError(
                "this optimizer would not change what Megatron-FSDP computes with: hand it to "
                f"planc's `run.optimizer`, or to `{prepare_optimizer.__name__}`, before it steps"
            )

    register_optimizer_step_pre_hook(guard)


def prepare_optimizer(optimizer):
    """Readies an optimizer that was made of the model's parameters, and gives it back.

    The package would have it make its state by a step on gradients of zero, which decays weights
    and counts as a step: that one is left out.
    """
    import megatron_fsdp

    owner = optimizer.param_groups[0]["params"][0]._megatron_fsdp_model
    owner.optimizers.add(optimizer)
    optimizer.step = lambda: None
    return megatron_fsdp.fully_shard_optimizer(optimizer)
