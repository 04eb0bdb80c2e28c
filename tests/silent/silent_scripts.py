"""The training loop of docs/training.md, and the same with one mistake in it."""

import contextlib
import json
import tempfile
from pathlib import Path

import numerics
import torch
from safetensors.torch import save_file
from torch import distributed
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from planc.ops.context import ContextParallel
from planc.runtime.standalone.images import placeholders
from planc.runtime.standalone.safetensors_files import INDEX, SINGLE
from planc.simulate.batches import TrialPass

MAX_NORM = 1.0
IGNORED = -100


class Script:
    """The right loop.

    A single process, whose numbers are the truth, calls `prepare`, `change`, `batch`, `valid`,
    `forward` and `finish` too; the ranks alone call the other methods.
    """

    raises = ""
    """The type of the error that a single process raises, where it does."""
    refused = ""
    """The type of the error without a code by which planc refuses the script, where it does."""

    def build(self, model, changes):
        return numerics.build(model, **changes)

    def prepare(self, model):
        """Changes the model before the plan is applied."""

    def change(self, model, run=None):
        """Changes the model after the plan was applied, before the first pass; `run` on ranks."""

    def optimizer(self, model):
        """Called before the plan is applied."""
        return None

    def batch(self, batch):
        """A pass as it is read."""
        return batch

    def valid(self, batch):
        """The number of labels of a pass that its loss takes."""
        return (batch["labels"][:, 1:] != IGNORED).sum()

    def one_loop(self, run):
        """Whether `run.forward_backward` runs the passes: where the script cannot."""
        return run.lowered.pipeline is not None or self.splits(run)

    def splits(self, run):
        """Whether ranks have parts of the rows; `sequence_parts` may be a seeded fault."""
        return run.lowered.axis_size(*(op.axis for op in run.lowered.find_ops(ContextParallel))) > 1

    def forward(self, model, batch, extra):
        """The output of a pass, with its loss."""
        output = model(**batch, **extra)
        return output

    def finish(self, model):
        """Changes the gradients of a step, before they are clipped."""

    def rows(self, run, batch):
        """A data rank's rows, with their images."""
        every = TrialPass(inputs=batch, tokens=placeholders(run.model.config))
        return every.of_rank(run.data_rank, run.data_size)

    def count(self, run, batches):
        return run.num_items_in_batch(*(b["labels"] for b in batches))

    def sync(self, run, last):
        return contextlib.nullcontext() if last else run.no_sync()

    def weight(self, run, passes):
        """What the loss of a pass is multiplied by."""
        return 1.0

    def clip(self, run):
        return run.clip_grad_norm_(MAX_NORM)

    def saved(self, run):
        """The full weights by name."""
        return run.full_state_dict(every_rank=True)


class OwnSampler(Script):
    """Each rank takes rows of its own, as torch's DistributedSampler does without arguments."""

    def rows(self, run, batch):
        rank, world = distributed.get_rank(), distributed.get_world_size()
        return {n: v[rank * len(v) // world :][: len(v) // world] for n, v in batch.items()}


class OwnMask(Script):
    """A collator that draws masks draws others on each rank."""

    def rows(self, run, batch):
        mine = super().rows(run, batch)
        mask = torch.ones_like(mine["input_ids"])
        mask[0, : 1 + distributed.get_rank()] = 0
        return {**mine, "attention_mask": mask}


class OwnSeed(Script):
    """The ranks build their models from different random states."""

    def build(self, model, changes):
        made = super().build(model, changes)
        generator = torch.Generator().manual_seed(distributed.get_rank())
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
        return made


class MeanOfMeans(Script):
    """The loss is the mean of each pass on each rank, however few labels it has."""

    def count(self, run, batches):
        return None

    def weight(self, run, passes):
        return 1.0 / passes


class EarlyOptimizer(Script):
    """The optimizer is created before the plan is applied, which replaces the parameters."""

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, foreach=False)


class SameRows(Script):
    """Every data rank reads the rows of the first."""

    def rows(self, run, batch):
        size = len(batch["input_ids"]) // run.data_size
        return {n: v[:size] for n, v in batch.items()}


class SavedByRank(Script):
    """Saves what `full_tensor` gives, which has packed weights in the order of the ranks."""

    def saved(self, run):
        whole = {numerics.plain(n): numerics.whole(p) for n, p in run.model.named_parameters()}
        return whole


# Labels and losses -------------------------------------------------------------------------------


class LocalCount(Script):
    """Passes the number of the labels of its own rows."""

    def count(self, run, batches):
        return sum(self.valid(batch) for batch in batches).float()


class CountOfParts(Script):
    """A loop that gives each rank its parts of rows, and counts the labels of the rows that it has
    read.
    """

    def __init__(self):
        self.read = []

    def one_loop(self, run):
        return False

    def rows(self, run, batch):
        self.read.append(super().rows(run, batch))
        return run.batch(self.read[-1])

    def count(self, run, batches):
        read, self.read = self.read, []
        return sum(self.valid(batch) for batch in read).float()


class CountOfRows(CountOfParts):
    """The same loop, with the number that planc counts."""

    def count(self, run, batches):
        read, self.read = self.read, []
        return run.num_items_in_batch(*(batch["labels"] for batch in read))


class NextLabels(Script):
    """A packing collator gives the labels of the next tokens, and leaves out more of them."""

    def batch(self, batch):
        following = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:].clone()
        following[1::2, :7] = IGNORED
        return {**batch, "shift_labels": following}

    def valid(self, batch):
        return (batch["shift_labels"] != IGNORED).sum()

    def one_loop(self, run):
        return True


