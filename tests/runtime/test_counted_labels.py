"""A step is that of the mean over all labels, however a model of one's own names and counts."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
)

sys.path.append(str(Path(__file__).parent / "processes"))
import numerics

import planc
from planc.proxy.user_model import TARGETS
from planc.runtime import training_step
from planc.runtime.gradients import mean_over
from planc.runtime.run import Run
from planc.runtime.safeguards import inputs, loss_rows
from planc.runtime.standalone.context_tokens import next_labels
from planc.runtime.standalone.pipeline_schedule import OF_THE_LOSS
from planc.simulate.thread_ranks import run_ranks

PLAN = """plan own for Own

mesh {
    dp_shard = 2
}

fsdp on dp_shard {
    precision(param = fp32, reduce = fp32)
    root : unit(reshard = never)
}
"""


STAGES = """
pipeline on pp {
    microbatches = 2
    stages       = even(blocks.*)
}
"""


class Own(nn.Module):
    """Predicts labels that are as many as its tokens, of which it ignores -1, as nanoGPT."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 20)

    def logits(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.tanh())

    def forward(self, tokens, targets=None):
        logits = self.logits(tokens)
        if targets is None:
            return logits, None
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss


class Next(Own):
    """Predicts the next token, under another name."""

    def forward(self, tokens, y):
        loss = nn.CrossEntropyLoss()(self.logits(tokens)[:, :-1].flatten(0, 1), y[:, 1:].flatten())
        return {"loss": loss}


class Custom(Own):
    """Computes its mean by itself."""

    def forward(self, tokens, labels):
        found = self.logits(tokens).log_softmax(-1)
        chosen = found.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return -(chosen * (labels >= 0)).sum() / (labels >= 0).sum(), found


class Encoder(Own):
    """A mean over rows of numbers: there are no labels of tokens."""

    def forward(self, tokens, targets):
        return (((self.logits(tokens)[..., 0] - targets) ** 2).mean(),)


CASES = {
    Own: ("targets", -1),
    Next: ("y", -100),
    Custom: ("labels", -100),
    Encoder: ("targets", None),
}


def bart():
    """A decoder, whose labels transformers shifts in its input."""
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads"), 1)
    sizes |= dict(decoder_attention_heads=1, encoder_ffn_dim=8, decoder_ffn_dim=8, d_model=8)
    config = BartConfig(vocab_size=20, max_position_embeddings=16, dropout=0.0, **sizes)
    return BartForConditionalGeneration(config)


def bert():
    """Predicts the tokens that are masked, the first of a row too."""
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    nothing = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForMaskedLM(BertConfig(vocab_size=20, **sizes, **nothing))


class Packed(Own):
    """Takes the labels of the next tokens as a packing collator writes them."""

    def forward(self, tokens, labels, shift_labels=None):
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        logits = self.logits(tokens).flatten(0, 1)
        return {"loss": functional.cross_entropy(logits, shift_labels.flatten())}


class Unread(Own):
    """Gets the labels of the next tokens, and takes its own."""

    def forward(self, tokens, labels, shift_labels=None):
        targets = functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        return {"loss": functional.cross_entropy(self.logits(tokens).flatten(0, 1), targets)}


def llama():
    """Divides the sum over `shift_labels`, where it gets some, by the number that it is given."""
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes))


def unread():
    """A loss that hands on no other labels than those that it shifts."""
    model = llama()
    model.loss_function = _of_labels
    return model


def _of_labels(logits, labels, vocab_size, num_items_in_batch=None, **_):
    targets = labels[:, 1:].flatten()
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")
    counted = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return loss / counted


CASES |= dict.fromkeys((bart, bert, Packed, Unread, llama, unread), ("labels", -100))
NEXT = {Packed: (1, 4, 0, 2), Unread: (1, 4, 0, 2), llama: (1, 4, 0, 2), unread: (1, 4, 0, 2)}
"""How many more labels of the next tokens each pass ignores, of the models that get them."""


