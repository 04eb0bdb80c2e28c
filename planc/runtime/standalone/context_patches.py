"""Context parallelism of diffusers' transformers, whose tokens are patches of images.

The model gets whole latents. In front of the first block a hook leaves each rank a run
of the patches; behind the last projection the outputs of all are gathered, so that the
loss is that of the whole image on every rank. Text is whole on every rank: each
computes a copy of it, and the gradients of copies add up as those of parts do.

Attention of patches is computed by processors of diffusers, which call torch's
`scaled_dot_product_attention`; it is replaced there while a processor runs.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from planc.runtime.standalone.collectives import GatherSequence
from planc.runtime.standalone.context import CONTEXT, by_name
from planc.runtime.standalone.context_ring import (
    OTHERS,
    TILE,
    Ring,
    RingPiece,
    ring_attention,
)
from planc.runtime.standalone.context_rows import ContextOfRows
from planc.runtime.standalone.context_tokens import ContextError, require_divisible

ADDED = (
    "controlnet_block_samples",
    "controlnet_single_block_samples",
    "block_controlnet_hidden_states",
)
"""Arguments of a model's forward that it adds to the patches between its blocks."""
ROTARY = ("rotary_emb", "image_rotary_emb")
"""The names of attention modules' argument for the rotary embeddings of patches."""
WHAT = "the number of patches"