class OtherIgnored(Script):
    """Ignores labels of another number than -100, which the model is told as `ignore_index`."""

    number = -1

    def batch(self, batch):
        labels = torch.where(batch["labels"] == IGNORED, self.number, batch["labels"])
        return {**batch, "labels": labels}

    def valid(self, batch):
        return (batch["labels"][:, 1:] != self.number).sum()

    def one_loop(self, run):
        return True

    def rows(self, run, batch):
        return {**super().rows(run, batch), "ignore_index": self.number}

    def forward(self, model, batch, extra):
        return super().forward(model, {**batch, "ignore_index": self.number}, extra)


class OwnMeans(MeanOfMeans):
    """Computes the cross entropy of logits itself, a mean over the labels of a rank."""

    def forward(self, model, batch, extra):
        others = {n: v for n, v in batch.items() if n not in ("labels", "shift_labels")}
        output = model(**others)
        logits, labels = self.compared(output.logits, batch)
        total = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        )
        count = extra.get("num_items_in_batch")
        output.loss = total / ((labels != IGNORED).sum() if count is None else count)
        return output

    def compared(self, logits, batch):
        """The logits and labels of a loss."""
        return logits[:, :-1], batch["labels"][:, 1:]


class OwnSums(Script):
    forward, compared = OwnMeans.forward, OwnMeans.compared


class ShiftedPart(CountOfRows):
    """Computes the cross entropy of a part of a sequence, whose labels it shifts itself."""

    forward, compared = OwnMeans.forward, OwnMeans.compared


class NextOfPart(ShiftedPart):
    """The same of the labels that `run.batch` has shifted."""

    def compared(self, logits, batch):
        if "shift_labels" not in batch:
            return super().compared(logits, batch)
        return logits, batch["shift_labels"]