def batches(kind, rank, *, first=True):
    """Two passes of a rank, with 2 to 12 of 12 labels; without labels in the first, if asked."""
    name, ignored = CASES[kind]
    tokens_name = "input_ids" if kind in (bart, bert, llama, unread) else "tokens"
    found = []
    for number in range(2):
        generator = torch.Generator().manual_seed(10 * rank + number)
        tokens = torch.randint(0, 20, (2, 6), generator=generator)
        labels = torch.randint(0, 20, (2, 6), generator=generator)
        if ignored is None:
            labels = labels.float()
        else:
            labels[:, : [0, 3, 1, 5][2 * rank + number]] = ignored
            if not first and number == 0:
                labels[:] = ignored
        found.append({tokens_name: tokens, name: labels})
        if kind in NEXT:
            following = functional.pad(labels, (0, 1), value=ignored)[:, 1:].clone()
            following[:, : NEXT[kind][2 * rank + number]] = ignored
            found[-1]["shift_labels"] = following
    return found


def alone(model, kind, **how):
    """One pass of all rows."""
    every = [batch for rank in range(2) for batch in batches(kind, rank, **how)]
    whole = {n: torch.cat([batch[n] for batch in every]) for n in every[0]}
    output = model(**whole)
    output = output.values() if isinstance(output, dict) else output
    loss = next(value for value in output if isinstance(value, torch.Tensor) and not value.dim())
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def trained(kind, steps, tmp_path, *, stages=1, loop=Run.forward_backward, more=""):
    """Loss and gradients of the last of several steps on two data ranks, and of one process."""
    text = PLAN.replace("Own", "llama" if kind is unread else kind.__name__)
    if stages > 1:
        text = text.replace("mesh {", f"mesh {{\n    pp       = {stages}") + STAGES
    (tmp_path / "own.plan").write_text(text + more)
    torch.manual_seed(0)
    single = kind()
    models, found = [copy.deepcopy(single) for _ in range(2 * stages)], {}

    def rank(number):
        run = planc.apply(
            models[number], tmp_path / "own.plan", device_type="cpu", require="nothing", compare=0
        )
        for how in steps:
            run.model.zero_grad()
            loss = loop(run, batches(kind, run.data_rank, **how))
        own = {n: p.grad for n, p in run.model.named_parameters() if p.grad is not None}
        grads = {n: grad.full_tensor() for n, grad in own.items()}
        found[number] = loss, grads

    failure = run_ranks(2 * stages, rank, seconds=60)
    assert failure is None, failure and failure.message
    return found, alone(single, kind, **steps[-1])


@pytest.fixture
def told(monkeypatch):
    """The codes of what is logged; ranks that are threads log nothing."""
    codes = []
    monkeypatch.setattr(training_step, "warning", lambda code, *_, **__: codes.append(code))
    return codes


NONE_FIRST = [{"first": False}, {}]


@pytest.mark.parametrize("steps", [[{}], [{"first": False}], NONE_FIRST], ids=str)
@pytest.mark.parametrize("kind", CASES)
def test_a_model_of_ones_own_is_weighed_by_what_its_loss_counts(kind, steps, tmp_path, told):
    if kind is Custom and not steps[0].get("first", True):
        pytest.skip("its mean over no label is no number")
    same(*trained(kind, steps, tmp_path))
    assert told == ["PL515"] * 2 * (kind is Custom)


@pytest.mark.parametrize("kind", [llama, unread])
def test_batches_are_counted_as_the_loss_of_a_model_takes_them(kind, tmp_path):
    """A loop of one's own; a batch stands for its labels."""

    def loop(run, passes):
        count = run.num_items_in_batch(*passes)
        losses = [run.model(**batch, num_items_in_batch=count).loss for batch in passes]
        for loss in losses:
            loss.backward()
        return torch.stack(losses).sum().detach()

    found, right = trained(kind, [{}], tmp_path, loop=loop)
    for name, grad in right[1].items():
        torch.testing.assert_close(found[0][1][name], grad, rtol=1e-5, atol=1e-6)


