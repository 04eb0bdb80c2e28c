"""The chunked, vocabulary-parallel cross entropy beside torch's on whole logits."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.loss import loss_utils

import planc
from planc.runtime.standalone.loss import LossTerms, chunk_loss, chunked_loss
from planc.simulate.thread_ranks import run_ranks

TERMS = {
    "plain": {},
    "scaled": dict(scale=0.25),
    "capped": dict(softcap=2.0),
    "smoothed": dict(label_smoothing=0.1),
    "z": dict(z_loss=0.01),
    "all": dict(scale=3.0, softcap=4.0, label_smoothing=0.2, z_loss=0.02),
}
TOKENS, FEATURES = 7, 6


def whole(hidden, head, labels, scale=1.0, softcap=None, label_smoothing=0.0, z_loss=0.0):
    """The sum of the tokens' losses."""
    logits = head(hidden) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    counted = labels != -100
    return (loss + z_loss * logits.logsumexp(-1).square() * counted).sum()


def case(vocabulary, bias=True):
    torch.manual_seed(vocabulary)
    head = nn.Linear(FEATURES, vocabulary, bias=bias)
    hidden = torch.randn(TOKENS, FEATURES) * 2
    labels = torch.randint(vocabulary, (TOKENS,))
    labels[2] = -100
    return head, hidden, labels


def gradients(head, hidden, loss):
    (loss * 0.7).backward()
    return [hidden.grad, *(p.grad for p in head.parameters())]


@pytest.mark.parametrize("chunks", [1, 3, 50])
@pytest.mark.parametrize("terms", TERMS)
def test_one_rank(terms, chunks):
    head, hidden, labels = case(11)
    other, mine = copy.deepcopy(head), hidden.clone().requires_grad_()
    hidden.requires_grad_()
    right = whole(hidden, head, labels, **TERMS[terms])
    loss = chunked_loss(other, mine, labels, LossTerms(chunks=chunks, **TERMS[terms]))
    torch.testing.assert_close(loss.view(()), right)
    both = zip(
        gradients(other, mine, loss.view(())),
        gradients(head, hidden, right),
        strict=True,
    )
    for one, two in both:
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize(("ranks", "vocabulary"), [(2, 11), (3, 11), (4, 5), (4, 8)])
def test_a_sharded_vocabulary(ranks, vocabulary, terms, bias):
    """Also one that leaves the last rank fewer entries, or none (5 over 4 ranks)."""
    head, hidden, labels = case(vocabulary, bias)
    hidden.requires_grad_()
    right = whole(hidden, head, labels, **TERMS[terms])
    wanted = gradients(head, hidden, right)
    seen = {}

    def rank(number):
        mesh = init_device_mesh("cpu", (ranks,))
        part = nn.Linear(FEATURES, vocabulary, bias=bias)
        for name, value in head.named_parameters():
            local = distribute_tensor(value.detach().clone(), mesh, [Shard(0)])
            setattr(part, name, nn.Parameter(local))
        mine = DTensor.from_local(hidden.detach().clone(), mesh).requires_grad_()
        loss = chunked_loss(part, mine, labels, LossTerms(chunks=2, **TERMS[terms]))
        loss = loss.full_tensor().view(())
        found = gradients(part, mine, loss)
        seen[number] = [loss.detach(), *(g.full_tensor() for g in found)]

    assert run_ranks(ranks, rank, seconds=60) is None
    for found in seen.values():
        for one, two in zip(found, [right.detach(), *wanted], strict=True):
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize("label", [11, 99, -1, -101])
def test_a_label_outside_the_vocabulary_is_an_error(label):
    """Torch raises as well. A label that no rank holds is not the label of another rank."""
    head, hidden, labels = case(11)
    labels[4] = label
    with pytest.raises(IndexError):
        whole(hidden, head, labels)
    with pytest.raises(RuntimeError, match=r"a label is neither ignored nor in \[0, 11\)"):
        chunked_loss(head, hidden, labels, LossTerms(chunks=2))
    seen = {}

    def rank(number):
        mesh = init_device_mesh("cpu", (2,))
        part = nn.Linear(FEATURES, 11)
        for name, value in head.named_parameters():
            local = distribute_tensor(value.detach().clone(), mesh, [Shard(0)])
            setattr(part, name, nn.Parameter(local))
        try:
            chunked_loss(part, hidden, labels, LossTerms(chunks=2))
        except RuntimeError as error:
            seen[number] = str(error)

    assert run_ranks(2, rank, seconds=60) is None
    assert sorted(seen) == [0, 1] and all("in [0, 11)" in text for text in seen.values())


def test_a_frozen_head_gets_no_gradient():
    head, hidden, labels = case(11)
    head.requires_grad_(False)
    hidden.requires_grad_()
    loss = chunked_loss(head, hidden, labels, LossTerms(chunks=2)).view(())
    found, *none = gradients(head, hidden, loss)
    assert found.abs().sum() > 0 and none == [None, None]


def test_logits_in_bf16_have_a_loss_and_sums_in_fp32():
    head, hidden, labels = case(11)
    head, mine = head.bfloat16(), hidden.bfloat16().requires_grad_()
    loss = chunked_loss(head, mine, labels, LossTerms(chunks=7)).view(())
    assert loss.dtype == torch.float32
    other = copy.deepcopy(head)
    right = cross_entropy(other(mine.detach()).float(), labels, reduction="sum")
    torch.testing.assert_close(loss, right)
    found = gradients(head, mine, loss)
    assert all(g.dtype == torch.bfloat16 for g in found)


