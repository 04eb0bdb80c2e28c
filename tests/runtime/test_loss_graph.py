"""Means over numbers of values that differ between data ranks are reported for any loss."""

import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parent / "processes"))
import numerics

import planc
from planc.runtime.safeguards import inputs
from planc.runtime.safeguards.loss_graph import weights_of
from planc.simulate.thread_ranks import run_ranks

MASK = torch.tensor([1.0, 1.0, 0.0, 1.0])


def ctc(values):
    """Of two rows: 4 and 3 labels."""
    scores = values.view(5, 2, 2).log_softmax(-1)
    lengths = torch.tensor([5, 5]), torch.tensor([2, 1])
    return functional.ctc_loss(scores, torch.ones(2, 2).long(), *lengths)


def preference(values):
    """DPO: the mean over pairs of rows."""
    chosen, rejected = values.view(4, 5).sum(-1).chunk(2)
    return -functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def divergence(values):
    teacher = torch.full((4, 5), 0.2)
    return functional.kl_div(values.view(4, 5).log_softmax(-1), teacher, reduction="batchmean")


def smoothed(values):
    labels = torch.tensor([1, -100, 2, 0])
    return functional.cross_entropy(values.view(4, 5), labels, label_smoothing=0.1)


@pytest.mark.parametrize(
    ("loss", "count", "total"),
    [
        (lambda x: functional.mse_loss(x, torch.zeros(20)), 20, 1),
        (lambda x: functional.binary_cross_entropy_with_logits(x, torch.ones(20)) / 4, 80, 1),
        (lambda x: (x[:4] * MASK).sum() / MASK.sum(), 3, 1),
        (lambda x: (x[:4] * MASK).sum() * 2 / 7, 7, 2),
        (lambda x: x.abs().mean() * 20 / 50, 1000, 20),
        (lambda x: torch.stack([x[:4].mean(), x[4:8].mean()]).mean(), 16, 2),
        (lambda x: x[:4].mean() + 0.5 * x[4:10].mean(), 10, 1.5),
        (lambda x: -x.mean(0).view(1).squeeze(), 20, 1),
        (lambda x: x.square().sum(), 20, 20),
        (ctc, 2, 1),
        (preference, 2, 1),
        (divergence, 4, 1),
        (smoothed, 6, 0.9 + 0.1 / 5),
    ],
)
def test_the_weights_of_a_loss_are_read_from_its_graph(loss, count, total):
    values = torch.randn(20, requires_grad=True)
    found, weight = weights_of([loss(values)])
    assert (found, found * weight) == pytest.approx((count, total))


class Own(torch.autograd.Function):
    @staticmethod
    def forward(_, value):
        return value.sum()

    @staticmethod
    def backward(_, gradient):
        return gradient


@pytest.mark.parametrize(
    "loss",
    [lambda x: x.mean().exp(), lambda x: 3 / x.sum(), lambda x: x, Own.apply],
)
def test_another_graph_is_not_known(loss):
    assert weights_of([loss(torch.ones(20, requires_grad=True))]) is None
    assert weights_of([torch.ones(())]) is None
    two = torch.ones((), requires_grad=True).sum()
    assert weights_of([two, two]) is None


# On data ranks ------------------------------------------------------------------------------------


def regression(logits, labels):
    """The squared errors of one entry, as of a model of values."""
    counted = labels >= 0
    return (logits[..., 0] - labels / 128).square()[counted]


def distillation(logits, labels):
    teacher = functional.one_hot(labels.clamp(min=0), logits.shape[-1]).float().mul(3).softmax(-1)
    tokens = functional.kl_div((logits / 2).log_softmax(-1), teacher, reduction="none").sum(-1)
    return tokens[labels >= 0]


def reward(logits, labels):
    """DPO's loss of the pairs that have labels."""
    tokens = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -functional.logsigmoid(0.1 * tokens[labels[..., -1] >= 0].sum(-1))