def test_a_loss_in_chunks_counts_as_the_loss_of_the_model(tmp_path):
    same(
        *trained(
            llama, [{}], tmp_path, more="\nloss {\n    lm_head : cross_entropy(chunks = 2)\n}\n"
        )
    )


def test_stages_before_the_last_get_no_labels(tmp_path):
    """Their hidden states are no logits; a pass has the weight of its microbatch's labels."""
    same(*trained(Own, NONE_FIRST, tmp_path, stages=2))


def same(found, right):
    loss, grads = right
    for own, own_grads in found.values():
        torch.testing.assert_close(own, loss.float(), rtol=1e-5, atol=1e-6)
        for name, grad in own_grads.items():
            torch.testing.assert_close(grad, grads[name], rtol=1e-5, atol=1e-6)
    assert {name for _, own in found.values() for name in own} == grads.keys()


def test_the_names_of_labels_are_the_same_everywhere():
    assert set(TARGETS) < set(OF_THE_LOSS)


IGNORED = -1


def ignoring_batches(data_rank, last):
    """Two passes of a rank; without an ignored label if `last` labels are to be counted."""
    found = []
    for number in range(2):
        generator = torch.Generator().manual_seed(10 * data_rank + number)
        tokens = torch.randint(0, 128, (2, 16), generator=generator)
        labels = tokens.clone()
        if not last:
            labels[:, : 3 + 5 * number] = IGNORED
        found.append({"input_ids": tokens, "labels": labels, "ignore_index": IGNORED})
    return found


def by_step(run, batches):
    return run.forward_backward(batches)


def by_the_model(run, batches):
    """A loop of the script, with the loss of the model."""
    count = run.num_items_in_batch(*batches)
    losses = [run.model(**run.batch(b), num_items_in_batch=count).loss for b in batches]
    for loss in losses:
        loss.backward()
    return mean_over(torch.stack(losses).sum().detach(), run.loss_mesh)


