"""What a training script does between two passes, played on every rank and on one process alone.

A script is a list of operations, each `(name, number)`; the number chooses a batch, or one of a few
ways. Whatever an operation shows, and gradients and weights at the end, must equal what one
process shows: `played` gives both by (place in the script, name). A script ends where planc refuses
an operation: the code is shown as "refused".
"""

import contextlib
import copy
import tempfile
from pathlib import Path

import numerics
import torch
from safetensors.torch import load_file
from script_changes import AROUND, CHANGES, REFUSED, Changes, Refused
from torch import distributed

import planc
from planc.runtime.executor import apply_for_reference
from planc.runtime.gradients import mean_over
from planc.runtime.standalone.shards import is_adapter, named_tensors

ROWS, LENGTH = 4, 16
RATE, MOMENTUM = 0.02, 0.9
FAR = 1e9  # a norm that clips nothing
LORA = """plan tuned for llama

extend "llama.plan"

adapters {
    $blocks.self_attn.{q,k,v,o}_proj : lora(rank = 4, alpha = 8, init = random)
    lm_head                         : lora(rank = 3, init = random)
}
"""
SEVERAL = """plan several for llama

extend "llama.plan"

override fsdp on dp_shard, replicate on dp_replicate {
    precision(param = param_dtype, reduce = reduce_dtype)
    $blocks : unit(reshard = 2)
    model.embed_tokens         : unit(reshard = never)
    group(model.norm, lm_head) : unit(reshard = 2)
    root : unit(reshard = never)
}
"""
PLANS = {
    "tp": ("gpt2", "gpt2", ["tp=4"]),
    "fsdp": ("llama", "llama", ["recompute=false"]),
    "tp-fsdp": ("llama", "llama", ["tp=2", "sequence=false"]),
    "sequence": ("llama", "llama", ["tp=2"]),
    "hsdp": ("llama", "llama", ["dp_replicate=2"]),
    "replicate": ("llama-tied", "llama", ["dp_replicate=4"]),
    "cp": ("llama", "llama", ["cp=2"]),
    "tp-cp": ("llama", "llama", ["tp=2", "cp=2"]),
    "pp": ("llama", "llama", ["pp=2", "microbatches=2"]),
    "pp-tied": ("llama-tied", "llama", ["pp=2", "microbatches=2"]),
    "ep": ("mixtral", "mixtral", ["ep=2"]),
    "lora": ("llama", LORA, ["tp=2"]),
    "reshard": ("llama", SEVERAL, ["recompute=false"]),
    "bf16": ("llama", "llama", ["dp_replicate=2", "param_dtype=bf16"]),
}
COMMON = ["param_dtype=fp32"]
"""Plans by name: a small model, a shipped plan or a text, and settings; on four processes."""

ANY = (  # operations of every plan
    *("train", "train_two", "evaluate", "step", "step", "zero", "zero_model", "clip"),
    *("scale", "freeze", "thaw", "average", "swap", "keep", "restore", "rate"),
    *("save", "load", "full", "export"),
)
CALLS = (  # those that call the model by itself
    *("forward", "no_grad", "inference", "logged", "logged_eval", "between", "pair", "interrupted"),
    *("accumulate", "abandoned", "unshard", "generate", "scale_head", "inner"),
    "own_head",
)
FROZEN = ("lm_head", "model.embed_tokens", "layers.0.mlp", "layers.1", "norm")


def operations(name):
    """The operations of a plan of `PLANS`."""
    if name.startswith("pp"):
        return ANY + CHANGES
    inside = ("generate", "inner", "own_head")
    # a head with factors has no weight that could be set
    out = {"cp": inside, "tp-cp": inside, "lora": ("generate", "own_head", "tie")}
    return tuple(o for o in ANY + CHANGES + CALLS + AROUND if o not in out.get(name, ()))


