"""What every rank does to measure transformers' own tensor parallelism of a family.

The measure is that of planc's rows: the same small model and weights, the same batch, logits, loss
and every gradient beside one process. The model is saved, and loaded as transformers' guide says:
`from_pretrained` with a `DistributedConfig`. What is not about tensor parallelism is taken out of
the way: the checkpoint is first loaded in one process, and that model is the reference.
"""

import contextlib
import copy
import tempfile
import traceback
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from planc.model.sources.huggingface import quiet
from planc.proxy.transformers_model import TransformersBuilder
from planc.simulate.numerics import errors_by_name, full_copy, full_gradients, relative


def measure(values, seed=0):
    """The errors of transformers' own tensor parallelism over all ranks, or where it failed.

    Args:
        values: the small model's configuration.

    Returns:
        `plan`: its rules. With rules: `stage` and `error` where it raised, else errors of
        `weights`, `logits`, `loss`, the worst `gradient` with its name, and `split`, the part of
        the blocks' parameters that a rank holds a piece of.
    """
    torch.manual_seed(0)
    builder = TransformersBuilder(values)
    built = builder.build(seed)
    found = {"plan": dict(built.tp_plan or {})}
    if not found["plan"]:
        return found
    logging.disable_progress_bar()
    with folder() as path, quiet():
        if distributed.get_rank() == 0:
            built.save_pretrained(path)
        distributed.barrier()
        stage = "one process"
        try:
            single = loaded(built, path)
            stage = "loading"
            parallel = loaded(built, path, tp_size=distributed.get_world_size())
            stage = "training"
            found |= compared(single, parallel, builder.sample())
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({where})"
            found |= {"stage": stage, "error": text, "trace": traceback.format_exc()[-3000:]}
    return found


@contextlib.contextmanager
def folder():
    """One temporary folder for all ranks."""
    with contextlib.ExitStack() as stack:
        name = [None]
        if distributed.get_rank() == 0:
            name[0] = stack.enter_context(tempfile.TemporaryDirectory())
        distributed.broadcast_object_list(name)
        yield name[0]
        distributed.barrier()


def loaded(built, path, **sizes):
    """The saved model, in float32 and training mode; with sizes, spread by transformers."""
    more = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    model = type(built).from_pretrained(
        path,
        config=copy.deepcopy(built.config),
        attn_implementation="eager",
        dtype=torch.float32,
        **more,
    )
    return model.train()


def compared(single, parallel, inputs):
    """The errors of one step from the same weights on the same inputs, and what is off."""
    right, mine = (once(model, inputs) for model in (single, parallel))
    gradients = errors_by_name(mine["gradients"], right["gradients"])
    weights = errors_by_name(mine["weights"], right["weights"])
    worst = max(gradients, key=gradients.get)
    return {
        "logits": relative(mine["logits"], right["logits"]),
        "loss": relative(mine["loss"], right["loss"]),
        "gradient": gradients[worst],
        "worst": worst,
        "off": {k: v for k, v in gradients.items() if not v < 1e-4},
        "weights": max(weights.values()),
        "lost": [k for k, v in weights.items() if not v < 1e-4],
        "split": split(parallel),
    }


def once(model, inputs):
    """Whole weights, logits, loss and gradients, as the mechanism itself lays them out."""
    weights = {n: full_copy(p) for n, p in model.named_parameters()}
    output = model(**inputs, use_cache=False)
    output.loss.backward()
    return {
        "weights": weights,
        "logits": full_copy(output.logits),
        "loss": full_copy(output.loss),
        "gradients": full_gradients(model),
    }


def split(model):
    """The part of the blocks' parameters that a rank holds a piece of."""
    lists = [n for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)]
    total, pieces = 0, 0
    for name, parameter in model.named_parameters():
        if any(name.startswith(f"{n}.") for n in lists):
            total += parameter.numel()
            pieces += parameter.numel() * sharded(parameter)
    return pieces / total if total else 0.0


def sharded(parameter):
    """Whether a rank holds a piece of it; a packed weight's strided placement is no `Shard`."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return any(not p.is_replicate() and not p.is_partial() for p in placements)
