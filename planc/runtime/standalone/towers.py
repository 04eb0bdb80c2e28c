"""Towers of images and of sound on data ranks whose batches have none.

FSDP gathers a tower's weights, and reduces their gradients, on all ranks or on none:
a rank that does not run its tower leaves the others waiting, or meets them in another
collective. So it runs the tower on an image, or a sound, of another rank, of which it
keeps nothing.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from planc.compat.trees import _pytree
from planc.runtime.standalone.collectives import all_gather
from planc.runtime.standalone.images import (
    OF_IMAGES,
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
"""The method that computes the features of images, by the key of `OF_IMAGES`."""
SOUND = ("input_features", "input_values")
"""The arguments of sounds, which `get_audio_features` takes."""
LANGUAGE_MODEL = "language_model"
"""The module that gets the embeddings with features among them."""
FEATURES = "pooler_output"
"""The field of transformers' outputs with the features to put among the embeddings."""
OF_TOWER = ("last_hidden_state", "hidden_states", "attentions")
"""The other fields of such an output, which the tower itself returns. The code of the
holder reads the same names of its language model, so their use in it tells nothing."""


class TowerError(ValueError):
    """Ranks that cannot run a tower together."""


class SharedTower:
    """Makes data ranks without images, or sounds, run the tower of those with some.

    Args:
        holder: the module that puts features among the embeddings of tokens.
        mesh: the data ranks.
        model: it is a part of.
    """

    def __init__(self, holder: nn.Module, mesh: DeviceMesh, model: nn.Module) -> None:
        self.holder, self.mesh, self.model = holder, mesh, model
        self.signature = inspect.signature(model.forward)
        self.kinds = kinds_of(holder, [*self.signature.parameters])
        self.donors: dict[str, int] = {}
        self.waiting: list[str] = []
        self.nothing: list[Tensor] = []
        self.watched: dict[str, Any] = {}
        self.running = False
        self.raised: Callable[[list[str], bool], Exception] = differ
        watch = torch.compiler.disable(self._enter)
        model.register_forward_pre_hook(watch, with_kwargs=True)
        # before FSDP gathers what it has: as where images are
        last = torch.compiler.disable(self._run_remaining_towers)
        decoder = getattr(holder, LANGUAGE_MODEL)
        decoder.register_forward_pre_hook(last, prepend=True, with_kwargs=True)

    def needs_collectives(self) -> bool:
        """Whether the ranks meet in collectives of a tower in the next pass."""
        stages = stages_of(self.model)
        if stages is not None and stages.running != 0:
            return False
        inner = self.holder.named_children()
        parts = [child for name, child in inner if name != LANGUAGE_MODEL]
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
        self._leave()
        if not self.needs_collectives():
            return
        given = self.signature.bind_partial(*args, **kwargs).arguments
        own = [given.get(name) is not None for name in self.kinds]
        every = self._facts([*own, given.get("input_ids") is None])
        by_kind = dict(zip(self.kinds, zip(*every, strict=True), strict=False))
        unlike = [n for n, ranks in by_kind.items() if any(ranks) and not all(ranks)]
        if unlike and any(each[-1] for each in every):
            raise self.raised(unlike, own[[*self.kinds].index(unlike[0])])
        has = dict(zip(self.kinds, own, strict=True))
        self.donors = {name: by_kind[name].index(True) for name in unlike}
        self.waiting = [name for name in unlike if not has[name]]
        for name in self.kinds if unlike else ():
            if has[name]:
                self._watch(name)

    def _leave(self) -> None:
        """Ends a pass, or what one that raised has left."""
        self.donors, self.waiting, self.nothing, self.running = {}, [], [], False
        for method in [*self.watched]:
            self._unwatch(method)

    def _facts(self, own: list[bool]) -> list[list[int]]:
        """All-gathers the facts of each rank's arguments, by rank."""
        mine = torch.tensor(own, dtype=torch.int64, device=self.mesh.device_type)
        every = mine.new_empty(self.mesh.size() * len(mine))
        all_gather(every, mine, group=self.mesh.get_group())
        found: list[list[int]] = every.view(self.mesh.size(), -1).tolist()
        return found

    def _watch(self, name: str) -> None:
        """In this pass, before the model computes features of its own, those that come
        before them are computed, and what they are computed of is told.
        """
        method = self.kinds[name]
        plain = getattr(self.holder, method)

        @wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.running:  # some models compute videos by their method for images
                return plain(*args, **kwargs)
            self._unwatch(method)
            order = [*self.kinds]
            for other in order[: order.index(name)]:
                self._run(other)
            if name in self.donors:
                self._broadcast_first_input(name, arguments(plain, args, kwargs))
            self.running = True
            made = plain(*args, **kwargs)
            self.running = False
            return made

        self.watched[method] = self.holder.__dict__.get(method)
        self.holder.__dict__[method] = torch.compiler.disable(call)

    def _unwatch(self, method: str) -> None:
        earlier = self.watched.pop(method)
        if earlier is None:
            del self.holder.__dict__[method]
        else:
            self.holder.__dict__[method] = earlier

    def _run(self, name: str) -> None:
        """Computes features of another rank's inputs, of which it keeps nothing, where
        this rank has none and others have.
        """
        if name not in self.waiting:
            return
        self.waiting.remove(name)
        given = self._broadcast_first_input(name, {})
        self.running = True
        made = getattr(self.holder, self.kinds[name])(**given)
        self.running = False
        self.nothing.append(nothing_of(list(self._features(made))))

    def _broadcast_first_input(
        self, name: str, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Broadcasts the first image or sound of the donor rank, the first rank that
        has one.
        """
        box: list[Any] = [None]
        donor = self.donors[name]
        if self.mesh.get_local_rank() == donor:
            try:
                box = [first_input(given, name)]
            except ImagesError as error:
                box = [str(error)]
        group = self.mesh.get_group()
        distributed.broadcast_object_list(box, group=group, group_src=donor)
        if isinstance(box[0], str):
            raise TowerError(box[0])
        device = self.mesh.device_type
        found: dict[str, Any] = box[0]
        return {
            n: value.to(device) if isinstance(value, Tensor) else value
            for n, value in found.items()
        }

    def _run_remaining_towers(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Behind the towers that this rank's own inputs ran."""
        if not self.donors:
            return None
        for name, method in self.kinds.items():
            self._run(name)
            if method in self.watched and name in self.donors:
                self._broadcast_first_input(name, {})
                raise TowerError(unused_input_error(name))
        nothing = [*self.nothing]
        self._leave()
        if not nothing:
            return None
        hidden = kwargs["inputs_embeds"]
        added = torch.stack(nothing).sum().to(hidden.dtype)
        if isinstance(hidden, DTensor):
            alike = [Replicate()] * hidden.device_mesh.ndim
            mesh = hidden.device_mesh
            added = DTensor.from_local(added, mesh, alike, run_check=False)
        return args, {**kwargs, "inputs_embeds": hidden + added}

    def _features(self, made: Any) -> Iterator[Tensor]:
        """The tensors of an output that the code of the holder reads: others have no
        gradient where images are.
        """
        if isinstance(made, Mapping):
            made = [made[name] for name in read_fields(self.holder, made)]
        leaves = _pytree.tree_leaves(made)
        yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))


