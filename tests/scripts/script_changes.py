"""Operations of a training script that change the model, or go around it, after the plan was
applied. Each is what one process computes, or planc refuses it at this operation.
"""

import io
import pickle

import numerics
import torch
from torch import nn

CHANGES = (  # operations of every plan
    *("attention", "block_hook", "gradient_hook", "data", "add", "share", "tie"),
    *("torch_norm", "pickled", "stored"),
)
AROUND = ("gradients_of", "functional")
"""Operations that call the model by itself."""
REFUSED = {
    "attention": "PL454",
    "block_hook": "PL454",
    "gradient_hook": "PL455",
    "add": "PL425",
    "share": "PL425",
    "tie": "PL425",
    "torch_norm": "PL427",
    "pickled": "PL477",
    "gradients_of": "PL426",
    "functional": "PL425",
}
"""The code with which planc may refuse an operation."""
FAR = 1e9  # a norm that clips nothing


class Refused(Exception):
    """planc has refused an operation.

    Args:
        at: the place of the operation in the script.
        shown: what the operations before it have shown on this rank.
    """

    def __init__(self, at, code, shown):
        super().__init__(f"operation {at}, {code}")
        self.at, self.code, self.shown = at, code, shown


def reads(_module, _args, _output):
    return None


def scales(_module, _args, output):
    return changed(output, lambda states: states * 0.9)


def mixes(_module, _args, output):
    return changed(output, lambda states: states + 0.1 * states.mean(1, keepdim=True))


def changed(output, change):
    """The output of a block, of which some have a tuple, with other hidden states."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


class Changes:
    """The operations, for a `script_jobs.Script`."""

    def blocks(self):
        return next(m for m in self.model.modules() if isinstance(m, nn.ModuleList))

    def attention(self, number):
        self.model.config._attn_implementation = "sdpa" if number % 2 else "eager"
        return self.train(number)

    def block_hook(self, number):
        """A forward hook on one block or on all, for one pass."""
        hook, blocks = (reads, scales, mixes)[number % 3], self.blocks()
        handles = [block.register_forward_hook(hook) for block in blocks[: 1 + number // 3]]
        try:
            return self.train(number)
        finally:
            for handle in handles:
                handle.remove()

    def gradient_hook(self, number):
        """Hooks that double the gradients of one pass."""
        trained = [p for _, p in self.named() if p.requires_grad]
        handles = [p.register_hook(lambda gradient: gradient * 2) for p in trained]
        try:
            return self.train(number)
        finally:
            for handle in handles:
                handle.remove()

    def data(self, number):
        for parameter in self.model.parameters():
            parameter.data = parameter.data * (0.9 if number % 2 else 1.1)
        return self.train(number)

    def add(self, number):
        """A parameter that a block gets, which is trained or frozen."""
        values = torch.zeros(self.model.config.hidden_size)
        self.blocks()[0].extra = nn.Parameter(values, requires_grad=bool(number % 2))
        return self.train(number)

    def share(self, number):
        first, second = self.blocks()
        second.mlp = first.mlp
        return self.train(number)

    def tie(self, number):
        self.model.get_output_embeddings().weight = self.model.get_input_embeddings().weight
        return self.train(number)

    def torch_norm(self, number):
        trained = [p for p in self.model.parameters() if p.grad is not None]
        return {"norm": nn.utils.clip_grad_norm_(trained, FAR if number % 2 else 0.5)}

    def pickled(self, number):
        if number % 2:
            pickle.dumps(self.model)
        else:
            torch.save(self.model, io.BytesIO())

    def stored(self, _):
        """Writes and reads the state dict of this rank."""
        file = io.BytesIO()
        torch.save(self.model.state_dict(), file)
        file.seek(0)
        self.model.load_state_dict(torch.load(file, weights_only=False))

    def gradients_of(self, number):
        loss = self.loss(number)
        trained = [(n, p) for n, p in self.named() if p.requires_grad]
        found = torch.autograd.grad(loss, [p for _, p in trained], allow_unused=True)
        return {n: numerics.whole(g) for (n, _), g in zip(trained, found, strict=True)}

    def functional(self, number):
        """A pass with other values of the parameters."""
        batch = self.on.batch(self.rows(number))
        values = {name: p * 0.9 for name, p in self.model.named_parameters()}
        with torch.no_grad():
            given = {**batch, "use_cache": False}
            loss = torch.func.functional_call(self.model, values, (), given).loss
        return {"loss": self.on.mean(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)}