def texts(vocabulary, number):
    """The rows of a batch, with labels that are ignored unevenly."""
    tokens, labels = numerics.data(vocabulary, seed=100 + number)
    for row in range(ROWS):
        labels[row, : 2 * row + number % 3] = -100
    return {"input_ids": tokens, "labels": labels}


class Alone:
    """What a script does with a model in one process."""

    data_rank, data_size = 0, 1

    def __init__(self, model):
        self.model = model
        self.saved = None

    def num_items_in_batch(self, *labels):
        return torch.stack([(some[:, 1:] != -100).sum() for some in labels]).sum().float()

    def batch(self, batch):
        return batch

    def optimizer(self, optimizer):
        return optimizer

    def mean(self, loss):
        return loss.detach().float()

    def no_sync(self, **_):
        return contextlib.nullcontext()

    unshard = no_sync

    def forward_backward(self, batches, trains=True):
        items = self.num_items_in_batch(*(b["labels"] for b in batches))
        total = 0.0
        for batch in batches:
            loss = self.model(**batch, use_cache=False, num_items_in_batch=items).loss
            if trains:
                loss.backward()
            total = total + loss.detach()
        return total

    def evaluate(self, batches):
        with torch.no_grad():
            return self.forward_backward(batches, trains=False)

    def clip_grad_norm_(self, most):
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)

    def full_state_dict(self, **_):
        return {name: t.detach().clone() for name, t in named_tensors(self.model)}

    def save(self, _path, *, optimizer, step):
        state = copy.deepcopy(self.model.state_dict()), copy.deepcopy(optimizer.state_dict())
        self.saved = (*state, step)

    def load(self, _path, *, optimizer):
        model, state, step = self.saved
        self.model.load_state_dict(model)
        optimizer.load_state_dict(copy.deepcopy(state))
        return step

    def exported(self, _folder):
        return self.full_state_dict()


class OfRun:
    """The same for a run: its methods, and what a script computes with them."""

    def __init__(self, run):
        self.run = run

    def __getattr__(self, name):
        return getattr(self.run, name)

    def mean(self, loss):
        return mean_over(loss.detach().float().clone(), self.run.loss_mesh)

    def exported(self, folder):
        self.run.export(folder, replace=True)
        distributed.barrier()
        rank = distributed.get_rank()  # transformers cannot load in several threads
        exported = read_export(folder, self.run.model.config) if rank == 0 else {}
        distributed.barrier()
        return exported


def read_export(folder, config):
    """The tensors of a folder: those of the model's class, and those that a script has added to it,
    which `from_pretrained` does not load.
    """
    model, loaded = numerics.class_of(config).from_pretrained(
        folder, config=config, dtype="float32", output_loading_info=True
    )
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    added = {n: t for file in files for n, t in file.items() if n in loaded["unexpected_keys"]}
    return {**model.state_dict(), **added}


