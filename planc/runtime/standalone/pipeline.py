"""One rank of a pipeline: the model's own forward, with the parameters of its stages.

A block of another stage passes its hidden states on, so the model's own code computes
masks, positions and layer types on every stage, and no forward is rewritten. On a later
stage the first block of the model returns what was received; the first block after a
stage's own ones keeps what is sent. What runs after that has no effect.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planc.runtime.standalone.pipeline_images import SentFeatures
from planc.runtime.standalone.pipeline_values import SentValues
from planc.runtime.standalone.shards import named_tensors

THERE_AND_BACK = ("zbv", "dualpipe_v", "timetable_v")
"""Schedules under which a rank's second stage is as far from the end as its first from
the start.
"""
OF_THE_MACHINE = (
    MemoryError,
    torch.OutOfMemoryError,
    torch.AcceleratorError,
    distributed.DistError,
)
"""Errors of a device or a process group, which no module that is missing produces."""
CPU_ALLOCATOR = "CPUAllocator: "
"""A part of torch's message for a CPU without memory, whose type is `RuntimeError`."""
PIPELINE = "_planc_pipeline"
"""The attribute of a model that holds its `Stages`."""


class Stages:
    """The stages of one rank.

    Args:
        model: whose blocks are cut.
        mesh: the ranks of the pipeline, one-dimensional.
        local_stages: the stages of this rank, in order.
        blocks: the name of the list of blocks.
        bounds: the first block of each stage, and the number of blocks.
        inputs, outputs: of the first and of the last stage besides their blocks.
        returned: the number of values that a block returns in a tuple; 0 for a tensor.
        shared: modules of the first and of the last stage that share parameters: both
            stages hold them.
        ties: the names of these parameters.
        copies: (stages, names, modules) of parameters that other stages share.
        given, states: arguments of blocks that are sent beside hidden states.
        schedule, microbatches: of a step.
        rank_passes: the passes of each rank, where these are the schedule.
        added: after how many of the first blocks features of images are added, if the
            first stage has fewer; else 0.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        *,
        local_stages: Sequence[int],
        blocks: str,
        bounds: Sequence[int],
        inputs: Sequence[nn.Module],
        outputs: Sequence[nn.Module],
        returned: int,
        shared: Sequence[nn.Module],
        ties: Sequence[str],
        schedule: str,
        microbatches: int,
        copies: Sequence[Any] = (),
        given: Sequence[str] = (),
        states: Sequence[str] = (),
        rank_passes: Sequence[str] = (),
        added: int = 0,
    ) -> None:
        self.mesh, self.own, self.bounds = mesh, tuple(local_stages), tuple(bounds)
        self.returned, self.schedule, self.microbatches = (
            returned,
            schedule,
            microbatches,
        )
        self.rank_passes = tuple(rank_passes)
        text = model.get_submodule(blocks.rpartition(".")[0])
        self.features = SentFeatures(text, self.bounds, added) if added else None
        self.count = len(bounds) - 1
        self.values = SentValues(given, states, bounds) if given or states else None
        copies_of_stages = [((0, self.count - 1), ties, shared), *copies]
        mine = [copy for copy in copies_of_stages if {*copy[0]} & {*local_stages}]
        self.shares = [([*self._ranks(copy[0])], copy[1]) for copy in mine]
        held = {module for *_, modules in mine for module in modules}
        # a shared module may be inside one of another stage, as a head beside its bias
        tensors = dict(named_tensors(model))
        kept = {id(tensors[name]) for _, names, _ in mine for name in names}
        self.names = dict.fromkeys(tensors).keys()  # in the order of the model
        self.running: int | None = None
        self.received: Tensor | None = None
        self.kept: Tensor | None = None
        self.complete = False  # whether all that the stage sends is kept
        self.runner: Any = None  # of the schedule, made by its first step
        self._places = self._find_modules(model, blocks, inputs, outputs)
        self._inactive: dict[tuple[nn.Module, str], Inactive] = {}
        for place, (module, stage, make) in self._places.items():
            if stage in self.own or module in held:
                self._inactive[place] = Inactive(module, make(module))
            else:
                module.forward = make(module)
                empty(module, mesh.device_type, kept)
        self.plain = model.forward

        @functools.wraps(self.plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.forward(*args, **kwargs)

        model.forward = forward

    @property
    def last(self) -> bool:
        """Whether this rank has the last stage, which computes the loss."""
        return self.count - 1 in self.own

    @property
    def absent(self) -> list[nn.Module]:
        """The modules that this rank does not compute."""
        return [
            module
            for place, (module, *_) in self._places.items()
            if place not in self._inactive
        ]

    def _find_modules(
        self,
        model: nn.Module,
        blocks: str,
        inputs: Sequence[nn.Module],
        outputs: Sequence[nn.Module],
    ) -> dict[tuple[nn.Module, str], tuple[nn.Module, int, Any]]:
        """Modules with a stage: (their parent, their name) to the module, its stage,
        and the function that makes its forward on other stages.
        """
        places: dict[tuple[nn.Module, str], tuple[nn.Module, int, Any]] = {}
        entry, leave = {*inputs}, {*outputs}
        for parent in model.modules():
            for name, child in parent.named_children():
                if child in entry:
                    places[parent, name] = child, 0, self._placeholder
                elif child in leave:
                    places[parent, name] = child, self.count - 1, identity
        self.cut = cut = model.get_submodule(blocks)
        for i, (name, block) in enumerate(cut.named_children()):
            stage = next(s for s in range(self.count) if i < self.bounds[s + 1])
            places[cut, name] = block, stage, functools.partial(self._passing, i)
        return places

    def _ranks(self, stages: Sequence[int]) -> Iterator[int]:
        """The ranks that have some stages, in order."""
        size, back = self.mesh.size(), self.schedule in THERE_AND_BACK
        for rank in range(size):
            second = self.count - 1 - rank
            if any(s in (rank, second) if back else s % size == rank for s in stages):
                yield rank

    def _passing(self, number: int, _block: nn.Module) -> Callable[..., Any]:
        """The forward of a block on the stages that it is no part of."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = first_tensor(args, kwargs)
            assert self.running is not None
            if number == 0 and self.received is not None:
                hidden = self.received
            if number >= self.bounds[self.running + 1]:
                if self.values is not None:
                    self.values.keep(self.running, number, args, kwargs)
                if self.kept is None:
                    self.kept = hidden
                self.complete = self.values is None or number == self.bounds[-1] - 1
                hidden = hidden.detach()  # what follows is of no use here
            return (hidden, *[None] * (self.returned - 1)) if self.returned else hidden

        return forward

    def _placeholder(self, module: nn.Module) -> Callable[..., Any]:
        """The forward of a module of the first stage on the others: zeros of the shape
        of its output where that is known.
        """
        width = getattr(module, "embedding_dim", None) or getattr(
            module, "out_features", None
        )
        looked_up = hasattr(module, "embedding_dim")

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = first_tensor(args, kwargs)
            if width is None:
                return given
            assert self.received is not None
            shape = given.shape if looked_up else given.shape[:-1]
            return torch.zeros(
                (*shape, int(width)), dtype=self.received.dtype, device=given.device
            )

        return forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on the stage that runs: its output on the last one, else
        what it sends.
        """
        if self.running is None:
            text = "a stage cannot run by itself: call run.forward_backward"
            raise RuntimeError(text)
        try:
            output = self.plain(*args, **kwargs)
        except OF_THE_MACHINE:
            raise
        except Exception as error:
            # as where what predicts a second token is joined with what it has not
            last = self.running == self.count - 1
            if last or not self.complete or CPU_ALLOCATOR in str(error):
                raise
            return self.kept  # what runs after the blocks of a stage has no effect
        return output if self.running == self.count - 1 else self.kept

    def run(
        self, model: nn.Module, stage: int, received: Tensor | None, kwargs: Any
    ) -> Any:
        """One forward pass of a stage of this rank."""
        with self._only(stage):
            self.running, self.received, self.kept = stage, received, None
            self.complete = False
            try:
                return model(**kwargs)
            finally:
                self.running = self.received = self.kept = None

    @contextmanager
    def _only(self, stage: int) -> Iterator[None]:
        """Replaces the modules of this rank's other stages by modules that pass their
        input through. Checkpoint wrappers and hooks keep the original modules.
        """
        others = [place for place in self._inactive if self._places[place][1] != stage]
        first, end = self.bounds[stage : stage + 2]
        blocks = self.cut.named_children() if self.values is not None else ()
        fed = [(i, name) for i, (name, _) in enumerate(blocks) if first <= i < end]
        removed = [*others, *((self.cut, name) for _, name in fed)]
        before = [(parent, name, parent._modules[name]) for parent, name in removed]
        try:
            for parent, name, module in before[: len(others)]:
                stand_in = self._inactive[parent, name]
                stand_in.__dict__["module"] = module  # in its checkpoint
                parent._modules[name] = stand_in
            for i, name in fed:
                assert self.values is not None
                block = self.cut._modules[name]
                replaced = functools.partial(self.values.call, block, stage, i)
                self.cut._modules[name] = Inactive(block, replaced)
                self.cut._modules[name]._modules["block"] = block  # others look for it
            yield
        finally:
            for parent, name, module in before:
                parent._modules[name] = module

    def copies(self, model: nn.Module) -> list[tuple[nn.Parameter, list[int]]]:
        """The parameters that other ranks hold too, and all ranks that do."""
        tensors: dict[str, Any] = dict(named_tensors(model))
        return [
            (tensors[name], ranks)
            for ranks, names in self.shares
            if len(ranks) > 1
            for name in names
        ]

    def counted_elsewhere(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters that an earlier rank holds too."""
        me = self.mesh.get_local_rank()
        return [parameter for parameter, ranks in self.copies(model) if ranks[0] != me]