def test_autocast_rounds_as_the_head_alone_does():
    head, hidden, labels = case(11)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_loss(head, hidden, labels, LossTerms(chunks=3)).view(())
        right = cross_entropy(head(hidden).float(), labels, reduction="sum")
    torch.testing.assert_close(loss, right)


def model(**changes):
    config = AutoConfig.for_model(
        "llama",
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=37,
        **changes,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def batch():
    tokens = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :6] = -100
    return tokens, labels


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("items", [None, 5, torch.tensor(5)])
def test_a_model(items, tie):
    plain, chunked = model(tie_word_embeddings=tie), model(tie_word_embeddings=tie)
    chunk_loss(chunked.lm_head, chunked, chunks=4)
    tokens, labels = batch()
    extra = {} if items is None else {"num_items_in_batch": items}
    right = plain(input_ids=tokens, labels=labels, **extra)
    output = chunked(input_ids=tokens, labels=labels, **extra)
    assert output.logits is None
    torch.testing.assert_close(output.loss, right.loss)
    right.loss.backward()
    output.loss.backward()
    for one, two in zip(chunked.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
    unlabeled = chunked(input_ids=tokens)
    assert unlabeled.loss is None
    torch.testing.assert_close(unlabeled.logits, plain(input_ids=tokens).logits)


def test_labels_that_are_shifted_already():
    chunked = model()
    chunk_loss(chunked.lm_head, chunked, chunks=4)
    tokens, labels = batch()
    shifted = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], 1)
    one = chunked(input_ids=tokens, labels=labels).loss
    two = chunked(input_ids=tokens, labels=labels, shift_labels=shifted).loss
    torch.testing.assert_close(one, two)


def test_a_failed_call_leaves_nothing_behind():
    chunked = model()
    chunk_loss(chunked.lm_head, chunked, chunks=4)
    tokens, labels = batch()
    with pytest.raises(ValueError, match=r"tokens \[2, 9\] and labels \[2, 5\]"):
        chunked(input_ids=tokens, labels=labels[:, :5])
    assert chunked(input_ids=tokens).logits.shape == (2, 9, 37)


def test_what_it_cannot_give_is_an_error():
    chunked = model()
    chunk_loss(chunked.lm_head, chunked, chunks=4)
    tokens, labels = batch()
    with pytest.raises(ValueError, match="return_dict"):
        chunked(input_ids=tokens, labels=labels, return_dict=False)
    with pytest.raises(RuntimeError, match="a label is neither ignored nor in"):
        chunked(input_ids=tokens, labels=labels, ignore_index=0)  # it does not ignore -1


# A loss of the script ----------------------------------------------------------------------------

PLAN = """plan own for llama

mesh {
    dp_shard = 1
}

loss {
    lm_head : cross_entropy(chunks = 4)
}

fsdp on dp_shard {
    root : unit
}
"""


def of_long_rows(logits, labels, vocab_size, **_):
    """A loss of the script: the squared logarithm of the denominator, of all tokens."""
    return logits.logsumexp(-1).square().mean()


def assigned(target, _monkeypatch):
    target.loss_function = of_long_rows


def partly(target, _monkeypatch):
    target.loss_function = functools.partial(loss_utils.ForCausalLMLoss, ignore_index=0)


def of_another_kind(target, _monkeypatch):
    target.loss_function = loss_utils.ForMaskedLMLoss


def registered(_target, monkeypatch):
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", of_long_rows)


def inside(_target, monkeypatch):
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", of_long_rows)


@pytest.mark.parametrize("change", [assigned, partly, of_another_kind, registered, inside])
def test_a_loss_of_the_script_is_not_replaced(change, tmp_path, monkeypatch):
    target = model()
    change(target, monkeypatch)
    failure = applied(target, tmp_path, lambda run: None)
    assert "PL557" in str(failure.error)
    assert "forward" not in target.lm_head.__dict__


def test_the_loss_of_transformers_may_be_assigned(tmp_path):
    plain, target = model(), model()
    target.loss_function = loss_utils.ForCausalLMLoss
    tokens, labels = batch()
    losses = []
    applied(target, tmp_path, lambda run: losses.append(run.model(tokens, labels=labels).loss))
    torch.testing.assert_close(losses, [plain(tokens, labels=labels).loss])


def applied(target, folder, use):
    """Why a plan cannot be applied or used, or None; on one rank, whose group ends with it."""
    (folder / "own.plan").write_text(PLAN)

    def rank(_number):
        use(planc.apply(target, folder / "own.plan", device_type="cpu", require="nothing"))

    return run_ranks(1, rank, seconds=60)


def test_a_loss_that_a_script_assigns_later_is_an_error():
    """It would get the sum of the losses in place of logits."""
    chunked = model()
    chunk_loss(chunked.lm_head, chunked, chunks=4)
    tokens, labels = batch()
    chunked.loss_function = of_long_rows
    with pytest.raises(ValueError, match="`loss_function` was replaced"):
        chunked(input_ids=tokens, labels=labels)
    assert chunked(input_ids=tokens).logits.shape == (2, 9, 37)
