"""What one rank does with a small model of diffusers, as a user's own script would."""

import torch
from numerics import by_script, error, plain, quick_compile, values_of
from torch import distributed
from torch.distributed.tensor import DTensor

import planc
from planc.runtime.standalone.shards import in_own_order, rank_orders

ROWS = 4


def made(name, seed=0):
    """The class of diffusers itself, with weights of which none is just 0 or 1."""
    import diffusers

    values = dict(values_of(name))
    torch.manual_seed(seed)
    model = getattr(diffusers, values.pop("_class_name")).from_config(values)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model


def inputs(name, rank, size):
    """The rows of one rank; places of the picture are the same for all rows."""
    from planc.proxy.diffusers_model import DiffusersBuilder

    given = DiffusersBuilder(values_of(name)).sample()
    places = {n: given.pop(n)[0] for n in ("img_ids", "txt_ids") if n in given}
    return {n: v.chunk(size)[rank] for n, v in given.items()} | places


def gave(model, given):
    """The output and the loss of a forward pass."""
    target = given["target"]
    output = model(**{n: v for n, v in given.items() if n != "target"}).sample
    return output, (output.float() - target).square().mean()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(name, plan, overrides, script=False):
    """Errors of the output, of the loss and of each gradient, beside one process."""
    right, model = made(name), made(name)
    lowered = planc.lower(model, plan, world_size=4, overrides=overrides)
    if script:
        rank, size = by_script(model, lowered)
    else:
        run = planc.apply(model, lowered, device_type="cpu")
        rank, size = run.data_rank, run.data_size
    wanted, wanted_loss = gave(right, inputs(name, 0, 1))
    wanted_loss.backward()
    output, loss = gave(model, inputs(name, rank, size))
    loss.backward()
    mean = loss.detach().clone()
    distributed.all_reduce(mean)
    own, reference = rank_orders(model), dict(right.named_parameters())
    errors = {
        "output": error(output, wanted.chunk(size)[rank]),
        "loss": error(mean / distributed.get_world_size(), wanted_loss),
    }
    largest = max(parameter.grad.abs().max().item() for parameter in reference.values())
    for full, parameter in model.named_parameters():
        short = plain(full)
        gradient = in_own_order(whole(parameter.grad), own.get(short))
        # a softmax is the same with any bias of its keys: that gradient is 0 but for rounding
        least = 1e-3 * largest if short.endswith("to_k.bias") else 1e-12
        errors[short] = error(gradient, reference[short].grad, least)
    assert errors.keys() - {"output", "loss"} == reference.keys()
    return errors


def compiled(**arguments):
    """`compare`, where the plan compiles blocks: forward and backward are traced."""
    with quick_compile():
        return compare(**arguments)


def mixed(name, plan, overrides):
    """The losses of ten steps in bfloat16 on one batch."""
    model = made(name)
    run = planc.apply(model, plan, overrides=overrides, device_type="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    given, losses = inputs(name, run.data_rank, run.data_size), []
    for _ in range(10):
        _, loss = gave(model, given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def noise(name, plan, overrides, seed):
    """The codes that a run with noise of each rank's own raises, or of each data rank's; and the
    loss of a pass that raises nothing.
    """
    model = made(name)
    run = planc.apply(model, plan, overrides=overrides, device_type="cpu")
    torch.manual_seed(run.data_rank if seed == "data" else distributed.get_rank())
    given = inputs(name, run.data_rank, run.data_size)
    given["hidden_states"] = torch.randn_like(given["hidden_states"])
    try:
        return [], gave(model, given)[1].item()
    except planc.PlanError as error:
        return [(d.code, d.message) for d in error.diagnostics], None