class Inactive(nn.Module):  # type: ignore[misc]
    """Replaces a module while another stage of its rank runs.

    Args:
        module: the replaced module, whose attributes the model's code may read.
        forward: the forward to run instead of the module's.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["module"] = module
        self.__dict__["forward"] = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)


def split(model: nn.Module, mesh: DeviceMesh, **terms: Any) -> None:
    """Leaves a model the parameters of one rank's stages; arguments as of `Stages`."""
    setattr(model, PIPELINE, Stages(model, mesh, **terms))


def empty(module: nn.Module, device: str, kept: set[int]) -> None:
    """Removes the parameters and buffers of a module and of all inside, but for those
    kept, by their ids. The model's code still reads their device and dtype.
    """
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in kept:
                    tensors[name] = None
                    left = torch.empty(0, dtype=tensor.dtype, device=device)
                    # a script may assign it to another module
                    if tensors is part._parameters:
                        left = nn.Parameter(left, requires_grad=False)
                    part.__dict__[name] = left


def first_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states in the arguments of a block: the first tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise ValueError("a block got no tensor")


def identity(_module: nn.Module) -> Callable[..., Any]:
    """The forward of a module of the last stage on the others."""
    return lambda *args, **kwargs: first_tensor(args, kwargs)


def stages_of(model: nn.Module) -> Stages | None:
    """The stages of a model, None without a pipeline."""
    stages: Stages | None = getattr(model, PIPELINE, None)
    return stages


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor that a rank sends. It is not a view, because some schedules
    detach it in place.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    passed_on = local.is_leaf and local.requires_grad  # it was received
    return local.clone() if local._is_view() or passed_on else local
