"""A vision tower on data ranks whose batches have no image.

FSDP gathers the tower's weights, and reduces their gradients, on all ranks or on none:
a rank that does not run its tower leaves the others waiting, or meets them in another
collective. So it runs the tower on an image of another rank, of which it keeps nothing.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree

from planc.runtime.standalone.collectives import all_gather
from planc.runtime.standalone.images import (
    ImagesError,
    nothing_of,
    some_images,
)
from planc.runtime.standalone.pipeline import stages_of
from planc.runtime.standalone.shards import groups_of

TOWER = "_shared_tower"
"""The attribute of a model that holds its `SharedTower`."""
METHODS = {
    "pixel_values": "get_image_features",
    "pixel_values_videos": "get_video_features",
}
"""What computes the features of images, by the key of `OF_IMAGES`."""
SOUND = ("input_features", "input_values")
FEATURES = "pooler_output"
"""Where transformers puts the features that go among the embeddings of tokens."""
OF_TOWER = ("last_hidden_state", "hidden_states", "attentions")
"""What the tower itself returns beside them. The code of the holder reads the same
names of its language model, so that it has them tells nothing."""


class TowerError(ValueError):
    """Ranks that cannot run a tower together."""


class SharedTower:
    """Makes data ranks without images run the tower of those with some.

    Args:
        holder: the module that puts features among the embeddings of tokens.
        mesh: the data ranks.
        model: it is a part of.
    """

    def __init__(self, holder: nn.Module, mesh: DeviceMesh, model: nn.Module) -> None:
        self.holder, self.mesh, self.model = holder, mesh, model
        self.signature = inspect.signature(model.forward)
        self.kinds = [n for n in METHODS if n in self.signature.parameters]
        self.waiting: list[tuple[str, dict[str, Tensor]]] = []
        self.raised: Callable[[list[str], bool], Exception] = differ
        watch = torch.compiler.disable(self._enter)
        model.register_forward_pre_hook(watch, with_kwargs=True)
        embedding = model.get_input_embeddings()
        embedding.register_forward_hook(torch.compiler.disable(self._embedded))

    def needed(self) -> bool:
        """Whether the ranks meet in collectives of the tower in the next pass."""
        stages = stages_of(self.model)
        if stages is not None and stages.running != 0:
            return False
        inner = self.holder.named_children()
        parts = [child for name, child in inner if name != "language_model"]
        units = [
            m for part in parts for m in part.modules() if isinstance(m, FSDPModule)
        ]
        if torch.is_grad_enabled():
            trained = (p.requires_grad for part in parts for p in part.parameters())
            return bool(units) or any(trained)
        return any(
            not group.is_unsharded for unit in units for group in groups_of(unit)
        )

    def _enter(self, _model: nn.Module, args: Any, kwargs: Any) -> None:
        self.waiting.clear()
        if not self.needed():
            return
        given = self.signature.bind_partial(*args, **kwargs).arguments
        own = [given.get(name) is not None for name in self.kinds]
        apart = any(given.get(name) is not None for name in SOUND)
        facts = [*own, apart, given.get("input_ids") is None]
        every = self._facts(facts)
        by_kind = dict(zip(self.kinds, zip(*every, strict=True), strict=False))
        unlike = [n for n, ranks in by_kind.items() if any(ranks) and not all(ranks)]
        if unlike and any(any(each[len(own) :]) for each in every):
            raise self.raised(unlike, own[self.kinds.index(unlike[0])])
        for name in unlike:
            at = self.kinds.index(name)
            donor = by_kind[name].index(True)
            image = self._received(name, given, donor)
            if not own[at]:
                self.waiting.append((name, image))

    def _facts(self, own: list[bool]) -> list[list[int]]:
        """What is true of each rank's arguments."""
        mine = torch.tensor(own, dtype=torch.int64, device=self.mesh.device_type)
        every = mine.new_empty(self.mesh.size() * len(mine))
        all_gather(every, mine, group=self.mesh.get_group())
        found: list[list[int]] = every.view(self.mesh.size(), -1).tolist()
        return found

    def _received(
        self, name: str, given: Mapping[str, Any], donor: int
    ) -> dict[str, Tensor]:
        """The first image of a rank, on all ranks."""
        box: list[Any] = [None]
        if self.mesh.get_local_rank() == donor:
            try:
                found = some_images(given, name, 0, 1)
                tensors = {n: v for n, v in found.items() if isinstance(v, Tensor)}
                box = [{n: value.detach().cpu() for n, value in tensors.items()}]
            except ImagesError as error:
                box = [str(error)]
        group = self.mesh.get_group()
        distributed.broadcast_object_list(box, group=group, group_src=donor)
        if isinstance(box[0], str):
            raise TowerError(box[0])
        return {n: value.to(self.mesh.device_type) for n, value in box[0].items()}

    def _embedded(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """After the embedding, as where images are: units are gathered in one order."""
        waiting, self.waiting = self.waiting, []
        for name, image in waiting:
            made = getattr(self.holder, METHODS[name])(**image, return_dict=True)
            nothing = nothing_of(list(self._features(made))).to(output.dtype)
            if isinstance(output, DTensor):
                alike = [Replicate()] * output.device_mesh.ndim
                mesh = output.device_mesh
                nothing = DTensor.from_local(nothing, mesh, alike, run_check=False)
            output = output + nothing
        return output

    def _features(self, made: Any) -> Iterator[Tensor]:
        """The tensors of an output that the code of the holder reads: others have no
        gradient where images are.
        """
        if isinstance(made, Mapping):
            made = [made[name] for name in read_fields(self.holder, made)]
        leaves = _pytree.tree_leaves(made)
        yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))


def read_fields(holder: nn.Module, made: Mapping[str, Any]) -> list[str]:
    """The fields of what a tower returns that the code of the holder reads."""
    read = inspect.unwrap(type(holder).forward).__code__.co_names
    apart = OF_TOWER if FEATURES in made else ()
    return [n for n in made if n in read and n not in apart]


def differ(names: list[str], own: bool) -> Exception:
    """The error of ranks that pass images and sound, some of them without images."""
    what = " and ".join(f"`{name}`" for name in names)
    has = "does" if own else "does not"
    return TowerError(f"some data ranks pass {what} and others do not; this rank {has}")


def tower_on_all_ranks(holder: nn.Module, mesh: DeviceMesh, model: nn.Module) -> None:
    """Arguments as of `SharedTower`."""
    setattr(model, TOWER, SharedTower(holder, mesh, model))
