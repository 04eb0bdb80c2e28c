"""What goes wrong when a plan is applied, on every rank of a pool."""

from handwritten_plans import DIGEST, llama, modules
from numerics import build
from torch import distributed

from planc.diagnostics.diagnostic import PlanError
from planc.ops.activation_checkpoint import Checkpoint
from planc.runtime.executor import apply_lowered

AXES = {"dp_shard": 2, "tp": 2}


def traces(model):
    """All by which one sees that a model was touched."""
    parameters = [(n, id(p), type(p)) for n, p in model.named_parameters(remove_duplicate=False)]
    hooks = [
        (name, type(m), len(m._forward_pre_hooks), len(m._forward_hooks))
        for name, m in model.named_modules()
    ]
    return parameters, hooks, model.config.use_cache


def refused(lowered, *, model="llama", digests=(DIGEST,) * 4, odd=None):
    """What apply says on this rank, and whether it left the model alone.

    Args:
        lowered: by rank, or one for all.
        digests: by rank.
        odd: a rank whose model has one more layer and no `lm_head.weight` of its own shape.
    """
    rank = distributed.get_rank()
    own = build(model, **({"vocab_size": 64} if rank == odd else {}))
    before = traces(own)
    mine = lowered[rank] if isinstance(lowered, tuple | list) else lowered
    try:
        apply_lowered(own, mine, digest=digests[rank], device_type="cpu")
    except PlanError as failure:
        return {
            "codes": [d.code for d in failure.diagnostics],
            "text": str(failure),
            "cause": str(failure.__cause__ or ""),
            "untouched": traces(own) == before,
        }
    return None


def twice(lowered):
    """What the second apply says."""
    model = build("llama")
    apply_lowered(model, lowered, digest=DIGEST, device_type="cpu")
    try:
        apply_lowered(model, lowered, digest=DIGEST, device_type="cpu")
    except PlanError as failure:
        return str(failure)
    return None


def handle(lowered):
    """What the handle of a run knows."""
    run = apply_lowered(build("llama"), lowered, digest=DIGEST, device_type="cpu")
    unknown = None
    try:
        run.meshes["nowhere"]
    except KeyError as failure:
        unknown = str(failure)
    return {
        "mesh": tuple(run.mesh.shape),
        "names": run.mesh.mesh_dim_names,
        "dp": run.meshes["dp"].size(),
        "tp": run.meshes["tp"].size(),
        "joined": run.meshes["dp_shard_tp"].size(),
        "submesh": run.submesh("dp_shard").size(),
        "data": (run.data_rank, run.data_size),
        "data_mesh": run.data_mesh.get_local_rank(),
        "text": run.describe(),
        "digest": run.digest,
        "unknown": unknown,
    }


def nested():
    """A checkpoint inside a module that is wrapped already, as the list of operations may say."""
    lowered = llama(AXES, checkpoint=True)
    inner = Checkpoint(modules=modules("model.layers[0:2].mlp"))
    at = next(i for i, op in enumerate(lowered.ops) if isinstance(op, Checkpoint))
    lowered = lowered.map_ops(lambda _: (*lowered.ops[: at + 1], inner, *lowered.ops[at + 1 :]))
    model = build("llama")
    apply_lowered(model, lowered, digest=DIGEST, device_type="cpu")
    return [name for name, m in model.named_modules() if type(m).__name__ == "CheckpointWrapper"]


def fails():
    """One rank raises."""
    if distributed.get_rank() == 1:
        raise ValueError("rank one is not well")
    return distributed.get_rank()


def dies():
    import os

    if distributed.get_rank() == 1:
        os._exit(7)
    distributed.barrier()


def hangs():
    import time

    time.sleep(60)
