"""Compares the inputs of ranks before each forward pass.

Ranks that split one layer must compute on the same rows. Where they read different ones, torch
says nothing: each rank adds its part of one product to another rank's part of another. Ranks of a
data axis should read different rows; where all read the same, the step is that of one rank.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from planc.compat.trees import _pytree
from planc.diagnostics.diagnostic import PlanError, one_of
from planc.ops.base import AxisRole
from planc.ops.lowered import Lowered
from planc.runtime.counted_labels import IGNORE_INDEX, NEXT_LABELS, rule_of
from planc.runtime.meshes import Meshes, rows_of
from planc.runtime.preconditions import stop, warning
from planc.runtime.safeguards.checksums import difference, plain, tensor_sum, text_sum
from planc.runtime.safeguards.loss_rows import (
    NUMBERS as LOSS_NUMBERS,
)
from planc.runtime.safeguards.loss_rows import (
    LossRowsOfPass,
    from_bits,
    logits_of,
    noted_next_labels,
    nothing_sent,
    own_means,
)
from planc.runtime.safeguards.padded_lengths import lengths_hook
from planc.runtime.safeguards.weights import SameWeights
from planc.runtime.script_line import script_line
from planc.runtime.standalone.collectives import all_gather
from planc.runtime.standalone.context import CONTEXT
from planc.runtime.standalone.images import OF_IMAGES
from planc.runtime.standalone.towers import SOUND, kinds_of

_ARGUMENTS = 32
"""The arguments that are told apart in a message; the same for all ranks, whatever they read."""
_FORMS = "their arguments, or the types and shapes of these,"

Leaves = list[tuple[str, Any]]
"""Everything in the arguments of a call, by a name such as `input_ids`."""
Rows = list[list[int]]
"""A few integers of each rank, by rank."""
Hook = Callable[[nn.Module, Any, Any], None]


@dataclass(slots=True)
class SameRows:
    """The inputs of ranks that must read the same, along each of some axes.

    The first `passes` are compared before they run. What a later one has read is compared before
    the next, so none waits: the ranks send a few numbers each, which arrive meanwhile.

    Args:
        code, what, of, help: of the finding: what a pass is called, what the ranks share, and what
            to do.
    """

    passes: int
    meshes: tuple[DeviceMesh, ...]
    code: str
    what: str
    of: str
    help: str
    seen: int = field(default=0, init=False)
    last: list[Callable[[], None]] = field(default_factory=list, init=False)

    def before(self, leaves: Leaves) -> None:
        """Before a pass.

        Raises:
            PlanError: the inputs of this pass or of the one before it differ.
        """
        self.settle()
        self.seen += 1
        names, what = [name for name, _ in leaves], f"{self.what} {self.seen}"
        for mesh in self.meshes:
            rows = _gather_row(_row(leaves, mesh.device_type), mesh)
            self.last.append(partial(self._require_equal, mesh, rows, names, what))
        if self.seen <= self.passes:
            self.settle()

    def settle(self) -> None:
        """Compares what the last pass has read, if that is open."""
        last, self.last = self.last, []
        for compare in last:
            compare()

    def _require_equal(
        self, mesh: DeviceMesh, rows: Callable[[], Rows], names: list[str], what: str
    ) -> None:
        """Raises where the rows differ that ranks have sent; on every rank of the axis."""
        every, ranks = rows(), distributed.get_process_group_ranks(mesh.get_group())
        found = difference([{str(i): v for i, v in enumerate(row)} for row in every], ranks)
        if found is None:
            return
        unlike = {int(name) - 1 for name in found.names}
        some = [f"`{name}`" for i, name in enumerate(names) if i % _ARGUMENTS in unlike]
        said = _FORMS if -1 in unlike else one_of(some, last="and")
        raise stop(
            self.code,
            f"the ranks {found.ranks} of {'_'.join(mesh.mesh_dim_names or ())} {self.of} and read "
            f"different inputs in {what}: {said} differ{'s' if len(some) == 1 else ''}",
            *script_line("the inputs are passed here"),
            help=self.help,
        )


def _gather_row(own: Tensor, mesh: DeviceMesh) -> Callable[[], Rows]:
    """Sends a row to all ranks of a mesh; what it returns waits for theirs, not for the device."""
    every = own.new_empty(mesh.size() * own.numel())
    work = all_gather(every, own, group=mesh.get_group(), async_op=True)
    wait, copy = work.wait, every
    if every.device.type != "cpu":
        work.wait()  # the stream does
        copy, arrived = every.to("cpu", non_blocking=True), torch.Event(every.device)
        arrived.record()
        wait = arrived.synchronize

    def rows() -> Rows:
        wait()
        return copy.view(mesh.size(), -1).tolist()  # type: ignore[no-any-return]

    return rows


_SAMPLER = "a sampler takes num_replicas=run.data_size and rank=run.data_rank: the ranks of a {} "


def same_rows(lowered: Lowered, meshes: Meshes, passes: int) -> SameRows | None:
    """The inputs of the model's forward on ranks that split its layers, along each tensor axis, or
    images, which it gets whole.

    None if there are none, or if a style of the model itself says what each rank passes.
    """
    images = [op.axis for op in lowered.contexts if op.patches]
    axes = [a.name for a in lowered.axes if a.role is AxisRole.TENSOR] + images
    if any(not op.modules.path for op in lowered.styles):
        return None
    help = _SAMPLER.format("tensor axis") + "read the same rows"
    of = "split the same layers"
    if images:
        help = _SAMPLER.format("tensor or a context axis") + "read the same rows, and draw the "
        help, of = help + "same noise and timesteps", f"{of} and images"
    return _along(lowered, axes, meshes, passes, "PL483", "forward pass", of, help)


def same_batches(lowered: Lowered, meshes: Meshes, passes: int) -> SameRows | None:
    """The batches of ranks that share sequences, or are stages of a pipeline."""
    axes = [*lowered.split_axes(AxisRole.SEQUENCE), *lowered.split_axes(AxisRole.STAGE)]
    help = _SAMPLER.format("context axis, and of a pipeline,") + "read the same rows"
    return _along(lowered, axes, meshes, passes, "PL545", "batch", "run the same batches", help)


def _along(
    lowered: Lowered, axes: Sequence[str], meshes: Meshes, passes: int, *words: str
) -> SameRows | None:
    wide = tuple(meshes.part(axis) for axis in axes if lowered.axis_size(axis) > 1)
    return SameRows(passes, wide, *words) if passes and wide else None


def _innermost(lowered: Lowered, meshes: Meshes) -> DeviceMesh | None:
    """The ranks along the innermost data axis, which has a process group in every plan; or None."""
    return meshes.part(lowered.wide_data[-1]) if lowered.wide_data else None


@dataclass(slots=True)
class PassComparison:
    """The comparisons of ranks before the passes of a model: the values that must be equal (`rows`,
    `weights`), in training passes the kinds and lengths of inputs that data ranks pass (`kinds`),
    and in the first `passes` of these whether they read different rows (`data`), and the labels
    that their losses count.

    A pass without gradients may be one data rank's own, such as a sample that it generates, so the
    others are not waited for.
    """

    passes: int = 0
    rows: SameRows | None = None
    data: DeviceMesh | None = None
    kinds: tuple[Hook, ...] = ()
    weights: SameWeights = field(default_factory=SameWeights)
    parts: tuple[DeviceMesh, ...] = ()  # the ranks that have parts of each sequence
    trained: int = field(default=0, init=False)  # passes over `data`, or of parts
    counted: bool = field(default=False, init=False)  # the labels of all ranks, by the script
    next_labels: Tensor | None = field(default=None, init=False)  # of the pass that runs
    measures: bool = field(default=False, init=False)  # whether the pass that runs is measured
    loss_rows: LossRowsOfPass | None = field(default=None, init=False)  # of the last pass
    alike: int = field(default=0, init=False)  # passes in which all data ranks read the same

    def labels_counted(self) -> None:
        """The script counts the labels of all ranks, so it divides by them."""
        self.counted = True

    @property
    def _open(self) -> bool:
        """Whether the next training pass is one of the first, in which more is compared."""
        return self.trained < self.passes and (self.data is not None or bool(self.parts))

    @property
    def done(self) -> bool:
        nothing = self.rows is None and not self.kinds and not self._open
        return nothing and self.weights.done

    def before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a forward pass.

        Raises:
            PlanError: PL483, the inputs differ; PL484, the weights do; PL422, the last loss takes
                other labels; PL479, PL424, other kinds or lengths of inputs. On every rank of
                the axis.
        """
        trains = torch.is_grad_enabled()
        if trains or self.weights.built is not None:
            self.weights.require(model)
        leaves = leaves_of(args, kwargs)
        if self.rows is not None:
            self.rows.before(leaves)
        if trains and self._open:
            self.trained += 1
            divisor = _divisor(model, kwargs)
            strayed = 0
            for part in self.parts:
                self._require_parts(model, kwargs, float(divisor), part.size())
                rows = rows_of(self._loss_row_bits(part.device_type), part)
                strayed = max(strayed, self._compare_losses(rows, part))
            if self.data is not None:
                strayed = self._compare(self.data, leaves, divisor, strayed)
            self._require_next_labels(strayed)
            self.loss_rows = None
            self.next_labels = noted_next_labels(leaf for _, leaf in leaves)
            self.measures = self._open and (bool(self.parts) or not self.counted)
        for compare in self.kinds:
            compare(model, args, kwargs)

    def _compare(
        self, data: DeviceMesh, leaves: Leaves, divisor: Tensor | float, strayed: int
    ) -> int:
        """Compares what the data ranks read, and by what they divide their losses. Returns the
        largest `strayed` of them, so that all stop together.
        """
        kind = data.device_type
        sent = torch.as_tensor(divisor, device=kind) * _FINE
        row = _row(leaves, kind), sent.round().long().view(1)
        most = torch.tensor([strayed], device=kind)
        every = rows_of(torch.cat([*row, self._loss_row_bits(kind), most]), data)
        rows = [each[: -LOSS_NUMBERS - 1] for each in every]
        self.alike += all(row == rows[0] for row in rows)
        divisors = [row[-1] / _FINE for row in rows]
        self._warn(divisors, "_".join(data.mesh_dim_names or ()))
        self._compare_losses([each[-LOSS_NUMBERS - 1 : -1] for each in every], data)
        return max(each[-1] for each in every)

    def after(self, output: Any) -> None:
        """After a forward pass: its loss is measured in the backward pass."""
        if not self.measures:
            return
        self.measures, logits = False, logits_of(output)
        if logits is not None:
            place = script_line("the logits are computed here")
            self.loss_rows = LossRowsOfPass(logits, self.next_labels, place)

    def _loss_row_bits(self, device: str) -> Tensor:
        return nothing_sent(device) if self.loss_rows is None else self.loss_rows.as_bits(device)

    def _require_next_labels(self, strayed: int) -> None:
        """Refuses a loss of the last pass that takes other labels than those of the next tokens, on
        any rank.

        Raises:
            PlanError: PL422.
        """
        if strayed:
            labels = () if self.loss_rows is None else self.loss_rows.place
            raise stop(
                "PL422",
                f"the loss of training pass {self.trained - 1} takes {strayed} tokens of a rank "
                "with other labels than those of the next tokens: it shifts a part of a sequence",
                *labels,
                help="take `part = run.batch(batch)`, and the cross entropy of all logits and "
                "`part['shift_labels']`, whose negative labels do not count",
            )

    def _compare_losses(self, bits: Rows, mesh: DeviceMesh) -> int:
        """Warns of means of the last pass over the ranks' own tokens, once. Returns how many tokens
        of a rank have other labels than those of the next tokens.
        """
        rows = [from_bits(each) for each in bits]
        axis, place = "_".join(mesh.mesh_dim_names or ()), self.loss_rows
        labels = () if place is None else place.place
        if own_means(rows) and not self.counted:
            self.counted = True
            least, most = (f(each.tokens for each in rows) for f in (min, max))
            warning(
                "PL478",
                f"the loss of training pass {self.trained - 1} is a mean over {least:g} to "
                f"{most:g} values on each rank of {axis}: the mean of these is not the mean over "
                "all ranks",
                *labels,
                help="divide the sum of the losses by `run.num_items_in_batch(*batches)`, for all "
                "gradient accumulation steps; for a mean of other values than tokens, by their "
                "number on all ranks over `run.data_size`",
            )
        return int(max(each.strayed for each in rows))

    def _require_parts(self, model: nn.Module, kwargs: Any, divisor: float, ranks: int) -> None:
        """Warns of a number of labels that leaves out that gradients are averaged over the parts of
        sequences, once.
        """
        if self.counted or kwargs.get("num_items_in_batch") is None or divisor < 0:
            return
        if divisor == float(_divisor(model, {**kwargs, "num_items_in_batch": None})):
            self.counted = True
            warning(
                "PL478",
                f"`num_items_in_batch` is {divisor:g}, the labels of this pass, and gradients are "
                f"averaged over the {ranks} ranks of each sequence: loss and gradients are "
                f"1/{ranks} of those of the mean",
                *script_line("the number is passed here"),
                help="pass `num_items_in_batch=run.num_items_in_batch(*labels)`, of all passes of "
                "a step",
            )

    def _warn(self, labels: list[float], axis: str) -> None:
        """Warns of data ranks that read the same, and of ones that divide the sums of their losses
        by different numbers of labels (negative for a rank of which that is not known), once.
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
                f"the ranks of {axis} take the means of their losses over {least:g} to {most:g} "
                f"labels in training pass {self.trained}: the mean of these is not that over all "
                "labels",
                *script_line("the loss is averaged here"),
                help="call `run.forward_backward(batches)`, or the model with `num_items_in_batch="
                "run.num_items_in_batch(*batches)`, for all gradient accumulation steps",
            )


def comparison(model: nn.Module, lowered: Lowered, meshes: Meshes, passes: int) -> PassComparison:
    """Builds the comparisons before the passes of a model, its first `passes` and all; for 0
    none.
    """
    if not passes:
        return PassComparison()
    stage = lowered.pipeline.axis if lowered.pipeline else ""
    axes = [a.name for a in lowered.axes if a.size > 1 and a.name != stage]
    shared, hooks = lowered.split_axes(AxisRole.SEQUENCE), (kinds_hook, lengths_hook)
    return PassComparison(
        passes,
        same_rows(lowered, meshes, passes),
        _innermost(lowered, meshes),
        tuple(hook for make in hooks if (hook := make(model, lowered, meshes))),
        SameWeights(tuple(map(meshes.part, axes))),
        tuple(meshes.part(axis) for axis in shared if lowered.axis_size(axis) > 1),
    )


def watch(model: nn.Module, compared: PassComparison) -> None:
    """Calls `compared.before` before each forward pass of the model, until it is done.

    The hook runs before all others, on the inputs as the script passes them. Where a script
    compiles the model as a whole, its hooks are compiled with it, and there nothing is compared.
    """
    if compared.weights.built is None:
        compared.weights.note(model)
    if compared.done:
        return
    handle: RemovableHandle
    last: RemovableHandle

    def hook(model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not compared.done:
            compared.before(model, args, kwargs)
        if compared.done:
            handle.remove()

    def after(_model: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        compared.after(output)
        if compared.done:
            last.remove()

    def forget_weights(_model: nn.Module, found: Any) -> None:
        if not found.missing_keys:
            compared.weights.built = None

    def of_part(_part: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        compared.weights.require(model)
        for each in parts:
            each.remove()

    handle = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    last = model.register_forward_hook(after)
    # a script may train parts by themselves first, whose weights then differ rightly
    parts = [part.register_forward_pre_hook(of_part, prepend=True) for part in model.children()]
    model.register_load_state_dict_post_hook(forget_weights)


def leaves_of(args: Any, kwargs: Mapping[str, Any]) -> Leaves:
    """Everything in the arguments of a call, by name."""
    leaves = []
    for path, leaf in _pytree.tree_flatten_with_path((list(args), dict(kwargs)))[0]:
        positional, name = path[0] == _pytree.SequenceKey(0), path[1]
        own = f"argument {name.idx}" if positional else str(name.key)
        leaves.append((f"{own}{_pytree.keystr(path[2:])}", leaf))
    return leaves


_FINE = 1024
"""The parts of a label in which the divisors of ranks are compared, as integers."""
_MEANS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
"""The ends of names of transformers' models whose loss is a mean over the labels that count."""


