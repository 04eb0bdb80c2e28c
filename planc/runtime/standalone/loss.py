"""The cross entropy of a causal language model, computed in chunks inside its head."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.functional import linear, pad

from planc.runtime.standalone.collectives import all_gather

IGNORED = -100
"""The label of a token that does not count."""


class LossTerms:
    """The settings with which logits become the loss of a token.

    Args:
        chunks: into how many parts the tokens are cut; only one has logits at a time.
        scale: multiplies the logits.
        softcap: caps them, `softcap * tanh(logits / softcap)`; None for none.
        label_smoothing: as of `torch.nn.functional.cross_entropy`.
        z_loss: the weight of the squared logarithm of the softmax's denominator
            (PaLM, section 5).
    """

    def __init__(
        self,
        *,
        chunks: int = 1,
        scale: float = 1.0,
        softcap: float | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        self.chunks, self.scale, self.softcap = chunks, scale, softcap
        self.label_smoothing, self.z_loss = label_smoothing, z_loss

    def logits(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The logits of some tokens in float32, `[tokens, entries]`."""
        logits = linear(rows, weight, bias).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * (logits / self.softcap).tanh()
        return logits


class HeadPart:
    """The entries of the vocabulary that a rank holds.

    Args:
        weight: of the head, whole or sharded on dim 0 over one mesh axis.

    Raises:
        ValueError: the weight is sharded otherwise.
    """

    def __init__(self, weight: Tensor) -> None:
        self.vocabulary, self.first, self.mesh = len(weight), 0, None
        if isinstance(weight, DTensor):
            if tuple(weight.placements) != (Shard(0),):
                text = f"the head's weight is {weight.placements}, not sharded on dim 0"
                raise ValueError(text)
            self.mesh = weight.device_mesh
            width = -(-self.vocabulary // self.mesh.size())  # of all ranks but the last
            self.first = min(self.mesh.get_local_rank() * width, self.vocabulary)

    def local(self, labels: Tensor, entries: int) -> tuple[Tensor, Tensor]:
        """The column of each label, and whether it is one of this rank's entries."""
        column = labels - self.first
        mine = (column >= 0) & (column < entries)
        return torch.where(mine, column, 0)[:, None], mine

    def require_known(self, labels: Tensor) -> None:
        """Raises RuntimeError if a label is not `IGNORED` and not in the vocabulary.

        On CUDA the device raises it later, so nothing waits. The ranks that split the
        head have equal labels, so all of them raise.
        """
        known = (labels >= 0) & (labels < self.vocabulary) | (labels == IGNORED)
        text = f"a label is neither ignored nor in [0, {self.vocabulary})"
        torch._assert_async(known.all(), text)

    def gather_ranks(self, local: Tensor) -> Tensor:
        """A tensor of every rank, `[ranks, ...]`."""
        if self.mesh is None:
            return local[None]
        ranks = self.mesh.size()
        gathered = local.new_empty(
            (ranks * len(local), *local.shape[1:])
        )  # gloo takes no more dims
        all_gather(gathered, local, group=self.mesh.get_group())
        return gathered.unflatten(0, (ranks, len(local)))


class ChunkedCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """The sum of the tokens' losses, from hidden states and a part of the vocabulary.

    The forward pass computes the gradients too, while it has a chunk's logits; the
    backward pass only scales them. For each chunk the ranks exchange three numbers of
    each token. The gradient of the hidden states is this rank's part of a sum over the
    ranks.
    """

    @staticmethod
    def forward(  # noqa: PLR0917, as autograd calls it
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        terms: LossTerms,
        part: HeadPart,
        trains: bool,
    ) -> Tensor:
        """Args:
        hidden: `[tokens, features]`.
        weight, bias: the rank's part, `[entries, features]` and `[entries]`.
        labels: `[tokens]`, numbered over the whole vocabulary; `IGNORED` gives zero.
        terms: how logits become the loss.
        part: which entries the rank has.
        trains: whether a backward pass may follow.
        """
        wanted = [trains and needed for needed in ctx.needs_input_grad[:3]]
        tensors = (hidden, weight, bias)
        grads = [
            torch.zeros_like(t, dtype=torch.float32) if t is not None and need else None
            for t, need in zip(tensors, wanted, strict=True)
        ]
        loss = hidden.new_zeros((), dtype=torch.float32)
        start = 0
        for rows in hidden.chunk(terms.chunks):
            at = slice(start, start + len(rows))
            start += len(rows)
            logits = terms.logits(rows, weight, bias)
            losses, denominator = _losses(logits, labels[at], terms, part)
            loss += losses.sum()
            if not any(wanted):
                continue
            change = _logit_gradients(logits, labels[at], denominator, terms, part)
            change = change.to(hidden.dtype)
            if grads[0] is not None:
                grads[0][at] = change @ weight
            if grads[1] is not None:
                grads[1] += change.T @ rows
            if grads[2] is not None:
                grads[2] += change.sum(0)
        gradients = [
            None if g is None or t is None else g.to(t.dtype)
            for g, t in zip(grads, tensors, strict=True)
        ]
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gradients = (
            None if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors
        )
        return *gradients, None, None, None, None


def _losses(
    logits: Tensor, labels: Tensor, terms: LossTerms, part: HeadPart
) -> tuple[Tensor, Tensor]:
    """The loss of each token, and the logarithm of its softmax's denominator."""
    column, mine = part.local(labels, logits.shape[1])
    label_logits = mine.float()
    if logits.shape[1]:
        label_logits = label_logits * logits.gather(1, column).squeeze(1)
    smooth = terms.label_smoothing
    total = logits.sum(1) if smooth else label_logits
    gathered = part.gather_ranks(
        torch.stack([logits.logsumexp(1), label_logits, total])
    )
    denominator, label_logits = gathered[:, 0].logsumexp(0), gathered[:, 1].sum(0)
    loss = denominator - (1 - smooth) * label_logits
    if smooth:
        loss = loss - smooth * gathered[:, 2].sum(0) / part.vocabulary
    if terms.z_loss:
        loss = loss + terms.z_loss * denominator.square()
    return torch.where(labels == IGNORED, 0.0, loss), denominator


def _logit_gradients(
    logits: Tensor,
    labels: Tensor,
    denominator: Tensor,
    terms: LossTerms,
    part: HeadPart,
) -> Tensor:
    """The gradient of the losses by what the head computes, in the logits' memory."""
    smooth, slope = terms.label_smoothing, None
    if terms.softcap is not None:
        slope = 1 - (logits / terms.softcap).square()
    change = logits.sub_(denominator[:, None]).exp_()
    if terms.z_loss:
        change *= (1 + 2 * terms.z_loss * denominator)[:, None]
    if smooth:
        change -= smooth / part.vocabulary
    if logits.shape[1]:
        column, mine = part.local(labels, logits.shape[1])
        change.scatter_add_(1, column, (smooth - 1) * mine[:, None].float())
    if slope is not None:
        change *= slope
    if terms.scale != 1.0:
        change *= terms.scale
    return change.masked_fill_((labels == IGNORED)[:, None], 0.0)


def chunked_loss(
    head: nn.Module, hidden: Tensor, labels: Tensor, terms: LossTerms
) -> Tensor:
    """The sum of the losses of all tokens, equal on the ranks that split the head.

    Args:
        head: a linear layer, whole or with its vocabulary sharded over one mesh axis.
        hidden: its input, `[..., features]`, replicated over that axis.
        labels: of the token after each one, `[...]`.
        terms: how logits become the loss.

    Returns:
        `[1, 1, 1]` in float32, in place of logits.

    Raises:
        RuntimeError: a label is outside the vocabulary; see `HeadPart.require_known`.
    """
    weight, bias, part = head.weight, head.bias, HeadPart(head.weight)
    part.require_known(labels)
    if part.mesh is not None:
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, part.mesh, [Replicate()])
        # every rank computes the gradient by way of its own entries
        hidden = hidden.redistribute(placements=[Replicate()])
        hidden = hidden.to_local(grad_placements=[Partial()])
        weight = weight.to_local()
        bias = None if bias is None else bias.to_local()
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    flat = hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1)
    loss = ChunkedCrossEntropy.apply(*flat, terms, part, torch.is_grad_enabled())
    loss = loss.view(1, 1, 1)
    if part.mesh is None:
        return loss
    return DTensor.from_local(loss, part.mesh, [Replicate()], run_check=False)


