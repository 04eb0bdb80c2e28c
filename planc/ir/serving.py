"""The layout of a serving engine: the slices of the files' tensors on each of its ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planc.diagnostics.diagnostic import Label, Sink
from planc.diagnostics.source import Span
from planc.ir.mesh_axes import EXPERTS, TENSOR
from planc.ir.nodes import Meaning, Plan
from planc.ir.patches import FP8, HeldPatch, Index, Patch, RankTensor, TransferSide, scale_name
from planc.model.config import integer_of, text_of
from planc.model.config_fields import HEADS, KV_HEADS
from planc.model.facts import Facts, Modules
from planc.model.hub_tensors import HubWeight, hub_tensors, indices_of

VOCABULARY_MULTIPLE = 64
"""The padded size of a vocabulary is a multiple of it.

Source: `DEFAULT_VOCAB_PADDING_SIZE` of vLLM's and SGLang's vocab_parallel_embedding.py.
"""
FUSED = ("qkv", "merged", "whole", "experts")
"""The layers of several weights of the files."""
QUANTIZED = (*FUSED, "column", "row")
"""The layers whose weights are in fp8 if the engine's are."""
LAYERS = (*QUANTIZED, "vocab", "left_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRule(Meaning):
    """A line of a serve section: layers of the engine by the ends of their names.

    Args:
        ends: of names of the engine's layers.
        kind: of `LAYERS`.
        parts: the layers of the files that a fused layer consists of, in order.
        optional: whether the model may lack it.
        override: whether it replaces an earlier rule for the same tensors.
    """

    ends: tuple[str, ...]
    kind: str
    parts: tuple[str, ...] = ()
    optional: bool = False
    override: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving(Meaning):
    """A serve section: an engine's version, its ranks and its layers.

    Args:
        modules: the model.
        tp: the ranks of one engine that split layers.
        dp: the engines, or groups of ranks with equal attention layers.
        ep: the groups of ranks, of all, that have different experts; ranks of a group split each.
        fp8: the rows and columns that share a scale in weights of linear layers, which are then in
            fp8; 0 for none.
        dtype: torch's name of the dtype of other weights; None for that of the model.
        rows_by_ranks: whether a padded vocabulary that tp does not divide grows to a multiple that
            it does (SGLang), instead of being refused (vLLM).
    """

    modules: Modules
    engine: str
    version: str
    tp: int = 1
    dp: int = 1
    ep: int = 1
    fp8: int = 0
    dtype: str | None = None
    rows_by_ranks: bool = False
    rules: tuple[ServeRule, ...] = ()
    sizes: Mapping[str, Span] = field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self) -> int:
        return self.tp * self.dp

    def engine_text(self) -> str:
        return f"{self.engine} {self.version}".strip()


def serving_of(plan: Plan) -> Serving | None:
    """The serving engine that a plan describes, if it describes one."""
    rules = (rule for rules in plan.sections.values() for rule in rules)
    return next((rule for rule in rules if isinstance(rule, Serving)), None)


def engine_side(serving: Serving, facts: Facts, sink: Sink) -> TransferSide:
    """Lays out the tensors of a model's files over the ranks of an engine.

    Args:
        serving: the engine.
        facts: the model, without adapters.
        sink: receives PL692 and PL693, with the line of the rule.

    Raises:
        UnknownHubError: the tensors of the model's files are not known.
    """
    return _EngineLayout(serving, facts, sink).side()