def _divisor(model: nn.Module | None, kwargs: Any) -> Tensor | float:
    """Returns the number by which a training pass divides the sum of the tokens' losses.

    It is the number that the script gives, which must be the same on all data ranks, or the number
    of labels of the pass; -1 for a pass of another kind. Under context parallelism the labels of
    all sequence shards count, because planc averages over them all.
    """
    context = None if model is None else model.__dict__.get(CONTEXT)
    trained = model is not None and model.training and torch.is_grad_enabled()
    labels = {name: kwargs.get(name) for name in ("labels", NEXT_LABELS)}
    tensors = [value for value in labels.values() if value is not None]
    counts = trained and type(model).__name__.endswith(_MEANS)
    if not counts or not tensors or not all(map(plain, tensors)):
        return -1
    number = kwargs.get("num_items_in_batch")
    if number is not None:
        return float(number)
    count = rule_of(model).count({**labels, IGNORE_INDEX: kwargs.get(IGNORE_INDEX)})
    if context is not None:
        distributed.all_reduce(count, group=context.group)
    return count


def _row(leaves: Leaves, device: str) -> Tensor:
    """Checksums of the arguments, as int64: first of their names, types and shapes, then of each
    value.

    A DTensor is a part of its value, and other objects have no bytes: only their type counts.
    Nothing waits for the device.
    """
    told, sums = "", dict[int, Tensor]()
    for i, (name, leaf) in enumerate(leaves):
        shown = repr(leaf) if isinstance(leaf, bool | int | float | str | None) else ""
        if isinstance(leaf, Tensor):
            shown = f"{leaf.dtype} {tuple(leaf.shape)}"
            if plain(leaf):
                own, at = tensor_sum(leaf).to(device, non_blocking=True), i % _ARGUMENTS
                sums[at] = sums[at] * 31 + own if at in sums else own
        told += f"{name} {type(leaf).__name__} {shown}\n"
    head = torch.tensor(text_sum(told)).to(device, non_blocking=True)
    none = torch.zeros((), dtype=torch.int64, device=device)
    return torch.stack([head, *(sums.get(at, none) for at in range(_ARGUMENTS))])