class ChunkedLoss:
    """Computes the loss of a model in its head, where the model is called with labels.

    The head then returns the sum of the losses in place of logits, and the model's loss
    function divides it. What the model does with logits in between has no effect, and
    its output has no `logits`. Without labels nothing changes.

    The head's own forward computes the loss, so FSDP's hooks on it hold: its weight is
    gathered while it runs.

    Args:
        head: the linear layer that computes the logits.
        model: has `loss_function`, as causal language models of transformers do.
        terms: how logits become the loss.
    """

    def __init__(self, head: nn.Module, model: nn.Module, terms: LossTerms) -> None:
        self.head, self.terms = head, terms
        self.labels: Tensor | None = None
        self.ignored = IGNORED  # by the loss of this pass
        self.total: Tensor | None = None
        self.divided = False  # whether the pass has called `loss`
        self.plain, self.function = head.forward, model.loss_function
        self.signature = inspect.signature(model.forward)
        head.forward = self.forward
        head.register_forward_hook(self._store_total)
        model.register_forward_pre_hook(
            self._read_labels, prepend=True, with_kwargs=True
        )
        model.register_forward_hook(self._finish_forward, always_call=True)
        model.loss_function = self.loss

    def _read_labels(
        self, _model: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        given = {**self.signature.bind_partial(*args, **kwargs).arguments, **kwargs}
        labels, ignored = given.get("shift_labels"), given.get("ignore_index")
        self.ignored = IGNORED if ignored is None else ignored
        if labels is None and given.get("labels") is not None:
            labels = pad(given["labels"], (0, 1), value=self.ignored)[..., 1:]
        if labels is not None and self.ignored != IGNORED:
            known = torch.where(labels == IGNORED, -1, labels)  # outside the vocabulary
            labels = torch.where(labels == self.ignored, IGNORED, known)
        self.labels, self.total, self.divided = labels, None, False

    def forward(self, hidden: Tensor) -> Tensor:
        if self.labels is None:
            logits: Tensor = self.plain(hidden)
            return logits
        if hidden.shape[:-1] != self.labels.shape:
            seen, labels = list(hidden.shape[:-1]), list(self.labels.shape)
            raise ValueError(f"the head gets tokens {seen} and labels {labels}")
        labels = self.labels.to(hidden.device)
        return chunked_loss(self.head, hidden, labels, self.terms)

    def _store_total(self, _head: nn.Module, _args: Any, output: Tensor) -> None:
        """Keeps what the head returns after the hooks of styles and of FSDP."""
        if self.labels is not None:
            self.total = output

    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """The model's loss: the sum over `num_items_in_batch`, or the mean."""
        if self.total is None or self.labels is None:
            value: Tensor = self.function(*args, **kwargs)
            return value
        self.divided = True
        if kwargs.get("ignore_index", self.ignored) != self.ignored:
            raise ValueError(f"the label of ignored tokens is {self.ignored}")
        items = kwargs.get("num_items_in_batch")
        if items is None:
            items = (self.labels != IGNORED).sum()
        if isinstance(items, Tensor):
            items = items.to(self.total.device)
        return self.total.view(()) / items

    def _finish_forward(self, _model: nn.Module, _args: Any, output: Any) -> Any:
        seen, self.labels, self.total = self.total, None, None
        if seen is None or output is None:
            return None
        if not self.divided:
            raise ValueError(
                "the model's `loss_function` was replaced after its loss was chunked: "
                "there are no logits that another loss could be of"
            )
        if isinstance(output, tuple):
            text = "a chunked loss has no logits: call without `return_dict=False`"
            raise ValueError(text)
        return type(output)(**{k: v for k, v in output.items() if k != "logits"})


def chunk_loss(head: nn.Module, model: nn.Module, **terms: Any) -> None:
    """`ChunkedLoss` with the arguments of `LossTerms`."""
    ChunkedLoss(head, model, LossTerms(**terms))
