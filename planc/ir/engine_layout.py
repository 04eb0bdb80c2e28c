"""The layout of a serving engine: the slices of the files' tensors on each of its ranks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from planc.diagnostics.diagnostic import Label, Sink
from planc.ir.engine_experts import expert_of, place_experts, place_stack, stack_name
from planc.ir.engine_tensors import EngineTensors, HubTensor
from planc.ir.patches import FP8, Patch, TransferSide, scale_name
from planc.ir.serving import QUANTIZED, STACKS, ServeRule, Serving
from planc.model.config import integer_of, text_of
from planc.model.config_fields import HEADS, KV_HEADS
from planc.model.facts import Facts
from planc.model.hub_tensors import HubWeight, hub_tensors, indices_of

VOCABULARY_MULTIPLE = 64
"""The padded size of a vocabulary is a multiple of it.

Source: `DEFAULT_VOCAB_PADDING_SIZE` of vLLM's and SGLang's vocab_parallel_embedding.py.
"""


def engine_side(serving: Serving, facts: Facts, sink: Sink) -> TransferSide:
    """Lays out the tensors of a model's files over the ranks of an engine.

    Args:
        serving: the engine.
        facts: the model, without adapters.
        sink: receives PL692 and PL693, with the line of the rule.

    Raises:
        UnknownHubError: the tensors of the model's files are not known.
    """
    return EngineLayout(serving, facts, sink).side()


@dataclass(frozen=True, slots=True)
class _Slices:
    """The rows of one dim on a rank: where they begin here and there, and how many."""

    here: int
    there: int
    count: int


def _ends_with(module: str, end: str) -> bool:
    return module == end or module.endswith(f".{end}")


class EngineLayout(EngineTensors):
    """Applies rules to the tensors of the files, and collects patches and findings."""

    def __init__(self, serving: Serving, facts: Facts, sink: Sink) -> None:
        super().__init__(serving, sink)
        self.facts = facts
        self.hub = {tensor.name: tensor for tensor in self._tensors()}
        for tensor in [*self.hub.values()] if serving.fp8 else ():
            self._quantize(tensor)
        self.used: set[tuple[int, str]] = set()

    def _tensors(self) -> Iterator[HubTensor]:
        for weight in hub_tensors(self.facts):
            indices = tuple(indices_of(weight.modules))
            dtype = self._dtype(weight)
            for name, shape in weight.shapes:
                yield HubTensor(name=name, shape=shape, dtype=dtype, indices=indices)

    def _dtype(self, weight: HubWeight) -> str:
        """The dtype in the engine; buffers, and what a cast leaves in float32, keep theirs."""
        parameter = weight.modules.module.parameter(weight.name)
        if parameter is None:
            return weight.dtype
        return parameter.cast(self.serving.dtype) if self.serving.dtype else parameter.dtype

    def _quantize(self, tensor: HubTensor) -> None:
        """Makes the weight of a linear layer fp8, and adds its scales."""
        rules = [r for n, r in enumerate(self.serving.rules) if self._match(n, r, tensor)]
        kinds = {rule.kind for rule in rules}
        if kinds & {*STACKS} and self.first(f"{rules[0].origin}fp8"):
            name = tensor.name.replace("{}", "*")
            message = f"{name} is a stack of experts, which is not sent in fp8"
            help = "remove `fp8`: the engine can quantize its weights after each transfer"
            self.sink.error("PL699", message, rules[0].origin, help=help)
        if len(tensor.shape) == 2 and tensor.leaf == "weight" and kinds & {*QUANTIZED}:
            grid = tuple(-(-size // self.serving.fp8) for size in tensor.shape)
            scales = replace(tensor, name=scale_name(tensor.name), shape=grid, dtype="float32")
            self.hub[tensor.name] = replace(tensor, dtype=FP8)
            self.hub[scales.name] = scales

    def side(self) -> TransferSide:
        experts: dict[tuple[int, str, str], dict[int, dict[str, HubTensor]]] = {}
        for tensor in self.hub.values():
            self._place(tensor, experts)
        for (number, _, key), by_expert in experts.items():
            place_experts(self, self.serving.rules[number], key, by_expert)
        self._unused_rules()
        held, tensors = tuple(self.held), tuple(self.tensors)
        return TransferSide(size=self.serving.size, held=held, tensors=tensors)

    # Rules -----------------------------------------------------------------------------------

    def _place(
        self,
        tensor: HubTensor,
        experts: dict[tuple[int, str, str], dict[int, dict[str, HubTensor]]],
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
        if rule.kind in STACKS:
            place_stack(self, rule, place, tensor)
        elif expert is not None:
            by_expert = experts.setdefault((number, end, place), {})
            by_expert.setdefault(expert[0], {})[expert[1]] = tensor
        elif rule.kind == "left_out":
            return
        elif rule.kind == "replicate":
            self._replicate(replace(tensor, dtype=rule.dtype or tensor.dtype))
        elif rule.parts:
            self._fuse(rule, tensor, place)
        elif rule.kind in ("qkv", "merged"):
            self._split_fused(rule, tensor)
        else:
            self._split(rule, tensor)

    def _match(
        self, number: int, rule: ServeRule, tensor: HubTensor
    ) -> tuple[int, str, str, tuple[int, str] | None] | None:
        """The rule's number, the end that fits, the engine's name of the tensor, and, of an expert,
        its number and its part; None if the rule is not for the tensor.
        """
        for end in rule.ends if rule.kind != "renames" else ():
            if rule.kind in STACKS:
                if (place := stack_name(tensor.name, end, rule.parts[0])) is not None:
                    return number, end, place, None
            elif rule.kind == "experts":
                if (expert := expert_of(tensor, end, rule.parts)) is not None:
                    place, index, part = expert
                    return number, end, place, (index, part)
            elif rule.parts:
                owner = end.rpartition(".")[0]
                for part in rule.parts:
                    inner = f"{owner}.{part}" if owner else part
                    if _ends_with(tensor.module, inner):
                        place = f"{tensor.module.removesuffix(inner)}{end}"
                        return number, end, place, None
            elif (
                _ends_with(tensor.module, end)
                or _ends_with(tensor.name, end)
                or (rule.kind == "left_out" and f".{end}." in f".{tensor.name}.")
            ):
                return number, end, tensor.module, None
        return None

    def _conflict(self, tensor: HubTensor, rules: Sequence[ServeRule]) -> None:
        if rules[0].origin == rules[1].origin or not self.first(
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
        names = [f".{name}." for name in self.hub]
        for number, rule in enumerate(self.serving.rules):
            absent = [end for end in rule.ends if (number, end) not in self.used]
            if rule.kind == "renames":
                absent = [p for p in rule.parts if not any(f".{p}." in name for name in names)]
            unused = [end for end in absent if not any(_ends_with(name, end) for name in tied)]
            if unused and not rule.optional and rule.kind != "left_out":
                what = f"no tensor of {self.facts.name} belongs to `{unused[0]}`"
                help = "correct the name; `optional` before a rule is for models that may lack it"
                self.sink.error("PL693", what, rule.origin, help=help)

    # Layers ----------------------------------------------------------------------------------

    def _replicate(self, tensor: HubTensor) -> None:
        self._add_tp(tensor, tensor.name, tensor.shape, lambda _: None, 0)

    def _split(self, rule: ServeRule, tensor: HubTensor) -> None:
        shape, tp = tensor.shape, self.serving.tp
        if rule.kind == "row" and len(shape) < 2:  # a bias, which is added once
            self._replicate(tensor)
            return
        dim = 1 if rule.kind == "row" else 0
        size = self._pad_rows(shape[0]) if rule.kind == "vocab" else shape[dim]
        what = {"row": "columns", "column": "rows", "vocab": "padded rows"}[rule.kind]
        each = self.share(size, tp, f"{what} of {tensor.name}", rule, tensor)
        local = (*shape[:dim], each, *shape[dim + 1 :])

        def slices(t: int) -> _Slices:
            return _Slices(0, t * each, min(each, shape[dim] - t * each))

        self._add_tp(tensor, tensor.name, local, slices, dim)

    def _pad_rows(self, rows: int) -> int:
        multiple = VOCABULARY_MULTIPLE
        if self.serving.rows_by_ranks and -(-rows // multiple) * multiple % self.serving.tp:
            multiple *= self.serving.tp
        return -(-rows // multiple) * multiple

    def _fuse(self, rule: ServeRule, tensor: HubTensor, place: str) -> None:
        """One of several weights that are rows of one weight of the engine."""
        at = next(i for i, part in enumerate(rule.parts) if _ends_with(tensor.module, part))
        owner = tensor.module.removesuffix(rule.parts[at])
        parts = [self.hub.get(f"{owner}{part}.{tensor.leaf}") for part in rule.parts]
        if lacking := [p for p, t in zip(rule.parts, parts, strict=True) if t is None]:
            self.report_lack(rule, f"{owner}{lacking[0]}.{tensor.leaf}", tensor.name)
            return
        sizes = [part.shape[0] for part in parts if part is not None]
        rows = [self._rows(rule, n, size, tensor) for n, size in enumerate(sizes)]
        key = f"{place}.{tensor.leaf}"
        whole = (sum(count for count, _ in rows), *tensor.shape[1:])
        count, copies = rows[at]
        here = sum(n for n, _ in rows[:at])
        for part, (full, _) in zip(rule.parts[:-1], rows[:-1], strict=True):
            self.check_blocks(full, f"rows of {owner}{part}", rule, tensor)

        def slices(t: int) -> _Slices:
            return _Slices(here, 0 if rule.kind == "whole" else t // copies * count, count)

        self._add_tp(tensor, key, whole, slices, 0, hold=at == 0)

    def _split_fused(self, rule: ServeRule, tensor: HubTensor) -> None:
        """A weight that the files have fused: each part is divided."""
        heads = self._heads(HEADS) or 1
        keys = self._heads(KV_HEADS) or heads
        shares = (heads, keys, keys) if rule.kind == "qkv" else (1, 1)
        rows, total = tensor.shape[0], sum(shares)
        if rows % total and tensor.leaf == "weight":
            self.share(rows, total, f"rows of {tensor.name}", rule)
        sizes = [rows * share // total for share in shares]
        parts = [self._rows(rule, n, size, tensor) for n, size in enumerate(sizes)]
        for count, _ in parts[:-1]:
            self.check_blocks(count, f"rows of {tensor.module}", rule, tensor)
        full = (sum(count for count, _ in parts), *tensor.shape[1:])
        here = there = 0
        for at, (size, (count, copies)) in enumerate(zip(sizes, parts, strict=True)):

            def slices(
                t: int, here: int = here, there: int = there, count: int = count, n: int = copies
            ) -> _Slices:
                return _Slices(here, there + t // n * count, count)

            self._add_tp(tensor, tensor.name, full, slices, 0, hold=at == 0)
            here, there = here + count, there + size

    def _rows(self, rule: ServeRule, number: int, size: int, tensor: HubTensor) -> tuple[int, int]:
        """The rows of a part on a rank, and how many ranks have the same rows."""
        tp, owner = self.serving.tp, tensor.module.rpartition(".")[0]
        what = f"{owner}.{rule.parts[number]}" if rule.parts else tensor.module
        if rule.kind == "whole":
            return size, 1
        if rule.kind == "merged":
            return self.share(size, tp, f"rows of {what}", rule, tensor), 1
        heads = self._heads(KV_HEADS if number else ()) or self._heads(HEADS) or 1
        if number and tp > heads:
            copies = self.share(tp, heads, f"ranks of tp for the key-value heads of {what}", rule)
            return self.share(size, heads, f"rows of {what}", rule, tensor), max(copies, 1)
        self.share(heads, tp, f"heads of {what}", rule)
        return self.share(size, tp, f"rows of {what}", rule, tensor), 1

    def _heads(self, names: Sequence[str]) -> int:
        """The number of heads that the configuration of the text model states; 0 for none."""
        config = text_of(self.facts.config) or self.facts.config
        return integer_of(config, *names) or 0

    # Patches ---------------------------------------------------------------------------------

    def _add_tp(
        self,
        tensor: HubTensor,
        key: str,
        shape: tuple[int, ...],
        slices: Callable[[int], _Slices | None],
        dim: int,
        *,
        hold: bool = True,
    ) -> None:
        """Adds the slices of one dim that each rank of tp has; None for all of the tensor."""
        tp, size = self.serving.tp, self.serving.size
        tp_ranks = tuple(range(size))
        by_slices: dict[_Slices | None, list[int]] = {}
        for t in range(tp):
            by_slices.setdefault(slices(t), []).extend(tp_ranks[t::tp])
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
            self.hold(tensor, patch, sorted(ranks))
        if hold:
            self.add_tensor(tensor, key, shape, tp_ranks)
