"""The first forward passes: ranks compare the inputs that they read.

Ranks that split one layer must compute on the same rows. Where they read different ones, torch
says nothing: each rank adds its part of one product to another rank's part of another. Ranks of a
data axis should read different rows; where all read the same, the step is that of one rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from planc.diagnostic import PlanError, one_of
from planc.ops.base import AxisRole
from planc.ops.lowered import Lowered
from planc.ops.tensor_parallel import Parallelize
from planc.runtime.gradients import valid_labels
from planc.runtime.meshes import Meshes, rows_of
from planc.runtime.preconditions import stop, warning
from planc.runtime.same_kinds import Hook, kinds_hook
from planc.runtime.same_weights import plain, tensor_sum, text_sum
from planc.runtime.script_line import script_line
from planc.runtime.standalone.context import CONTEXT

_ARGUMENTS = 32
"""The arguments that are told apart in a message; the same for all ranks, whatever they read."""

Leaves = list[tuple[str, Any]]
"""Everything in the arguments of a call, by a name such as `input_ids`."""


@dataclass(slots=True)
class FirstPasses:
    """What is compared before the first `passes` of a model: the inputs of ranks that must read the
    same (`mesh`) or, in training passes, should read different ones (`data`), and weights, unless
    they are loaded. `kinds` compares in all training passes.

    A pass without gradients may be one data rank's own, such as a sample that it generates, so the
    others are not waited for.
    """

    passes: int = 0
    mesh: DeviceMesh | None = None
    data: DeviceMesh | None = None
    different_weights: PlanError | None = None
    splits: str = "layers"
    kinds: Hook | None = None
    seen: int = field(default=0, init=False)  # passes over `mesh`
    trained: int = field(default=0, init=False)  # passes over `data`
    counted: bool = field(default=False, init=False)  # the labels of all ranks, by the script
    alike: int = field(default=0, init=False)  # passes in which all data ranks read the same

    def labels_counted(self) -> None:
        """The script counts the labels of all ranks, so it divides by them."""
        self.counted = True

    def weights_loaded(self) -> None:
        """All ranks have the same weights now."""
        self.different_weights = None

    @property
    def _alike(self) -> DeviceMesh | None:
        """The ranks whose inputs must be the same in the next pass."""
        return self.mesh if self.seen < self.passes else None

    @property
    def _apart(self) -> DeviceMesh | None:
        """The ranks whose inputs should differ in the next training pass."""
        return self.data if self.trained < self.passes else None

    @property
    def done(self) -> bool:
        left = self._alike, self._apart, self.different_weights
        return all(one is None for one in left)

    def before(self, args: Any, kwargs: Any, model: nn.Module | None = None) -> None:
        """Before a forward pass, of a model or of what cuts its batch.

        Raises:
            PlanError: PL483 or PL545, the inputs differ; PL484, the weights do. On every rank of
                the mesh.
        """
        if self.different_weights is not None:
            raise self.different_weights
        leaves = list(_leaves(args, kwargs))
        if (mesh := self._alike) is not None:
            self.seen += 1
            rows = _rows(leaves, mesh)
            if any(row != rows[0] for row in rows):
                raise _different(rows, leaves, mesh, self)
        if (data := self._apart) is not None and torch.is_grad_enabled():
            self.trained += 1
            rows = _rows(leaves, data, _averaged(model, kwargs))
            self.alike += all(row == rows[0] for row in rows)
            self._warn([row[-1] for row in rows], "_".join(data.mesh_dim_names or ()))

    def _warn(self, labels: list[int], axis: str) -> None:
        """Warns of data ranks that read the same, and of ones that average different numbers of
        labels (negative for a rank that averages none), once.
        """
        if self.alike == self.passes:
            warning(
                "PL487",
                f"the {len(labels)} ranks of {axis} read the same inputs in the first "
                f"{self.trained} training passes, so a step is that of one of them",
                *script_line("the inputs are passed here"),
                help="a sampler takes num_replicas=run.data_size and rank=run.data_rank",
            )
        least, most = min(labels), max(labels)
        if 0 <= least < most and not self.counted:
            self.counted = True
            warning(
                "PL478",
                f"the ranks of {axis} take the means of their losses over {least} to {most} labels "
                f"in training pass {self.trained}: the mean of these is not that over all labels",
                *script_line("the loss is averaged here"),
                help="call `run.forward_backward(batches)`, or the model with `num_items_in_batch="
                "run.num_items_in_batch(*labels)`, of all passes of a step",
            )


def first_passes(model: nn.Module, lowered: Lowered, meshes: Meshes, passes: int) -> FirstPasses:
    """What is compared before the first `passes` of a model, and in all; for 0 nothing."""
    if not passes:
        return FirstPasses()
    alike, apart = _tensor_ranks(lowered, meshes), _data_ranks(lowered, meshes)
    return FirstPasses(passes, alike, apart, kinds=kinds_hook(model, lowered, meshes))


def _data_ranks(lowered: Lowered, meshes: Meshes) -> DeviceMesh | None:
    """The ranks along the innermost data axis, which has a process group in every plan; or None."""
    axes = [a.name for a in lowered.axes if a.name in lowered.data and a.size > 1]
    return meshes.part(axes[-1]) if axes else None


def _tensor_ranks(lowered: Lowered, meshes: Meshes) -> DeviceMesh | None:
    """The ranks that split the layers of one copy of the model, over all tensor axes.

    None if there are none, or if a style of the model itself says what each rank passes.
    """
    axes = [a.name for a in lowered.axes if a.role is AxisRole.TENSOR and a.size > 1]
    styled = (op for op in lowered.ops if isinstance(op, Parallelize))
    if not axes or any(not op.modules.path for op in styled):
        return None
    return meshes.part(*axes)


def watch(model: nn.Module, first: FirstPasses) -> None:
    """Calls `first.before` before each forward pass of the model, until it is done.

    The hook runs before all others, on the inputs as the script passes them. Where a script
    compiles the model as a whole, its hooks are compiled with it, and there nothing is compared.
    """
    if first.kinds is not None:
        model.register_forward_pre_hook(first.kinds, prepend=True, with_kwargs=True)
    if first.done:
        return
    handle: RemovableHandle

    def hook(model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not first.done:
            first.before(args, kwargs, model)
        if first.done:
            handle.remove()

    handle = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    model.register_load_state_dict_post_hook(lambda _, found: _loaded(first, found))


def _loaded(first: FirstPasses, found: Any) -> None:
    if not found.missing_keys:
        first.weights_loaded()


def _leaves(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    paths, _ = _pytree.tree_flatten_with_path((list(args), dict(kwargs)))
    for path, leaf in paths:
        positional, name = path[0] == _pytree.SequenceKey(0), path[1]
        own = f"argument {name.idx}" if positional else str(name.key)
        yield f"{own}{_pytree.keystr(path[2:])}", leaf


_MEANS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
"""The ends of names of transformers' models whose loss is a mean over the labels that count."""


