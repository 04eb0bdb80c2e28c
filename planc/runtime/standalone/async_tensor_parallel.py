"""Collectives of tensor parallelism beside the matrix products that need them.

Emitted scripts inline these definitions without their types.
"""

from torch.distributed.device_mesh import DeviceMesh


def enable_async_tp(mesh: DeviceMesh) -> None:
    """Makes the compiler cut all-gathers and reduce-scatters of an axis into parts, and
    run each beside the matrix product of another, in modules compiled from now on.

    As torchtitan does it: torch's name for the pass is micro-pipeline tensor
    parallelism, and it moves the parts through symmetric memory.

    Raises:
        ValueError: the device is not CUDA.
    """
    if mesh.device_type != "cuda":
        text = "asynchronous tensor parallelism needs CUDA: symmetric memory is on GPUs"
        raise ValueError(f"{text}, and the device is {mesh.device_type}")
    import torch._inductor.config
    from torch.distributed import _symmetric_memory

    torch._inductor.config._micro_pipeline_tp = True
    _symmetric_memory.enable_symm_mem_for_group(mesh.get_group().group_name)
