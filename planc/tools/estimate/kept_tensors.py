"""Counts what a model's forward keeps for backward and what it computes, on fake tensors.

The model is built at its real widths with as few layers as have all kinds of layer, and runs once
without data.
"""

from __future__ import annotations

import copy
import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from planc.diagnostics.diagnostic import Sink
from planc.model.cache import entry_name, keep, recall
from planc.model.config import config_of
from planc.model.facts import Facts
from planc.model.layer_kinds import block_kinds, block_lists, entry_kinds
from planc.proxy.depth import Depth, Fields, nested_configs
from planc.tools.estimate.counted import Attended, Counted, MicroBatch, Moved, Part, Product, Saved

if TYPE_CHECKING:
    from planc.tools.estimate.stand_ins import Kernel

_FORMAT = "counted 9"
"""Raised when what is counted changes."""
_KNOWN: dict[str, Counted] = {}
"""The counts that this process has made or read: a search asks for few shapes many times."""
_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}
"""The matrices among the arguments of each operator."""


def count(facts: Facts, sink: Sink, job: MicroBatch, *, attention: str = "sdpa") -> Counted | None:
    """Runs one forward with loss of a transformers model on fake tensors.

    Args:
        job: what the forward is given.
        attention: transformers' `attn_implementation`; models that have no `sdpa` get the one that
            transformers chooses.
        sink: receives PL703 where the model cannot be run so.

    Returns:
        What was counted; None after a finding.
    """
    if "model_type" not in facts.config or facts.code:
        _unknown(sink, "it is not a transformers model that planc can build", "")
        return None
    asked = f"{_FORMAT} {job.rows} x {job.tokens} {job.dtype} {attention} {job[3:]}"
    frozen = any(not p.trainable for some in facts.model.below() for p in some.module.parameters)
    trained = repr(facts.root) if frozen else ""
    key = entry_name(asked, json.dumps(facts.config, sort_keys=True, default=str) + trained)
    if key not in _KNOWN:
        try:
            _KNOWN[key] = Counted.from_document(recall(key))
        except (KeyError, TypeError):  # missing or malformed
            if (found := _count(facts, sink, job, attention)) is None:
                return None
            keep(key, found.document())
            _KNOWN[key] = found
    return _KNOWN[key]