def kinds_of(holder: nn.Module, names: list[str]) -> dict[str, str]:
    """The inputs of a model that it puts features of among the embeddings, and the
    methods that compute these, in the order in which its code asks for them.

    Args:
        names: of the arguments of the model.
    """
    every = {**METHODS, **dict.fromkeys(SOUND, "get_audio_features")}
    code = inspect.unwrap(type(holder).forward).__code__.co_names
    asked = {n: m for n, m in every.items() if n in names and m in code}
    return dict(sorted(asked.items(), key=lambda pair: code.index(pair[1])))


def arguments(method: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, by their names."""
    names = [*inspect.signature(method).parameters]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def first_input(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The arguments of the first image, or of the first sound.

    Raises:
        ImagesError: there is none, or images cannot be told apart.
    """
    if name not in given:
        raise ImagesError(unused_input_error(name))
    if name in OF_IMAGES:
        some = some_images(given, name, 0, 1)
    else:
        count = len(given[name])
        tensors = (
            (n, v) for n, v in given.items() if isinstance(v, Tensor) and v.dim()
        )
        some = {n: value[:1] for n, value in tensors if len(value) == count}
    plain = (bool, int, float, str, list, tuple)
    rest = {n: v for n, v in given.items() if n not in some and isinstance(v, plain)}
    own = {n: v.detach().cpu() for n, v in some.items() if isinstance(v, Tensor)}
    return {**rest, **own}


def unused_input_error(name: str) -> str:
    """The error message for an input of one rank that its model does not use."""
    return f"a rank passes `{name}`, of which the model's code computes no features"


def read_fields(holder: nn.Module, made: Mapping[str, Any]) -> list[str]:
    """The fields of what a tower returns that the code of the holder reads."""
    read = inspect.unwrap(type(holder).forward).__code__.co_names
    apart = OF_TOWER if FEATURES in made else ()
    return [n for n in made if n in read and n not in apart]


def differ(names: list[str], own: bool) -> Exception:
    """The error of ranks some of which pass images and embeddings in place of ids."""
    what = " and ".join(f"`{name}`" for name in names)
    has = "does" if own else "does not"
    return TowerError(f"some data ranks pass {what} and others do not; this rank {has}")


def tower_on_all_ranks(holder: nn.Module, mesh: DeviceMesh, model: nn.Module) -> None:
    """Arguments as of `SharedTower`."""
    setattr(model, TOWER, SharedTower(holder, mesh, model))
