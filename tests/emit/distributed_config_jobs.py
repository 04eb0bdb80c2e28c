"""A model that ranks load under a written `DistributedConfig`, compared with one process."""

import torch
from torch import distributed
from transformers.distributed import DistributedConfig
from transformers_tp_jobs import folder, loaded

from planc.model.sources.huggingface import quiet
from planc.proxy.transformers_model import TransformersBuilder
from planc.simulate.numerics import errors_by_name, full_copy, full_gradients, relative


def train(values, config):
    """The errors of the loss and of the gradients, of a step on rows of each data rank.

    Args:
        values: the small configuration.
        config: as JSON.
    """
    builder = TransformersBuilder(values)
    built = builder.build(0)
    sizes = DistributedConfig.from_dict(config)
    data = sizes.dp_size
    own = distributed.get_rank() // sizes.tp_size
    with folder() as path, quiet():
        if distributed.get_rank() == 0:
            built.save_pretrained(path)
        distributed.barrier()
        single, parallel = loaded(built, path), loaded(built, path, **config)
        inputs = builder.sample()
        rows = [{n: v.chunk(data)[rank] for n, v in inputs.items()} for rank in range(data)]
        losses = []
        for each in rows:
            loss = single(**each, use_cache=False).loss
            (loss / data).backward()
            losses.append(loss.detach())
        output = parallel(**rows[own], use_cache=False)
        output.loss.backward()
        return {
            "loss": relative(full_copy(output.loss), losses[own]),
            "gradient": max(
                errors_by_name(full_gradients(parallel), full_gradients(single)).values()
            ),
            "split": parallel.tp_plan != {} and torch.is_tensor(output.loss),
        }