def padding_ignored(logits, labels):
    """A cross entropy that ignores token 0, which pads."""
    given = labels.clamp(min=0).flatten()
    loss = functional.cross_entropy(logits.flatten(0, 1), given, ignore_index=0, reduction="none")
    return loss[given > 0]


def rows_of(data_rank):
    generator = torch.Generator().manual_seed(data_rank)
    tokens = torch.randint(1, 128, (2, 16), generator=generator)
    labels = tokens.clone()
    labels[:, : 3 + 6 * data_rank] = -100
    labels[:data_rank] = -100
    return tokens, labels


@pytest.mark.parametrize("counts", ["own", "all"])
@pytest.mark.parametrize("losses", [regression, distillation, reward, padding_ignored])
def test_a_mean_over_the_values_of_a_rank_is_reported(losses, counts, monkeypatch):
    told, errors = [], {}
    monkeypatch.setattr(inputs, "warning", lambda code, text, *_, **__: told.append((code, text)))
    single, models = numerics.build("llama"), [numerics.build("llama") for _ in range(2)]
    tokens, labels = (torch.cat(pair) for pair in zip(rows_of(0), rows_of(1), strict=True))
    losses(single(input_ids=tokens).logits, labels).mean().backward()
    right = {name: p.grad for name, p in single.named_parameters()}

    def rank(number):
        run = planc.apply(
            models[number],
            "llama",
            overrides=["param_dtype=fp32", "reduce_dtype=fp32"],
            device_type="cpu",
            require="nothing",
            compare=2,
        )
        tokens, labels = rows_of(run.data_rank)
        for _ in range(2):
            run.model.zero_grad()
            values = losses(run.model(input_ids=tokens).logits, labels)
            count = torch.tensor(float(len(values)))
            if counts == "all":
                distributed.all_reduce(count, group=run.data_mesh.get_group())
                count /= 2
            (values.sum() / count).backward()
        named = ((numerics.plain(n), p.grad) for n, p in run.model.named_parameters())
        errors[number] = max(numerics.error(numerics.whole(g), right[n]) for n, g in named)

    failure = run_ranks(2, rank, seconds=60)
    assert failure is None, failure and (failure.error or failure.message)
    assert [code for code, _ in told] == (["PL478"] * 2 if counts == "own" else [])
    assert max(errors.values()) > 1e-2 if counts == "own" else max(errors.values()) < 1e-4


class Values(nn.Module):
    """Predicts one number for each row, as a model of rewards."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.score = nn.Linear(8, 1)

    def forward(self, rows, labels):
        logits = self.score(self.blocks[0](rows).tanh())
        return {"loss": functional.mse_loss(logits.squeeze(-1), labels), "logits": logits}


@pytest.mark.parametrize("sizes", [(3, 5), (4, 4)])
def test_a_mean_over_rows_of_a_rank_is_reported(sizes, tmp_path, monkeypatch):
    told, (plan, models) = [], (tmp_path / "own.plan", [Values() for _ in range(2)])
    monkeypatch.setattr(inputs, "warning", lambda code, text, *_, **__: told.append(text))
    plan.write_text(
        "plan own for Values\n\nmesh {\n    dp_shard = 2\n}\n\nfsdp on dp_shard {\n"
        "    precision(param = fp32, reduce = fp32)\n    root : unit(reshard = never)\n}\n"
    )

    def rank(number):
        options = {"device_type": "cpu", "require": "nothing", "compare": 2}
        run = planc.apply(models[number], plan, **options)
        rows = torch.randn(sizes[run.data_rank], 8)
        for _ in range(2):
            run.model(rows=rows, labels=rows[:, 0])["loss"].backward()

    models[1].load_state_dict(models[0].state_dict())
    failure = run_ranks(2, rank, seconds=60)
    assert failure is None, failure and (failure.error or failure.message)
    assert [text[:54] for text in told] == 2 * (sizes == (3, 5)) * [
        "the loss of training pass 1 is a mean over 3 to 5 valu"
    ]