class Script(Changes):
    """Plays operations on one model.

    Args:
        on: `Alone` or `OfRun`.
        folder: for files, the same on all ranks.
    """

    def __init__(self, on, folder):
        self.on, self.model, self.folder = on, on.model, folder
        parameters = list(self.model.parameters())
        self.optimizer = on.optimizer(torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM))
        self.trained = {n for n, p in self.named() if p.requires_grad}
        self.mean, self.kept, self.swapped = None, None, False
        self.has_saved, self.shown = False, {}

    def named(self):
        return [(numerics.plain(n), p) for n, p in self.model.named_parameters()]

    def play(self, script):
        """What the operations show, and gradients and weights after them.

        Raises:
            Refused: planc has refused an operation that it may refuse.
        """
        for at, (name, number) in enumerate(script):
            try:
                values = getattr(self, name)(number) or {}
            except planc.PlanError as error:
                if {d.code for d in error.diagnostics} != {REFUSED.get(name)}:
                    raise
                raise Refused(at, REFUSED[name], self.shown) from error
            self.shown |= {
                (at, f"{name} {key}".strip()): copied(value) for key, value in values.items()
            }
        gradients = {n: p.grad for n, p in self.named() if p.grad is not None}
        orders = numerics.rank_orders(self.model)
        end = len(script)
        for name, gradient in gradients.items():
            own = numerics.in_own_order(numerics.whole(gradient), orders.get(name))
            self.shown[end, f"gradient of {name}"] = copied(own)
        for name, tensor in self.on.full_state_dict(every_rank=True).items():
            self.shown[end, f"weight {name}"] = copied(tensor)
        return self.shown

    def rows(self, number):
        every = texts(self.model.config.vocab_size, number)
        rows = ROWS // self.on.data_size
        return {n: t[self.on.data_rank * rows :][:rows] for n, t in every.items()}

    def loss(self, *numbers):
        """The sum of the losses of some passes, normalized over all their tokens."""
        batches = [self.rows(n) for n in numbers]
        items = self.on.num_items_in_batch(*(b["labels"] for b in batches))
        losses = [
            self.model(**self.on.batch(b), use_cache=False, num_items_in_batch=items).loss
            for b in batches
        ]
        return torch.stack([whole_loss(loss) for loss in losses]).sum()

    # passes

    def train(self, number):
        return {"loss": self.on.forward_backward([self.rows(number)])}

    def train_two(self, number):
        return {"loss": self.on.forward_backward([self.rows(number), self.rows(number + 1)])}

    def evaluate(self, number):
        return {"loss": self.on.evaluate([self.rows(number)])}

    def forward(self, number):
        loss = self.loss(number)
        loss.backward()
        return {"loss": self.on.mean(loss)}

    def no_grad(self, number):
        with torch.no_grad():
            return self.logged(number)

    def inference(self, number):
        with torch.inference_mode():
            return self.logged(number)

    def logged(self, number):
        return {"loss": self.on.mean(self.loss(number))}

    def logged_eval(self, number):
        self.model.eval()
        try:
            return self.logged(number)
        finally:
            self.model.train()

    def between(self, number):
        """Gradients are cleared between the forward and the backward pass."""
        loss = self.loss(number)
        (self.model if number % 2 else self.optimizer).zero_grad()
        loss.backward()

    def pair(self, number):
        """Two forward passes before one backward pass."""
        self.loss(number, number + 1).backward()

    def interrupted(self, number):
        """A pass without gradients between a forward pass and its backward pass."""
        loss = self.loss(number)
        shown = self.no_grad(number + 1)
        loss.backward()
        return shown

    def accumulate(self, number):
        with self.on.no_sync(whole=bool(number % 2)):
            self.loss(number).backward()
        self.loss(number + 1).backward()

    def abandoned(self, number):
        """An accumulation that the script gives up."""
        with self.on.no_sync(whole=bool(number % 2)):
            self.loss(number).backward()
        (self.model if number % 3 else self.optimizer).zero_grad()

    def unshard(self, number):
        with self.on.unshard():
            return self.no_grad(number)

    def generate(self, number):
        tokens = texts(self.model.config.vocab_size, number)["input_ids"][:2, :5]
        self.model.eval()
        made = self.model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
        self.model.train()
        return {"tokens": made}

    def inner(self, number):
        """A head of the script's own, on the model without its head."""
        tokens = self.rows(number)["input_ids"]
        states = whole_loss(self.model.base_model(tokens, use_cache=False).last_hidden_state)
        # no squares: a norm comes last, and their sum has a gradient that cancels but for rounding
        loss = (states.float() @ torch.linspace(-1, 1, states.shape[-1])).tanh().mean()
        if number % 2:
            loss.backward()
        return {"loss": self.on.mean(loss)}

    def own_head(self, number):
        """A loss that multiplies with the weight of the head itself, as fused ones do; also where
        the model was moved.
        """
        if number % 2:
            self.model.to("cpu")
        tokens = self.rows(number)["input_ids"]
        states = whole_loss(self.model.base_model(tokens, use_cache=False).last_hidden_state)
        weight = whole_loss(self.model.get_output_embeddings().weight)
        loss = (states.float() @ weight[:9].T).tanh().mean()
        loss.backward()
        return {"loss": self.on.mean(loss)}

    # between passes

    def step(self, _):
        self.optimizer.step()

    def zero(self, number):
        self.optimizer.zero_grad(set_to_none=bool(number % 2))

    def zero_model(self, number):
        self.model.zero_grad(set_to_none=bool(number % 2))

    def clip(self, number):
        return {"norm": self.on.clip_grad_norm_(FAR if number % 2 else 0.5)}

    @torch.no_grad()
    def scale(self, _):
        for parameter in self.model.parameters():
            parameter.mul_(0.9)

    @torch.no_grad()
    def scale_head(self, _):
        self.model.get_output_embeddings().weight.mul_(1.1)

    def freeze(self, number):
        part = FROZEN[number % len(FROZEN)]
        for name, parameter in self.named():
            if part in name:
                parameter.requires_grad_(False)

    def thaw(self, _):
        for name, parameter in self.named():
            parameter.requires_grad_(name in self.trained)

    @torch.no_grad()
    def average(self, _):
        """Averages of the parameters that the model had at the first call, by name."""
        if self.mean is None:
            self.mean = {name: p.detach().clone() for name, p in self.named()}
        for name, parameter in self.named():
            if name in self.mean:
                self.mean[name].lerp_(parameter.detach(), 0.5)

    @torch.no_grad()
    def swap(self, _):
        for name, parameter in self.named():
            if self.mean and name in self.mean:
                before = parameter.detach().clone()
                parameter.copy_(self.mean[name])
                self.mean[name].copy_(before)

    def keep(self, _):
        state = {n: t.detach().clone() for n, t in self.model.state_dict().items()}
        self.kept = state, copy.deepcopy(self.optimizer.state_dict())

    def restore(self, _):
        if self.kept is not None:
            self.model.load_state_dict(self.kept[0])
            self.optimizer.load_state_dict(copy.deepcopy(self.kept[1]))

    def rate(self, number):
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * (1 + number % 3)

    def save(self, number):
        self.has_saved = True
        self.on.save(self.folder / "saved", optimizer=self.optimizer, step=number)

    def load(self, _):
        if self.has_saved:
            step = self.on.load(self.folder / "saved", optimizer=self.optimizer)
            return {"step": torch.tensor(float(step))}
        return {}

    def full(self, _):
        return self.on.full_state_dict(every_rank=True)

    def export(self, _):
        if any(is_adapter(name) for name, _ in named_tensors(self.model)):
            return {}
        return self.on.exported(self.folder / "export")