def by_the_script(run, batches):
    """A loop of the script, with a loss of its own."""
    count = run.num_items_in_batch(*batches)
    total = 0
    for batch in batches:
        part = run.batch(batch)
        labels, shifted = part.pop("labels"), part.pop("shift_labels", None)
        if shifted is None:
            shifted = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        options = {"ignore_index": part.pop("ignore_index"), "reduction": "sum"}
        logits = run.model(**part).logits.flatten(0, 1)
        loss = functional.cross_entropy(logits, shifted.flatten(), **options) / count
        loss.backward()
        total += loss.detach()
    return mean_over(total, run.loss_mesh)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("settings", "loop"),
    [
        ([], by_step),
        ([], by_the_model),
        (["loss_chunks=2"], by_step),
        (["loss_chunks=2", "tp=2"], by_step),
        (["cp=2"], by_step),
        (["cp=2"], by_the_model),
        (["cp=2"], by_the_script),
        (["pp=2", "microbatches=2"], by_step),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_labels_that_a_batch_ignores(settings, loop, last):
    """`ignore_index` of a batch is that of its loss, of the divisor and of what planc pads."""
    ranks = 2
    single = numerics.build("llama")
    data_ranks = 1 if any(s[:2] in ("cp", "pp", "tp") for s in settings) else 2
    every = [batch for rank in range(data_ranks) for batch in ignoring_batches(rank, last)]
    rows = {name: torch.cat([b[name] for b in every]) for name in ("input_ids", "labels")}
    right = single(**rows, ignore_index=IGNORED).loss
    right.backward()
    grads = {name: p.grad for name, p in single.named_parameters()}
    models, found = [numerics.build("llama") for _ in range(ranks)], {}

    def rank(number):
        overrides = ["param_dtype=fp32", "reduce_dtype=fp32", *settings]
        options = {"device_type": "cpu", "require": "nothing", "compare": 0}
        run = planc.apply(models[number], "llama", overrides=overrides, **options)
        loss = loop(run, ignoring_batches(run.data_rank, last))
        named = ((numerics.plain(n), p.grad) for n, p in run.model.named_parameters())
        own = {n: numerics.whole(grad) for n, grad in named if grad is not None}
        found[number] = loss, max(numerics.error(grad, grads[n]) for n, grad in own.items())

    failure = run_ranks(ranks, rank, seconds=60)
    assert failure is None, failure and (failure.error or failure.message)
    for loss, error in found.values():
        torch.testing.assert_close(loss, right.detach(), rtol=1e-5, atol=1e-6)
        assert error < 1e-4


def test_labels_of_a_script_are_padded_with_the_one_that_they_ignore():
    labels = torch.tensor([[5, IGNORED, 7], [1, 2, 3]])
    assert next_labels(labels, None).tolist() == [[IGNORED, 7, IGNORED], [2, 3, IGNORED]]
    assert next_labels(labels[1:], None).tolist() == [[2, 3, -100]]
    assert next_labels(labels[1:], IGNORED).tolist() == [[2, 3, IGNORED]]
    assert next_labels(labels.float(), None)[:, -1].tolist() == [-100, -100]


@pytest.mark.parametrize("settings", [["loss_chunks=2"], ["loss_chunks=2", "tp=2"]], ids=str)
def test_a_label_of_another_loss_is_an_error_in_chunks_too(settings):
    """-100 where the loss ignores -1: one process raises IndexError."""
    tokens = torch.ones(2, 16).long()
    labels = tokens.clone()
    labels[0, 3] = -100
    models, told = [numerics.build("llama") for _ in range(2)], {}

    def rank(number):
        options = {"device_type": "cpu", "require": "nothing", "compare": 0}
        run = planc.apply(models[number], "llama", overrides=settings, **options)
        try:
            run.model(input_ids=tokens, labels=labels, ignore_index=IGNORED)
        except RuntimeError as error:
            told[number] = str(error)

    assert run_ranks(2, rank, seconds=60) is None
    assert told == dict.fromkeys(range(2), "a label is neither ignored nor in [0, 128)")


# A loss that the script computes of logits --------------------------------------------------------


def logit_gradient(loss, labels):
    """Logits of 2 rows of 5 tokens, and their gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator, requires_grad=True)
    loss(logits.flatten(0, 1), labels.flatten()).backward()
    return logits.detach(), logits.grad


LABELS = torch.tensor([[1, 2, 3, 4, -100], [-100, 6, 0, 1, -100]])


def of_own_code(logits, labels):
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return -(chosen * (labels >= 0)).mean()


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        (functional.cross_entropy, 1 / 7),
        (lambda *given: 3 * functional.cross_entropy(*given, reduction="sum"), 3.0),
        (of_own_code, 1 / 10),
        (lambda *given: functional.cross_entropy(*given, label_smoothing=0.01), 0.99 / 7),
    ],
)
def test_a_cross_entropy_is_known_by_the_gradient_of_logits(loss, weight, monkeypatch):
    logits, gradient = logit_gradient(loss, LABELS)
    for entries in (7, 2**20):  # in chunks of a token, and in one
        monkeypatch.setattr(loss_rows, "_ENTRIES", entries)
        tokens, found, strayed = loss_rows.measure_rows(logits, gradient, LABELS).tolist()
        assert (tokens, strayed) == (7, 0)
        assert found == pytest.approx(weight, rel=0.01)
    gradient[0, 0] *= 3  # tokens with weights of their own
    assert loss_rows.measure_rows(logits, gradient, None)[0] == 7


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels: logits.square().mean(),
        lambda logits, labels: -functional.cross_entropy(logits, labels),
        lambda logits, labels: functional.cross_entropy(logits / 4, labels),
        lambda logits, labels: (logits.softmax(-1) - 1 / 7).square().sum(),
        lambda logits, labels: 0 * logits.sum(),
    ],
)
def test_another_loss_is_not_known(loss):
    assert loss_rows.measure_rows(*logit_gradient(loss, LABELS), LABELS).tolist() == [-1, 0, 0]


def test_labels_that_are_not_those_of_the_next_tokens_are_counted():
    def strayed(taken):
        return loss_rows.measure_rows(*logit_gradient(functional.cross_entropy, taken), LABELS)[2]

    other = LABELS.clone()
    other[0, 1] = 5
    assert strayed(other) == 1
    other[0, 4] = 0  # the last of a row has no label
    assert strayed(other) == 2
    assert strayed(torch.full((2, 5), 5)) == 0  # of another kind
    fewer = LABELS.clone()
    fewer[0, :2] = -100  # a mask of the script
    assert strayed(fewer) == 0
    part = torch.tensor([[1, 2, 3, 4, 5], [2, 6, 0, 1, -100]])
    shifted = part.clone()
    shifted[:, -1] = -100
    found = logit_gradient(functional.cross_entropy, shifted)
    assert loss_rows.measure_rows(*found, part)[2] == 1


@pytest.mark.parametrize(
    ("ranks", "means"),
    [
        ([(10, 0.1, 0), (20, 0.05, 0)], True),
        ([(10, 0.1, 0), (20, 0.1, 0)], False),
        ([(10, 0.1, 0), (10, 0.1, 0)], False),
        ([(10, 0.1, 0), (-1, 0, 0)], False),
        ([(4096, 1 / 4096, 0), (4095, 1 / 4095, 0)], True),
        ([(10, 0.3, 0), (20, 0.1, 0)], False),
    ],
)
def test_means_of_unequal_numbers_of_tokens(ranks, means):
    assert loss_rows.own_means([loss_rows.LossRows(*rank) for rank in ranks]) == means


def mean(run, logits, labels):
    return functional.cross_entropy(logits, labels)


def weighed(run, logits, labels):
    """The sum over the number of all ranks, without a call of planc."""
    count = mean_over((labels != -100).sum().float(), run.data_mesh)
    return functional.cross_entropy(logits, labels, reduction="sum") / count


def shifted(run, part, loss):
    logits = run.model(input_ids=part["input_ids"], position_ids=part.get("position_ids")).logits
    targets = part["labels"][:, 1:].flatten()
    return loss(run, logits[:, :-1].flatten(0, 1), targets)


def given_next(run, part, loss):
    logits = run.model(input_ids=part["input_ids"], position_ids=part["position_ids"]).logits
    return loss(run, logits.flatten(0, 1), part["shift_labels"].flatten())


def ids_alone(run, part, loss):
    """Labels that planc is not told of."""
    logits = run.model(**{n: v for n, v in part.items() if n != "labels"}).logits
    return loss(run, logits[:, :-1].flatten(0, 1), part["input_ids"][:, 1:].flatten())


def script_rows(number, data_rank, *, labeled=True):
    generator = torch.Generator().manual_seed(10 * number + data_rank)
    tokens = torch.randint(0, 128, (2, 16), generator=generator)
    labels = tokens.clone()
    labels[:, : 3 + 6 * data_rank] = -100
    return {"input_ids": tokens, "labels": labels} if labeled else {"input_ids": tokens}


PARTS = """plan parts for llama

mesh {
    dp_shard = auto
    cp       = 2
}

context on cp {
    balance = BALANCE
}

fsdp on dp_shard * cp {
    precision(param = fp32, reduce = fp32)
    root : unit
}
"""


def with_script_loss(plan, step, monkeypatch, *, labeled=True, passes=2, ranks=2):
    """The codes that are logged in some passes of a script's own loss, the error of gradients of
    the first, and what a rank raises.
    """
    told, errors = [], {}
    monkeypatch.setattr(inputs, "warning", lambda code, *_, **__: told.append(code))
    single = numerics.build("llama")
    rows = [script_rows(0, rank) for rank in range(2 if plan == "llama" else 1)]
    whole = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    single(**(whole if labeled else {**whole, "labels": whole["input_ids"]})).loss.backward()
    right = {name: p.grad for name, p in single.named_parameters()}
    models = [numerics.build("llama") for _ in range(ranks)]

    def rank(number):
        overrides = ["param_dtype=fp32", "reduce_dtype=fp32"] if plan == "llama" else []
        options = {"device_type": "cpu", "require": "nothing", "compare": 2}
        run = planc.apply(models[number], plan, overrides=overrides, **options)
        batches = [script_rows(at, run.data_rank, labeled=labeled) for at in range(passes)]
        parts = [run.batch(batch) for batch in batches]  # before the first pass
        for at, (batch, part) in enumerate(zip(batches, parts, strict=True)):
            run.model.zero_grad()
            step(run, batch, part).backward()
            named = ((numerics.plain(n), p.grad) for n, p in run.model.named_parameters())
            if at == 0:
                errors[number] = max(numerics.error(numerics.whole(g), right[n]) for n, g in named)

    failure = run_ranks(ranks, rank, seconds=60)
    return told, max(errors.values()), failure and failure.error


@pytest.fixture
def parts(tmp_path):
    def plan(balance="head_tail"):
        path = tmp_path / "parts.plan"
        path.write_text(PARTS.replace("BALANCE", balance))
        return path

    return plan


@pytest.mark.parametrize(("loss", "codes"), [(mean, ["PL478"] * 2), (weighed, [])])
def test_a_mean_of_means_of_a_script_is_reported(loss, codes, monkeypatch):
    def step(run, batch, part):
        return shifted(run, part, loss)

    told, error, raised = with_script_loss("llama", step, monkeypatch)
    assert raised is None and told == codes
    assert error > 0.1 if codes else error < 1e-4


@pytest.mark.parametrize("balance", ["head_tail", "none"])
@pytest.mark.parametrize("labeled", [True, False])
def test_a_part_of_a_sequence_that_a_script_shifts_is_refused(balance, labeled, parts, monkeypatch):
    def step(run, batch, part):
        return (shifted if labeled else ids_alone)(run, part, mean)

    _, error, raised = with_script_loss(parts(balance), step, monkeypatch, labeled=labeled)
    assert error > 1e-3
    assert isinstance(raised, planc.PlanError) and "PL422" in str(raised)
    assert "test_counted_labels.py" in str(raised)


def test_the_labels_of_next_tokens_are_right_in_a_loss_of_a_script(parts, monkeypatch):
    def step(run, batch, part):
        count = run.num_items_in_batch(batch)
        logits = given_next(run, part, lambda _, *given: given)
        return functional.cross_entropy(*logits, reduction="sum") / count

    told, error, raised = with_script_loss(parts(), step, monkeypatch)
    assert raised is None and told == [] and error < 1e-4


def test_a_mean_over_the_tokens_of_a_part_is_reported(parts, monkeypatch):
    def step(run, batch, part):
        return given_next(run, part, mean)

    told, error, raised = with_script_loss(parts(), step, monkeypatch)
    assert raised is None and error > 1e-3 and told == ["PL478"] * 2


def test_all_ranks_stop_where_one_sequence_is_shifted(parts, monkeypatch):
    stopped = []

    def step(run, batch, part):
        try:
            return (shifted if run.data_rank else given_next)(run, part, mean)
        except planc.PlanError as error:
            stopped.append(str(error))
            raise

    with_script_loss(parts(), step, monkeypatch, ranks=4)
    assert len(stopped) == 4 and all("PL422" in text for text in stopped)