# Kinds of inputs ---------------------------------------------------------------------------------


_TEXT = "input_ids"
_SOUND = re.compile(r"audio|speech|input_(features|values)")
_OTHERS = re.compile(rf"pixel|image|video|{_SOUND.pattern}")
"""In the names of arguments for sound, and for images and sound."""


def kinds_hook(model: nn.Module, lowered: Lowered, meshes: Meshes) -> Hook | None:
    """Returns a hook that compares, before each forward pass with gradients, which of these
    arguments ranks pass. A rank whose batch has no image skips the vision tower, so that its next
    FSDP collective is matched with another one of the other ranks, and NCCL hangs or mixes up their
    bytes.

    A tower that all data ranks run together (`Op.shared_encoders`) compares them itself.

    None for a model that takes no others than text, or never text alone, and where nothing trains
    or is a unit that text alone does not reach. It costs an all-gather of two numbers over each
    data axis, and a wait for the device.
    """
    arguments = inspect.signature(model.forward)
    holders = [name for modules in lowered.shared_encoders for name in modules.names()]
    shared = {*OF_IMAGES, *chain(*OF_IMAGES.values())} if holders else set()
    kinds = [kinds_of(model.get_submodule(n), [*arguments.parameters]) for n in holders]
    if any(name in every for every in kinds for name in SOUND):
        shared |= {n for n in arguments.parameters if _SOUND.search(n)}
    names = [n for n in arguments.parameters if _OTHERS.search(n) and n not in shared]
    if not (names and lowered.wide_data and _TEXT in arguments.parameters):
        return None
    parts = [meshes.part(axis) for axis in lowered.wide_data]
    units = [
        model.get_submodule(name)
        for op in lowered.fsdp_units
        for members in op.members
        for name in members.names()
        if name
    ]
    needed: list[bool] = []  # after the first pass: modules are frozen after this is made

    def hook(model: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if not needed:
            needed.append(_beside_text(model, units))
        if needed[0]:
            given = arguments.bind_partial(*args, **kwargs).arguments
            _compare(names, [given.get(name) is not None for name in names], parts)

    return hook


def _beside_text(model: nn.Module, units: Iterable[nn.Module]) -> bool:
    """Whether parameters outside the language model train, or are gathered apart from the root."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return False
    kind = type(config.get_text_config())
    inside = [m for m in model.modules() if isinstance(getattr(m, "config", None), kind)]
    if not inside or model in inside:
        return False
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    inside += [head] if head is not None else []
    text = {id(p) for module in inside for p in module.parameters()}
    apart = {id(p) for unit in units for p in unit.parameters()}
    return any(
        id(p) not in text and (p.requires_grad or id(p) in apart) for p in model.parameters()
    )


def _compare(names: Sequence[str], given: Sequence[bool], parts: Sequence[DeviceMesh]) -> None:
    some = every = sum(1 << i for i, one in enumerate(given) if one)
    for part in parts:
        for other, common in rows_of(torch.tensor([some, every], device=part.device_type), part):
            some, every = some | other, every & common
    if some != every:
        unlike = [i for i in range(len(names)) if (some ^ every) >> i & 1]
        raise different_kinds([names[i] for i in unlike], given[unlike[0]])


def different_kinds(names: Sequence[str], own: bool) -> PlanError:
    """PL479: some data ranks pass arguments of some names, this one of the first of them or not."""
    kinds = one_of((f"`{name}`" for name in names), last="and")
    has = "does" if own else "does not"
    return stop(
        "PL479",
        f"some data ranks pass {kinds} and others do not; rank {distributed.get_rank()} {has}",
        *script_line("the inputs are passed here"),
        help="give each rank's batch an image or a sound, a blank one whose labels are ignored if "
        "it has none, or draw batches in which all ranks have some, or none has",
    )
