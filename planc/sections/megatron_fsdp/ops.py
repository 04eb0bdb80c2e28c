"""Megatron-FSDP as a backend: `megatron_fsdp.fully_shard_model`."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from planc.model.facts import Modules
from planc.ops import base, call, phrases
from planc.ops.backend import Backend
from planc.ops.fsdp import WORDS, FullyShard

OPTIONS = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "report_nan_in_param_grad": False,
    "average_in_collective": False,
    "disable_bucketing": False,
    "keep_fp8_transpose_cache": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
    "fsdp_db_use_persist_buf_on_alloc_fail": False,
    "disable_symmetric_registration": False,
    "enable_fine_grained_param_gather": False,
    "maxpool_double_buffer": False,
}
"""The keywords of `fully_shard_model` that a plan can set, and their defaults."""

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
OUTER = ("no_shard", "optim")
_SETTABLE = base.Form(
    {
        "properties": {name: {"const": not default} for name, default in OPTIONS.items()},
        "additionalProperties": False,
    }
)

TENSOR = "tp_of_one"
"""The tensor dimension of the package's mesh, which it requires even for one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronShard(Backend):
    """`megatron_fsdp.fully_shard_model` of the whole model, one call.

    Args:
        classes: the names of the units' classes, which the call takes.
        strategy, outer: `zero_dp_strategy` and `outer_dp_sharding_strategy`.
        main_params, main_grads, grad_comm: the dtype names of its mixed precision policy.
        summed: `calculate_per_token_loss`: gradients are summed and not averaged.
        experts: whether some parameters have names that the package takes for experts', for which
            it needs the same mesh a second time.
        options: further keywords that are not at their defaults.
    """

    classes: base.Some[base.Name]
    strategy: Annotated[str, base.choice(*STRATEGIES)] = "optim_grads_params"
    outer: Annotated[str, base.choice(*OUTER)] = "no_shard"
    main_params: base.Dtype | None = "float32"
    main_grads: base.Dtype | None = None
    grad_comm: base.Dtype | None = None
    summed: bool = False
    experts: bool = False
    options: Annotated[base.Pairs[bool], _SETTABLE] = ()

    TITLE: ClassVar = "Megatron-FSDP"
    FUNCTION: ClassVar = "megatron_fsdp.fully_shard_model"
    NEEDS: ClassVar = "CUDA, megatron_fsdp"
    UNPROVED: ClassVar = "Megatron-FSDP runs only on CUDA, where planc proves nothing"
    SETTINGS: ClassVar = ("strategy", "outer_strategy", "megatron")

    @property
    def optimizer_dtype(self) -> str | None:
        return self.main_params

    def misfits(self, modules: Mapping[str, object]) -> Iterator[str]:
        """Modules of the unit classes, or of their subclasses, that are not units of the plan."""
        classes = tuple({type(m) for m in modules.values() if type(m).__name__ in self.classes})
        wanted = {name for members in self.members for name in members.names()}
        for name, module in modules.items():
            if isinstance(module, classes) and name not in wanted:
                yield f"{name} is a {type(module).__name__}, and would be a separate unit"

    def units(self) -> Iterator[FullyShard]:
        whole = self.strategy == "optim_grads_params"
        for member in (*self.members, Modules((), self.members[0].module)):
            yield FullyShard(
                members=(member,),
                shard=self.shard if whole else (),
                replicate=self.replicate if whole else (*self.replicate, *self.shard),
                reshard=whole and member.path != (),
                reduce=self.grad_comm or self.main_grads,
                origin=self.origin,
            )

    SCRIPT: ClassVar = call.ScriptFunction("shard", "Shards the model with Megatron-FSDP.")

    def calls(self, context: call.Context) -> Iterator[call.Step]:
        names, data = self._mesh(context)
        policy = (
            ("main_params_dtype", call.dtype(self.main_params)),
            ("main_grads_dtype", call.dtype(self.main_grads)),
            ("grad_comm_dtype", call.dtype(self.grad_comm)),
        )
        of_units = (call.MODEL, call.Items(self.classes))
        precision = call.FunctionCall("megatron_fsdp:MixedPrecisionPolicy", (), policy)
        current = (call.DEVICE_TYPE, call.FunctionCall("torch:cuda.current_device"))
        keywords: call.Keywords = (
            ("module", call.MODEL),
            ("device_mesh", data),
            ("dp_shard_dim", names[-2]),
            *self._groups(names, data),
            ("tp_dim", TENSOR),
            (
                "fsdp_unit_modules",
                call.FunctionCall("sections.megatron_fsdp.standalone:unit_classes", of_units),
            ),
            ("zero_dp_strategy", self.strategy),
            ("outer_dp_sharding_strategy", self.outer),
            ("device", call.FunctionCall("torch:device", current)),
            ("mixed_precision_policy", call.Shared("policy", precision)),
            *((("calculate_per_token_loss", True),) if self.summed else ()),
            *self.options,
        )
        made = call.FunctionCall("megatron_fsdp:fully_shard_model", (), keywords)
        wrapped = call.Shared("wrapped", made, note=self.place)
        name = "sections.megatron_fsdp.standalone:in_place"
        yield call.Once(call=call.FunctionCall(name, (call.MODEL, wrapped)))

    WORD: ClassVar = "megatron"
    ABOUT: ClassVar[tuple[str, ...]] = ("members",)
    WORDS: ClassVar[base.Words] = {name: WORDS[name] for name in ("shard", "replicate", "nbytes")}

    def headline(self, mesh: base.AxisSizes | None = None) -> str:
        """The axes, the strategy and the dtypes."""
        parts = [f"on {phrases.axes(self.shard, mesh)}"]
        if self.replicate:
            outer = f", {self.outer}" if self.outer != "no_shard" else ""
            parts.append(f"replicated over {phrases.axes(self.replicate, mesh)}{outer}")
        kinds = {"optimizer": self.main_params, "gradients": self.main_grads}
        kinds["sent"] = self.grad_comm
        parts += [self.strategy, *(f"{n} {phrases.dtype(v)}" for n, v in kinds.items() if v)]
        parts += ["gradients summed"] if self.summed else []
        return ", ".join((*parts, *(f"{n} = {str(v).lower()}" for n, v in self.options)))

    @classmethod
    def section(cls, ops: Sequence[Self], mesh: base.AxisSizes) -> Iterator[str]:
        """The call: its units, and the parameters outside of them."""
        for op in ops:
            yield phrases.head(cls.WORD, op.headline(mesh))
            count = sum(map(len, op.members))
            kept = ": gathered once, and kept" if op.strategy == "optim_grads_params" else ""
            numbers = f"{count} units of {' and '.join(op.classes)}"
            note = f"{numbers}, at most {phrases.size(op.gathered)} gathered"
            paths = ", ".join(phrases.together(map(str, op.members)))
            yield from phrases.table([(paths, note), ("the rest", f"in no unit{kept}")])

    def entries(self, _common: Set[base.Group]) -> Iterator[base.Entry]:
        """The call, and its units."""
        yield base.Entry(kind=self.WORD, place=self.place, brief=self.headline(), source=self)
        for members in self.members:
            yield base.Entry(kind=f"{self.WORD} unit", modules=members, place=self.place)

    def _groups(self, names: tuple[str, ...], data: call.Shared) -> call.Keywords:
        """The keywords of replicate axes, and of experts, which get the same mesh again."""
        pair = call.FunctionCall("._flatten", (call.Index(data, names[:2]), "hybrid"))
        hybrid = call.Shared("hybrid", call.FunctionCall(".get_group", (pair,)))
        keywords: call.Keywords = ()
        if self.replicate:
            keywords += (("dp_outer_dim", names[0]), ("hybrid_fsdp_group", hybrid))
        if self.experts:
            keywords += (("expt_device_mesh", data),)
        if self.experts and self.replicate:
            keywords += (("hybrid_fsdp_expt_group", hybrid),)
        return keywords

    def _mesh(self, context: call.Context) -> tuple[tuple[str, ...], call.Shared]:
        """The package's mesh: the names of its dimensions, and its value.

        It has the data axes and a tensor dimension of size 1. Axes of one rank are moved to the
        end, where they do not change the order of ranks.
        """
        sizes = context.axes
        groups = [self.replicate] if self.replicate else []
        groups.append(tuple(name for name in sizes if name in self.shard))
        names = (*("_".join(group) for group in groups), TENSOR)
        known = list(sizes)
        used = [known.index(name) for group in groups for name in group]
        rest = [i for i in range(len(known)) if i not in used]
        wide = [i for i in used if sizes[known[i]] > 1]
        ranks: call.Attribute | call.FunctionCall = call.Attribute(call.MESH, "mesh")
        if wide != sorted(wide):
            ranks = call.FunctionCall(".permute", (ranks, *used, *rest))
        ranks = call.FunctionCall(".reshape", (ranks, *map(context.size, groups), 1))
        note = "a separate mesh, with the tensor dimension that the package requires"
        arguments = (call.DEVICE_TYPE, call.Shared("ranks", ranks, note=note))
        made = call.FunctionCall(
            "torch.distributed.device_mesh:DeviceMesh", arguments, (("mesh_dim_names", names),)
        )
        return names, call.Shared("data", made)


BACKEND = MegatronShard