class LongRows(Script):
    """Half of the rows have several documents each, so that their positions are small."""

    def batch(self, batch):
        rows, length = batch["input_ids"].shape
        positions = torch.arange(length).repeat(rows, 1)
        positions[rows // 2 :] %= 4
        return {
            "input_ids": batch["input_ids"],
            "labels": batch["labels"],
            "position_ids": positions,
        }


class Smoothed(Script):
    """Smooths the loss as transformers' Trainer does, which looks for the class of the model in a
    list of names, and shifts the labels of causal models.
    """

    def forward(self, model, batch, extra):
        shifts = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        labels = batch["labels"]
        output = model(**{name: value for name, value in batch.items() if name != "labels"})
        mean = LabelSmoother(epsilon=0.2)(output, labels, shift_labels=shifts)
        count = (labels[:, 1:] if shifts else labels).ne(IGNORED).sum()
        output.loss = mean * count / extra["num_items_in_batch"]
        return output


def focal(logits, labels, vocab_size, num_items_in_batch=None, **_):
    """A loss of the script, which gives tokens that are likely already less weight."""
    targets = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
    return ((1 - torch.exp(-losses)) * losses).sum() / num_items_in_batch


class OwnLoss(Script):
    def prepare(self, model):
        model.loss_function = focal


class LossOfTransformers(Script):
    def prepare(self, model):
        model.loss_function = ForCausalLMLoss


class UnknownToken(Script):
    """A token id that is as large as the vocabulary, as of a tokenizer with one token more."""

    raises = "IndexError"

    def batch(self, batch):
        tokens = batch["input_ids"].clone()
        tokens[:, 3] = 128
        return {**batch, "input_ids": tokens}


class UnknownLabel(Script):
    raises = "IndexError"

    def batch(self, batch):
        labels = batch["labels"].clone()
        labels[:, 3] = 128
        return {**batch, "labels": labels}


class NormOfStage(Script):
    """Clips with torch's own function, which knows the parameters of this rank alone."""

    def clip(self, run):
        trained = [p for p in run.model.parameters() if p.grad is not None]
        return torch.nn.utils.clip_grad_norm_(trained, MAX_NORM)


class NormOfLoop(Script):
    """Clips by a norm that it computes itself, parameter by parameter."""

    def clip(self, run):
        gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
        norm = sum(complete(g.norm()) ** 2 for g in gradients) ** 0.5
        for gradient in gradients:
            gradient.mul_(min(1.0, float(MAX_NORM / (norm + 1e-6))))
        return norm


class WeightsOfStage(Script):
    """Scales the weights to a norm, which it computes itself."""

    def squares(self, model, run):
        return sum(complete(p.norm()) ** 2 for p in model.parameters())

    @torch.no_grad()
    def change(self, model, run=None):
        norm = self.squares(model, run) ** 0.5
        for parameter in model.parameters():
            parameter.mul_(10 / norm)


class WeightsOfModel(WeightsOfStage):
    """Scales by the norm of the weights of all stages."""

    def squares(self, model, run):
        squares = super().squares(model, run)
        if run is not None:
            distributed.all_reduce(squares, group=run.meshes["pp"].get_group())
        return squares


# Changes after the plan is applied ---------------------------------------------------------------


class AttentionSet(Script):
    def change(self, model, run=None):
        model.config._attn_implementation = "eager"


def first_block(model):
    return model.model.layers[0]


class MixingHook(Script):
    def change(self, model, run=None):
        first_block(model).register_forward_hook(lambda _m, _a, x: x + x.mean(1, keepdim=True))


class ReadingHook(Script):
    def change(self, model, run=None):
        first_block(model).register_forward_hook(lambda _m, _a, x: x.mean() and None)


class ScalingHook(Script):
    def change(self, model, run=None):
        for block in model.model.layers:
            block.register_forward_hook(lambda _m, _a, x: x * 0.9)


class GradientHook(Script):
    def change(self, model, run=None):
        model.lm_head.weight.register_hook(lambda gradient: gradient * 2)


class DoubledGradient(Script):
    """Doubles the gradient of the head once it is reduced."""

    def finish(self, model):
        model.lm_head.weight.grad.mul_(2)


class OtherData(Script):
    @torch.no_grad()
    def change(self, model, run=None):
        for parameter in model.parameters():
            parameter.data = parameter.detach().clone() * 0.7


class CopiedData(Script):
    @torch.no_grad()
    def change(self, model, run=None):
        for parameter in model.parameters():
            parameter.copy_(parameter * 0.7)


def add_shift(model):
    """Adds a vector to the outputs of a block, and the parameter for it."""
    block = first_block(model)
    block.shift = torch.nn.Parameter(torch.full((model.config.hidden_size,), 0.1))
    block.register_forward_hook(lambda module, _, x: x + module.shift)


class AddedParameter(Script):
    def change(self, model, run=None):
        add_shift(model)


class AddedBefore(Script):
    def prepare(self, model):
        add_shift(model)


class SharedModule(Script):
    def change(self, model, run=None):
        model.model.layers[1].mlp = model.model.layers[0].mlp


class TiedLater(Script):
    def change(self, model, run=None):
        model.lm_head.weight = model.model.embed_tokens.weight


# Gradients and values that go around the plan ----------------------------------------------------


class Penalty(Script):
    """Adds the squared norm of the gradients to the loss."""

    def forward(self, model, batch, extra):
        output = super().forward(model, batch, extra)
        options = {"create_graph": True, "allow_unused": True}
        found = torch.autograd.grad(output.loss, [*model.parameters()], **options)
        squares = [g.square().sum() for g in found if g is not None]
        output.loss = output.loss + 0.1 * sum(map(complete, squares))
        return output


def complete(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


class OtherValues(Script):
    """A pass with other values of the parameters."""

    def forward(self, model, batch, extra):
        values = {name: parameter * 0.7 for name, parameter in model.named_parameters()}
        return torch.func.functional_call(model, values, (), {**batch, **extra})


# Files -------------------------------------------------------------------------------------------


class Loaded(Script):
    """Loads weights of a folder that `written` makes; one process has those that it gives."""

    def change(self, model, run=None):
        with tempfile.TemporaryDirectory() as folder:
            weights = self.written(Path(folder))
            if run is None:
                model.load_state_dict(weights)
            else:
                run.load(folder)

    def written(self, folder):
        weights = {name: t * 1.5 for name, t in numerics.build("llama").state_dict().items()}
        save_file(weights, folder / SINGLE, metadata={"format": "pt"})
        return weights


class TwoCopies(Loaded):
    """Other weights beside the single file, in a shard with an index: `from_pretrained` reads the
    file.
    """

    def written(self, folder):
        others, shard = numerics.build("llama").state_dict(), "model-00001-of-00001.safetensors"
        save_file(others, folder / shard, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": dict.fromkeys(others, shard)}
        (folder / INDEX).write_text(json.dumps(index))
        return super().written(folder)


class WithoutScales(Loaded):
    """A weight in fp8, without the scale that its values were divided by."""

    def written(self, folder):
        weights, name = super().written(folder), "model.layers.1.mlp.up_proj.weight"
        values = weights[name] * (448 / weights[name].abs().max())
        stored = {**weights, name: values.to(torch.float8_e4m3fn)}
        save_file(stored, folder / SINGLE, metadata={"format": "pt"})
        return weights