def _count(facts: Facts, sink: Sink, job: MicroBatch, attention: str) -> Counted | None:
    from planc.model.sources.huggingface import importing, prepare, training_model

    depth = Depth(1, block_kinds(facts), {})
    values = _with_few_layers(facts.config, depth)
    try:
        with importing():
            from planc.compat.fakes import FakeTensorMode

            prepared = prepare(config_of(values, "the model with few layers"), sink)
        if prepared is None:
            return None
        with FakeTensorMode():
            model = training_model(*prepared, job.dtype, attention)
            return _run(model, facts, depth.kept, job)
    except Exception as error:
        _unknown(sink, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", attention)
        return None


def _with_few_layers(config: Fields, depth: Depth) -> dict[str, Any]:
    values = copy.deepcopy(dict(config))
    for name, inner in nested_configs(config):
        values[name] = _with_few_layers(inner, depth)
    depth.shrink(config, values, dict)
    return values


def _unknown(sink: Sink, why: str, attention: str) -> None:
    sink.warning(
        "PL703",
        f"what the model's layers keep is unknown: {why}",
        facts=(f"attention = {attention}",) if attention else (),
        help="read the estimate as a lower bound: it leaves out activations and compute",
    )


def _run(
    model: Any, facts: Facts, kept: dict[int, list[tuple[int, ...]]], job: MicroBatch
) -> Counted:
    import torch

    from planc.model.sources.huggingface import classifies_rows, one_sequence_a_row, quiet
    from planc.tools.estimate.stand_ins import exchanging, replace_kernels, train_as

    named = _layers(facts, kept)
    recorder = _Recorder(model, named, train_as(facts, model, named))
    kind, several, _ = job.exchange
    length = job.tokens * (several if kind == "gather" else 1)  # whole rows, cut before blocks
    tokens = torch.zeros((job.rows, length), dtype=torch.long)
    kernels = replace_kernels(model, recorder.record_kernel) if job.kernels else nullcontext()
    with quiet(), _silence_log(), recorder.running(), one_sequence_a_row(), ExitStack() as around:
        around.enter_context(kernels)  # what exchanges states calls them
        around.enter_context(exchanging(model, facts, job))
        labels = tokens[:, 0] if classifies_rows(type(model)) else tokens[:, : job.tokens]
        output = model(input_ids=tokens, labels=labels)
    return Counted(parts=tuple(recorder.parts()), logits=output.logits.numel())


@contextmanager
def _silence_log() -> Iterator[None]:
    """Holds back the traceback that torch logs of what fake tensors cannot do: PL703 says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _layers(facts: Facts, kept: dict[int, list[tuple[int, ...]]]) -> dict[str, tuple[str, ...]]:
    """For each counted layer of the proxy model, the names of the real layers that it represents.

    Of several small layers of one kind the last counts: the first may take another input.
    """
    found: dict[str, tuple[str, ...]] = {}
    for at in block_lists(facts.model):
        kinds = entry_kinds(at, facts, facts)
        real = next(iter(kept.get(len(kinds), ())), tuple(kinds))
        chosen = {kinds[index]: small for small, index in enumerate(real)}
        for kind, small in chosen.items():
            like = (f"{at}.{i}" for i, other in kinds.items() if other == kind)
            found[f"{at}.{small}"] = tuple(like)
    return found


class _Recorder:
    """Notes operators and saved tensors by the module whose forward is running."""

    def __init__(
        self, model: Any, named: dict[str, tuple[str, ...]], adapters: Sequence[Any]
    ) -> None:
        self.model, self.named = model, named
        self.stack: list[str] = [""]
        self.inside_kernel = False
        self.noted = defaultdict[str, list[Saved | Product | Attended | Moved]](list)
        """By layer, in the order in which they ran."""
        self.boundary: dict[str, int] = {}
        weights = (*model.parameters(), *adapters)
        self.seen = {p.untyped_storage()._cdata for p in weights}
        self.alive: list[Any] = []
        """Saved tensors, so that no later storage has the address of an earlier one."""

    def layer(self) -> tuple[str, str]:
        """The counted layer that runs, and the module's name below it."""
        name = self.stack[-1]
        parts = name.split(".")
        for i in range(len(parts), 0, -1):
            head = ".".join(parts[:i])
            if head in self.named:
                return head, name[len(head) + 1 :]
        return "", name

    def parts(self) -> Iterator[Part]:
        for at in (*self.named, ""):
            noted = self.noted[at]
            yield Part(
                at=at,
                like=self.named.get(at, ("",)),
                boundary=self.boundary.get(at, 0),
                saved=tuple(x for x in noted if isinstance(x, Saved)),
                products=tuple(x for x in noted if isinstance(x, Product)),
                attended=tuple(x for x in noted if isinstance(x, Attended)),
                moved=tuple(x for x in noted if isinstance(x, Moved)),
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        from torch.autograd.graph import saved_tensors_hooks

        handles = [
            handle
            for name, module in self.model.named_modules()
            for handle in (
                module.register_forward_pre_hook(self._enter(name), with_kwargs=True),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]
        with saved_tensors_hooks(self._keep, lambda tensor: tensor), _mode(self):
            yield
        for handle in handles:
            handle.remove()

    def _enter(self, name: str) -> Any:
        def enter(_module: Any, args: Any, kwargs: Any) -> None:
            self.stack.append(name)
            if name in self.named:
                first = next(iter((*args, *kwargs.values())))
                self.boundary[name] = first.numel() * first.element_size()

        return enter

    def _leave(self, *_: Any) -> None:
        self.stack.pop()

    def _keep(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.seen and tensor.device.type != "meta":
            self.seen.add(storage._cdata)
            self.alive.append(tensor)
            at, module = self.layer()
            self.noted[at].append(Saved(module=module, size=storage.nbytes()))
        return tensor

    @contextmanager
    def record_kernel(self, kernel: Kernel, read: int) -> Iterator[None]:
        """Records one kernel; the operators of its substitute are not counted."""
        at, module = self.layer()
        keys = round(kernel.flops / 4 / kernel.head_dim)
        if keys:
            self.noted[at].append(
                Attended(
                    module=module,
                    batch=prod(kernel.shape) // (kernel.heads * kernel.tokens * kernel.head_dim),
                    heads=kernel.heads,
                    queries=kernel.tokens,
                    keys=keys,
                    head_dim=kernel.head_dim,
                    linear=True,
                )
            )
        self.noted[at].append(Moved(module=module, size=read + 2 * prod(kernel.shape)))
        self.inside_kernel = True
        yield
        self.inside_kernel = False

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if self.inside_kernel:
            return
        name = func._schema.name.partition("::")[2]
        at, module = self.layer()
        note = self.noted[at].append
        if name in _PRODUCTS:
            one, two = (args[i] for i in _PRODUCTS[name])
            *many, m, k = one.shape
            n, count = two.shape[-1], many[0] if many else 1
            note(Product(module=module, m=m, n=n, k=k, count=count))
        elif "grouped_mm" in name:
            count, k, n = args[1].shape
            m = args[0].shape[0]
            note(Product(module=module, m=m, n=n, k=k, count=count, divided=True))
        elif "scaled_dot_product" in name:
            (b, h, q, d), keys = args[0].shape, args[1].shape[2]
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            causal = bool(given.get("is_causal"))
            masked = any(given.get(name) is not None for name in ("attn_mask", "attn_bias"))
            one = Attended(module=module, batch=b, heads=h, queries=q, keys=keys, head_dim=d)
            note(replace(one, causal=causal or masked, masked=not causal))
        elif size := _bytes(args, out):
            note(Moved(module=module, size=size))


def _bytes(args: Any, out: Any) -> int:
    """Bytes that an operator reads and writes; 0 for a view."""
    import torch

    from planc.compat.trees import tree_leaves

    read = [a for a in tree_leaves(args) if isinstance(a, torch.Tensor)]
    storages = {a.untyped_storage()._cdata for a in read}
    written = [o for o in tree_leaves(out) if isinstance(o, torch.Tensor)]
    fresh = [o for o in written if o.untyped_storage()._cdata not in storages]
    if not fresh:
        return 0
    return sum(t.numel() * t.element_size() for t in (*read, *fresh))


def _mode(recorder: _Recorder) -> Any:
    import torch

    from planc.compat.trees import TorchDispatchMode
    from planc.proxy.fakes import on_fakes

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.prim.device.default:  # autograd asks it of each operator's tensors
                return args[0].fake_device
            out = on_fakes(func, args, kwargs or {})
            recorder.ran(func, args, kwargs or {}, out)
            return out

    return Mode()