@dataclass(frozen=True, slots=True, kw_only=True)
class _HubTensor:
    """A tensor of the files, with `{}` for the indices of layers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    indices: tuple[Index, ...]

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class _Slices:
    """The rows of one dim on a rank: where they begin here and there, and how many."""

    here: int
    there: int
    count: int


def _ends_with(module: str, end: str) -> bool:
    return module == end or module.endswith(f".{end}")


class _EngineLayout:
    """Applies rules to the tensors of the files, and collects patches and findings."""

    def __init__(self, serving: Serving, facts: Facts, sink: Sink) -> None:
        self.serving, self.facts, self.sink = serving, facts, sink
        self.hub = {tensor.name: tensor for tensor in self._tensors()}
        for tensor in [*self.hub.values()] if serving.fp8 else ():
            self._quantize(tensor)
        self.held: list[HeldPatch] = []
        self.tensors: list[RankTensor] = []
        self.used: set[tuple[int, str]] = set()
        self.reported: set[str] = set()

    def _tensors(self) -> Iterator[_HubTensor]:
        for weight in hub_tensors(self.facts):
            indices = tuple(indices_of(weight.modules))
            dtype = self._dtype(weight)
            for name, shape in weight.shapes:
                yield _HubTensor(name=name, shape=shape, dtype=dtype, indices=indices)

    def _dtype(self, weight: HubWeight) -> str:
        """The dtype in the engine; buffers, and what a cast leaves in float32, keep theirs."""
        parameter = weight.modules.module.parameter(weight.name)
        if parameter is None:
            return weight.dtype
        return parameter.cast(self.serving.dtype) if self.serving.dtype else parameter.dtype

    def _quantize(self, tensor: _HubTensor) -> None:
        """Makes the weight of a linear layer fp8, and adds its scales."""
        kinds = {r.kind for n, r in enumerate(self.serving.rules) if self._match(n, r, tensor)}
        if len(tensor.shape) == 2 and tensor.leaf == "weight" and kinds & {*QUANTIZED}:
            grid = tuple(-(-size // self.serving.fp8) for size in tensor.shape)
            scales = replace(tensor, name=scale_name(tensor.name), shape=grid, dtype="float32")
            self.hub[tensor.name] = replace(tensor, dtype=FP8)
            self.hub[scales.name] = scales

    def side(self) -> TransferSide:
        experts: dict[tuple[int, str, str], dict[int, dict[str, _HubTensor]]] = {}
        for tensor in self.hub.values():
            self._place(tensor, experts)
        for (number, _, key), by_expert in experts.items():
            self._stack(self.serving.rules[number], key, by_expert)
        self._unused_rules()
        held, tensors = tuple(self.held), tuple(self.tensors)
        return TransferSide(size=self.serving.size, held=held, tensors=tensors)

    # Rules -----------------------------------------------------------------------------------

    def _place(
        self,
        tensor: _HubTensor,
        experts: dict[tuple[int, str, str], dict[int, dict[str, _HubTensor]]],
    ) -> None:
        matches = [m for n, r in enumerate(self.serving.rules) if (m := self._match(n, r, tensor))]
        self.used |= {(number, end) for number, end, *_ in matches}
        last = max(
            (i for i, m in enumerate(matches) if self.serving.rules[m[0]].override), default=0
        )
        matches = matches[last:]
        if len(matches) > 1:
            rules = [self.serving.rules[m[0]] for m in matches[:2]]
            self._conflict(tensor, rules)
        if not matches:
            self._replicate(tensor)
            return
        number, end, place, expert = matches[0]
        rule = self.serving.rules[number]
        if expert is not None:
            by_expert = experts.setdefault((number, end, place), {})
            by_expert.setdefault(expert[0], {})[expert[1]] = tensor
        elif rule.kind == "left_out":
            return
        elif rule.parts:
            self._fuse(rule, tensor, place)
        else:
            self._split(rule, tensor)

    def _match(
        self, number: int, rule: ServeRule, tensor: _HubTensor
    ) -> tuple[int, str, str, tuple[int, str] | None] | None:
        """The rule's number, the end that fits, the engine's name of the tensor, and, of an expert,
        its number and its part; None if the rule is not for the tensor.
        """
        for end in rule.ends:
            if rule.kind == "experts":
                if (expert := _expert_of(tensor, end, rule.parts)) is not None:
                    place, index, part = expert
                    return number, end, place, (index, part)
            elif rule.parts:
                owner = end.rpartition(".")[0]
                for part in rule.parts:
                    inner = f"{owner}.{part}" if owner else part
                    if _ends_with(tensor.module, inner):
                        place = f"{tensor.module.removesuffix(inner)}{end}"
                        return number, end, place, None
            elif _ends_with(tensor.module, end) or (
                rule.kind == "left_out" and f".{end}." in f".{tensor.name}."
            ):
                return number, end, tensor.module, None
        return None

    def _conflict(self, tensor: _HubTensor, rules: Sequence[ServeRule]) -> None:
        if rules[0].origin == rules[1].origin or not self._first(
            f"{rules[0].origin}{rules[1].origin}"
        ):
            return
        self.sink.error(
            "PL102",
            f"two rules decide {tensor.name.replace('{}', '*')}",
            Label(span=rules[1].origin, text="this rule"),
            Label(span=rules[0].origin, text="and this one"),
            help="remove one, or write `override` before the one that applies",
        )

    def _unused_rules(self) -> None:
        tied = [name.rpartition(".")[0] for w in hub_tensors(self.facts) for name in w.tied]
        for number, rule in enumerate(self.serving.rules):
            absent = [end for end in rule.ends if (number, end) not in self.used]
            unused = [end for end in absent if not any(_ends_with(name, end) for name in tied)]
            if unused and not rule.optional and rule.kind != "left_out":
                what = f"no tensor of {self.facts.name} belongs to `{unused[0]}`"
                help = "correct the name; `optional` before a rule is for models that may lack it"
                self.sink.error("PL693", what, rule.origin, help=help)

    # Layers ----------------------------------------------------------------------------------

    def _replicate(self, tensor: _HubTensor) -> None:
        self._add_tp(tensor, tensor.name, tensor.shape, lambda _: None, 0)

    def _split(self, rule: ServeRule, tensor: _HubTensor) -> None:
        shape, tp = tensor.shape, self.serving.tp
        if rule.kind == "row" and len(shape) < 2:  # a bias, which is added once
            self._replicate(tensor)
            return
        dim = 1 if rule.kind == "row" else 0
        size = self._pad_rows(shape[0]) if rule.kind == "vocab" else shape[dim]
        what = {"row": "columns", "column": "rows", "vocab": "padded rows"}[rule.kind]
        each = self._share(size, tp, f"{what} of {tensor.name}", rule, tensor)
        local = (*shape[:dim], each, *shape[dim + 1 :])

        def slices(t: int) -> _Slices:
            return _Slices(0, t * each, min(each, shape[dim] - t * each))

        self._add_tp(tensor, tensor.name, local, slices, dim)

    def _pad_rows(self, rows: int) -> int:
        multiple = VOCABULARY_MULTIPLE
        if self.serving.rows_by_ranks and -(-rows // multiple) * multiple % self.serving.tp:
            multiple *= self.serving.tp
        return -(-rows // multiple) * multiple

    def _fuse(self, rule: ServeRule, tensor: _HubTensor, place: str) -> None:
        """One of several weights that are rows of one weight of the engine."""
        at = next(i for i, part in enumerate(rule.parts) if _ends_with(tensor.module, part))
        owner = tensor.module.removesuffix(rule.parts[at])
        parts = [self.hub.get(f"{owner}{part}.{tensor.leaf}") for part in rule.parts]
        if lacking := [p for p, t in zip(rule.parts, parts, strict=True) if t is None]:
            self._lacks(rule, f"{owner}{lacking[0]}.{tensor.leaf}", tensor.name)
            return
        sizes = [part.shape[0] for part in parts if part is not None]
        rows = [self._rows(rule, n, size, tensor) for n, size in enumerate(sizes)]
        key = f"{place}.{tensor.leaf}"
        whole = (sum(count for count, _ in rows), *tensor.shape[1:])
        count, copies = rows[at]
        here = sum(n for n, _ in rows[:at])
        for part, (full, _) in zip(rule.parts[:-1], rows[:-1], strict=True):
            self._check_blocks(full, f"rows of {owner}{part}", rule, tensor)

        def slices(t: int) -> _Slices:
            return _Slices(here, 0 if rule.kind == "whole" else t // copies * count, count)

        self._add_tp(tensor, key, whole, slices, 0, hold=at == 0)

    def _rows(self, rule: ServeRule, number: int, size: int, tensor: _HubTensor) -> tuple[int, int]:
        """The rows of a part on a rank, and how many ranks have the same rows."""
        tp, owner = self.serving.tp, tensor.module.rpartition(".")[0]
        what = f"{owner}.{rule.parts[number]}"
        if rule.kind == "whole":
            return size, 1
        if rule.kind == "merged":
            return self._share(size, tp, f"rows of {what}", rule, tensor), 1
        heads = self._heads(KV_HEADS if number else ()) or self._heads(HEADS) or 1
        if number and tp > heads:
            copies = self._share(tp, heads, f"ranks of tp for the key-value heads of {what}", rule)
            return self._share(size, heads, f"rows of {what}", rule, tensor), max(copies, 1)
        self._share(heads, tp, f"heads of {what}", rule)
        return self._share(size, tp, f"rows of {what}", rule, tensor), 1

    def _heads(self, names: Sequence[str]) -> int:
        """The number of heads that the configuration of the text model states; 0 for none."""
        config = text_of(self.facts.config) or self.facts.config
        return integer_of(config, *names) or 0

    def _lacks(self, rule: ServeRule, part: str, there: str) -> None:
        if self._first(f"{rule.origin}{part.rpartition('.')[0]}"):
            self.sink.error(
                "PL693",
                f"the model has {there} and lacks {part}, which the engine fuses with it".replace(
                    "{}", "*"
                ),
                rule.origin,
                help="name the parts that the model has, in the engine's order",
            )

    def _share(
        self,
        size: int,
        ranks: int,
        what: str,
        rule: ServeRule,
        tensor: _HubTensor | None = None,
        *,
        axis: str | None = None,
    ) -> int:
        """The size on a rank: full blocks of a weight in fp8.

        Args:
            axis: the size of the section that decides it; by default that of tp, or of ep.
        """
        if tensor is not None and tensor.dtype == FP8 and ranks > 1:
            blocks = f"blocks of {self.serving.fp8} {what}"
            if size % (ranks * self.serving.fp8):
                self._share(size, ranks * self.serving.fp8, blocks, rule)
                self.reported.add(f"{rule.origin}{ranks}")  # its scales cannot be divided either
        what = what.replace("{}", "*")
        if size % ranks and self._first(f"{rule.origin}{ranks}"):
            axis = axis or (EXPERTS if "expert" in what else TENSOR)
            origin = self.serving.sizes.get(axis)
            text = f"{axis} is {getattr(self.serving, axis)}"
            self.sink.error(
                "PL692",
                f"{size:,} {what} cannot be divided by {ranks}",
                Label(span=rule.origin),
                *([Label(span=origin, text=text)] if origin else []),
                facts=[f"{self.serving.engine_text()} has {self.serving.size} ranks here"],
                help=f"choose another size of {axis}",
            )
        return size // ranks

    def _check_blocks(self, rows: int, what: str, rule: ServeRule, tensor: _HubTensor) -> None:
        """Refuses a part before another one if its last block would be shared by both."""
        if tensor.dtype == FP8:
            self._share(rows, self.serving.fp8, f"{what} on a rank", rule, axis="fp8")

    def _first(self, what: str) -> bool:
        new = what not in self.reported
        self.reported.add(what)
        return new

    # Patches ---------------------------------------------------------------------------------

    def _add_tp(
        self,
        tensor: _HubTensor,
        key: str,
        shape: tuple[int, ...],
        slices: Callable[[int], _Slices | None],
        dim: int,
        *,
        hold: bool = True,
    ) -> None:
        """Adds the slices of one dim that each rank of tp has; None for all of the tensor."""
        tp, size = self.serving.tp, self.serving.size
        every = tuple(range(size))
        by_slices: dict[_Slices | None, list[int]] = {}
        for t in range(tp):
            by_slices.setdefault(slices(t), []).extend(every[t::tp])
        for part, ranks in by_slices.items():
            box = [(0, n) for n in tensor.shape]
            local = list(box)
            if part is not None:
                if part.count <= 0:  # all of it is padding
                    continue
                box[dim] = part.there, part.there + part.count
                local[dim] = part.here, part.here + part.count
            patch = Patch(
                hub=tensor.name,
                box=tuple(box),
                key=key,
                local=tuple(local),
                dims=tuple(range(len(box))),
            )
            self._hold(tensor, patch, sorted(ranks))
        if hold:
            self._tensor(tensor, key, shape, every)

    def _hold(self, tensor: _HubTensor, patch: Patch, ranks: Sequence[int]) -> None:
        self.held.append(
            HeldPatch(
                patch=patch,
                indices=tensor.indices,
                ranks=tuple(ranks),
                dtype=tensor.dtype,
                scales=tensor.leaf.endswith(scale_name("")),
            )
        )

    def _tensor(
        self, tensor: _HubTensor, key: str, shape: tuple[int, ...], ranks: Sequence[int]
    ) -> None:
        self.tensors.append(
            RankTensor(
                key=key,
                shape=shape,
                dtype=tensor.dtype,
                indices=tensor.indices,
                ranks=tuple(ranks),
            )
        )

    def _stack(
        self, rule: ServeRule, key: str, experts: Mapping[int, Mapping[str, _HubTensor]]
    ) -> None:
        """[experts, parts * width, hidden] or [experts, hidden, width] of the experts of a rank."""
        ep, parts = self.serving.ep, rule.parts
        for number in experts:
            if lacking := [part for part in parts if part not in experts[number]]:
                there = next(iter(experts[number].values())).name
                there_part = next(iter(experts[number]))
                self._lacks(rule, there.replace(there_part, lacking[0]), there)
                return
        inside = self._share(self.serving.size, ep, "ranks for groups of experts", rule)
        fewest, more = divmod(len(experts), ep)  # the first groups have one more
        dim = 0 if len(parts) > 1 else 1
        first = experts[min(experts)][parts[0]]
        what = f"rows of an expert's {parts[0]}"
        width = self._share(first.shape[dim], inside, what, rule, first)
        if len(parts) > 1:
            self._check_blocks(width, what, rule, first)
        inner = list(first.shape)
        inner[dim] = width * len(parts)
        numbers = sorted(experts)
        for group in range(ep):
            start = group * fewest + min(group, more)
            mine = numbers[start : start + fewest + (group < more)]
            ranks = range(group * inside, (group + 1) * inside)
            self._tensor(first, key, (len(mine), *inner), ranks)
            for here, expert in enumerate(mine):
                for number, part in enumerate(parts):
                    for at, rank in enumerate(ranks):
                        tensor = experts[expert][part]
                        box, local = [(0, n) for n in tensor.shape], [(0, n) for n in inner]
                        box[dim] = at * width, (at + 1) * width
                        local[dim] = number * width, (number + 1) * width
                        patch = Patch(
                            hub=tensor.name,
                            box=tuple(box),
                            key=key,
                            local=((here, here + 1), *local),
                            dims=(None, 0, 1),
                        )
                        self._hold(tensor, patch, [rank])


def _expert_of(tensor: _HubTensor, end: str, parts: Sequence[str]) -> tuple[str, int, str] | None:
    """The engine's name of the stack that an expert's weight is in, the expert's number and the
    part; None if it is no expert of the rule.
    """
    owner = end.rpartition(".")[0]
    while owner:
        before, found, rest = f".{tensor.module}".partition(f".{owner}.")
        number, _, part = rest.partition(".")
        if found and number.isdecimal() and part in parts:
            inner = end if tensor.leaf == "weight" else end.removesuffix("weight") + tensor.leaf
            return f"{before}.{inner}".removeprefix("."), int(number), part
        owner = owner.rpartition(".")[0]
    return None
