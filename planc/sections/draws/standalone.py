"""Random number generators that are equal along an axis, or differ by rank."""

import hashlib
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh


def sync_rng_state(mesh: DeviceMesh, axis: str) -> None:
    """Copies the random state of an axis's first rank to all, for CPU and device.

    DTensor's tracker, which torch starts with the state of the first of all ranks,
    starts with each rank's own: ranks that read different rows stay different.
    """
    group = mesh[axis].get_group()
    first = distributed.get_global_rank(group, 0)

    def of_first(state: torch.Tensor) -> torch.Tensor:
        state = state.to(mesh.device_type)
        distributed.broadcast(state, src=first, group=group)
        return state.cpu()

    torch.set_rng_state(of_first(torch.get_rng_state()))
    if mesh.device_type == "cuda":
        torch.cuda.set_rng_state(of_first(torch.cuda.get_rng_state()))
        known = torch.distributed.tensor._random
        if known._rng_tracker is None:
            known._rng_tracker = known.OffsetBasedRNGTracker(mesh, run_state_sync=False)


def hash_number(*values: int | bytes, size: int) -> int:
    """A number of `size` bytes that looks random."""
    text = b" ".join(v if isinstance(v, bytes) else b"%d" % v for v in values)
    return int.from_bytes(hashlib.blake2b(text, digest_size=size).digest(), "big")


def default_generator(device_type: str) -> Any:
    """The default generator of random numbers of this device."""
    if device_type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.random.default_generator


def draw(by_rank: bool, rank: int, device_type: str) -> None:
    """Switches the default generator between a stream by rank and the common one.

    All is in the generator's seed: a key, the same on all ranks, and a hash of key and
    rank. So a state that checkpointing or a script restores tells which stream it is
    of, and the common stream after it follows from the key, whatever each rank drew.
    """
    generator = default_generator(device_type)
    seed = generator.initial_seed()
    key = seed >> 32
    is_by_rank = seed == key << 32 | hash_number(key, rank, size=4)
    if by_rank and not is_by_rank:
        key = hash_number(generator.get_state().numpy().tobytes(), size=4)
        generator.manual_seed(key << 32 | hash_number(key, rank, size=4))
    elif is_by_rank and not by_rank:
        generator.manual_seed(hash_number(key, size=8))


def draw_by_rank(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    inside: bool | None = None,
    after: bool | None = None,
) -> None:
    """Random numbers in a module and after it: by rank on shards, or the same on all.

    Args:
        module: where the layout of activations changes.
        mesh: the ranks that shard them.
        inside, after: whether they are shards there; None changes nothing.
    """
    rank, kind = mesh.get_local_rank(), mesh.device_type
    switch = torch.compiler.disable(draw)  # generators are unknown to the compiler

    def enter(_module: nn.Module, _inputs: Any) -> None:
        switch(bool(inside), rank, kind)

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        switch(bool(after), rank, kind)

    if inside is not None:
        module.register_forward_pre_hook(enter)
    if after is not None:  # also where the module raises: the next pass begins as all
        module.register_forward_hook(leave, always_call=not after)


def draw_apart(model: nn.Module, mesh: DeviceMesh, axes: tuple[str, ...]) -> None:
    """Makes a model's random numbers differ between the ranks along some axes.

    Before each forward pass, of a batch or of a microbatch in a stage, an RNG state
    that is not specific to this rank's coordinates is made specific: the seed becomes a
    key and a hash of the key and the coordinates. So ranks that a script gives one seed
    use different numbers, consecutive passes continue one stream, and a state that
    checkpointing restores gives the same numbers again.

    Args:
        model: the model, or a stage of a pipeline.
        mesh: the mesh with all axes.
        axes: the axes whose ranks hold different layers, or different tokens of the
            same rows.
    """
    coordinates = [mesh.get_local_rank(axis) for axis in axes]
    kind = mesh.device_type

    def enter(_module: nn.Module, _inputs: Any) -> None:
        generator = default_generator(kind)
        seed = generator.initial_seed()
        if seed != (seed >> 32) << 32 | hash_number(
            seed >> 32, b"apart", *coordinates, size=4
        ):
            key = hash_number(generator.get_state().numpy().tobytes(), size=4)
            own = hash_number(key, b"apart", *coordinates, size=4)
            generator.manual_seed(key << 32 | own)

    model.register_forward_pre_hook(torch.compiler.disable(enter))