def _averaged(model: nn.Module | None, kwargs: Any) -> Tensor | int:
    """The number of labels that the loss of a training pass is the mean of; -1 for a pass of
    another kind. Of parts of sequences (`shift_labels`) the labels of all are counted, as planc
    averages over them all.
    """
    context = None if model is None else model.__dict__.get(CONTEXT)
    labels = kwargs.get("labels" if context is None else "shift_labels")
    trained = model is not None and model.training and torch.is_grad_enabled()
    counts = trained and type(model).__name__.endswith(_MEANS) and plain(labels)
    if not counts or kwargs.get("num_items_in_batch") is not None:
        return -1
    if context is None:
        return -1 if kwargs.get("shift_labels") is not None else valid_labels(labels)
    count = valid_labels(labels, shifted=False)
    distributed.all_reduce(count, group=context.group)
    return count


def _rows(leaves: Leaves, mesh: DeviceMesh, labels: Tensor | int = -1) -> list[list[int]]:
    """`_row` of every rank, and a number of labels."""
    own = _row(leaves, mesh.device_type)
    return rows_of(torch.cat([own, torch.as_tensor(labels, device=own.device).view(1)]), mesh)


def _row(leaves: Leaves, device: str) -> Tensor:
    """What is in the arguments, as int64: their names, types and shapes, and then each by itself.

    A DTensor is a part of its value, and other objects have no bytes: only their type counts.
    """
    columns = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(_ARGUMENTS)]
    told = ""
    for i, (name, leaf) in enumerate(leaves):
        shown = repr(leaf) if isinstance(leaf, bool | int | float | str | None) else ""
        if isinstance(leaf, Tensor):
            shown = f"{leaf.dtype} {tuple(leaf.shape)}"
            if plain(leaf):
                at = i % _ARGUMENTS
                columns[at] = columns[at] * 31 + tensor_sum(leaf).to(device)
        told += f"{name} {type(leaf).__name__} {shown}\n"
    return torch.stack([torch.tensor(text_sum(told), device=device), *columns])


def _different(
    rows: list[list[int]], leaves: Leaves, mesh: DeviceMesh, first: FirstPasses
) -> PlanError:
    ranks = distributed.get_process_group_ranks(mesh.get_group())
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, row in zip(ranks, rows, strict=True):
        groups.setdefault(tuple(row), []).append(rank)
    told = one_of((", ".join(map(str, some)) for some in groups.values()), last="and")
    columns = [i for i in range(_ARGUMENTS) if len({row[i + 1] for row in rows}) > 1]
    if len({row[0] for row in rows}) > 1:
        what = "their arguments, or the types and shapes of these, differ"
    else:
        names = [f"`{name}`" for i, (name, _) in enumerate(leaves) if i % _ARGUMENTS in columns]
        what = f"{one_of(names, last='and')} differ{'s' if len(names) == 1 else ''}"
    message = (
        f"the ranks {told} of {'_'.join(mesh.mesh_dim_names or ())} split the same {first.splits} "
        f"and read different inputs in {{}} {first.seen}: {what}"
    )
    labels = script_line("the inputs are passed here")
    help = "a sampler takes num_replicas=run.data_size and rank=run.data_rank: the ranks of a "
    if first.splits == "sequences":
        help += "context axis read the same rows"
        return stop("PL545", message.format("batch"), *labels, help=help)
    help += "tensor axis read the same rows"
    return stop("PL483", message.format("forward pass"), *labels, help=help)
