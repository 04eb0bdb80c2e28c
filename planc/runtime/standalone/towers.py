"""Vision and audio encoders ("towers") on data ranks whose batches have no such inputs.

FSDP all-gathers a tower's weights and reduces their gradients on all ranks. If one rank
skipped its tower, the others would wait, or their collective would match another one.
So a rank without images or audio runs the tower on an input of another rank, and
discards the features.
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
"""The model's method that computes image features, by the name of the input."""
SOUND = ("input_features", "input_values")
"""The audio inputs, which `get_audio_features` accepts."""
LANGUAGE_MODEL = "language_model"
"""The module that receives the embeddings, with features inserted."""
FEATURES = "pooler_output"
"""The field of a tower's output with the features to insert into the embeddings."""
OF_TOWER = ("last_hidden_state", "hidden_states", "attentions")
"""The other fields of such an output, which the tower itself returns. The code of the
holder reads the same names of its language model, so their use in it tells nothing."""


class TowerError(ValueError):
    """The inputs of the ranks do not allow them to run a tower together."""


class SharedTower:
    """Makes data ranks without images or audio run the towers that other ranks run.

    Args:
        holder: the module that inserts features into the token embeddings.
        mesh: the data-parallel ranks.
        model: the model that contains `holder`.
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
        """Whether the next pass has collectives of a tower."""
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
        passed = [given.get(name) is not None for name in self.kinds]
        facts = self._facts([*passed, given.get("input_ids") is None])
        by_kind = dict(zip(self.kinds, zip(*facts, strict=True), strict=False))
        unlike = [n for n, ranks in by_kind.items() if any(ranks) and not all(ranks)]
        if unlike and any(each[-1] for each in facts):
            raise self.raised(unlike, passed[[*self.kinds].index(unlike[0])])
        has = dict(zip(self.kinds, passed, strict=True))
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

    def _facts(self, passed: list[bool]) -> list[list[int]]:
        """All-gathers the facts of each rank's arguments, by rank."""
        mine = torch.tensor(passed, dtype=torch.int64, device=self.mesh.device_type)
        gathered = mine.new_empty(self.mesh.size() * len(mine))
        all_gather(gathered, mine, group=self.mesh.get_group())
        by_rank: list[list[int]] = gathered.view(self.mesh.size(), -1).tolist()
        return by_rank

    def _watch(self, name: str) -> None:
        """Wraps the method that computes features of this rank's inputs, for one pass.

        Before it runs, the towers of earlier kinds run on other ranks' inputs, and its
        first input is broadcast if other ranks lack one.
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
            output = plain(*args, **kwargs)
            self.running = False
            return output

        self.watched[method] = self.holder.__dict__.get(method)
        self.holder.__dict__[method] = torch.compiler.disable(call)

    def _unwatch(self, method: str) -> None:
        earlier = self.watched.pop(method)
        if earlier is None:
            del self.holder.__dict__[method]
        else:
            self.holder.__dict__[method] = earlier

    def _run(self, name: str) -> None:
        """Runs the tower of a kind of input on another rank's input, if this rank has
        none, and keeps only a zero that depends on the features.
        """
        if name not in self.waiting:
            return
        self.waiting.remove(name)
        given = self._broadcast_first_input(name, {})
        self.running = True
        output = getattr(self.holder, self.kinds[name])(**given)
        self.running = False
        self.nothing.append(nothing_of(list(self._features(output))))

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
        arguments_of_first: dict[str, Any] = box[0]
        return {
            n: value.to(device) if isinstance(value, Tensor) else value
            for n, value in arguments_of_first.items()
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

    def _features(self, output: Any) -> Iterator[Tensor]:
        """The tensors of a tower's output that the holder's code reads. Other tensors
        have no gradient on ranks with images either.
        """
        if isinstance(output, Mapping):
            output = [output[name] for name in read_fields(self.holder, output)]
        leaves = _pytree.tree_leaves(output)
        yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))


def kinds_of(holder: nn.Module, names: list[str]) -> dict[str, str]:
    """The inputs whose features the model inserts into the embeddings, with the methods
    that compute the features, in the order of the model's code.

    Args:
        names: the names of the model's arguments.
    """
    methods = {**METHODS, **dict.fromkeys(SOUND, "get_audio_features")}
    code = inspect.unwrap(type(holder).forward).__code__.co_names
    asked = {n: m for n, m in methods.items() if n in names and m in code}
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
        first = some_images(given, name, 0, 1)
    else:
        count = len(given[name])
        tensors = (
            (n, v) for n, v in given.items() if isinstance(v, Tensor) and v.dim()
        )
        first = {n: value[:1] for n, value in tensors if len(value) == count}
    plain = (bool, int, float, str, list, tuple)
    rest = {n: v for n, v in given.items() if n not in first and isinstance(v, plain)}
    tensors_on_cpu = {
        n: v.detach().cpu() for n, v in first.items() if isinstance(v, Tensor)
    }
    return {**rest, **tensors_on_cpu}


def unused_input_error(name: str) -> str:
    """The error message for an input of one rank that its model does not use."""
    return f"a rank passes `{name}`, of which the model's code computes no features"


def read_fields(holder: nn.Module, output: Mapping[str, Any]) -> list[str]:
    """The fields of a tower's output that the holder's code reads."""
    read = inspect.unwrap(type(holder).forward).__code__.co_names
    apart = OF_TOWER if FEATURES in output else ()
    return [n for n in output if n in read and n not in apart]


def differ(names: list[str], passed: bool) -> Exception:
    """The error of ranks some of which pass images and embeddings in place of ids."""
    what = " and ".join(f"`{name}`" for name in names)
    has = "does" if passed else "does not"
    return TowerError(f"some data ranks pass {what} and others do not; this rank {has}")


def tower_on_all_ranks(holder: nn.Module, mesh: DeviceMesh, model: nn.Module) -> None:
    """Arguments as of `SharedTower`."""
    setattr(model, TOWER, SharedTower(holder, mesh, model))
