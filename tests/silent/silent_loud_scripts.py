"""Scripts that end in an error of torch, or of one rank, where planc does not know what they do;
and right ones that planc has refused.
"""

import contextlib
import pickle

import numerics
import torch
from silent_scripts import IGNORED, Loaded, Script
from transformers import LlamaForCausalLM


class RowsOnOneRank(Script):
    """The first data rank reads all rows, as of a last batch that is too small for all ranks."""

    def one_loop(self, run):
        return True

    def rows(self, run, batch):
        return batch if run.data_rank == 0 else {n: value[:0] for n, value in batch.items()}


class LabelsOnOneRank(RowsOnOneRank):
    """The other ranks read rows without labels."""

    def rows(self, run, batch):
        if run.data_rank == 0:
            return batch
        tokens, labels = batch["input_ids"].flip(1), torch.full_like(batch["labels"], IGNORED)
        return {**batch, "input_ids": tokens, "labels": labels}


def out_of_memory(_gradient):
    raise torch.OutOfMemoryError("out of memory")


class RaisedPass(Script):
    """A backward pass raises; the script clears the gradients, and continues."""

    def change(self, model, run=None):
        seed = 50 if run is None else 50 + run.data_rank
        tokens, _ = numerics.data(model.config.vocab_size, seed)
        handle = model.model.layers[1].mlp.register_forward_hook(
            lambda _module, _args, output: output.register_hook(out_of_memory) and None
        )
        with contextlib.suppress(torch.OutOfMemoryError):
            model(input_ids=tokens, labels=tokens).loss.backward()
        handle.remove()
        model.zero_grad()


class FullWeights(Loaded):
    """Gives shards the full tensors of another state dict."""

    def change(self, model, run=None):
        weights = numerics.build("llama").state_dict()
        model.load_state_dict({name: tensor * 1.5 for name, tensor in weights.items()})


class FewerLayers(Script):
    def change(self, model, run=None):
        model.model.layers = model.model.layers[:1]


class Pickled(Script):
    def change(self, model, run=None):
        pickle.dumps(model)


class Multiplier(Script):
    """Sets an attribute that the forward of a block reads."""

    def change(self, model, run=None):
        for block in model.model.layers:
            block.residual_multiplier = 0.5


class MultiplierBefore(Multiplier):
    """The same before the plan is applied."""

    def prepare(self, model):
        super().change(model)

    def change(self, model, run=None):
        pass


class Passing(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class PassedArguments(Script):
    """The forward of the script's class passes its arguments on."""

    def prepare(self, model):
        model.__class__ = Passing


class TiedBefore(Script):
    """Ties the head to the embedding, and the configuration does not say so."""

    def prepare(self, model):
        model.lm_head.weight = model.model.embed_tokens.weight
