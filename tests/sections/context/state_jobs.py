"""Parts of rows on several ranks, of models that hand states from token to token, beside whole rows
in one process, in float64: in float32 one process itself is as far from the truth.
"""

import contextlib
import itertools
import sys
from unittest import mock

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad
from transformers import masking_utils

from planc.diagnostics.diagnostic import Sink
from planc.model.load import load_values
from planc.model.recurrent_states import state_updates
from planc.proof.small_case import small_model
from planc.proxy.transformers_model import TransformersBuilder, without_cache
from planc.runtime.standalone.context import context_parallel
from planc.runtime.standalone.documents import reset_states

ROWS = 2


def limit(family):
    """The largest error. One scan accumulates in float32, if it was imported before it meant 64."""
    return 2e-6 if family == "recurrent_gemma" else 1e-11


@contextlib.contextmanager
def float64():
    """Code that names float32 computes in float64."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float)


@contextlib.contextmanager
def functions_kept(model):
    """Puts back what a script replaces in transformers: planc would take it for the user's."""
    files = vars(sys.modules[type(model).__module__]), vars(masking_utils)
    before = [dict(file) for file in files]
    try:
        yield
    finally:
        for file, functions in zip(files, before, strict=True):
            file.update(functions)


def made(family, **changes):
    """A small model of the family's default configuration, and what hands its states on."""
    from planc.model.sources.default_configs import default_config

    values = {**default_config(family), **changes}
    if family.startswith("lfm2"):  # their defaults have no convolution
        values["layer_types"] = ["conv", "full_attention"] * 16
    facts = load_values(values, family, Sink())
    model = TransformersBuilder(small_model(facts).values).build(0).train()
    without_cache(model)
    return doubled(model), state_updates(facts)


def doubled(model):
    """The model in float64, with experts that compute in it."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    return model.double()


def batch(model, kind, length):
    """Rows without padding, with some on one side or on each, or with documents, which begin
    at multiples of 8 where they are `aligned`.
    """
    generator = torch.Generator().manual_seed(3)
    high = model.config.get_text_config().vocab_size
    ids = torch.randint(4, high, (ROWS, length), generator=generator)
    labels = ids.clone()
    labels[:, ::7] = -100
    given = {"input_ids": ids, "labels": labels}
    if kind in {"left", "mixed"}:
        mask = given["attention_mask"] = torch.ones_like(ids)
        mask[0, : length // 3] = 0
        mask[1, slice(length - length // 2, None) if kind == "mixed" else slice(1)] = 0
        labels[mask == 0] = -100
        # what a query that sees no key predicts is a mean over all columns
        labels[:, 1:][mask[:, :-1] == 0] = -100
    if kind in {"packed", "aligned"}:
        unit = 1 if kind == "packed" else 8
        positions = given["position_ids"] = torch.zeros_like(ids)
        for row in range(ROWS):
            cuts = [0, *(some * unit for some in (5 + row, 9)), length]
            for first, end in itertools.pairwise(cuts):
                positions[row, first:end] = torch.arange(end - first)
                labels[row, first] = -100
    return given


def single(model, states, whole):
    """The loss and the gradients of one process, which keeps documents apart."""
    reset_states(model, *states)
    loss = model(**whole).loss
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), found


def error(model, whole, right, mesh, *, reentrant=None, **settings):
    """The largest error of the loss and of all gradients, beside those of one process.

    Args:
        model: like the one of `single`, before it.
        reentrant: the kind of checkpoints around all blocks; None for none.
        settings: of `ContextParallel`.
    """
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    context_parallel(model, mesh, **settings)
    loss = model(**model.context_parallel.batch(whole)).loss
    loss.backward()
    mean, (wanted, gradients) = loss.detach().clone(), right
    distributed.all_reduce(mean)
    worst = float((mean / mesh.size() - wanted).abs() / wanted)
    least = 1e-4 * max(float(g.abs().max()) for g in gradients.values())
    for name, parameter in model.named_parameters():
        if name in gradients:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            distributed.all_reduce(gradient)
            far = (gradient / mesh.size() - gradients[name]).abs().max()
            worst = max(worst, float(far / gradients[name].abs().max().clamp_min(least)))
    return worst


def judge(family, kind="plain", length=136, ranks=4, **settings):
    """The error of this process, which is one of `ranks`."""
    with float64():
        model, states = made(family)
        whole = batch(model, kind, length)
        if (extra := -length % (2 * ranks)) and kind == "plain":
            whole = {n: pad(v, (0, extra), value=-100 * (n == "labels")) for n, v in whole.items()}
        right = single(model, states, whole)
        mesh = init_device_mesh("cpu", (ranks,))
        return error(made(family)[0], whole, right, mesh, states=states, **settings)
