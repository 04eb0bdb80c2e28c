"""What test_adapting runs on every rank: a plan with adapters beside peft in one process."""

from dataclasses import replace
from pathlib import Path

import numerics
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import distributed
from torch.distributed.tensor import DTensor

import planc
from planc.lowering.ops import Parallelize

PLAN = """plan tuned for {family}

extend "{family}.plan"

adapters {{
{body}
}}
"""
LLAMA = """
    $block.self_attn.{q,k,v,o}_proj : lora(rank = 4, alpha = 8, init = random)
    $block.mlp.{gate,up,down}_proj  : lora(rank = 6, init = random)
    lm_head                         : lora(rank = 3, init = random)
"""
TARGETS = (  # by hand: what the rules above say, in peft's words, one call each
    (r"model\.layers\.\d\.self_attn\.[qkvo]_proj", 4, 8),
    (r"model\.layers\.\d\.mlp\.(gate|up|down)_proj", 6, 6),
    ("lm_head", 3, 3),
)


def single(family, targets=TARGETS, init=False):
    """The model with peft's adapters, in this process alone."""
    model = numerics.build(family)
    for seed, (pattern, rank, alpha) in enumerate(targets):
        config = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=pattern, init_lora_weights=init
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model)
    return model


def written(family, body):
    """A plan of these adapters over the family's, as a file of this rank's own."""
    path = Path(f"/tmp/planc-adapters-{distributed.get_rank()}.plan")
    path.write_text(PLAN.format(family=family, body=body))
    return str(path)


def lowered(family, body, overrides):
    path = written(family, body)
    try:
        return planc.lower(numerics.build(family), path, world_size=4, overrides=overrides)
    finally:
        Path(path).unlink()


def compare(overrides, family="llama", body=LLAMA, targets=TARGETS, script=False, restyle=None):
    """How far a plan with adapters is from peft in one process, on this rank.

    Args:
        restyle: (the end of a path, a style of planc's, or None for none at all), to break one
            derived style on purpose.
    """
    right_model = single(family, targets)
    tokens, labels = numerics.data(right_model.config.vocab_size)
    right = right_model(input_ids=tokens, labels=labels, use_cache=False)
    right.loss.backward()
    plan = lowered(family, body, overrides)
    if restyle:
        plan = replace(plan, ops=tuple(restyled(plan.ops, *restyle)))
    model = numerics.build(family)
    rank, size = (numerics.by_script if script else numerics.by_planc)(model, plan)
    rows = numerics.BATCH // size
    mine = slice(rank * rows, (rank + 1) * rows)
    output = model(input_ids=tokens[mine], labels=labels[mine])
    output.loss.backward()
    loss = numerics.whole(output.loss).clone()
    distributed.all_reduce(loss)
    loss /= distributed.get_world_size()
    reference = {n: p.grad for n, p in right_model.named_parameters() if p.requires_grad}
    mine_grads = gradients(model)
    assert mine_grads.keys() == reference.keys()
    assert all(g.abs().max() > 0 for g in reference.values()), "a gradient that says nothing"
    errors = {n: numerics.error(g, reference[n]) for n, g in mine_grads.items()}
    worst = max(errors, key=errors.get)
    return {
        "logits": numerics.error(output.logits, right.logits[mine].detach()),
        "loss": numerics.error(loss, right.loss.detach()),
        "gradient": errors[worst],
        "worst": worst,
        "count": len(errors),
        "bits": numerics.bits(output.logits, loss, *mine_grads.values()),
    }


def gradients(model):
    """Whole gradients of what is trained; nothing else has one."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, f"{name} is frozen and has a gradient"
            continue
        grad = parameter.grad
        assert grad is not None, f"{name} has no gradient"
        partial = isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)
        assert not partial, f"the gradient of {name} is a part of a sum"
        same(grad, name)
        found[numerics.plain(name)] = numerics.whole(grad)
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