class ContextOfPatches(ContextOfRows):
    """The state of one model; other arguments are those of `ContextParallel`.

    Args:
        blocks: the first block, and the module behind the last one whose output is that
            of each patch.
        seeing: the attention modules in which patches see each other.
        patches: where they stand among the tokens of attention: `alone`, `after_text`
            or `before_text`.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        *,
        blocks: Sequence[str],
        seeing: Sequence[nn.Module],
        patches: str,
        **settings: Any,
    ) -> None:
        super().__init__(model, mesh, **settings)
        self.first, self.config = patches == "after_text", model.config
        self.masks: dict[tuple[int, ...], JointMask] = {}  # of a pass, in a ring
        begin, end = map(model.get_submodule, blocks)
        begin.register_forward_pre_hook(self._cut, with_kwargs=True)
        end.register_forward_hook(self._gather)
        for module in seeing:
            self.attach(module)

    def refusal(self, model: nn.Module, states: Sequence[str]) -> str:
        return ""

    def tables_of(self, model: nn.Module) -> list[nn.Module]:
        return []  # they count whole images

    def prepare(self, model: nn.Module) -> None:
        model.__dict__[CONTEXT] = self

    def attach(self, module: nn.Module) -> None:
        """Makes an attention module see the patches of all ranks."""
        plain = module.forward
        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.run_attention(module, plain, by_name(signature, args, kwargs))

        module.forward = forward

    def batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch as it is: the model gets whole latents.

        Args:
            batch: the arguments of the model.

        Raises:
            ContextError: the number of patches does not divide.
        """
        latents = batch.get("hidden_states")
        if isinstance(latents, Tensor):
            count = patches_of(latents, self.config)
            require_divisible(count, self.size, WHAT, self.size)
        return dict(batch)

    def _enter(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.masks.clear()
        given = self._arguments(args, kwargs)
        for name in ADDED:
            if given.get(name) is not None:
                text = "is added to the patches of whole images"
                raise ContextError(f"`{name}` {text}: the ranks have a part")
        times = given.get("timestep")
        if isinstance(times, Tensor) and times.dim() == 2:  # one for each patch
            return (), {**given, "timestep": self.local_tokens(times)}
        return args, kwargs

    def _cut(self, _block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cuts the patches, the first argument."""
        hidden = args[0] if args else kwargs["hidden_states"]
        require_divisible(hidden.shape[1], self.size, WHAT, self.size)
        mine = self.local_tokens(hidden)
        if args:
            return (mine, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": mine}

    def _gather(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return self.gather_tokens(output)

    # attention ------------------------------------------------------------------------

    def run_attention(
        self, module: nn.Module, plain: Callable[..., Any], given: dict[str, Any]
    ) -> Any:
        """Runs an attention module on this rank's patches, which see those of all
        ranks.

        Args:
            module, plain: and its own forward.
            given: its arguments by name.
        """
        name = next((n for n in ROTARY if given.get(n) is not None), "")
        rotary, text = given.get(name), given.get("encoder_hidden_states")
        joint = self.joint(given["hidden_states"], text, rotary)
        if rotary is not None:
            given[name] = tuple(map(joint.of_rotary, rotary))
        with ReplacedAttention(self, module, joint) as replaced:
            output = plain(**given)
        if replaced.calls != 1:
            kind = type(getattr(module, "processor", module)).__name__
            text = "calls `scaled_dot_product_attention`"
            raise ContextError(f"{kind} {text} {replaced.calls} times, not once")
        return output

    def joint(self, hidden: Tensor, text: Tensor | None, rotary: Any) -> Joint:
        """The tokens of an attention module, by its arguments."""
        local, before = hidden.shape[1], 0
        if text is not None:
            before = text.shape[1]
        elif rotary is not None:  # text, if any, is joined to the patches already
            whole = rotary[0].shape[rows_dim(rotary[0])]
            patches = whole - local
            require_divisible(patches, self.size - 1, WHAT, self.size)
            local, before = (
                patches // (self.size - 1),
                local - patches // (self.size - 1),
            )
        return Joint(local, before, self.first, self.rank, self.size)

    def compute(
        self, module: nn.Module, joint: Joint, all_: Any, mask: Any, rest: Any
    ) -> Tensor:
        """Attention of this rank's text and patches, `[rows, heads, tokens, features]`.

        Args:
            module: whose attention it is.
            joint: its tokens.
            all_: queries, keys and values.
            mask: of the tokens of whole images, `[..., queries or 1, keys]`, or None.
            rest: other arguments of `scaled_dot_product_attention`.
        """
        joint.require(module, all_, mask)
        if self.keys.heads > 1:
            return self.of_heads(module, joint, all_, mask, rest)
        return self.among(module, joint, all_, mask, rest)

    def among(
        self, module: nn.Module, joint: Joint, all_: Any, mask: Any, rest: Any
    ) -> Tensor:
        """Attention to the patches of all, of the heads that this rank has."""
        if self.keys.ring is not None:
            return self.run_ring_attention(module, joint, all_, mask, rest)
        query, key, value = all_
        if self.keys.others == 1:
            given = {**rest, "attn_mask": mask}
            return scaled_dot_product_attention(query, key, value, **given)
        text, both = joint.split(torch.cat([key, value], -1))
        joined = joint.join(text, self.keys.gather_tokens(both))
        key, value = joined.split([key.shape[-1], value.shape[-1]], -1)
        mask = joint.of_queries(mask)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, **rest)

    def of_heads(
        self, module: nn.Module, joint: Joint, all_: Any, mask: Any, rest: Any
    ) -> Tensor:
        """Attention of some heads of more tokens; text has all heads on every rank."""
        keys, name = self.keys, type(module).__name__

        def some(value: Tensor) -> Tensor:
            text, patches = joint.split(value)
            local = keys.swap_sharded_dim(patches, 1, 2, name)
            mine = text.unflatten(1, (keys.heads, -1))[:, keys.among]
            return joint.join(mine, local)

        wider = Joint(
            joint.own * keys.heads, joint.text, self.first, keys.rank, keys.others
        )
        outputs = self.among(module, wider, tuple(map(some, all_)), mask, rest)
        text, patches = wider.split(outputs)
        back = keys.swap_sharded_dim(patches, 2, 1, name)
        if not text.shape[2]:
            return back
        gathered = GatherSequence.apply(text.transpose(1, 2), keys.groups[1])
        return joint.join(gathered.transpose(1, 2), back)

    def run_ring_attention(
        self, module: nn.Module, joint: Joint, all_: Any, mask: Any, rest: Any
    ) -> Tensor:
        """Runs ring attention, which passes keys and values of patches around."""
        ring = self.keys.ring
        assert ring is not None
        # all attention modules of a pass that have this mask share what it says
        at = id(mask), joint.text, joint.own
        if at not in self.masks:
            self.masks[at] = JointMask(joint, mask, ring)
        rows = self.masks[at]
        given = {"scaling": rest.get("scale"), "dropout": rest.get("dropout_p", 0.0)}
        return ring_attention(module, all_, rows, ring, given).transpose(1, 2)


class Joint:
    """The tokens of an attention module: text, whole, and this rank's patches.

    Args:
        local: the patches of a rank.
        text: how many tokens text has; 0 where patches attend alone.
        first: whether text stands before the patches.
        rank, size: which part of how many.
    """

    def __init__(
        self, local: int, text: int, first: bool, rank: int, size: int
    ) -> None:
        self.own, self.text, self.first = local, text, first
        self.rank, self.patches = rank, local * size
        self.whole = text + self.patches

    def split(self, value: Tensor, dim: int = 2) -> tuple[Tensor, Tensor]:
        """Text, and patches, of tokens that are joined."""
        sizes = [self.text, value.shape[dim] - self.text]
        parts = value.split(sizes if self.first else sizes[::-1], dim)
        return (parts[0], parts[1]) if self.first else (parts[1], parts[0])

    def join(self, text: Tensor, patches: Tensor, dim: int = 2) -> Tensor:
        """Joined tokens, in the order of the model."""
        return torch.cat([text, patches] if self.first else [patches, text], dim)

    def part(self, value: Tensor, dim: int, rank: int) -> Tensor:
        """Text and a rank's patches of a tensor of all tokens."""
        text, patches = self.split(value, dim)
        return self.join(text, patches.narrow(dim, rank * self.own, self.own), dim)

    def of_rotary(self, values: Tensor) -> Tensor:
        """The part of rotary embeddings of whole images, with those of text if any."""
        dim = rows_dim(values)
        if values.shape[dim] == self.whole:
            return self.part(values, dim, self.rank)
        if values.shape[dim] != self.patches:
            text = f"{values.shape[dim]} positions, for {self.patches} patches"
            raise ContextError(f"rotary embeddings of {text}")
        return values.narrow(dim, self.rank * self.own, self.own)

    def of_queries(self, mask: Tensor | None) -> Tensor | None:
        """The part of a mask that has a row for each query."""
        if mask is None or mask.shape[-2] == 1:
            return mask
        return self.part(mask, mask.dim() - 2, self.rank)

    def require(self, module: nn.Module, all_: tuple[Any, ...], mask: Any) -> None:
        """Raises ContextError where attention has other tokens than these."""
        name = type(module).__name__
        if any(isinstance(value, DTensor) for value in all_):
            raise ContextError(f"{name} gets DTensors: local tensors are needed")
        if any(value.shape[2] != self.text + self.own for value in all_):
            raise ContextError(f"{name} attends to other tokens than text and patches")
        queries, keys = (1, self.whole) if mask is None else mask.shape[-2:]
        if keys != self.whole or queries not in (1, self.whole):
            text = f"{self.whole} tokens of text and patches"
            raise ContextError(f"{name} has a mask of {list(mask.shape)}, for {text}")


class JointMask:
    """The mask between this rank's queries and all keys, in pieces of a ring. Only this
    rank's queries see its text, since every rank has a copy.

    Args:
        joint: the tokens.
        mask: of all tokens, boolean; None where all are seen.
        ring: the ranks.
    """

    evenly = False

    def __init__(self, joint: Joint, mask: Tensor | None, ring: Ring) -> None:
        if mask is not None and mask.dtype != torch.bool:
            raise ContextError(f"a mask that is added to scores: {OTHERS}")
        self.joint, self.rank = joint, ring.rank
        self.given, self.mask = mask, joint.of_queries(mask)
        text, local = joint.text, joint.own
        self.patches = slice(text, text + local) if joint.first else slice(0, local)
        self.words = slice(0, text) if joint.first else slice(local, local + text)
        self.found: dict[tuple[int, bool], list[RingPiece]] = {}

    @functools.cached_property
    def open(self) -> bool:
        """Whether all queries see all patches, so that the mask only concerns text."""
        return self.mask is None or bool(self.joint.split(self.mask, -1)[1].all())

    def pieces(self, owner: int, *, fused: bool) -> list[RingPiece]:
        """Ranges of queries and keys of a rank; tiles if there is no fused kernel."""
        # all layers that have this mask ask, in both passes
        if (owner, fused) not in self.found:
            self.found[owner, fused] = list(self._pieces(owner, fused))
        return self.found[owner, fused]

    def _pieces(self, owner: int, fused: bool) -> Iterator[RingPiece]:
        joined = slice(0, self.joint.text + self.joint.own)
        # where keys are among those of all ranks: text may stand behind all patches
        others = 0 if self.joint.first else self.joint.patches - self.joint.own
        runs = [(self.words, others)] * (owner == self.rank)
        for run, moved in (*runs, (self.patches, owner * self.joint.own)):
            alone = self.mask is None or (self.open and run is self.patches)
            if run.stop == run.start:
                continue
            if fused and alone:
                yield RingPiece(owner, joined, run)
                continue
            for queries, keys in itertools.product(cuts(joined), cuts(run)):
                seen = None if alone else self.tile(queries, keys, moved)
                yield RingPiece(owner, queries, keys, mask=seen)

    def tile(self, queries: slice, keys: slice, moved: int) -> Tensor:
        """A tile of the mask; keys are numbered over all ranks."""
        assert self.mask is not None
        rows = slice(None) if self.mask.shape[-2] == 1 else queries
        return self.mask[..., rows, keys.start + moved : keys.stop + moved]


def cuts(run: slice) -> list[slice]:
    """Cuts a range of tokens into tiles of at most `TILE` tokens."""
    starts = range(run.start, run.stop, TILE)
    return [slice(at, min(at + TILE, run.stop)) for at in starts]


class ReplacedAttention(TorchFunctionMode):  # type: ignore[misc]
    """Replaces torch's attention by context-parallel attention in the current thread.

    Args:
        context: computes the attention.
        module: the attention module whose processor runs.
        joint: the tokens of the module.
    """

    def __init__(
        self, context: ContextOfPatches, module: nn.Module, joint: Joint
    ) -> None:
        super().__init__()
        self.context, self.module, self.joint = context, module, joint
        self.calls = 0

    def __torch_function__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.calls += 1
        given = arguments_of(*args, **kwargs)
        return self.context.compute(self.module, self.joint, *given)


def arguments_of(  # noqa: PLR0917, as torch has them
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> tuple[tuple[Tensor, ...], Tensor | None, dict[str, Any]]:
    """Queries, keys and values; the mask; the other arguments of torch's attention."""
    if is_causal:
        raise ContextError("causal attention among patches is not known")
    return (query, key, value), attn_mask, {"dropout_p": dropout_p, **more}


def rows_dim(rotary: Tensor) -> int:
    """The dim of positions in rotary embeddings: 1 if dim 0 is rows, else 0."""
    return 0 if rotary.dim() == 2 else 1


def patches_of(latents: Tensor, config: Any) -> int:
    """The number of patches in a row of latents, which are `[rows, patches, features]`,
    `[rows, channels, frames, height, width]` or `[rows, channels, height, width]`.
    """
    if latents.dim() == 3:
        return len(latents[0])
    sides = latents.shape[2:]
    side = config.patch_size
    if isinstance(side, int):
        side = [getattr(config, "patch_size_t", 1)] * (len(sides) - 2) + [side] * 2
    return prod(a // b for a, b in zip(sides, side, strict=True))


def context_of_patches(model: nn.Module, mesh: DeviceMesh, **settings: Any) -> None:
    """Makes a model context-parallel over patches; see `ContextOfPatches`."""
    ContextOfPatches(model, mesh, **settings)