def whole_loss(loss):
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss


def copied(value):
    return numerics.whole(value).clone()


def lowered(name):
    model, plan, settings = PLANS[name]
    with plan_file(plan) as path:
        return planc.lower(
            numerics.build(model), path, world_size=4, overrides=[*COMMON, *settings]
        )


@contextlib.contextmanager
def plan_file(plan):
    """A shipped plan's name, or a file of the text."""
    if "\n" not in plan:
        yield plan
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.plan"
        path.write_text(plan)
        yield str(path)


def by_itself(name, script):
    """What one process shows."""
    model = apply_for_reference(numerics.build(PLANS[name][0]), lowered(name))
    return Script(Alone(model), Path()).play(script)


def on_rank(plan, script, folder, made=None):
    """What this rank shows.

    Args:
        plan: a name of `PLANS`.
        script: (name, number) of each operation.
        folder: for what is saved.
        made: the model, which it builds by itself on a process.
    """
    model, _, settings = PLANS[plan]
    made = made or numerics.build(model)
    with plan_file(PLANS[plan][1]) as path:
        run = planc.apply(
            made, path, overrides=[*COMMON, *settings], device_type="cpu", require="nothing"
        )
    try:
        return Script(OfRun(run), Path(folder)).play(script)
    except Refused as refused:
        if run.lowered.pipeline is not None:  # other stages wait for this one
            raise
        return {**refused.shown, (refused.at, "refused"): refused.code}
