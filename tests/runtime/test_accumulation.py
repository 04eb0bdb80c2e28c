"""A step's global batch on any number of ranks: `run.accumulation`, and passes of weight 0."""

import copy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import compiled_of
from loop_plans import SIZES
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).parent / "processes"))
import numerics

import planc
from planc.diagnostics.diagnostic import PlanError
from planc.runtime.accumulation import accumulation
from planc.simulate.thread_ranks import run_ranks

BATCH, LENGTH, STEPS = 8, 12, 2


def data(numbers):
    """Rows by number, each with another number of labels."""
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 256, (BATCH * STEPS, LENGTH), generator=drawn)
    labels = tokens.clone()
    for number, row in enumerate(labels):
        row[: number % (LENGTH - 2)] = -100
    picked = [*numbers]
    return {"input_ids": tokens[picked], "labels": labels[picked]}


def mean(logits, labels, vocab_size, **_):
    """A loss that takes no number of labels of the whole step."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def trained(ranks, settings, rows, loss=None):
    """(losses, weights, evaluated loss) after some steps, on threads as ranks."""
    found = {}
    torch.manual_seed(0)
    models = [LlamaForCausalLM(LlamaConfig(**SIZES))]
    models += [copy.deepcopy(models[0]) for _ in range(1, ranks)]

    def rank(number):
        model = models[number]
        if loss:
            model.loss_function = loss
        overrides = ["param_dtype=fp32", *settings]
        run = planc.apply(model, "llama", overrides=overrides, device_type="cpu", compare=0)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        share, losses = run.accumulation(BATCH, rows=rows), []
        for step in range(STEPS):
            batches = [data(part) for part in share.batches(step)]
            losses.append(run.forward_backward(batches, passes=share.passes).item())
            optimizer.step()
            optimizer.zero_grad()
        last = run.evaluate(batches, passes=share.passes).item()
        found[number] = losses, run.full_state_dict(every_rank=True), last

    failure = run_ranks(ranks, rank, seconds=120)
    assert failure is None, failure and (failure.message, failure.error)
    return found


@pytest.mark.parametrize(
    ("ranks", "settings", "rows", "loss"),
    [
        (3, [], 1, None),  # 3, 3 and 2 rows: the last rank has one pass with weight 0
        (3, [], 2, mean),  # passes of 1 and 2 rows
        (3, [], 1, mean),
        (6, ["pp=2", "microbatches=2"], 1, None),  # 4, 2 and 2 rows in microbatches of one
    ],
    ids=["weight 0", "unequal", "means", "stages"],
)
def test_ranks_that_do_not_divide_the_batch_train_the_same(ranks, settings, rows, loss):
    losses, weights, last = trained(1, [], None, loss)[0]
    for found in trained(ranks, settings, rows, loss).values():
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[2] == pytest.approx(last, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-6)


def test_each_row_is_read_once_in_as_few_passes_as_fit():
    lowered = compiled_of("llama-3.1-8b", "llama").lowered
    for batch, ranks, rows in [(64, 7, 2), (64, 8, 2), (8, 3, 1), (5, 4, 1), (9, 2, 4), (7, 7, 3)]:
        sized = replace(
            lowered,
            axes=tuple(replace(a, size=ranks if a.name == "dp_shard" else 1) for a in lowered.axes),
        )
        every = [accumulation(sized, batch, rows, rank) for rank in range(ranks)]
        read = [row for share in every for part in share.parts for row in part]
        assert read == [*range(batch)]
        most = -(-batch // ranks)
        assert {share.passes for share in every} == {-(-most // rows)}
        for share in every:
            assert share.passes - 1 <= len(share.parts) <= share.passes
            assert all(1 <= len(part) <= rows for part in share.parts)
        assert every[0].batches(3)[0].start == 3 * batch


def test_a_batch_that_no_ranks_can_share_is_refused_with_those_that_they_can():
    told = {}

    def rank(number):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        settings = ["pp=2", "microbatches=2"]
        run = planc.apply(model, "llama", overrides=settings, device_type="cpu", compare=0)
        told[number] = []
        for batch in (7, 2):
            with pytest.raises(PlanError, match="PL619") as caught:
                run.accumulation(batch)
            told[number].append(caught.value.diagnostics[0])
        assert len(run.accumulation(4).parts) == 1
        with pytest.raises(ValueError, match="`rows` is a positive number of rows, not 0"):
            run.accumulation(8, rows=0)

    assert run_ranks(4, rank, seconds=60) is None
    seven, two = told[3]
    text = "7 rows of a step cannot be spread over 2 data ranks of 2 microbatches"
    assert seven.message == text and "use 6 or 8" in seven.help
    assert two.message.startswith("2 rows") and "use 4, or" in two.help
    assert seven.labels[0].span.text.startswith("run.accumulation(batch)")


def test_a_rank_without_a_batch_or_with_too_many_stops_all():
    told = {}

    def rank(number):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        run = planc.apply(model, "llama", device_type="cpu", compare=0)
        told[number] = []
        for own in (0, 3):
            try:
                run.forward_backward([data([0])] * (own if number else 2), passes=2)
            except PlanError as error:
                told[number] += [d.message for d in error.diagnostics]

    assert run_ranks(2, rank, seconds=60) is None
    begin = "the ranks pass 0 to 2 batches in one step; rank"
    assert told[0] == [f"{begin} 0 passes 2 of 2 passes"] * 2
    assert told[1] == [f"{begin} 1 passes {own} of 2 passes" for own in (0, 3)]


def gradients(model):
    named = ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
    return {numerics.plain(name): numerics.whole(gradient) for name, gradient in named}


@pytest.mark.parametrize("step", ["forward_backward", "evaluate"])
def test_a_rank_without_rows_stops_all(step):
    """The model would fail on that rank alone."""
    told = {}

    def rank(number):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        run = planc.apply(model, "llama", device_type="cpu", compare=0)
        try:
            getattr(run, step)([data([0]), data([] if number else [1])])
        except PlanError as error:
            told[number] = [(d.code, d.message) for d in error.diagnostics]

    assert run_ranks(2, rank, seconds=60) is None
    begin = "up to 1 batches of a rank have no rows in this step; rank"
    assert told == {n: [("PL469", f"{begin} {n} passes {n}")] for n in range(2)}


def test_rows_without_valid_labels_do_not_count():
    """As the help of PL469 says."""
    found = {}
    torch.manual_seed(0)
    models = [LlamaForCausalLM(LlamaConfig(**SIZES)) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    loss = models[2](**data([1, 2])).loss
    loss.backward()
    right = gradients(models[2])

    def rank(number):
        run = planc.apply(
            models[number], "llama", overrides=["param_dtype=fp32"], device_type="cpu", compare=0
        )
        batch = data([0] if number else [1, 2])
        if number:
            batch["labels"][:] = -100
        found[number] = run.forward_backward([batch]), gradients(run.model)

    assert run_ranks(2, rank, seconds=60) is None
    for own, grads in found.values():
        torch.testing.assert_close(own, loss.detach(), rtol=1e-5, atol=1e-6)
        assert max(numerics.error(grads[name], right[name]) for name in right) < 1e-4
